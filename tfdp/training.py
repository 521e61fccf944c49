"""The private train step: one logical batch in, one noisy update out.

    for each microbatch:  sum += clipped per-unit gradients           (Abadi et al. 2016, Algorithm 1)
    update = (sum + N(0, (sigma*C)^2)) / (q*N)

Where the clip norm follows a quantile (Andrew et al. 2021), C is that of the step, on the ledger before it runs, and
the units at or below it are counted along with the sum; the noisy count is all that leaves.

The number of microbatches varies and is a loop; the shapes inside do not, so nothing is traced or compiled twice. An
empty batch runs the loop zero times and gets its noise like any other.

| a run is refused, and updates nothing, unless | where that is checked                      |
|-----------------------------------------------|--------------------------------------------|
| the batch comes from the sampler              | before the first run, and when it is traced |
| the model keeps units apart                   | before the first run, on made-up data      |
| the optimizer takes noisy gradients only      | when the step is traced                    |
| it got a ticket: a step that is on the ledger | in every run, in Python, before all else   |
| its batch was drawn for this plan             | in every run, in Python, before all else   |
| this process drew it, and has not used it yet | in every run, in Python, before all else   |
| it holds each drawn unit once                 | in every run, in Python, before all else   |
| its units are those of earlier fits           | when they change, in Python                |
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp import keras_private
from tfdp.errors import MisuseError, TfdpError, UnsupportedLayerError
from tfdp.gradients import per_layer, sums_function
from tfdp.gradients.clipping import ClipNorm, centred_count
from tfdp.models import cross_unit_fault
from tfdp.noise import GaussianNoise
from tfdp.optimizer import NoisyGradients, PrivateUpdates
from tfdp.plan import Plan
from tfdp.replicas import check_batches, reseed
from tfdp.sampling.batches import IssuedDraw, PrivateBatch, plan_token, take_issued_draw


class PrivateTrainStep:
    """What `model.train_step` is for the length of a private fit.

    Attributes:
        refusal: why the last run was refused; TensorFlow hands on only the text of an error raised inside a graph.
        traces: how often the step was traced.
        noisy_fraction: what the last step released of its count, where the clip norm follows one; None else.
    """

    def __init__(
        self,
        model: Any,
        plan: Plan,
        noise: GaussianNoise,
        *,
        method: str,
        hybrid: bool,
        jit_compile: bool,
        check_units: Callable[[bytes], None],
    ):
        self._model = model
        self._plan = plan
        self._noise = noise
        self._sums = sums_function(method, hybrid)
        self._jit_compile = jit_compile
        self._ticket: int | None = None
        self._microbatch: Callable[..., Any] | None = None
        self._clip_norm: ClipNorm = plan.clip_norm
        self._clip_norm_of_step = plan.clip_norm
        self.noisy_fraction: float | None = None
        self._check_units = check_units
        self._partition = b""
        self._strategy: Any = None
        self.refusal: TfdpError | None = None
        self.traces = 0
        self._trimmed = 0

    def admit(self, step: int, clip_norm: float) -> None:
        """Allows one run, of a step that is on the ledger with this clip norm."""
        self._ticket, self._clip_norm_of_step, self.noisy_fraction = step, clip_norm, None

    def revoke(self) -> bool:
        """Takes back a permission that was not used; whether there was one."""
        ticket, self._ticket = self._ticket, None
        return ticket is not None

    def prepare(self, iterator: Any) -> int | None:
        """Before the first run, outside of any graph: tries the model out, and creates the variables of its metrics.

        Args:
            iterator: over the dataset.

        Returns:
            Units in a microbatch; None where the first run is past.

        Raises:
            MisuseError: the data does not come from the sampler, or was made for another strategy.
            UnsupportedLayerError: the model carries one unit's data over to another.
        """
        if self._microbatch is not None:
            return None
        spec: Any = getattr(iterator, "element_spec", None)
        _refuse_foreign(spec)
        check_batches(self._strategy, iterator)
        x, y, sample_weight = spec["x"], spec.get("y"), spec.get("sample_weight")
        fault = cross_unit_fault(self._model, _map(self._record_spec, x))
        if fault is not None:
            raise UnsupportedLayerError(
                f"Expected a model that treats every unit alone. Received: '{self._model.name}', a model {fault}. "
                "Remove or freeze the layer that does it."
            )
        if y is not None:
            keras_private.build_metrics(self._model, *_map(self._microbatch_spec, (x, y, sample_weight)))
        if self._plan.per_layer is not None:
            self._clip_norm = per_layer(self._model, self._plan.per_layer)
        self._microbatch = self._compiled_microbatch(any(metric.name != "loss" for metric in self._model.metrics))
        return int(spec["unit_weight"].shape[1])

    def __call__(self, data: Any) -> dict[str, Any]:
        """Runs one step. `data` is an element of `tfdp.poisson_batches`."""
        if tf.distribute.has_strategy():  # every replica would run a step of its own
            raise _outside_of_a_fit()
        return self._run(data)

    def across(self, strategy: Any) -> Callable[[Any], dict[str, Any]]:
        """Moves the step to the replicas of a strategy.

        Returns:
            The train function: from an iterator over batches to logs, to be called within the strategy's scope.
        """
        self._strategy = strategy

        def step(draws: Any) -> dict[str, Any]:
            return self._run(draws.get_next())

        traced = step if self._model.run_eagerly else tf.function(step, autograph=False)
        return lambda iterator: dict(traced(iterator.draws))

    def _run(self, data: Any) -> dict[str, Any]:
        model, plan, strategy = self._model, self._plan, self._strategy
        if self._microbatch is None:
            raise _outside_of_a_fit()
        _refuse_foreign(data)
        if not isinstance(model.optimizer, PrivateUpdates):
            raise MisuseError(
                "Expected the optimizer that the fit began with. Received: a "
                f"{type(model.optimizer).__name__} that took its place. Compile with tfdp.dp_optimizer and fit again."
            )
        self.traces += not tf.executing_eagerly()
        mark, leading = data["tfdp"], self._leading_axes
        leaves = [leaf for leaf in tf.nest.flatten(_records_of(data)) if leaf is not None]
        extents = tf.stack([tf.shape(leaf)[:leading] for leaf in leaves])
        ticket = [mark["draw"][0], mark["plan"][0], data["unit_weight"], extents]
        moving: Any = None
        released: list[Any] = []
        if plan.adaptive_clipping is None:
            step = tf.numpy_function(self._redeem, ticket, tf.int64, stateful=True)
        else:
            step, moving = tf.numpy_function(self._redeem_moving, ticket, [tf.int64, tf.float32], stateful=True)
            moving.set_shape([])
        step.set_shape([])

        def update(gradients: list[Any]) -> None:
            gradients = _with_regularisation(gradients, model.trainable_variables)
            # Weight decay and counters do not read the gradients, and have to wait for the refusals as well. One
            # gradient is enough, they are of one operation: edges from each to all of the optimizer are 1% of a step.
            with tf.control_dependencies([*gradients[:1], *released]):
                model.optimizer.apply_private(NoisyGradients(gradients, model.trainable_variables, plan.digest))

        if strategy is None:
            sums = self._clipped_sums(data, step, moving)
        else:
            of_replicas = strategy.run(self._clipped_sums, args=(data, step, moving))
            sums = strategy.reduce(tf.distribute.ReduceOp.SUM, of_replicas, axis=None)
        stddev = plan.noise_stddev
        if moving is not None:
            *sums, counted = sums
            stddev = tf.cast(moving, tf.float64) * plan.gradient_noise_multiplier
            released = [tf.numpy_function(self._release, [step, counted], tf.int64, stateful=True)]
        gradients = self._noise.tensors(sums, stddev, plan.expected_batch_size, step)
        if strategy is None:
            update(gradients)
        else:
            strategy.run(update, args=(gradients,))
        return model.get_metrics_result()

    def _clipped_sums(self, data: Any, step: Any, moving: Any) -> list[Any]:
        """Sums over the microbatches of a batch; on a replica r of R, over number r, r + R, ... of them.

        Args:
            data: the batch.
            step: its number, once it may run; nothing runs before that.
            moving: the clip norm of the step, where it moves: a count of units within it comes after the sums.
        """
        parts, unit_weight, record_weight = _records_of(data), data["unit_weight"], data.get("record_weight")
        replica = tf.distribute.get_replica_context()
        begin, stride = replica.replica_id_in_sync_group, replica.num_replicas_in_sync
        microbatch, variables = self._microbatch, self._model.trainable_variables
        assert microbatch is not None

        def run(index: Any) -> list[Any]:
            part = _map(lambda leaf: self._records(leaf[index]), parts)
            weights = unit_weight[index], None if record_weight is None else record_weight[index]
            added, losses, y_pred = microbatch(*part, *weights, moving)
            self._update_metrics(part, losses, y_pred, *weights)
            return list(added)

        def body(index: Any, sums: list[Any]) -> tuple[Any, list[Any]]:
            added = run(index)

            def both() -> list[Any]:
                return [one + other for one, other in zip(sums, added, strict=True)]

            # The first ones need nothing to be added to: with one microbatch, no second set of sums is held.
            return index + stride, tf.nest.flatten(tf.cond(index > begin, both, lambda: added))

        if self._strategy is not None:
            reseed(keras_private.seed_states(self._model), step)
        with tf.control_dependencies([step]):
            count = tf.identity(tf.shape(unit_weight)[0])
        shapes = [variable.shape for variable in variables] + [tf.TensorShape([])] * (moving is not None)
        # One loop, and no step before it: what is built twice, TensorFlow holds twice.
        _, sums = tf.while_loop(
            lambda index, _: index < count,
            body,
            (begin, [tf.zeros([1] * shape.rank) for shape in shapes]),
            shape_invariants=(tf.TensorShape([]), [tf.TensorShape([None] * shape.rank) for shape in shapes]),
            parallel_iterations=1,
        )
        # Without a microbatch they are zeros still; and large zeros that are known beforehand would be kept.
        return [tf.broadcast_to(total, shape) for total, shape in zip(sums, shapes, strict=True)]

    def _redeem(self, draw: Any, token: Any, unit_weight: Any, extents: Any) -> Any:
        """Number of the step that may run now; runs in Python at every step."""
        try:
            step, self._ticket = self._ticket, None
            if step is None:
                raise _outside_of_a_fit()
            expected = plan_token(self._plan)
            if int(token) != expected:
                raise self._of_another_plan()
            issued = take_issued_draw(int(draw))
            if issued is None:
                raise MisuseError(
                    "Expected a fresh draw. Received: one that a step has used before, or that another process made; "
                    "it would be counted as independent, and is not. Pass the result of poisson_batches as it is."
                )
            if issued.token != expected:
                raise self._of_another_plan()
            if issued.partition != self._partition:
                self._check_units(issued.partition)
                self._partition = issued.partition
            if not self._is_as_drawn(issued, unit_weight, extents):
                raise MisuseError(
                    "Expected a batch as it was drawn, every unit once and with weight 1. Received: one whose units "
                    "were repeated, dropped or weighted since. Prepare the records before poisson_batches, and pass "
                    "the result of poisson_batches as it is."
                )
        except TfdpError as error:
            self.refusal = error
            raise
        if self._trimmed != self.traces:
            self._trimmed = self.traces
            _give_free_memory_back()
        return np.int64(step)

    def _redeem_moving(self, *ticket: Any) -> Any:
        """The same, with the clip norm of the step."""
        return self._redeem(*ticket), np.float32(self._clip_norm_of_step)

    def _release(self, step: Any, counted: Any) -> Any:
        """Adds the noise to the count of units at or below the clip norm; runs in Python at every step."""
        adaptive = self._plan.adaptive_clipping
        assert adaptive is not None
        noisy = self._noise.noisy_count(float(counted), adaptive.count_noise, step=int(step))
        self.noisy_fraction = 0.5 + noisy / self._plan.expected_batch_size
        return step

    def _is_as_drawn(self, issued: IssuedDraw, unit_weight: Any, extents: Any) -> bool:
        """Whether the weights, and the leading axes of every leaf, are those that the sampler gave the batch."""
        shape = (issued.microbatches, issued.microbatch_size, self._plan.records_per_unit)
        if unit_weight.shape != shape[:2] or (extents != shape[: self._leading_axes]).any():
            return False
        return bool((unit_weight.ravel() == (np.arange(unit_weight.size) < issued.units)).all())

    def _of_another_plan(self) -> MisuseError:
        return MisuseError(
            f"Expected batches drawn under the callback's plan, {self._plan.digest[:12]}. Received: batches of "
            "another plan. Use one plan for poisson_batches, the optimizer and the callback."
        )

    @property
    def _leading_axes(self) -> int:
        """Axes of a leaf before those of a record: microbatches, units and, where a unit has several, records."""
        return 2 if self._plan.records_per_unit == 1 else 3

    def _records(self, leaf: Any) -> Any:
        """[units, (records), ...] -> [units * records, ...]."""
        if self._plan.records_per_unit == 1:
            return leaf
        return tf.reshape(leaf, [leaf.shape[0] * leaf.shape[1], *leaf.shape[2:]])

    def _record_spec(self, leaf: Any) -> Any:
        return tf.TensorSpec(leaf.shape[self._leading_axes :], leaf.dtype)

    def _microbatch_spec(self, leaf: Any) -> Any:
        record = self._record_spec(leaf)
        return tf.TensorSpec([leaf.shape[1] * self._plan.records_per_unit, *record.shape], leaf.dtype)

    def _compiled_microbatch(self, keep_predictions: bool) -> Callable[..., Any]:
        def microbatch(x: Any, y: Any, sample_weight: Any, unit_weight: Any, record_weight: Any, moving: Any) -> Any:
            clip_norm = self._clip_norm if moving is None else moving
            sums, norms, losses, y_pred = self._sums(
                self._model, x, y, sample_weight, unit_weight, clip_norm, record_weight
            )
            if moving is not None:
                sums = [*sums, centred_count(norms, moving, unit_weight)]
            return sums, losses, y_pred if keep_predictions else None

        return tf.function(microbatch, autograph=False, jit_compile=True) if self._jit_compile else microbatch

    def _update_metrics(self, part: Any, losses: Any, y_pred: Any, unit_weight: Any, record_weight: Any) -> None:
        """Exact values on private data, as in any fit; the card says that they are not covered."""
        penalty = _penalty(self._model.trainable_variables)
        for metric in self._model.metrics:
            if metric.name == "loss":
                metric.update_state(losses if penalty is None else losses + penalty, sample_weight=unit_weight)
        if y_pred is not None:
            if record_weight is None:
                present = tf.cast(tf.reduce_sum(unit_weight), tf.int32)  # padding is last
                x, y, sample_weight, y_pred = _map(lambda leaf: leaf[:present], (*part, y_pred))
            else:
                used = tf.reshape(unit_weight[:, None] * record_weight > 0, [-1])
                x, y, sample_weight, y_pred = _map(lambda leaf: tf.boolean_mask(leaf, used), (*part, y_pred))
            self._model.compute_metrics(x, y, y_pred, sample_weight)


def is_compiled(jit_compile: bool | str) -> bool:
    """Whether microbatches are compiled with XLA; "auto": where TensorFlow sees a GPU.

    Raises:
        MisuseError: none of True, False and "auto".
    """
    if jit_compile not in (True, False, "auto"):
        raise MisuseError(f'Expected jit_compile to be True, False or "auto". Received: {jit_compile!r}.')
    return bool(tf.config.list_physical_devices("GPU")) if jit_compile == "auto" else bool(jit_compile)


def _give_free_memory_back() -> None:
    """Building a graph leaves much of the C library's heap free, and tensors do not come from there (glibc only)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def _outside_of_a_fit() -> MisuseError:
    return MisuseError(
        "Expected a step that was recorded in the ledger. Received: a run of the private train step outside of a "
        "private fit. Call model.fit with a PrivacyCallback among its callbacks. (To train without privacy after a fit "
        "that did not begin: del model.train_step.)"
    )


