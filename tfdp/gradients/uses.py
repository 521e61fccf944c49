"""How one use of a variable in the forward pass makes its per-unit gradient.

A rule turns (inputs, output gradients) of a layer call into uses. Each use knows three things about the per-unit
gradient that it stands for, without forming it when it is large: the squared norm [units], the sum weighted by clip
factors, and (when small) the per-unit gradient itself. Uses of the same variable are merged before the norm
is taken, so that shared weights are exact.

Leading axis everywhere: units. Records of one unit lie along the token axis.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp import keras_private
from tfdp.gradients.clipping import Factors, scaled

# The largest squared norm of a factor that is trusted: the products of two have to fit float32.
LARGEST_SQUARE = 1e30
# What a square that is rounded to 0 can have been.
SMALLEST_SQUARE = 2.0**-126
# Below this share of its terms' sizes, the rounding of a Gram product shows in the norm.
CANCELLED = 2.0**-11
# One rounding in the clipped sum, with room for the order in which it is added up.
ROUNDING = 4 * 2.0**-24
# Per-unit kernels of so many values are never held for all units at once: they would not stay in a cache.
LARGE = 2**20


def _float32(value: Any) -> Any:
    return tf.cast(value, tf.float32)


def _by_unit(value: Any, units: int, tail: int) -> Any:
    """[batch, ..., (tail axes)] -> [units, tokens, (tail axes)]."""
    tail_shape = value.shape[len(value.shape) - tail :] if tail else []
    count = math.prod(value.shape)
    tokens = count // (units * math.prod(tail_shape)) if count else 0
    return tf.reshape(value, [units, tokens, *tail_shape])


def squares(gradient: Any) -> Any:
    """[units, ...] -> [units], the sum of squares."""
    axes = list(range(1, len(gradient.shape)))
    if keras_private.is_compiled_by_xla():  # which cannot, and fuses the squares into the sum itself
        return tf.reduce_sum(gradient**2, axes)
    return tf.math.reduce_euclidean_norm(gradient, axes) ** 2


@dataclasses.dataclass
class Outer:
    """Gradient sum_t rows[t] (x) columns[t]: every kernel multiplication (Goodfellow 2015, arXiv 1510.01799).

    rows: [units, T, d]; columns: [units, T, p]; axes: shape of the kernel as rows+columns, then how to permute it.
    materialised: [units, d, p], once `squared_norm` has formed it.
    """

    rows: Any
    columns: Any
    shape: tuple[int, ...]
    permutation: tuple[int, ...] | None = None
    materialised: Any = None

    @property
    def matrix(self) -> tuple[int, int]:
        """Shape of the gradient as rows and columns."""
        return self.rows.shape[2], self.columns.shape[2]

    def of_unit(self, unit: Any) -> Outer:
        return dataclasses.replace(self, rows=self.rows[unit][None], columns=self.columns[unit][None])

    @property
    def materialise_is_cheaper(self) -> bool:
        """Whether per-unit kernels [units, d, p] are formed: one product that serves both the norm and the sum.

        The Gram form costs T*T*(d+p) products on top of the T*d*p of the weighted sum, the materialised form two more
        passes over d*p values; on a processor one such value costs as much as about 32 products (`make bench`). The
        values are held until all norms are known, in place of the T*(d+p) of the factors: not many more.
        """
        tokens, d, p = self.rows.shape[1], self.rows.shape[2], self.columns.shape[2]
        return tokens == 0 or d * p <= tokens * (d + p) * min(tokens / 32, 1.75)

    @property
    def is_formed_in_turn(self) -> bool:
        """Whether per-unit kernels are formed one after the other, once the norms of all other variables are known.

        Such a kernel is measured, scaled and added while it is in the cache, so that its passes cost less: as much as a
        Gram product of about 100 tokens, for the tied table of `make bench`. XLA is not given such a loop.
        """
        tokens, d, p = self.rows.shape[1], self.rows.shape[2], self.columns.shape[2]
        if tokens == 1 or keras_private.is_compiled_by_xla():
            return False
        return LARGE <= d * p <= 2.5 * tokens * (d + p)

    def squared_norm(self) -> Any:
        """[units], never less than that of the gradient as float32 adds it up."""
        if self.rows.shape[1] == 1:
            of_rows, of_columns = tf.reduce_sum(self.rows**2, 2), tf.reduce_sum(self.columns**2, 2)
            return of_rows[:, 0] * of_columns[:, 0] + self._beyond_squares(of_rows, of_columns)
        if self.materialise_is_cheaper:
            self.materialised = tf.matmul(self.rows, self.columns, transpose_a=True)
            return squares(self.materialised)
        # Not before the backward pass: it would only lie there.
        with tf.control_dependencies([self.rows, self.columns]):
            rows = tf.matmul(self.rows, self.rows, transpose_b=True)
        columns = tf.matmul(self.columns, self.columns, transpose_b=True)
        squared = tf.reduce_sum(rows * columns, [1, 2])
        of_rows, of_columns = tf.linalg.diag_part(rows), tf.linalg.diag_part(columns)
        return self._unless_cancelled(squared, of_rows, of_columns) + self._beyond_squares(of_rows, of_columns)

    def _unless_cancelled(self, squared: Any, of_rows: Any, of_columns: Any) -> Any:
        """A Gram product whose terms cancel holds only rounding: such a unit's gradient is formed and measured."""
        tokens = self.rows.shape[1]
        magnitude = tf.reduce_sum(tf.sqrt(of_rows) * tf.sqrt(of_columns), 1) ** 2
        # Independent tokens leave 1 / tokens of it.
        cancelled = squared < magnitude * min(CANCELLED, 1 / (4 * tokens))

        def formed() -> Any:
            def one(factors: tuple[Any, Any]) -> Any:
                return tf.reduce_sum(tf.matmul(*factors, transpose_a=True) ** 2)

            exact = tf.map_fn(one, (self.rows, self.columns), parallel_iterations=1, fn_output_signature=tf.float32)
            # By unit, so that no unit's norm depends on another.
            return tf.where(cancelled, exact + ROUNDING**2 * tokens * magnitude, squared)

        return tf.cond(tf.reduce_any(cancelled), formed, lambda: squared)

    def _beyond_squares(self, of_rows: Any, of_columns: Any) -> Any:
        """[units] NaN for factors whose squares float32 cannot hold; else what may be lost in squares near 0.

        Args:
            of_rows, of_columns: squared norms [units, T].
        """
        lengths = tf.reduce_sum(tf.sqrt(of_rows), 1) ** 2, tf.reduce_sum(tf.sqrt(of_columns), 1) ** 2
        lost = self.columns.shape[2] * SMALLEST_SQUARE * lengths[0] + self.rows.shape[2] * SMALLEST_SQUARE * lengths[1]
        largest = tf.maximum(tf.reduce_max(of_rows, 1), tf.reduce_max(of_columns, 1))
        return tf.where(largest > LARGEST_SQUARE, float("nan"), tf.where(lost > 1e-20, lost, 0.0))

    def shaped(self, gradient: Any, leading: Sequence[int] = ()) -> Any:
        """[*leading, d, p] as the variable is laid out."""
        if self.permutation is None:
            return tf.reshape(gradient, [*leading, *self.shape])
        unpermuted = [0] * len(self.shape)
        for position, axis in enumerate(self.permutation):
            unpermuted[axis] = self.shape[position]
        offset = len(leading)
        gradient = tf.reshape(gradient, [*leading, *unpermuted])
        return tf.transpose(gradient, [*range(offset), *(axis + offset for axis in self.permutation)])

    @property
    def large_operand(self) -> str:
        """Name of what the weighted sum multiplies with the factors, or with what they have scaled."""
        if self.materialised is not None:
            return "materialised"
        return "columns" if self.rows.shape[2] <= self.columns.shape[2] else "rows"

    def weighted_sum(self, factors: Factors) -> Any:
        if self.materialised is not None:
            flat = tf.reshape(self.materialised, [self.materialised.shape[0], -1])
            return self.shaped(tf.matmul(factors.values[None, :], flat), [])
        rows, columns = self.rows, self.columns
        if self.large_operand == "columns":
            rows = scaled(rows, factors)
        else:
            columns = scaled(columns, factors)
        rows = tf.reshape(rows, [-1, rows.shape[2]])
        columns = tf.reshape(columns, [-1, columns.shape[2]])
        return self.shaped(tf.matmul(rows, columns, transpose_a=True), [])

    def per_unit(self) -> Any:
        gradient = tf.matmul(self.rows, self.columns, transpose_a=True)
        return self.shaped(gradient, [gradient.shape[0]])

    def is_laid_out_like(self, other: Outer) -> bool:
        return self.permutation == other.permutation and self.rows.shape[2] == other.rows.shape[2]

    def merge(self, other: Outer) -> Outer:
        rows = tf.concat([self.rows, other.rows], 1)
        return Outer(rows, tf.concat([self.columns, other.columns], 1), self.shape, self.permutation)


