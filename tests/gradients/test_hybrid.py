"""`hybrid=True`: variables without a rule beside those with one, against the loop over single units."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdp import keras_private
from tfdp.errors import GradientError, UnsupportedLayerError
from tfdp.gradients import clipped_gradients, hybrid, vectorized

UNITS, TOKENS, WIDTH = 4, 5, 6
Dense = keras.layers.Dense


class Bent(keras.layers.Layer):
    """Bare variables, no rule: rows mixed along the tokens of one record."""

    def build(self, shape):
        self.mixing = self.add_weight(shape=(shape[1], shape[1]), name="mixing")
        self.scale = self.add_weight(shape=(shape[-1],), name="scale")

    def call(self, x):
        mixing = keras.ops.cast(self.mixing, x.dtype)
        return keras.ops.tanh(keras.ops.einsum("btd,ts->bsd", x, mixing) * keras.ops.cast(self.scale, x.dtype))


class Flat(keras.layers.Layer):
    """Batch and tokens as one axis, as experts and routers take them; a second output of that shape."""

    def build(self, shape):
        self.table = self.add_weight(shape=(shape[-1], shape[-1]), name="table")

    def call(self, x):
        rows = keras.ops.reshape(x, (-1, x.shape[-1]))
        return keras.ops.tanh(keras.ops.matmul(rows, self.table))


class Around(keras.layers.Layer):
    """What encloses `Flat`, with a rule-covered layer of its own beside it."""

    def __init__(self):
        super().__init__()
        self.flat, self.dense = Flat(name="flat"), Dense(WIDTH, name="inner")

    def build(self, shape):
        self.flat.build(shape)
        self.dense.build(shape)

    def call(self, x):
        return self.dense(x) + keras.ops.reshape(self.flat(x), keras.ops.shape(x)), None


class Lookup(keras.layers.Layer):
    """A table of its own: its gradient comes as index slices."""

    def build(self, shape):
        self.table = self.add_weight(shape=(7, WIDTH), name="table")

    def call(self, ids):
        return tf.gather(self.table.value, ids)


class Borrowing(keras.layers.Layer):
    """Holds, and uses, the kernel of another layer."""

    def __init__(self, lender):
        super().__init__()
        self.kernel = lender.kernel

    def call(self, x):
        return keras.ops.matmul(keras.ops.sin(x), self.kernel)


class Made(keras.Model):
    def __init__(self, forward, **layers):
        super().__init__()
        self.forward = forward
        for name, layer in layers.items():
            setattr(self, name, layer)

    def call(self, inputs):
        return self.forward(self, inputs)


def _x(units=UNITS, seed=0):
    return np.random.default_rng(seed).normal(size=(units, TOKENS, WIDTH)).astype("float32")


def _ids(units=UNITS):
    return np.random.default_rng(0).integers(0, 7, (units, TOKENS)).astype("int32")


def _made(oracle, forward, x, **layers):
    model = Made(forward, **layers)
    model(x)
    model.compile(loss="mse")
    return oracle.shaken(model)


def _data(model, x):
    return x, np.random.default_rng(1).normal(size=model(x).shape).astype("float32")


def _sandwich(oracle, *middle, last=2, **options):
    """Dense, the layers in question, Dense."""
    keras.utils.set_random_seed(2)
    inputs = keras.Input((TOKENS, WIDTH))
    x = Dense(WIDTH, name="first", **options)(inputs)
    for layer in middle:
        x = layer(x)
    model = keras.Model(inputs, Dense(last, name="last", **options)(x))
    model.compile(loss="mse")
    return oracle.shaken(model)


def _cuts(model, x):
    """Names of cuts and of the variables that go there."""
    names = {id(layer): layer.name for layer in keras_private.flatten_layers(model)}
    found = hybrid.find_cuts(model, tf.convert_to_tensor(x), len(x))
    return {names[key]: sorted(v.path.split("/")[-1] for v in variables) for key, variables in found.items()}


def _agrees(oracle, model, data, *, weights=(None,), records_per_unit=1, jit_compile=False):
    reference = oracle.reference_of(model, data, records_per_unit)
    clip_norm = float(np.median(reference.norms))
    run = oracle.traced(model, clip_norm, hybrid=True, records_per_unit=records_per_unit, jit_compile=jit_compile)
    for weight in weights:
        weight = np.ones(len(reference.norms)) if weight is None else np.asarray(weight)
        oracle.assert_agrees(run(data, weight), reference, clip_norm, weight)


@pytest.mark.quick
@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_layer_without_a_rule_between_two_with(oracle, jit_compile):
    model = _sandwich(oracle, Bent(name="bent"))
    assert _cuts(model, _x()) == {"bent": ["mixing", "scale"]}
    _agrees(oracle, model, _data(model, _x()), weights=(None, [1, 0, 1, 0]), jit_compile=jit_compile)


def test_two_records_a_unit_and_no_unit_at_all(oracle):
    model = _sandwich(oracle, Bent())
    data = _data(model, _x())
    _agrees(oracle, model, data, records_per_unit=2)
    sums, norms, losses = oracle.traced(model, 1.0, hybrid=True)(data, np.zeros(UNITS))
    assert not np.any(oracle.flat(sums))
    assert not np.any(norms)
    assert not np.any(losses)


@pytest.mark.parametrize(
    ("layer", "cut"),
    [
        (lambda: keras.layers.Conv1DTranspose(WIDTH, 2, name="it"), "it"),
        (lambda: keras.layers.LSTM(WIDTH, return_sequences=True, name="it"), "lstm_cell"),
        (lambda: Flat(name="it"), None),
    ],
)
def test_other_layers_without_a_rule(oracle, layer, cut):
    middle = [layer()]
    if isinstance(middle[0], Flat):
        middle.append(keras.layers.Reshape((TOKENS, WIDTH)))
        keras.utils.set_random_seed(2)
        inputs = keras.Input((TOKENS, WIDTH))
        hidden = keras.ops.reshape(middle[0](inputs), (-1, TOKENS, WIDTH))
        model = oracle.shaken(keras.Model(inputs, Dense(2)(hidden)))
        model.compile(loss="mse")
        cut = model.name  # nothing smaller keeps the batch in front
    else:
        model = _sandwich(oracle, *middle)
        if cut == "lstm_cell":
            cut = "it"  # the cell is called in a loop
    assert list(_cuts(model, _x())) == [cut]
    _agrees(oracle, model, _data(model, _x()))


def test_the_cut_is_the_smallest_layer_that_keeps_the_batch_in_front(oracle):
    model = _made(
        oracle, lambda m, x: m.last(m.around(m.first(x))[0]), _x(), first=Dense(WIDTH), around=Around(), last=Dense(2)
    )
    assert _cuts(model, _x()) == {model.around.name: ["table"]}
    _agrees(oracle, model, _data(model, _x()))


def test_a_layer_called_twice_the_second_time_on_its_own_output(oracle):
    model = _made(
        oracle, lambda m, x: m.last(m.bent(m.first(m.bent(x)))), _x(), first=Dense(WIDTH), bent=Bent(), last=Dense(2)
    )
    _agrees(oracle, model, _data(model, _x()))


def test_a_table_without_a_rule(oracle):
    model = _made(oracle, lambda m, ids: m.last(m.table(ids)), _ids(), table=Lookup(name="table"), last=Dense(2))
    assert list(_cuts(model, _ids())) == ["table"]
    _agrees(oracle, model, _data(model, _ids()))


@pytest.mark.parametrize("both_hold_it", [True, False])
def test_a_kernel_shared_by_a_layer_with_a_rule_and_something_without(oracle, both_hold_it):
    """Two uses of one variable: neither part of its gradient may be missing, or be counted twice."""
    lender = Dense(WIDTH, name="lender")
    lender.build((None, TOKENS, WIDTH))
    layers = {"lender": lender, "bent": Bent(), "last": Dense(2)}
    if both_hold_it:
        layers["borrowing"] = Borrowing(lender)
        model = _made(oracle, lambda m, x: m.last(m.borrowing(m.bent(m.lender(x)))), _x(), **layers)
    else:
        model = _made(
            oracle, lambda m, x: m.last(keras.ops.matmul(m.bent(m.lender(x)), m.lender.kernel)), _x(), **layers
        )
    found = _cuts(model, _x())
    assert "kernel" in found[model.name]
    _agrees(oracle, model, _data(model, _x()))


class Peeking(Bent):
    """Reads a variable of another layer that it does not hold."""

    def __init__(self, other):
        super().__init__()
        object.__setattr__(self, "other", other)

    def call(self, x):
        return super().call(x) * self.other.scale


def test_a_variable_read_inside_the_cut_of_another_layer(oracle):
    bent = Bent(name="bent")
    model = _made(
        oracle, lambda m, x: m.last(m.peeking(m.bent(x))), _x(), bent=bent, peeking=Peeking(bent), last=Dense(2)
    )
    assert _cuts(model, _x())[model.name] == ["scale"]
    _agrees(oracle, model, _data(model, _x()))


def test_positions_looked_up_once_for_all_records(oracle):
    """Its rule cannot split what has no batch axis; the layer around it can."""

    def forward(model, x):
        return model.last(x + model.positions(tf.range(TOKENS)))

    model = _made(oracle, forward, _x(), positions=keras.layers.Embedding(TOKENS, WIDTH), last=Dense(2))
    with pytest.raises(UnsupportedLayerError, match="leading axis"):
        clipped_gradients(model, _data(model, _x()), 1.0)
    assert _cuts(model, _x()) == {model.name: ["embeddings"]}
    _agrees(oracle, model, _data(model, _x()))


@pytest.mark.quick
def test_dropout_is_that_of_the_one_forward_pass(oracle):
    """Same seeds, same masks: sum and norms are those of the batch's own backward passes, unit by unit."""
    model = _sandwich(oracle, keras.layers.Dropout(0.5), Bent(), keras.layers.Dropout(0.5))
    x, y = (tf.convert_to_tensor(part) for part in _data(model, _x()))
    seeds = keras_private.seed_states(model)
    before = [seed.numpy() for seed in seeds]

    def rewind():
        for seed, value in zip(seeds, before, strict=True):
            seed.assign(value)

    own = []
    for unit in range(UNITS):
        rewind()
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True)[unit] - y[unit]) ** 2)
        own.append([g.numpy() for g in tape.gradient(loss, [v.value for v in model.trainable_variables])])
    norms = np.array([np.linalg.norm(oracle.flat(unit)) for unit in own])
    clip_norm = float(np.median(norms))
    rewind()
    sums, found, _ = clipped_gradients(model, (x, y), clip_norm, hybrid=True)
    np.testing.assert_allclose(found, norms, rtol=1e-5)
    wanted = [
        sum(min(1.0, clip_norm / n) * g for n, g in zip(norms, column, strict=True))
        for column in zip(*own, strict=True)
    ]
    assert oracle.distance(sums, wanted) < 1e-5
    # And in a graph, with masks that nobody fixed: what was measured is what is used.
    run = oracle.traced(model, 1e-3, hybrid=True)
    for weight in np.eye(UNITS):
        sums, _, _ = run((x, y), weight)
        assert np.linalg.norm(oracle.flat(sums)) == pytest.approx(1e-3, rel=1e-5)


