"""TensorFlow Privacy's vectorized path: per-unit gradients by a jacobian, clipped under `vectorized_map`.

Reference and fallback: it forms every per-unit gradient, so it is slow and large, but it needs no rule. The jacobian
takes the whole batch through a backward pass for each unit, in which a NaN of one unit meets the zeros of the others
and spoils them all; where that happens, the units are taken one at a time instead.

The only file that imports tensorflow_privacy.
"""

from __future__ import annotations

import sys
from typing import Any

import tensorflow as tf

from tfdp.errors import UnsupportedLayerError
from tfdp.gradients.clipping import ClipNorm, PerLayer, factors_of_variables, scaled
from tfdp.gradients.losses import per_unit_losses


def _tensorflow_privacy() -> Any:
    # The package root imports tensorflow-estimator, which no longer exists; this attribute makes it skip that. It is
    # taken off again, since other packages ask for it too.
    marked = hasattr(sys, "skip_tf_privacy_import")
    sys.skip_tf_privacy_import = True  # type: ignore[attr-defined]
    try:
        from tensorflow_privacy.privacy.optimizers import dp_optimizer_keras_vectorized as module
    finally:
        if not marked:
            del sys.skip_tf_privacy_import  # type: ignore[attr-defined]
    return module


_module = _tensorflow_privacy()
clip_gradients_vmap = _module.clip_gradients_vmap
make_vectorized_keras_optimizer_class = _module.make_vectorized_keras_optimizer_class


def clipped_sums(
    model: Any, x: Any, y: Any, sample_weight: Any, unit_weight: Any, clip_norm: ClipNorm, record_weight: Any = None
) -> tuple[list[Any], Any, Any, Any]:
    """Same contract as `tfdp.gradients.bookkeeping.clipped_sums`, by per-unit gradients."""
    data = (x, y, sample_weight, record_weight)
    tape, losses, y_pred = _forward(model, data, unit_weight.shape[0])
    variables = [v.value for v in model.trainable_variables]
    jacobians = tape.jacobian(losses, variables, unconnected_gradients=tf.UnconnectedGradients.NONE)
    unused = [v.path for v, j in zip(model.trainable_variables, jacobians, strict=True) if j is None]
    if unused:
        raise UnsupportedLayerError(
            f"Expected every trainable variable to take part in the loss. Received: {', '.join(sorted(unused)[:5])}, "
            "which do not. Freeze what should not train (layer.trainable = False)."
        )
    jacobians = [_float32(jacobian) for jacobian in jacobians]
    squared = [tf.reduce_sum(j**2, list(range(1, len(j.shape)))) for j in jacobians]

    def together() -> tuple[list[Any], Any]:
        factors, norms = factors_of_variables(squared, clip_norm, unit_weight)
        clipped = tf.vectorized_map(lambda gradients: _clipped(gradients, clip_norm), jacobians)
        present = [
            tf.reshape(its.values > 0, [-1] + [1] * (len(g.shape) - 1)) for its, g in zip(factors, clipped, strict=True)
        ]
        return [tf.reduce_sum(tf.where(mask, g, 0.0), 0) for mask, g in zip(present, clipped, strict=True)], norms

    def apart() -> tuple[list[Any], Any]:
        return one_at_a_time(model, data, unit_weight, clip_norm)

    sums, norms = tf.cond(tf.reduce_all(tf.math.is_finite(tf.add_n(squared))), together, apart)
    return sums, norms, tf.where(unit_weight > 0, losses, 0.0), y_pred


def _clipped(gradients: list[Any], clip_norm: ClipNorm) -> list[Any]:
    """The gradient of one unit, clipped by TensorFlow Privacy."""
    if not isinstance(clip_norm, PerLayer):
        return clip_gradients_vmap(gradients, clip_norm)
    clipped = list(gradients)
    for group, norm in enumerate(clip_norm.norms):
        members = clip_norm.members(group)
        for place, its in zip(members, clip_gradients_vmap([gradients[i] for i in members], norm), strict=True):
            clipped[place] = its
    return clipped


def _float32(gradient: Any) -> Any:
    return tf.cast(tf.convert_to_tensor(gradient), tf.float32)


def _forward(model: Any, data: Any, units: int) -> tuple[tf.GradientTape, Any, Any]:
    """(tape that watches the variables, losses [units], y_pred)."""
    x, y, sample_weight, record_weight = data
    records = tf.nest.flatten(x)[0].shape[0] // units
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        for variable in model.trainable_variables:
            tape.watch(variable.value)
        y_pred = model(x, training=True)
        losses = per_unit_losses(model, y, y_pred, sample_weight, units, records, record_weight)
    return tape, losses, y_pred


def one_at_a_time(model: Any, data: Any, unit_weight: Any, clip_norm: ClipNorm) -> tuple[list[Any], Any]:
    """(sums, norms [units]), from one forward and backward pass per unit."""
    units = unit_weight.shape[0]
    variables = [v.value for v in model.trainable_variables]

    def body(index: Any, sums: list[Any], norms: Any) -> tuple[Any, list[Any], Any]:
        def unit(leaf: Any) -> Any:
            return None if leaf is None else tf.reshape(leaf, [units, -1, *leaf.shape[1:]])[index]

        tape, losses, _ = _forward(model, tf.nest.map_structure(unit, data), 1)
        gradients = [_float32(gradient)[None] for gradient in tape.gradient(losses, variables)]
        squared = [tf.reduce_sum(gradient**2)[None] for gradient in gradients]
        factors, norm = factors_of_variables(squared, clip_norm, unit_weight[index][None])
        sums = [total + scaled(gradient, its)[0] for total, gradient, its in zip(sums, gradients, factors, strict=True)]
        return index + 1, sums, tf.tensor_scatter_nd_update(norms, [[index]], norm)

    zeros = [tf.zeros(variable.shape) for variable in variables]
    loop = (tf.constant(0), zeros, tf.zeros([units]))
    _, sums, norms = tf.while_loop(lambda index, *_: index < units, body, loop, parallel_iterations=1)
    return sums, norms


__all__ = ["clip_gradients_vmap", "clipped_sums", "make_vectorized_keras_optimizer_class", "one_at_a_time"]
