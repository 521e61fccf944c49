"""What Keras and TensorFlow keep private and tfdp relies on. When one of these fails, an upgrade changed it."""

from __future__ import annotations

import sys

import keras
import keras_hub
import numpy as np
import pytest
import tensorflow as tf

from tfdp import keras_private


class _Nest(keras.layers.Layer):
    def __init__(self, **options):
        super().__init__(**options)
        self.inner = keras.layers.Dense(2, name="inner")
        self.twice = [self.inner, keras.layers.Dense(2, name="other")]

    def build(self, shape):
        self.inner.build(shape)
        self.twice[1].build(shape)
        self.scale = self.add_weight(shape=(), name="scale")

    def call(self, x):
        return self.scale * self.inner(x)


@pytest.fixture
def nest():
    layer = _Nest(name="nest")
    layer(np.zeros((1, 2)))
    return layer


def test_every_layer_is_listed_once(nest):
    assert sorted(layer.name for layer in keras_private.flatten_layers(nest)) == ["inner", "nest", "other"]
    inputs = keras.Input((2,))
    model = keras.Model(inputs, nest(inputs), name="model")
    names = [layer.name for layer in keras_private.flatten_layers(model) if layer is not model]
    assert {"inner", "nest", "other"} < set(names)
    assert len(names) == len(set(names))
    assert keras_private.flatten_layers(model)[0] is model


def test_own_variables(nest):
    assert keras_private.own_variables(nest) == [nest.scale]
    assert keras_private.own_variables(nest.inner) == [nest.inner.kernel, nest.inner.bias]
    head = keras_hub.layers.MaskedLMHead(token_embedding=keras_hub.layers.ReversibleEmbedding(5, 2))
    head(np.zeros((1, 3, 2)), mask_positions=np.zeros((1, 2), "int32"))
    assert [tuple(v.shape) for v in keras_private.own_variables(head)] == [(5,)]


def test_a_replaced_call_is_the_one_that_keras_runs(nest):
    seen = []

    def make(original):
        def call(*args, **kwargs):
            seen.append(args)
            return original(*args, **kwargs)

        return call

    inputs = keras.Input((2,))
    model = keras.Model(inputs, nest(inputs))
    with keras_private.replaced_call(nest.inner, make):
        model(np.ones((3, 2)))
    assert [args[0].shape for args in seen] == [(3, 2)]
    model(np.ones((3, 2)))
    assert len(seen) == 1
    with pytest.raises(ZeroDivisionError), keras_private.replaced_call(nest.inner, make):
        raise ZeroDivisionError
    assert "call" not in vars(nest.inner)


def test_a_replaced_attribute_comes_back(nest):
    tanh = keras.activations.tanh
    nest.inner.activation = tanh
    with pytest.raises(ZeroDivisionError), keras_private.replaced_attribute(nest.inner, "activation", None):
        raise ZeroDivisionError
    assert nest.inner.activation is tanh


def test_an_attribute_that_is_a_layer_stays_tracked():
    dense = keras.layers.Dense(2, activation=keras.layers.PReLU())
    dense(np.zeros((1, 2)))
    with keras_private.replaced_attribute(dense, "activation", None):
        assert len(dense.trainable_variables) == 3
    assert len(dense.trainable_variables) == 3


def test_masks_travel_to_the_loss_as_keras_attaches_them():
    model = keras.Sequential([keras.Input((3,), dtype="int32"), keras.layers.Embedding(5, 2, mask_zero=True)])
    output = model(np.array([[1, 2, 0]]))
    np.testing.assert_array_equal(keras_private.keras_mask(output), [[True, True, False]])
    plain = tf.constant(output.numpy())
    assert keras_private.keras_mask(plain) is None
    loss = keras.losses.MeanAbsoluteError()
    unmasked = float(loss(tf.ones_like(plain), plain))
    keras_private.set_keras_mask(plain, tf.constant([[True, True, False]]))
    assert float(loss(tf.ones_like(plain), plain)) == pytest.approx(float(loss(tf.ones_like(plain), output)))
    assert float(loss(tf.ones_like(plain), plain)) != pytest.approx(unmasked)


