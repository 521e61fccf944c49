"""What `poisson_batches` is given so that texts are trained on under a claim about whole units."""

from __future__ import annotations

from typing import Any

import numpy as np

from tfdp.errors import DataError
from tfdp.evaluation import perplexity
from tfdp.plan import Plan
from tfdp.sampling.claims import claims_whole_unit
from tfdp.sampling.selection import BY_LENGTH, BY_PERPLEXITY, RANDOM_CHUNK
from tfdp.workflow.language_models import encode_texts
from tfdp.workflow.records import TextRecords


def records_for(plan: Plan, model: Any, records: TextRecords, sequence_length: int) -> tuple[Any, dict[str, Any]]:
    """Texts as `(records, options)` for `poisson_batches(records, plan, **options)`.

    Args:
        plan: says what a unit is, and which of its records stay.
        model: a KerasHub causal language model with its preprocessor and with public weights: a selection by perplexity
            asks it.
        records: one text per record.
        sequence_length: tokens of a record, or of one slot of a random chunk.
    """
    unit = plan.privacy_unit
    if not claims_whole_unit(unit):
        return encode_texts(model, records.texts, sequence_length), {}
    options: dict[str, Any] = {"unit_ids": records.unit_ids}
    if unit.selection == RANDOM_CHUNK:
        tokenizer = model.preprocessor.tokenizer
        options |= {
            "sequence_length": sequence_length,
            "pad_value": getattr(tokenizer, "pad_token_id", None) or 0,
            "separator": getattr(tokenizer, "end_token_id", None),
        }
        return [np.asarray(tokenizer(text), np.int32) for text in records.texts], options
    arrays = encode_texts(model, records.texts, sequence_length)
    if unit.selection in BY_LENGTH:
        options["scores"] = [len(text) for text in records.texts]  # of the whole text, not of what is used of it
    elif unit.selection in BY_PERPLEXITY:
        options["scores"] = record_perplexities(model, arrays)
    return arrays, options


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
