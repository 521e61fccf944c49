"""What the taps see and what they refuse: a gradient that no rule sees must never be silently missing."""

from __future__ import annotations

import keras
import keras_hub
import numpy as np
import pytest
import tensorflow as tf

from tfdp import keras_private
from tfdp.errors import UnsupportedLayerError
from tfdp.gradients import clipped_gradients, taps

BATCH, TOKENS, WIDTH = 3, 4, 5
Dense = keras.layers.Dense
_FIRST = keras_private.hub_class("mobilenetv5.mobilenetv5_layers:RmsNorm2d")


def _x(batch=BATCH, tokens=TOKENS):
    return np.random.default_rng(0).normal(size=(batch, tokens, WIDTH)).astype("float32")


def _ids(batch=BATCH, tokens=TOKENS):
    return np.random.default_rng(0).integers(0, 7, (batch, tokens)).astype("int32")


class Made(keras.Model):
    """A model from layers and a function of them and the inputs."""

    def __init__(self, forward, **layers):
        super().__init__()
        self.forward = forward
        for name, layer in layers.items():
            setattr(self, name, layer)

    def call(self, inputs):
        return self.forward(self, inputs)


def _made(forward, x, **layers):
    model = Made(forward, **layers)
    model(x)
    model.compile(loss="mse")
    return model


def _data(model, x):
    return x, np.zeros(model(x).shape, "float32")


def _refusal(model, x):
    data = _data(model, x)
    calls = [vars(layer).get("call") for layer in keras_private.flatten_layers(model)]
    with pytest.raises(UnsupportedLayerError) as caught:
        clipped_gradients(model, data, 1.0)
    assert [vars(layer).get("call") for layer in keras_private.flatten_layers(model)] == calls
    return str(caught.value)


def _agrees(oracle, model, x, clip_norm=0.5):
    oracle.shaken(model)
    data = _data(model, x)
    oracle.assert_agrees(oracle.private(model, data, clip_norm), oracle.reference_of(model, data), clip_norm)


# Layers without a rule of their own.


class Doubled(Dense):
    def call(self, inputs, training=None):
        return 2.0 * super().call(inputs, training=training)


class Normed(Dense):
    @property
    def kernel(self):
        return keras.ops.normalize(self._kernel, axis=0)


