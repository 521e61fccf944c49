"""The contract of every rule, against a loop over units: squared norm, weighted sum and the gradient itself.

Each case is one call of one layer; the loss is a fixed random projection of what the call returns.
"""

from __future__ import annotations

import dataclasses
import inspect
import unittest.mock
from collections.abc import Callable
from typing import Any

import keras
import keras_hub
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdp.gradients import combining, rules, taps, uses
from tfdp.gradients.bookkeeping import output_gradients, uses_by_variable
from tfdp.gradients.clipping import Factors
from tfdp.keras_private import HUB_ROOT_MEAN_SQUARE_NORMS, hub_class

LAYERS = keras.layers
EinsumDense, Dense = keras.layers.EinsumDense, keras.layers.Dense
Reversible = keras.layers.ReversibleEmbedding


@dataclasses.dataclass
class Case:
    name: str
    layer: Callable[[], Any]
    shape: tuple[int, ...]
    integers: int | None = None
    lora: bool = False
    call: Callable[[Any, Any], Any] = lambda layer, x: layer(x)


def _call_head(layer: Any, x: Any) -> Any:
    positions = tf.tile(tf.constant([[0, 2]]), [x.shape[0], 1])
    return layer(x, mask_positions=positions)


def _embed(layer: Any, x: Any) -> Any:
    return layer(x)


def _tied(layer: Any, x: Any) -> Any:
    """Look-up, something in between, and back: both uses of the table."""
    return layer(tf.nn.gelu(layer(x)) + 0.3, reverse=True)


def _head() -> Any:
    return keras_hub.layers.MaskedLMHead(token_embedding=Reversible(7, 4), activation="softmax")


def _attend(layer: Any, x: Any) -> Any:
    """Queries from all tokens, keys and values from another view of all but the first."""
    return layer(x, tf.tanh(x[:, 1:]))


_head_of = keras_hub.layers.MaskedLMHead
_DEBERTA, _RWKV = "deberta_v3.relative_embedding:RelativeEmbedding", "rwkv7.rwkv7_layer:RWKV7"


def _t5_attention(is_decoder: bool = False) -> Any:
    attention = hub_class("t5.t5_multi_head_attention:T5MultiHeadAttention")
    return attention(is_decoder, 4, 2, 2, dropout=0.0, use_relative_attention_bias=True)


def _hub_norm(name: str, width: int, epsilon: float) -> Any:
    """Some are told how wide they are, and call their epsilon otherwise."""
    norm = hub_class(name)
    return norm(width, eps=epsilon) if "dim" in inspect.signature(norm).parameters else norm(epsilon=epsilon)


def _time_mix(later: bool = False) -> Any:
    ranks = {"gate_lora": 3, "mv_lora": 2, "aaa_lora": 2, "decay_lora": 2}
    return hub_class(f"{_RWKV}TimeMix")(4, 2, add_v_first=later, **ranks)


def _call_first(layer: Any, x: Any) -> Any:
    return layer(x)[0]


def _call_with_first_values(layer: Any, x: Any) -> Any:
    return layer(x, v_first=tf.tanh(x[:, ::-1]))[0]


_EINSUMS = [
    # equation, output shape, bias axes, input shape after the batch, LoRA too
    ("ab,bc->ac", 3, "c", (5,), True),
    ("abc,cd->abd", (None, 3), "d", (4, 5), True),
    ("abc,cde->abde", (None, 2, 3), "de", (4, 5), True),  # queries of an attention layer
    ("abc,cde->abde", (None, 2, 3), "e", (4, 5), False),
    ("abc,cde->abde", (None, 2, 3), "d", (4, 5), False),  # bias [2, 1], broadcast
    ("abcd,cde->abe", (None, 3), "e", (4, 2, 5), True),  # output projection of an attention layer
    ("abc,cde->abed", (None, 3, 2), "ed", (4, 5), True),  # kernel labels out of order
    ("abc,dc->abd", (None, 3), None, (4, 5), True),  # the last label is contracted: LoRA runs along the input
    ("abc,dec->abde", (None, 2, 3), "e", (4, 5), True),
    ("abc,ecd->abed", (None, 2, 3), None, (4, 5), True),  # contracted label in the middle
    ("abc,bcd->abd", (4, 3), "bd", (4, 5), True),  # a kernel per position: shared by kernel, input and output
    ("abc,bcd->abd", (4, 3), "b", (4, 5), False),
    ("abc,bd->acbd", (5, 4, 3), None, (4, 5), True),  # nothing contracted
    ("abc,cb->ab", (4,), None, (4, 5), False),  # shared, and the last label shared: no LoRA
    ("...x,xy->...y", 3, "y", (4, 5), True),
    ("...x,xy->...y", 3, "y", (2, 3, 5), True),
    ("...bc,cd->...bd", (4, 3), "d", (2, 4, 5), False),
    ("ab...,bc->ac...", 3, None, (5, 2), True),
]


