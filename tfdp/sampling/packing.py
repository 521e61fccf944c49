"""Token lists of any length as sequences of one length: packed together, or each document cut into pieces.

| function          | privacy unit               | hides                 | does not hide                               |
|-------------------|----------------------------|-----------------------|---------------------------------------------|
| `pack_sequences`  | a sequence, after packing  | what stands in one    | a document that reaches into others         |
| `split_documents` | a document, all its pieces | one document, whole   | a person with several documents             |

Neither hides a person with several sequences or documents. Packing is done before sampling, and the claim compares data
sets of packed sequences that differ in one of them: to add or remove a document would move the tokens of all that
follow. VaultGemma states its guarantee for such sequences (Google, 2025). Pieces of a document carry its id, so that as
records of one unit they are sampled and clipped as those of a user with several records are.

Every token is in exactly one piece, in its order. As a record of a language model a piece of L tokens is read as L - 1
inputs and L - 1 targets (see `tfdp.sampling.tokens`): its first token is read and not predicted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tfdp.errors import DataError

_MAX_TOKEN = 2**31 - 1
_Tokens = npt.NDArray[np.int32]


@dataclasses.dataclass(frozen=True, eq=False)
class TokenPieces:
    """Sequences of one length, and the privacy unit of each.

    Attributes:
        tokens: int32 [pieces, length]; the padding token where `real` is false, always at the end.
        real: bool [pieces, length].
        unit_ids: [pieces] the unit of each: its own number for packed sequences, the id of its document for pieces.
        unit_kind: "sequence" or "document", as in `claim.privacy_unit.kind` of a spec.
    """

    tokens: _Tokens = dataclasses.field(repr=False)
    real: npt.NDArray[np.bool_] = dataclasses.field(repr=False)
    unit_ids: npt.NDArray[Any] = dataclasses.field(repr=False)
    unit_kind: str

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, indices: npt.NDArray[np.int64]) -> TokenPieces:
        """The pieces at `indices`, in that order."""
        return dataclasses.replace(
            self, tokens=self.tokens[indices], real=self.real[indices], unit_ids=self.unit_ids[indices]
        )

    def records(self) -> tuple[dict[str, npt.NDArray[Any]], _Tokens, npt.NDArray[np.float32]]:
        """`(x, y, sample_weight)` for `tfdp.poisson_batches`, each [pieces, length - 1].

        x holds "token_ids" and "padding_mask"; y is the next token; the weight is 1 where y is a token and 0 where it
        is padding.
        """
        x = {"token_ids": self.tokens[:, :-1], "padding_mask": self.real[:, :-1]}
        return x, self.tokens[:, 1:], self.real[:, 1:].astype(np.float32)


def pack_sequences(
    documents: Iterable[Sequence[int]],
    length: int,
    *,
    separator: int | None = None,
    pad_value: int = 0,
    drop_remainder: bool = False,
) -> TokenPieces:
    """Joins documents, in their order, and cuts the result every `length` tokens. The unit is the sequence.

    Args:
        documents: token lists; empty ones are left out.
        length: tokens of a sequence, public; one more than the model reads.
        separator: is put after every document, also the last: the tokenizer's end-of-text token.
        pad_value: fills the last sequence.
        drop_remainder: leave out what does not fill a sequence; else the last one is padded.

    Raises:
        DataError: a length below 2, or what is not a list of tokens.
    """
    _check(length, pad_value, separator)
    parts = [part for number, document in enumerate(documents) if len(part := _tokens(document, number))]
    if separator is not None:
        end = np.array([separator], np.int32)
        parts = [piece for part in parts for piece in (part, end)]
    stream = np.concatenate(parts) if parts else np.zeros(0, np.int32)
    if drop_remainder:
        stream = stream[: len(stream) // length * length]
    count = -(-len(stream) // length)
    tokens, real = _rows([stream], length, pad_value, count)
    return TokenPieces(tokens, real, np.arange(count, dtype=np.int64), "sequence")


def split_documents(
    documents: Iterable[Sequence[int]],
    length: int,
    *,
    document_ids: Iterable[Any] | None = None,
    pad_value: int = 0,
) -> TokenPieces:
    """Cuts every document into pieces of `length` tokens, the last one padded. The unit is the document.

    Args:
        documents: token lists; empty ones have no piece.
        length: tokens of a piece, public; one more than the model reads.
        document_ids: the name of each document, a number or a text; by default its number. Documents of one name are
            one unit.
        pad_value: fills the last piece of a document.

    Raises:
        DataError: a length below 2, what is not a list of tokens, or another number of ids than of documents.
    """
    _check(length, pad_value, None)
    parts = [_tokens(document, number) for number, document in enumerate(documents)]
    ids = list(range(len(parts)) if document_ids is None else document_ids)
    if len(ids) != len(parts):
        raise DataError(
            f"Expected one id for each document. Received: {len(ids)} ids for {len(parts)} documents. Pass both in the "
            "same order."
        )
    pieces = [-(-len(part) // length) for part in parts]
    tokens, real = _rows(parts, length, pad_value, sum(pieces))
    return TokenPieces(tokens, real, np.repeat(np.array(ids), pieces), "document")


def _rows(parts: Sequence[_Tokens], length: int, pad_value: int, count: int) -> tuple[_Tokens, npt.NDArray[np.bool_]]:
    tokens = np.full((count, length), pad_value, np.int32)
    real = np.zeros((count, length), np.bool_)
    row = 0
    for part in parts:
        rows = -(-len(part) // length)
        tokens[row : row + rows].reshape(-1)[: len(part)] = part
        real[row : row + rows].reshape(-1)[: len(part)] = True
        row += rows
    return tokens, real


def _tokens(document: Sequence[int], number: int) -> _Tokens:
    array = np.asarray(document)
    integers = array.dtype.kind in "iu" or array.size == 0
    if not integers or array.ndim != 1 or (array.size and not 0 <= int(array.min()) <= int(array.max()) <= _MAX_TOKEN):
        raise DataError(
            f"Expected document {number} to be a list of token numbers between 0 and 2**31 - 1. Received: something "
            "else. Tokenize texts before."
        )
    return array.astype(np.int32)


def _check(length: int, pad_value: int, separator: int | None) -> None:
    if length < 2:
        raise DataError(
            f"Expected a length of at least 2, a token to read and one to predict. Received: length={length}."
        )
    for name, value in (("pad_value", pad_value), ("separator", separator)):
        if value is not None and not 0 <= value <= _MAX_TOKEN:
            raise DataError(f"Expected a token between 0 and 2**31 - 1. Received: {name}={value}. Ask the tokenizer.")