class Scaled(keras.layers.Layer):
    """A bare variable in a layer that holds others."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(), name="scale")
        self.dense = Dense(WIDTH)
        self.dense.build(shape)

    def call(self, x):
        return self.scale * self.dense(x)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (lambda: Doubled(2, name="twice"), "layer 'twice' (Doubled), which has none. Freeze it"),
        (lambda: Normed(2, name="unit"), "layer 'unit' (Normed), which overrides kernel"),
        (lambda: Scaled(name="scaled"), "layer 'scaled' (Scaled), which has none"),
        (lambda: keras.layers.Conv1DTranspose(2, 2, name="conv"), "layer 'conv' (Conv1DTranspose), which has none"),
        (lambda: Dense(2, activation=keras.layers.PReLU(name="slope")), "layer 'slope' (PReLU), which has none"),
    ],
)
def test_layers_without_a_rule(layer, words):
    assert words in _refusal(_made(lambda m, x: m.layer(x), _x(), layer=layer()), _x())


def test_they_pass_when_frozen_or_vectorized(oracle):
    model = _made(lambda m, x: m.last(m.layer(x)), _x(), layer=Scaled(), last=Dense(2))
    data = _data(model, _x())
    reference = oracle.reference_of(model, data)
    oracle.assert_agrees(oracle.private(model, data, 0.1, method="vectorized"), reference, 0.1)
    model.layer.trainable = False
    _agrees(oracle, model, _x())


def test_a_call_put_on_the_layer_itself():
    model = _made(lambda m, x: m.dense(x), _x(), dense=Dense(2))
    original = model.dense.call
    object.__setattr__(model.dense, "call", lambda inputs: 2.0 * original(inputs))
    assert "overrides call" in _refusal(model, _x())


def test_an_activation_that_is_a_layer_is_taken_along(oracle):
    model = _made(lambda m, x: m.dense(x), _x(), dense=Dense(WIDTH, activation=keras.layers.LayerNormalization()))
    assert len(model.trainable_variables) == 4
    _agrees(oracle, model, _x())


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras, under NumPy 2
def test_quantized_layers():
    model = _made(lambda m, x: m.dense(x), _x(), dense=Dense(4))
    model.dense.quantize("int8")
    model.dense.enable_lora(2)
    assert "quantized to int8" in _refusal(model, _x())


def test_lora_beside_a_kernel_that_trains_too():
    """The rule would leave the kernel out, silently if another layer shared it."""
    dense, table = Dense(4), keras.layers.Embedding(7, WIDTH)
    model = _made(lambda m, x: m.dense(m.table(x)), _ids(), table=table, dense=dense)
    dense.enable_lora(2)
    dense._kernel.trainable = True
    assert "it trains made" in _refusal(model, _ids())
    dense._kernel.trainable = False
    table.enable_lora(2)
    table._embeddings.trainable = True
    assert "it trains made" in _refusal(model, _ids())


@pytest.mark.parametrize(
    ("layer", "x", "words"),
    [
        (keras.layers.LayerNormalization(axis=[1, 2]), _x(), "over axes [1, 2]"),
        (keras.layers.LayerNormalization(axis=1), _x(tokens=WIDTH), "axis [1] of an input of shape (3, 5, 5)"),
        (keras.layers.RMSNormalization(axis=1), _x(tokens=WIDTH), "axis [1] of an input of shape (3, 5, 5)"),
        (keras.layers.RMSNormalization(axis=[1, 2]), _x(), "over axes [1, 2]"),
        (_FIRST(WIDTH, data_format="channels_first"), _x(tokens=WIDTH)[..., None], "not the last axis"),
        (keras.layers.EinsumDense("abc,cd->bad", (BATCH, 2)), _x(tokens=BATCH), "not a batch axis"),
        (keras.layers.EinsumDense("abc,acd->abd", (TOKENS, 2)), _x(), "not a batch axis"),
        (keras.layers.EinsumDense("abc,cd->ad", (2,)), _x(), "sums an input axis"),
    ],
)
def test_configurations_that_a_rule_does_not_cover(layer, x, words):
    assert words in _refusal(_made(lambda m, x: m.layer(x), x, layer=layer), x)


@pytest.mark.parametrize(("heads", "tokens", "axis"), [(2, 2, 1), (4, 3, 3)])
def test_a_bias_that_keras_adds_along_another_axis(heads, tokens, axis):
    """As many heads as tokens, or as values of a head: what Keras computes is not what the layer says."""
    layer = keras.layers.EinsumDense("abc,cde->abde", (None, heads, 4), bias_axes="d")
    x = _x(tokens=tokens)
    layer(x)
    layer.bias.assign(np.arange(heads)[:, None])
    added = np.asarray(layer(x) - tf.einsum("abc,cde->abde", x, layer.kernel.value))
    assert not np.allclose(added[0, 0, :, 0], np.arange(heads), atol=1e-4)
    assert f"along axis {axis}" in _refusal(_made(lambda m, x: m.layer(x), x, layer=layer), x)


@pytest.mark.parametrize("options", [{"start_index": 1}, {"positions": np.array([1, 0, 2, 3])}])
def test_positions_that_do_not_start_at_zero(options):
    layer = keras_hub.layers.PositionEmbedding(9)
    assert "from index 0" in _refusal(_made(lambda m, x: m.layer(x, **options), _x(), layer=layer), _x())


# Variables that are read past their layer.


def _tied_by_hand(model, ids):
    return keras.ops.matmul(model.table(ids), keras.ops.transpose(model.table.embeddings))


@pytest.mark.quick
def test_a_table_tied_by_hand(oracle):
    model = _made(_tied_by_hand, _ids(), table=keras.layers.Embedding(7, WIDTH))
    message = _refusal(model, _ids())
    assert "read outside the call of the layer that holds them" in message
    assert "embeddings" in message
    data = _data(model, _ids())
    result = oracle.private(model, data, 0.1, method="vectorized")
    oracle.assert_agrees(result, oracle.reference_of(model, data), 0.1)


def test_a_table_read_by_another_layer_with_a_rule():
    """A head's call is tapped for its bias; what it calls may still read what is not its own."""

    class ByHand(keras.layers.Layer):
        def __init__(self, table):
            super().__init__()
            self.table, self.input_dim, self.output_dim = table, table.input_dim, table.output_dim

        def call(self, x, reverse=True):
            return keras.ops.matmul(x, keras.ops.transpose(self.table.embeddings))

    table = keras.layers.Embedding(7, WIDTH)
    table.build()
    head = keras_hub.layers.MaskedLMHead(token_embedding=ByHand(table))

    def forward(model, ids):
        return model.head(model.table(ids), mask_positions=tf.zeros([ids.shape[0], 2], tf.int32))

    message = _refusal(_made(forward, _ids(), table=table, head=head), _ids())
    assert "1 that are read outside the call of the layer that holds them" in message


