"""Which variables of a model are clipped together, where each layer has a clip norm of its own.

| asked for                | groups                                                   | clip norm of a group    |
|--------------------------|----------------------------------------------------------|-------------------------|
| a number C               | each of the L layers that train variables of their own   | C / sqrt(L)             |
| {pattern: norm, ...}     | all variables whose path a pattern fits                  | the norm of the pattern |

Either way one unit moves the sum by at most C = sqrt(sum of C_l^2), all variables together, which is what noise and
accounting go by. A variable that several layers share belongs to the first of them.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping
from typing import Any

from tfdp import keras_private
from tfdp.errors import GradientError
from tfdp.gradients.clipping import SMALLEST_CLIP_NORM, PerLayer

REST = "*"


def per_layer(model: Any, norms: float | Mapping[str, float]) -> PerLayer:
    """The clip norm of each group of trainable variables of a model.

    Args:
        model: built.
        norms: C, to be divided evenly among the layers; or by pattern, as `fnmatch` reads them, of the path of a
            variable. No two patterns may fit the same variable; "*" takes what no other one fits.

    Raises:
        GradientError: a pattern that fits nothing, a variable that none or several fit, or a norm below 1e-6.
    """
    variables = model.trainable_variables
    if not variables:
        raise GradientError("Expected a model that trains something. Received: no trainable variables.")
    found = _by_pattern(variables, norms) if isinstance(norms, Mapping) else _evenly(model, variables, norms)
    if min(found.norms) < SMALLEST_CLIP_NORM:
        raise GradientError(
            f"Expected a clip norm of at least {SMALLEST_CLIP_NORM} for every layer. Received: {min(found.norms):.3g}. "
            "Scale the loss and the clip norms up together."
        )
    return found


def _evenly(model: Any, variables: list[Any], total: float) -> PerLayer:
    holder: dict[int, int] = {}
    names: list[str] = []
    trained = {id(variable) for variable in variables}
    for layer in keras_private.flatten_layers(model):
        own = [v for v in keras_private.own_variables(layer) if id(v) in trained and id(v) not in holder]
        if own:
            holder |= {id(variable): len(names) for variable in own}
            names.append(layer.path or layer.name)
    norm = float(total) / math.sqrt(len(names))
    return PerLayer(tuple(names), (norm,) * len(names), tuple(holder[id(variable)] for variable in variables))


def _by_pattern(variables: list[Any], norms: Mapping[str, float]) -> PerLayer:
    names = sorted(norms)
    chosen = [_only(variable.path, names) for variable in variables]
    unused = sorted(set(names) - set(chosen))
    if unused:
        raise GradientError(
            f"Expected every pattern of per_layer to fit the path of a trainable variable. Received: {unused[0]!r}, "
            f"which fits none of {', '.join(sorted(v.path for v in variables)[:5])}, ... Correct it, or delete it."
        )
    return PerLayer(
        tuple(names), tuple(float(norms[name]) for name in names), tuple(names.index(name) for name in chosen)
    )


def _only(path: str, names: list[str]) -> str:
    fitting = [name for name in names if name != REST and fnmatch.fnmatchcase(path, name)]
    if len(fitting) == 1 or (not fitting and REST in names):
        return fitting[0] if fitting else REST
    raise GradientError(
        f"Expected one pattern of per_layer for every trainable variable. Received: {path}, which "
        + (f"{fitting[0]!r} and {fitting[1]!r} both fit. Narrow one of them." if fitting else "none fits. ")
        + ("" if fitting else f"Add a pattern for it, or {REST!r} for all the rest.")
    )