def _einsum(equation: str, output: Any, bias: str | None, activation: str | None = None) -> Callable[[], Any]:
    return lambda: EinsumDense(equation, output, bias_axes=bias, activation=activation)


CASES = [
    *(Case(f"dense rank {len(shape) + 1}", lambda: Dense(3), shape) for shape in [(5,), (4, 5), (2, 3, 5)]),
    Case("dense without bias", lambda: Dense(3, use_bias=False), (4, 5)),
    Case("dense with activation", lambda: Dense(3, activation="gelu"), (4, 5)),
    Case("dense, one token", lambda: Dense(3, activation="tanh"), (1, 5)),
    Case("dense, wide enough for the Gram form", lambda: Dense(17), (3, 16)),
    Case("dense, narrow enough to be materialised", lambda: Dense(2), (40, 3)),
    *(Case(f"dense lora rank {len(shape) + 1}", lambda: Dense(3), shape, lora=True) for shape in [(5,), (4, 5)]),
    Case("dense lora with activation", lambda: Dense(3, activation="gelu"), (4, 5), lora=True),
    *(Case(f"{e} bias {b}", _einsum(e, out, b), shape) for e, out, b, shape, _ in _EINSUMS),
    *(Case(f"{e} lora", _einsum(e, out, b), shape, lora=True) for e, out, b, shape, lora in _EINSUMS if lora),
    Case("einsum with activation", _einsum("abc,cde->abde", (None, 2, 3), "de", "tanh"), (4, 5)),
    Case("embedding", lambda: keras.layers.Embedding(7, 4), (5,), integers=7),
    Case("embedding, ids of rank 3", lambda: keras.layers.Embedding(7, 4), (2, 3), integers=7),
    Case("embedding, one id a unit", lambda: keras.layers.Embedding(7, 4), (), integers=7),
    Case("embedding lora", lambda: keras.layers.Embedding(7, 4), (5,), integers=7, lora=True),
    Case("reversible embedding, look-up", lambda: Reversible(7, 4), (5,), integers=7),
    Case("tied", lambda: Reversible(7, 4), (5,), integers=7, call=_tied),
    Case("tied, soft cap", lambda: Reversible(7, 4, logit_soft_cap=0.5), (5,), integers=7, call=_tied),
    Case("tied, KerasHub's", lambda: keras_hub.layers.ReversibleEmbedding(7, 4), (5,), integers=7, call=_tied),
    Case("tied, with a mask", lambda: Reversible(7, 4, mask_zero=True), (5,), integers=7, call=_tied),
    Case("tied lora", lambda: Reversible(7, 4), (5,), integers=7, call=_tied, lora=True),
    Case("untied", lambda: Reversible(7, 4, tie_weights=False), (5,), integers=7, call=_tied),
    Case("untied, soft cap", lambda: Reversible(7, 4, tie_weights=False, logit_soft_cap=1.0), (5,), 7, call=_tied),
    Case("untied lora", lambda: Reversible(7, 4, tie_weights=False), (5,), integers=7, call=_tied, lora=True),
    Case("reverse in another dtype", lambda: Reversible(7, 4, reverse_dtype="float32"), (5,), 7, call=_tied),
    Case("positions", lambda: keras_hub.layers.PositionEmbedding(9), (4, 5)),
    Case("positions, the whole table", lambda: keras_hub.layers.PositionEmbedding(4), (4, 5)),
    Case("layer norm", lambda: keras.layers.LayerNormalization(), (4, 5)),
    Case("layer norm, vectors", lambda: keras.layers.LayerNormalization(), (5,)),
    Case("layer norm, named axis", lambda: keras.layers.LayerNormalization(axis=2), (4, 5)),
    Case("layer norm without centre", lambda: keras.layers.LayerNormalization(center=False), (4, 5)),
    Case("layer norm without scale", lambda: keras.layers.LayerNormalization(scale=False), (4, 5)),
    Case("layer norm, large epsilon", lambda: keras.layers.LayerNormalization(epsilon=0.5), (2, 3, 5)),
    Case("rms norm", lambda: keras.layers.RMSNormalization(), (4, 5)),
    Case("rms norm, large epsilon", lambda: keras.layers.RMSNormalization(axis=[-1], epsilon=0.5), (4, 5)),
    Case("rms norm, KerasHub's", lambda: keras_hub.layers.RMSNormalization(5), (4, 5)),
    *(
        Case(f"rms norm, {name.split('.')[0]}'s", lambda name=name: _hub_norm(name, 5, 0.1), (4, 5))
        for name in HUB_ROOT_MEAN_SQUARE_NORMS
    ),
    Case("group norm", lambda: keras.layers.GroupNormalization(2), (4, 6)),
    Case("group norm, a group a channel", lambda: keras.layers.GroupNormalization(-1), (2, 3, 5)),
    Case("group norm, vectors", lambda: keras.layers.GroupNormalization(3, axis=1), (6,)),
    Case("group norm without scale", lambda: keras.layers.GroupNormalization(2, scale=False), (4, 6)),
    Case("group norm, large epsilon", lambda: keras.layers.GroupNormalization(2, epsilon=0.5, center=False), (4, 6)),
    Case("convolution of a line", lambda: LAYERS.Conv1D(4, 3), (6, 3)),
    Case("same padding", lambda: LAYERS.Conv1D(4, 2, padding="same", activation="gelu"), (6, 3)),
    Case("causal, dilated", lambda: LAYERS.Conv1D(4, 3, padding="causal", dilation_rate=2), (6, 3)),
    Case("causal, strided", lambda: LAYERS.Conv1D(2, 2, padding="causal", strides=2), (6, 3)),
    Case("groups", lambda: LAYERS.Conv1D(4, 3, groups=2), (6, 6)),
    Case("convolution of a line, lora", lambda: LAYERS.Conv1D(4, 3, padding="same"), (6, 3), lora=True),
    Case("convolution without bias", lambda: LAYERS.Conv1D(2, 3, use_bias=False), (6, 3)),
    Case("convolution of a plane", lambda: LAYERS.Conv2D(4, (2, 3)), (5, 4, 3)),
    Case("strided, same padding", lambda: LAYERS.Conv2D(4, 3, strides=(2, 1), padding="same"), (5, 4, 3)),
    Case("dilated", lambda: LAYERS.Conv2D(2, 2, dilation_rate=(2, 1), activation="tanh"), (5, 4, 3)),
    Case("groups of a plane", lambda: LAYERS.Conv2D(6, 2, groups=3), (4, 4, 3)),
    Case("convolution of a plane, lora", lambda: LAYERS.Conv2D(4, 2, strides=2), (4, 4, 3), lora=True),
    Case("channels first", lambda: LAYERS.Conv2D(4, 2, data_format="channels_first"), (2, 4, 4)),
    Case("depthwise, line", lambda: LAYERS.DepthwiseConv1D(3, depth_multiplier=2, padding="same"), (6, 3)),
    Case("depthwise, plane", lambda: LAYERS.DepthwiseConv2D(2, strides=2, activation="gelu"), (4, 4, 4)),
    Case("depthwise, dilated", lambda: LAYERS.DepthwiseConv2D(2, dilation_rate=2, use_bias=False), (4, 4, 4)),
    Case("separable, line", lambda: LAYERS.SeparableConv1D(4, 3, depth_multiplier=2), (6, 3)),
    Case("separable, plane", lambda: LAYERS.SeparableConv2D(2, 2, padding="same", activation="tanh"), (4, 3, 3)),
    Case("masked-LM head", _head, (3, 4), call=_call_head),
    Case("masked-LM head, untied", lambda: _head_of(7, activation="tanh"), (3, 4), call=_call_head),
    Case("attention", lambda: LAYERS.MultiHeadAttention(2, 3), (4, 5), call=_attend),
    Case("attention, values of another width", lambda: LAYERS.MultiHeadAttention(2, 3, 2), (4, 5), call=_attend),
    Case("grouped attention", lambda: LAYERS.GroupQueryAttention(3, 4, 2), (5, 6), call=_attend),
    Case("tokens and positions", lambda: keras_hub.layers.TokenAndPositionEmbedding(7, 6, 4), (5,), integers=7),
    Case("T5's relative bias", _t5_attention, (5, 4), call=_call_first),
    Case("T5's relative bias in a decoder", lambda: _t5_attention(True), (5, 4), call=_call_first),
    Case("DeBERTa's relative embedding", lambda: hub_class(_DEBERTA)(hidden_dim=4, bucket_size=3), (5, 4)),
    Case("RWKV's channel mix", lambda: hub_class(f"{_RWKV}ChannelMix")(6), (5, 4)),
    Case("RWKV's time mix", _time_mix, (5, 4), call=_call_first),
    Case("RWKV's time mix, later block", lambda: _time_mix(True), (5, 4), call=_call_with_first_values),
]


