"""`PrivacyCallback`: makes `model.fit` private for the length of one fit.

Keras calls `set_model` before it makes the train function, and `on_train_begin` after. In between, the private train
step stands in for `model.train_step`; from then on only the train function differs. It runs once per permission, and
permission is given only when the ledger has the step on disk.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import keras
import tensorflow as tf

from tfdp import keras_private
from tfdp.admission import (
    check_compiled_model,
    check_history,
    check_plan,
    check_unchanged,
    gradients_taken,
    reseed,
)
from tfdp.budget import note_head, register
from tfdp.entropy import system_bits
from tfdp.errors import BudgetExhaustedError, LedgerError, MisuseError, TfdpError
from tfdp.files import sha256_arrays
from tfdp.gradients import exact_products, sums_function
from tfdp.ledger import Ledger, read_ledger, record_accesses
from tfdp.noise import GaussianNoise
from tfdp.plan import Plan
from tfdp.replicas import strategy_of
from tfdp.resume import FitInterrupts, ResumableRun
from tfdp.sampling.partition import check_remembered_units, remember_units
from tfdp.spec.numbers import rounded_up, shown
from tfdp.training import PrivateTrainStep, is_compiled

# A fit that ended by an exception told no callback. Whoever comes next, for the same model or the same ledger, ends it.
_active: weakref.WeakSet[PrivacyCallback] = weakref.WeakSet()
_looking_at_active = threading.Lock()  # fits may begin in several threads


# Under which ledger a model of this process has trained: what it holds cannot be claimed by another one.
_trained_under: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


class PrivacyCallback(keras.callbacks.Callback):
    """Trains with DP-SGD under a plan, writes the ledger, and stops before the budget is exceeded.

    The progress bar and the History get `epsilon`: an upper bound on what the steps so far have cost, at the plan's
    delta, all fits on this ledger together; and `clip_norm`, where it follows a quantile, which epsilon covers. Every
    other value there is exact on private data and not covered by it.
    Ctrl-C ends the fit after its step, with ledger and checkpoint complete; a second one ends it at once.

    Args:
        plan: from `tfdp.make_plan`; the same as in `poisson_batches` and `dp_optimizer`.
        ledger: path of the ledger. A second fit with the same plan continues it.
        method: "bookkeeping", or "vectorized" (TensorFlow Privacy's path: slower, needs no gradient rules).
        hybrid: with book-keeping, form the per-unit gradients of variables without a rule instead of refusing the
            model. The ledger and the card name the layers.
        jit_compile: compile the microbatch with XLA. "auto" does so where TensorFlow sees a GPU; a CPU gains little.
        checkpoint: a directory: what is trained, the optimizer and the place in the run are saved there, and a new
            process that does the same goes on from it; see `tfdp.resume`. Steps since then are spent and lost. Delete
            it to begin anew; the ledger stays.
        save_freq: "epoch", or a number of updates between two checkpoints.

    Raises (when the fit begins, before the first update):
        MisuseError: the optimizer is not from `dp_optimizer` with this plan, `steps_per_execution` is not 1, a KerasHub
            preprocessor is attached, a `tf.distribute` strategy other than MirroredStrategy.
        UnsupportedLayerError, LossNotPerUnitError: per-unit gradients cannot be taken exactly.
        BudgetExhaustedError: nothing is left of the plan, or of the data set's budget.
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
        checkpoint: str | os.PathLike[str] | None = None,
        save_freq: int | str = "epoch",
    ):
        super().__init__()
        if not isinstance(plan, Plan):
            raise MisuseError(f"Expected a plan from tfdp.make_plan. Received: {type(plan).__name__}.")
        sums_function(method, hybrid)
        self.plan = plan
        self.ledger_path = os.fspath(ledger)
        self._method, self._hybrid = method, hybrid
        self._jit_compile = is_compiled(jit_compile)
        prng_seed = system_bits(63) if plan.seed is None else plan.seed
        self._noise = GaussianNoise(plan.rng, prng_seed if plan.rng == "prng" else None)
        self._ledger: Ledger | None = None
        self._train_step: PrivateTrainStep | None = None
        self._jit_compile_before: Any = None
        self._resumable = ResumableRun(checkpoint, save_freq)
        self._interrupts = FitInterrupts()
        self._run: Any = None
        self._began_with: tuple[Any, list[Any]] = (None, [])
        self._epoch_begins = True
        self._steps_seen = 0
        self._stepped = False
        self._ended: str | None = None

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise MisuseError(
            "Expected one callback for a ledger. Received: a copy of it, by copy or pickle: both would count the same "
            "steps. Make another with tfdp.PrivacyCallback(plan, ledger=...) where it is needed."
        )

    # What Keras calls, in its order.

    def set_model(self, model: Any) -> None:
        """Installs the private train step; Keras makes its train function from it before the fit begins."""
        super().set_model(model)
        for other in _active_where(lambda each: each.model is model):
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
            check_units=self._check_units,
        )
        self._jit_compile_before, model.jit_compile = model.jit_compile, False
        object.__setattr__(model, "train_step", self._train_step)  # past Keras's tracking of attributes
        model.train_function = None
        with _looking_at_active:
            _active.add(self)

    def on_train_begin(self, logs: Any = None) -> None:
        """Checks everything that can be checked before data is seen, and opens the ledger."""
        model = self.model
        try:
            self._stepped = False
            self._check_alone()
            self._uninstall_step()
            check_plan(self.plan)
            check_compiled_model(model, self.plan, method=self._method, hybrid=self._hybrid)
            strategy = strategy_of(model)
            for other in _active_where(lambda each: each is not self and each._same_ledger(self)):
                other._end()
            ledger = self._ledger = Ledger.create_or_open(self.ledger_path, self.plan.to_dict())
            register(self.plan, ledger)
            record_accesses(ledger)
            self._closing = weakref.finalize(self, ledger.close)  # should both be forgotten after an exception
            check_history(model, ledger, _trained_under.get(model))
            if not model.optimizer.built:  # inside the step it would be traced twice
                model.optimizer.build(model.trainable_variables)
            self._go_on(model, ledger)
            if self.plan.rng == "csprng":
                reseed(model)
            self._interrupts.begin(keras_private.fit_runs(model))
            how = gradients_taken(model, self.plan, self._method, self._hybrid, strategy)
            ledger.append("fit_begin", steps_before=ledger.steps, **how)
            self._began_with = model.optimizer, list(model.trainable_variables)
            self._run = model.train_function = self._guarded(model.train_function, strategy)
        except BaseException:
            self._end()
            raise

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        try:
            self._hear_interrupt()
            self._check_budget()
            self._check_installed()
            if self._epoch_begins:  # not at every step: it walks through all layers
                check_unchanged(self.model, *self._began_with)
                self._epoch_begins = False
            assert self._ledger is not None
            assert self._train_step is not None
            if not self._stepped:  # a callback that came after this one may have restored another state
                check_history(self.model, self._ledger, _trained_under.get(self.model))
            step = self._ledger.steps + 1
            self._ledger.append_step(step)
            _trained_under[self.model] = self._ledger.identity
            self._train_step.admit(step, self._ledger.clip_norm)
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
        if self._ledger is not None:
            self._release()
            self._save(self._resumable.after_update)
            if self._resumable.reason_to_stop(self.model, self.plan, self._ledger) is not None:
                self.model.stop_training = True
        self._hear_interrupt()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._resumable.begin_epoch(epoch)
        self._epoch_begins = True
        self._hear_interrupt()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._report(logs)
        self._record("epoch_end")
        self._save(self._resumable.after_epoch)
        self._hear_interrupt()

    def on_train_end(self, logs: Any = None) -> None:
        if self._ledger is not None:
            self._ended = self._save(self._resumable.end, stepped=self._stepped)
            self._record("fit_end", ended=self._ended)
            updates = int(self.model.optimizer.iterations.numpy())
            self._tell(
                f"The private run ended: {self._ended}. {updates} updates are in the model, "
                f"{self._ledger.steps} of {self.plan.steps} steps are spent."
            )
            self._save(lambda model, plan, ledger: note_head(plan, ledger))
        self._end(interrupted=False)
        if self._interrupts.noted:  # since the last step: the fit is complete
            raise KeyboardInterrupt

    def on_test_begin(self, logs: Any = None) -> None:
        if self._ledger is None:  # evaluate(callbacks=[...]) on its own
            self._end()

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self._hear_interrupt()  # validation may take longer than an epoch

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
    def ended(self) -> str | None:
        """Which end the last fit met: "planned steps", "budget", "stopped" (by another callback); None before that."""
        return self._ended

    @property
    def traces(self) -> int:
        """How often the train step of the current or last fit was traced; 0 under `run_eagerly`."""
        return 0 if self._train_step is None else self._train_step.traces

    # How it is done.

    def _check_alone(self) -> None:
        """Whether the train function that Keras made is this callback's."""
        if vars(self.model).get("train_step") is self._train_step:
            return
        for other in _active_where(lambda each: each.model is self.model):
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

    def _go_on(self, model: Any, ledger: Ledger) -> None:
        """Restores the checkpoint where there is one; refuses a run of which nothing is left."""
        asked = self.params or {}
        told = self._resumable.begin(
            model,
            self.plan,
            ledger,
            epochs=asked.get("epochs", 1),
            steps=asked.get("steps"),
            trained_here=_trained_under.get(model) == ledger.identity,
        )
        if told is not None:
            _trained_under[model] = ledger.identity
            self._tell(told)
        if not self._resumable.over:
            self._check_budget()

    def _check_units(self, partition: bytes) -> None:
        """Whether the records belong to the units that the earlier fits on this ledger saw."""
        if read_ledger(self.ledger_path).of_kind("units"):
            check_remembered_units(self.ledger_path, partition)
        elif self._ledger is not None:
            remember_units(self.ledger_path, partition)
            self._ledger.append("units")

    def _release(self) -> None:
        """Hands the noisy count of the step that has run to the ledger, whose next clip norm follows it."""
        if self._ledger is not None and self._train_step is not None and self._train_step.noisy_fraction is not None:
            self._ledger.release(self._train_step.noisy_fraction)
            self._train_step.noisy_fraction = None

    def _save(self, when: Callable[..., Any], **options: Any) -> Any:
        try:
            return None if self._ledger is None else when(self.model, self.plan, self._ledger, **options)
        except BaseException:
            self._end()
            raise

    def _tell(self, text: str) -> None:
        if self._resumable.directory is not None and (self.params or {}).get("verbose"):
            print(text, flush=True)

    def _record(self, kind: str, **fields: Any) -> None:
        """Notes a point of the fit, with the weights that it left; a fit without a step vouches for no weights."""
        if self._ledger is not None:
            weights = {"weights": sha256_arrays(self.model.get_weights())} if self._stepped else {}
            self._ledger.append(kind, steps=self._ledger.steps, **weights, **fields)

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
                f"{self.ledger_path}, epsilon {rounded_up(self.plan.epsilon(steps), 4)} of "
                f"{shown(self.plan.target_epsilon)} at delta {shown(self.plan.delta)}. The budget is spent: a "
                "further step needs a new, reviewed spec and its own ledger."
            )

    def _guarded(self, train_function: Any, strategy: Any | None) -> Any:
        train_step = self._train_step
        assert train_step is not None
        if strategy is not None:
            train_function = train_step.across(strategy)

        def run(iterator: Any) -> Any:
            try:
                with contextlib.nullcontext() if strategy is None else strategy.scope():
                    size = train_step.prepare(iterator)
                    if size is not None and self._ledger is not None:
                        self._ledger.append("microbatches", units=size)
                    with exact_products():
                        logs = train_function(iterator)
                        if not tf.config.experimental.get_synchronous_execution():
                            int(self.model.optimizer.iterations.numpy())  # waits until the step has run
                return logs
            except (StopIteration, tf.errors.OutOfRangeError):  # the data ended; the recorded step stays spent
                train_step.revoke()
                raise
            except BaseException:
                self._end()
                if train_step.refusal is not None:
                    raise train_step.refusal from None
                raise

        return run

    def _hear_interrupt(self) -> None:
        """Between two steps: ends the fit where Ctrl-C was noted, with all of it saved."""
        if self._ledger is None or not self._interrupts.noted:
            return
        if self._stepped:
            with contextlib.suppress(LedgerError):  # the interrupt is what has to be heard
                self._resumable.interrupted(self.model, self.plan, self._ledger)
        self._end()
        raise KeyboardInterrupt

    def _report(self, logs: Any) -> None:
        if isinstance(logs, dict):
            logs["epsilon"] = self.plan.epsilon_bound(self.steps)
            if self.plan.adaptive_clipping is not None and self._ledger is not None:
                logs["clip_norm"] = self._ledger.clip_norm

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
        if self._ledger is not None:
            self._resumable.leave(self.model)
        if self._train_step is not None:
            self._train_step.revoke()
        if self._ledger is not None:
            self._steps_seen = self._ledger.steps
            if interrupted and not self._ledger.closed:
                # What is not written here, no claim will count on; the error that ended the fit is the one to be heard.
                with contextlib.suppress(LedgerError):
                    if self._stepped:
                        self._record("fit_interrupted")
                with contextlib.suppress(TfdpError):
                    note_head(self.plan, self._ledger)
            self._ledger.close()
            self._ledger = None
        self._interrupts.end()
        with _looking_at_active:
            _active.discard(self)


def _active_where(matches: Callable[[PrivacyCallback], bool]) -> list[PrivacyCallback]:
    with _looking_at_active:
        return [each for each in _active if matches(each)]
