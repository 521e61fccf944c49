"""What has to hold of a model before its units can be kept apart.

| id    | meaning                                                                         |
|-------|---------------------------------------------------------------------------------|
| PS043 | a layer mixes units: one unit's data would reach another's gradient            |
| PS044 | a trainable layer has no gradient rule, its calls cannot be recorded, or        |
|       | `tfdp.verify` finds its rule wrong                                              |
| PS045 | a loss joins that is not taken per unit (activity regularisation, `add_loss`)   |
| PS046 | the model is not ready: not built, nothing (or not what it seems) to train,     |
|       | another backend, float16                                                        |
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from tfdp import keras_private
from tfdp.findings import Finding, Severity
from tfdp.gradients import rules

# Made-up rows of `cross_unit_fault`: a shuffle that leaves every one of them in place is too rare to meet.
ROWS = 5


def check_model(model: Any, *, method: str = "bookkeeping", hybrid: bool = False) -> list[Finding]:
    """Findings about a model, each an error that blocks private training. Changes nothing.

    Args:
        model: a Keras model, built.
        method: "vectorized" needs no gradient rules.
        hybrid: a layer without a rule is no error; the gradients of its variables are formed per unit.
    """
    import keras

    backend = check_backend()
    if backend:
        return backend
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
    layers = keras_private.flatten_layers(model)
    found += _check_precision(model.name, layers) + _check_adapters(model, layers) + _check_shared(layers)
    for layer in layers:
        found += _check_layer(layer, trainable, method, hybrid)
    return found + _check_added_losses(model, layers)


def check_backend() -> list[Finding]:
    """Whether Keras runs on TensorFlow. On another backend it fails in a `fit` before any callback is asked."""
    import keras

    backend = keras.backend.backend()
    if backend == "tensorflow":
        return []
    message = f"Expected the TensorFlow backend. Received: {backend}."
    return [_error("PS046", "keras.backend", message, "Set KERAS_BACKEND=tensorflow before Keras is imported.")]


def _check_precision(name: str, layers: list[Any]) -> list[Finding]:
    half = [layer.name for layer in layers if getattr(layer, "compute_dtype", None) == "float16"]
    if not half:
        return []
    message = (
        f"Expected float32 or bfloat16 computation. Received: float16 in {len(half)} of {len(layers)} layers (such as "
        f"'{half[-1]}'), whose small range needs loss scaling. It skips a step, and changes its scale, where a "
        "gradient of the batch overflows: decisions on private data that no noise covers."
    )
    return [_error("PS046", name, message, "Use the dtype policy mixed_bfloat16 or float32.")]


def _check_adapters(model: Any, layers: list[Any]) -> list[Finding]:
    """LoRA that is on and does not train, or trains in what was frozen: what trains is not what was meant to."""
    adapters = [v for layer in layers if getattr(layer, "lora_enabled", False) for v in layer.variables]
    adapters = [v for v in adapters if "lora_" in v.path.split("/")[-1]]
    if not adapters:
        return []
    if not any(v.trainable for v in adapters):
        message = f"Expected LoRA weights that train. Received: {len(adapters)} LoRA weights, all of them frozen."
        fix = "Set trainable = True on the layers that hold them, or build the model without enable_lora."
        return [_error("PS046", model.name, message, fix)]
    backbone = getattr(model, "backbone", None)
    if backbone is None or backbone.trainable:
        return []
    # Layers that enable_lora has frozen do not hand the same word on to the adapters below them.
    inside = {id(v) for v in backbone.variables}
    training = [v for v in adapters if v.trainable and id(v) in inside]
    if not training:
        return []
    message = (
        f"Expected LoRA weights that train in a backbone that does. Received: '{backbone.name}', which was frozen "
        f"after enable_lora, and {len(training)} LoRA weights in it that would train all the same."
    )
    fix = (
        "To train them, leave backbone.trainable as enable_lora leaves it (build the model anew); to freeze them, set "
        "trainable = False on the layers that hold them."
    )
    return [_error("PS046", backbone.name, message, fix)]


def _check_shared(layers: list[Any]) -> list[Finding]:
    """A weight that one layer freezes and another trains: which of them spoke last decides, and neither shows it."""
    holders: dict[int, tuple[Any, list[Any]]] = {}
    for layer in layers:
        for variable in keras_private.own_variables(layer):
            holders.setdefault(id(variable), (variable, []))[1].append(layer)
    found = []
    for variable, sharing in holders.values():
        frozen = [layer.name for layer in sharing if not layer.trainable]
        trained = [layer.name for layer in sharing if layer.trainable]
        if frozen and trained and not keras_private.is_random_state(variable):
            message = (
                f"Expected a weight that is trained or frozen in all layers that share it. Received: {variable.path}, "
                f"which layer '{frozen[0]}' freezes and layer '{trained[0]}' trains."
            )
            fix = f"Set trainable to the same on both, or give '{trained[0]}' a weight of its own."
            found.append(_error("PS046", variable.path, message, fix))
    return found


def _check_added_losses(model: Any, layers: list[Any]) -> list[Finding]:
    """`add_loss`: by tracing a call where some layer's code speaks of it, or else as the last call left it."""
    told = [each for each in layers if each.activity_regularizer is None and rules.mixes_units(each) is None]
    if keras_private.input_specs(model) is None:
        adding = [layer for layer in told if keras_private.own_losses(layer)]
    elif any(map(keras_private.mentions_add_loss, told)):
        adding = keras_private.adding_losses(model, told)
    else:
        adding = []
    message = "Expected a loss taken per unit. Received: a layer that calls add_loss, which is taken over the batch."
    fix = "Move it into the compiled loss."
    return [_error("PS045", f"{layer.name} ({type(layer).__name__})", message, fix) for layer in adding]


