"""Book-keeping ghost clipping (Bu et al. 2023, arXiv 2210.00038): one forward pass, one backward pass.

The backward pass goes to the outputs of the trainable layers only. Norms come from the recorded inputs and these output
gradients, and so does the clipped sum: the gradient that is clipped is the gradient that is used, dropout included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp.errors import UnsupportedLayerError
from tfdp.gradients import taps, uses
from tfdp.gradients.clipping import clip_factors
from tfdp.gradients.losses import per_unit_losses


def uses_by_variable(recording: taps.Recording, total: Any, units: int) -> dict[int, list[uses.Use]]:
    """Uses of every trainable variable, keyed by `id`, from the gradients of `total`."""
    gradients = recording.tape.gradient(total, [call.output for call in recording.calls])
    found: dict[int, list[uses.Use]] = {}
    for call, gradient in zip(recording.calls, gradients, strict=True):
        if gradient is None:  # an output that the loss does not depend on
            continue
        gradient = tf.convert_to_tensor(gradient)
        # What needs only the inputs would otherwise be computed, and held, during the forward pass.
        with tf.control_dependencies([gradient]):
            made = call.rule.uses(call.layer, call.inputs, call.options, gradient, units)
        for variable, use in made:
            if variable.trainable:
                found.setdefault(id(variable), []).append(use)
    return found


def clipped_sums(
    model: Any, x: Any, y: Any, sample_weight: Any, unit_weight: Any, clip_norm: float
) -> tuple[list[Any], Any, Any, Any]:
    """Sum over units of the clipped gradient. See `tfdp.gradients.clipped_gradients`.

    Args:
        x, y, sample_weight: nested tensors [units * records, ...]; static leading axis.
        unit_weight: [units], 1 or 0.

    Returns:
        (sums like model.trainable_variables, norms [units], losses [units], y_pred).
    """
    units = unit_weight.shape[0]
    variables = model.trainable_variables
    batch_size = tf.nest.flatten(x)[0].shape[0]
    taps.check_batch_axis(model, x, batch_size)
    with taps.record(model, batch_size) as recording:
        y_pred = model(x, training=True)
        losses = per_unit_losses(model, y, y_pred, sample_weight, units, batch_size // units)
        total = tf.reduce_sum(tf.where(unit_weight > 0, losses, 0.0))
    _refuse([v for v in variables if not v.value.trainable], "TensorFlow does not watch: made with trainable=False")
    _refuse(recording.read_outside(variables), "are read outside the call of the layer that holds them")
    found = uses_by_variable(recording, total, units)
    _refuse([v for v in variables if id(v) not in found], "take no part in the loss")
    merged = [uses.merged(found[id(variable)]) for variable in variables]
    squared_norms = tf.add_n([uses.squared_norm(each) for each in merged])
    factors, norms = clip_factors(squared_norms, clip_norm, unit_weight)
    sums = [
        tf.reshape(uses.weighted_sum(each, factors), variable.shape)
        for each, variable in zip(merged, variables, strict=True)
    ]
    return sums, norms, tf.where(unit_weight > 0, losses, 0.0), y_pred


def _refuse(variables: Sequence[Any], what: str) -> None:
    if variables:
        names = ", ".join(sorted(v.path for v in variables)[:5])
        raise UnsupportedLayerError(
            f"Expected every trainable variable to be used by its own layer on the way to the loss. Received: "
            f"{len(variables)} that {what}: {names}. Freeze what should not train (layer.trainable = False), or take "
            "method='vectorized'."
        )
