"""TensorFlow Privacy's vectorized path: per-unit gradients by a jacobian, clipped under `vectorized_map`.

Reference and fallback: it forms every per-unit gradient, so it is slow and large, but it needs no rule. The only file
that imports tensorflow_privacy.
"""

from __future__ import annotations

import sys
from typing import Any

import tensorflow as tf

from tfdp.errors import UnsupportedLayerError
from tfdp.gradients.clipping import clip_factors
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
    model: Any, x: Any, y: Any, sample_weight: Any, unit_weight: Any, clip_norm: float
) -> tuple[list[Any], Any, Any, Any]:
    """Same contract as `tfdp.gradients.bookkeeping.clipped_sums`, by per-unit gradients."""
    units = unit_weight.shape[0]
    variables = model.trainable_variables
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        for variable in variables:
            tape.watch(variable.value)
        y_pred = model(x, training=True)
        losses = per_unit_losses(model, y, y_pred, sample_weight, units)
    jacobians = tape.jacobian(losses, [v.value for v in variables], unconnected_gradients=tf.UnconnectedGradients.NONE)
    unused = [v.path for v, jacobian in zip(variables, jacobians, strict=True) if jacobian is None]
    if unused:
        raise UnsupportedLayerError(
            f"Expected every trainable variable to take part in the loss. Received: {', '.join(sorted(unused)[:5])}, which "
            "do not. Freeze what should not train (layer.trainable = False)."
        )
    jacobians = [tf.cast(tf.convert_to_tensor(jacobian), tf.float32) for jacobian in jacobians]
    squared = tf.add_n([tf.reduce_sum(j**2, list(range(1, len(j.shape)))) for j in jacobians])
    factors, norms = clip_factors(squared, clip_norm, unit_weight)
    clipped = tf.vectorized_map(lambda gradients: clip_gradients_vmap(gradients, clip_norm), jacobians)
    present = [tf.reshape(factors.values > 0, [-1] + [1] * (len(g.shape) - 1)) for g in clipped]
    sums = [tf.reduce_sum(tf.where(mask, g, 0.0), 0) for mask, g in zip(present, clipped, strict=True)]
    return sums, norms, tf.where(unit_weight > 0, losses, 0.0), y_pred


__all__ = ["clip_gradients_vmap", "clipped_sums", "make_vectorized_keras_optimizer_class"]
