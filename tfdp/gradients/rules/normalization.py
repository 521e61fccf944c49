"""Normalisations: scale and offset of the normalised input.

With n_t the normalised input and g_t the output gradient, the gradient of the scale is sum_t n_t * g_t, and that of the
offset sum_t g_t.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdp import keras_private
from tfdp.errors import UnsupportedLayerError
from tfdp.gradients import uses
from tfdp.gradients.rules.base import Rule, UsesOf


def _normalised_axes(layer: Any) -> list[int]:
    axis = getattr(layer, "axis", -1)  # only Keras's own layers can be told an axis
    return list(axis) if isinstance(axis, (list, tuple)) else [axis]


def _check_last_axis(layer: Any, inputs: Any) -> None:
    """The same axis may be the last one of one input and not of another."""
    if _normalised_axes(layer)[0] not in (-1, len(inputs.shape) - 1):
        raise UnsupportedLayerError(
            f"Expected layer '{layer.name}' ({type(layer).__name__}) to normalise over the last axis. Received: axis "
            f"{_normalised_axes(layer)} of an input of shape {inputs.shape}. Use axis=-1, or freeze the layer "
            "(layer.trainable = False)."
        )


def _as_in_the_forward_pass() -> Any:
    """For small results that the layer has computed too: without waiting, TensorFlow finds them to be the same."""
    return tf.control_dependencies(None)


class LayerNormalizationRule(Rule):
    """keras.layers.LayerNormalization over the last axis."""

    def refuse(self, layer: Any) -> str | None:
        if layer.rms_scaling:
            return "rms_scaling is deprecated in Keras."
        axes = _normalised_axes(layer)
        return None if len(axes) == 1 else f"it normalises over axes {axes}, not over the last one alone."

    def uses(self, layer: Any, inputs: Any, options: dict[str, Any], gradient: Any, units: int) -> UsesOf:
        _check_last_axis(layer, inputs)
        x, gradient = tf.cast(inputs, tf.float32), tf.cast(gradient, tf.float32)
        found: UsesOf = []
        if layer.gamma is not None:
            with _as_in_the_forward_pass():
                mean, variance = tf.nn.moments(x, [-1], keepdims=True)
                scale = tf.math.rsqrt(variance + layer.epsilon)
            normalised = (x - mean) * scale
            found.append((layer.gamma, uses.direct(normalised * gradient, layer.gamma.shape, units)))
        if layer.beta is not None:
            found.append((layer.beta, uses.direct(gradient, layer.beta.shape, units)))
        return found


class RootMeanSquareRule(Rule):
    """Root-mean-square norms (Zhang & Sennrich 2019) over the last axis, with a scale: Keras's, and all of KerasHub's.

    Gemma multiplies by 1 + scale, which has the same gradient.
    """

    def refuse(self, layer: Any) -> str | None:
        if getattr(layer, "data_format", None) == "channels_first":
            return "it normalises over channels that are not the last axis."
        axes = _normalised_axes(layer)
        return None if len(axes) == 1 else f"it normalises over axes {axes}, not over the last one alone."

    def uses(self, layer: Any, inputs: Any, options: dict[str, Any], gradient: Any, units: int) -> UsesOf:
        _check_last_axis(layer, inputs)
        x, gradient = tf.cast(inputs, tf.float32), tf.cast(gradient, tf.float32)
        # A constant in keras_hub.layers.RMSNormalization.
        epsilon = getattr(layer, "epsilon", getattr(layer, "eps", 1e-6))
        with _as_in_the_forward_pass():
            inverse = tf.math.rsqrt(tf.reduce_mean(tf.square(x), -1, keepdims=True) + epsilon)
        normalised = x * inverse
        scale = next(getattr(layer, name) for name in ("scale", "weight", "gamma") if hasattr(layer, name))
        return [(scale, uses.direct(normalised * gradient, scale.shape, units))]


class GroupNormalizationRule(Rule):
    """keras.layers.GroupNormalization over groups of the last axis, within one record."""

    relies_on = ("_reshape_into_groups", "_apply_normalization")

    def uses(self, layer: Any, inputs: Any, options: dict[str, Any], gradient: Any, units: int) -> UsesOf:
        _check_last_axis(layer, inputs)
        x, gradient = tf.cast(inputs, tf.float32), tf.cast(gradient, tf.float32)
        found: UsesOf = []
        if layer.gamma is not None:
            grouped = tf.reshape(x, [*x.shape[:-1], layer.groups, x.shape[-1] // layer.groups])
            axes = [axis for axis in range(1, len(grouped.shape)) if axis != len(grouped.shape) - 2]
            with _as_in_the_forward_pass():
                mean, variance = tf.nn.moments(grouped, axes, keepdims=True)
                scale = tf.math.rsqrt(variance + layer.epsilon)
            normalised = tf.reshape((grouped - mean) * scale, x.shape)
            found.append((layer.gamma, uses.direct(normalised * gradient, layer.gamma.shape, units)))
        if layer.beta is not None:
            found.append((layer.beta, uses.direct(gradient, layer.beta.shape, units)))
        return found


def rules() -> dict[type, Rule]:
    import keras
    import keras_hub

    root_mean_square = RootMeanSquareRule()
    return {
        keras.layers.LayerNormalization: LayerNormalizationRule(),
        keras.layers.GroupNormalization: GroupNormalizationRule(),
        keras.layers.RMSNormalization: root_mean_square,
        keras_hub.layers.RMSNormalization: root_mean_square,
        **{keras_private.hub_class(name): root_mean_square for name in keras_private.HUB_ROOT_MEAN_SQUARE_NORMS},
    }
