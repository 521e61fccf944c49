"""`check_model` and `cross_unit_fault`: every finding both ways."""

from __future__ import annotations

import keras
import keras_hub
import numpy as np
import pytest
import tensorflow as tf

from tfdp.models import check_model, cross_unit_fault, layers_without_rule

TOKENS = 6


def _gpt2(dropout=0.1, **options):
    shape = {"vocabulary_size": 11, "num_layers": 1, "num_heads": 2, "hidden_dim": 8, "intermediate_dim": 12}
    backbone = keras_hub.models.GPT2Backbone(dropout=dropout, max_sequence_length=TOKENS, **shape, **options)
    return keras_hub.models.GPT2CausalLM(backbone=backbone, preprocessor=None)


def _sequential(*layers, shape=(4,)):
    return keras.Sequential([keras.Input(shape), *layers])


def _ids(model, **options):
    return [finding.id for finding in check_model(model, **options)]


@pytest.mark.quick
def test_a_language_model_has_no_findings():
    model = _gpt2()
    assert check_model(model) == []
    model.backbone.enable_lora(2)
    assert check_model(model) == []


@pytest.mark.parametrize(
    ("layers", "shape", "found"),
    [
        ([keras.layers.Dense(3), keras.layers.BatchNormalization(), keras.layers.Dense(2)], (4,), ["PS043"]),
        ([keras.layers.Dense(3), keras.layers.LayerNormalization(), keras.layers.Dense(2)], (4,), []),
        ([keras.layers.Dense(3), keras.layers.BatchNormalization(trainable=False)], (4,), []),
        ([keras.layers.Conv1DTranspose(2, 2)], (4, 3), ["PS044"]),
        ([keras.layers.Dense(2, activity_regularizer="l2")], (4,), ["PS045"]),
        ([keras.layers.Dense(2, kernel_regularizer="l2")], (4,), []),
        ([keras.layers.Dense(2, dtype="mixed_float16")], (4,), ["PS046"]),
        ([keras.layers.Dense(2, dtype="mixed_bfloat16")], (4,), []),
        ([keras.layers.Dense(2, trainable=False)], (4,), ["PS046"]),
    ],
)
def test_findings_both_ways(layers, shape, found):
    assert _ids(_sequential(*layers, shape=shape)) == found


class _Adding(keras.layers.Layer):
    def __init__(self, when):
        super().__init__(name="adding")
        self.when = when

    def call(self, x, training=None):
        if self.when == "always" or (self.when == "in training" and training):
            self.add_loss(keras.ops.mean(x))
        return x


@pytest.mark.parametrize("kind", ["sequential", "nested", "functional", "subclass"])
@pytest.mark.parametrize(("when", "found"), [("always", ["PS045"]), ("in training", ["PS045"]), ("never", [])])
def test_add_loss_before_any_step(kind, when, found):
    """Told by tracing a call, so it is what training would do; a class that keeps its inputs to itself was called."""
    dense, adding = keras.layers.Dense(2), _Adding(when)
    if kind == "sequential":
        model = _sequential(dense, adding)
    elif kind == "nested":
        model = _sequential(keras.Sequential([dense, adding]))
    elif kind == "functional":
        inputs = {name: keras.Input((4,), name=name) for name in "ab"}
        model = keras.Model(inputs, adding(dense(inputs["a"] + inputs["b"])))
    else:

        class Own(keras.Model):
            def __init__(self):
                super().__init__()
                self.dense, self.adding = dense, adding

            def call(self, x, training=None):
                return self.adding(self.dense(x), training=training)

        model = Own()
        model(np.ones((2, 4)), training=True)
    assert [(each.id, each.where) for each in check_model(model)] == [(id, "adding (_Adding)") for id in found]


def test_memory_between_batches():
    assert "PS043" in _ids(keras.Sequential([keras.Input((4, 3), batch_size=2), keras.layers.LSTM(2, stateful=True)]))
    assert "PS043" not in _ids(_sequential(keras.layers.LSTM(2), shape=(4, 3)))