def _built(case: Case) -> tuple[Any, np.ndarray]:
    keras.utils.set_random_seed(5)
    generator = np.random.default_rng(7)
    layer, batch = case.layer(), 4
    shape = (batch, *case.shape)
    x = generator.normal(size=shape).astype("float32") if case.integers is None else None
    x = generator.integers(0, case.integers, shape).astype("int32") if x is None else x
    case.call(layer, tf.constant(x))
    if case.lora:
        layer.enable_lora(2, lora_alpha=3)
    for variable in layer.trainable_variables:
        variable.assign(variable.numpy() + 0.3 * generator.normal(size=variable.shape))
    return layer, x


def _check(layer: Any, x: np.ndarray, call: Callable[[Any, Any], Any], records_per_unit: int = 1) -> None:
    """Norm, sum and per-unit gradient of every trainable variable of `layer`, against one unit at a time."""
    variables, units = layer.trainable_variables, len(x) // records_per_unit
    assert variables
    projection = np.random.default_rng(11).normal(size=call(layer, tf.constant(x)).shape).astype("float32")

    expected = []
    for start in range(0, len(x), records_per_unit):
        part = slice(start, start + records_per_unit)
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(call(layer, tf.constant(x[part])) * projection[part])
        unit = tape.gradient(total, [v.value for v in variables], unconnected_gradients=tf.UnconnectedGradients.ZERO)
        expected.append([tf.convert_to_tensor(g).numpy() for g in unit])

    with taps.record(layer, len(x)) as recording:
        total = tf.reduce_sum(call(layer, tf.constant(x)) * projection)
    assert recording.read_outside(variables) == []
    found = uses_by_variable(recording, output_gradients(recording, total), units)
    weights = np.linspace(0.0, 1.0, units, dtype="float32")
    factors = Factors(tf.constant(weights), tf.constant(True))
    largest = max(np.abs(gradient).max() for unit in expected for gradient in unit)
    for variable, column in zip(variables, zip(*expected, strict=True), strict=True):
        wanted = np.stack(column)
        merged = combining.merged(found[id(variable)])
        scale = max(np.abs(wanted).max(), 1e-2 * largest)  # the bias of keys has no gradient, only rounding
        norms = np.sum(wanted.reshape(units, -1).astype(np.float64) ** 2, 1)
        np.testing.assert_allclose(combining.squared_norm(merged), norms, rtol=2e-5, atol=1e-6 * scale**2)
        summed = np.tensordot(weights, wanted, 1)
        got = tf.reshape(combining.weighted_sums([merged], [factors])[0], variable.shape)
        np.testing.assert_allclose(got, summed, rtol=1e-4, atol=1e-5 * scale)
        held = sum(tf.reshape(use.per_unit(), wanted.shape).numpy() for use in merged)
        np.testing.assert_allclose(held, wanted, rtol=1e-4, atol=1e-5 * scale)

    # All together, with kernels formed for one unit after the other wherever that is possible.
    flat = np.stack([np.concatenate([gradient.ravel() for gradient in unit]) for unit in expected]).astype(np.float64)
    norms = np.linalg.norm(flat, axis=1)
    clip_norm = float(np.median(norms))
    with unittest.mock.patch.object(uses.Outer, "is_formed_in_turn", property(lambda use: use.rows.shape[1] > 1)):
        merged = [combining.merged(found[id(variable)]) for variable in variables]
        sums, got_norms = combining.clipped(merged, clip_norm, tf.ones([units]))
    np.testing.assert_allclose(got_norms, norms, rtol=2e-5, atol=1e-6 * largest)
    clipped = np.sum(flat * np.minimum(1, clip_norm / np.maximum(norms, 1e-12))[:, None], 0)
    got = np.concatenate([np.ravel(total) for total in sums])
    np.testing.assert_allclose(got, clipped, rtol=1e-4, atol=1e-5 * largest)