def _refuse_foreign(data: Any) -> None:
    if not isinstance(data, PrivateBatch):
        raise MisuseError(
            "Expected batches from tfdp.poisson_batches(records, plan). Received: data that did not come from it "
            f"({type(data).__name__}). Ordinary batches have no privacy accounting: sample them with poisson_batches, "
            "and pass the result as it is."
        )


def _records_of(data: Any) -> tuple[Any, Any, Any]:
    return data["x"], data.get("y"), data.get("sample_weight")


def _map(function: Callable[[Any], Any], structure: Any) -> Any:
    """Maps over the leaves; None stays None."""
    return tf.nest.map_structure(lambda leaf: None if leaf is None else function(leaf), structure)


def _penalty(variables: list[Any]) -> Any:
    """Sum of the weight regularisers, or None."""
    terms = [tf.cast(v.regularizer(v), tf.float32) for v in variables if v.regularizer]
    return tf.add_n(terms) if terms else None


def _with_regularisation(gradients: list[Any], variables: list[Any]) -> list[Any]:
    """Adds the gradient of weight regularisers: the same whatever the data, so it joins after the noise."""
    with tf.GradientTape() as tape:
        penalty = _penalty(variables)
    if penalty is None:
        return gradients
    extra = tape.gradient(penalty, [v.value for v in variables])
    return [g if e is None else g + tf.cast(e, tf.float32) for g, e in zip(gradients, extra, strict=True)]
