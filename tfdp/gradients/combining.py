"""What all uses of a variable, and all variables, come to: norms, clip factors, clipped sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp.gradients.clipping import ClipNorm, Factors, factors_of_groups, groups_of, kept, sums_of_groups
from tfdp.gradients.uses import ROUNDING, Direct, Gather, Outer, Use, squares


def merged(uses: Sequence[Use]) -> list[Use]:
    """One use per kind; kernels whose factors cannot be concatenated are held per unit and added."""
    kinds: dict[type, Any] = {}
    for use in uses:
        before = kinds.get(type(use))
        if before is None:
            kinds[type(use)] = use
        elif isinstance(use, Outer) and not use.is_laid_out_like(before):
            return [_held(uses)]
        else:
            kinds[type(use)] = before.merge(use)
    if len(kinds) > 1 and set(kinds) != {Outer, Gather}:
        return [_held(uses)]
    if set(kinds) == {Outer, Gather} and (kinds[Outer].permutation or kinds[Outer].shape != kinds[Gather].shape):
        return [_held(uses)]
    return list(kinds.values())


def _held(uses: Sequence[Use]) -> Direct:
    total = uses[0].per_unit()
    for use in uses[1:]:
        total += use.per_unit()
    return Direct(total, tuple(total.shape[1:]))


def squared_norm(uses: Sequence[Use]) -> Any:
    """Squared norm [units] of the gradient of one variable, all its (merged) uses together."""
    each = [use.squared_norm() for use in uses]
    total = tf.add_n(each)
    table = next((use for use in uses if isinstance(use, Gather)), None)
    kernel = next((use for use in uses if isinstance(use, Outer)), None)
    if table is not None and kernel is not None:
        total = _tied(table, kernel, each, total + 2.0 * table.cross(kernel))
    # Where the terms of a Gram product cancel, rounding can leave a little less than nothing (NaN stays NaN).
    return tf.where(total < 0.0, 0.0, total)


def _tied(table: Gather, kernel: Outer, each: Sequence[Any], total: Any) -> Any:
    """`total`, but where the two uses of a table cancel, the norm of their sum as it is formed."""
    magnitude = (tf.sqrt(each[0]) + tf.sqrt(each[1])) ** 2
    cancelled = total < 1e-3 * magnitude
    tokens = table.ids.shape[1] + kernel.rows.shape[1]

    def formed() -> Any:
        def one(parts: tuple[Any, ...]) -> Any:
            ids, columns, rows, kernel_columns = parts
            gradient = tf.matmul(rows, kernel_columns, transpose_a=True)
            return tf.reduce_sum((gradient + tf.math.unsorted_segment_sum(columns, ids, table.vocabulary)) ** 2)

        parts = (table.ids, table.columns, kernel.rows, kernel.columns)
        exact = tf.map_fn(one, parts, parallel_iterations=1, fn_output_signature=tf.float32)
        # The terms within a use may be `tokens` times as large as what is left of it.
        return tf.where(cancelled, exact + (ROUNDING * tokens) ** 2 * magnitude, total)

    return tf.cond(tf.reduce_any(cancelled), formed, lambda: total)


def is_formed_in_turn(uses: Sequence[Use]) -> bool:
    """Whether the gradient of one variable, all its (merged) uses together, is formed for one unit after the other."""
    return any(isinstance(use, Outer) and use.is_formed_in_turn for use in uses)


def formed(uses: Sequence[Use], unit: Any) -> Any:
    """Gradient [1, d, p] of one unit of a kernel, which may be tied to a table."""
    one = slice(unit, unit + 1)
    kernel = next(use for use in uses if isinstance(use, Outer))
    # A batch of one: TensorFlow is slower with bare matrices.
    gradient = tf.matmul(kernel.rows[one], kernel.columns[one], transpose_a=True)
    gradient = tf.ensure_shape(gradient, [1, kernel.rows.shape[2], kernel.columns.shape[2]])
    for use in uses:
        if isinstance(use, Gather):
            places = tf.pad(use.ids[one][:, :, None], [[0, 0], [0, 0], [1, 0]])  # 0 of the batch, row
            gradient = tf.tensor_scatter_nd_add(gradient, places, use.columns[one])
    return gradient


def clipped(of_variables: Sequence[Sequence[Use]], clip_norm: ClipNorm, unit_weight: Any) -> tuple[list[Any], Any]:
    """Sum over units of the clipped gradient for each variable, shaped like it, and the norms [units] of all."""
    late = {place: uses for place, uses in enumerate(of_variables) if is_formed_in_turn(uses)}
    early = [place for place in range(len(of_variables)) if place not in late]
    nothing = tf.zeros_like(unit_weight)
    squared = [nothing if place in late else squared_norm(uses) for place, uses in enumerate(of_variables)]
    of_groups = sums_of_groups(squared, clip_norm)
    sums: dict[int, Any] = {}
    if late:
        of_groups, sums = _in_turn(late, of_groups, clip_norm, unit_weight)
    factors, norms = factors_of_groups(of_groups, clip_norm, unit_weight)
    its_factors = [factors[group] for group in groups_of(clip_norm, len(of_variables))]
    weighted = weighted_sums([of_variables[place] for place in early], [its_factors[place] for place in early])
    sums.update(zip(early, weighted, strict=True))
    return [sums[place] for place in range(len(of_variables))], norms


def _in_turn(
    late: dict[int, Sequence[Use]], of_groups: Sequence[Any], clip_norm: ClipNorm, unit_weight: Any
) -> tuple[list[Any], dict[int, Any]]:
    """Adds gradients that are formed for one unit after the other to the squared norms of their groups, and sums them.

    Returns:
        (squared norms [units] of the groups, clipped sums by place).
    """
    groups = groups_of(clip_norm, max(late) + 1)
    units, count = unit_weight.shape[0], len(of_groups)

    def one(unit: Any, found: Any, *sums: Any) -> tuple[Any, ...]:
        gradients = [formed(uses, unit) for uses in late.values()]
        totals = [squared[unit] for squared in of_groups]
        for (place, uses), gradient in zip(late.items(), gradients, strict=True):
            totals[groups[place]] += squares(gradient)[0]
            for use in uses:
                if isinstance(use, Gather):
                    totals[groups[place]] += use.known()[unit]
        factors, _ = factors_of_groups([total[None] for total in totals], clip_norm, unit_weight[unit][None])
        added = []
        for place, gradient, before in zip(late, gradients, sums, strict=True):
            factor = factors[groups[place]].values[0]
            # Not a product with 0, which is NaN where the gradient is.
            added.append(tf.cond(factor > 0, lambda b=before, f=factor, g=gradient[0]: b + f * g, lambda b=before: b))
        return unit + 1, found.write(unit, tf.stack(totals)), *added

    found = tf.TensorArray(tf.float32, units, element_shape=[count])
    kernels = [next(use for use in uses if isinstance(use, Outer)) for uses in late.values()]
    zeros = [tf.zeros([kernel.rows.shape[2], kernel.columns.shape[2]]) for kernel in kernels]
    start = (tf.constant(0), found, *zeros)
    _, found, *sums = tf.while_loop(lambda unit, *_: unit < units, one, start, parallel_iterations=1)
    shaped = [kernel.shaped(total) for kernel, total in zip(kernels, sums, strict=True)]
    return tf.unstack(found.stack(), axis=1), dict(zip(late, shaped, strict=True))


def weighted_sums(of_variables: Sequence[Sequence[Use]], factors: Sequence[Factors]) -> list[Any]:
    """Sum over units of factor * gradient for each variable, shaped like it, from its uses and its factors."""
    pairs = [(use, its) for uses, its in zip(of_variables, factors, strict=True) for use in uses]
    kernels = [(use, its) for use, its in pairs if isinstance(use, Outer)]
    large = kept([getattr(kernel, kernel.large_operand) for kernel, _ in kernels], [its for _, its in kernels])
    for (kernel, _), operand in zip(kernels, large, strict=True):
        setattr(kernel, kernel.large_operand, operand)
    return [tf.add_n([use.weighted_sum(its) for use in uses]) for uses, its in zip(of_variables, factors, strict=True)]
