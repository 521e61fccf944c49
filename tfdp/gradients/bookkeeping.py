"""Book-keeping ghost clipping (Bu et al. 2023, arXiv 2210.00038): one forward pass, one backward pass.

The backward pass goes to the outputs of the trainable layers only. Norms come from the recorded inputs and these output
gradients, and so does the clipped sum: the gradient that is clipped is the gradient that is used, dropout included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp.errors import UnsupportedLayerError
from tfdp.gradients import combining, hybrid, taps, uses, vectorized
from tfdp.gradients.clipping import ClipNorm
from tfdp.gradients.losses import per_unit_losses


def output_gradients(recording: taps.Recording, total: Any) -> tuple[list[Any], list[list[Any]]]:
    """Gradients of `total` with respect to the outputs of the tapped calls, and of the cuts."""
    outputs = [call.output for call in recording.calls], [cut.outputs for cut in recording.cuts]
    return recording.tape.gradient(total, outputs)


def uses_by_variable(
    recording: taps.Recording, gradients: tuple[list[Any], list[list[Any]]], units: int
) -> dict[int, list[uses.Use]]:
    """Uses of every trainable variable, keyed by `id`, from the gradients of the outputs."""
    of_calls, of_cuts = gradients
    found: dict[int, list[uses.Use]] = {}
    formed = {id(variable) for cut in recording.cuts for variable in cut.variables}
    for call, gradient in zip(recording.calls, of_calls, strict=True):
        if gradient is None:  # an output that the loss does not depend on
            continue
        gradient = tf.convert_to_tensor(gradient)
        # What needs only the inputs would otherwise be computed, and held, during the forward pass.
        with tf.control_dependencies([gradient]):
            made = call.rule.uses(call.layer, call.inputs, call.options, gradient, units)
        for variable, use in made:
            if variable.trainable and id(variable) not in formed:
                found.setdefault(id(variable), []).append(use)
    for cut, its_gradients in zip(recording.cuts, of_cuts, strict=True):
        for variable, per_unit in hybrid.per_unit_gradients(cut, its_gradients, units):
            use = uses.Direct(per_unit, tuple(variable.shape))
            found.setdefault(id(variable), []).append(use)
    return found


def clipped_sums(
    model: Any,
    x: Any,
    y: Any,
    sample_weight: Any,
    unit_weight: Any,
    clip_norm: ClipNorm,
    record_weight: Any = None,
    cuts: taps.Cuts | None = None,
) -> tuple[list[Any], Any, Any, Any]:
    """Sum over units of the clipped gradient. See `tfdp.gradients.clipped_gradients`.

    Args:
        x, y, sample_weight: nested tensors [units * records, ...]; static leading axis.
        unit_weight: [units], 1 or 0.
        record_weight: [units, records], or None; see `per_unit_losses`.
        cuts: from `hybrid.find_cuts`: where per-unit gradients are formed instead.

    Returns:
        (sums like model.trainable_variables, norms [units], losses [units], y_pred).
    """
    units = unit_weight.shape[0]
    variables = model.trainable_variables
    batch_size = tf.nest.flatten(x)[0].shape[0]
    if cuts is None:  # found with the same check
        taps.check_batch_axis(model, x, batch_size)
    with taps.record(model, batch_size, cuts) as recording:
        y_pred = model(x, training=True)
        losses = per_unit_losses(model, y, y_pred, sample_weight, units, batch_size // units, record_weight)
        total = tf.reduce_sum(tf.where(unit_weight > 0, losses, 0.0))
    _refuse([v for v in variables if not v.value.trainable], "TensorFlow does not watch: made with trainable=False")
    _refuse(recording.read_outside(variables), "are read outside the call of the layer that holds them")
    found = uses_by_variable(recording, output_gradients(recording, total), units)
    _refuse([v for v in variables if id(v) not in found], "take no part in the loss")
    merged = [combining.merged(found[id(variable)]) for variable in variables]
    weighted, norms = combining.clipped(merged, clip_norm, unit_weight)
    sums = [tf.reshape(total, variable.shape) for total, variable in zip(weighted, variables, strict=True)]
    return sums, norms, tf.where(unit_weight > 0, losses, 0.0), y_pred


def hybrid_clipped_sums(
    model: Any, x: Any, y: Any, sample_weight: Any, unit_weight: Any, clip_norm: ClipNorm, record_weight: Any = None
) -> tuple[list[Any], Any, Any, Any]:
    """The same, by the vectorized path for the variables of layers without a rule."""
    cuts = hybrid.find_cuts(model, x, tf.nest.flatten(x)[0].shape[0])
    sums, norms, losses, y_pred = clipped_sums(model, x, y, sample_weight, unit_weight, clip_norm, record_weight, cuts)
    if cuts:
        sums, norms = tf.cond(
            tf.reduce_all(tf.math.is_finite(norms)),
            lambda: (sums, norms),
            lambda: vectorized.one_at_a_time(model, (x, y, sample_weight, record_weight), unit_weight, clip_norm),
        )
    return sums, norms, losses, y_pred


def _refuse(variables: Sequence[Any], what: str) -> None:
    if variables:
        names = ", ".join(sorted(v.path for v in variables)[:5])
        raise UnsupportedLayerError(
            f"Expected every trainable variable to be used by its own layer on the way to the loss. Received: "
            f"{len(variables)} that {what}: {names}. Freeze what should not train (layer.trainable = False), pass "
            "hybrid=True, or take method='vectorized'."
        )