def test_llama_layer_norm_is_the_one_that_llama_uses():
    shape = {"num_query_heads": 1, "num_key_value_heads": 1, "hidden_dim": 4, "intermediate_dim": 4}
    backbone = keras_hub.models.LlamaBackbone(vocabulary_size=5, num_layers=1, **shape)
    norms = [layer for layer in keras_private.flatten_layers(backbone) if "norm" in layer.name]
    assert norms
    assert {type(layer) for layer in norms} == {keras_private.hub_class("llama.llama_layernorm:LlamaLayerNorm")}


def test_a_replaced_method_is_found_on_its_class_again(nest):
    with keras_private.replaced_attribute(nest, "compute_mask", len):
        assert nest.compute_mask is len
    assert "compute_mask" not in vars(nest)
    with keras_private.replaced_attribute(nest, "scale", 2.0):
        assert nest.scale == 2.0
    assert nest.scale is nest.variables[0]


def test_own_losses():
    class Adding(keras.layers.Layer):
        def call(self, x):
            self.add_loss(keras.ops.sum(x))
            return x

    adding, regular = Adding(), keras.layers.Dense(2, kernel_regularizer="l2")
    model = keras.Sequential([keras.Input((2,)), regular, adding])
    model(np.ones((1, 2)))
    model(np.ones((1, 2)))
    assert len(keras_private.own_losses(adding)) == 1
    assert keras_private.own_losses(regular) == []
    assert len(model.losses) == 2
    active = keras.layers.Dense(2, activity_regularizer="l2")
    active(np.ones((1, 2)))
    assert len(keras_private.own_losses(active)) == 1


def test_added_losses_are_seen_in_a_traced_call():
    class Adding(keras.layers.Layer):
        def call(self, x):
            self.add_loss(keras.ops.sum(x))
            return x

    class Later(Adding):
        pass

    later, dropout = Later(), keras.layers.Dropout(0.5)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, activity_regularizer="l2"), dropout, later])
    mentions = [keras_private.mentions_add_loss(each) for each in keras_private.flatten_layers(model)]
    assert mentions == [each is later for each in keras_private.flatten_layers(model)]
    before = [v.numpy() for v in model.variables]  # with the state of the dropout
    assert keras_private.adding_losses(model, model.layers) == [model.layers[0], later]
    assert model.losses == []
    for one, other in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(one.numpy(), other)
    assert keras_private.input_specs(model).shape.as_list() == [None, 2]
    assert keras_private.input_specs(keras.Model()) is None


def test_computes_loss_itself():
    class OwnLoss(keras.Model):
        def compute_loss(self, *args, **kwargs):
            return 0.0

    class OwnStep(keras.Model):
        def train_step(self, data):
            return {}

    assert not keras_private.computes_loss_itself(keras.Sequential())
    assert keras_private.computes_loss_itself(OwnLoss())
    assert keras_private.computes_loss_itself(OwnStep())
    model = keras.Sequential()
    model.compute_loss = lambda **kwargs: 0.0
    assert keras_private.computes_loss_itself(model)


def test_compiled_loss_is_what_compute_loss_adds_to():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, kernel_regularizer="l2")])
    assert keras_private.compiled_loss(model) is None
    model.compile(loss=None)
    assert keras_private.compiled_loss(model) is None
    model.compile(loss="mse")
    y, y_pred, weight = tf.ones((3, 2)), tf.constant([[1.0, 3.0]] * 3), tf.constant([1.0, 0.0, 2.0])
    loss = keras_private.compiled_loss(model)(y, y_pred, weight)
    assert float(loss) == pytest.approx(2.0)
    whole = model.compute_loss(y=y, y_pred=y_pred, sample_weight=weight)
    assert float(whole) == pytest.approx(2.0 + float(sum(model.losses)))


def test_layers_know_that_they_were_made_under_a_remat_scope():
    assert not keras_private.is_recomputed(keras.layers.Dense(2))
    with keras.RematScope(mode="full"):
        assert keras_private.is_recomputed(keras.layers.Dense(2))


