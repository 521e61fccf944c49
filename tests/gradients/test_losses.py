"""The loss of a unit is what Keras computes on that unit alone; what is not taken per unit is refused."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdp import keras_private
from tfdp.errors import LossNotPerUnitError
from tfdp.gradients import clipped_gradients

CLASSES, TOKENS = 5, 4
CrossEntropy = keras.losses.SparseCategoricalCrossentropy


def _function(y_true, y_pred):
    return keras.ops.mean(keras.ops.square(keras.ops.one_hot(keras.ops.cast(y_true, "int32"), CLASSES) - y_pred), -1)


def _already_reduced(y_true, y_pred):
    return keras.ops.mean(_function(y_true, y_pred)) ** 2


class _Focal(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True) ** 2


LOSSES = {
    "string": "sparse_categorical_crossentropy",
    "object": CrossEntropy(from_logits=True),
    "sum": CrossEntropy(from_logits=True, reduction="sum"),
    "mean": CrossEntropy(from_logits=True, reduction="mean"),
    "mean_with_sample_weight": CrossEntropy(from_logits=True, reduction="mean_with_sample_weight"),
    "ignored class": CrossEntropy(from_logits=True, ignore_class=2),
    "function": _function,
    "function of the whole batch": _already_reduced,
    "own class": _Focal(),
    "list": [CrossEntropy(from_logits=True)],
}


def _model(oracle, loss="mse", masked=False, layer_options=None, **compile_options):
    keras.utils.set_random_seed(2)
    if masked:
        inputs = keras.Input((TOKENS,), dtype="int32")
        x = keras.layers.Embedding(9, 3, mask_zero=True)(inputs)
    else:
        x = inputs = keras.Input((TOKENS, 3))
    activation = "softmax" if isinstance(loss, str) else None
    outputs = keras.layers.Dense(CLASSES, activation=activation, **(layer_options or {}))(x)
    model = oracle.shaken(keras.Model(inputs, outputs))
    model.compile(loss=loss, **compile_options)
    return model


def _data(weights=None, count=3):
    generator = np.random.default_rng(4)
    x = generator.normal(size=(count, TOKENS, 3)).astype("float32")
    y = generator.integers(0, CLASSES, (count, TOKENS))
    if weights == "token":
        return x, y, generator.uniform(0, 2, (count, TOKENS)).astype("float32") * (y > 0)
    if weights == "unit":
        return x, y, generator.uniform(0, 2, (count, 1)).astype("float32")
    return x, y


@pytest.fixture(params=[False, True], ids=["mapped", "mapped with slopes"])
def way(request, monkeypatch):
    """How losses are mapped over units: the second is for XLA."""
    monkeypatch.setattr(keras_private, "is_compiled_by_xla", lambda: request.param)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("weights", [None, "token", "unit"])
@pytest.mark.parametrize("name", LOSSES)
def test_every_way_to_give_a_loss(oracle, name, weights):
    model, data = _model(oracle, LOSSES[name]), _data(weights)
    reference = oracle.reference_of(model, data)
    clip_norm = float(np.median(reference.norms))
    oracle.assert_agrees(oracle.private(model, data, clip_norm), reference, clip_norm)


@pytest.mark.usefixtures("way")
def test_one_number_a_record(oracle):
    """Weights of shape [records], targets [records]: a classifier as scikit-learn users know it."""
    keras.utils.set_random_seed(2)
    model = oracle.shaken(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]))
    model.compile(loss="binary_crossentropy", loss_weights=[3.0])
    generator = np.random.default_rng(4)
    data = generator.normal(size=(3, 3)), generator.integers(0, 2, (3, 1)), generator.uniform(size=3)
    data = tuple(part.astype("float32") for part in data)
    oracle.assert_agrees(oracle.private(model, data, 0.3), oracle.reference_of(model, data), 0.3)
    squeezed = (data[0], data[1][:, 0], data[2])
    oracle.assert_agrees(oracle.private(model, squeezed, 0.3), oracle.reference_of(model, data), 0.3)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("weights", [None, "token"])
@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "sum", "mean_with_sample_weight"])
def test_the_mask_that_the_model_hands_on(oracle, weights, reduction):
    """A unit with three of four tokens masked counts as one token, and its neighbours do not dilute it."""
    model = _model(oracle, CrossEntropy(from_logits=True, reduction=reduction), masked=True)
    _, *rest = _data(weights)
    x = np.array([[3, 0, 0, 0], [1, 2, 3, 0], [8, 7, 6, 5]], "int32")
    reference = oracle.reference_of(model, (x, *rest))
    for method in ["bookkeeping"] if weights else ["bookkeeping", "vectorized"]:
        oracle.assert_agrees(oracle.private(model, (x, *rest), 0.5, method=method), reference, 0.5)
    with_mask = model.compute_loss(y=tf.constant(rest[0][:1]), y_pred=model(x[:1]))
    plain = tf.constant(np.asarray(model(x[:1])))
    without = model.compute_loss(y=tf.constant(rest[0][:1]), y_pred=plain)
    assert abs(float(with_mask) - float(without)) > 1e-3  # the mask matters here


def test_two_records_share_one_mean(oracle):
    """The loss of a unit of two records is Keras's loss of a batch of these two: token weights join them."""
    loss = CrossEntropy(from_logits=True, reduction="mean_with_sample_weight")
    model, data = _model(oracle, loss), _data("token", 4)
    reference = oracle.reference_of(model, data, records_per_unit=2)
    oracle.assert_agrees(oracle.private(model, data, 0.5, records_per_unit=2), reference, 0.5)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("loss", ["mean_with_sample_weight", "sum_over_batch_size", "sum"])
