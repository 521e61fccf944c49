"""The clip factor of a unit.

With per-unit gradient g over all trainable variables together, clip norm C and weight w in {0, 1}:

| unit                    | factor              |
|-------------------------|---------------------|
| norm <= C               | w                   |
| norm > C                | w * C / norm        |
| norm < 1e-15            | 0, and contributes 0|
| not finite (NaN or inf) | 0, and contributes 0|
| padding (w = 0)         | 0, and contributes 0|

so that one unit moves the sum by at most C in L2 (Abadi et al. 2016, Algorithm 1).

Norms are float32, so the ends of its range are closed: a gradient whose factors (inputs and output gradients of a
kernel) have a norm above 1e15 counts as not finite, C is at least 1e-6, and where the terms of a gradient cancel, its
norm includes what rounding may leave of them in the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfdp.errors import GradientError

SMALLEST_CLIP_NORM = 1e-6
# Below this squared norm the squares of float32 no longer tell what the norm is.
SMALLEST_SQUARED_NORM = 1e-30


class Factors(NamedTuple):
    """Clip factors of a microbatch.

    Attributes:
        values: [units] float32.
        all_finite: scalar bool; when true, a plain product with a factor of 0 is exactly 0.
    """

    values: Any
    all_finite: Any


def clip_factors(squared_norms: Any, clip_norm: float, unit_weight: Any) -> tuple[Factors, Any]:
    """Factor that scales each unit's gradient.

    Args:
        squared_norms: [units] float32.
        clip_norm: C, at least `SMALLEST_CLIP_NORM`.
        unit_weight: [units], 1 for a unit and 0 for padding.

    Returns:
        (factors, norms [units]); the norm of padding is 0, that of a non-finite unit NaN or inf.
    """
    if clip_norm < SMALLEST_CLIP_NORM:
        raise GradientError(f"Expected clip_norm >= {SMALLEST_CLIP_NORM}. Received: clip_norm={clip_norm!r}.")
    norms = tf.sqrt(squared_norms)
    finite = tf.math.is_finite(norms)
    taken = tf.logical_and(tf.logical_and(finite, squared_norms >= SMALLEST_SQUARED_NORM), unit_weight > 0)
    values = tf.where(taken, clip_norm / tf.maximum(norms, clip_norm), 0.0)
    return Factors(values, tf.reduce_all(finite)), tf.where(unit_weight > 0, norms, 0.0)


def _along(values: Any, factors: Factors) -> Any:
    return tf.reshape(factors.values, [-1] + [1] * (len(values.shape) - 1))


def scaled(values: Any, factors: Factors) -> Any:
    """`values` [units, ...] times the factors, exactly 0 where the factor is 0 (0 * NaN is NaN)."""
    factor = _along(values, factors)
    return tf.where(factor > 0, values * factor, 0.0)


def kept(values: Sequence[Any], factors: Factors) -> list[Any]:
    """Each of `values` [units, ...] as it is, but 0 where the factor is 0 if anything in the microbatch is not finite.

    For the large operand of a product whose other operand is `scaled`: without a NaN there is nothing to mask. All in
    one branch: every branch that is built costs about a megabyte.
    """
    if not values:
        return []

    def masked() -> list[Any]:
        return [tf.where(_along(value, factors) > 0, value, 0.0) for value in values]

    result = tf.cond(factors.all_finite, lambda: list(values), masked)
    return list(result) if isinstance(result, (list, tuple)) else [result]