@pytest.mark.parametrize("graph", [False, True])
def test_recomputation_stops_the_tapes(graph):
    seen = {}

    def inner(x):
        seen["inside"] = keras_private.is_recording()
        return x * x

    def run():
        with tf.GradientTape():
            seen["open"] = keras_private.is_recording()
            return tf.recompute_grad(inner)(tf.constant(2.0))

    (tf.function(run) if graph else run)()
    assert seen == {"open": True, "inside": False}
    assert not keras_private.is_recording()


@pytest.mark.parametrize("compiled", [True, False])
def test_is_compiled_by_xla_also_in_a_branch(compiled):
    seen = []

    @tf.function(jit_compile=compiled, autograph=False)
    def run(x):
        seen.append(keras_private.is_compiled_by_xla())
        return tf.cond(x > 0, lambda: seen.append(keras_private.is_compiled_by_xla()) or x, lambda: -x)

    run(tf.constant(1.0))
    assert seen == [compiled, compiled]
    assert not keras_private.is_compiled_by_xla()


def test_seed_states():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dropout(0.5), keras.layers.BatchNormalization()])
    (state,) = keras_private.seed_states(model)
    before = state.numpy().copy()
    model(np.ones((1, 2)), training=True)
    assert not np.array_equal(before, state.numpy())


def test_build_metrics_leaves_nothing_to_create():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    model.compile(loss="mse", metrics=["mae"], weighted_metrics=["mse"])
    x, y = tf.TensorSpec([3, 2], tf.float32), tf.TensorSpec([3, 2], tf.float32)
    keras_private.build_metrics(model, *(keras.KerasTensor(s.shape, s.dtype.name) for s in (x, y)), None)
    before = {id(v) for v in model.metrics_variables}
    assert len(before) >= 6
    model.compute_metrics(tf.ones((3, 2)), tf.ones((3, 2)), tf.ones((3, 2)), None)
    assert {id(v) for v in model.metrics_variables} == before


def test_the_variables_that_a_watching_tape_lists_are_those_of_keras():
    """`Recording.read_outside` matches them by identity."""
    dense = keras.layers.Dense(2)
    dense.build((1, 2))
    with tf.GradientTape() as tape:
        keras.ops.sum(dense.kernel)
    assert [id(v) for v in tape.watched_variables()] == [id(dense.kernel.value)]


def test_the_initial_epoch_is_read_after_a_fit_has_begun():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    assert keras_private.initial_epoch(model) is None
    begin = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: keras_private.set_initial_epoch(model, 3))
    history = model.fit(np.ones((2, 2)), np.ones((2, 2)), epochs=5, callbacks=[begin], verbose=0)
    assert history.epoch == [3, 4]
    keras_private.set_initial_epoch(model, 5)
    assert model.fit(np.ones((2, 2)), np.ones((2, 2)), epochs=5, verbose=0).epoch == []


def test_the_variables_of_an_optimizer():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    optimizer = keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)
    assert [id(v) for v in keras_private.optimized_variables(optimizer)] == [id(v) for v in model.trainable_variables]


def test_a_fit_is_found_on_the_stack():
    model, other = (keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)]) for _ in range(2))
    model.compile("sgd", "mse")
    mine, others = keras_private.fit_runs(model), keras_private.fit_runs(other)
    seen = []
    look = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append((mine(sys._getframe()), others(sys._getframe()))),
        on_test_batch_end=lambda batch, logs: seen.append(mine(sys._getframe())),
    )
    model.fit(np.ones((2, 2)), np.ones((2, 2)), callbacks=[look], verbose=0)
    model.evaluate(np.ones((2, 2)), np.ones((2, 2)), callbacks=[look], verbose=0)
    assert seen == [(True, False), False]
    assert not mine(None)


def test_the_shared_generator_is_the_one_that_keras_draws_from():
    before = keras_private.shared_seed_state().numpy()
    keras.random.normal((1,))
    assert not np.array_equal(before, keras_private.shared_seed_state().numpy())


def test_the_strategy_that_a_model_was_made_under():
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    with strategy.scope():
        inside = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    assert keras_private.strategy_made_under(inside) is strategy
    assert keras_private.strategy_made_under(keras.Sequential([keras.Input((2,))])) is None