@pytest.mark.parametrize("method", ["bookkeeping", "vectorized", "hybrid"])
def test_units_of_weighted_records_are_means_over_the_records_in_use(oracle, method, loss):
    """Against single records: two of three, one of three (its empty slots hold noise of weight 0), none, and 3 to 1."""
    model, (x, y, weight) = _model(oracle, CrossEntropy(from_logits=True, reduction=loss)), _data("token", 12)
    record_weight = np.array([[1, 1, 0], [0, 1, 0], [0, 0, 0], [3, 0, 1]], np.float32)
    weight = np.where(record_weight.reshape(12, 1) > 0, weight, 0.0).astype("float32")
    used = oracle.reference_of(model, (x, y, np.where(weight.any(1, keepdims=True), weight, 1.0).astype("float32")))
    gradients, losses = [], []
    for unit, row in enumerate(record_weight):
        share = row / max(row.sum(), 1)
        columns = zip(*used.gradients[3 * unit : 3 * unit + 3], strict=True)
        gradients.append([sum(s * g for s, g in zip(share, column, strict=True)) for column in columns])
        losses.append((share * used.losses[3 * unit : 3 * unit + 3]).sum())
    reference = type(used)(gradients, np.array(losses))
    clip_norm = float(np.sort(reference.norms)[2])
    result = oracle.private(
        model, (x, y, weight), clip_norm, records_per_unit=3, record_weight=record_weight,
        **({"hybrid": True} if method == "hybrid" else {"method": method}),
    )  # fmt: skip
    oracle.assert_agrees(result, reference, clip_norm)
    assert result[1][2] == 0


@pytest.mark.parametrize("method", ["bookkeeping", "vectorized"])
def test_weight_regularisers_stay_out(oracle, method):
    options = {"kernel_regularizer": keras.regularizers.L2(50.0), "bias_regularizer": "l1"}
    model, plain = _model(oracle, layer_options=options), _model(oracle)
    plain.set_weights(model.get_weights())
    x, y = _data()
    y = np.eye(CLASSES, dtype="float32")[y]
    assert float(sum(model.losses)) > 1.0
    oracle.assert_agrees(oracle.private(model, (x, y), 0.2, method=method), oracle.reference_of(plain, (x, y)), 0.2)


def _refusal(model, data, method="bookkeeping"):
    with pytest.raises(LossNotPerUnitError) as caught:
        clipped_gradients(model, data, 1.0, method=method)
    return str(caught.value)


