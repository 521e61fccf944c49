"""FLOPs and bytes of operations in a traced graph, from their static shapes.

| count | what is counted                                                                              |
|-------|----------------------------------------------------------------------------------------------|
| FLOPs | products: 2 m n k for a matrix product, likewise for einsum and convolution; nothing else    |
| bytes | what the operations write, one by one; a compiler that fuses them writes less                |

What runs only where the terms of a gradient cancel (a branch of `tf.cond`) is not counted. How often a loop runs is not
known: where one is among the operations, so are not the FLOPs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

# They give on what they got, or are known when the graph is made.
_WITHOUT_WRITING = frozenset(
    {
        "Const",
        "ExpandDims",
        "Identity",
        "If",
        "NoOp",
        "Placeholder",
        "ReadVariableOp",
        "Reshape",
        "Shape",
        "Squeeze",
        "StatelessIf",
        "StopGradient",
    }
)


_LOOPS_AND_CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall", "StatelessWhile", "While"})


def flops(operations: Iterable[Any]) -> int | None:
    """None: not known."""
    operations = list(operations)
    if any(operation.type in _LOOPS_AND_CALLS for operation in operations):
        return None
    return sum(_flops(operation) for operation in operations)


def written(operations: Iterable[Any]) -> int:
    """Bytes."""
    outputs = [out for each in operations if each.type not in _WITHOUT_WRITING for out in each.outputs]
    return sum(_size(out) * out.dtype.size for out in outputs if out.dtype.is_floating or out.dtype.is_integer)


def needed(tensors: Iterable[Any], among: set[Any]) -> set[Any]:
    """Operations of `among` that these tensors are computed by."""
    found: set[Any] = set()
    pending = [tensor.op for tensor in tensors]
    while pending:
        operation = pending.pop()
        if operation in among and operation not in found:
            found.add(operation)
            pending += [tensor.op for tensor in operation.inputs]
    return found


def _size(tensor: Any) -> int:
    return math.prod(size or 0 for size in tensor.shape) if tensor.shape.rank is not None else 0


def _flops(operation: Any) -> int:
    kind, inputs, outputs = operation.type, operation.inputs, operation.outputs
    if kind == "MatMul":
        return 2 * _size(outputs[0]) * inputs[0].shape[0 if operation.get_attr("transpose_a") else 1]
    if kind in ("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"):
        return 2 * _size(outputs[0]) * inputs[0].shape[-2 if operation.get_attr("adj_x") else -1]
    if kind == "Einsum" and len(inputs) == 2:
        left, out = operation.get_attr("equation").decode().split("->")
        sizes: dict[str, int] = {}
        for labels, tensor in zip(left.split(","), inputs, strict=True):
            before, _, after = labels.partition("...")
            sizes |= dict(zip(before, tensor.shape, strict=False))
            sizes |= dict(zip(reversed(after), reversed(tensor.shape), strict=False))
        return 2 * _size(outputs[0]) * math.prod(size for label, size in sizes.items() if label not in out)
    if kind in ("Conv2D", "Conv3D", "DepthwiseConv2dNative"):
        return _convolution(_size(outputs[0]), inputs[1].shape, kind)
    if kind in ("Conv2DBackpropInput", "Conv3DBackpropInputV2", "DepthwiseConv2dNativeBackpropInput"):
        return _convolution(_size(inputs[2]), inputs[1].shape, kind)
    if kind in ("Conv2DBackpropFilter", "Conv3DBackpropFilterV2", "DepthwiseConv2dNativeBackpropFilter"):
        return _convolution(_size(inputs[2]), outputs[0].shape, kind)
    return 0


def _convolution(positions: int, kernel: Any, kind: str) -> int:
    """2 for each position, channel out and value of the kernel that reaches it."""
    return 2 * positions * math.prod(kernel[:2] if kind.startswith("Depthwise") else kernel[:-1])


__all__ = ["flops", "needed", "written"]