@pytest.mark.quick
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_contract(case):
    layer, x = _built(case)
    _check(layer, x, case.call)
    _check(layer, x, case.call, records_per_unit=2)


def test_every_class_with_a_rule_has_a_contract_test():
    assert set(rules.all_rules()) <= {type(case.layer()) for case in CASES}


@settings(max_examples=10, derandomize=True, deadline=None, database=None)
@given(
    tokens=st.lists(st.integers(1, 5), max_size=2),
    width=st.integers(1, 20),
    units=st.integers(1, 20),
    lora=st.booleans(),
)
def test_dense_of_any_shape(tokens, width, units, lora):
    case = Case("drawn", lambda: Dense(units, activation="tanh"), (*tokens, width), lora=lora)
    _check(*_built(case), case.call)


@settings(max_examples=10, derandomize=True, deadline=None, database=None)
@given(
    tokens=st.integers(1, 12),
    vocabulary=st.integers(2, 9),
    width=st.integers(1, 6),
    tied=st.booleans(),
    lora=st.booleans(),
)
def test_embeddings_of_any_shape(tokens, vocabulary, width, tied, lora):
    case = Case("drawn", lambda: Reversible(vocabulary, width, tie_weights=tied), (tokens,), vocabulary, lora, _tied)
    _check(*_built(case), case.call)


