"""Norms where float32 is short of digits or range: against float64, and what is clipped stays within C."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdp.gradients import clipped_gradients, combining, uses
from tfdp.gradients.clipping import clip_factors

MARGIN = 1 + 1e-3


def _clipped(found, clip_norm=1.0):
    """(norms, [size of each unit's clipped gradient]) of the uses of one variable, each unit alone in its batch."""
    merged = combining.merged(found)
    factors, norms = clip_factors(combining.squared_norm(merged), clip_norm, tf.ones([1]))
    return norms.numpy(), float(np.linalg.norm(np.asarray(combining.weighted_sums([merged], [factors])[0], np.float64)))


def _nearly_opposite(generator, size, spread, tokens=2):
    """[1, tokens, size]: large vectors that are alike but for `spread`."""
    common = generator.normal(size=size) * 1e6
    return np.float32([[common + generator.normal(size=size) * spread for _ in range(tokens)]])


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("spread", [20.0, 2.0, 200.0])
def test_a_kernel_whose_tokens_cancel(oracle, jit_compile, spread):
    kernel = keras.layers.Dense(64, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((2, 64)), kernel])
    model.compile("sgd", "mae")
    x = _nearly_opposite(np.random.default_rng(1), 64, spread)
    y = np.float32([[[5] * 64, [-5] * 64]])
    sums, norms, _ = oracle.traced(model, 1.0, jit_compile=jit_compile)((x, y), [1.0])
    exact = np.linalg.norm(np.float64(x[0, 0]) - np.float64(x[0, 1])) * 8 / 128
    assert exact / MARGIN <= norms[0] <= exact + 1.0
    assert np.linalg.norm(np.float64(sums[0])) <= MARGIN


def test_cancelling_changes_the_norm_of_no_other_unit():
    generator = np.random.default_rng(2)
    rows = generator.normal(size=(3, 2, 40)).astype("float32")
    columns = generator.normal(size=(3, 2, 40)).astype("float32")
    alone = uses.Outer(tf.constant(rows), tf.constant(columns), (40, 40)).squared_norm().numpy()
    rows[1], columns[1, 1] = _nearly_opposite(generator, 40, 20.0)[0], -columns[1, 0]
    together = uses.Outer(tf.constant(rows), tf.constant(columns), (40, 40)).squared_norm().numpy()
    np.testing.assert_array_equal(together[[0, 2]], alone[[0, 2]])
    exact = np.sum(np.einsum("td,tp->dp", np.float64(rows[1]), np.float64(columns[1])) ** 2)
    np.testing.assert_allclose(together[1], exact, rtol=1e-2)


@pytest.mark.parametrize("spread", [0.1, 1.0, 20.0])
@pytest.mark.parametrize("tokens", [2, 3, 5])
def test_a_row_of_a_table_whose_tokens_cancel(spread, tokens):
    columns = _nearly_opposite(np.random.default_rng(3), 8, spread, tokens)
    columns[0, -1] = -columns[0, :-1].sum(0) + np.float32(spread)
    norms, size = _clipped([uses.Gather(tf.constant([[4] * tokens]), tf.constant(columns), 7)])
    exact = np.linalg.norm(np.float64(columns[0]).sum(0))
    assert norms[0] >= exact / MARGIN
    assert size <= MARGIN


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("spread", [1.0, 20.0, 2e3])
def test_two_uses_of_a_table_that_cancel(jit_compile, spread):
    generator = np.random.default_rng(4)
    column = generator.normal(size=8) * 1e6
    rows = np.zeros((1, 1, 7), "float32")
    rows[0, 0, 4] = 1.0

    @tf.function(autograph=False, jit_compile=jit_compile)
    def squared(columns, opposite):
        table = uses.Gather(tf.constant([[4]]), columns, 7)
        return combining.squared_norm([table, uses.Outer(tf.constant(rows), opposite, (7, 8))])

    columns = tf.constant(np.float32([[column]]))
    opposite = tf.constant(np.float32([[-column + spread]]))
    exact = np.linalg.norm(np.float64(columns) + np.float64(opposite))
    norm = float(squared(columns, opposite)[0]) ** 0.5
    assert exact / MARGIN <= norm <= exact + 5.0
    found = [uses.Gather(tf.constant([[4]]), columns, 7), uses.Outer(tf.constant(rows), opposite, (7, 8))]
    assert _clipped(found)[1] <= MARGIN


@pytest.mark.parametrize("spread", [1.0, 20.0, 2e3])
def test_what_is_formed_in_turn_is_what_is_measured(monkeypatch, spread):
    """Tokens of a kernel that cancel, and cancel with the table that it is tied to."""
    monkeypatch.setattr(uses, "LARGE", 0)
    generator = np.random.default_rng(5)
    rows = generator.normal(size=(1, 2, 7)).astype("float32")
    columns = _nearly_opposite(generator, 8, spread)
    columns[0, 1] *= -1
    rows[0, 1] = rows[0, 0]
    table = uses.Gather(tf.constant([[4, 2]]), tf.constant(-np.float32(rows[:, 0, [4, 2], None] * columns[:, 0])), 7)
    merged = [table, uses.Outer(tf.constant(rows), tf.constant(columns), (7, 8))]
    assert combining.is_formed_in_turn(merged)
    exact = np.float64(rows[0]).T @ np.float64(columns[0])
    exact[[4, 2]] += np.float64(table.columns[0])
    (total,), norms = combining.clipped([merged], 1e-3, tf.ones([1]))
    assert np.linalg.norm(np.float64(total)) <= 1e-3 * MARGIN
    assert float(norms[0]) == pytest.approx(np.linalg.norm(exact), rel=1e-3)


def test_a_number_outside_the_table_has_no_norm_in_turn_either(monkeypatch):
    monkeypatch.setattr(uses, "LARGE", 0)
    # As on other devices, where such a number finds and adds nothing.
    gather, add = tf.gather, tf.math.unsorted_segment_sum
    monkeypatch.setattr(tf, "gather", lambda rows, ids, batch_dims: gather(rows, ids % 7, batch_dims=batch_dims))
    monkeypatch.setattr(tf.math, "unsorted_segment_sum", lambda rows, ids, count: add(rows, ids % 7, count))
    table = uses.Gather(tf.constant([[1, 2], [1, 9]]), tf.ones([2, 2, 8]), 7)
    kernel = uses.Outer(tf.ones([2, 2, 7]), tf.ones([2, 2, 8]), (7, 8))
    (total,), norms = combining.clipped([[table, kernel]], 1.0, tf.ones([2]))
    assert np.isnan(norms).tolist() == [False, True]
    assert np.linalg.norm(total) <= MARGIN


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize(("weight", "contributes"), [(2e19, False), (2e14, True), (2e10, True)])
def test_factors_at_the_ends_of_float32(tokens, weight, contributes):
    layer = keras.layers.Dense(4, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((tokens, 4000)), layer])
    model.compile("sgd", "mae")
    x = np.full((1, tokens, 4000), 9e-20, "float32")
    data = (x, np.ones((1, tokens, 4), "float32"), np.full((1, tokens), weight, "float32"))
    (total,), norms, _ = clipped_gradients(model, data, 1e-6)
    exact = 9e-20 * weight / 4 * 16000**0.5  # the mean over tokens has equal terms
    size = np.linalg.norm(np.float64(total))
    assert size <= 1e-6 * MARGIN
    if contributes:
        assert size > 0 or exact < 1e-6
    else:
        assert np.isnan(norms[0])
        assert size == 0.0


def test_a_gradient_too_small_to_measure_contributes_nothing():
    norms = tf.constant([1e-31, 1.1e-30, 0.0])
    factors, _ = clip_factors(norms, 1.0, tf.ones([3]))
    np.testing.assert_array_equal(factors.values, [0.0, 1.0, 0.0])
