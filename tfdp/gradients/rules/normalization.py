"""Normalisations over the last axis: scale and offset of the normalised input.

With n_t the normalised input and g_t the output gradient, the gradient of the scale is sum_t n_t * g_t, of the offset sum_t g_t.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdp import keras_private
from tfdp.gradients import uses
from tfdp.gradients.rules.base import Rule, UsesOf


class LayerNormalizationRule(Rule):
    """keras.layers.LayerNormalization over the last axis."""

    def refuse(self, layer: Any) -> str | None:
        if layer.rms_scaling:
            return "rms_scaling is deprecated in Keras."
        axes = layer.axis if isinstance(layer.axis, (list, tuple)) else [layer.axis]
        variable = layer.gamma if layer.gamma is not None else layer.beta
        if len(axes) != 1 or (variable is not None and len(variable.shape) != 1):
            return f"it normalises over axes {list(axes)}, not over the last one alone."
        return None

    def uses(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], gradient: Any, units: int) -> UsesOf:
        x, gradient = tf.cast(args[0], tf.float32), tf.cast(gradient, tf.float32)
        found: UsesOf = []
        if layer.gamma is not None:
            mean, variance = tf.nn.moments(x, -1, keepdims=True)
            normalised = (x - mean) * tf.math.rsqrt(variance + layer.epsilon)
            found.append((layer.gamma, uses.direct(normalised * gradient, layer.gamma.shape, units)))
        if layer.beta is not None:
            found.append((layer.beta, uses.direct(gradient, layer.beta.shape, units)))
        return found


class RootMeanSquareRule(Rule):
    """Root-mean-square norms (Zhang & Sennrich 2019) over the last axis, with a scale: Keras's, KerasHub's, Llama's."""

    def refuse(self, layer: Any) -> str | None:
        return None if len(layer.scale.shape) == 1 else "it normalises over more than the last axis."

    def uses(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], gradient: Any, units: int) -> UsesOf:
        x, gradient = tf.cast(args[0], tf.float32), tf.cast(gradient, tf.float32)
        epsilon = getattr(layer, "epsilon", 1e-6)  # keras_hub.layers.RMSNormalization has it as a constant
        normalised = x * tf.math.rsqrt(tf.reduce_mean(x * x, -1, keepdims=True) + epsilon)
        return [(layer.scale, uses.direct(normalised * gradient, layer.scale.shape, units))]


def rules() -> dict[type, Rule]:
    import keras
    import keras_hub

    root_mean_square = RootMeanSquareRule()
    return {
        keras.layers.LayerNormalization: LayerNormalizationRule(),
        keras.layers.RMSNormalization: root_mean_square,
        keras_hub.layers.RMSNormalization: root_mean_square,
        keras_private.llama_layer_norm(): root_mean_square,
    }
