"""What has to hold of a model before its units can be kept apart.

| id    | meaning                                                                         |
|-------|---------------------------------------------------------------------------------|
| PS043 | a layer mixes units: one unit's data would reach another's gradient            |
| PS044 | a trainable layer has no gradient rule                                          |
| PS045 | a loss joins that is not taken per unit (activity regularisation, `add_loss`)   |
| PS046 | the model is not ready: not built, nothing to train, another backend, float16   |
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tfdp import keras_private
from tfdp.findings import Finding, Severity
from tfdp.gradients import rules


def check_model(model: Any, *, method: str = "bookkeeping") -> list[Finding]:
    """Findings about a model, each an error that blocks private training. Changes nothing.

    Args:
        model: a Keras model, built.
        method: "vectorized" needs no gradient rules.
    """
    import keras

    if keras.backend.backend() != "tensorflow":
        return [
            _error(
                "PS046",
                "keras.backend",
                f"Expected the TensorFlow backend. Received: {keras.backend.backend()}.",
                "Set KERAS_BACKEND=tensorflow before Keras is imported.",
            )
        ]
    if not isinstance(model, keras.Model):
        return [
            _error(
                "PS046", "model", f"Expected a Keras model. Received: {type(model).__name__}.", "Pass a keras.Model."
            )
        ]
    if not model.built:
        return [
            _error(
                "PS046",
                model.name,
                "Expected a built model. Received: one without weights.",
                "Call it once on a batch, or give it an Input.",
            )
        ]
    found = []
    if not model.trainable_variables:
        found.append(
            _error(
                "PS046",
                model.name,
                "Expected something to train. Received: no trainable variables.",
                "Set layer.trainable = True on what should train.",
            )
        )
    trainable = {id(variable) for variable in model.trainable_variables}
    for layer in keras_private.flatten_layers(model):
        found += _check_layer(layer, trainable, method)
    return found


def _check_layer(layer: Any, trainable: set[int], method: str) -> list[Finding]:
    import keras

    found = []
    name = f"{layer.name} ({type(layer).__name__})"
    if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable:
        found.append(
            _error(
                "PS043",
                name,
                "Expected layers that treat every unit alone. Received: batch normalisation, which normalises a unit by "
                "the other units of its batch.",
                "Use GroupNormalization or LayerNormalization instead, or freeze it (layer.trainable = False).",
            )
        )
    elif getattr(layer, "stateful", False) and isinstance(layer, keras.layers.RNN):
        found.append(
            _error(
                "PS043",
                name,
                "Expected layers without memory between batches. Received: a stateful recurrent layer.",
                "Use stateful=False.",
            )
        )
    elif method == "bookkeeping" and any(id(v) in trainable for v in keras_private.own_variables(layer)):
        reason = rules.without_rule(layer)
        if reason is not None:
            found.append(_error("PS044", name, reason, ""))
    if getattr(layer, "activity_regularizer", None) is not None:
        found.append(
            _error(
                "PS045",
                name,
                "Expected a loss taken per unit. Received: an activity regulariser, which is taken over the batch.",
                "Remove activity_regularizer; weight regularisers are fine.",
            )
        )
    if getattr(layer, "compute_dtype", None) == "float16":
        found.append(
            _error(
                "PS046",
                name,
                "Expected float32 or bfloat16 computation. Received: float16, whose loss scaling is not private here.",
                "Use the dtype policy mixed_bfloat16 or float32.",
            )
        )
    return found


def mixes_units(model: Any, record: Any) -> bool:
    """Whether changing one row of a made-up batch changes the output of another row (inference mode).

    Args:
        model: built model.
        record: nested `tf.TensorSpec` of one record.
    """
    import tensorflow as tf

    generator = np.random.default_rng(0)

    def row(spec: Any) -> Any:
        if spec.dtype.is_floating:
            return generator.normal(size=spec.shape).astype(spec.dtype.as_numpy_dtype)
        return generator.integers(0, 2, spec.shape).astype(spec.dtype.as_numpy_dtype)

    first, second, third = (tf.nest.map_structure(row, record) for _ in range(3))

    def output(*rows: Any) -> Any:
        batch = tf.nest.map_structure(lambda *leaves: tf.constant(np.stack(leaves)), *rows)
        return [np.asarray(tf.cast(leaf[0], tf.float32)) for leaf in tf.nest.flatten(model(batch, training=False))]

    pairs = zip(output(first, second), output(first, third), strict=True)
    tolerance = 1e-4 if all(layer.compute_dtype == "float32" for layer in model.layers) else 5e-2
    return any(not np.allclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True) for one, other in pairs)


def _error(identifier: str, where: str, message: str, fix: str) -> Finding:
    return Finding(id=identifier, severity=Severity.ERROR, where=where, message=message, fix=fix)