@settings(max_examples=15, derandomize=True, deadline=None, database=None)
@given(data=st.data())
def test_einsum_of_any_equation(data):
    """Labels drawn: token axes, contracted axes, new axes, axes shared with the kernel; every order of them."""
    tokens, contracted, new, shared = (
        data.draw(st.lists(st.sampled_from(pool), max_size=2, unique=True), label=label)
        for label, pool in (("tokens", "bc"), ("contracted", "de"), ("new", "fg"), ("shared", "hi"))
    )
    kernel = data.draw(st.permutations(contracted + new + shared), label="kernel")
    inputs = data.draw(st.permutations(tokens + contracted + shared), label="inputs")
    output = data.draw(st.permutations(tokens + new + shared), label="output")
    if not (kernel and inputs and output):
        return
    size = dict(zip("bcdefghi", [2, 3, 4, 2, 3, 2, 2, 3], strict=True))
    equation = f"a{''.join(inputs)},{''.join(kernel)}->a{''.join(output)}"
    bias = "".join(data.draw(st.lists(st.sampled_from(output), unique=True), label="bias")) or None
    shape = tuple(size[label] for label in output)
    case = Case("drawn", lambda: EinsumDense(equation, shape, bias_axes=bias), tuple(size[label] for label in inputs))
    lora = data.draw(st.booleans(), label="lora") and kernel[-1] not in shared and len(kernel) > 1
    case = dataclasses.replace(case, lora=lora)
    _check(*_built(case), case.call)


