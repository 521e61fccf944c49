"""`tfdp budget`: what all runs on a data set have spent together."""

from __future__ import annotations

import json
import math
import pathlib
from typing import Annotated, Any

import typer

_EXAMPLE = """Examples:

```
tfdp budget show privacy.yaml
tfdp budget show budgets/mails.jsonl --delta 1e-6 --json
```
"""


def register(app: typer.Typer) -> None:
    """Adds the group."""
    group = typer.Typer(no_args_is_help=True, help="The budget that all runs on a data set share.")
    group.command("show", epilog=_EXAMPLE)(show)
    group.command("trials", epilog="Example:\n\n```\ntfdp budget trials privacy.yaml --mean 20\n```\n")(trials)
    app.add_typer(group, name="budget")


def show(
    path: Annotated[
        pathlib.Path,
        typer.Argument(metavar="SPEC|LEDGER", help="A spec with budget.ledger, or that ledger.", exists=True),
    ],
    delta: Annotated[
        float | None,
        typer.Option(help="Of all runs together; by default the spec's cap, or the largest of the runs."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the runs on a data set, failed and discarded ones among them, and what they cost together.

    A run whose ledger is missing or was changed counts with all the steps that it was planned with, and so does one
    that is going on. Exits with 1 when a cap of the spec is exceeded.
    """
    from tfdp.budget import WARN_FROM, read_budget
    from tfdp.review import RELATIVE_SLACK

    cap, ledger, cap_delta = None, path, None
    if path.suffix.lower() in (".yaml", ".yml", ".json"):
        from tfdp.spec import PrivacySpec

        stated = PrivacySpec.from_file(path).budget
        if stated is None or stated.ledger is None:
            raise typer.BadParameter(f"Expected a spec with budget.ledger. Received: {path}, without.")
        cap, ledger, cap_delta = stated.epsilon_cap, pathlib.Path(stated.ledger), stated.delta_cap
    found = read_budget(ledger)
    if delta is None:
        delta = cap_delta or max((run.plan["delta"] for run in found.runs), default=1e-5)
    if not 0 < delta < 1:
        raise typer.BadParameter(f"Expected --delta above 0 and below 1. Received: {delta}.")
    total = found.epsilon(delta)
    state = "no cap"
    if cap is not None:
        exceeded = not total <= cap * (1 + RELATIVE_SLACK)
        near = not total <= WARN_FROM * cap
        state = "PS032: over the cap" if exceeded else "PS033: nearly used up" if near else "within the cap"
    runs = [
        {
            "began": run.began,
            "ledger": run.ledger,
            "state": f"{run.state}, trial" if run.trial else run.state,
            "steps": run.steps,
            "planned_steps": run.plan["steps"],
            "epsilon": _number(_alone(run, delta, found)),
        }
        for run in found.runs
    ]
    if as_json:
        report = {
            "dataset_id": found.dataset_id,
            "currency": found.currency,
            "delta": delta,
            "epsilon": _number(total),
            "epsilon_cap": cap,
            "state": state,
            "runs": runs,
        }
        typer.echo(json.dumps(report, indent=2))
    else:
        _print(found, runs, total, delta, cap, state)
    raise typer.Exit(1 if state.startswith("PS032") else 0)


def trials(
    path: Annotated[pathlib.Path, typer.Argument(metavar="SPEC", help="The spec of each trial.", exists=True)],
    mean: Annotated[float, typer.Option(help="Mean number of trials, above 1.")],
    poisson: Annotated[
        bool, typer.Option("--poisson", help="A Poisson number of trials instead of a geometric one.")
    ] = False,
) -> None:
    """Draw how many trials of a spec to run, of which only the best one will ever be looked at.

    The number is drawn from the operating system's entropy and put on the data set's ledger; that many of the next runs
    under this spec then cost together little more than one of them (Papernot and Steinke 2022). What is tried, such as
    the learning rate, must be chosen without looking at the data. If more than the best is released, this count is
    wrong: run trials without declaring them, and they compose.
    """
    from tfdp.budget import declare_trials
    from tfdp.plan import make_plan
    from tfdp.spec import PrivacySpec

    if not (mean > 1 and math.isfinite(mean)):
        raise typer.BadParameter(f"Expected --mean above 1. Received: {mean}.")
    count = declare_trials(make_plan(PrivacySpec.from_file(path)), mean, math.inf if poisson else 1.0)
    typer.echo(f"Run {count} trials under {path}, release the best of them only, and nothing of the others.")


def _alone(run: Any, delta: float, found: Any) -> float:
    from tfdp import accounting

    return accounting.composed_epsilon([(run.event, run.steps)], delta=delta, adjacency=found.currency["adjacency"])[0]


def _number(epsilon: float) -> dict[str, Any]:
    return {"value": None if math.isinf(epsilon) else epsilon, "unbounded": math.isinf(epsilon)}


def _print(found: Any, runs: list[dict[str, Any]], total: float, delta: float, cap: float | None, state: str) -> None:
    from rich.console import Console
    from rich.table import Table

    from tfdp.findings import printable
    from tfdp.spec.numbers import rounded_up, shown

    table = Table(title=f"{printable(found.dataset_id)} at delta {shown(delta)}", title_justify="left")
    for column in ("began", "ledger", "state", "steps", "planned", "epsilon alone"):
        table.add_column(column, overflow="fold")
    for run in runs:
        alone = "unbounded" if run["epsilon"]["unbounded"] else rounded_up(run["epsilon"]["value"], 4)
        cells = (run["began"], printable(run["ledger"]), run["state"], run["steps"], run["planned_steps"], alone)
        table.add_row(*map(str, cells))
    console = Console(highlight=False, soft_wrap=False)
    console.print(table)
    lost = sum(run["state"].startswith("ledger") for run in runs)
    if lost:
        which = (
            "run counts as planned: its ledger is missing or was"
            if lost == 1
            else ("runs count as planned: their ledgers are missing or were")
        )
        console.print(f"{lost} {which} changed. Restored from a copy, it counts what was spent.", soft_wrap=True)
    of_cap = "" if cap is None else f" of {shown(cap)}"
    together = "unbounded" if math.isinf(total) else rounded_up(total, 4)
    console.print(f"all together: epsilon {together}{of_cap} at delta {shown(delta)}: {state}", markup=False)