@pytest.fixture(scope="module", params=[False, True], ids=["graph", "compiled"])
def bent_run(oracle, request):
    """A model traced once, as in a run: its data, the loop over units, the clip norm and the traced function."""
    model = _sandwich(oracle, Bent())
    data = _data(model, _x())
    reference = oracle.reference_of(model, data)
    clip_norm = float(np.median(reference.norms))
    return data, reference, clip_norm, oracle.traced(model, clip_norm, hybrid=True, jit_compile=request.param)


@pytest.mark.quick
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_a_unit_that_is_not_finite_touches_no_other(oracle, bent_run, value):
    (x, y), reference, clip_norm, run = bent_run
    for target, weight in [(x, np.ones(UNITS)), (x, np.array([1, 1, 0, 1])), (y, np.ones(UNITS))]:
        spoiled = target.copy()
        spoiled[2, 1] = value
        others = np.array([1, 1, 0, 1])
        sums, norms, _ = run((spoiled, y) if target is x else (x, spoiled), weight)
        if not np.isfinite(value) and weight[2]:
            assert not np.isfinite(norms[2])
        if np.isfinite(norms[2]) and weight[2]:  # the square of 1e30 may not reach the gradient through tanh
            continue
        assert oracle.distance(sums, reference.sums(clip_norm, others)) < 1e-4
        np.testing.assert_allclose(norms[others > 0], reference.norms[others > 0], rtol=1e-5)


