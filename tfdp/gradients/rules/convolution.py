"""Convolutions in one and two dimensions: Conv, DepthwiseConv, SeparableConv, and LoRA on Conv.

A convolution is a kernel multiplication of patches: with p_t the patch of the input that output position t looks at,
the gradient of one unit is sum_t p_t (x) g_t, as for Dense (Rochette et al. 2019, arXiv 1912.06015). Patches are taken
with TensorFlow's own `extract_patches`, which pads as its convolutions do. They hold each input value once for every
kernel position that sees it: kernel-size times the memory of the input.

| layer                     | per-unit gradient of the kernel                                                        |
|---------------------------|----------------------------------------------------------------------------------------|
| Conv                      | patches (x) gradients, Gram or materialised like every kernel                          |
| Conv with groups          | held per unit: each group has its own patches and gradients                            |
| Conv with LoRA            | A is the kernel of a convolution with `rank` filters, B of a product behind it         |
| DepthwiseConv             | held per unit: every channel has its own small kernel                                  |
| SeparableConv             | depthwise as above from gradients taken back through the pointwise kernel; the         |
|                           | pointwise kernel from the depthwise output, which is computed again                    |
"""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from tfdp.gradients import uses
from tfdp.gradients.rules.base import Rule, UsesOf, check_bias_axis, other_trainable


def channels_last(layer: Any, value: Any) -> Any:
    """`value` [batch, ..., channels] in float32."""
    value = tf.cast(value, tf.float32)
    if layer.data_format == "channels_last":
        return value
    return tf.transpose(value, [0, *range(2, len(value.shape)), 1])


def patches(layer: Any, inputs: Any) -> Any:
    """[batch, positions, kernel positions, channels]: what each output position of the convolution sees.

    Args:
        inputs: [batch, ..., channels] float32.
    """
    sizes, strides, rates = list(layer.kernel_size), list(layer.strides), list(layer.dilation_rate)
    padding = layer.padding
    if padding == "causal":
        before = rates[0] * (sizes[0] - 1)
        inputs, padding = tf.pad(inputs, [[0, 0], [before, 0], [0, 0]]), "valid"
    if len(sizes) == 1:
        inputs = inputs[:, None]
        sizes, strides, rates = [1, *sizes], [1, *strides], [1, *rates]
    channels = inputs.shape[-1]
    seen = tf.image.extract_patches(inputs, [1, *sizes, 1], [1, *strides, 1], [1, *rates, 1], padding.upper())
    return tf.reshape(seen, [seen.shape[0], -1, math.prod(sizes), channels])


def _positions(gradient: Any) -> Any:
    return tf.reshape(gradient, [gradient.shape[0], -1, gradient.shape[-1]])


def depthwise_use(variable: Any, seen: Any, gradient: Any, units: int) -> uses.Use:
    """The use of a kernel [..., channels, multiplier] from patches and gradients [batch, positions, channels * m]."""
    multiplier = variable.shape[-1]
    by_channel = tf.reshape(gradient, [*gradient.shape[:2], seen.shape[3], multiplier])
    held = tf.einsum("btkc,btcm->bkcm", seen, by_channel)
    return uses.direct(tf.reshape(held, [held.shape[0], *variable.shape]), variable.shape, units)


def _bias_uses(layer: Any, gradient: Any, units: int) -> UsesOf:
    """The use of the bias from the gradient as the layer lays it out."""
    if layer.bias is None:
        return []
    if layer.data_format == "channels_first":
        check_bias_axis(layer, gradient.shape, (*layer.bias.shape, *[1] * layer.rank))
    return [(layer.bias, uses.direct(_positions(channels_last(layer, gradient)), layer.bias.shape, units))]


