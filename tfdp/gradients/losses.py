"""The loss of each unit, as Keras would compute it on that unit alone.

The model's own compiled loss is evaluated on one unit at a time (its reduction, token weights and masks included),
mapped over the units. Nothing of Keras's reductions is written again here, and a loss that only makes sense on a whole
batch cannot slip through: it never sees one. Weight regularisation is the same for every unit and not private: it is no
part of this loss and joins after the noise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdp import keras_private
from tfdp.errors import LossNotPerUnitError


def per_unit_losses(
    model: Any,
    y: Any,
    y_pred: Any,
    sample_weight: Any,
    units: int,
    records_per_unit: int = 1,
    record_weight: Any = None,
) -> Any:
    """Losses [units] float32, differentiable with respect to `y_pred`.

    Args:
        model: compiled model, just called.
        y, sample_weight: nested tensors [units * records_per_unit, ...], or None.
        y_pred: output of the model, [units * records_per_unit, ...].
        record_weight: [units, records_per_unit], not negative, 0 for an empty slot: the loss of a unit is then the mean
            of the losses of its records with these weights, 0 where all are 0. None: Keras's loss of them together.

    Raises:
        LossNotPerUnitError: the loss is not a scalar on one unit, or cannot be taken on one unit.
    """
    compiled_loss = _checked_loss(model)
    outputs = tf.nest.flatten(y_pred)
    if len(outputs) != 1:
        raise LossNotPerUnitError(
            f"Expected a model with one output. Received: {len(outputs)} outputs. Wrap the model so that it returns "
            "the one output that the loss is taken of."
        )
    if y is None:
        raise LossNotPerUnitError(
            "Expected records with targets (x, y) or (x, y, sample_weight). Received: records with x alone. Add y."
        )
    batch_size, mask = units * records_per_unit, keras_private.keras_mask(outputs[0])
    parts = {"y": y, "y_pred": y_pred, "sample_weight": sample_weight, "mask": mask}
    parts = {name: part for name, part in parts.items() if part is not None}
    for name, part in parts.items():
        for leaf in tf.nest.flatten(part):
            if leaf.shape.rank == 0 or leaf.shape[0] != batch_size:
                raise LossNotPerUnitError(
                    f"Expected one row per record ({batch_size}) in targets, weights and outputs. Received: {name} of "
                    f"shape {leaf.shape}. Do not flatten or reduce over the batch inside the model or the records."
                )

    def one_unit(unit: dict[str, Any]) -> Any:
        if "mask" in unit:
            keras_private.set_keras_mask(tf.nest.flatten(unit["y_pred"])[0], unit["mask"])
        with keras_private.losses_of_one_device():
            return tf.cast(compiled_loss(unit["y"], unit["y_pred"], unit.get("sample_weight")), tf.float32)

    together = records_per_unit
    if record_weight is not None:
        together = 1
        if "sample_weight" in parts:  # a mean over token weights that are all 0 has no gradient
            present = tf.reshape(record_weight > 0, [-1])
            parts["sample_weight"] = tf.nest.map_structure(
                lambda leaf: tf.where(
                    tf.reshape(present, [-1] + [1] * (leaf.shape.rank - 1)), leaf, tf.ones_like(leaf)
                ),
                sample_weight,
            )
    by_unit = tf.nest.map_structure(lambda leaf: tf.reshape(leaf, [-1, together, *leaf.shape[1:]]), parts)
    try:
        losses = _mapped(one_unit, by_unit)
    except ValueError as error:
        raise LossNotPerUnitError(
            f"Expected a loss that can be taken on one unit at a time. Received: {model.loss!r}, which fails there: "
            f"{error}. Use a loss made of Keras or TensorFlow operations on (y_true, y_pred)."
        ) from error
    if losses.shape.rank != 1:
        raise LossNotPerUnitError(
            f"Expected a loss that is one number for one unit. Received: shape {losses.shape[1:]}. Use a reduction, "
            "such as reduction='sum_over_batch_size'."
        )
    if record_weight is None:
        return losses
    losses = tf.where(record_weight > 0, record_weight * tf.reshape(losses, [units, records_per_unit]), 0.0)
    return tf.math.divide_no_nan(tf.reduce_sum(losses, 1), tf.reduce_sum(record_weight, 1))


def _mapped(one_unit: Callable[[dict[str, Any]], Any], by_unit: dict[str, Any]) -> Any:
    """`one_unit` of every unit, differentiable with respect to "y_pred".

    Under XLA the map is a function of its own. The gradient of one is another that takes shapes as arguments, for which
    XLA holds everything that went in to be constant: it would compile anew for every batch. So the slopes are mapped
    along with the losses there.
    """
    if not keras_private.is_compiled_by_xla():
        return tf.vectorized_map(one_unit, by_unit, fallback_to_while_loop=False)

    def with_slopes(unit: dict[str, Any]) -> tuple[Any, Any]:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(unit["y_pred"])
            loss = one_unit(unit)
        return loss, tape.gradient(loss, unit["y_pred"], unconnected_gradients=tf.UnconnectedGradients.ZERO)

    rest = {name: part for name, part in by_unit.items() if name != "y_pred"}
    (y_pred,) = tf.nest.flatten(by_unit["y_pred"])

    @tf.custom_gradient
    def losses_of(y_pred: Any) -> Any:
        mapped = {**rest, "y_pred": tf.nest.pack_sequence_as(by_unit["y_pred"], [y_pred])}
        losses, slopes = tf.vectorized_map(with_slopes, mapped, fallback_to_while_loop=False)
        (slopes,) = tf.nest.flatten(slopes)

        def gradient(upstream: Any) -> Any:
            factor = tf.cast(tf.reshape(upstream, [-1] + [1] * (slopes.shape.rank - 1)), slopes.dtype)
            return tf.where(factor == 0, tf.zeros_like(slopes), factor * slopes)  # 0 * inf would be NaN

        return losses, gradient

    return losses_of(y_pred)


def _checked_loss(model: Any) -> Callable[..., Any]:
    """The compiled loss, which is all that is minimised."""
    if keras_private.computes_loss_itself(model):
        raise LossNotPerUnitError(
            f"Expected a model that uses Keras's own train_step and compute_loss. Received: {type(model).__name__}, "
            "which overrides one of them, so its loss per unit is not known. Compile it with a loss instead."
        )
    compiled_loss = keras_private.compiled_loss(model)
    if compiled_loss is None:
        raise LossNotPerUnitError(
            "Expected a model compiled with a loss. Received: one without. Call model.compile(loss=...)."
        )
    adding = [layer.name for layer in keras_private.flatten_layers(model) if keras_private.own_losses(layer)]
    if adding:
        raise LossNotPerUnitError(
            f"Expected no loss beside the compiled one. Received: add_loss or an activity regulariser in "
            f"{', '.join(adding)}, which is taken over the batch. Move it into the compiled loss."
        )
    return compiled_loss