def _tied_in(place):
    """The same projection, hidden in something that is traced on its own."""

    def forward(model, ids):
        hidden = model.table(ids)

        def project():
            return tf.matmul(hidden, tf.transpose(tf.convert_to_tensor(model.table.embeddings)))

        if place == "function":
            return tf.function(project, autograph=False)()
        if place == "branch":
            return tf.cond(tf.reduce_sum(hidden) > 1e9, lambda: 2.0 * project(), project)
        return tf.while_loop(lambda i, _: i < 1, lambda i, _: (i + 1, project()), (0, tf.zeros([*ids.shape, 7])))[1]

    return forward


@pytest.mark.parametrize("place", ["function", "branch", "loop"])
def test_a_table_tied_by_hand_out_of_sight(place):
    model = _made(_tied_in(place), _ids(), table=keras.layers.Embedding(7, WIDTH))
    data = _data(model, _ids())
    with pytest.raises(UnsupportedLayerError, match="read outside the call"):
        tf.function(lambda: clipped_gradients(model, data, 1.0), autograph=False)()


def test_a_loss_that_reads_a_weight():
    model = _made(lambda m, x: m.dense(x), _x(), dense=Dense(2))
    model.compile(loss=lambda y, p: keras.ops.mean((y - p) ** 2) + keras.ops.sum(keras.ops.square(model.dense.kernel)))
    assert "read outside the call" in _refusal(model, _x())


def test_a_variable_that_takes_no_part():
    model = _made(lambda m, x: (m.unused(x), m.dense(x))[1], _x(), dense=Dense(2), unused=Dense(3, name="unused"))
    message = _refusal(model, _x())
    assert "2 that take no part in the loss" in message
    assert "unused/bias" in message
    assert "layer.trainable = False" in message
    with pytest.raises(UnsupportedLayerError, match="take part in the loss"):
        clipped_gradients(model, _data(model, _x()), 1.0, method="vectorized")


def test_a_variable_that_tensorflow_does_not_watch():
    class Late(Dense):
        def build(self, shape):
            super().build(shape)
            self._tracker.unlock()
            self.bias = self.add_weight(shape=(self.units,), trainable=False, name="bias")

    model = _made(lambda m, x: m.dense(x), _x(), dense=Late(2, use_bias=False))
    model.dense.bias.trainable = True
    assert "made with trainable=False" in _refusal(model, _x())


# Leading axes that are not the batch.


@pytest.mark.parametrize("batch", [BATCH, 1])
def test_one_row_for_all_records(batch):
    """Also where the batch is one record, and no shape tells."""

    def forward(model, x):
        return model.dense(x) + model.positions(tf.range(TOKENS)[None])

    x = _x(batch)
    model = _made(forward, x, dense=Dense(2), positions=keras.layers.Embedding(TOKENS, 2, name="positions"))
    assert "the input of layer 'positions' (Embedding) to keep the batch as its leading axis" in _refusal(model, x)


@pytest.mark.quick
@pytest.mark.parametrize("batch", [TOKENS, TOKENS - 1])
def test_a_table_with_as_many_rows_as_the_batch_by_chance(batch):
    """Positions looked up once for all records, when tokens and records are equally many: no shape tells."""

    def forward(model, x):
        return model.dense(x) + model.positions(tf.range(TOKENS))

    model = _made(forward, _x(batch), dense=Dense(2), positions=keras.layers.Embedding(TOKENS, 2, name="positions"))
    assert "the input of layer 'positions' (Embedding) to keep the batch as its leading axis" in _refusal(
        model, _x(batch)
    )


def test_time_first():
    def forward(model, x):
        return tf.transpose(model.dense(tf.transpose(x, [1, 0, 2])), [1, 0, 2])

    model = _made(forward, _x(TOKENS), dense=Dense(2))
    assert "to keep the batch as its leading axis" in _refusal(model, _x(TOKENS))


@pytest.mark.parametrize("kind", ["ragged", "sparse"])
def test_inputs_that_are_not_dense(kind):
    if kind == "ragged":
        layer = keras.layers.Embedding(7, 2)
        model = _made(lambda m, x: m.layer(tf.RaggedTensor.from_tensor(x)).to_tensor(), _ids(), layer=layer)
        x = _ids()
    else:
        model = _made(lambda m, x: m.layer(tf.sparse.from_dense(x)), _x()[:, 0], layer=Dense(2))
        x = _x()[:, 0]
    assert "to be one dense tensor" in _refusal(model, x)


# Calls whose gradients stay somewhere else.


