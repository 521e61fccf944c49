"""Variables without a rule in a model that rules otherwise cover: per-unit gradients of these variables alone.

A *cut* is a layer whose calls enclose every use of such a variable, and whose outputs keep the batch as their leading
axis. In the one forward pass of book-keeping its calls are recorded on tapes of their own; the one backward pass gives
the gradients of its outputs; and a backward pass over these tapes, with the output gradients of one unit and zeros for
all others, gives the gradient of that unit (`vectorized_map` over the units). Dropout is that of the one forward pass.

| variable                                        | cut                                                                |
|-------------------------------------------------|--------------------------------------------------------------------|
| of a layer without a rule                       | that layer                                                         |
| read outside the calls of its layer, or by two  | the smallest layer around all of it, which may be the model itself |
| of a call whose leading axis is not the batch   | the smallest layer around it where it is                           |

Where a unit is not finite, the zeros of the others do not stay zeros on the way back through it (0 * NaN is NaN): such
a microbatch is taken one unit at a time instead, forward pass included.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdp import keras_private
from tfdp.errors import UnsupportedLayerError
from tfdp.gradients import rules, taps


def find_cuts(model: Any, x: Any, batch_size: int) -> dict[int, list[Any]]:
    """The cuts of a model: by `id` of a layer, the variables whose gradients are formed there. Runs nothing.

    The forward pass is traced until every variable has a cut that encloses it.

    Args:
        x: nested tensors or specs [batch_size, ...].

    Raises:
        UnsupportedLayerError: a layer that mixes units, is quantized or made under `keras.RematScope`.
    """
    around = _Surroundings(model)
    for layer in around.layers:
        reason = rules.without_rule(layer) if around.trained(layer) else None
        if reason is not None:
            if rules.is_quantized(layer):
                raise UnsupportedLayerError(reason)
            around.widen(around.trained(layer))
    while True:
        cuts = around.cuts()
        for size in (batch_size, batch_size + 1):  # an axis that is not the batch can be as long by chance
            recording = taps.traced(model, x, size, cuts, collect=True)
            misplaced = {id(layer): layer for layer in recording.misplaced or ()}.values()
            astray = recording.read_outside(model.trainable_variables)
            astray += [v for layer in misplaced for v in cuts.get(id(layer), around.trained(layer))]
            if astray:
                around.widen(astray)
                break
        else:
            return cuts


class _Surroundings:
    """Which layers enclose a variable, from the smallest to the model, and which of them is its cut now."""

    def __init__(self, model: Any):
        self.layers = keras_private.flatten_layers(model)
        self._below = {id(layer): {id(each) for each in keras_private.flatten_layers(layer)} for layer in self.layers}
        self._variables = {id(variable): variable for variable in model.trainable_variables}
        self._own = {
            id(layer): [v for v in keras_private.own_variables(layer) if id(v) in self._variables]
            for layer in self.layers
        }
        self._cut: dict[int, int] = {}

    def trained(self, layer: Any) -> list[Any]:
        """Trainable variables that `layer` holds itself."""
        return self._own[id(layer)]

    def widen(self, variables: list[Any]) -> None:
        """Gives each its first cut, or the next larger one."""
        for key in {id(variable) for variable in variables}:
            larger = self._cut.get(key, -1) + 1
            if larger == len(self._around(key)):
                raise UnsupportedLayerError(
                    f"Expected a model that can be recorded as a whole. Received: {self._variables[key].path}, which "
                    "is used outside of it, or a model whose output does not keep the batch as its leading axis. "
                    "Freeze what holds it (layer.trainable = False), or take method='vectorized'."
                )
            self._cut[key] = larger

    def cuts(self) -> dict[int, list[Any]]:
        """By `id` of a layer. All that a cut trains itself has a cut: its calls cannot be tapped twice."""
        while True:
            found: dict[int, list[Any]] = {}
            for key in self._variables:
                if key in self._cut:
                    found.setdefault(id(self._around(key)[self._cut[key]]), []).append(self._variables[key])
            rest = [v for layer in self.layers if id(layer) in found for v in self.trained(layer)]
            rest = [v for v in rest if id(v) not in self._cut]
            if not rest:
                return found
            self.widen(rest)

    def _around(self, key: int) -> list[Any]:
        """Layers that enclose every layer that holds the variable."""
        holders = {id(layer) for layer in self.layers if any(id(v) == key for v in self.trained(layer))}
        enclosing = [layer for layer in self.layers if holders <= self._below[id(layer)]]
        return sorted(enclosing, key=lambda layer: len(self._below[id(layer)]))


def per_unit_gradients(cut: taps.Cut, gradients: list[Any], units: int) -> list[tuple[Any, Any]]:
    """(variable, [units, *shape] float32) for every variable that the outputs of one call depend on.

    Args:
        gradients: of the summed loss with respect to `cut.outputs`; None where it does not depend on one.
    """
    pairs = [(o, tf.convert_to_tensor(g)) for o, g in zip(cut.outputs, gradients, strict=True) if g is not None]
    if not pairs:
        return []
    values = [variable.value for variable in cut.variables]
    outputs, heads = [output for output, _ in pairs], [head for _, head in pairs]
    # Which variables take part is known once the backward pass is traced; in a graph this one is not run.
    there = [each is not None for each in cut.tape.gradient(outputs, values, output_gradients=heads)]
    taking_part = [variable for variable, found in zip(cut.variables, there, strict=True) if found]
    if not taking_part:
        return []

    def one_unit(unit: Any) -> list[Any]:
        def only(head: Any) -> Any:
            mine = tf.repeat(tf.range(units) == unit, head.shape[0] // units)
            return tf.where(tf.reshape(mine, [-1] + [1] * (len(head.shape) - 1)), head, tf.zeros_like(head))

        found = cut.tape.gradient(
            outputs, [variable.value for variable in taking_part], output_gradients=[only(head) for head in heads]
        )
        return [tf.cast(tf.convert_to_tensor(each), tf.float32) for each in found]

    formed = tf.vectorized_map(one_unit, tf.range(units))
    return list(zip(taking_part, formed, strict=True))


__all__ = ["find_cuts", "per_unit_gradients"]