@settings(max_examples=40, derandomize=True, deadline=None, database=None)
@given(
    kind=st.sampled_from(["layer", "root mean square", "group", *HUB_ROOT_MEAN_SQUARE_NORMS]),
    tokens=st.lists(st.integers(1, 5), max_size=2),
    groups=st.integers(1, 3),
    size=st.integers(2, 4),
    epsilon=st.sampled_from([1e-3, 0.5]),
)
def test_normalisations_of_any_shape(kind, tokens, groups, size, epsilon):
    """At least two values are normalised together: of one alone nothing is left but rounding."""
    width = groups * size
    made = {
        "layer": lambda: LAYERS.LayerNormalization(epsilon=epsilon),
        "root mean square": lambda: LAYERS.RMSNormalization(epsilon=epsilon),
        "group": lambda: LAYERS.GroupNormalization(groups, epsilon=epsilon),
    }
    case = Case("drawn", made.get(kind, lambda: _hub_norm(kind, width, epsilon)), (*tokens, width))
    _check(*_built(case), case.call)


@settings(max_examples=10, derandomize=True, deadline=None, database=None)
@given(tokens=st.integers(1, 6), more=st.integers(0, 3), width=st.integers(1, 6), vocabulary=st.integers(2, 9))
def test_positions_and_masked_heads_of_any_shape(tokens, more, width, vocabulary):
    rows = tokens + more
    positions = Case("drawn", lambda: keras_hub.layers.PositionEmbedding(rows), (tokens, width))
    both = keras_hub.layers.TokenAndPositionEmbedding
    tables = Case("drawn", lambda: both(vocabulary, rows, width), (tokens,), integers=vocabulary)
    untied = Case("drawn", lambda: _head_of(vocabulary), (tokens + 2, width + 3), call=_call_head)
    for case in (positions, tables, untied):
        _check(*_built(case), case.call)


@settings(max_examples=10, derandomize=True, deadline=None, database=None)
@given(
    heads=st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2)]),
    head=st.integers(2, 4),
    tokens=st.integers(2, 6),
    width=st.integers(1, 5),
    lora=st.booleans(),
)
def test_attention_of_any_shape(heads, head, tokens, width, lora):
    """At least two values a head: a bias by head alone Keras may add along the tokens, which is refused."""
    query, shared = heads
    if query == shared:
        layer = LAYERS.MultiHeadAttention(query, head)
    else:
        layer = LAYERS.GroupQueryAttention(head, query, shared)
    case = Case("drawn", lambda: layer, (tokens, width), call=_attend)
    layer, x = _built(case)
    if lora:
        for each in (layer._query_dense, layer._value_dense):
            each.enable_lora(2)
    _check(layer, x, _attend)


@pytest.mark.parametrize("kept", ["bias", "gamma", "beta"])
def test_biases_or_scales_alone(kept):
    """What is trained of a block where all kernels are frozen (BitFit), or all but the scales of its norms."""
    block = keras_hub.layers.TransformerEncoder(6, 2)
    x = np.random.default_rng(1).normal(size=(4, 3, 6)).astype("float32")
    block(x)
    for variable in block.trainable_variables:
        variable.trainable = variable.path.endswith(kept)
    assert {v.path.split("/")[-1] for v in block.trainable_variables} == {kept}
    _check(block, x, _embed)


@pytest.mark.parametrize("between", [1, 4])
def test_a_layer_called_twice(between):
    """Also with another number of tokens, as a shared projection of query and memory has."""
    layer = Dense(4, activation="tanh")
    x = np.random.default_rng(1).normal(size=(3, 5, 4)).astype("float32")
    layer.build((None, None, 4))

    def twice(layer: Any, x: Any) -> Any:
        return layer(layer(x)[:, :between])

    _check(layer, x, twice)


class Pair(keras.layers.Layer):
    """Two layers, made to share what `share` says."""

    def __init__(self, first: Any, second: Any, share: Callable[[Any, Any], None]):
        super().__init__()
        self.first, self.second, self.share = first, second, share

    def build(self, shape: Any) -> None:
        self.first.build(shape)
        self.second.build(self.first.compute_output_shape(shape))
        self.share(self.first, self.second)

    def call(self, x: Any) -> Any:
        return self.second(keras.ops.tanh(self.first(x)))