def _check_layer(layer: Any, trainable: set[int], method: str, hybrid: bool) -> list[Finding]:
    import keras

    found = []
    name = f"{layer.name} ({type(layer).__name__})"
    if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable:
        found.append(
            _error(
                "PS043",
                name,
                "Expected layers that treat every unit alone. Received: batch normalisation, which normalises a unit "
                "by the other units of its batch.",
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
    elif any(id(v) in trainable for v in keras_private.own_variables(layer)):
        reason = rules.without_rule(layer)
        needed = (method == "bookkeeping" and not hybrid) or rules.is_quantized(layer)
        if reason is not None and needed:
            found.append(_error("PS044", name, reason, ""))
    mixing = rules.mixes_units(layer)
    if mixing is not None:
        found.append(_error("PS043", name, mixing, "Take a model of another family."))
    hidden = rules.hides_calls(layer, trainable) if method == "bookkeeping" else None
    if hidden is not None:
        found.append(_error("PS044", name, hidden, ""))
    if getattr(layer, "activity_regularizer", None) is not None:
        found.append(
            _error(
                "PS045",
                name,
                "Expected a loss taken per unit. Received: an activity regulariser, which is taken over the batch.",
                "Remove activity_regularizer; weight regularisers are fine.",
            )
        )
    return found


def layers_without_rule(model: Any) -> list[str]:
    """Names of the layers that train variables of their own and have no gradient rule."""
    trainable = {id(variable) for variable in model.trainable_variables}
    layers = keras_private.flatten_layers(model)
    training = [each for each in layers if any(id(v) in trainable for v in keras_private.own_variables(each))]
    return [f"{each.name} ({type(each).__name__})" for each in training if rules.without_rule(each) is not None]


_UNSEEDED = "that draws random numbers without a keras.random.SeedGenerator of its own, so it cannot be checked"


def cross_unit_fault(model: Any, record: Any) -> str | None:
    """What, if anything, carries one unit's data over to another in training: tried out on made-up rows.

    A layer without trainable weights has no rule to vouch for it, so the model is asked: does the output of a row
    change with its neighbour, and does a forward pass leave something behind in the model's variables?

    Args:
        model: built model.
        record: nested `tf.TensorSpec` of one record.

    Returns:
        The end of a sentence that begins with "a model", or None.
    """
    import keras
    import tensorflow as tf

    generator = np.random.default_rng(0)

    def row(spec: Any) -> Any:
        if spec.dtype.is_floating:
            return generator.normal(size=spec.shape)
        return generator.integers(0, 2, spec.shape)

    rows = [tf.nest.map_structure(row, record) for _ in range(ROWS)]
    seeds = [v for v in keras_private.seed_states(model) if tuple(v.shape) == (2,) and "int" in v.dtype]
    known = {id(seed) for seed in seeds}
    watched = [v for v in model.variables if id(v) not in known]
    before = [tf.convert_to_tensor(v.value) for v in watched]  # shares memory until the variable changes
    left_behind: list[str] = []
    shared_seed, drawn_from_shared = keras_private.shared_seed_state(), False

    def outputs(scale: float, shift: int, changed: int | None = None) -> list[Any]:
        nonlocal drawn_from_shared

        def leaf(spec: Any, *values: Any) -> Any:
            floating = spec.dtype.is_floating
            stacked = np.stack(values) * (scale if floating else 1)
            if changed is not None:
                stacked[changed] = -scale - 2 * stacked[changed] if floating else 1 - stacked[changed]
            return tf.cast(tf.constant(stacked), spec.dtype)

        batch = tf.nest.map_structure(leaf, record, *rows)
        # Assigns nothing, so every call draws the same random numbers for the same shift.
        states = [(seed, tf.constant(seed.numpy() + np.asarray(shift, seed.numpy().dtype))) for seed in seeds]
        with keras.StatelessScope(state_mapping=states) as scope:
            leaves = tf.nest.flatten(model(batch, training=True))
        left_behind.extend(v.path for v in watched if scope.get_current_value(v) is not None)
        drawn_from_shared |= scope.get_current_value(shared_seed) is not None
        return [np.asarray(tf.cast(leaf, tf.float32)) for leaf in leaves]

    # A row's arithmetic is the same in both calls; bfloat16 is given one last place.
    layers = keras_private.flatten_layers(model)
    tolerance = 1e-5 if all(layer.compute_dtype == "float32" for layer in layers) else 2.0**-8
    scales = (1.0, 1e3) if any(spec.dtype.is_floating for spec in tf.nest.flatten(record)) else (1.0,)
    settings = [(scale, shift) for scale in scales for shift in ((0, 1) if seeds else (0,))]
    found = (_difference(functools.partial(outputs, *setting), tolerance) for setting in settings)
    fault = next((each for each in found if each is not None), None)
    for variable, value in zip(watched, before, strict=True):
        if not _unchanged(value, variable.value):  # a layer can assign past Keras
            left_behind.append(variable.path)
            variable.assign(value)
    if left_behind:
        return f"that keeps something of its batch in '{left_behind[0]}' (such as a moving average)"
    return fault or (_UNSEEDED if drawn_from_shared else None)


def _difference(outputs: Any, tolerance: float) -> str | None:
    first, again = outputs(), outputs()
    if not all(leaf.shape[:1] == (ROWS,) for leaf in first):
        return "whose output does not have one row per record"
    if not all(_same(a, b, tolerance) for a, b in zip(first, again, strict=True)):
        return _UNSEEDED
    for changed in range(ROWS):
        kept = np.arange(ROWS) != changed
        if not all(_same(a[kept], b[kept], tolerance) for a, b in zip(first, outputs(changed), strict=True)):
            return "whose output for one unit changes with another unit of the batch"
    return None


def _unchanged(before: Any, after: Any) -> bool:
    import tensorflow as tf

    return bool(tf.reduce_all((before == after) | ((before != before) & (after != after))))  # NaN stays NaN


def _same(one: Any, other: Any, tolerance: float) -> bool:
    """Alike to `tolerance` of the largest value around, but at least of 1."""
    finite = np.abs(one[np.isfinite(one)])
    return np.allclose(one, other, rtol=tolerance, atol=tolerance * max(1.0, finite.max(initial=0.0)), equal_nan=True)


def _error(identifier: str, where: str, message: str, fix: str) -> Finding:
    return Finding(id=identifier, severity=Severity.ERROR, where=where, message=message, fix=fix)
