"""Convolutions of any shape, in a model. The contract of each rule is in test_rules.py."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdp.errors import UnsupportedLayerError
from tfdp.gradients import clipped_gradients, rules

LAYERS = keras.layers


def _check(oracle: Any, layer: Any, shape: tuple[int, ...], lora: bool = False) -> None:
    """Clipped gradients of a model around `layer`, against the loop."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input(shape)
    hidden = LAYERS.Dense(shape[-1])(inputs)  # gradients pass through the layer, too
    model = keras.Model(inputs, LAYERS.GlobalAveragePooling1D()(LAYERS.Reshape((-1, 2))(layer(hidden)) ** 2))
    if lora:
        layer.enable_lora(2, lora_alpha=3)
    model.compile(optimizer="sgd", loss="mse")
    oracle.shaken(model, 0.3)
    generator = np.random.default_rng(7)
    data = generator.normal(size=(3, *shape)).astype("float32"), generator.normal(size=(3, 2)).astype("float32")
    reference = oracle.reference_of(model, data)
    clip_norm = float(np.median(reference.norms))
    result = clipped_gradients(model, tf.nest.map_structure(tf.constant, data), clip_norm)
    oracle.assert_agrees(tf.nest.map_structure(lambda leaf: leaf.numpy(), result), reference, clip_norm)


OPTIONS = st.fixed_dictionaries(
    {
        "kernel_size": st.integers(1, 3),
        "padding": st.sampled_from(["valid", "same"]),
        "use_bias": st.booleans(),
        "data_format": st.sampled_from(["channels_last", "channels_first"]),
    }
)


@settings(max_examples=20, derandomize=True, deadline=None, database=None)
@given(
    kind=st.sampled_from(["Conv", "DepthwiseConv", "SeparableConv"]),
    rank=st.integers(1, 2),
    size=st.integers(6, 7),
    stride=st.integers(1, 2),
    dilation=st.integers(1, 2),
    groups=st.integers(1, 2),
    lora=st.booleans(),
    options=OPTIONS,
)
def test_any_shape(oracle, kind, rank, size, stride, dilation, groups, lora, options):
    options = options | ({"strides": stride} if stride > 1 else {"dilation_rate": dilation})
    if kind == "Conv":
        options |= {"filters": 4, "groups": groups}
    elif kind == "SeparableConv":
        options |= {"filters": 4}
    if kind != "Conv":
        options |= {"depth_multiplier": groups}
    shape = (*(size - axis for axis in range(rank)), 2)
    shape = shape if options["data_format"] == "channels_last" else (shape[-1], *shape[:-1])
    layer = getattr(LAYERS, f"{kind}{rank}D")(**options)
    output = layer.compute_output_shape((None, *shape))
    if options["data_format"] == "channels_first" and options["use_bias"] and output[1] == output[-1]:
        return  # refused: see below
    _check(oracle, layer, shape, lora=lora and kind == "Conv" and groups == 1)


def test_what_is_not_covered():
    plain = LAYERS.Conv3D(2, 1)
    plain.build((None, 2, 2, 2, 2))
    grouped = LAYERS.Conv1D(4, 1, groups=2)
    grouped.build((None, 3, 4))
    grouped.enable_lora(2)
    for layer, words in ((plain, "more than two dimensions"), (grouped, "LoRA on a convolution with groups")):
        with pytest.raises(UnsupportedLayerError, match=words):
            rules.rule_for(layer)


def test_a_bias_that_keras_adds_along_the_wrong_axis(oracle):
    """With as many channels as positions, Keras on TensorFlow takes the last axis for that of the channels."""
    layer = LAYERS.Conv1D(4, 3, data_format="channels_first", bias_initializer=keras.initializers.RandomNormal(seed=1))
    x = np.ones((1, 2, 6), "float32")
    plain = layer(x) - layer.bias.numpy()[:, None]
    layer.use_bias = False
    assert not np.allclose(plain, layer(x), atol=1e-4)
    fresh = LAYERS.Conv1D(4, 3, data_format="channels_first")
    with pytest.raises(UnsupportedLayerError, match="adds these 4 values along axis 2"):
        _check(oracle, fresh, (2, 6))
