"""The only file that intercepts a layer call.

During one forward pass, every layer that holds trainable variables has its `call` wrapped. The wrapper records
the inputs and the output before activation, and watches that output on the tape, so that one backward pass
to the recorded outputs gives all that the rules need (book-keeping, Bu et al. 2023, arXiv 2210.00038).

A variable that is read outside the tapped calls of its own layer would have a gradient that no rule sees. More tapes,
one for what lies outside of all tapped calls and one for each call, watch for exactly that.

A call that encloses every use of variables without a rule can be a cut instead (`hybrid.py`): a tape of its own records
it, from these variables to the outputs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
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
class Cut:
    """One call of a layer, recorded for the variables whose per-unit gradients are formed.

    Attributes:
        variables: what the tape watches.
        tape: of this call alone, from the variables to the outputs.
        outputs: the floating leaves of the output; batch leading.
    """

    variables: Sequence[Any]
    tape: tf.GradientTape
    outputs: list[Any]


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
        graph: the graph that the pass is traced into, None when it runs eagerly.
        strays: `id` of the variables that a tapped call read although they are not of its layer.
        enclosed: `id` of the variables of the cuts now open, which every call inside may read.
        misplaced: layers with a call that cannot be tapped where it is; None: that is an error.
    """

    tape: tf.GradientTape
    watchers: list[tf.GradientTape]
    graph: Any
    calls: list[Call] = dataclasses.field(default_factory=list)
    cuts: list[Cut] = dataclasses.field(default_factory=list)
    strays: set[int] = dataclasses.field(default_factory=set)
    enclosed: list[set[int]] = dataclasses.field(default_factory=list)
    misplaced: list[Any] | None = None

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
        self.strays |= {id(v) for v in watcher.watched_variables()}.difference(own, *self.enclosed)

    @contextlib.contextmanager
    def enclosing(self, own: set[int]) -> Iterator[None]:
        """For the length of the call of a cut."""
        self.enclosed.append(own)
        try:
            with self.inside(own):
                yield
        finally:
            self.enclosed.pop()


# By `id` of a layer, the variables for which its calls are cuts.
Cuts = Mapping[int, Sequence[Any]]


@contextlib.contextmanager
def record(model: Any, batch_size: int, cuts: Cuts | None = None, *, collect: bool = False) -> Iterator[Recording]:
    """Tap every layer of `model` that holds trainable variables, for the length of the block.

    Args:
        model: a built Keras model whose trainable layers all have rules, but for the variables of `cuts`.
        batch_size: leading dimension that every tapped call must keep.
        collect: list a layer whose call cannot be tapped under `misplaced`, and leave the call as it is.

    Raises:
        UnsupportedLayerError: a trainable layer without a rule, or a call whose leading axis is not the batch (its
            gradient is not one per unit).
    """
    trainable, cuts = {id(v) for v in model.trainable_variables}, cuts or {}
    formed = {id(variable) for variables in cuts.values() for variable in variables}
    with contextlib.ExitStack() as stack:
        tape = stack.enter_context(tf.GradientTape(watch_accessed_variables=False))
        outside = stack.enter_context(tf.GradientTape())
        recording = Recording(tape, [outside], _graph(), misplaced=[] if collect else None)
        layers = keras_private.flatten_layers(model)
        flattened = {id(part) for layer in layers for part in rules.flattened_by(layer)}
        for layer in layers:
            refused = rules.mixes_units(layer) or rules.hides_calls(layer, trainable)
            if refused is not None:
                raise UnsupportedLayerError(refused)
            own = [v for v in keras_private.own_variables(layer) if id(v) not in formed]
            tap: _Tap
            if id(layer) in cuts:
                tap = _CutTap(layer, batch_size, False, cuts[id(layer)])
            elif any(id(v) in trainable for v in own):
                tap = _RuleTap(
                    layer, batch_size, id(layer) in flattened, rules.rule_for(layer), {id(v.value) for v in own}
                )
            else:
                continue
            stack.enter_context(keras_private.replaced_call(layer, tap.around(recording)))
        yield recording


def check_batch_axis(model: Any, x: Any, batch_size: int) -> None:
    """Traces the forward pass for one record more, where the leading axis of every tapped call must grow with it.

    A table of positions that is looked up once for all records has as many rows as tokens, and would be taken for
    a batch where the two numbers happen to agree. Nothing is run.

    Raises:
        UnsupportedLayerError: a tapped call whose leading axis is not the batch.
    """
    traced(model, x, batch_size + 1)