def test_mixed_bfloat16(oracle):
    model = _sandwich(oracle, Bent(dtype="mixed_bfloat16"), dtype="mixed_bfloat16")
    data = _data(model, _x())
    reference = oracle.reference_of(model, data)
    clip_norm = float(np.median(reference.norms))
    sums, norms, losses = oracle.private(model, data, clip_norm, hybrid=True)
    assert {s.dtype for s in sums} == {norms.dtype} == {losses.dtype} == {np.dtype("float32")}
    np.testing.assert_allclose(norms, reference.norms, rtol=0.03)
    assert oracle.distance(sums, reference.sums(clip_norm)) < 0.03


def test_a_model_that_rules_cover_is_taken_as_without_it(oracle, monkeypatch):
    monkeypatch.setattr(vectorized, "one_at_a_time", None)
    model = _sandwich(oracle)
    assert _cuts(model, _x()) == {}
    _agrees(oracle, model, _data(model, _x()))


# What stays refused.


def _refusal(model, x, **options):
    with pytest.raises(GradientError) as caught:
        clipped_gradients(model, _data(model, x), 1.0, **options)
    assert all("call" not in vars(layer) for layer in keras_private.flatten_layers(model))
    return str(caught.value)


@pytest.mark.quick
def test_off_by_default_and_the_error_names_layer_and_switch(oracle):
    message = _refusal(_sandwich(oracle, Bent(name="bent")), _x())
    assert "layer 'bent' (Bent), which has none" in message
    assert "hybrid=True" in message


