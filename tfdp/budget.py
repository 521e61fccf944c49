"""The ledger of a data set: every run on it, and what all of them have spent together.

| guarantee                                         | how                                                            |
|---------------------------------------------------|----------------------------------------------------------------|
| a run is on it before its first step              | `register` appends, flushed to the disk, before the fit begins |
| failed and discarded runs count                   | by the steps on their own ledgers                              |
| a run whose ledger is gone, cut or changed counts | with all the steps that it was planned with                    |
| a run that is going on counts                     | with all its planned steps; the lock on its ledger tells       |
| runs that cannot be added up are refused          | one privacy unit and one adjacency for a ledger (PS034)        |
| the cap holds beforehand                          | a run that could exceed it does not begin (PS032)              |
| trials of which only the best is kept cost less   | `declare_trials` draws how many there are, before the first    |

The runs compose under one accountant (`tfdp.accounting.composed_epsilon`), whichever each was planned with. Trials of
hyper-parameters are runs like any other. The file is a chain of lines like the ledger of a run, with the same limits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tfdp import accounting
from tfdp.errors import BudgetExhaustedError, LedgerError, MisuseError
from tfdp.files import create_atomically
from tfdp.ledger import Ledger, read_ledger, timestamp
from tfdp.ledger.lines import FIRST, chain, encode, refuse
from tfdp.ledger.locking import FileLock, is_locked
from tfdp.plan import Plan
from tfdp.review import RELATIVE_SLACK
from tfdp.spec import PrivacySpec

FORMAT = "dataset-1.0"
WARN_FROM = 0.8
_PATIENCE = 10.0  # seconds for another run to register


@dataclasses.dataclass(frozen=True)
class RegisteredRun:
    """One run on the data set.

    Attributes:
        ledger: path of its own ledger when it began.
        identity: of that ledger.
        plan: the fields of its plan that accounting needs.
        began: when it was registered.
        steps: that count.
        state: "spent", "running", or why its planned steps count: "ledger missing", "ledger changed".
        trial: it is one of declared trials, which are counted as a selection.
    """

    ledger: str
    identity: str
    plan: dict[str, Any]
    began: str
    steps: int
    state: str
    trial: bool = False

    @property
    def event(self) -> Any:
        return accounting.event_from_dict(self.plan["step_event"])


@dataclasses.dataclass(frozen=True)
class DatasetBudget:
    """What a data set's ledger says.

    Attributes:
        path: the ledger.
        dataset_id: the data set.
        currency: privacy unit and adjacency, in words: the same for all runs.
        runs: in the order in which they began.
        selections: declared trials, of which only the best is kept.
        open_trials: digest of a plan, to how many declared trials of it have not begun.
    """

    path: Path
    dataset_id: str
    currency: dict[str, Any]
    runs: tuple[RegisteredRun, ...]
    selections: tuple[accounting.Selection, ...]
    open_trials: dict[str, int]

    def epsilon(self, delta: float, *, more: Sequence[accounting.Run] = (), without: str | None = None) -> float:
        """Of all runs together, and of `more`; `without`: identity of a run that is left out."""
        runs = [(run.event, run.steps) for run in self.runs if run.identity != without and not run.trial]
        return accounting.composed_epsilon(
            [*runs, *more], delta=delta, adjacency=self.currency["adjacency"], selections=self.selections
        )[0]

    def counts_as_trial(self, plan: Plan, identity: str) -> bool:
        """Whether a run under this plan is, or will be, one of declared trials."""
        known = [run for run in self.runs if run.identity == identity]
        return known[0].trial if known else self.open_trials.get(plan.digest, 0) > 0


def currency_of(spec: PrivacySpec) -> dict[str, Any]:
    """What an epsilon is about: epsilons add up only where all of this is the same."""
    unit = spec.claim.privacy_unit
    return {
        "unit": unit.kind,
        "id_field": unit.id_field,
        "max_records_per_unit": unit.max_records_per_unit,
        "adjacency": spec.claim.adjacency,
    }


def read_budget(path: str | os.PathLike[str]) -> DatasetBudget:
    """Reads a data set's ledger, and the ledgers of its runs.

    Raises:
        LedgerError: it is not there, or its lines do not follow from one another.
    """
    path = Path(path)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise LedgerError(
            f"Expected the ledger of a data set at {path}, received: {error.strerror or error}. A fit under a spec "
            "with budget.ledger makes it."
        ) from error
    return _read(path, raw)[0]


def register(plan: Plan, ledger: Ledger) -> DatasetBudget | None:
    """Puts a run on the ledger that its spec names, before its first step; None where the spec names none.

    A run that is on it already is not put there twice. All that the run was planned with must fit under the cap.

    Raises:
        BudgetExhaustedError: with this run the cap could be exceeded (PS032).
        MisuseError: another data set, privacy unit or adjacency (PS034).
        LedgerError: the ledger cannot be written, or is damaged.
    """
    budget = plan.spec.budget
    if budget is None or budget.ledger is None:
        return None

    def entry(found: DatasetBudget) -> dict[str, Any] | None:
        more = [] if found.counts_as_trial(plan, ledger.identity) else [(plan.step_event, plan.steps)]
        _refuse_above_cap(found, plan, more, without=ledger.identity)
        if any(run.identity == ledger.identity for run in found.runs):
            return None
        return {
            "kind": "run",
            "began": timestamp(),
            "ledger": os.path.abspath(ledger.path),
            "identity": ledger.identity,
            "plan": _fields(plan),
        }

    _append(Path(budget.ledger), plan, entry)
    return read_budget(budget.ledger)


def declare_trials(plan: Plan, mean: float, shape: float = 1.0) -> int:
    """Draws a number of trials under a plan, of which only the best one will be looked at, and puts them on the ledger.

    The next runs under the plan, as many as were drawn, are these trials. They are accounted by the theorem of Papernot
    and Steinke (see `tfdp.accounting.selected_epsilon`), which holds as long as nothing of the others is ever released.

    Args:
        plan: of each trial; what is tried, such as the learning rate, is no part of it.
        mean: of the number of trials, above 1.
        shape: of its distribution: 1 geometric, infinity Poisson.

    Returns:
        How many trials to run; with a Poisson distribution it may be none.

    Raises:
        MisuseError: the spec names no ledger, or another shape.
        BudgetExhaustedError: with them the cap could be exceeded.
    """
    budget = plan.spec.budget
    if budget is None or budget.ledger is None:
        raise MisuseError("Expected a spec with budget.ledger, on which the trials are declared. Received one without.")
    selection = accounting.Selection(plan.step_event, plan.steps, mean, shape)
    if shape not in (1.0, math.inf):
        raise MisuseError(f"Expected shape 1 (geometric) or infinity (Poisson). Received: shape={shape}.")
    # From operating-system entropy, by numpy's exact samplers.
    generator = np.random.default_rng(secrets.randbits(128))
    count = int(generator.geometric(1 / mean) if shape == 1.0 else generator.poisson(mean))

    def entry(found: DatasetBudget) -> dict[str, Any]:
        _refuse_above_cap(dataclasses.replace(found, selections=(*found.selections, selection)), plan, [], without=None)
        drawn = {"mean": mean, "shape": "infinity" if math.isinf(shape) else shape, "count": count}
        return {"kind": "trials", "declared": timestamp(), "plan": _fields(plan), **drawn}

    _append(Path(budget.ledger), plan, entry)
    return count


def _fields(plan: Plan) -> dict[str, Any]:
    return {name: value for name, value in plan.to_dict().items() if name != "spec"}


def _append(path: Path, plan: Plan, make: Callable[[DatasetBudget], dict[str, Any] | None]) -> None:
    """Adds the line that `make` gives for what is there; the ledger is locked from reading to writing."""
    budget = plan.spec.budget
    assert budget is not None
    if not path.exists():
        _create(path, budget.dataset_id, currency_of(plan.spec))
    with _locked(path) as stream:
        raw = path.read_bytes()
        found, tail, previous = _read(path, raw)
        _refuse_other(found, budget.dataset_id, currency_of(plan.spec))
        entry = make(found)
        if entry is None:
            return
        # A torn line was never followed by a step: the run that wrote it stopped before it began.
        stream.seek(len(raw) - len(tail))
        stream.truncate()
        try:
            stream.write(encode({**entry, "prev": previous}) + b"\n")
            stream.flush()
            os.fsync(stream.fileno())
        except OSError as error:
            raise _disk_error(path, error) from error


def _create(path: Path, dataset_id: str, currency: dict[str, Any]) -> None:
    header = {"kind": "header", "format": FORMAT, "created": timestamp(), "dataset_id": dataset_id, "prev": FIRST}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        create_atomically(path, encode({**header, "currency": currency}) + b"\n")
    except FileExistsError:
        pass
    except OSError as error:
        raise _disk_error(path, error) from error


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[Any]:
    until = time.monotonic() + _PATIENCE
    try:
        stream = open(path, "r+b")  # noqa: SIM115 - closed below
    except OSError as error:
        raise _disk_error(path, error) from error
    with stream:
        while True:
            try:
                lock = FileLock(stream.fileno(), path)
                break
            except LedgerError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)
        try:
            yield stream
        finally:
            lock.forget()


def _read(path: Path, raw: bytes) -> tuple[DatasetBudget, bytes, str]:
    """The budget, what a torn last line left, and the hash that the next line carries."""

    def check(number: int, entry: dict[str, Any]) -> None:
        kind = entry.get("kind")
        if number == 1 and (kind, entry.get("format")) != ("header", FORMAT):
            refuse(path, number, f"the header of a data set's ledger, format {FORMAT!r}", f"kind={kind!r}")
        if number > 1 and kind not in ("run", "trials"):
            refuse(path, number, "a run or trials", f"kind={kind!r}")

    entries, previous, tail = chain(path, raw, check)
    if not entries:
        refuse(path, 1, "the header of a data set's ledger", f"{len(raw)} bytes without one")
    header, runs, selections = entries[0], [], []
    open_trials: dict[str, int] = {}
    for entry in entries[1:]:
        plan, digest = entry["plan"], entry["plan"]["digest"]
        if entry["kind"] == "trials":
            event = accounting.event_from_dict(plan["step_event"])
            selections.append(accounting.Selection(event, plan["steps"], entry["mean"], float(entry["shape"])))
            open_trials[digest] = open_trials.get(digest, 0) + entry["count"]
            continue
        trial = open_trials.get(digest, 0) > 0
        open_trials[digest] = open_trials.get(digest, 0) - trial
        steps, state = _steps(entry)
        runs.append(RegisteredRun(entry["ledger"], entry["identity"], plan, entry["began"], steps, state, trial))
    found = DatasetBudget(path, header["dataset_id"], header["currency"], tuple(runs), tuple(selections), open_trials)
    return found, tail, previous


def _steps(entry: dict[str, Any]) -> tuple[int, str]:
    planned, path = entry["plan"]["steps"], Path(entry["ledger"])
    if not path.exists():
        return planned, "ledger missing"
    try:
        record = read_ledger(path)
    except LedgerError:
        return planned, "ledger changed"
    if record.identity != entry["identity"]:
        return planned, "ledger changed"
    return (max(planned, record.steps), "running") if is_locked(path) else (record.steps, "spent")


def _refuse_other(found: DatasetBudget, dataset_id: str, currency: dict[str, Any]) -> None:
    if found.dataset_id != dataset_id:
        raise MisuseError(
            f"Expected {found.path} to be the ledger of {dataset_id!r}. Received: that of {found.dataset_id!r}. Name "
            "one ledger for one data set in budget.ledger."
        )
    if found.currency != currency:
        raise MisuseError(
            f"PS034: expected runs of one unit and adjacency in {found.path}, {_words(found.currency)}. Received: "
            f"{_words(currency)}. Such epsilons do not add up: keep a ledger for each."
        )


def _refuse_above_cap(found: DatasetBudget, plan: Plan, more: Sequence[accounting.Run], *, without: str | None) -> None:
    budget = plan.spec.budget
    assert budget is not None
    if budget.epsilon_cap is None:
        return
    delta = plan.delta if budget.delta_cap is None else budget.delta_cap
    total = found.epsilon(delta, more=more, without=without)
    others = found.epsilon(delta, without=without)
    told = f"epsilon {total:.6g} at delta {delta:g} for {found.dataset_id!r}: {others:.6g} by others, and this"
    if not total <= budget.epsilon_cap * (1 + RELATIVE_SLACK):
        raise BudgetExhaustedError(
            f"PS032: expected at most epsilon {budget.epsilon_cap:g}. Received: {told}. Plan fewer steps or more "
            "noise, or have the cap of the data set reviewed. `tfdp budget show` lists the runs."
        )
    if not total <= WARN_FROM * budget.epsilon_cap:
        logging.getLogger("tfdp").warning(
            "PS033: %s is %.0f%% of the cap %g.", told, 100 * total / budget.epsilon_cap, budget.epsilon_cap
        )


def _words(currency: dict[str, Any]) -> str:
    records = currency["max_records_per_unit"]
    named = f" by {currency['id_field']!r}" if currency["id_field"] else ""
    return f"{currency['unit']}{named}{f' of {records} records' if records else ''} under {currency['adjacency']}"


def _disk_error(path: Path, error: OSError) -> LedgerError:
    return LedgerError(
        f"Expected the data set's ledger {path} to take a line and keep it, received: {error.strerror or error}. No "
        "run may begin without its line: free space or fix the permissions, then run again."
    )