def test_layers_without_a_rule_pass_when_frozen_or_vectorized():
    model = _sequential(keras.layers.Conv1DTranspose(2, 2, name="conv"), keras.layers.Dense(2), shape=(4, 3))
    (finding,) = check_model(model)
    assert (finding.id, finding.where) == ("PS044", "conv (Conv1DTranspose)")
    assert "conv" in finding.message
    assert "method='vectorized'" in finding.message
    assert _ids(model, method="vectorized") == []
    model.get_layer("conv").trainable = False
    assert _ids(model) == []


def test_layers_under_a_remat_scope():
    with keras.RematScope(mode="full"):
        dense = keras.layers.Dense(2, name="again")
    assert "keras.RematScope" in str(check_model(_sequential(dense))[0])
    dense.trainable = False
    assert _ids(_sequential(dense, keras.layers.Dense(2))) == []


@pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method:UserWarning")  # Keras's, of any model
@pytest.mark.parametrize("kind", ["dense", "language_model"])
def test_quantized_layers(kind):
    """The bias stays trainable: nothing of a quantized layer may train, by whatever method."""
    model = _sequential(keras.layers.Dense(3, name="it"), keras.layers.Dense(2)) if kind == "dense" else _gpt2()
    model.quantize("int8")
    for options in ({}, {"hybrid": True}, {"method": "vectorized"}):
        found = check_model(model, **options)
        assert {finding.id for finding in found} == {"PS044"}
        assert all("Expected trainable layers that are not quantized" in finding.message for finding in found)
    model.trainable = False
    assert "PS044" not in _ids(model)


def test_lora_that_is_frozen():
    model = _gpt2()
    model.backbone.enable_lora(2)
    assert check_model(model) == []
    adapted = [layer for layer in model._flatten_layers() if getattr(layer, "lora_enabled", False)]
    for layer in adapted[:-1]:
        layer.trainable = False
    assert check_model(model) == []  # one of them trains: a choice
    adapted[-1].trainable = False
    model.backbone.token_embedding.trainable = True
    (finding,) = check_model(model)
    assert finding.id == "PS046"
    assert f"{2 * len(adapted)} LoRA weights, all of them frozen" in finding.message


def test_lora_that_trains_in_a_backbone_that_was_frozen():
    """Keras's word for the backbone does not reach the adapters: they would train against it."""
    model = _gpt2()
    model.backbone.enable_lora(2)
    model.backbone.trainable = False
    assert model.trainable_variables
    (finding,) = check_model(model)
    assert (finding.id, finding.where) == ("PS046", model.backbone.name)
    assert "frozen after enable_lora" in finding.message
    again = _gpt2()
    again.backbone.trainable = False
    again.backbone.enable_lora(2)
    assert check_model(again) == []


def test_float16_is_told_once():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = _gpt2()
    finally:
        keras.config.set_dtype_policy("float32")
    (finding,) = check_model(model)
    assert finding.id == "PS046"
    assert "float16 in" in finding.message
    assert "mixed_bfloat16" in finding.fix


class _Borrows(keras.layers.Layer):
    def __init__(self, lender, **options):
        super().__init__(**options)
        self.kernel = lender.kernel

    def call(self, x):
        return keras.ops.matmul(x, self.kernel)


@pytest.mark.parametrize("frozen_last", [True, False])
def test_a_weight_shared_with_a_frozen_layer(frozen_last):
    """Whichever layer spoke last: the weight either trains against one's word or stands still against the other's."""
    lender = keras.layers.Dense(4, name="lender")
    lender.build((None, 4))
    model = _sequential(lender, _Borrows(lender, name="borrower"), keras.layers.Dense(2))
    assert [finding.id for finding in check_model(model, hybrid=True)] == []
    lender.trainable = False
    if not frozen_last:
        model.get_layer("borrower").trainable = True
    found = check_model(model, hybrid=True)
    assert [finding.id for finding in found] == ["PS046"]
    assert "layer 'lender' freezes and layer 'borrower' trains" in found[0].message
    model.get_layer("borrower").trainable = False
    assert check_model(model, hybrid=True) == []