@pytest.mark.parametrize("method", ["bookkeeping", "vectorized"])
def test_a_loss_that_is_not_reduced(oracle, method):
    model = _model(oracle, CrossEntropy(from_logits=True, reduction=None))
    assert "reduction='sum_over_batch_size'" in _refusal(model, _data(), method)


class _Flattened(keras.Model):
    """The head of many a language-model tutorial."""

    def __init__(self, scalar=False, outputs=1):
        super().__init__()
        self.dense, self.scalar, self.outputs = keras.layers.Dense(CLASSES), scalar, outputs

    def call(self, x):
        y = self.dense(x)
        if self.outputs > 1:
            return [y] * self.outputs
        return keras.ops.mean(y) if self.scalar else keras.ops.reshape(y, (-1, CLASSES))


@pytest.mark.parametrize("method", ["bookkeeping", "vectorized"])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, r"one row per record \(3\).*y_pred of shape \(12, 5\)"),
        ({"scalar": True}, r"one row per record \(3\).*y_pred of shape \(\)"),
        ({"outputs": 2}, "one output. Received: 2 outputs"),
    ],
)
def test_outputs_that_are_not_one_row_a_record(options, words, method):
    model = _Flattened(**options)
    x, y = _data()
    model(x)
    model.compile(loss=CrossEntropy(from_logits=True))
    with pytest.raises(LossNotPerUnitError, match=words):
        clipped_gradients(model, (x, y), 1.0, method=method)


def test_targets_flattened_like_the_outputs():
    """Both are [batch * tokens]: three units would be cut out of twelve rows in whatever order they lie."""
    model = _Flattened()
    x, y = _data()
    model(x)
    model.compile(loss=CrossEntropy(from_logits=True))
    assert "Do not flatten" in _refusal(model, (x, y.reshape(-1)))


def test_weights_of_another_length(oracle):
    x, y = _data()
    assert "sample_weight of shape (2,)" in _refusal(_model(oracle, LOSSES["object"]), (x, y, np.ones(2, "float32")))


class _OwnLoss(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.mean(y_pred)


class _OwnStep(keras.Model):
    def train_step(self, data):
        return super().train_step(data)


@pytest.mark.parametrize("kind", [_OwnLoss, _OwnStep])
def test_models_that_compute_their_loss_themselves(kind):
    inputs = keras.Input((TOKENS, 3))
    model = kind(inputs, keras.layers.Dense(CLASSES)(inputs))
    model.compile(loss="mse")
    assert kind.__name__ in _refusal(model, _data())


def test_a_loss_put_on_the_model_itself(oracle):
    model = _model(oracle)
    model.compute_loss = lambda **parts: keras.ops.mean(parts["y_pred"])
    assert "overrides one of them" in _refusal(model, _data())


def test_a_model_without_a_loss(oracle):
    assert "model.compile(loss=...)" in _refusal(_model(oracle, None), _data())
    inputs = keras.Input((TOKENS, 3))
    assert "model.compile(loss=...)" in _refusal(keras.Model(inputs, keras.layers.Dense(2)(inputs)), _data())


def test_records_without_targets(oracle):
    assert "Add y" in _refusal(_model(oracle), (_data()[0],))


class _Adding(keras.layers.Layer):
    def call(self, x):
        self.add_loss(keras.ops.mean(x))
        return x


@pytest.mark.parametrize("method", ["bookkeeping", "vectorized"])
def test_losses_that_join_over_the_batch(method):
    x, y = _data()
    for layers in ([_Adding(name="adder")], [keras.layers.Dense(3, activity_regularizer="l2", name="adder")]):
        model = keras.Sequential([keras.Input((TOKENS, 3)), *layers, keras.layers.Dense(CLASSES)])
        model.compile(loss=CrossEntropy(from_logits=True))
        assert "activity regulariser in adder" in _refusal(model, (x, y), method)


def test_a_loss_that_leaves_tensorflow(oracle):
    def through_numpy(y_true, y_pred):
        return tf.numpy_function(lambda y: np.mean(y, -1), [y_pred], tf.float32)

    assert "Use a loss made of" in _refusal(_model(oracle, through_numpy), _data())
