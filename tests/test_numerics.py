"""Numbers at the ends of their range, by models whose gradients are known in closed form.

A `Dense(1)` without bias under the loss w * output has the gradient w * x: exact in float64, whatever the weights.
"""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tfdp.gradients import METHODS, clipped_gradients
from tfdp.optimizer import NoisyGradients
from tfdp.sampling.poisson import PoissonSampler

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

FEATURES = 6
DIRECTION = np.array([1.0, -2.0, 0.5, 3.0, -0.25, 1.5])
DIRECTION /= np.linalg.norm(DIRECTION)
# Where the squares of float32 underflow, a unit counts as zero; where they overflow, or may, as not finite.
NORMS = [0.0, 1e-45, 1e-40, 1e-30, 1e-20, 1e-14, 1e-6, 0.3, 1.0, 7.0, 1e6, 1e14, 1e19, 1e30, 3e38, np.inf, np.nan]


def output_as_loss(y_true, y_pred):
    return keras.ops.mean(y_pred, axis=-1)


def linear(dtype="float32"):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(1, use_bias=False, dtype=dtype)])
    model.compile("sgd", output_as_loss)
    return model


def clipped_in_float64(x, clip_norm=1.0):
    norms = np.linalg.norm(x, axis=1, keepdims=True)
    return x * np.minimum(1.0, clip_norm / np.maximum(norms, 1e-300))


def sums(model, x, *, weight=None, method="bookkeeping", clip_norm=1.0):
    data = (tf.constant(x, tf.float32), tf.zeros([len(x), 1]))
    data = data if weight is None else (*data, tf.constant(weight, tf.float32))
    found, norms, losses = clipped_gradients(model, data, clip_norm=clip_norm, method=method)
    return np.asarray(found[0], np.float64).ravel(), np.asarray(norms), np.asarray(losses)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("through", ["data", "loss"])
@pytest.mark.parametrize("norm", NORMS)
def test_a_unit_of_any_norm(norm, through, method):
    """Alone and beside an ordinary one: right or nothing, finite always, and never more than the clip norm."""
    ordinary = np.array([[0.2, 0.1, 0.0, -0.1, 0.3, 0.0]])
    with np.errstate(all="ignore"):
        strange = DIRECTION[None] * norm if through == "data" else DIRECTION[None]
    weight = [1.0, 1.0 if through == "data" else norm]
    model = linear()
    alone, _, _ = sums(model, strange, weight=weight[1:], method=method)
    both, _, _ = sums(model, np.concatenate([ordinary, strange]), weight=weight, method=method)
    assert np.isfinite(alone).all()
    assert np.linalg.norm(alone) <= 1 + 1e-6
    np.testing.assert_allclose(both - ordinary[0], alone, atol=3e-7)
    expected = DIRECTION * min(norm, 1.0) if np.isfinite(norm) else np.zeros(FEATURES)
    if 1e-14 <= norm <= 1e14:
        np.testing.assert_allclose(alone, expected, rtol=2e-6)
    else:  # the ends of the range are closed: nothing, or what is right
        assert np.allclose(alone, expected, rtol=2e-6) or (alone == 0).all()
        assert (alone == 0).all() or norm < 1e30


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e38, 1e-45])
def test_a_weight_of_the_model_that_is_no_ordinary_number(value, method):
    """The loss overflows or is no number for every unit: nobody contributes. A denormal changes nothing."""
    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    model.compile("sgd", lambda y, p: keras.ops.mean(p, axis=-1) * 1e3)
    model.layers[0].kernel.assign(np.full((FEATURES, 3), value))
    x = np.random.default_rng(0).normal(size=(4, FEATURES))
    found, _, _ = clipped_gradients(model, (tf.constant(x, tf.float32), tf.zeros([4, 1])), clip_norm=1.0, method=method)
    flat = np.concatenate([np.ravel(each) for each in found])
    assert np.isfinite(flat).all()
    assert np.linalg.norm(flat) <= 4 * (1 + 1e-6)
    if not np.isfinite(value):
        assert (flat == 0).all()
    if value == 1e-45:
        assert np.linalg.norm(flat) > 1


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("policy", "large", "rounding"), [("bfloat16", 3e38, 2**-7), ("float16", 6e4, 2**-10)])
def test_half_precision_that_overflows(policy, large, rounding, method):
    """The product of the forward pass leaves the range: of float32, with 8 bits, or of float16, which ends at 65504."""
    model = linear(f"mixed_{policy}")
    model.layers[0].kernel.assign(np.full((FEATURES, 1), large))
    x = np.stack([DIRECTION, np.full(FEATURES, 10.0)])
    found, _, losses = sums(model, x, method=method)
    assert not np.isfinite(losses[1])
    assert np.isfinite(found).all()
    assert np.linalg.norm(found) <= 2 * (1 + rounding)
    assert np.linalg.norm(found) > 0.5  # the other unit is taken


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("units", [1, 2, 257])
def test_batches_from_one_unit_to_all(units, method):
    x = np.random.default_rng(units).normal(size=(units, FEATURES)) * np.geomspace(1e-3, 1e3, units)[:, None]
    x = x.astype(np.float32).astype(np.float64)
    found, norms, _ = sums(linear(), x, method=method)
    np.testing.assert_allclose(norms, np.linalg.norm(x, axis=1), rtol=1e-6)
    np.testing.assert_allclose(found, clipped_in_float64(x).sum(0), rtol=1e-5, atol=1e-6 * units**0.5)


