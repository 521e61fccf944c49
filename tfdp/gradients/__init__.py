"""Per-unit clipped gradients.

| formal guarantee    | one unit moves the returned sums by at most `clip_norm` in L2, all variables together |
|---------------------|---------------------------------------------------------------------------------------|
| clipped per layer   | by at most sqrt(sum of C_l^2), and in each layer by at most its C_l                   |
| non-finite gradient | the unit contributes exactly zero; so does one beyond float32 squares (clipping.py)   |
| padding (weight 0)  | contributes exactly zero, whatever it holds                                           |
| shared variables    | exact: uses are merged per variable before the norm                                   |
| precision           | norms, factors and sums in float32 under every dtype policy                           |
"""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdp.errors import GradientError
from tfdp.gradients import bookkeeping, vectorized
from tfdp.gradients.clipping import SMALLEST_CLIP_NORM, PerLayer
from tfdp.gradients.per_layer import per_layer
from tfdp.gradients.precision import exact_products

METHODS = {"bookkeeping": bookkeeping.clipped_sums, "vectorized": vectorized.clipped_sums}


def sums_function(method: str, hybrid: bool = False) -> Callable[..., Any]:
    """What computes the clipped sums. See `clipped_gradients` for the arguments.

    Raises:
        GradientError: no such method, or one that `hybrid` adds nothing to.
    """
    if method not in METHODS:
        raise GradientError(f"Expected method to be one of {sorted(METHODS)}. Received: method={method!r}.")
    if not isinstance(hybrid, bool):
        raise GradientError(f"Expected hybrid to be True or False. Received: hybrid={hybrid!r}.")
    if hybrid and method != "bookkeeping":
        raise GradientError(
            f"Expected hybrid=True with method='bookkeeping'. Received: method={method!r}, which needs no gradient "
            "rules at all. Leave one of the two."
        )
    return bookkeeping.hybrid_clipped_sums if hybrid else METHODS[method]


def clipped_gradients(
    model: Any,
    data: Any,
    clip_norm: float | PerLayer,
    *,
    unit_weight: Any = None,
    records_per_unit: int = 1,
    record_weight: Any = None,
    method: str = "bookkeeping",
    hybrid: bool = False,
) -> tuple[list[Any], Any, Any]:
    """Clipped per-unit gradients of the compiled loss, summed over the units of one microbatch.

    Args:
        model: built and compiled Keras model on the TensorFlow backend.
        data: (x, y) or (x, y, sample_weight), nested tensors with leading axis units * records_per_unit.
        clip_norm: C, the L2 bound on one unit's gradient, at least 1e-6; or one for each layer, from `per_layer`.
        unit_weight: [units], 1 for a unit and 0 for padding; None for all ones.
        records_per_unit: consecutive records that belong to one unit; its loss is the loss of them together.
        record_weight: [units, records_per_unit], not negative: the loss of a unit is then the mean of the losses of
            its records with these weights; 0 for an empty slot.
        method: "bookkeeping", or "vectorized" for TensorFlow Privacy's path.
        hybrid: with book-keeping, form the per-unit gradients of variables without a rule instead of refusing them.

    Returns:
        (sums, norms, losses): sums like `model.trainable_variables` (float32), norms [units] before clipping, losses
        [units]. Norms and losses of padding are 0.

    Raises:
        UnsupportedLayerError: a trainable layer without a rule, or a variable used past its layer.
        LossNotPerUnitError: the loss is not one number per unit.
        GradientError: wrong arguments.
    """
    import keras

    clipped_sums = sums_function(method, hybrid)
    if isinstance(clip_norm, PerLayer):
        if len(clip_norm.group_of) != len(model.trainable_variables):
            raise GradientError(
                f"Expected clip norms for {len(model.trainable_variables)} trainable variables. Received: for "
                f"{len(clip_norm.group_of)}. Make them anew with per_layer(model, ...)."
            )
    elif isinstance(clip_norm, bool) or not (isinstance(clip_norm, numbers.Real) and 0 < clip_norm < float("inf")):
        raise GradientError(f"Expected a finite clip_norm > 0. Received: clip_norm={clip_norm!r}.")
    elif clip_norm < SMALLEST_CLIP_NORM:
        raise GradientError(
            f"Expected clip_norm >= {SMALLEST_CLIP_NORM}, below which float32 cannot hold norms to it. Received: "
            f"clip_norm={clip_norm!r}. Scale the loss and clip_norm up together."
        )
    if isinstance(records_per_unit, bool) or not isinstance(records_per_unit, int) or records_per_unit < 1:
        raise GradientError(f"Expected records_per_unit >= 1. Received: records_per_unit={records_per_unit!r}.")
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    x, y, sample_weight = (
        part if part is None else tf.nest.map_structure(tf.convert_to_tensor, part) for part in (x, y, sample_weight)
    )
    leading = {leaf.shape[0] if leaf.shape.rank else None for leaf in tf.nest.flatten(x)}
    records = leading.pop() if len(leading) == 1 else None
    if records is None or records == 0 or records % records_per_unit:
        raise GradientError(
            f"Expected x with one known number of records, a multiple of records_per_unit={records_per_unit}, as the "
            f"leading axis. Received: shapes {[str(leaf.shape) for leaf in tf.nest.flatten(x)]}."
        )
    units = records // records_per_unit
    weight = tf.ones([units]) if unit_weight is None else tf.convert_to_tensor(unit_weight, tf.float32)
    if weight.shape != (units,):
        raise GradientError(f"Expected unit_weight of shape ({units},). Received: shape {weight.shape}.")
    if record_weight is not None:
        record_weight = tf.convert_to_tensor(record_weight, tf.float32)
        if record_weight.shape != (units, records_per_unit):
            raise GradientError(
                f"Expected record_weight of shape ({units}, {records_per_unit}). Received: shape {record_weight.shape}."
            )
    bound = clip_norm if isinstance(clip_norm, PerLayer) else float(clip_norm)
    sums, norms, losses, _ = clipped_sums(model, x, y, sample_weight, weight, bound, record_weight)
    return sums, norms, losses


__all__ = ["METHODS", "PerLayer", "clipped_gradients", "exact_products", "per_layer", "sums_function"]