@dataclasses.dataclass
class Gather:
    """Gradient of a table look-up: row ids[t] receives columns[t].

    ids: [units, T] int; columns: [units, T, p]; table of `vocabulary` rows. What a number outside the table looks up
    depends on device and compiler, so its unit has no gradient to bound: its norm is NaN.
    """

    ids: Any
    columns: Any
    vocabulary: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.vocabulary, self.columns.shape[2])

    def known(self) -> Any:
        """[units] 0, or NaN where a number is outside the table."""
        inside = tf.logical_and(self.ids >= 0, self.ids < self.vocabulary)
        return tf.where(tf.reduce_all(inside, 1), 0.0, float("nan"))

    def squared_norm(self) -> Any:
        """[units]: every token squares the whole gradient of its row, which is counted once per token of that row."""
        same = tf.cast(self.ids[:, :, None] == self.ids[:, None, :], tf.float32)
        count = tf.reduce_sum(same, 2)
        of_row = tf.reduce_sum(tf.matmul(same, self.columns) ** 2, 2)
        # The clipped sum rounds every term before they cancel; one term alone, or two exact opposites, it cannot spoil.
        exact = tf.logical_or(count == 1, tf.logical_and(count == 2, of_row == 0))
        spread = tf.where(exact, 0.0, ROUNDING**2 * count * tf.reduce_sum(self.columns**2, 2))
        return self.known() + tf.reduce_sum(of_row / count + spread, 1)

    def cross(self, other: Outer) -> Any:
        """Inner product [units] with a use of the same table as a kernel (a tied output projection)."""
        # rows[u, s, ids[u, t]] as [units, S, T]; on CPUs 1.6 times as fast from flat memory as along the last axis.
        size = tf.shape(other.rows, tf.int64)
        first = tf.reshape(tf.range(size[0] * size[1]) * size[2], [size[0], size[1], 1])
        flat = first + tf.cast(self.ids, tf.int64)[:, None, :]
        picked = tf.gather_nd(tf.reshape(other.rows, [-1]), flat[..., None])
        return tf.reduce_sum(picked * tf.matmul(other.columns, self.columns, transpose_b=True), [1, 2])

    def inner(self, gradient: Any) -> Any:
        """Inner product [units] with a gradient [units, vocabulary, p]."""
        return tf.reduce_sum(tf.gather(gradient, self.ids, batch_dims=1) * self.columns, [1, 2])

    def of_unit(self, unit: Any) -> Gather:
        return dataclasses.replace(self, ids=self.ids[unit][None], columns=self.columns[unit][None])

    def weighted_sum(self, factors: Factors) -> Any:
        columns = scaled(self.columns, factors)
        columns = tf.reshape(columns, [-1, columns.shape[2]])
        return tf.math.unsorted_segment_sum(columns, tf.reshape(self.ids, [-1]), self.vocabulary)

    def per_unit(self) -> Any:
        gradient = tf.matmul(tf.one_hot(self.ids, self.vocabulary), self.columns, transpose_a=True)
        return gradient + self.known()[:, None, None]

    def merge(self, other: Gather) -> Gather:
        columns = tf.concat([self.columns, other.columns], 1)
        return Gather(tf.concat([self.ids, other.ids], 1), columns, self.vocabulary)


