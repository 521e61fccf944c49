"""Held-out perplexity of a causal language model on token records, with an interval over the units."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdp.errors import DataError


@dataclasses.dataclass(frozen=True)
class Perplexity:
    """What a model makes of a set of records.

    Attributes:
        losses: summed negative log likelihood of each record, in nats.
        tokens: number of predicted tokens of each record.
        num_bytes: number of bytes of text that those tokens stand for.
    """

    losses: np.ndarray
    tokens: np.ndarray
    num_bytes: np.ndarray

    @property
    def loss(self) -> float:
        """Mean negative log likelihood of a token, in nats."""
        return float(self.losses.sum() / self.tokens.sum())

    @property
    def perplexity(self) -> float:
        """The exponential of the mean loss of a token; comparable only between models with the same tokenizer."""
        return math.exp(self.loss)

    @property
    def bits_per_byte(self) -> float:
        """Bits needed for one byte of the text; comparable between tokenizers."""
        return float(self.losses.sum() / math.log(2.0) / self.num_bytes.sum())

    def interval(self, z: float = 1.96) -> tuple[float, float]:
        """A normal interval of the perplexity (95% at the default z), the records being the independent units."""
        count = len(self.losses)
        residuals = self.losses - self.loss * self.tokens
        error = math.sqrt(count / max(1, count - 1) * float(np.sum(residuals**2))) / float(self.tokens.sum())
        return math.exp(self.loss - z * error), math.exp(self.loss + z * error)


def perplexity(model: Any, records: Sequence[np.ndarray], *, tokenizer: Any = None, batch_size: int = 32) -> Perplexity:
    """Evaluates `model` without touching its compile state, dropout off.

    Args:
        model: a KerasHub causal language model, or anything that maps token_ids and padding_mask to logits.
        records: 1-D token arrays as `token_records` makes them.
        tokenizer: gives the bytes of each token; by default that of the model's preprocessor.
        batch_size: records per forward pass; every batch is padded to the longest record of all.
    """
    import tensorflow as tf

    if not records or min(len(record) for record in records) < 2:
        raise DataError("Expected records of at least two tokens. Received: none, or a shorter one. Drop empty texts.")
    if tokenizer is None:
        preprocessor = getattr(model, "preprocessor", None)
        if preprocessor is None:
            raise DataError(
                "Expected a model with a preprocessor, or a tokenizer. Received: neither. Pass tokenizer=..., "
                "it is needed for the number of bytes."
            )
        tokenizer = preprocessor.tokenizer
    length = max(len(record) for record in records)
    sizes = token_bytes(tokenizer)

    @tf.function(reduce_retracing=True)
    def record_losses(tokens: Any, mask: Any) -> Any:
        logits = model({"token_ids": tokens[:, :-1], "padding_mask": mask[:, :-1]}, training=False)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tokens[:, 1:], tf.cast(logits, tf.float32))
        return tf.reduce_sum(losses * tf.cast(mask[:, 1:], tf.float32), axis=1)

    losses = []
    for start in range(0, len(records), batch_size):
        batch = records[start : start + batch_size]
        tokens = np.zeros((batch_size, length), np.int32)
        mask = np.zeros((batch_size, length), np.int32)
        for row, record in enumerate(batch):
            tokens[row, : len(record)] = record
            mask[row, : len(record)] = 1
        losses.append(record_losses(tf.constant(tokens), tf.constant(mask)).numpy()[: len(batch)])
    return Perplexity(
        losses=np.concatenate(losses).astype(np.float64),
        tokens=np.array([len(record) - 1 for record in records]),
        num_bytes=np.array([int(sizes[record[1:]].sum()) for record in records]),
    )


def token_bytes(tokenizer: Any) -> np.ndarray:
    """Number of bytes of text that each id of a byte-level tokenizer stands for; a special token stands for none."""
    special = set(tokenizer.special_tokens)
    sizes = np.zeros(tokenizer.vocabulary_size(), np.int64)
    for token in tokenizer.get_vocabulary():
        # In a byte-level vocabulary every character is one byte.
        sizes[tokenizer.token_to_id(token)] = 0 if token in special else len(token)
    return sizes