def _call_in(place):
    def forward(model, x):
        inner = model.inner
        if place == "function":
            return model.dense(tf.function(inner, autograph=False)(x))
        if place == "branch":
            return model.dense(tf.cond(tf.reduce_sum(x) > 1e9, lambda: 2.0 * inner(x), lambda: inner(x)))
        if place == "loop":
            return model.dense(tf.while_loop(lambda i, _: i < 1, lambda i, y: (i + 1, inner(y)), (0, x))[1])
        if place == "map":
            return model.dense(tf.vectorized_map(lambda row: inner(row[None])[0], x))
        return model.dense(tf.recompute_grad(inner)(x))

    return forward


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("place", ["function", "branch", "loop", "map", "recomputed"])
def test_calls_inside_something_traced_on_its_own(place, graph):
    """`inner` is used in the open, too: its use in there would only be missing from the sum."""
    inner = Dense(WIDTH, name="inner")
    hidden = _call_in(place)
    model = _made(lambda m, x: hidden(m, x) + m.dense(m.inner(x)), _x(), inner=inner, dense=Dense(WIDTH))
    data = _data(model, _x())
    run = lambda: clipped_gradients(model, data, 1.0)  # noqa: E731
    where = "keep the batch" if place == "map" else "be called where the model is"  # one row at a time
    with pytest.raises(UnsupportedLayerError, match=rf"layer 'inner' \(Dense\) to {where}"):
        tf.function(run, autograph=False)() if graph else run()
    assert "call" not in vars(inner)


def test_layers_made_under_a_remat_scope():
    with keras.RematScope(mode="full"):
        model = _made(lambda m, x: m.dense(x), _x(), dense=Dense(2, name="again"))
    assert "keras.RematScope" in _refusal(model, _x())


def test_a_stopped_gradient_is_no_gradient(oracle):
    def forward(model, x):
        hidden = model.dense(x)
        return model.last(hidden + tf.stop_gradient(model.dense(hidden)))

    _agrees(oracle, _made(forward, _x(), dense=Dense(WIDTH, activation="tanh"), last=Dense(2)), _x())


# What goes through.


def test_arguments_by_name(oracle):
    def forward(model, ids):
        hidden = model.norm(x=model.dense(inputs=model.table(inputs=ids, reverse=False), training=True))
        return model.table(inputs=hidden, reverse=True)

    layers = {"table": keras.layers.ReversibleEmbedding(7, WIDTH), "dense": Dense(WIDTH)}
    _agrees(oracle, _made(forward, _ids(), norm=keras.layers.RMSNormalization(), **layers), _ids())


def test_rows_picked_from_an_output(oracle):
    """The gradient of a look-up in an output comes as index slices."""

    def forward(model, x):
        return model.last(tf.gather(model.dense(x), [1, 1, 3], axis=1)) + tf.gather(model.dense(x), [0], axis=1)

    _agrees(oracle, _made(forward, _x(), dense=Dense(WIDTH), last=Dense(WIDTH)), _x())


def test_constraints_change_nothing(oracle):
    dense = Dense(3, kernel_constraint=keras.constraints.MaxNorm(0.1), bias_constraint="non_neg")
    _agrees(oracle, _made(lambda m, x: m.dense(x), _x(), dense=dense), _x())


def test_attention_and_shared_layers(oracle):
    """Keras's own attention: one layer called twice, memory of another length."""
    attention = keras.layers.MultiHeadAttention(2, 3)

    def forward(model, x):
        return model.attention(model.attention(x, x), x[:, :2])

    _agrees(oracle, _made(forward, _x(), attention=attention), _x())


def test_a_layer_of_another_precision(oracle):
    """Variables in bfloat16: norms and sums are float32 all the same; 2% is what 8 bits give."""
    model = _made(lambda m, x: m.last(m.dense(x)), _x(), dense=Dense(WIDTH, dtype="bfloat16"), last=Dense(2))
    data = _data(model, _x())
    sums, norms, _ = oracle.private(model, data, 0.1)
    assert {s.dtype for s in sums} == {norms.dtype} == {np.dtype("float32")}
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(data[0][:1]) ** 2)
    gradients = [tf.cast(g, tf.float32).numpy() for g in tape.gradient(loss, [v.value for v in model.variables])]
    np.testing.assert_allclose(norms[0], np.linalg.norm(oracle.flat(gradients)), rtol=0.02)


@pytest.mark.quick
def test_everything_is_put_back_after_an_exception():
    dense = Dense(2, activation="tanh")
    model = _made(lambda m, x: m.dense(x), _x(), dense=dense)
    activation = dense.activation
    with taps.record(model, BATCH):
        assert "call" in vars(dense)
        model(_x())
        assert dense.activation is activation
    assert "call" not in vars(dense)
    for error, batch_size, x in [(ValueError, BATCH, _x()[:, :, :2]), (UnsupportedLayerError, BATCH + 1, _x())]:
        with pytest.raises(error), taps.record(model, batch_size):
            model(x)
        assert "call" not in vars(dense)
        assert dense.activation is activation
