"""The only file that intercepts a layer call.

During one forward pass, every layer that holds trainable variables has its `call` wrapped. The wrapper records
the inputs and the output before activation, and watches that output on the tape, so that one backward pass
to the recorded outputs gives all that the rules need (book-keeping, Bu et al. 2023, arXiv 2210.00038).

A variable that is read outside the tapped calls of its own layer would have a gradient that no rule sees. More tapes,
one for what lies outside of all tapped calls and one for each call, watch for exactly that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdp import keras_private
from tfdp.errors import UnsupportedLayerError
from tfdp.gradients import rules


@dataclasses.dataclass
class Call:
    """One call of a layer: what went in, and what came out of its linear part.

    Attributes:
        inputs: the first argument.
        options: every other argument by name, defaults included.
    """

    layer: Any
    rule: rules.Rule
    inputs: Any
    options: dict[str, Any]
    output: Any


@dataclasses.dataclass
class Recording:
    """What one forward pass left behind.

    Attributes:
        tape: watches the recorded outputs; still recording until the block that made it ends.
        watchers: tapes that list the variables read outside of all tapped calls, and in those now open.
        strays: `id` of the variables that a tapped call read although they are not of its layer.
        graph: the graph that the pass is traced into, None when it runs eagerly.
    """

    tape: tf.GradientTape
    watchers: list[tf.GradientTape]
    graph: Any
    calls: list[Call] = dataclasses.field(default_factory=list)
    strays: set[int] = dataclasses.field(default_factory=set)

    def read_outside(self, variables: list[Any]) -> list[Any]:
        """Trainable variables that were read outside the tapped calls of the layers that hold them."""
        seen = self.strays | {id(v) for v in self.watchers[0].watched_variables()}
        return [v for v in variables if id(v.value) in seen]

    @contextlib.contextmanager
    def inside(self, own: set[int]) -> Iterator[None]:
        """For the length of a tapped call, which may hold another one, of a layer with these variables."""
        with self.watchers[-1].stop_recording(), tf.GradientTape() as watcher:
            self.watchers.append(watcher)
            try:
                yield
            finally:
                self.watchers.pop()
        self.strays |= {id(v) for v in watcher.watched_variables()} - own


@contextlib.contextmanager
def record(model: Any, batch_size: int) -> Iterator[Recording]:
    """Tap every layer of `model` that holds trainable variables, for the length of the block.

    Args:
        model: a built Keras model whose trainable layers all have rules.
        batch_size: leading dimension that every tapped call must keep.

    Raises:
        UnsupportedLayerError: a trainable layer without a rule, or a call whose leading axis is not the batch (its
            gradient is not one per unit).
    """
    trainable = {id(v) for v in model.trainable_variables}
    with contextlib.ExitStack() as stack:
        tape = stack.enter_context(tf.GradientTape(watch_accessed_variables=False))
        outside = stack.enter_context(tf.GradientTape())
        recording = Recording(tape, [outside], _graph())
        for layer in keras_private.flatten_layers(model):
            hidden = rules.hides_calls(layer, trainable)
            if hidden is not None:
                raise UnsupportedLayerError(hidden)
            own = keras_private.own_variables(layer)
            if any(id(v) in trainable for v in own):
                tap = _tapping(layer, rules.rule_for(layer), {id(v.value) for v in own}, recording, batch_size)
                stack.enter_context(keras_private.replaced_call(layer, tap))
        yield recording


def check_batch_axis(model: Any, x: Any, batch_size: int) -> None:
    """Traces the forward pass for one record more, where the leading axis of every tapped call must grow with it.

    A table of positions that is looked up once for all records has as many rows as tokens, and would be taken for
    a batch where the two numbers happen to agree. Nothing is run.

    Raises:
        UnsupportedLayerError: a tapped call whose leading axis is not the batch.
    """
    larger = batch_size + 1

    def forward(inputs: Any) -> None:
        with record(model, larger), tf.name_scope("batch_axis"):
            model(inputs, training=True)

    spec = tf.nest.map_structure(lambda leaf: tf.TensorSpec([larger, *leaf.shape[1:]], leaf.dtype), x)
    tf.function(forward, autograph=False).get_concrete_function(spec)


def _graph() -> Any:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def _tapping(layer: Any, rule: rules.Rule, own: set[int], recording: Recording, batch_size: int) -> Any:
    name = f"layer '{layer.name}' ({type(layer).__name__})"

    def make(original: Any) -> Any:
        signature = inspect.signature(original)

        def call(*args: Any, **kwargs: Any) -> Any:
            if recording.graph is not _graph() or not keras_private.is_recording():
                raise UnsupportedLayerError(
                    f"Expected {name} to be called where the model is. Received: a call inside a tf.function, a loop, "
                    "a branch or a part that is recomputed in the backward pass, whose gradients stay in there. Take "
                    "the layer out of it, or freeze it (layer.trainable = False)."
                )
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            options = dict(bound.arguments)
            inputs = options.pop(next(iter(signature.parameters)))
            with recording.inside(own), rule.without_finish(layer):
                output = original(*args, **kwargs)
            for role, tensor in (("input", inputs), ("output", output)):
                if not isinstance(tensor, tf.Tensor):
                    raise UnsupportedLayerError(
                        f"Expected the {role} of {name} to be one dense tensor. Received: {type(tensor).__name__}. "
                        "Make it dense (to_tensor, to_dense), or freeze the layer (layer.trainable = False)."
                    )
                if tensor.shape.rank == 0 or tensor.shape[0] != batch_size:
                    raise UnsupportedLayerError(
                        f"Expected the {role} of {name} to keep the batch as its leading axis ({batch_size}). "
                        f"Received: shape {tensor.shape}. Its gradient cannot be split into units; broadcast the "
                        "tensor over the batch, or freeze the layer (layer.trainable = False)."
                    )
            recording.tape.watch(output)
            recording.calls.append(Call(layer, rule, inputs, options, output))
            return rule.finish(layer, output, options)

        return call

    return make
