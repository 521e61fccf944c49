"""Kernel multiplications: Dense, EinsumDense, and LoRA on either.

A kernel multiplication is an einsum `input,kernel->output`. With t running over the labels that input and output share,
the gradient of one unit is sum_t x_t (x) g_t. Dense is the einsum "...x,xy->...y".

LoRA (Hu et al. 2021, arXiv 2106.09685) adds s*A@B to the kernel along its last label L: y = x K + s (x A) B. With the
label r for the rank, A is the kernel of an einsum whose output gradient is s*g B^T, and B of one whose input is
s*(x A).
"""

from __future__ import annotations

import string
from typing import Any

import tensorflow as tf

from tfdp.gradients import uses
from tfdp.gradients.rules.base import Rule, UsesOf, check_bias_axis, other_trainable


def split_equation(equation: str, input_rank: int) -> tuple[str, str, str]:
    """Labels of input, kernel and output, the ellipsis written out."""
    left, output = equation.replace(" ", "").split("->")
    inputs, kernel = left.split(",")
    if "..." in inputs:
        free = [c for c in string.ascii_uppercase if c not in equation]
        dots = "".join(free[: input_rank - len(inputs) + 3])
        inputs, output = inputs.replace("...", dots), output.replace("...", dots)
    return inputs, kernel, output


def kernel_use(equation: tuple[str, str, str], x: Any, gradient: Any, shape: Any, units: int) -> uses.Use:
    """The use of a kernel of `shape` in einsum(`equation`), from its input and its output gradient."""
    inputs, kernel, output = equation
    x, gradient = tf.cast(x, tf.float32), tf.cast(gradient, tf.float32)
    batch = inputs[0]
    if any(label in inputs and label in output for label in kernel):
        held = tf.einsum(f"{inputs},{output}->{batch}{kernel}", x, gradient)
        return uses.direct(held, shape, units)
    tokens = "".join(label for label in output if label in inputs)
    rows = "".join(label for label in kernel if label in inputs)
    columns = "".join(label for label in kernel if label in output)
    order = rows + columns
    permutation = tuple(order.index(label) for label in kernel)
    size = dict(zip(inputs, x.shape, strict=True)) | dict(zip(output, gradient.shape, strict=True))

    def arranged(value: Any, labels: str, last: str) -> Any:
        target = tokens + last
        if target != labels:
            value = tf.transpose(value, [labels.index(label) for label in target])
        width = 1
        for label in last:
            width *= size[label]
        return tf.reshape(value, [*(size[label] for label in tokens), width])

    identity = permutation == tuple(range(len(order)))
    return uses.outer(
        arranged(x, inputs, rows),
        arranged(gradient, output, columns),
        shape,
        units,
        None if identity else permutation,
    )


def lora_uses(layer: Any, equation: tuple[str, str, str], x: Any, gradient: Any, units: int) -> UsesOf:
    """Uses of lora_kernel_a [..., r] and lora_kernel_b [r, L] in a layer whose kernel ends in label L."""
    inputs, kernel, output = equation
    a, b = layer.lora_kernel_a, layer.lora_kernel_b
    scale = layer.lora_alpha / layer.lora_rank
    last, rank = kernel[-1], next(c for c in string.ascii_lowercase if c not in "".join(equation))
    a_labels, b_labels = kernel[:-1] + rank, rank + last
    x, gradient = tf.cast(x, tf.float32), tf.cast(gradient, tf.float32)
    a_value, b_value = tf.cast(a.value, tf.float32), tf.cast(b.value, tf.float32)
    if last in output:
        narrow = output.replace(last, rank)
        back = scale * tf.einsum(f"{output},{b_labels}->{narrow}", gradient, b_value)
        ahead = scale * tf.einsum(f"{inputs},{a_labels}->{narrow}", x, a_value)
        return [
            (a, kernel_use((inputs, a_labels, narrow), x, back, a.shape, units)),
            (b, kernel_use((narrow, b_labels, output), ahead, gradient, b.shape, units)),
        ]
    narrow = inputs.replace(last, rank)
    ahead = scale * tf.einsum(f"{inputs},{b_labels}->{narrow}", x, b_value)
    back = scale * tf.einsum(f"{output},{a_labels}->{narrow}", gradient, a_value)
    return [
        (a, kernel_use((narrow, a_labels, output), ahead, gradient, a.shape, units)),
        (b, kernel_use((narrow, b_labels, inputs), back, x, b.shape, units)),
    ]


def bias_use(bias: Any, gradient: Any, units: int) -> uses.Use:
    """The use of a bias that is broadcast against the trailing axes of the output."""
    trailing = len(gradient.shape) - len(bias.shape)
    broadcast = [trailing + i for i, size in enumerate(bias.shape) if size == 1 and gradient.shape[trailing + i] != 1]
    if broadcast:
        gradient = tf.reduce_sum(tf.cast(gradient, tf.float32), broadcast, keepdims=True)
    return uses.direct(gradient, bias.shape, units)


class EinsumDenseRule(Rule):
    """keras.layers.EinsumDense, any equation whose first label is the batch."""

    finish_attributes = ("activation",)
    relies_on = ("kernel",)

    def equation(self, layer: Any) -> str:
        return layer.equation

    def refuse(self, layer: Any) -> str | None:
        equation = self.equation(layer)
        # Whatever the ellipsis stands for, input and output share it: one label is enough here.
        parts = equation.replace(" ", "").replace("...", ".").replace("->", ",").split(",")
        inputs, kernel, output = parts
        if any(len(set(part)) != len(part) for part in parts):
            return f"'{equation}' takes a diagonal."
        if inputs[0] != output[0] or inputs[0] in kernel:
            return f"the first label of '{equation}' is not a batch axis that input and output share."
        if any(label not in kernel and label not in output for label in inputs):
            return f"'{equation}' sums an input axis that the kernel does not have."
        if not layer.lora_enabled:
            return None
        if kernel[-1] in inputs and kernel[-1] in output:
            return f"LoRA along an axis that input and output of '{equation}' share."
        return other_trainable(layer, [layer.lora_kernel_a, layer.lora_kernel_b, layer.bias])

    def uses(self, layer: Any, inputs: Any, options: dict[str, Any], gradient: Any, units: int) -> UsesOf:
        equation = split_equation(self.equation(layer), len(inputs.shape))
        found: UsesOf = []
        if layer.lora_enabled:
            found += lora_uses(layer, equation, inputs, gradient, units)
        elif layer.kernel.trainable:
            found.append((layer.kernel, kernel_use(equation, inputs, gradient, layer.kernel.shape, units)))
        if layer.bias is not None and layer.bias.trainable:
            check_bias_axis(layer, gradient.shape, layer.bias.shape)
            found.append((layer.bias, bias_use(layer.bias, gradient, units)))
        return found


class DenseRule(EinsumDenseRule):
    """keras.layers.Dense."""

    def equation(self, layer: Any) -> str:
        return "...x,xy->...y"


def rules() -> dict[type, Rule]:
    import keras

    return {keras.layers.Dense: DenseRule(), keras.layers.EinsumDense: EinsumDenseRule()}
