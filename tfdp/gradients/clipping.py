"""The clip factor of a unit.

With per-unit gradient g over all trainable variables together, clip norm C and weight w in {0, 1}:

| unit                    | factor              |
|-------------------------|---------------------|
| norm <= C               | w                   |
| norm > C                | w * C / norm        |
| norm 0                  | w                   |
| not finite (NaN or inf) | 0, and contributes 0|
| padding (w = 0)         | 0, and contributes 0|

so that one unit moves the sum by at most C in L2 (Abadi et al. 2016, Algorithm 1).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf


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
        clip_norm: C.
        unit_weight: [units], 1 for a unit and 0 for padding.

    Returns:
        (factors, norms [units]); the norm of padding is 0, that of a non-finite unit NaN or inf.
    """
    norms = tf.sqrt(squared_norms)
    finite = tf.math.is_finite(norms)
    values = tf.where(tf.logical_and(finite, unit_weight > 0), clip_norm / tf.maximum(norms, clip_norm), 0.0)
    return Factors(values, tf.reduce_all(finite)), tf.where(unit_weight > 0, norms, 0.0)


def _along(values: Any, factors: Factors) -> Any:
    return tf.reshape(factors.values, [-1] + [1] * (len(values.shape) - 1))


def scaled(values: Any, factors: Factors) -> Any:
    """`values` [units, ...] times the factors, exactly 0 where the factor is 0 (0 * NaN is NaN)."""
    factor = _along(values, factors)
    return tf.where(factor > 0, values * factor, 0.0)


def kept(values: Any, factors: Factors) -> Any:
    """`values` [units, ...] as they are, but 0 where the factor is 0 if anything in the microbatch is not finite.

    For the large operand of a product whose other operand is `scaled`: without a NaN there is nothing to mask.
    """
    return tf.cond(factors.all_finite, lambda: values, lambda: tf.where(_along(values, factors) > 0, values, 0.0))
