"""The only file that intercepts a layer call.

During one forward pass, every layer that holds trainable variables has its `call` wrapped. The wrapper records
the inputs and the output before activation, and watches that output on the tape, so that one backward pass
to the recorded outputs gives all that the rules need (book-keeping, Bu et al. 2023, arXiv 2210.00038).

A variable that is read outside a tapped call would have a gradient that no rule sees. A second tape, stopped inside
tapped calls, watches for exactly that.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdp import keras_private
from tfdp.errors import UnsupportedLayerError
from tfdp.gradients import rules


@dataclasses.dataclass
class Call:
    """One call of a layer: what went in, and what came out of its linear part."""

    layer: Any
    rule: rules.Rule
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


@dataclasses.dataclass
class Recording:
    """What a forward pass left behind.

    Attributes:
        tape: gradients of anything computed in the block with respect to `call.output`.
        calls: tapped calls in the order in which they finished.
    """

    tape: tf.GradientTape
    outside: tf.GradientTape
    calls: list[Call] = dataclasses.field(default_factory=list)

    def read_outside(self, variables: list[Any]) -> list[Any]:
        """Trainable variables that were read outside every tapped call."""
        seen = {id(v) for v in self.outside.watched_variables()}
        return [v for v in variables if id(v.value) in seen]


@contextlib.contextmanager
def record(model: Any, batch_size: int) -> Iterator[Recording]:
    """Tap every layer of `model` that holds trainable variables, for the length of the block.

    Args:
        model: a built Keras model whose trainable layers all have rules.
        batch_size: leading dimension that every tapped call must keep.

    Raises:
        UnsupportedLayerError: a call whose leading axis is not the batch (its gradient is not one per unit).
    """
    trainable = {id(v) for v in model.trainable_variables}
    with contextlib.ExitStack() as stack:
        tape = stack.enter_context(tf.GradientTape(watch_accessed_variables=False))
        outside = stack.enter_context(tf.GradientTape())
        recording = Recording(tape, outside)
        for layer in keras_private.flatten_layers(model):
            if any(id(v) in trainable for v in keras_private.own_variables(layer)):
                rule = rules.rule_for(layer)
                stack.enter_context(keras_private.replaced_call(layer, _tapping(layer, rule, recording, batch_size)))
        yield recording


def _tapping(layer: Any, rule: rules.Rule, recording: Recording, batch_size: int) -> Any:
    def make(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with recording.outside.stop_recording(), rule.without_finish(layer):
                output = original(*args, **kwargs)
            for role, tensor in (("input", next(iter(args), None)), ("output", output)):
                shape = getattr(tensor, "shape", None)
                leading = shape[0] if shape else None
                if leading != batch_size:
                    raise UnsupportedLayerError(
                        f"Expected the {role} of layer '{layer.name}' ({type(layer).__name__}) to keep the batch as its "
                        f"leading axis ({batch_size}). Received: shape {shape}. Its gradient "
                        "cannot be split into units; broadcast the tensor over the batch, or freeze the layer "
                        "(layer.trainable = False)."
                    )
            recording.tape.watch(output)
            recording.calls.append(Call(layer, rule, args, kwargs, output))
            return rule.finish(layer, output, args, kwargs)

        return call

    return make
