"""`tfdp.explain`: counts against closed forms, and the form that is shown is the form that is used."""

from __future__ import annotations

import keras
import keras_hub
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tfdp.errors import GradientError, UnsupportedLayerError
from tfdp.gradients import uses
from tfdp.inspection import counting

BATCH, TOKENS = 3, 16


def _dense(width, out, tokens=TOKENS, **options):
    return keras.Sequential([keras.Input((tokens, width)), keras.layers.Dense(out, name="dense", **options)])


def _row(found, name):
    (row,) = [row for row in found.rows if row.layer.split("/")[-1] == name]
    return row


@pytest.mark.quick
def test_flops_of_a_kernel_in_the_gram_form():
    """Two Gram matrices a unit, [T, d] and [T, p] each with itself; the sum costs what the plain gradient costs."""
    width, out = 40, 24
    found = tfdp.explain(_dense(width, out), batch_size=BATCH)
    row = _row(found, "dense")
    assert (row.path, row.kind, row.variables) == ("rule", "Dense", ("kernel", "bias"))
    assert row.forms == {"kernel": "Gram"}
    assert row.parameters == width * out + out
    assert row.flops == found.extra_flops == BATCH * 2 * TOKENS**2 * (width + out)
    product = 2 * BATCH * TOKENS * width * out
    assert found.plain_flops == 2 * product  # forward, and the kernel's gradient; nothing before it trains
    # At least the two Gram matrices and their product, at most a few more values of that size and of the factors'.
    grams, factors = 3 * 4 * BATCH * TOKENS**2, 4 * BATCH * TOKENS * (width + out)
    assert grams <= row.bytes <= grams + 2 * factors


@pytest.mark.quick
def test_flops_of_a_kernel_in_the_materialised_form():
    """The products of the plain gradient, unit by unit, and the sum with the factors; all kernels are written."""
    width, out = 3, 2
    row = _row(tfdp.explain(_dense(width, out, use_bias=False), batch_size=BATCH), "dense")
    assert row.forms == {"kernel": "materialised"}
    assert row.flops == 2 * BATCH * width * out
    kernels = 4 * BATCH * width * out
    assert kernels <= row.bytes <= 6 * kernels


def test_one_token_a_unit():
    model = keras.Sequential([keras.Input((40,)), keras.layers.Dense(24, name="dense")])
    row = _row(tfdp.explain(model, batch_size=BATCH), "dense")
    assert row.forms == {"kernel": "one token"}
    assert row.flops == 0  # sums of squares are no products


def test_flops_of_a_table():
    """Which tokens are alike, [T, T], times what they receive, [T, p]."""
    model = keras.Sequential([keras.Input((TOKENS,), dtype="int32"), keras.layers.Embedding(50, 7, name="table")])
    found = tfdp.explain(model, batch_size=BATCH)
    row = _row(found, "table")
    assert row.forms == {}
    assert row.flops == BATCH * 2 * TOKENS**2 * 7
    assert row.bytes > 4 * 50 * 7  # the whole table is written, where a plain step writes the rows that were read
    assert found.plain_flops == 0


def test_flops_of_a_tied_table(monkeypatch):
    """Look-up as above; Gram matrices of the projection; and for the cross term hidden states with receivers."""
    width, vocabulary = 8, 300

    class Tied(keras.Model):
        def __init__(self):
            super().__init__()
            self.table = keras.layers.ReversibleEmbedding(vocabulary, width, name="table")

        def call(self, ids):
            return self.table(self.table(ids), reverse=True)

    monkeypatch.setattr(uses.Outer, "materialise_is_cheaper", False)
    model = Tied()
    ids = np.zeros((BATCH, TOKENS), "int32")
    model(ids)
    found = tfdp.explain(model, ids)
    lookup, grams, cross = TOKENS**2 * width, TOKENS**2 * (width + vocabulary), TOKENS**2 * width
    assert found.rows[0].forms == {"embeddings": "Gram"}
    assert found.extra_flops == 2 * BATCH * (lookup + grams + cross)


