"""`PrivacyCallback`: makes `model.fit` private for the length of one fit.

Keras calls `set_model` before it builds the train function, and `on_train_begin` after. In between, the private train step
stands in for `model.train_step`; from then on only the built train function differs. It runs one step per ticket,
and a ticket is issued only after the ledger has the step on disk.
"""

from __future__ import annotations

import os
import secrets
import weakref
from typing import Any

import keras
import tensorflow as tf

from tfdp.errors import BudgetExhaustedError, GradientError, MisuseError, UnsupportedLayerError
from tfdp.findings import errors
from tfdp.gradients import METHODS
from tfdp.ledger import Ledger
from tfdp.models import check_model
from tfdp.noise import GaussianNoise
from tfdp.optimizer import PrivateUpdates
from tfdp.plan import Plan
from tfdp.training import REFUSAL, PrivateTrainStep

# A fit that ended by an exception calls no callback: the next fit of the same model finds and closes it here.
_active: weakref.WeakKeyDictionary[Any, PrivacyCallback] = weakref.WeakKeyDictionary()


class PrivacyCallback(keras.callbacks.Callback):
    """Trains with DP-SGD under a plan, writes the ledger, and stops before the budget is exceeded.

    The progress bar and the History get `epsilon`: an upper bound on what the steps so far have cost, at the plan's delta,
    all fits on this ledger together. Every other value there is exact on private data and not covered by epsilon.

    Args:
        plan: from `tfdp.make_plan`; the same as in `poisson_batches` and `dp_optimizer`.
        ledger: path of the ledger. A second fit with the same plan continues it.
        method: "bookkeeping", or "vectorized" (TensorFlow Privacy's path: slower, needs no gradient rules).
        jit_compile: compile the microbatch with XLA. "auto" does so where TensorFlow sees a GPU; on a CPU it is slower.

    Raises (when the fit begins, before the first update):
        MisuseError: the optimizer is not from `dp_optimizer` with this plan, `steps_per_execution` is not 1, a KerasHub
            preprocessor is attached, several replicas.
        UnsupportedLayerError, LossNotPerUnitError: per-unit gradients cannot be taken exactly.
        BudgetExhaustedError: nothing is left of the plan.
        LedgerError: the ledger cannot be written, or belongs to another plan.
    """

    def __init__(
        self,
        plan: Plan,
        ledger: str | os.PathLike[str],
        *,
        method: str = "bookkeeping",
        jit_compile: bool | str = "auto",
    ):
        super().__init__()
        if not isinstance(plan, Plan):
            raise MisuseError(f"Expected a plan from tfdp.make_plan. Received: {type(plan).__name__}.")
        if method not in METHODS:
            raise GradientError(f"Expected method to be one of {sorted(METHODS)}. Received: method={method!r}.")
        if jit_compile not in (True, False, "auto"):
            raise MisuseError(f'Expected jit_compile to be True, False or "auto". Received: {jit_compile!r}.')
        self.plan = plan
        self.ledger_path = os.fspath(ledger)
        self._method = method
        self._jit_compile = bool(tf.config.list_physical_devices("GPU")) if jit_compile == "auto" else bool(jit_compile)
        prng_seed = secrets.randbits(63) if plan.seed is None else plan.seed
        self._noise = GaussianNoise(plan.rng, prng_seed if plan.rng == "prng" else None)
        self._ledger: Ledger | None = None
        self._train_step: PrivateTrainStep | None = None
        self._jit_compile_before: Any = None
        self._ticket: int | None = None

    # What Keras calls, in its order.

    def set_model(self, model: Any) -> None:
        """Checks everything that can be checked before data is seen, and installs the private train step."""
        super().set_model(model)
        earlier = _active.pop(model, None)
        if earlier is not None:
            earlier._end()
        self._check(model)
        if not model.optimizer.built:  # inside the step it would be traced twice
            model.optimizer.build(model.trainable_variables)
        self._train_step = PrivateTrainStep(
            model, self.plan, self._noise, method=self._method, jit_compile=self._jit_compile
        )
        object.__setattr__(model, "train_step", self._train_step)
        self._jit_compile_before, model.jit_compile = model.jit_compile, False
        model.train_function = None
        _active[model] = self

    def on_train_begin(self, logs: Any = None) -> None:
        model = self.model
        try:
            self._uninstall_step()
            self._ledger = Ledger.create_or_open(self.ledger_path, self.plan.to_dict())
            self._check_budget()
            self._ledger.append("fit_begin", steps_before=self._ledger.steps)
            model.train_function = self._guarded(model.train_function)
        except BaseException:
            self._end()
            raise

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        try:
            self._check_budget()
            assert self._ledger is not None
            assert self._train_step is not None
            step = self._ledger.steps + 1
            self._ledger.append_step(step)
            self._train_step.step.assign(step)
            self._ticket = step
        except BaseException:
            self._end()
            raise

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._report(logs)
        if self.steps >= self.plan.steps:
            self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._report(logs)

    def on_train_end(self, logs: Any = None) -> None:
        if self._ledger is not None:
            self._ledger.append("fit_end", steps=self._ledger.steps)
        self._end()

    def on_test_begin(self, logs: Any = None) -> None:
        if self._ledger is None:  # evaluate(callbacks=[...]) on its own
            self._end()

    def on_predict_begin(self, logs: Any = None) -> None:
        self.on_test_begin()

    # What a user may ask.

    @property
    def steps(self) -> int:
        """Steps on the ledger, all fits together; 0 before the first fit."""
        return self._steps_seen if self._ledger is None else self._ledger.steps

    @property
    def epsilon(self) -> float:
        """Certified epsilon of the steps so far, at the plan's delta."""
        return self.plan.epsilon(self.steps)

    @property
    def traces(self) -> int:
        """How often the train step of the current or last fit was traced."""
        return 0 if self._train_step is None else self._train_step.traces

    _steps_seen = 0

    # How it is done.

    def _check(self, model: Any) -> None:
        optimizer = getattr(model, "optimizer", None)
        if not isinstance(optimizer, PrivateUpdates):
            raise MisuseError(
                f"Expected a model compiled with tfdp.dp_optimizer(...). Received: optimizer {type(optimizer).__name__}. "
                'Compile with optimizer=tfdp.dp_optimizer("adamw", plan, learning_rate=...). (Keras wraps optimizers under '
                "mixed_float16; use mixed_bfloat16.)"
            )
        if optimizer.plan_digest != self.plan.digest:
            raise MisuseError(
                f"Expected one plan for optimizer and callback. Received: plan {optimizer.plan_digest[:12]} in the optimizer, "
                f"{self.plan.digest[:12]} in the callback. Make one plan and pass it to both."
            )
        if model.steps_per_execution != 1:
            raise MisuseError(
                f"Expected steps_per_execution=1. Received: {model.steps_per_execution}. Every step is recorded before it "
                "runs; compile with steps_per_execution=1."
            )
        if getattr(model, "preprocessor", None) is not None:
            raise MisuseError(
                f"Expected a KerasHub task without its preprocessor during the fit. Received: {type(model).__name__} with "
                f"{type(model.preprocessor).__name__} attached. Preprocess the records with it before poisson_batches, then "
                "set model.preprocessor = None for the fit."
            )
        if model.distribute_strategy.num_replicas_in_sync != 1:
            raise MisuseError(
                f"Expected one replica. Received: {model.distribute_strategy.num_replicas_in_sync}. Build and fit the model "
                "outside a tf.distribute strategy."
            )
        blocking = errors(check_model(model, method=self._method))
        if blocking:
            lines = "\n  ".join(str(finding) for finding in blocking)
            raise UnsupportedLayerError(f"Expected a model whose units can be kept apart. Received:\n  {lines}")

    def _check_budget(self) -> None:
        if self._ledger is None:
            raise MisuseError(
                "Expected a fit that this callback began. Received: a step outside of it. Call model.fit."
            )
        steps = self._ledger.steps
        if steps >= self.plan.steps:
            raise BudgetExhaustedError(
                f"Expected steps left in the plan. Received: {steps} of {self.plan.steps} steps on the ledger "
                f"{self.ledger_path}, epsilon {self.plan.epsilon(steps):.4g} of {self.plan.target_epsilon:g} at delta "
                f"{self.plan.delta:g}. The budget is spent: a further step needs a new, reviewed spec and its own ledger."
            )

    def _guarded(self, train_function: Any) -> Any:
        def run(iterator: Any) -> Any:
            if self._ticket is None:
                self.model.train_function = None
                raise MisuseError(
                    "Expected a step that was recorded in the ledger. Received: a train function left over from a private "
                    "fit. Call model.fit again with the PrivacyCallback among its callbacks."
                )
            self._ticket = None
            try:
                return train_function(iterator)
            except tf.errors.InvalidArgumentError as error:
                self._end()
                if REFUSAL in str(error):
                    reason = str(error).split(REFUSAL)[1].split("\n")[0].split("Condition x")[0].strip()
                    raise MisuseError(REFUSAL + reason) from error
                raise
            except BaseException:
                self._end()
                raise

        return run

    def _report(self, logs: Any) -> None:
        if isinstance(logs, dict):
            logs["epsilon"] = self.plan.epsilon_bound(self.steps)

    def _uninstall_step(self) -> None:
        if self.model.__dict__.get("train_step") is self._train_step and self._train_step is not None:
            object.__delattr__(self.model, "train_step")
            self.model.jit_compile = self._jit_compile_before

    def _end(self) -> None:
        """Takes everything off the model and closes the ledger; harmless when repeated."""
        self._uninstall_step()
        self.model.train_function = None
        self._ticket = None
        if self._ledger is not None:
            self._steps_seen = self._ledger.steps
            self._ledger.close()
            self._ledger = None
        if _active.get(self.model) is self:
            del _active[self.model]
