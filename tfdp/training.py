"""The private train step: one logical batch in, one noisy update out.

    for each microbatch:  sum += clipped per-unit gradients           (Abadi et al. 2016, Algorithm 1)
    update = (sum + N(0, (sigma*C)^2)) / (q*N)

The number of microbatches varies and is a loop; the shapes inside do not, so nothing is traced or compiled twice. An empty
batch runs the loop zero times and gets its noise like any other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdp import keras_private
from tfdp.errors import LossNotPerUnitError, MisuseError, UnsupportedLayerError
from tfdp.gradients import METHODS
from tfdp.models import mixes_units
from tfdp.noise import GaussianNoise
from tfdp.optimizer import NoisyGradients
from tfdp.plan import Plan
from tfdp.sampling.batches import plan_token

# Marks our own in-graph refusals, so that the callback can raise them as MisuseError.
REFUSAL = "tfdp refuses this batch: "


class PrivateTrainStep:
    """What `model.train_step` is for the length of a private fit.

    Attributes:
        step: variable, number of the step whose ledger record was written; set by the callback before each run.
        traces: how often the step was traced.
    """

    def __init__(self, model: Any, plan: Plan, noise: GaussianNoise, *, method: str, jit_compile: bool):
        self._model = model
        self._plan = plan
        self._noise = noise
        self._sums = METHODS[method]
        self._jit_compile = jit_compile
        self.step = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._last_draw = tf.Variable(0, dtype=tf.int64, trainable=False)
        self.traces = 0

    def __call__(self, data: Any) -> dict[str, Any]:
        """Runs one step. `data` is an element of `tfdp.poisson_batches`."""
        self.traces += 1
        model, plan = self._model, self._plan
        x, y, sample_weight, unit_weight = self._unpack(data)
        with tf.init_scope():
            if mixes_units(model, tf.nest.map_structure(self._record_spec, x)):
                raise UnsupportedLayerError(
                    f"Expected a model that treats every unit alone. Received: '{model.name}', where changing one unit of a "
                    "batch changes the output for another. Remove the layer that mixes them (statistics over the batch axis)."
                )
        variables = model.trainable_variables
        microbatch = self._compiled_microbatch(bool(self._other_metrics()))
        accepted = self._accept(data["tfdp"])

        def body(index: Any, sums: list[Any]) -> tuple[Any, list[Any]]:
            part = tf.nest.map_structure(
                lambda leaf: None if leaf is None else self._records(leaf[index]), (x, y, sample_weight)
            )
            added, losses, y_pred = microbatch(*part, unit_weight[index])
            self._update_metrics(part, losses, y_pred, unit_weight[index])
            return index + 1, [one + other for one, other in zip(sums, added, strict=True)]

        with tf.control_dependencies(accepted):
            count = tf.identity(tf.shape(unit_weight)[0])
        zeros = [tf.zeros(variable.shape, tf.float32) for variable in variables]
        _, sums = tf.while_loop(lambda index, _: index < count, body, (tf.constant(0), zeros), parallel_iterations=1)
        noise = self._noise.tensors([tuple(v.shape) for v in variables], plan.noise_stddev, self.step)
        gradients = [(total + drawn) / plan.expected_batch_size for total, drawn in zip(sums, noise, strict=True)]
        gradients = _with_regularisation(gradients, variables)
        model.optimizer.apply_private(NoisyGradients(gradients, variables, plan.digest))
        return model.get_metrics_result()

    def _unpack(self, data: Any) -> tuple[Any, Any, Any, Any]:
        if not (isinstance(data, dict) and {"tfdp", "x", "unit_weight"} <= set(data)):
            raise MisuseError(
                "Expected batches from tfdp.poisson_batches(records, plan). Received: data that did not come from it "
                f"({type(data).__name__}). Ordinary batches have no privacy accounting: sample them with poisson_batches."
            )
        return data["x"], data.get("y"), data.get("sample_weight"), data["unit_weight"]

    def _records(self, leaf: Any) -> Any:
        """[units, (records), ...] -> [units * records, ...]."""
        if self._plan.records_per_unit == 1:
            return leaf
        return tf.reshape(leaf, [leaf.shape[0] * leaf.shape[1], *leaf.shape[2:]])

    def _record_spec(self, leaf: Any) -> Any:
        leading = 2 if self._plan.records_per_unit == 1 else 3
        return tf.TensorSpec(leaf.shape[leading:], leaf.dtype)

    def _accept(self, mark: dict[str, Any]) -> list[Any]:
        """Refuses a batch of another plan, and a draw that was used before."""
        plan_matches = tf.debugging.assert_equal(
            mark["plan"],
            tf.constant(plan_token(self._plan), tf.int64),
            message=REFUSAL + "it was sampled under another plan than the callback's. Use one plan for both.",
        )
        is_new = tf.debugging.assert_greater(
            mark["draw"],
            self._last_draw.read_value(),
            message=REFUSAL
            + "its draw was used before or is out of order, so it would be counted once and used twice. "
            "Pass the result of poisson_batches as it is.",
        )
        with tf.control_dependencies([each for each in (plan_matches, is_new) if each is not None]):
            return [self._last_draw.assign(mark["draw"])]

    def _compiled_microbatch(self, keep_predictions: bool) -> Callable[..., Any]:
        def microbatch(x: Any, y: Any, sample_weight: Any, unit_weight: Any) -> Any:
            sums, _, losses, y_pred = self._sums(self._model, x, y, sample_weight, unit_weight, self._plan.clip_norm)
            added = [
                layer.name for layer in keras_private.flatten_layers(self._model) if keras_private.own_losses(layer)
            ]
            if added:
                raise LossNotPerUnitError(
                    f"Expected no loss but the compiled one. Received: add_loss in {', '.join(added)}, which is taken over "
                    "the batch. Move it into the compiled loss."
                )
            return sums, losses, y_pred if keep_predictions else None

        return tf.function(microbatch, autograph=False, jit_compile=self._jit_compile)

    def _other_metrics(self) -> list[Any]:
        return [metric for metric in self._model.metrics if metric.name != "loss"]

    def _update_metrics(self, part: Any, losses: Any, y_pred: Any, unit_weight: Any) -> None:
        """Exact values on private data, as in any fit; the card says that they are not covered."""
        for metric in self._model.metrics:
            if metric.name == "loss":
                metric.update_state(losses, sample_weight=unit_weight)
        if y_pred is not None:
            present = tf.cast(tf.reduce_sum(unit_weight), tf.int32) * self._plan.records_per_unit  # padding is last
            x, y, sample_weight, y_pred = tf.nest.map_structure(
                lambda leaf: None if leaf is None else leaf[:present], (*part, y_pred)
            )
            self._model.compute_metrics(x, y, y_pred, sample_weight)


def _with_regularisation(gradients: list[Any], variables: list[Any]) -> list[Any]:
    """Adds the gradient of weight regularisers: the same whatever the data, so it joins after the noise."""
    if not any(variable.regularizer for variable in variables):
        return gradients
    with tf.GradientTape() as tape:
        penalty = tf.add_n([tf.cast(v.regularizer(v), tf.float32) for v in variables if v.regularizer])
    extra = tape.gradient(penalty, [v.value for v in variables])
    return [g if e is None else g + tf.cast(e, tf.float32) for g, e in zip(gradients, extra, strict=True)]
