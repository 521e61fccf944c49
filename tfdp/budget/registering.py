"""What is put on the ledger of a data set: runs before their first step, how far they came, and declared trials."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfdp import accounting
from tfdp.budget.file import Lines, append_line, create, ledger_of
from tfdp.budget.runs import DatasetBudget, budget_of, read_budget
from tfdp.entropy import system_generator
from tfdp.errors import BudgetExhaustedError, LedgerError, MisuseError
from tfdp.ledger import Ledger, LedgerHead, read_ledger, timestamp
from tfdp.plan import Plan
from tfdp.review import RELATIVE_SLACK
from tfdp.spec.numbers import rounded_up, shown

WARN_FROM = 0.8


def register(plan: Plan, ledger: Ledger) -> DatasetBudget | None:
    """Puts a run on the ledger that its spec names, before its first step; None where the spec names none.

    A run that is on it already is not put there twice; how far it had come is noted. All that the run was planned with
    must fit under the cap.

    Raises:
        BudgetExhaustedError: with this run the cap could be exceeded (PS032).
        MisuseError: another data set, privacy unit or adjacency (PS034).
        LedgerError: the ledger cannot be written, or is damaged, or the run's own has lost lines that it had.
    """
    path = ledger_of(plan)
    if path is None:
        return None

    def entry(entries: Lines) -> dict[str, Any] | None:
        found = budget_of(path, entries)
        more = [] if found.counts_as_trial(plan, ledger.identity) else [(plan.step_event, plan.steps)]
        _refuse_above_cap(found, plan, more, without=ledger.identity)
        if any(run.identity == ledger.identity for run in found.runs):
            return _head_entry(path, entries, ledger)
        return {"kind": "run", "began": timestamp(), "plan": _fields(plan), **_place(ledger)}

    create(path, plan)
    append_line(path, plan, entry)
    return read_budget(path)


def note_head(plan: Plan, ledger: Ledger) -> None:
    """Notes how far the ledger of a registered run has come: lines that are cut off it later are missed.

    Raises:
        LedgerError: the data set's ledger cannot be written, is damaged or does not know the run.
    """
    path = ledger_of(plan)
    if path is not None:
        append_line(path, plan, lambda entries: _head_entry(path, entries, ledger))


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
    path = ledger_of(plan)
    if path is None:
        raise MisuseError("Expected a spec with budget.ledger, on which the trials are declared. Received one without.")
    selection = accounting.Selection(plan.step_event, plan.steps, mean, shape)
    if shape not in (1.0, math.inf):
        raise MisuseError(f"Expected shape 1 (geometric) or infinity (Poisson). Received: shape={shape}.")
    generator = system_generator()
    count = int(generator.geometric(1 / mean) if shape == 1.0 else generator.poisson(mean))

    def entry(entries: Lines) -> dict[str, Any]:
        found = budget_of(path, entries)
        _refuse_above_cap(dataclasses.replace(found, selections=(*found.selections, selection)), plan, [], without=None)
        drawn = {"mean": mean, "shape": "infinity" if math.isinf(shape) else shape, "count": count}
        return {"kind": "trials", "declared": timestamp(), "plan": _fields(plan), **drawn}

    create(path, plan)
    append_line(path, plan, entry)
    return count


def _fields(plan: Plan) -> dict[str, Any]:
    return {name: value for name, value in plan.to_dict().items() if name != "spec"}


def _place(ledger: Ledger) -> dict[str, Any]:
    """Which ledger it is, where, and how far it has come."""
    head = dataclasses.asdict(ledger.head)
    return {"ledger": os.path.abspath(ledger.path), "identity": ledger.identity, "head": head}


def _head_entry(path: Path, entries: Lines, ledger: Ledger) -> dict[str, Any] | None:
    """The line that says how far a registered run has come; None where the last one about it says the same."""
    about = [entry for entry in entries if entry.get("identity") == ledger.identity]
    if not about:
        raise LedgerError(
            f"Expected {path} to know the run of {ledger.path}, which it was begun under. Received: a ledger without "
            "it. The data set's ledger was exchanged: restore it from a copy."
        )
    before = LedgerHead(**about[-1]["head"])
    if not read_ledger(ledger.path).contains(before):
        raise LedgerError(
            f"Expected {ledger.path} to hold the {before.lines} lines of which {path} knows. Received: "
            f"{ledger.head.lines} lines, or others. Spent steps were cut off or changed: restore the ledger from a "
            "copy. Without it nothing can be claimed for this run."
        )
    place = _place(ledger)
    if place == {name: about[-1][name] for name in place}:
        return None
    return {"kind": "head", "noted": timestamp(), **place}


def _refuse_above_cap(found: DatasetBudget, plan: Plan, more: Sequence[accounting.Run], *, without: str | None) -> None:
    budget = plan.spec.budget
    assert budget is not None
    if budget.epsilon_cap is None:
        return
    delta = plan.delta if budget.delta_cap is None else budget.delta_cap
    total = found.epsilon(delta, more=more, without=without)
    others = found.epsilon(delta, without=without)
    told = (
        f"epsilon {rounded_up(total)} at delta {shown(delta)} for {found.dataset_id!r}: {rounded_up(others)} by "
        "others, and this"
    )
    if not total <= budget.epsilon_cap * (1 + RELATIVE_SLACK):
        raise BudgetExhaustedError(
            f"PS032: expected at most epsilon {shown(budget.epsilon_cap)}. Received: {told}. Plan fewer steps or more "
            "noise, or have the cap of the data set reviewed. `tfdp budget show` lists the runs."
        )
    if not total <= WARN_FROM * budget.epsilon_cap:
        logging.getLogger("tfdp").warning(
            "PS033: %s is %.0f%% of the cap %s.", told, 100 * total / budget.epsilon_cap, shown(budget.epsilon_cap)
        )
