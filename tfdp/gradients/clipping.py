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

Per layer (McMahan et al. 2018), the same table holds for the gradient of each layer l with a C_l of its own, and one
unit moves the sum by at most C = sqrt(sum of C_l^2). A unit that is not finite in one layer contributes 0 to all.

Norms are float32, so the ends of its range are closed: a gradient whose factors (inputs and output gradients of a
kernel) have a norm above 1e15 counts as not finite, C is at least 1e-6, and where the terms of a gradient cancel, its
norm includes what rounding may leave of them in the sum.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfdp.errors import GradientError

SMALLEST_CLIP_NORM = 1e-6
# Below this squared norm the squares of float32 no longer tell what the norm is.
SMALLEST_SQUARED_NORM = 1e-30


@dataclasses.dataclass(frozen=True)
class PerLayer:
    """Clip norms of groups of variables that are clipped apart.

    Attributes:
        names: of the groups.
        norms: C_l, of each group.
        group_of: which group each trainable variable of the model belongs to, in their order.
    """

    names: tuple[str, ...]
    norms: tuple[float, ...]
    group_of: tuple[int, ...]

    def members(self, group: int) -> list[int]:
        """The variables of a group, by their place among all."""
        return [place for place, its_group in enumerate(self.group_of) if its_group == group]


# One norm for all variables together, known when the step is traced or a scalar tensor, or one for each layer.
ClipNorm = float | Any | PerLayer


class Factors(NamedTuple):
    """Clip factors of a microbatch.

    Attributes:
        values: [units] float32.
        all_finite: scalar bool; when true, a plain product with a factor of 0 is exactly 0.
    """

    values: Any
    all_finite: Any


def clip_factors(squared_norms: Any, clip_norm: float | Any, unit_weight: Any) -> tuple[Factors, Any]:
    """Factor that scales each unit's gradient.

    Args:
        squared_norms: [units] float32.
        clip_norm: C, at least `SMALLEST_CLIP_NORM`; as a tensor it is for the caller to see to that.
        unit_weight: [units], 1 for a unit and 0 for padding.

    Returns:
        (factors, norms [units]); the norm of padding is 0, that of a non-finite unit NaN or inf.
    """
    if not tf.is_tensor(clip_norm) and clip_norm < SMALLEST_CLIP_NORM:
        raise GradientError(f"Expected clip_norm >= {SMALLEST_CLIP_NORM}. Received: clip_norm={clip_norm!r}.")
    norms = tf.sqrt(squared_norms)
    finite = tf.math.is_finite(norms)
    taken = tf.logical_and(tf.logical_and(finite, squared_norms >= SMALLEST_SQUARED_NORM), unit_weight > 0)
    values = tf.where(taken, clip_norm / tf.maximum(norms, clip_norm), 0.0)
    return Factors(values, tf.reduce_all(finite)), tf.where(unit_weight > 0, norms, 0.0)


def groups_of(clip_norm: ClipNorm, variables: int) -> tuple[int, ...]:
    """The group that each variable is clipped with; there is one group unless the clip norm is per layer."""
    return clip_norm.group_of if isinstance(clip_norm, PerLayer) else (0,) * variables


def sums_of_groups(squared_norms: Sequence[Any], clip_norm: ClipNorm) -> list[Any]:
    """Squared norm [units] of each group, from those of the variables."""
    if not isinstance(clip_norm, PerLayer):
        return [tf.add_n(squared_norms)]
    return [
        tf.add_n([squared_norms[place] for place in clip_norm.members(group)]) for group in range(len(clip_norm.norms))
    ]


def factors_of_groups(of_groups: Sequence[Any], clip_norm: ClipNorm, unit_weight: Any) -> tuple[list[Factors], Any]:
    """The factors of each group of variables, and the norms [units] of all variables together.

    Args:
        of_groups: squared norm [units] float32 of each group.
    """
    if not isinstance(clip_norm, PerLayer):
        alone, norms = clip_factors(of_groups[0], clip_norm, unit_weight)
        return [alone], norms
    norms = tf.sqrt(tf.add_n(of_groups))
    everywhere = tf.where(tf.math.is_finite(norms), unit_weight, 0.0)
    pairs = zip(of_groups, clip_norm.norms, strict=True)
    factors = [clip_factors(squared, norm, everywhere)[0] for squared, norm in pairs]
    return factors, tf.where(unit_weight > 0, norms, 0.0)


def factors_of_variables(
    squared_norms: Sequence[Any], clip_norm: ClipNorm, unit_weight: Any
) -> tuple[list[Factors], Any]:
    """The factors that scale the gradient of each variable, and the norms [units] of all variables together.

    Args:
        squared_norms: [units] float32, of each variable.
    """
    factors, norms = factors_of_groups(sums_of_groups(squared_norms, clip_norm), clip_norm, unit_weight)
    return [factors[group] for group in groups_of(clip_norm, len(squared_norms))], norms


def centred_count(norms: Any, clip_norm: Any, unit_weight: Any) -> Any:
    """Sum over units of +1/2 where the norm is at most C and -1/2 where it is larger: one unit moves it by 1/2 at most.

    Padding contributes 0, and so does a unit that adds nothing to the sum of gradients: one that is not finite, or
    whose gradient is zero. A null record in the place of a unit (zero_out) then moves both sums as an absent one does.
    """
    adds = tf.logical_and(tf.math.is_finite(norms), norms >= math.sqrt(SMALLEST_SQUARED_NORM))
    present = tf.logical_and(adds, unit_weight > 0)
    return tf.reduce_sum(tf.where(present, tf.where(norms <= clip_norm, 0.5, -0.5), 0.0))


def _along(values: Any, factors: Factors) -> Any:
    return tf.reshape(factors.values, [-1] + [1] * (len(values.shape) - 1))


def scaled(values: Any, factors: Factors) -> Any:
    """`values` [units, ...] times the factors, exactly 0 where the factor is 0 (0 * NaN is NaN)."""
    factor = _along(values, factors)
    return tf.where(factor > 0, values * factor, 0.0)


def kept(values: Sequence[Any], factors: Sequence[Factors]) -> list[Any]:
    """Each of `values` [units, ...] as it is, but 0 where its factor is 0 if anything in the microbatch is not finite.

    For the large operand of a product whose other operand is `scaled`: without a NaN there is nothing to mask. All in
    one branch: every branch that is built costs about a megabyte.
    """
    if not values:
        return []

    def masked() -> list[Any]:
        return [tf.where(_along(value, its) > 0, value, 0.0) for value, its in zip(values, factors, strict=True)]

    flags = list({id(each.all_finite): each.all_finite for each in factors}.values())
    all_finite = flags[0] if len(flags) == 1 else tf.reduce_all(tf.stack(flags))
    result = tf.cond(all_finite, lambda: list(values), masked)
    return list(result) if isinstance(result, (list, tuple)) else [result]