def test_hybrid_takes_layers_without_a_rule():
    model = _sequential(keras.layers.Conv1DTranspose(2, 2, name="conv"), keras.layers.Dense(2), shape=(4, 3))
    assert "hybrid=True" in check_model(model)[0].message
    assert _ids(model, hybrid=True) == []
    assert layers_without_rule(model) == ["conv (Conv1DTranspose)"]
    with keras.RematScope(mode="full"):
        again = keras.layers.Dense(2)
    assert _ids(_sequential(again), hybrid=True) == ["PS044"]


def test_what_is_not_a_model_or_not_ready(monkeypatch):
    assert _ids(keras.layers.Dense(2)) == ["PS046"]
    assert _ids(keras.Sequential([keras.layers.Dense(2)])) == ["PS046"]
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    assert _ids(_gpt2()) == ["PS046"]


def test_checking_changes_nothing():
    model = _gpt2()
    before = [value.copy() for value in model.get_weights()]
    check_model(model)
    spec = {"token_ids": tf.TensorSpec([TOKENS], tf.int32), "padding_mask": tf.TensorSpec([TOKENS], tf.bool)}
    cross_unit_fault(model, spec)
    for value, after in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(value, after)


@pytest.mark.quick
@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_a_language_model_keeps_units_apart(dtype):
    spec = {"token_ids": tf.TensorSpec([TOKENS], tf.int32), "padding_mask": tf.TensorSpec([TOKENS], tf.bool)}
    assert cross_unit_fault(_gpt2(dtype=dtype), spec) is None


def _training_only(x):
    return x - keras.ops.mean(x, 0, keepdims=True)


class _InTraining(keras.layers.Layer):
    def call(self, x, training=False):
        return _training_only(x) if training else x


class _Unseeded(keras.layers.Layer):
    def call(self, x):
        return x + tf.random.normal(tf.shape(x))


class _OfNoGenerator(keras.layers.Layer):
    """Draws from the one that Keras shares: seeded alike in every process, and on every replica of a strategy."""

    def call(self, x):
        return keras.random.dropout(x, 0.5)


@pytest.mark.parametrize(
    ("layer", "fault"),
    [
        (lambda: keras.layers.Lambda(lambda x: x - keras.ops.mean(x, 0, keepdims=True)), "changes with another unit"),
        (
            lambda: keras.layers.Lambda(lambda x: x - x[:1]),
            "changes with another unit",
        ),  # the first row is none the wiser
        (lambda: keras.layers.Lambda(lambda x: x - x[-1:]), "changes with another unit"),
        (lambda: keras.layers.Lambda(lambda x: keras.ops.cumsum(x, 0)), "changes with another unit"),
        (lambda: keras.layers.Lambda(lambda x: keras.ops.flip(x, 0)), "changes with another unit"),
        (lambda: keras.layers.Lambda(lambda x: keras.ops.reshape(x, (-1, 1))), "one row per record"),
        (lambda: keras.layers.Lambda(lambda x: keras.ops.mean(x)), "one row per record"),
        (_InTraining, "changes with another unit"),
        (keras.layers.BatchNormalization, "keeps something of its batch"),
        (_Unseeded, "SeedGenerator"),
        (_OfNoGenerator, "SeedGenerator"),
        (lambda: keras.layers.Lambda(lambda x: x - keras.ops.mean(x, 1, keepdims=True)), None),
        (lambda: keras.layers.Dropout(0.5), None),
        (lambda: keras.layers.GaussianNoise(0.5), None),
        (lambda: keras.layers.BatchNormalization(trainable=False), None),
    ],
)
def test_models_that_carry_one_unit_over_to_another(layer, fault):
    inputs = keras.Input((4,))
    model = keras.Model(inputs, layer()(keras.layers.Dense(3)(inputs)))
    found = cross_unit_fault(model, tf.TensorSpec([4], tf.float32))
    assert (found is None) if fault is None else (fault in found)