def traced(model: Any, x: Any, batch_size: int, cuts: Cuts | None = None, *, collect: bool = False) -> Recording:
    """What a forward pass would record for another number of records; nothing is run.

    Args:
        x: nested tensors or specs [any number of records, ...].
        cuts, collect: as for `record`.
    """
    recordings = []

    def forward(inputs: Any) -> None:
        with record(model, batch_size, cuts, collect=collect) as recording, tf.name_scope("batch_axis"):
            model(inputs, training=True)
        recordings.append(recording)

    spec = tf.nest.map_structure(lambda leaf: tf.TensorSpec([batch_size, *leaf.shape[1:]], leaf.dtype), x)
    tf.function(forward, autograph=False).get_concrete_function(spec)
    return recordings[0]


def _graph() -> Any:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


@dataclasses.dataclass
class _Tap:
    """What runs in the place of the call of `layer`.

    Attributes:
        flattened: the leading axis is batch and tokens together.
    """

    layer: Any
    batch_size: int
    flattened: bool

    @property
    def name(self) -> str:
        return f"layer '{self.layer.name}' ({type(self.layer).__name__})"

    def around(self, recording: Recording) -> Callable[[Any], Any]:
        def make(original: Any) -> Any:
            tapped = self.tapped(recording, original)

            def call(*args: Any, **kwargs: Any) -> Any:
                try:
                    self._check_place(recording)
                    return tapped(*args, **kwargs)
                except _CallRefusedError as error:
                    if recording.misplaced is None or error.layer is not self.layer:
                        raise
                recording.misplaced.append(self.layer)
                return original(*args, **kwargs)

            return call

        return make

    def tapped(self, recording: Recording, original: Any) -> Callable[..., Any]:
        raise NotImplementedError

    def _check_place(self, recording: Recording) -> None:
        if recording.graph is not _graph() or not keras_private.is_recording():
            raise self._refusal(
                f"Expected {self.name} to be called where the model is. Received: a call inside a "
                "tf.function, a loop, a branch or a part that is recomputed in the backward pass, whose "
                "gradients stay in there. Take the layer out of it, or freeze it (layer.trainable = False)."
            )

    def _check(self, role: str, tensor: Any) -> None:
        if not isinstance(tensor, tf.Tensor):
            raise self._refusal(
                f"Expected the {role} of {self.name} to be one dense tensor. Received: {type(tensor).__name__}. "
                "Make it dense (to_tensor, to_dense), or freeze the layer (layer.trainable = False)."
            )
        leading = tensor.shape[0] if tensor.shape.rank else None
        if self.flattened and leading and leading % self.batch_size == 0:
            return
        if leading != self.batch_size:
            raise self._refusal(
                f"Expected the {role} of {self.name} to keep the batch as its leading axis ({self.batch_size}). "
                f"Received: shape {tensor.shape}. Its gradient cannot be split into units; broadcast the tensor over "
                "the batch, or freeze the layer (layer.trainable = False)."
            )

    def _refusal(self, message: str) -> _CallRefusedError:
        return _CallRefusedError(message, self.layer)


class _CallRefusedError(keras_private.InItsOwnWords, UnsupportedLayerError):
    def __init__(self, message: str, layer: Any):
        super().__init__(message)
        self.layer = layer


@dataclasses.dataclass
class _RuleTap(_Tap):
    """Of a layer with a rule.

    Attributes:
        own: `id` of the values of the layer's own variables.
    """

    rule: rules.Rule
    own: set[int]

    def tapped(self, recording: Recording, original: Any) -> Callable[..., Any]:
        layer, rule = self.layer, self.rule
        signature = inspect.signature(original)

        def watch(tensor: Any, uses_of: Callable[[Any, int], rules.UsesOf]) -> None:
            self._check("inner value", tensor)
            recording.tape.watch(tensor)
            recording.calls.append(Call(layer, _Inner(uses_of), None, {}, tensor))

        def call(*args: Any, **kwargs: Any) -> Any:
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


@dataclasses.dataclass
class _CutTap(_Tap):
    """Of a layer whose calls enclose every use of `variables`."""

    variables: Sequence[Any]

    def tapped(self, recording: Recording, original: Any) -> Callable[..., Any]:
        values = [variable.value for variable in self.variables]  # in a call Keras would cast them
        own = {id(value) for value in values}

        def call(*args: Any, **kwargs: Any) -> Any:
            tape = tf.GradientTape(persistent=True, watch_accessed_variables=False)
            with recording.enclosing(own), tape:
                for value in values:
                    tape.watch(value)
                output = original(*args, **kwargs)
            leaves = [leaf for leaf in tf.nest.flatten(output) if leaf is not None]
            leaves = [leaf for leaf in leaves if not isinstance(leaf, tf.Tensor) or leaf.dtype.is_floating]
            for leaf in leaves:
                self._check("output", leaf)
            for leaf in leaves:
                recording.tape.watch(leaf)
            recording.cuts.append(Cut(self.variables, tape, leaves))
            return output

        return call
