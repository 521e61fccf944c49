"""What a rule is, and how it is found."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

from tfdp import keras_private
from tfdp.errors import UnsupportedLayerError
from tfdp.gradients.uses import Use

UsesOf = list[tuple[Any, Use]]


class Rule:
    """Base class of the rules.

    Attributes:
        finish_attributes: attributes of the layer that its `call` applies after the linear part; they are set to None
            while the layer runs under the tap and applied by `finish`.
    """

    finish_attributes: tuple[str, ...] = ()

    def refuse(self, layer: Any) -> str | None:
        """Why this layer, as configured, is not covered; None when it is."""
        return None

    def uses(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], gradient: Any, units: int) -> UsesOf:
        """Uses of the layer's own variables, trainable or not, in one call.

        Args:
            layer: the layer that was called.
            args, kwargs: what its `call` received; batch leading.
            gradient: of the summed loss with respect to the output before `finish`.
            units: number of privacy units in the batch; batch = units * records per unit.
        """
        raise NotImplementedError

    @contextlib.contextmanager
    def without_finish(self, layer: Any):  # type: ignore[no-untyped-def]
        with contextlib.ExitStack() as stack:
            for name in self.finish_attributes:
                if getattr(layer, name, None) is not None:
                    stack.enter_context(keras_private.replaced_attribute(layer, name, None))
            yield

    def finish(self, layer: Any, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the layer does after its linear part."""
        activation = getattr(layer, "activation", None) if "activation" in self.finish_attributes else None
        return output if activation is None else activation(output)


@functools.cache
def all_rules() -> dict[Any, Rule]:
    """Every rule by the `call` function that it covers."""
    from tfdp.gradients.rules import dense, embedding, normalization

    table: dict[Any, Rule] = {}
    for module in (dense, embedding, normalization):
        for layer_class, rule in module.rules().items():
            table[layer_class.call] = rule
    return table


def rule_for(layer: Any) -> Rule:
    """The rule that covers `layer`.

    Raises:
        UnsupportedLayerError: none does; the message names the layer and the remedy.
    """
    reason = without_rule(layer)
    if reason is not None:
        raise UnsupportedLayerError(reason)
    return all_rules()[type(layer).call]


def without_rule(layer: Any) -> str | None:
    """Why no rule covers `layer`; None when one does."""
    rule = all_rules().get(type(layer).call)
    name = f"layer '{layer.name}' ({type(layer).__name__})"
    remedy = "Freeze it (layer.trainable = False), use a layer with a rule, or take method='vectorized'."
    if rule is None:
        return f"Expected every trainable layer to have a gradient rule. Received: {name}, which has none. {remedy}"
    if getattr(layer, "quantization_mode", None) is not None:
        return (
            f"Expected layers that are not quantized. Received: {name} quantized to {layer.quantization_mode}. {remedy}"
        )
    reason = rule.refuse(layer)
    return None if reason is None else f"Expected a layer that its rule covers. Received: {name}: {reason} {remedy}"
