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

from typing import Any

import tensorflow as tf


def clip_factors(squared_norms: Any, clip_norm: float, unit_weight: Any) -> tuple[Any, Any]:
    """Factor that scales each unit's gradient.

    Args:
        squared_norms: [units] float32.
        clip_norm: C.
        unit_weight: [units], 1 for a unit and 0 for padding.

    Returns:
        (factors, norms), both [units] float32; the norm of padding is 0, that of a non-finite unit NaN or inf.
    """
    clip_norm = tf.constant(clip_norm, tf.float32)
    norms = tf.sqrt(squared_norms)
    usable = tf.logical_and(tf.math.is_finite(norms), unit_weight > 0)
    factors = tf.where(usable, clip_norm / tf.maximum(norms, clip_norm), 0.0)
    return factors, tf.where(unit_weight > 0, norms, 0.0)


def keep_or_zero(values: Any, factors: Any, *, scale: bool) -> Any:
    """`values` [units, ...] times `factors` [units] (or left as it is), exactly 0 where the factor is 0.

    A product would not do: 0 * NaN is NaN.
    """
    factors = tf.reshape(factors, [-1] + [1] * (len(values.shape) - 1))
    return tf.where(factors > 0, values * factors if scale else values, 0.0)
