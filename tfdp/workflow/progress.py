"""Callbacks of a job: how long it will still take, and a checkpoint to continue from."""

from __future__ import annotations

import io
import os
import time
import zipfile
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tfdp.errors import DataError, LedgerError
from tfdp.files import atomic_write_bytes
from tfdp.plan import Plan


class RemainingTime(keras.callbacks.Callback):
    """Says between two epochs how far the run is and how long the rest will take.

    The first step is left out of the estimate: it includes tracing.
    """

    def __init__(self, plan: Plan, steps_before: int = 0):
        super().__init__()
        self._plan = plan
        self._steps = steps_before
        self._timed = 0
        self._since = 0.0
        self._epsilon: float | None = None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._steps += 1
        if not self._since:
            self._since = time.monotonic()
        else:
            self._timed += 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._epsilon = (logs or {}).get("epsilon")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        left = self._plan.steps - self._steps
        if left <= 0 or not self._timed:
            return
        seconds = (time.monotonic() - self._since) / self._timed * left
        cost = "" if self._epsilon is None else f", epsilon {self._epsilon:.3g} of {self._plan.target_epsilon:g}"
        print(f"{self._steps} of {self._plan.steps} steps{cost}; about {duration(seconds)} to go.", flush=True)


class Checkpoint(keras.callbacks.Callback):
    """Writes what is trained, and the optimizer, after every epoch, so that a run that was stopped can go on.

    Not `model.save_weights`: with LoRA that folds the adapters into the kernels and loses them.
    """

    def __init__(self, path: str | os.PathLike[str], plan: Plan, steps_before: int = 0):
        super().__init__()
        self.path = Path(path)
        self._plan = plan
        self._steps = steps_before

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._steps += 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        stream = io.BytesIO()
        arrays = {name: _array(v) for name, v in _variables(self.model).items()}
        marks: dict[str, Any] = {"plan": np.array(self._plan.digest), "steps": np.array(self._steps)}
        np.savez(stream, allow_pickle=False, **marks, **arrays)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_bytes(self.path, stream.getvalue())


def restore_checkpoint(path: str | os.PathLike[str], model: Any, plan: Plan) -> int:
    """Puts a checkpoint into a compiled model; returns the number of steps that it has seen.

    Raises:
        LedgerError: it is damaged, or of another plan.
        DataError: it is of another model.
    """
    model.optimizer.build(model.trainable_variables)
    targets = _variables(model)
    try:
        with np.load(path, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
        digest, steps = str(arrays.pop("plan")), int(arrays.pop("steps"))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise LedgerError(
            f"Expected a checkpoint in {path}. Received: {type(error).__name__}. Delete it to go on from the starting "
            "weights; "
            "the steps in the ledger stay spent."
        ) from error
    if digest != plan.digest:
        raise LedgerError(
            f"Expected a checkpoint of plan {plan.digest[:12]} in {path}. Received: one of {digest[:12]}. "
            "Continue with the spec that it was made under, or use another directory."
        )
    if {name: value.shape for name, value in arrays.items()} != {name: tuple(v.shape) for name, v in targets.items()}:
        raise DataError(
            f"Expected {path} to hold the weights of this model. Received: other weights. Continue with the model, the "
            "LoRA rank and the optimizer that the run was begun with, or use another directory."
        )
    for name, variable in targets.items():
        variable.assign(arrays[name])
    return steps


def duration(seconds: float) -> str:
    """A length of time, as one would say it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def _array(variable: Any) -> np.ndarray:
    value = np.asarray(variable)
    return value.astype(np.float32) if value.dtype.kind == "V" else value  # bfloat16, which NumPy cannot store


def _variables(model: Any) -> dict[str, Any]:
    """What a step changes, under names that are unique. The learning rate is the caller's."""
    state = [variable for variable in model.optimizer.variables if variable.name != "learning_rate"]
    listed = {"weight": model.trainable_variables, "optimizer": state}
    return {f"{kind}:{index}": v for kind, variables in listed.items() for index, v in enumerate(variables)}
