"""What `poisson_batches` is given so that texts are trained on under a claim about whole units."""

from __future__ import annotations

from typing import Any

import numpy as np

from tfdp.errors import DataError
from tfdp.evaluation import perplexity
from tfdp.plan import Plan
from tfdp.sampling.claims import claims_whole_unit
from tfdp.sampling.packing import TokenPieces, pack_sequences, split_documents
from tfdp.sampling.selection import BY_LENGTH, BY_PERPLEXITY, RANDOM_CHUNK
from tfdp.spec.fields import PrivacyUnit
from tfdp.workflow.language_models import encode_texts
from tfdp.workflow.records import TextRecords


def records_for(plan: Plan, model: Any, records: TextRecords, sequence_length: int) -> tuple[Any, dict[str, Any]]:
    """Texts as `(records, options)` for `poisson_batches(records, plan, **options)`.

    | privacy unit                      | what a record is                                                           |
    |-----------------------------------|----------------------------------------------------------------------------|
    | an example; a user; k = 1         | the beginning of a text, `sequence_length` tokens                          |
    | a sequence                        | a piece of all texts, packed                                               |
    | a document, k > 1                 | a piece of one of its texts, each cut from end to end; k of them stay      |
    | a document or a user, random_chunk | a text, whole: the sampler cuts a span from all texts of a unit           |

    Args:
        plan: says what a unit is, and which of its records stay.
        model: a KerasHub causal language model with its preprocessor and with public weights: a selection by perplexity
            asks it.
        records: one text per record.
        sequence_length: tokens of a record, or of one slot of a random chunk.
    """
    unit = plan.privacy_unit
    if unit.kind == "sequence":
        return packed(model, records, sequence_length).records(), {}
    if not claims_whole_unit(unit):
        return encode_texts(model, records.texts, sequence_length), {}
    options: dict[str, Any] = {"unit_ids": records.unit_ids}
    if unit.selection == RANDOM_CHUNK:
        special = _special_tokens(model)
        options |= {"sequence_length": sequence_length, **special}
        return _tokens(model, records), options
    arrays: Any
    if splits_documents(unit):
        pad = _special_tokens(model)["pad_value"]
        pieces = split_documents(
            _tokens(model, records), sequence_length + 1, document_ids=records.unit_ids, pad_value=pad
        )
        used = pieces.real[:, 1].copy()  # a piece of one token has nothing to predict,
        used[np.unique(pieces.unit_ids, return_index=True)[1]] = True  # but no document may vanish
        pieces = pieces.take(np.flatnonzero(used))
        arrays, options["unit_ids"] = pieces.records(), pieces.unit_ids
        lengths = pieces.real.sum(1)
    else:
        arrays = encode_texts(model, records.texts, sequence_length)
        lengths = np.array([len(text) for text in records.texts])  # of the whole text, not of what is used of it
    if unit.selection in BY_LENGTH:
        options["scores"] = lengths
    elif unit.selection in BY_PERPLEXITY:
        options["scores"] = record_perplexities(model, arrays)
    return arrays, options


def splits_documents(unit: PrivacyUnit) -> bool:
    """Whether the records of a unit are pieces of its texts, and not the texts."""
    return unit.kind == "document" and unit.method != "native" and unit.selection != RANDOM_CHUNK


def packed(model: Any, records: TextRecords, sequence_length: int) -> TokenPieces:
    """All texts, one after the other, as sequences that the model reads `sequence_length` tokens of.

    Args:
        model: a KerasHub causal language model with its preprocessor; its end token stands after every text.
        records: one text per record.
        sequence_length: tokens that are read; the one after them is predicted.
    """
    return pack_sequences(_tokens(model, records), sequence_length + 1, **_special_tokens(model))


def _tokens(model: Any, records: TextRecords) -> list[Any]:
    tokenizer = model.preprocessor.tokenizer
    return [np.asarray(tokenizer(text), np.int32) for text in records.texts]


def _special_tokens(model: Any) -> dict[str, Any]:
    tokenizer = model.preprocessor.tokenizer
    return {
        "pad_value": getattr(tokenizer, "pad_token_id", None) or 0,
        "separator": getattr(tokenizer, "end_token_id", None),
    }


def record_perplexities(model: Any, arrays: Any) -> np.ndarray:
    """[records] perplexity of each record under `model`, which must be public: it has not seen private data.

    The values look at one record each, so they may choose among the records of a unit. Shown to anybody they are exact
    statistics of private data.

    Args:
        model: as for `tfdp.evaluation.perplexity`.
        arrays: `(x, y, sample_weight)`.

    Raises:
        DataError: a record without anything to predict.
    """
    found = perplexity(model, arrays)
    with np.errstate(over="ignore"):
        values = np.exp(found.losses / found.tokens)
    if np.isnan(values).any():
        raise DataError(
            f"Expected a perplexity of every record. Received: none for {int(np.isnan(values).sum())} of them. "
            "Check the weights of the public model."
        )
    return values
