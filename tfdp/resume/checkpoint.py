"""A checkpoint: what is trained, the optimizer, and where the run and its ledger stood.

One file, an archive of NumPy arrays, that is written whole or not at all. Not `model.save_weights`: with LoRA that
folds the adapters into the kernels and loses them. What is not trained is not in it: it is public, and comes with the
model. Neither is any seed or generator state: after a restore everything is drawn anew.
"""

from __future__ import annotations

import dataclasses
import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tfdp.errors import DataError, LedgerError
from tfdp.files import atomic_file, sha256_arrays
from tfdp.ledger import Ledger, LedgerHead, read_ledger
from tfdp.plan import Plan

FILE = "checkpoint.npz"
_FORMAT = "1.0"
_ABOUT = "about.json"


@dataclasses.dataclass(frozen=True)
class Position:
    """Where a fit stood.

    Attributes:
        fit: which fit on this ledger its process was in, from 1; those that were interrupted are not counted.
        first_epoch: number of its first epoch, as Keras counts; None before it began.
        updates_before: updates of the optimizer when the fit began.
        ended: why it ended, None while it runs; see `tfdp.resume.run`.
    """

    fit: int = 1
    first_epoch: int | None = None
    updates_before: int = 0
    ended: str | None = None


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds.

    Attributes:
        path: where it was read.
        plan: digest of the plan.
        ledger: identity of the ledger.
        head: the ledger contained this when the checkpoint was made.
        steps: on that ledger.
        updates: of the optimizer.
        position: of the fit.
        arrays: by "weight:0", ..., "optimizer:0", ...
    """

    path: Path
    plan: str
    ledger: str
    head: LedgerHead
    steps: int
    updates: int
    position: Position
    arrays: Mapping[str, np.ndarray] = dataclasses.field(repr=False)


def write_checkpoint(
    directory: str | os.PathLike[str], model: Any, plan: Plan, ledger: Ledger, position: Position
) -> Path:
    """Writes a checkpoint in the place of the one that is there, which stays until the new one is whole.

    The digest of the weights goes to the ledger first, so that it can be told which weights the run left.

    Raises:
        LedgerError: the ledger takes no line, or the checkpoint cannot be written; the one before is as it was.
    """
    ledger.append("checkpoint", steps=ledger.steps, weights=sha256_arrays(model.get_weights()))
    about = {
        "format": _FORMAT,
        "plan": plan.digest,
        "ledger": ledger.identity,
        "head": dataclasses.asdict(ledger.head),
        "steps": ledger.steps,
        "updates": int(model.optimizer.iterations.numpy()),
        "position": dataclasses.asdict(position),
    }
    path = Path(directory) / FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for left in path.parent.glob(f".{FILE}.*.tmp"):  # by a process that was killed while it wrote
            left.unlink(missing_ok=True)
        with atomic_file(path) as file, zipfile.ZipFile(file, "w") as archive:
            archive.writestr(_ABOUT, json.dumps(about))
            for name, variable in _variables(model).items():  # one array at a time in memory
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, _array(variable), allow_pickle=False)
    except OSError as error:
        raise LedgerError(
            f"Expected {path.parent} to take a checkpoint. Received: {error.strerror or error}. Free space or fix the "
            "permissions, then run again: the run goes on from the checkpoint before; spent steps stay spent."
        ) from error
    return path


def read_checkpoint(directory: str | os.PathLike[str]) -> Checkpoint | None:
    """The checkpoint in a directory, None where there is none.

    Raises:
        LedgerError: it is damaged.
    """
    path = Path(directory) / FILE
    if not path.exists():
        return None
    try:
        with zipfile.ZipFile(path) as archive:
            about = json.loads(archive.read(_ABOUT))
        with np.load(path, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files if name != _ABOUT}
        if about["format"] != _FORMAT:
            raise ValueError(f"format {about['format']!r}")
        return Checkpoint(
            path=path,
            plan=str(about["plan"]),
            ledger=str(about["ledger"]),
            head=LedgerHead(**about["head"]),
            steps=int(about["steps"]),
            updates=int(about["updates"]),
            position=Position(**about["position"]),
            arrays=arrays,
        )
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise LedgerError(
            f"Expected a checkpoint in {path}. Received: {type(error).__name__}. Delete it to go on from the starting "
            "weights; the steps in the ledger stay spent."
        ) from error


def restore(checkpoint: Checkpoint, model: Any, plan: Plan, ledger: str | os.PathLike[str]) -> None:
    """Puts a checkpoint into a compiled model, once everything about it was checked.

    Raises:
        LedgerError: it is of another plan or ledger, or the ledger has lost lines, or the weights are not ones that the
            ledger recorded.
        DataError: it is of another model.
    """
    path = checkpoint.path
    if checkpoint.plan != plan.digest:
        raise LedgerError(
            f"Expected a checkpoint of plan {plan.digest[:12]} in {path}. Received: one of {checkpoint.plan[:12]}. "
            "Continue with the spec that it was made under, or use another directory."
        )
    record = read_ledger(ledger)
    if checkpoint.ledger != record.identity:
        raise LedgerError(
            f"Expected {path} to belong to {ledger}. Received: a checkpoint of another ledger, whose steps this one "
            "does not count. Continue that ledger, or use another directory."
        )
    if not record.contains(checkpoint.head):
        raise LedgerError(
            f"Expected {ledger} to hold the {checkpoint.head.lines} lines that it had when {path} was written. "
            f"Received: {record.head.lines} lines, or others. Spent steps were cut off or changed: restore the ledger "
            "from a copy. Without it nothing can be claimed for this run."
        )
    model.optimizer.build(model.trainable_variables)
    targets, arrays = _variables(model), checkpoint.arrays
    if {name: value.shape for name, value in arrays.items()} != {name: tuple(v.shape) for name, v in targets.items()}:
        raise DataError(
            f"Expected {path} to hold the weights of this model. Received: other weights. Continue with the model, the "
            "LoRA rank and the optimizer that the run was begun with, or use another directory."
        )
    trained = {id(variable): arrays[name] for name, variable in targets.items() if name.startswith("weight")}
    after = (trained.get(id(v), own).astype(own.dtype) for v in model.weights for own in (np.asarray(v),))
    if not record.left(sha256_arrays(after)):
        raise LedgerError(
            f"Expected {path} with the model to give weights that {ledger} recorded. Received: others. Either the "
            "checkpoint was changed, or weights that are not trained differ from those of the run: build the model "
            "from the same public weights, or delete the checkpoint to go on from the starting weights."
        )
    for name, variable in targets.items():
        variable.assign(arrays[name])


def _array(variable: Any) -> np.ndarray:
    value = np.asarray(variable)
    return value.astype(np.float32) if value.dtype.kind == "V" else value  # bfloat16, which NumPy cannot store


def _variables(model: Any) -> dict[str, Any]:
    """What a step changes, under names that are unique. The learning rate is the caller's."""
    state = [variable for variable in model.optimizer.variables if variable.name != "learning_rate"]
    listed = {"weight": model.trainable_variables, "optimizer": state}
    return {f"{kind}:{index}": v for kind, variables in listed.items() for index, v in enumerate(variables)}
