"""Clipping per layer, against a loop over single units that clips every layer of every unit on its own."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from tfdp import keras_private
from tfdp.errors import GradientError
from tfdp.gradients import PerLayer, clipped_gradients, per_layer, uses

UNITS = 5
ENGINES = [{"method": "bookkeeping"}, {"method": "vectorized"}, {"method": "bookkeeping", "hybrid": True}]


class Bent(keras.layers.Layer):
    """A bare variable, no rule."""

    def build(self, shape):
        self.mixing = self.add_weight(shape=(shape[-1], shape[-1]), name="mixing")

    def call(self, x):
        return keras.ops.tanh(keras.ops.matmul(x, self.mixing))


def small(oracle, *middle):
    keras.utils.set_random_seed(2)
    inputs = keras.Input((4, 6))
    x = keras.layers.Dense(6, name="first")(inputs)
    for layer in middle:
        x = layer(x)
    model = keras.Model(inputs, keras.layers.Dense(2, name="last")(x))
    model.compile(loss="mse")
    generator = np.random.default_rng(0)
    data = (
        generator.normal(size=(UNITS, 4, 6)).astype("float32") * np.linspace(0.1, 3, UNITS)[:, None, None],
        generator.normal(size=(UNITS, 4, 2)).astype("float32"),
    )
    return oracle.shaken(model), tuple(part.astype("float32") for part in data)


def clipped_by_layer(gradients, bounds: PerLayer):
    """One unit: every group scaled to its own norm. Also the norms of the groups before that."""
    norms = [
        np.sqrt(sum(np.sum(np.square(gradients[i], dtype=np.float64)) for i in bounds.members(group)))
        for group in range(len(bounds.norms))
    ]
    factors = [bound / max(norm, bound) for bound, norm in zip(bounds.norms, norms, strict=True)]
    return [g * factors[group] for g, group in zip(gradients, bounds.group_of, strict=True)], norms


def sizes(sums, bounds):
    """The norm of what each group of the clipped sum holds."""
    return [
        np.linalg.norm(np.concatenate([sums[i].ravel() for i in bounds.members(g)])) for g in range(len(bounds.norms))
    ]


@pytest.mark.parametrize("kind", ["gpt2", "llama_tied", "bert"])
@pytest.mark.parametrize("engine", ["bookkeeping", "bookkeeping, in turn", "vectorized"])
def test_language_models_agree_with_the_loop(oracle, monkeypatch, kind, engine):
    if "in turn" in engine:
        monkeypatch.setattr(uses, "LARGE", 0)
    model, data = oracle.language_model(kind), oracle.records(kind, UNITS)
    reference = oracle.reference_of(model, data)
    bounds = per_layer(model, float(np.median(reference.norms)))
    units = [clipped_by_layer(gradients, bounds) for gradients in reference.gradients]
    group_norms = np.array([norms for _, norms in units])
    above = group_norms > bounds.norms[0]
    assert above.any()
    assert not above.all()
    wanted = [sum(column) for column in zip(*(gradients for gradients, _ in units), strict=True)]
    sums, norms, _ = oracle.private(model, data, bounds, method=engine.split(",")[0])
    np.testing.assert_allclose(norms, reference.norms, rtol=1e-5)
    assert oracle.distance(sums, wanted) < 1e-4
    for got, want in zip(sums, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-5 * bounds.norms[0])


@pytest.mark.parametrize("engine", ENGINES, ids=["bookkeeping", "vectorized", "hybrid"])
def test_one_unit_moves_every_layer_by_at_most_its_norm_and_all_by_at_most_their_root_sum_square(oracle, engine):
    """Gradients far above every norm: each layer comes out at its own, all together at sqrt(sum of squares)."""
    model, (x, y) = small(oracle, *([Bent(name="bent")] if "hybrid" in engine else []))
    bounds = per_layer(model, {"first/*": 0.3, "last/*": 0.4, **({"bent/*": 1.2} if "hybrid" in engine else {})})
    function = oracle.traced(model, bounds, **engine)
    for unit in range(UNITS):
        sums, norms, _ = function((x, 1e3 * y), np.eye(UNITS)[unit])
        assert norms[unit] > 100
        np.testing.assert_allclose(sizes(sums, bounds), bounds.norms, rtol=1e-5)
        assert np.linalg.norm(oracle.flat(sums)) == pytest.approx(np.linalg.norm(bounds.norms), rel=1e-5)


@pytest.mark.parametrize("engine", ENGINES, ids=["bookkeeping", "vectorized", "hybrid"])
def test_a_unit_that_is_not_finite_in_one_layer_contributes_to_none(oracle, engine):
    """The last layer's gradient stays finite: only the first layer's input is spoilt, through a zero weight."""
    model, (x, y) = small(oracle, *([Bent(name="bent")] if "hybrid" in engine else []))
    first = model.get_layer("first")
    kernel, bias = first.get_weights()
    kernel[0] = 0.0
    first.set_weights([kernel, bias])
    function = oracle.traced(model, per_layer(model, 0.8), **engine)
    without = np.ones(UNITS)
    without[2] = 0.0
    wanted, _, _ = function((x, y), without)
    for harm in (np.nan, 1e30):  # times the zero weight: nan, or nothing at all, but a norm beyond float32
        spoilt = x.copy()
        spoilt[2, 0, 0] = harm
        sums, norms, _ = function((spoilt, y), np.ones(UNITS))
        assert not np.isfinite(norms[2])
        assert np.isfinite(np.delete(norms, 2)).all()
        for got, want in zip(sums, wanted, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)


def test_a_number_is_divided_evenly_among_the_layers_that_train(oracle):
    model, _ = small(
        oracle, keras.layers.Dense(6, name="frozen", trainable=False), keras.layers.LayerNormalization(name="norm")
    )
    bounds = per_layer(model, 1.5)
    assert bounds.names == ("first", "norm", "last")
    assert bounds.group_of == (0, 0, 1, 1, 2, 2)
    np.testing.assert_allclose(bounds.norms, 1.5 / np.sqrt(3))


def test_a_variable_of_two_layers_is_clipped_once(oracle):
    """A tied embedding is one variable, in the group of one layer."""
    model = oracle.language_model("llama_tied")
    bounds = per_layer(model, 1.0)
    assert len(bounds.group_of) == len(model.trainable_variables)
    assert np.square(bounds.norms).sum() == pytest.approx(1.0)
    own = [v for layer in keras_private.flatten_layers(model) for v in keras_private.own_variables(layer)]
    assert sorted(set(bounds.group_of)) == list(range(len(bounds.names)))
    assert len({id(v) for v in own if v.trainable}) == len(bounds.group_of)


def test_the_largest_pattern_takes_the_rest(oracle):
    model, _ = small(oracle)
    bounds = per_layer(model, {"*bias": 0.1, "*": 2.0})
    assert dict(zip(bounds.names, bounds.norms, strict=True)) == {"*": 2.0, "*bias": 0.1}
    named = [bounds.names[group] for group in bounds.group_of]
    assert named == ["*", "*bias", "*", "*bias"]


@pytest.mark.parametrize(
    ("norms", "message"),
    [
        ({"first/*": 1.0}, r"Received: last/kernel, which none fits\. Add a pattern"),
        ({"first/*": 1.0, "*kernel": 1.0, "*": 1.0}, r"first/kernel, which '\*kernel' and 'first/\*' both fit"),
        ({"*": 1.0, "middle/*": 1.0}, r"Received: 'middle/\*', which fits none of"),
        ({"*": 1e-7}, "at least 1e-06 for every layer"),
        (1e-6, "at least 1e-06 for every layer"),
    ],
)
def test_what_cannot_be_is_refused(oracle, norms, message):
    with pytest.raises(GradientError, match=message):
        per_layer(small(oracle)[0], norms)


def test_norms_of_another_model_are_refused(oracle):
    model, data = small(oracle)
    with pytest.raises(GradientError, match="clip norms for 4 trainable variables"):
        clipped_gradients(model, data, PerLayer(("a",), (1.0,), (0,)))