def _share(attribute: str) -> Callable[[Any, Any], None]:
    def share(first: Any, second: Any) -> None:
        second._tracker.unlock()
        second._untrack_variable(getattr(second, attribute))
        setattr(second, attribute, getattr(first, attribute))

    return share


def test_two_dense_layers_that_share_a_kernel():
    layer = Pair(Dense(4), Dense(4), _share("_kernel"))
    x = np.random.default_rng(1).normal(size=(3, 5, 4)).astype("float32")
    layer(x)
    assert len(layer.trainable_variables) == 3
    _check(layer, x, lambda layer, x: layer(x))


@pytest.mark.parametrize(
    ("first", "second", "shape"),
    [
        (("abc,cd->abd", (None, 4)), ("abc,dc->abd", (None, 4)), (3, 4)),  # transposed
        (("abc,cde->abde", (None, 2, 2)), ("abde,def->abf", (None, 2)), (5, 2)),  # another split of the same shape
        (("abc,cd->abd", (4, 4)), ("abc,bc->abc", (4, 4)), (4, 4)),  # a scale per position
    ],
)
def test_one_kernel_in_two_equations(first, second, shape):
    """Factors that cannot be laid side by side are held per unit and added."""
    layer = Pair(EinsumDense(*first), EinsumDense(*second), _share("_kernel"))
    x = np.random.default_rng(1).normal(size=(3, *shape)).astype("float32")
    layer(x)
    assert len(layer.trainable_variables) == 1
    _check(layer, x, lambda layer, x: layer(x))


def test_two_tables_that_are_one():
    """Encoder and decoder over one vocabulary: two look-ups and one projection of the same variable."""

    class Both(Pair):
        def build(self, shape: Any) -> None:
            self.first.build(shape)
            self.second.build(shape)
            self.share(self.first, self.second)

        def call(self, x: Any) -> Any:
            return self.second(keras.ops.tanh(self.first(x) + self.second(x[:, ::-1])), reverse=True)

    layer = Both(keras.layers.Embedding(7, 4), Reversible(7, 4), _share("_embeddings"))
    x = np.random.default_rng(1).integers(0, 7, (3, 5)).astype("int32")
    layer(x)
    assert len(layer.trainable_variables) == 1
    _check(layer, x, lambda layer, x: layer(x))


def test_ids_counted_from_the_end_are_the_same_row():
    """Keras reads -1 as the last row: with id 6 in the same unit, both gradients meet there."""
    layer = keras.layers.Embedding(7, 4)
    layer.build()
    _check(layer, np.array([[6, -1, 2], [-7, 0, -1]], "int32"), _embed)
    layer.enable_lora(2)
    layer.lora_embeddings_b.assign(np.ones((2, 4)))
    _check(layer, np.array([[6, -1, 2], [-7, 0, -1]], "int32"), _embed)


def test_ids_outside_the_table_have_no_gradient_to_bound():
    """What such a look-up returns depends on the device; here the columns stand for whatever it was."""
    use = uses.gather(tf.constant([[1, 2], [1, 7], [-1, 3]]), tf.ones([3, 2, 4]), 7, 3)
    assert np.isnan(use.squared_norm().numpy()).tolist() == [False, True, True]
    assert np.isnan(use.per_unit().numpy()).any((1, 2)).tolist() == [False, True, True]


def test_terms_that_cancel_leave_no_negative_norm():
    """A NaN from the square root would drop the unit; a true NaN has to stay one."""
    ids, columns = tf.zeros([1, 2], tf.int32), tf.constant([[[1.0, 2.0], [-1.0, -2.0]]])
    table = uses.gather(ids, columns * 1e3, 3, 1)
    kernel = uses.outer(tf.constant([[[1.0, 0.0, 0.0]]]), tf.zeros([1, 1, 2]), (3, 2), 1)
    assert combining.squared_norm([table, kernel]).numpy() == [0.0]

    class Rounded:
        def squared_norm(self):
            return tf.constant([-1e-6, np.nan, 4.0])

    np.testing.assert_array_equal(combining.squared_norm([Rounded()]), [0.0, np.nan, 4.0])
