"""Layers of KerasHub that let one unit of a batch reach another, so that no rule could make them private.

They are refused wherever they stand in a model, trainable or not: what passes through them is not of one unit alone.
"""

from __future__ import annotations

import functools
from typing import Any

from tfdp import keras_private

_EXPERTS = (
    "its load-balancing loss multiplies averages over all tokens of the batch, and joins by add_loss. (The routing "
    "itself, the top experts of each token without a capacity, would keep units apart.)"
)
_XLNET = (
    "it reshapes the padding mask from [batch, tokens] to [tokens, batch] where it would have to transpose it, so that "
    "a unit attends by the padding of other units."
)
_REASONS = {
    "mixtral.mixtral_decoder:MixtralSparseMoeBlock": _EXPERTS,
    "qwen_moe.qwen_moe_decoder:QwenSparseMoeBlock": _EXPERTS,
    "qwen3_5_moe.qwen3_5_moe_decoder:Qwen3_5MoeSparseMoeBlock": _EXPERTS,
    "qwen3_moe.qwen3_moe_decoder:Qwen3SparseMoeBlock": _EXPERTS,
    "xlnet.xlnet_encoder:XLNetAttentionMaskLayer": _XLNET,
}


@functools.cache
def _by_call() -> dict[Any, str]:
    return {keras_private.hub_class(name).call: reason for name, reason in _REASONS.items()}  # type: ignore[attr-defined]


def mixes_units(layer: Any) -> str | None:
    """How `layer` lets one unit reach another; None for a layer not known to."""
    reason = _by_call().get(type(layer).call)
    if reason is None:
        return None
    return f"Expected layers that keep units apart. Received: layer '{layer.name}' ({type(layer).__name__}): {reason}"
