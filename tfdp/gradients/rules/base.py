"""What a rule is, and how it is found."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator
from typing import Any

from tfdp import keras_private
from tfdp.errors import UnsupportedLayerError
from tfdp.gradients.uses import Use

UsesOf = list[tuple[Any, Use]]
# watch(tensor, uses_of): the gradient of `tensor` [batch, ...] makes uses; uses_of(gradient, units).
Watch = Callable[[Any, Callable[[Any, int], UsesOf]], None]


class Rule:
    """Base class of the rules.

    Attributes:
        finish_attributes: attributes of the layer that its `call` applies after the linear part; they are set to None
            while the layer runs under the tap and applied by `finish`.
        relies_on: what `call` reads on the layer's class; a subclass that overrides it is not covered.
        watches_output: False for a layer that is made of others and uses its own variables somewhere in between, where
            `run` watches what they make.
        flattens: sublayers that `call` gives batch and tokens as one leading axis, batch first.
    """

    finish_attributes: tuple[str, ...] = ()
    relies_on: tuple[str, ...] = ()
    watches_output: bool = True
    flattens: tuple[str, ...] = ()

    def refuse(self, layer: Any) -> str | None:
        """Why this layer, as configured, is not covered; None when it is."""
        return None

    def uses(self, layer: Any, inputs: Any, options: dict[str, Any], gradient: Any, units: int) -> UsesOf:
        """Uses of the layer's own variables, trainable or not, in one call.

        Args:
            layer: the layer that was called.
            inputs: the first argument of its `call`; batch leading.
            options: the other arguments by name, defaults included.
            gradient: of the summed loss with respect to the output before `finish`.
            units: number of privacy units in the batch; batch = units * records per unit.
        """
        raise NotImplementedError

    @contextlib.contextmanager
    def without_finish(self, layer: Any) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for name in self.finish_attributes:
                if getattr(layer, name, None) is not None:
                    stack.enter_context(keras_private.replaced_attribute(layer, name, None))
            yield

    def run(self, layer: Any, original: Callable[[], Any], batch_size: int, watch: Watch) -> Any:
        """What the layer does before `finish`."""
        with self.without_finish(layer):
            return original()

    def finish(self, layer: Any, output: Any, options: dict[str, Any]) -> Any:
        """What the layer does after its linear part."""
        activation = getattr(layer, "activation", None) if "activation" in self.finish_attributes else None
        return output if activation is None else activation(output)


@functools.cache
def all_rules() -> dict[Any, Rule]:
    """Every rule by the layer class that it was written for."""
    from tfdp.gradients.rules import composite, convolution, dense, embedding, normalization

    kinds = (composite, convolution, dense, embedding, normalization)
    return {layer_class: rule for kind in kinds for layer_class, rule in kind.rules().items()}


@functools.cache
def _by_call() -> dict[Any, Any]:
    return {layer_class.call: layer_class for layer_class in all_rules()}


def rule_for(layer: Any) -> Rule:
    """The rule that covers `layer`.

    Raises:
        UnsupportedLayerError: none does; the message names the layer and the remedy.
    """
    reason = without_rule(layer)
    if reason is not None:
        raise UnsupportedLayerError(reason)
    return all_rules()[_by_call()[type(layer).call]]


def without_rule(layer: Any) -> str | None:
    """Why no rule covers `layer`; None when one does."""
    covered = _by_call().get(type(layer).call)
    name = f"layer '{layer.name}' ({type(layer).__name__})"
    if is_quantized(layer):
        return (
            f"Expected trainable layers that are not quantized. Received: {name} quantized to "
            f"{layer.quantization_mode}, whose gradients are not those of what it computes. Train the model before "
            "it is quantized, or freeze the layer (layer.trainable = False)."
        )
    remedy = (
        "Freeze it (layer.trainable = False), use a layer with a rule, pass hybrid=True (per-unit gradients of its "
        "variables alone are formed), or take method='vectorized'."
    )
    if covered is None:
        return f"Expected every trainable layer to have a gradient rule. Received: {name}, which has none. {remedy}"
    rule = all_rules()[covered]
    changed = [part for part in ("__call__", *rule.relies_on) if getattr(type(layer), part) != getattr(covered, part)]
    changed += [part for part in ("call",) if part in vars(layer)]
    if changed:
        return (
            f"Expected a layer that computes what {covered.__name__} does. Received: {name}, which overrides "
            f"{', '.join(changed)}. {remedy}"
        )
    reason = rule.refuse(layer)
    return None if reason is None else f"Expected a layer that its rule covers. Received: {name}: {reason} {remedy}"


def is_quantized(layer: Any) -> bool:
    """Whether the layer computes with quantized weights."""
    return getattr(layer, "quantization_mode", None) is not None


def flattened_by(layer: Any) -> list[Any]:
    """Sublayers that `layer` calls with batch and tokens as one leading axis, batch first."""
    covered = _by_call().get(type(layer).call)
    return [] if covered is None else [getattr(layer, part) for part in all_rules()[covered].flattens]


def hides_calls(layer: Any, trainable: Collection[int]) -> str | None:
    """Why calls at or below `layer` cannot be recorded; None when they can.

    Args:
        trainable: `id` of every trainable variable of the model.
    """
    if not keras_private.is_recomputed(layer) or not any(id(v) in trainable for v in layer.variables):
        return None
    return (
        f"Expected layers whose calls can be recorded. Received: layer '{layer.name}' ({type(layer).__name__}), made "
        "under keras.RematScope, which runs again in the backward pass. Build the model without it."
    )


def check_bias_axis(layer: Any, output_shape: Any, bias_shape: Any) -> None:
    """Refuses a bias that Keras on TensorFlow adds along another axis than the one that it was made for.

    A bias with one axis longer than 1 is given to `tf.nn.bias_add`, along the last axis of the output where the sizes
    agree, and else along the second.

    Args:
        bias_shape: aligned with the trailing axes of the output.
    """
    long = [axis for axis, size in enumerate(bias_shape) if size > 1]
    if len(long) != 1:
        return
    size, made_for = bias_shape[long[0]], len(output_shape) - len(bias_shape) + long[0]
    added = len(output_shape) - 1 if output_shape[-1] == size else 1
    if size in (output_shape[1], output_shape[-1]) and added != made_for:
        raise UnsupportedLayerError(
            f"Expected layer '{layer.name}' ({type(layer).__name__}) to add its bias along axis {made_for}. "
            f"Received: shape {output_shape}, where Keras adds these {size} values along axis {added}. Change one of "
            "the sizes, or use a layer without bias."
        )


def other_trainable(layer: Any, covered: Collection[Any]) -> str | None:
    """Why a rule that covers these variables does not cover `layer`: it trains others. None when it does not."""
    known = {id(variable) for variable in covered}
    others = [v.path for v in keras_private.own_variables(layer) if v.trainable and id(v) not in known]
    return f"beside {len(known)} variables that the rule covers, it trains {', '.join(others)}." if others else None