@pytest.mark.parametrize("drawn", [0, 1, 40])
def test_a_logical_batch_of_nobody_one_and_all(plan_of, tmp_path, noise_is, monkeypatch, drawn):
    """Through a fit: cut into microbatches of 16, padded, added up, divided by the public size."""
    plan = plan_of(num_units=40, batch=8, microbatch=16)
    noise_is(lambda shape, step, index: np.zeros(shape))
    monkeypatch.setattr(PoissonSampler, "draw", lambda self: np.arange(drawn))
    x = np.random.default_rng(0).normal(size=(40, FEATURES)).astype(np.float32)
    model = linear()
    before = model.get_weights()[0].astype(np.float64).ravel()
    model.compile(tfdp.dp_optimizer("sgd", plan, learning_rate=1.0), output_as_loss)
    batches = tfdp.poisson_batches((x, np.zeros((40, 1), np.float32)), plan)
    callback = tfdp.PrivacyCallback(plan, tmp_path / "ledger.jsonl")
    model.fit(batches, steps_per_epoch=1, callbacks=[callback], verbose=0, shuffle=False)
    expected = before - clipped_in_float64(x.astype(np.float64))[:drawn].sum(0) / 8
    np.testing.assert_allclose(model.get_weights()[0].ravel(), expected, rtol=1e-5, atol=1e-6)


def test_ten_thousand_units_are_added_up_without_drift():
    """One after the other in float32, as microbatches of one are, against float64."""
    x = np.random.default_rng(0).normal(size=(10_000, FEATURES)).astype(np.float32)
    model = linear()

    @tf.function(autograph=False)
    def added(x):
        def body(index, total):
            row = tf.ensure_shape(x[index : index + 1], [1, FEATURES])
            found, _, _ = clipped_gradients(model, (row, tf.zeros([1, 1])), clip_norm=1.0)
            return index + 1, total + found[0]

        return tf.while_loop(lambda index, _: index < 10_000, body, (0, tf.zeros([FEATURES, 1])))[1]

    expected = clipped_in_float64(x.astype(np.float64)).sum(0)
    # 10,000 roundings of a sum of about 100 add up to 100 * 2^-24 * sqrt(10,000) = 6e-4; a bias would be 0.06.
    np.testing.assert_allclose(np.asarray(added(tf.constant(x))).ravel(), expected, atol=3e-3)


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_ten_thousand_steps_without_drift(plan_of, name):
    """Clipped sums, noise and update in float32 against float64: they differ by rounding, and that has no bias."""
    steps, units, rate = 10_000, 4, 0.01
    plan = plan_of(num_units=12, batch=6)
    generator = np.random.default_rng(1)
    data = generator.normal(size=(steps, units, FEATURES)).astype(np.float32)
    noise = generator.normal(size=(steps, FEATURES, 1)).astype(np.float32)
    model = linear()
    start = model.get_weights()[0].astype(np.float64)
    optimizer = tfdp.dp_optimizer(name, plan, learning_rate=rate)
    optimizer.build(model.trainable_variables)

    @tf.function(autograph=False)
    def run(data, noise):
        def body(index):
            found, _, _ = clipped_gradients(model, (data[index], tf.zeros([units, 1])), clip_norm=1.0)
            gradients = [(found[0] + noise[index]) / 6.0]
            optimizer.apply_private(NoisyGradients(gradients, model.trainable_variables, plan.digest))
            return [index + 1]

        tf.while_loop(lambda index: index < steps, body, [0], parallel_iterations=1)

    run(tf.constant(data), tf.constant(noise))
    assert int(optimizer.iterations) == steps
    gradients = [
        (clipped_in_float64(rows.astype(np.float64)).sum(0)[:, None] + drawn) / 6.0
        for rows, drawn in zip(data, noise, strict=True)
    ]
    expected = in_float64(name, start, gradients, rate)
    found = model.get_weights()[0].astype(np.float64)
    moved = np.abs(expected - start).max()
    assert moved > 0.1
    np.testing.assert_allclose(found, expected, atol=2e-4 * moved)


def in_float64(name, weights, gradients, rate):
    if name == "sgd":
        return weights - rate * np.sum(gradients, axis=0)
    first = second = np.zeros_like(weights)
    for step, gradient in enumerate(gradients, start=1):  # Kingma and Ba 2015, as Keras writes it
        first = first + (gradient - first) * (1 - 0.9)
        second = second + (gradient**2 - second) * (1 - 0.999)
        scale = rate * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
        weights = weights - scale * first / (np.sqrt(second) + 1e-7)
    return weights