@pytest.mark.parametrize("cheaper", [True, False])
def test_the_form_shown_is_the_form_used(monkeypatch, cheaper):
    monkeypatch.setattr(uses.Outer, "materialise_is_cheaper", property(lambda self: cheaper))
    row = _row(tfdp.explain(_dense(40, 24), batch_size=BATCH), "dense")
    assert row.forms == {"kernel": "materialised" if cheaper else "Gram"}
    assert row.flops == 2 * BATCH * (40 * 24 if cheaper else TOKENS**2 * (40 + 24))


def test_a_large_kernel_is_formed_one_unit_at_a_time(monkeypatch):
    """The products are those of a plain step; each unit's kernel is written, which a plain step does once."""
    monkeypatch.setattr(uses, "LARGE", 40 * 24)
    row = _row(tfdp.explain(_dense(40, 24), batch_size=BATCH), "dense")
    assert row.forms == {"kernel": "one unit at a time"}
    assert row.flops == 0
    assert row.bytes >= 4 * 40 * 24 * (BATCH - 1)


def _gpt2():
    shape = {"vocabulary_size": 11, "num_layers": 1, "num_heads": 2, "hidden_dim": 8, "intermediate_dim": 12}
    backbone = keras_hub.models.GPT2Backbone(max_sequence_length=6, **shape)
    return keras_hub.models.GPT2CausalLM(backbone=backbone, preprocessor=None)


@pytest.mark.quick
def test_a_language_model_and_its_length():
    model = _gpt2()
    found = tfdp.explain(model)
    assert found.shapes == "[16, 6]"
    assert {row.path for row in found.rows} == {"rule"}
    assert sum(row.parameters for row in found.rows) == model.count_params()
    assert found.frozen_layers == 0
    model.backbone.enable_lora(2)
    with_adapters = tfdp.explain(model, batch_size=2, tokens=5)
    assert with_adapters.shapes == "[2, 5]"
    assert [row.variables for row in with_adapters.rows] == [("bias", "lora_kernel_a", "lora_kernel_b")] * 2
    trained = sum(row.parameters for row in with_adapters.rows)
    assert (
        with_adapters.frozen_parameters
        == sum(int(np.prod(v.shape)) for v in model.variables if "seed" not in v.path) - trained
    )
    text = str(with_adapters)
    assert "rule: EinsumDense" in text
    assert "frozen" in text
    assert "of the plain step's products" in text


def test_layers_without_a_rule():
    layers = [keras.Input((8, 3)), keras.layers.Dense(3, name="dense"), keras.layers.Conv1DTranspose(4, 2, name="up")]
    model = keras.Sequential(layers)
    refused = tfdp.explain(model, batch_size=2)
    assert [row.path for row in refused.rows] == ["rule", "refused"]
    assert (refused.rows[1].flops, refused.rows[1].forms) == (None, {})
    assert refused.rows[0].flops is not None
    assert [finding.id for finding in refused.findings] == ["PS044"]
    assert "hybrid=True" in str(refused)
    allowed = tfdp.explain(model, batch_size=2, hybrid=True)
    assert [row.path for row in allowed.rows] == ["rule", "vectorized"]
    assert allowed.findings == ()
    assert allowed.rows[1].bytes > 4 * 2 * allowed.rows[1].parameters
    # Its kernel's gradients are taken in a loop over units, of which the graph does not say how often it runs.
    assert allowed.rows[1].flops is None
    assert allowed.extra_flops is None
    assert "unknown FLOPs, " in str(allowed)


def test_flops_of_the_vectorized_path():
    """A backward pass for each unit, through the outputs of all: so many times the product of the plain step."""

    class Doubled(keras.layers.Dense):
        def call(self, x):
            return keras.ops.matmul(2.0 * x, self.kernel)

    model = keras.Sequential([keras.Input((TOKENS, 5)), Doubled(7, use_bias=False, name="own")])
    row = _row(tfdp.explain(model, batch_size=BATCH, hybrid=True), "own")
    assert row.path == "vectorized"
    product = 2 * BATCH * TOKENS * 5 * 7
    # All units' backward passes, their weighted sum, and without the plain gradient.
    assert (BATCH - 1) * product <= row.flops <= (BATCH + 1) * product


