"""Perplexity of a causal language model on records that it was not trained on, with an interval over the records."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tfdp.errors import DataError
from tfdp.evaluation.intervals import RESAMPLES, percentile_interval
from tfdp.sampling.records import as_records

_MOST_COUNTS_IN_MEMORY = 1 << 24


@dataclasses.dataclass(frozen=True)
class Perplexity:
    """What a model makes of a set of records.

    Attributes:
        losses: summed negative log likelihood of each record, in nats.
        tokens: number of predicted tokens of each record.
        num_bytes: number of bytes of text that those tokens stand for; None where the tokenizer is not byte-level.
    """

    losses: np.ndarray
    tokens: np.ndarray
    num_bytes: np.ndarray | None = None

    @property
    def num_records(self) -> int:
        return len(self.losses)

    @property
    def loss(self) -> float:
        """Mean negative log likelihood of a token, in nats."""
        return float(self.losses.sum() / self.tokens.sum())

    @property
    def perplexity(self) -> float:
        """The exponential of the mean loss of a token; comparable only between models with the same tokenizer."""
        return _exponential(self.loss)

    @property
    def bits_per_byte(self) -> float:
        """Bits needed for one byte of the text; comparable between tokenizers."""
        if self.num_bytes is None:
            raise DataError(
                "Expected to know how many bytes each token stands for. Received: records without a byte-level "
                "tokenizer. Pass tokenizer=... to perplexity()."
            )
        return float(self.losses.sum() / math.log(2.0) / self.num_bytes.sum())

    def interval(
        self, confidence: float = 0.95, *, resamples: int = RESAMPLES, seed: int = 0
    ) -> tuple[float, float] | None:
        """A percentile bootstrap interval of the perplexity: whole records are drawn again, since they are what varies.

        It says how far another set of as many records might come out, for this one model. None for fewer than two
        records. The seed fixes the resampling, so that a card can be made again.
        """
        count = self.num_records
        if count < 2:
            return None
        generator = np.random.default_rng(seed)
        probabilities = np.full(count, 1.0 / count)
        losses: list[np.ndarray] = []
        done = 0
        while done < resamples:
            size = min(resamples - done, max(1, _MOST_COUNTS_IN_MEMORY // count))
            counts = generator.multinomial(count, probabilities, size=size)
            losses.append((counts @ self.losses) / (counts @ self.tokens))
            done += size
        low, high = percentile_interval(np.concatenate(losses), confidence)
        return _exponential(low), _exponential(high)


def perplexity(
    model: Any,
    records: Any,
    *,
    tokenizer: Any = None,
    batch_size: int = 32,
    on_batch: Callable[[int], None] | None = None,
) -> Perplexity:
    """Evaluates `model` without touching its compile state, dropout off.

    Args:
        model: a KerasHub causal language model, or anything that maps token_ids and padding_mask to logits.
        records: `(x, y, sample_weight)` arrays as a KerasHub preprocessor gives them, or 1-D token arrays, of which
            every token but the first is predicted.
        tokenizer: gives the bytes of each token; by default that of the model's preprocessor, if it is byte-level.
        batch_size: records per forward pass; the last batch is filled up, so that nothing is traced twice.
        on_batch: is called after each batch with its number of records.

    Raises:
        DataError: no records, or one in which there is nothing to predict.
    """
    import tensorflow as tf

    x, y, weight = records if isinstance(records, tuple) else _stacked(records)
    y, weight = np.asarray(y), np.asarray(weight, np.float32)
    if len(y) == 0 or not np.all(weight.sum(axis=1) > 0):
        raise _too_short()

    @tf.function(reduce_retracing=True)
    def record_losses(inputs: Any, targets: Any, weights: Any) -> Any:
        logits = tf.cast(model(inputs, training=False), tf.float32)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(targets, logits)
        return tf.reduce_sum(losses * weights, axis=1)

    losses = []
    for start in range(0, len(y), batch_size):
        rows = np.minimum(np.arange(start, start + batch_size), len(y) - 1)
        batch = tf.nest.map_structure(lambda leaf, rows=rows: tf.constant(np.asarray(leaf)[rows]), (x, y, weight))
        losses.append(record_losses(*batch).numpy()[: len(y) - start])
        if on_batch is not None:
            on_batch(len(losses[-1]))
    if tokenizer is None:
        tokenizer = getattr(getattr(model, "preprocessor", None), "tokenizer", None)
    sizes = None if tokenizer is None else token_bytes(tokenizer)
    return Perplexity(
        losses=np.concatenate(losses).astype(np.float64),
        tokens=weight.sum(axis=1, dtype=np.float64),
        num_bytes=None if sizes is None else (sizes[y] * (weight > 0)).sum(axis=1),
    )


def token_bytes(tokenizer: Any) -> np.ndarray | None:
    """Number of bytes of text that each id of a byte-level tokenizer stands for; None for other tokenizers.

    A special token stands for none.
    """
    if not hasattr(tokenizer, "merges"):
        return None
    special = set(tokenizer.special_tokens)
    sizes = np.zeros(tokenizer.vocabulary_size(), np.int64)
    for token in tokenizer.get_vocabulary():
        # In a byte-level vocabulary every character is one byte.
        sizes[tokenizer.token_to_id(token)] = 0 if token in special else len(token)
    return sizes


def perplexity_metric(
    private: Perplexity,
    *,
    public: Perplexity | None = None,
    non_private: Perplexity | None = None,
    split: str = "held-out",
) -> dict[str, Any]:
    """One row of `evaluation["metrics"]` of `tfdp.export`; the interval is that of the private model."""
    others: Mapping[str, Perplexity | None] = {"public": public, "non_private": non_private}
    interval = private.interval()
    return {
        "name": "perplexity",
        "split": split,
        "private": private.perplexity,
        "interval": interval if interval is not None and all(map(math.isfinite, interval)) else None,
        "n": private.num_records,
        **{name: value.perplexity for name, value in others.items() if value is not None},
    }


def _exponential(loss: float) -> float:
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def _stacked(records: Sequence[np.ndarray]) -> tuple[Any, Any, Any]:
    """Token arrays as padded `(x, y, sample_weight)`."""
    if min(map(len, records), default=0) < 2:
        raise _too_short()
    length = max(map(len, records)) - 1
    taken = as_records(list(records), sequence_length=length).take(np.arange(len(records)))
    return taken["x"], taken["y"], taken["sample_weight"]


def _too_short() -> DataError:
    return DataError("Expected records of at least two tokens. Received: none, or a shorter one. Drop empty texts.")
