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
from collections.abc import Callable, Iterator
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


class _Inner(rules.Rule):
    """Of a tensor in the middle of a layer's call, which the layer's own rule asked to watch."""

    def __init__(self, uses_of: Callable[[Any, int], rules.UsesOf]):
        self.uses_of = uses_of

    def uses(self, layer: Any, inputs: Any, options: dict[str, Any], gradient: Any, units: int) -> rules.UsesOf:
        return self.uses_of(gradient, units)


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
        layers = keras_private.flatten_layers(model)
        flattened = {id(part) for layer in layers for part in rules.flattened_by(layer)}
        for layer in layers:
            refused = rules.mixes_units(layer) or rules.hides_calls(layer, trainable)
            if refused is not None:
                raise UnsupportedLayerError(refused)
            own = keras_private.own_variables(layer)
            if any(id(v) in trainable for v in own):
                tap = _Tap(layer, rules.rule_for(layer), {id(v.value) for v in own}, batch_size, id(layer) in flattened)
                stack.enter_context(keras_private.replaced_call(layer, tap.around(recording)))
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


@dataclasses.dataclass
class _Tap:
    """What runs in the place of the call of `layer`.

    Attributes:
        own: `id` of the values of the layer's own variables.
        flattened: the leading axis is batch and tokens together.
    """

    layer: Any
    rule: rules.Rule
    own: set[int]
    batch_size: int
    flattened: bool

    @property
    def name(self) -> str:
        return f"layer '{self.layer.name}' ({type(self.layer).__name__})"

    def around(self, recording: Recording) -> Callable[[Any], Any]:
        layer, rule = self.layer, self.rule

        def watch(tensor: Any, uses_of: Callable[[Any, int], rules.UsesOf]) -> None:
            self._check("inner value", tensor)
            recording.tape.watch(tensor)
            recording.calls.append(Call(layer, _Inner(uses_of), None, {}, tensor))

        def make(original: Any) -> Any:
            signature = inspect.signature(original)

            def call(*args: Any, **kwargs: Any) -> Any:
                if recording.graph is not _graph() or not keras_private.is_recording():
                    raise UnsupportedLayerError(
                        f"Expected {self.name} to be called where the model is. Received: a call inside a "
                        "tf.function, a loop, a branch or a part that is recomputed in the backward pass, whose "
                        "gradients stay in there. Take the layer out of it, or freeze it (layer.trainable = False)."
                    )
                bound = signature.bind(*args, **kwargs)
                bound.apply_defaults()
                options = dict(bound.arguments)
                inputs = options.pop(next(iter(signature.parameters)))
                with recording.inside(self.own):
                    output = rule.run(layer, lambda: original(*args, **kwargs), self.batch_size, watch)
                if not rule.watches_output:
                    return output
                self._check("input", inputs)
                self._check("output", output)
                recording.tape.watch(output)
                recording.calls.append(Call(layer, rule, inputs, options, output))
                return rule.finish(layer, output, options)

            return call

        return make

    def _check(self, role: str, tensor: Any) -> None:
        if not isinstance(tensor, tf.Tensor):
            raise UnsupportedLayerError(
                f"Expected the {role} of {self.name} to be one dense tensor. Received: {type(tensor).__name__}. "
                "Make it dense (to_tensor, to_dense), or freeze the layer (layer.trainable = False)."
            )
        leading = tensor.shape[0] if tensor.shape.rank else None
        if self.flattened and leading and leading % self.batch_size == 0:
            return
        if leading != self.batch_size:
            raise UnsupportedLayerError(
                f"Expected the {role} of {self.name} to keep the batch as its leading axis ({self.batch_size}). "
                f"Received: shape {tensor.shape}. Its gradient cannot be split into units; broadcast the tensor over "
                "the batch, or freeze the layer (layer.trainable = False)."
            )
