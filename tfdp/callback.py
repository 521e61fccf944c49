"""`PrivacyCallback`: makes `model.fit` private for the length of one fit.

Keras calls `set_model` before it makes the train function, and `on_train_begin` after. In between, the private train
step stands in for `model.train_step`; from then on only the train function differs. It runs once per permission, and
permission is given only when the ledger has the step on disk.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import weakref
from typing import Any

import keras
import tensorflow as tf

from tfdp import keras_private
from tfdp.errors import BudgetExhaustedError, LedgerError, MisuseError, UnsupportedLayerError
from tfdp.files import sha256_arrays
from tfdp.findings import errors
from tfdp.gradients import sums_function
from tfdp.ledger import Ledger
from tfdp.models import check_model, layers_without_rule
from tfdp.noise import GaussianNoise
from tfdp.optimizer import PrivateUpdates, refuse_strategy
from tfdp.plan import Plan
from tfdp.training import PrivateTrainStep

# A fit that ended by an exception told no callback. Whoever comes next, for the same model or the same ledger, ends it.
_active: weakref.WeakSet[PrivacyCallback] = weakref.WeakSet()


# Under which ledger a model of this process has trained: what it holds cannot be claimed by another one.
_trained_under: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


class PrivacyCallback(keras.callbacks.Callback):
    """Trains with DP-SGD under a plan, writes the ledger, and stops before the budget is exceeded.

    The progress bar and the History get `epsilon`: an upper bound on what the steps so far have cost, at the plan's
    delta, all fits on this ledger together. Every other value there is exact on private data and not covered by it.

    Args:
        plan: from `tfdp.make_plan`; the same as in `poisson_batches` and `dp_optimizer`.
        ledger: path of the ledger. A second fit with the same plan continues it.
        method: "bookkeeping", or "vectorized" (TensorFlow Privacy's path: slower, needs no gradient rules).
        hybrid: with book-keeping, form the per-unit gradients of variables without a rule instead of refusing the
            model. The ledger and the card name the layers.
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
        hybrid: bool = False,
        jit_compile: bool | str = "auto",
    ):
        super().__init__()
        if not isinstance(plan, Plan):
            raise MisuseError(f"Expected a plan from tfdp.make_plan. Received: {type(plan).__name__}.")
        sums_function(method, hybrid)
        if jit_compile not in (True, False, "auto"):
            raise MisuseError(f'Expected jit_compile to be True, False or "auto". Received: {jit_compile!r}.')
        self.plan = plan
        self.ledger_path = os.fspath(ledger)
        self._method, self._hybrid = method, hybrid
        self._jit_compile = bool(tf.config.list_physical_devices("GPU")) if jit_compile == "auto" else bool(jit_compile)
        prng_seed = secrets.randbits(63) if plan.seed is None else plan.seed
        self._noise = GaussianNoise(plan.rng, prng_seed if plan.rng == "prng" else None)
        self._ledger: Ledger | None = None
        self._train_step: PrivateTrainStep | None = None
        self._jit_compile_before: Any = None
        self._tensor_float_32_before: bool | None = None
        self._run: Any = None
        self._steps_seen = 0
        self._stepped = False

    # What Keras calls, in its order.

    def set_model(self, model: Any) -> None:
        """Installs the private train step; Keras makes its train function from it before the fit begins."""
        super().set_model(model)
        for other in [each for each in _active if each.model is model]:
            other._end()
        if "train_step" in vars(model):
            raise MisuseError(
                f"Expected a model with the train_step of its class. Received: '{model.name}', which had another one "
                "put in its place. Take it off (del model.train_step): a private fit brings its own."
            )
        self._train_step = PrivateTrainStep(
            model,
            self.plan,
            self._noise,
            method=self._method,
            hybrid=self._hybrid,
            jit_compile=self._jit_compile,
        )
        self._jit_compile_before, model.jit_compile = model.jit_compile, False
        object.__setattr__(model, "train_step", self._train_step)  # past Keras's tracking of attributes
        model.train_function = None
        _active.add(self)

    def on_train_begin(self, logs: Any = None) -> None:
        """Checks everything that can be checked before data is seen, and opens the ledger."""
        model = self.model
        try:
            self._stepped = False
            self._check_alone()
            self._uninstall_step()
            self._check(model)
            for other in [each for each in _active if each is not self and each._same_ledger(self)]:
                other._end()
            ledger = self._ledger = Ledger.create_or_open(self.ledger_path, self.plan.to_dict())
            self._closing = weakref.finalize(self, ledger.close)  # should both be forgotten after an exception
            self._check_budget()
            self._check_history(model, ledger)
            if not model.optimizer.built:  # inside the step it would be traced twice
                model.optimizer.build(model.trainable_variables)
            if self.plan.rng == "csprng":
                _reseed(model)
            # Its products are good to 1e-3 only: with norms as wrong as that, a unit could move the sum by more than C.
            self._tensor_float_32_before = tf.config.experimental.tensor_float_32_execution_enabled()
            tf.config.experimental.enable_tensor_float_32_execution(False)
            ledger.append("fit_begin", steps_before=ledger.steps, **self._gradients(model))
            self._run = model.train_function = self._guarded(model.train_function)
        except BaseException:
            self._end()
            raise

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        try:
            self._check_budget()
            self._check_installed()
            assert self._ledger is not None
            assert self._train_step is not None
            step = self._ledger.steps + 1
            self._ledger.append_step(step)
            _trained_under[self.model] = self._ledger.identity
            self._train_step.admit(step)
            self._stepped = True
        except BaseException:
            self._end()
            raise

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._train_step is not None and self._train_step.revoke():
            self._end()
            raise MisuseError(
                "Expected the recorded step to run through the private train step. Received: a step that did not. "
                "Another callback replaced model.train_function: remove it."
            )
        self._report(logs)
        if self.steps >= self.plan.steps:
            self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._report(logs)
        self._record("epoch_end")

    def on_train_end(self, logs: Any = None) -> None:
        self._record("fit_end")
        self._end(interrupted=False)

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
        """How often the train step of the current or last fit was traced; 0 under `run_eagerly`."""
        return 0 if self._train_step is None else self._train_step.traces

    # How it is done.

    def _check(self, model: Any) -> None:
        optimizer = getattr(model, "optimizer", None)
        if not isinstance(optimizer, PrivateUpdates):
            raise MisuseError(
                "Expected a model compiled with tfdp.dp_optimizer(...). Received: optimizer "
                f"{type(optimizer).__name__}. "
                'Compile with optimizer=tfdp.dp_optimizer("adamw", plan, learning_rate=...). (Keras wraps optimizers '
                "under mixed_float16; use mixed_bfloat16.)"
            )
        if optimizer.plan_digest != self.plan.digest:
            raise MisuseError(
                f"Expected one plan for optimizer and callback. Received: plan {optimizer.plan_digest[:12]} in the "
                f"optimizer, {self.plan.digest[:12]} in the callback. Make one plan and pass it to both."
            )
        if model.steps_per_execution != 1:
            raise MisuseError(
                f"Expected steps_per_execution=1. Received: {model.steps_per_execution}. Every step is recorded before "
                "it runs; compile with steps_per_execution=1."
            )
        if getattr(model, "preprocessor", None) is not None:
            raise MisuseError(
                f"Expected a KerasHub task without its preprocessor during the fit. Received: {type(model).__name__} "
                f"with {type(model.preprocessor).__name__} attached. Preprocess the records with it before "
                "poisson_batches, then set model.preprocessor = None for the fit."
            )
        refuse_strategy(model.distribute_strategy)
        blocking = errors(check_model(model, method=self._method, hybrid=self._hybrid))
        if blocking:
            lines = "\n  ".join(str(finding) for finding in blocking)
            raise UnsupportedLayerError(f"Expected a model whose units can be kept apart. Received:\n  {lines}")

    def _gradients(self, model: Any) -> dict[str, Any]:
        """How per-unit gradients are taken, for the ledger."""
        if not self._hybrid:
            return {"gradients": self._method}
        return {"gradients": "hybrid", "layers_without_rule": layers_without_rule(model)}

    def _check_alone(self) -> None:
        """Whether the train function that Keras made is this callback's."""
        if vars(self.model).get("train_step") is self._train_step:
            return
        for other in [each for each in _active if each.model is self.model]:
            other._end()
        raise MisuseError(
            "Expected one PrivacyCallback in a fit, and once. Received: more. Every step is recorded on one ledger: "
            "leave one of them."
        )

    def _check_installed(self) -> None:
        if self.model.train_function is not self._run:
            raise MisuseError(
                "Expected the train function that the private fit began with. Received: another one (the model was "
                "compiled, or its train function made anew, during the fit). Remove the callback that does it."
            )

    def _check_history(self, model: Any, ledger: Ledger) -> None:
        """Whether this ledger holds every private step that the model has taken, as far as that can be told."""
        taken = int(model.optimizer.iterations)
        if taken > ledger.steps:
            raise MisuseError(
                f"Expected a ledger with every step that the optimizer has taken. Received: {taken} steps in the "
                f"optimizer, {ledger.steps} on {self.ledger_path}. Continue the ledger of those steps; without it "
                "nothing can be claimed for this model: start again from public weights."
            )
        if _trained_under.get(model, ledger.identity) != ledger.identity:
            raise MisuseError(
                f"Expected a model that only {self.ledger_path} has trained. Received: one that was trained under "
                "another ledger, whose steps this one would not count. Continue that ledger, or start again from "
                "public weights."
            )

    def _record(self, kind: str) -> None:
        """Notes a point of the fit, with the weights that it left; a fit without a step vouches for no weights."""
        if self._ledger is not None:
            weights = {"weights": sha256_arrays(self.model.get_weights())} if self._stepped else {}
            self._ledger.append(kind, steps=self._ledger.steps, **weights)

    def _check_budget(self) -> None:
        if self._ledger is None:
            raise MisuseError(
                "Expected a fit that this callback began and that still has its ledger. Received: a step outside of "
                "one. Call model.fit, and do not begin a second fit on the same model or ledger while one is running."
            )
        steps = self._ledger.steps
        if steps >= self.plan.steps:
            raise BudgetExhaustedError(
                f"Expected steps left in the plan. Received: {steps} of {self.plan.steps} steps on the ledger "
                f"{self.ledger_path}, epsilon {self.plan.epsilon(steps):.4g} of {self.plan.target_epsilon:g} at delta "
                f"{self.plan.delta:g}. The budget is spent: a further step needs a new, reviewed spec and its own "
                "ledger."
            )

    def _guarded(self, train_function: Any) -> Any:
        train_step = self._train_step
        assert train_step is not None

        def run(iterator: Any) -> Any:
            try:
                train_step.prepare(getattr(iterator, "element_spec", None))
                return train_function(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):  # the data ended; the recorded step stays spent
                train_step.revoke()
                raise
            except Exception:
                self._end()
                if train_step.refusal is not None:
                    raise train_step.refusal from None
                raise
            except BaseException:
                self._end()
                raise

        return run

    def _report(self, logs: Any) -> None:
        if isinstance(logs, dict):
            logs["epsilon"] = self.plan.epsilon_bound(self.steps)

    def _same_ledger(self, other: PrivacyCallback) -> bool:
        return os.path.realpath(self.ledger_path) == os.path.realpath(other.ledger_path)

    def _uninstall_step(self) -> None:
        if self._train_step is not None and vars(self.model).get("train_step") is self._train_step:
            object.__delattr__(self.model, "train_step")
            self.model.jit_compile = self._jit_compile_before

    def _end(self, *, interrupted: bool = True) -> None:
        """Takes everything off the model and closes the ledger; harmless when repeated."""
        self._uninstall_step()
        self.model.train_function = None
        if self._tensor_float_32_before is not None:
            tf.config.experimental.enable_tensor_float_32_execution(self._tensor_float_32_before)
            self._tensor_float_32_before = None
        if self._train_step is not None:
            self._train_step.revoke()
        if self._ledger is not None:
            self._steps_seen = self._ledger.steps
            if interrupted and self._stepped and not self._ledger.closed:
                # Without this line what the fit left gets no card: no harm is done, so no second error is raised.
                with contextlib.suppress(LedgerError):
                    self._record("fit_interrupted")
            self._ledger.close()
            self._ledger = None
        _active.discard(self)


def _reseed(model: Any) -> None:
    """Seeds the model's own randomness (dropout) from the operating system.

    Which mask a unit gets depends on how many were drawn before it. With masks that nobody can foresee this tells
    nothing; with a seed that is known, one unit more would change the masks, and so the gradients, of all others.
    """
    for state in keras_private.seed_states(model):
        state.assign([secrets.randbits(31), secrets.randbits(31)])
