"""The loss of each unit, as Keras would compute it on that unit alone.

The model's own compiled loss is evaluated on one unit at a time (its reduction, token weights and masks included), mapped
over the units. Nothing of Keras's reductions is written again here, and a loss that only makes sense on a whole batch
cannot slip through: it never sees one.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdp import keras_private
from tfdp.errors import LossNotPerUnitError


def per_unit_losses(model: Any, y: Any, y_pred: Any, sample_weight: Any, units: int) -> Any:
    """Losses [units] float32, differentiable with respect to `y_pred`.

    Args:
        model: compiled model.
        y, sample_weight: nested tensors [units * records, ...], or None.
        y_pred: output of the model, [units * records, ...].
        units: number of privacy units.

    Raises:
        LossNotPerUnitError: the loss is not a scalar on one unit, or cannot be taken on one unit.
    """
    if keras_private.computes_loss_itself(model):
        raise LossNotPerUnitError(
            f"Expected a model that uses Keras's own train_step and compute_loss. Received: {type(model).__name__}, which "
            "overrides one of them, so its loss per unit is not known. Compile it with a loss instead."
        )
    if len(tf.nest.flatten(y_pred)) != 1:
        raise LossNotPerUnitError(
            f"Expected a model with one output. Received: {len(tf.nest.flatten(y_pred))} outputs. Wrap the model so that "
            "it returns the one output that the loss is taken of."
        )
    if y is None:
        raise LossNotPerUnitError(
            "Expected records with targets (x, y) or (x, y, sample_weight). Received: records with x alone. Add y."
        )
    parts = {"y": y, "y_pred": y_pred, "sample_weight": sample_weight, "mask": keras_private.keras_mask(y_pred)}
    parts = {name: part for name, part in parts.items() if part is not None}
    regularisation = tf.add_n(list(model.losses)) if model.losses else None

    def split(tensor: Any) -> Any:
        if tensor.shape.rank == 0 or tensor.shape[0] is None or tensor.shape[0] % units:
            raise LossNotPerUnitError(
                f"Expected targets, weights and outputs to keep one row per record ({units} units). Received: shape "
                f"{tensor.shape}. Do not flatten or reduce over the batch inside the model."
            )
        return tf.reshape(tensor, [units, tensor.shape[0] // units, *tensor.shape[1:]])

    records = y_pred.shape[0]
    for leaf in tf.nest.flatten(parts):
        if leaf.shape.rank == 0 or leaf.shape[0] != records:
            raise LossNotPerUnitError(
                f"Expected one row per record in targets, weights and outputs. Received: {leaf.shape} beside an output of "
                f"{y_pred.shape}. Do not flatten or reduce over the batch inside the model."
            )

    def one_unit(unit: dict[str, Any]) -> Any:
        if "mask" in unit:
            keras_private.set_keras_mask(unit["y_pred"], unit["mask"])
        loss = model.compute_loss(y=unit["y"], y_pred=unit["y_pred"], sample_weight=unit.get("sample_weight"))
        if loss.shape.rank != 0:
            raise LossNotPerUnitError(
                f"Expected a loss that is one number for one unit. Received: shape {loss.shape}. Use a reduction, such as "
                "reduction='sum_over_batch_size'."
            )
        return tf.cast(loss, tf.float32)

    try:
        losses = tf.vectorized_map(one_unit, tf.nest.map_structure(split, parts), fallback_to_while_loop=False)
    except LossNotPerUnitError:
        raise
    except ValueError as error:
        raise LossNotPerUnitError(
            f"Expected a loss that can be taken on one unit at a time. Received: {model.loss!r}, which fails there: "
            f"{error}. Use a loss made of Keras or TensorFlow operations on (y_true, y_pred)."
        ) from error
    # Weight regularisation is the same for every unit and not private: it joins after the noise.
    return losses if regularisation is None else losses - tf.cast(regularisation, tf.float32)
