"""Bare token sequences, shifted by one into inputs and targets as KerasHub's causal language models want them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tfdp.errors import DataError
from tfdp.sampling.structures import Array, Indices, Leaf, Structure, read_item

_MAX_TOKEN = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class TokenOptions:
    """How token sequences become records of one shape.

    Attributes:
        sequence_length: the length of x and y, a public number; None where all sequences have one length.
        pad_value: the token that fills short sequences.
    """

    sequence_length: int | None = None
    pad_value: int = 0

    def __post_init__(self) -> None:
        if self.sequence_length is not None and self.sequence_length < 1:
            raise DataError(
                f"Expected a sequence length of at least 1. Received: sequence_length={self.sequence_length}. "
                "It is the number of tokens that the model sees of a record."
            )
        if not 0 <= self.pad_value <= _MAX_TOKEN:
            raise DataError(
                f"Expected a padding token between 0 and 2**31 - 1. Received: pad_value={self.pad_value}. "
                "Pass the tokenizer's pad_token_id."
            )

    def are_tokens(self, leaf: Any, *, axes_before: int = 0) -> bool:
        """Whether `leaf` is the token array of a record, or of many with `axes_before` = 1."""
        # An empty list has no integer dtype of its own.
        integers = isinstance(leaf, np.ndarray) and (leaf.dtype.kind in "iu" or leaf.size == 0)
        return integers and leaf.ndim == axes_before + 1

    def refuse_sequence_length(self) -> None:
        """Other records than bare tokens have their own shapes: a length would be ignored."""
        if self.sequence_length is not None:
            raise DataError(
                "Expected no sequence_length, because these records are not bare token sequences. "
                f"Received: sequence_length={self.sequence_length}. Cut and pad the records before, or pass bare "
                "tokens."
            )


class TokenRecords:
    """Records {"x": {"token_ids", "padding_mask"}, "y", "sample_weight"} from bare token sequences.

    The first `sequence_length` + 1 tokens of a sequence are used: all but the last are read, all but the first are
    predicted. `sample_weight` is 1 where y is a token of the sequence and 0 where it is padding.

    Args:
        source: an integer array [records, tokens]; or a list, read and checked now; or a random-access source, read
            and checked when a record is drawn.
        options: see `TokenOptions`.

    Raises:
        DataError: sequences of different lengths without `sequence_length`, or something that is not a token sequence.
    """

    def __init__(self, source: Any, options: TokenOptions):
        self._options = options
        self._length = len(source)
        self._lengths: Indices | None = None
        if isinstance(source, list):
            rows = [self._checked(read_item(source, index), index) for index in range(len(source))]
            self._lengths = np.array([len(row) for row in rows], dtype=np.int64)
            self._starts = np.cumsum(self._lengths) - self._lengths
            source = np.concatenate(rows)
            sizes = set(self._lengths.tolist())
        elif isinstance(source, np.ndarray):
            sizes = {source.shape[-1]}
        else:
            sizes = {self._checked(read_item(source, 0), 0).shape[-1]}
        self._source = source
        self._width = self._choose_width(sizes)
        self.template = token_template((self._width - 1,))

    def __len__(self) -> int:
        return self._length

    @property
    def lengths(self) -> Indices | None:
        """[records] tokens of each record; None for a source that would have to be read for it."""
        if self._lengths is None and isinstance(self._source, np.ndarray):
            return np.full(len(self), self._source.shape[-1], np.int64)
        return self._lengths

    def take(self, indices: Indices, rows: int | None = None) -> dict[str, Structure]:
        """Reads the records at `indices`; see `structures.Records`."""
        count = len(indices) if rows is None else rows
        tokens = np.full((count, self._width), self._options.pad_value, np.int32)
        real = np.zeros(tokens.shape, np.bool_)
        if len(indices):
            self._read(indices, tokens, real)
        return token_batch(tokens, real)

    def _read(self, indices: Indices, tokens: Array, real: Array) -> None:
        """Writes the sequences into the first rows of `tokens` and marks them in `real`."""
        count = len(indices)
        if self._lengths is not None:
            column = np.arange(self._width)
            inside = column < self._lengths[indices][:, None]
            place = np.where(inside, self._starts[indices][:, None] + column, 0)
            if len(self._source):
                np.copyto(tokens[:count], self._source[place], where=inside)
            real[:count] = inside
        elif isinstance(self._source, np.ndarray):
            taken = self._source[indices, : self._width]
            too_large = np.flatnonzero(_beyond_int32(taken).any(axis=1))
            if too_large.size:
                raise _token_too_large(int(indices[too_large[0]]))
            tokens[:count, : taken.shape[1]] = taken
            real[:count, : taken.shape[1]] = True
        else:
            for row, index in enumerate(indices.tolist()):
                record = self._checked(read_item(self._source, index), index)
                if self._options.sequence_length is None and len(record) != self._width:
                    raise DataError(
                        f"Expected record {index} to have the length of record 0. Received: another length. "
                        "Pass sequence_length=..., a public number: longer records are cut and shorter ones padded."
                    )
                size = min(len(record), self._width)
                tokens[row, :size] = record[:size]
                real[row, :size] = True

    def _checked(self, record: dict[str, Structure], index: int) -> Array:
        """The tokens of one record as int32."""
        tokens = record["x"]
        if set(record) != {"x"} or not self._options.are_tokens(tokens):
            raise DataError(
                f"Expected record {index} to be a sequence of integer tokens like record 0. Received: something else. "
                "Give every record the same form."
            )
        if _beyond_int32(tokens).any():
            raise _token_too_large(index)
        return np.asarray(tokens.astype(np.int32, copy=False))

    def _choose_width(self, sizes: set[int]) -> int:
        if self._options.sequence_length is not None:
            return self._options.sequence_length + 1
        if len(sizes) > 1:
            raise DataError(
                "Expected token records of one length, or a sequence_length. Received: records of different lengths. "
                "Pass sequence_length=..., a public number: longer records are cut and shorter ones padded."
            )
        (size,) = sizes
        if size < 2:
            raise DataError(
                "Expected token records of at least 2 tokens, one to read and one to predict. "
                f"Received: records of length {size}. Leave such records out, or pass sequence_length."
            )
        return size


def token_template(shape: tuple[int, ...]) -> dict[str, Structure]:
    """The template of token records whose x and y have this shape."""
    return {
        "x": {
            "token_ids": Leaf("x/token_ids", shape, np.dtype(np.int32)),
            "padding_mask": Leaf("x/padding_mask", shape, np.dtype(np.bool_)),
        },
        "y": Leaf("y", shape, np.dtype(np.int32)),
        "sample_weight": Leaf("sample_weight", shape, np.dtype(np.float32)),
    }


def token_batch(tokens: Array, real: Array) -> dict[str, Structure]:
    """All tokens but the last are read, all but the first are predicted.

    Args:
        tokens: int32 [..., length + 1].
        real: bool of the same shape, False for padding.
    """
    return {
        "x": {"token_ids": tokens[..., :-1], "padding_mask": real[..., :-1]},
        "y": tokens[..., 1:],
        "sample_weight": real[..., 1:].astype(np.float32),
    }


def checked_tokens(record: Any, index: int) -> Array:
    """One record of any length as int32; raises DataError where it is no token sequence."""
    tokens = read_item({index: record}, index)
    sequence = tokens["x"]
    if set(tokens) != {"x"} or not TokenOptions().are_tokens(sequence):
        raise DataError(
            f"Expected record {index} to be a sequence of integer tokens. Received: something else. "
            "A random chunk is cut from token sequences: pass every record as one."
        )
    if _beyond_int32(sequence).any():
        raise _token_too_large(index)
    return np.asarray(sequence.astype(np.int32, copy=False))


def _beyond_int32(tokens: Array) -> Array:
    if np.can_cast(tokens.dtype, np.int32):
        return np.zeros(tokens.shape, np.bool_)
    return np.asarray((tokens > _MAX_TOKEN) | (tokens < 0))


def _token_too_large(index: int) -> DataError:
    return DataError(
        f"Expected token numbers between 0 and 2**31 - 1. Received: another in record {index}. Check the tokenizer."
    )
