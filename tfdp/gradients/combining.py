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
    kernel, table = kernel_of(uses), table_of(uses)
    total = tf.add_n(each)
    if kernel is not None and table is not None:
        total = _tied(kernel, table, each, table.cross(kernel))
    # Where the terms of a Gram product cancel, rounding can leave a little less than nothing (NaN stays NaN).
    return tf.where(total < 0.0, 0.0, total)


def kernel_of(uses: Sequence[Use]) -> Outer | None:
    """The kernel among the (merged) uses of a variable."""
    return next((use for use in uses if isinstance(use, Outer)), None)


def table_of(uses: Sequence[Use]) -> Gather | None:
    """The table that it is tied to, or that is alone."""
    return next((use for use in uses if isinstance(use, Gather)), None)


def _tied(kernel: Outer, table: Gather, each: Sequence[Any], cross: Any) -> Any:
    """Squared norm [units] of two uses of a table together; where they cancel, that of their sum as it is formed.

    Args:
        each, cross: squared norms [units] of the two, and their inner products.
    """
    total = tf.add_n(each) + 2.0 * cross
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
    kernel = kernel_of(uses)
    return kernel is not None and kernel.is_formed_in_turn


def formed(uses: Sequence[Use], unit: Any, of_table: Any) -> tuple[Any, Any]:
    """Gradient [1, d, p] of one unit of a kernel, and the squared norm [1] of all uses together.

    Args:
        of_table: squared norms [units] of a table that the kernel is tied to; None without one.
    """
    kernel, table = kernel_of(uses), table_of(uses)
    assert kernel is not None
    kernel = kernel.of_unit(unit)
    gradient = tf.matmul(kernel.rows, kernel.columns, transpose_a=True)
    squared = squares(gradient)
    if table is not None:
        table = table.of_unit(unit)
        squared = _tied(kernel, table, [squared, of_table[unit][None]], table.inner(gradient))
    return gradient, squared


def clipped(of_variables: Sequence[Sequence[Use]], clip_norm: ClipNorm, unit_weight: Any) -> tuple[list[Any], Any]:
    """Sum over units of the clipped gradient for each variable, shaped like it, and the norms [units] of all."""
    late = {place: uses for place, uses in enumerate(of_variables) if is_formed_in_turn(uses)}
    early = [place for place in range(len(of_variables)) if place not in late]
    nothing = tf.zeros_like(unit_weight)
    squared = [nothing if place in late else squared_norm(uses) for place, uses in enumerate(of_variables)]
    of_groups = sums_of_groups(squared, clip_norm)
    kernels: dict[int, Any] = {}
    if late:
        of_groups, kernels = _in_turn(late, of_groups, clip_norm, unit_weight)
    factors, norms = factors_of_groups(of_groups, clip_norm, unit_weight)
    its_factors = [factors[group] for group in groups_of(clip_norm, len(of_variables))]
    rest = {place: of_variables[place] for place in early}
    rest |= {place: [table] for place, uses in late.items() if (table := table_of(uses)) is not None}
    weighted = dict(zip(rest, weighted_sums(list(rest.values()), [its_factors[place] for place in rest]), strict=True))
    parts = [[of[place] for of in (kernels, weighted) if place in of] for place in range(len(of_variables))]
    return [tf.add_n(its_parts) for its_parts in parts], norms


def _in_turn(
    late: dict[int, Sequence[Use]], of_groups: Sequence[Any], clip_norm: ClipNorm, unit_weight: Any
) -> tuple[list[Any], dict[int, Any]]:
    """Sums kernels that are formed for one unit after the other, as soon as the norms of all else are known.

    Returns:
        (squared norms [units] of the groups with these variables, clipped sums of the kernels alone by place).
    """
    groups = groups_of(clip_norm, max(late) + 1)
    units, count = unit_weight.shape[0], len(of_groups)
    tables = {place: table.squared_norm() for place, uses in late.items() if (table := table_of(uses)) is not None}

    def one(unit: Any, found: Any, *sums: Any) -> tuple[Any, ...]:
        gradients = []
        totals = [squared[unit][None] for squared in of_groups]
        for place, uses in late.items():
            gradient, squared = formed(uses, unit, tables.get(place))
            gradients.append(gradient[0])
            totals[groups[place]] += squared
        factors, _ = factors_of_groups(totals, clip_norm, unit_weight[unit][None])
        added = []
        for place, gradient, before in zip(late, gradients, sums, strict=True):
            factor = factors[groups[place]].values[0]
            # Not a product with 0, which is NaN where the gradient is.
            added.append(tf.cond(factor > 0, lambda b=before, f=factor, g=gradient: b + f * g, lambda b=before: b))
        return unit + 1, found.write(unit, tf.concat(totals, 0)), *added

    found = tf.TensorArray(tf.float32, units, element_shape=[count])
    start = (tf.constant(0), found, *[tf.zeros([1, 1]) for _ in late])
    shapes = (tf.TensorShape([]), tf.TensorShape(None), *[tf.TensorShape([None, None]) for _ in late])
    _, found, *sums = tf.while_loop(lambda unit, *_: unit < units, one, start, shapes, parallel_iterations=1)
    kernels = [kernel for uses in late.values() if (kernel := kernel_of(uses)) is not None]
    # Where no unit counts they are zeros still; and large zeros that are known beforehand would be kept.
    shaped = [kernel.shaped(tf.broadcast_to(s, kernel.matrix)) for kernel, s in zip(kernels, sums, strict=True)]
    return tf.unstack(found.stack(), axis=1), dict(zip(late, shaped, strict=True))


def weighted_sums(of_variables: Sequence[Sequence[Use]], factors: Sequence[Factors]) -> list[Any]:
    """Sum over units of factor * gradient for each variable, shaped like it, from its uses and its factors."""
    pairs = [(use, its) for uses, its in zip(of_variables, factors, strict=True) for use in uses]
    kernels = [(use, its) for use, its in pairs if isinstance(use, Outer)]
    large = kept([getattr(kernel, kernel.large_operand) for kernel, _ in kernels], [its for _, its in kernels])
    for (kernel, _), operand in zip(kernels, large, strict=True):
        setattr(kernel, kernel.large_operand, operand)
    return [tf.add_n([use.weighted_sum(its) for use in uses]) for uses, its in zip(of_variables, factors, strict=True)]
