"""`tfdp.verify`: agrees with a right step, finds wrong ones, and leaves the model as it was."""

from __future__ import annotations

import keras
import keras_hub
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tfdp.errors import DataError
from tfdp.gradients import uses
from tfdp.gradients.rules.dense import DenseRule

UNITS, FEATURES = 5, 4


def _network(*middle, loss="mse"):
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [keras.Input((FEATURES,)), keras.layers.Dense(6, activation="tanh"), *middle, keras.layers.Dense(2)]
    )
    model.compile("sgd", loss)
    return model


def _records(units=UNITS):
    generator = np.random.default_rng(0)
    return generator.normal(size=(units, FEATURES)).astype("float32"), generator.normal(size=(units, 2)).astype(
        "float32"
    )


def _gpt2(dropout):
    shape = {"vocabulary_size": 11, "num_layers": 1, "num_heads": 2, "hidden_dim": 8, "intermediate_dim": 12}
    backbone = keras_hub.models.GPT2Backbone(dropout=dropout, max_sequence_length=6, **shape)
    model = keras_hub.models.GPT2CausalLM(backbone=backbone, preprocessor=None)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def _tokens(units=UNITS):
    generator = np.random.default_rng(0)
    ids = generator.integers(1, 11, (units, 6))
    return {"token_ids": ids, "padding_mask": np.ones_like(ids)}, generator.integers(0, 11, (units, 6))


@pytest.mark.quick
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_language_model(dropout):
    found = tfdp.verify(_gpt2(dropout), _tokens(), units=3)
    assert found.ok
    assert found.units == 3
    assert found.findings == ()
    assert max(found.norms, found.sums) < 1e-5
    assert max(found.losses_of_others, found.gradients_of_others) < 1e-6
    assert ("batch of its own" if dropout == 0.0 else "same random numbers") in found.reference
    assert "clipped sum" in str(found)
    assert "NOT OK" not in str(found)


@pytest.mark.parametrize("options", [{"method": "vectorized"}, {"hybrid": True}, {"records_per_unit": 2}])
def test_the_options_of_the_callback(options):
    found = tfdp.verify(_network(), _records(8), **options)
    assert found.units == 4
    assert found.ok
    assert found.norms < 1e-5


def test_records_as_the_sampler_reads_them():
    x, y = _records()
    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    listed = list(zip(x, y, strict=True))
    expected = tfdp.verify(_network(), (x, y), units=3)
    for given in (dataset, listed):
        found = tfdp.verify(_network(), given, units=3)
        assert (found.norms, found.sums) == (expected.norms, expected.sums)
    with pytest.raises(DataError, match="at least two units"):
        tfdp.verify(_network(), _records(1))


def test_mixed_bfloat16_is_given_its_precision():
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        found = tfdp.verify(_gpt2(0.0), _tokens())
    finally:
        keras.config.set_dtype_policy("float32")
    assert found.ok
    assert 1e-5 < max(found.norms, found.sums) < found.allowed == 2.0**-5


@pytest.mark.quick
@pytest.mark.parametrize("mistake", ["bias", "norm", "factor"])
def test_a_wrong_rule_is_found(monkeypatch, mistake):
    """A bias forgotten, a norm too small, a sum with another factor than the norm was measured for."""
    if mistake == "bias":
        right = DenseRule.uses

        def without_bias(self, layer, *arguments):
            made = right(self, layer, *arguments)
            return [(v, uses.Direct(0.0 * use.gradient, use.shape) if v is layer.bias else use) for v, use in made]

        monkeypatch.setattr(DenseRule, "uses", without_bias)
    elif mistake == "norm":
        squared = uses.Outer.squared_norm
        monkeypatch.setattr(uses.Outer, "squared_norm", lambda self: 0.9 * squared(self))
    else:
        summed = uses.Outer.weighted_sum
        monkeypatch.setattr(uses.Outer, "weighted_sum", lambda self, factors: 1.01 * summed(self, factors))
    found = tfdp.verify(_network(), _records())
    assert not found.ok
    assert {finding.id for finding in found.findings} == {"PS044"}
    assert (found.norms < 1e-4) == (mistake == "factor")
    assert "NOT OK" in str(found)


class _Remote(keras.layers.Layer):
    """Mixes units by a little, and only in rows that are not made up (the trial's are of size one)."""

    def call(self, x):
        first = keras.ops.mean(x[:, :1], keepdims=True)
        return x + 1e-3 * keras.ops.relu(first - 50.0)


def test_mixing_that_shows_only_on_the_users_own_records():
    model = keras.Sequential(
        [keras.Input((FEATURES,)), keras.layers.Lambda(lambda x: x), _Remote(), keras.layers.Dense(2)]
    )
    model.compile("sgd", "mse")
    x, y = _records()
    x[:, 0] = [100.0, 400.0, 100.0, 900.0, 100.0]
    ids = [finding.id for finding in tfdp.verify(model, (x, y), units=5).findings]
    assert set(ids) <= {"PS043", "PS044"}
    assert "PS043" in ids


def test_mixing_that_the_made_up_rows_show():
    mixing = keras.layers.Lambda(lambda x: x - keras.ops.mean(x, 0, keepdims=True))
    found = tfdp.verify(_network(mixing), _records())
    assert [finding.id for finding in found.findings] == ["PS043"]
    assert found.norms is None
    assert "not measured" in str(found)


def test_what_cannot_be_measured_is_a_finding():
    assert [f.id for f in tfdp.verify(_network(keras.layers.BatchNormalization()), _records()).findings] == ["PS043"]
    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(2)])
    assert [f.id for f in tfdp.verify(model, _records()).findings] == ["PS045"]
    up = [keras.layers.Reshape((6, 1)), keras.layers.Conv1DTranspose(1, 1), keras.layers.Flatten()]
    assert [f.id for f in tfdp.verify(_network(*up), _records()).findings] == ["PS044"]
    assert tfdp.verify(_network(*up), _records(), hybrid=True).ok


def test_a_finding_of_a_call_is_told_in_its_own_words():
    """And not in those that Keras puts around an error within a call, with its arguments and escape sequences."""

    class Positions(keras.Model):
        def __init__(self):
            super().__init__()
            self.table, self.dense = keras.layers.Embedding(FEATURES, 2, name="positions"), keras.layers.Dense(2)

        def call(self, x):
            return self.dense(x[..., None]) + self.table(keras.ops.arange(FEATURES)[None])

    model = Positions()
    x, _ = _records()
    model(x)
    model.compile("sgd", "mse")
    data = x, np.zeros((UNITS, FEATURES, 2), "float32")
    (finding,) = tfdp.verify(model, data).findings
    assert finding.message.startswith("Expected the input of layer 'positions' (Embedding) to keep the batch")
    assert finding.message.endswith("(layer.trainable = False).")
    assert tfdp.verify(model, data, hybrid=True).ok


@pytest.mark.parametrize("failing", [False, True])
def test_the_model_is_as_it_was(monkeypatch, failing):
    model = _gpt2(0.3)
    optimizer, before = model.optimizer, [variable.numpy() for variable in model.variables]
    if failing:
        monkeypatch.setattr(uses.Outer, "weighted_sum", lambda self, factors: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            tfdp.verify(model, _tokens())
    else:
        assert tfdp.verify(model, _tokens()).ok
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    assert model.optimizer is optimizer
    assert all("call" not in vars(layer) for layer in model._flatten_layers())