def test_units_of_one_number():
    """With one made-up id the two rows could be alike by chance; the changed one never is."""
    inputs = keras.Input((), dtype="int32")
    x = keras.layers.Embedding(3, 2)(inputs)
    model = keras.Model(inputs, keras.layers.Lambda(lambda x: x + keras.ops.sum(x, 0, keepdims=True))(x))
    assert "changes with another unit" in cross_unit_fault(model, tf.TensorSpec([], tf.int32))


class _Remembers(keras.layers.Layer):
    """Assigns to the TensorFlow variable itself, which Keras does not see."""

    def build(self, shape):
        self.mean = self.add_weight(shape=(), trainable=False, initializer="zeros")

    def call(self, x):
        self.mean.value.assign(tf.reduce_mean(x))
        return x


class _Shuffles(keras.layers.Layer):
    def __init__(self, seed):
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(seed)

    def call(self, x):
        return 0.5 * x + 0.5 * keras.random.shuffle(x, 0, seed=self.seed_generator)


def test_mixing_that_shows_only_in_large_values():
    model = _sequential(keras.layers.Lambda(lambda x: x / tf.maximum(tf.reduce_max(tf.abs(x)), 10.0)))
    assert "changes with another unit" in cross_unit_fault(model, tf.TensorSpec([4], tf.float32))


@pytest.mark.parametrize("seed", range(6))
def test_mixing_by_chance(seed):
    """A permutation of five rows keeps them all in place once in 120 times, and there are two draws."""
    assert "another unit" in cross_unit_fault(_sequential(_Shuffles(seed)), tf.TensorSpec([4], tf.float32))


@pytest.mark.parametrize("seed", range(4))
def test_images_cut_into_one_another(seed):
    model = _sequential(keras.layers.CutMix(seed=seed), shape=(8, 8, 3))
    assert "another unit" in cross_unit_fault(model, tf.TensorSpec([8, 8, 3], tf.float32))


def test_a_variable_assigned_past_keras():
    layer = _Remembers()
    model = _sequential(layer)
    assert "keeps something of its batch" in cross_unit_fault(model, tf.TensorSpec([4], tf.float32))
    assert layer.mean.numpy() == 0.0


def test_a_little_mixing_in_bfloat16():
    mixing = keras.layers.Lambda(lambda x: 0.98 * x + 0.02 * keras.ops.flip(x, 0), dtype="mixed_bfloat16")
    assert "another unit" in cross_unit_fault(_sequential(mixing), tf.TensorSpec([4], tf.float32))
    alone = _sequential(keras.layers.Dense(4, dtype="mixed_bfloat16"), keras.layers.Dropout(0.5))
    assert cross_unit_fault(alone, tf.TensorSpec([4], tf.float32)) is None


@pytest.mark.parametrize("kind", ["Llama", "Bert"])
@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_other_families_keep_units_apart(kind, dtype):
    shape = {"vocabulary_size": 11, "num_layers": 1, "hidden_dim": 8, "intermediate_dim": 12, "dropout": 0.3}
    spec = {"token_ids": tf.TensorSpec([TOKENS], tf.int32), "padding_mask": tf.TensorSpec([TOKENS], tf.bool)}
    if kind == "Llama":
        model = keras_hub.models.LlamaBackbone(num_query_heads=2, num_key_value_heads=1, dtype=dtype, **shape)
    else:
        model = keras_hub.models.BertBackbone(num_heads=2, dtype=dtype, **shape)
        spec["segment_ids"] = tf.TensorSpec([TOKENS], tf.int32)
    assert cross_unit_fault(model, spec) is None
