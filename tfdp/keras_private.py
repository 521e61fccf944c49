"""The only file that touches what Keras and TensorFlow keep private, each with its reason.

`tests/test_keras_private.py` breaks loudly when one of them changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


def flatten_layers(layer: Any) -> list[Any]:
    """`layer` and every layer below it, each once. Keras lists only a model's direct layers in public."""
    return list(layer._flatten_layers(include_self=True, recursive=True))


def own_variables(layer: Any) -> list[Any]:
    """Variables that `layer` holds itself, not through a sublayer."""
    below = {id(v) for child in layer._flatten_layers(include_self=False) for v in child.variables}
    return [v for v in layer.variables if id(v) not in below]


def keras_mask(tensor: Any) -> Any | None:
    """The mask that a layer attached to its output; the loss reads it from there."""
    return getattr(tensor, "_keras_mask", None)


def set_keras_mask(tensor: Any, mask: Any) -> None:
    """Attach `mask` to `tensor` as a layer does, so that a Keras loss finds it."""
    tensor._keras_mask = mask


def llama_layer_norm() -> type:
    """The root-mean-square norm of KerasHub's Llama family, which KerasHub does not export."""
    from keras_hub.src.models.llama.llama_layernorm import LlamaLayerNorm

    return LlamaLayerNorm


def own_losses(layer: Any) -> list[Any]:
    """Tensors given to `add_loss` in the last call of `layer` itself."""
    return list(layer._get_own_losses())


def computes_loss_itself(model: Any) -> bool:
    """Whether `compute_loss` or `train_step` of Keras was overridden by the model's class."""
    import keras

    base = keras.Model
    return type(model).compute_loss is not base.compute_loss or type(model).train_step is not base.train_step


@contextlib.contextmanager
def replaced_call(layer: Any, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Put `make(layer.call)` in the place of `layer.call`, and take it off again.

    Keras looks `call` up on the instance at every call, so an instance attribute is enough. It is set past Keras's
    attribute tracking, which would otherwise see a change of a locked layer.
    """
    object.__setattr__(layer, "call", make(layer.call))
    try:
        yield
    finally:
        object.__delattr__(layer, "call")


@contextlib.contextmanager
def replaced_attribute(layer: Any, name: str, value: Any) -> Iterator[None]:
    """Give `layer.name` another value for a moment (past Keras's attribute tracking)."""
    before = getattr(layer, name)
    object.__setattr__(layer, name, value)
    try:
        yield
    finally:
        object.__setattr__(layer, name, before)