@dataclasses.dataclass
class Direct:
    """A per-unit gradient that is small enough to hold: biases, scales, position tables.

    gradient: [units, *part]; the variable's first axis may be longer than the part: the rest is zero (positions).
    """

    gradient: Any
    shape: tuple[int, ...]

    def squared_norm(self) -> Any:
        return squares(self.gradient)

    def _padded(self, gradient: Any, axis: int) -> Any:
        missing = self.shape[0] - gradient.shape[axis] if self.shape else 0
        if not missing:
            return gradient
        paddings = [[0, missing if i == axis else 0] for i in range(len(gradient.shape))]
        return tf.pad(gradient, paddings)

    def weighted_sum(self, factors: Factors) -> Any:
        return self._padded(tf.reduce_sum(scaled(self.gradient, factors), 0), 0)

    def per_unit(self) -> Any:
        return self._padded(self.gradient, 1)

    def merge(self, other: Direct) -> Direct:
        return Direct(self.per_unit() + other.per_unit(), self.shape)


Use = Outer | Gather | Direct


def outer(rows: Any, columns: Any, shape: Sequence[int], units: int, permutation: Any = None) -> Outer:
    """An `Outer` from [batch, ..., d] and [batch, ..., p] in any float type."""
    return Outer(_by_unit(_float32(rows), units, 1), _by_unit(_float32(columns), units, 1), tuple(shape), permutation)


def row_numbers(ids: Any, vocabulary: int) -> Any:
    """Row numbers of a table as int32. Keras counts negative ones from the end."""
    ids = tf.cast(ids, tf.int32)
    return tf.where(ids < 0, ids + vocabulary, ids)


def gather(ids: Any, columns: Any, vocabulary: int, units: int) -> Gather:
    """A `Gather` from [batch, ...] row numbers and [batch, ..., p] output gradients."""
    return Gather(_by_unit(ids, units, 0), _by_unit(_float32(columns), units, 1), vocabulary)


def direct(token_gradients: Any, shape: Sequence[int], units: int) -> Direct:
    """A `Direct` from [batch, ..., *shape]: summed over every axis between batch and the variable's own."""
    shape = tuple(shape)
    return Direct(tf.reduce_sum(_by_unit(_float32(token_gradients), units, len(shape)), 1), shape)