def test_arguments(oracle):
    model = _sandwich(oracle)
    assert "which needs no gradient rules" in _refusal(model, _x(), hybrid=True, method="vectorized")
    assert "Expected hybrid to be True or False" in _refusal(model, _x(), hybrid="yes")


def test_a_variable_that_takes_no_part(oracle):
    class Idle(Bent):
        def call(self, x):
            return x + 0.0 * keras.ops.sum(keras.ops.stop_gradient(self.scale))

    assert "take no part in the loss" in _refusal(_sandwich(oracle, Idle()), _x(), hybrid=True)


def test_layers_under_a_remat_scope(oracle):
    with keras.RematScope(mode="full"):
        dense = Dense(WIDTH, name="again")
    assert "keras.RematScope" in _refusal(_sandwich(oracle, dense, Bent()), _x(), hybrid=True)


def test_quantized_layers(oracle):
    model = _sandwich(oracle, Bent())
    model.get_layer("first").quantize("int8")
    message = _refusal(model, _x(), hybrid=True)
    assert "not quantized" in message
    assert "layer 'first' (Dense) quantized to int8" in message


def test_a_model_whose_output_has_no_batch_axis(oracle):
    model = _made(oracle, lambda m, x: keras.ops.reshape(m.flat(x), (-1, WIDTH)), _x(), flat=Flat())
    assert "recorded as a whole" in _refusal(model, _x(), hybrid=True)
