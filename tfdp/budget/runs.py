"""The runs on a data set, as its ledger and their own ledgers tell."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfdp import accounting
from tfdp.budget.file import Lines, read_lines
from tfdp.errors import LedgerError
from tfdp.ledger import LedgerHead, read_ledger
from tfdp.ledger.locking import is_locked
from tfdp.plan import Plan


@dataclasses.dataclass(frozen=True)
class RegisteredRun:
    """One run on the data set.

    Attributes:
        ledger: path of its own ledger when a fit on it last began or ended.
        identity: of that ledger.
        head: that it had then.
        plan: the fields of its plan that accounting needs.
        began: when it was registered.
        steps: that count.
        state: "spent", "running", or why its planned steps count: "ledger missing", "ledger changed".
        trial: it is one of declared trials, which are counted as a selection.
    """

    ledger: str
    identity: str
    head: LedgerHead
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
    return budget_of(path, read_lines(path, raw)[0])


def budget_of(path: Path, entries: Lines) -> DatasetBudget:
    """What the lines say together with the ledgers of the runs."""
    header, runs, selections = entries[0], [], []
    open_trials: dict[str, int] = {}
    latest = {entry["identity"]: entry for entry in entries if entry["kind"] in ("run", "head")}
    for entry in entries[1:]:
        if entry["kind"] == "head":
            continue
        plan, digest = entry["plan"], entry["plan"]["digest"]
        if entry["kind"] == "trials":
            event = accounting.event_from_dict(plan["step_event"])
            selections.append(accounting.Selection(event, plan["steps"], entry["mean"], float(entry["shape"])))
            open_trials[digest] = open_trials.get(digest, 0) + entry["count"]
            continue
        trial = open_trials.get(digest, 0) > 0
        open_trials[digest] = open_trials.get(digest, 0) - trial
        identity = entry["identity"]
        ledger, head = latest[identity]["ledger"], LedgerHead(**latest[identity]["head"])
        steps, state = _steps(Path(ledger), identity, head, plan["steps"])
        runs.append(RegisteredRun(ledger, identity, head, plan, entry["began"], steps, state, trial))
    return DatasetBudget(path, header["dataset_id"], header["currency"], tuple(runs), tuple(selections), open_trials)


def _steps(path: Path, identity: str, head: LedgerHead, planned: int) -> tuple[int, str]:
    if not path.exists():
        return planned, "ledger missing"
    try:
        record = read_ledger(path)
    except LedgerError:
        return planned, "ledger changed"
    if record.identity != identity or not record.contains(head):
        return planned, "ledger changed"
    return (max(planned, record.steps), "running") if is_locked(path) else (record.steps, "spent")