def test_what_only_the_trace_shows():
    """A kernel that is used past its layer, and a layer that nothing depends on."""

    class Past(keras.Model):
        def __init__(self):
            super().__init__()
            self.inside, self.past, self.idle = (keras.layers.Dense(3, name=n) for n in ("inside", "past", "idle"))

        def call(self, x):
            self.idle(x)
            return self.inside(keras.ops.matmul(self.past(x), self.past.kernel))

    model, x = Past(), np.zeros((2, 3), "float32")
    model(x)
    found = tfdp.explain(model, x)
    assert [row.path for row in found.rows] == ["rule", "refused", "refused"]
    assert [finding.where for finding in found.findings] == ["past (Dense)", "idle (Dense)"]
    assert "hybrid=True" in found.findings[0].fix
    assert "kernel, bias, which take no part" in found.findings[1].message
    assert [row.path for row in tfdp.explain(model, x, hybrid=True).rows] == ["rule", "vectorized", "refused"]


def test_a_model_that_mixes_units_is_shown_without_numbers():
    mixing = keras.layers.BatchNormalization()
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3), mixing])
    found = tfdp.explain(model, batch_size=2)
    assert [row.path for row in found.rows] == ["rule", "refused"]
    assert "PS043" in str(found)


def test_nothing_is_run_and_nothing_changes():
    model = _gpt2()
    before = [variable.numpy() for variable in model.variables]
    tfdp.explain(model)
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


def test_what_it_has_to_be_told():
    with pytest.raises(GradientError, match=r"tokens=\.\.\., the length of a record"):
        tfdp.explain(keras.Sequential([keras.Input((None, 3)), keras.layers.Dense(2)]))
    with pytest.raises(UnsupportedLayerError, match="PS046"):
        tfdp.explain(keras.Sequential([keras.layers.Dense(2)]))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda a, b: tf.matmul(a[0], b[0]), 2 * 3 * 4 * 5),
        (lambda a, b: tf.matmul(a[0], tf.transpose(b[0]), transpose_b=True), 2 * 3 * 4 * 5),
        (lambda a, b: tf.matmul(tf.transpose(a[0]), b[0], transpose_a=True), 2 * 3 * 4 * 5),
        (lambda a, b: tf.matmul(a, b), 2 * 2 * 3 * 4 * 5),
        (lambda a, b: tf.matmul(a, a, transpose_b=True), 2 * 2 * 3 * 3 * 4),
        (lambda a, b: tf.einsum("bij,bjk->bik", a, b), 2 * 2 * 3 * 4 * 5),
        (lambda a, b: tf.einsum("...ij,...jk->...ki", a, b), 2 * 2 * 3 * 4 * 5),
        (lambda a, b: tf.nn.conv1d(tf.transpose(a, [0, 2, 1]), tf.ones([2, 3, 7]), 1, "VALID"), 2 * 2 * 3 * 7 * 2 * 3),
        (lambda a, b: tf.nn.conv1d_transpose(a, tf.ones([2, 7, 4]), [2, 6, 7], 2), 2 * 2 * 3 * 4 * 2 * 7),
        (
            lambda a, b: tf.nn.conv3d(a[..., None, None], tf.ones([1, 2, 1, 1, 7]), [1] * 5, "VALID"),
            2 * 2 * 3 * 3 * 2 * 7,
        ),
        (lambda a, b: tf.exp(a), 0),
        (lambda a, b: tf.while_loop(lambda i: i < 2, lambda i: i + 1, [0]), None),
        (lambda a, b: tf.function(lambda: tf.matmul(a, b))(), None),
    ],
)
def test_flops_of_operations(make, expected):
    graph = tf.Graph()
    with graph.as_default():
        make(tf.ones([2, 3, 4]), tf.ones([2, 4, 5]))
    assert counting.flops(graph.get_operations()) == expected