class ConvRule(Rule):
    """keras.layers.Conv1D and Conv2D, with groups, strides, dilation, causal padding and LoRA."""

    finish_attributes = ("activation",)
    relies_on = ("kernel", "convolution_op")

    def refuse(self, layer: Any) -> str | None:
        if layer.rank > 2:
            return "convolutions in more than two dimensions are not covered."
        if not layer.lora_enabled:
            return None
        if layer.groups > 1:
            return "LoRA on a convolution with groups is not covered."
        return other_trainable(layer, [layer.lora_kernel_a, layer.lora_kernel_b, layer.bias])

    def uses(self, layer: Any, inputs: Any, options: dict[str, Any], gradient: Any, units: int) -> UsesOf:
        found = _bias_uses(layer, gradient, units)
        gradient = _positions(channels_last(layer, gradient))
        variable = layer.lora_kernel_a if layer.lora_enabled else layer.kernel
        if not variable.trainable:
            return found
        seen = patches(layer, channels_last(layer, inputs))
        if layer.groups > 1:
            grouped = tf.reshape(seen, [*seen.shape[:3], layer.groups, -1])
            columns = tf.reshape(gradient, [*gradient.shape[:2], layer.groups, -1])
            held = tf.einsum("btkgc,btgf->bkcgf", grouped, columns)
            held = tf.reshape(held, [held.shape[0], *variable.shape])
            return [*found, (variable, uses.direct(held, variable.shape, units))]
        rows = tf.reshape(seen, [*seen.shape[:2], -1])
        if not layer.lora_enabled:
            return [*found, (variable, uses.outer(rows, gradient, variable.shape, units))]
        b, scale = layer.lora_kernel_b, layer.lora_alpha / layer.lora_rank
        a_value, b_value = tf.cast(variable.value, tf.float32), tf.cast(b.value, tf.float32)
        back = scale * tf.matmul(gradient, b_value, transpose_b=True)
        ahead = scale * tf.matmul(rows, tf.reshape(a_value, [rows.shape[2], layer.lora_rank]))
        found.append((variable, uses.outer(rows, back, variable.shape, units)))
        return [*found, (b, uses.outer(ahead, gradient, b.shape, units))]


class DepthwiseConvRule(Rule):
    """keras.layers.DepthwiseConv1D and DepthwiseConv2D."""

    finish_attributes = ("activation",)

    def uses(self, layer: Any, inputs: Any, options: dict[str, Any], gradient: Any, units: int) -> UsesOf:
        biases = _bias_uses(layer, gradient, units)
        gradient = _positions(channels_last(layer, gradient))
        seen = patches(layer, channels_last(layer, inputs))
        return [
            *biases,
            (layer.kernel, depthwise_use(layer.kernel, seen, gradient, units)),
        ]


class SeparableConvRule(Rule):
    """keras.layers.SeparableConv1D and SeparableConv2D."""

    finish_attributes = ("activation",)

    def uses(self, layer: Any, inputs: Any, options: dict[str, Any], gradient: Any, units: int) -> UsesOf:
        depthwise, pointwise = layer.depthwise_kernel, layer.pointwise_kernel
        biases = _bias_uses(layer, gradient, units)
        gradient = _positions(channels_last(layer, gradient))
        seen = patches(layer, channels_last(layer, inputs))
        first = tf.reshape(tf.cast(depthwise.value, tf.float32), [*seen.shape[2:], layer.depth_multiplier])
        middle = tf.einsum("btkc,kcm->btcm", seen, first)
        middle = tf.reshape(middle, [*middle.shape[:2], -1])
        second = tf.reshape(tf.cast(pointwise.value, tf.float32), [middle.shape[2], gradient.shape[2]])
        back = tf.matmul(gradient, second, transpose_b=True)
        return [
            *biases,
            (depthwise, depthwise_use(depthwise, seen, back, units)),
            (pointwise, uses.outer(middle, gradient, pointwise.shape, units)),
        ]


def rules() -> dict[type, Rule]:
    from keras import layers

    conv, depthwise, separable = ConvRule(), DepthwiseConvRule(), SeparableConvRule()
    return {
        layers.Conv1D: conv,
        layers.Conv2D: conv,
        layers.DepthwiseConv1D: depthwise,
        layers.DepthwiseConv2D: depthwise,
        layers.SeparableConv1D: separable,
        layers.SeparableConv2D: separable,
    }
