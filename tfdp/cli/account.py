"""`tfdp account` and `tfdp calibrate`: what a run costs, and how much noise a claim needs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tfdp.cli.accounted_run import Accountant, Adjacency, Run, Scheme, from_flags, from_spec

if TYPE_CHECKING:
    from dp_accounting import DpEvent

    from tfdp.accounting import Calibration

_ACCOUNT_EXAMPLE = """Examples:

```
tfdp account privacy.yaml
tfdp account --num-units 60000 --batch-size 256 --noise-multiplier 1.1 --steps 3515 --delta 1e-5
tfdp account --num-units 60000 --batch-size 256 --noise-multiplier 1.1 --steps 3515 --delta 1e-5 \\
    --records-per-unit 5 --json
```
"""
_CALIBRATE_EXAMPLE = """Examples:

```
tfdp calibrate privacy.yaml
tfdp calibrate --num-units 200000 --batch-size 1024 --steps 2000 --epsilon 3 --delta 1e-6
tfdp calibrate --num-units 1000 --scheme full_batch --steps 50 --epsilon 3 --delta 1e-4 --adjacency replace_one
```
"""


SpecArgument = Annotated[str | None, typer.Argument(metavar="SPEC", help="A privacy spec, instead of flags.")]
SpecOption = Annotated[str | None, typer.Option("--spec", metavar="PATH", help="The same, as an option.")]
NumUnits = Annotated[
    int | None,
    typer.Option(
        min=1, help="What is sampled from: units (records with --records-per-unit above 1).", show_default=False
    ),
]
BatchSize = Annotated[float | None, typer.Option(help="Expected batch size, q times --num-units.", show_default=False)]
Steps = Annotated[int | None, typer.Option(min=1, help="Noisy updates, not microbatches.", show_default=False)]
Delta = Annotated[float | None, typer.Option(help="Well below 1 / number of units.", show_default=False)]
AccountantOption = Annotated[
    Accountant, typer.Option("--accountant", help="pld is the tightest; prv is answered by pld.")
]
AdjacencyOption = Annotated[Adjacency, typer.Option("--adjacency", help="How neighbouring data sets differ.")]
SchemeOption = Annotated[Scheme, typer.Option("--scheme", help="How batches are drawn.")]
Truncated = Annotated[int | None, typer.Option(min=1, help="Largest batch of truncated_poisson.", show_default=False)]
RecordsPerUnit = Annotated[
    int, typer.Option(min=1, help="Most records of one unit: above 1, epsilon is that of group privacy.")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object with the result and everything assumed.")]


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command("account", epilog=_ACCOUNT_EXAMPLE)(account)
    app.command("calibrate", epilog=_CALIBRATE_EXAMPLE)(calibrate)


def account(
    context: typer.Context,
    path: SpecArgument = None,
    spec: SpecOption = None,
    num_units: NumUnits = None,
    batch_size: BatchSize = None,
    noise_multiplier: Annotated[
        float | None, typer.Option(help="Noise standard deviation / clip norm (sigma).", show_default=False)
    ] = None,
    steps: Steps = None,
    delta: Delta = None,
    epsilon: Annotated[
        float | None,
        typer.Option(help="A claim to hold the run against; without --delta, delta is computed.", show_default=False),
    ] = None,
    accountant: AccountantOption = Accountant.PLD,
    adjacency: AdjacencyOption = Adjacency.ADD_OR_REMOVE_ONE,
    scheme: SchemeOption = Scheme.POISSON,
    truncated_batch_size: Truncated = None,
    records_per_unit: RecordsPerUnit = 1,
    as_json: Json = False,
) -> None:
    """What does a training run cost? Epsilon of a spec, or of the numbers given.

    Epsilon is a certified upper bound for `--steps` noisy updates. A spec without a noise multiplier is calibrated
    first. Exits with 1 when the run costs more than the claim.
    """
    from tfdp import accounting
    from tfdp.spec.numbers import rounded_up, shown

    run = _read(context, path, spec)
    if run is None:
        run = from_flags(
            {"--num-units": num_units, "--steps": steps, "--noise-multiplier": noise_multiplier},
            batch_size, accountant, adjacency, scheme, truncated_batch_size, records_per_unit, epsilon, delta,
        )  # fmt: skip
        if delta is None and epsilon is None:
            raise typer.BadParameter("Expected --delta (or --epsilon, to compute delta). Received neither.")
    sigma = run.noise_multiplier
    if sigma is None:
        sigma = _calibrated(run).noise_multiplier
    event = _event(run, sigma)
    options: dict[str, Any] = {"accountant": run.accountant, "adjacency": run.adjacency}
    if run.delta is not None:
        failure, claimed = run.delta, run.epsilon
        cost = accounting.epsilon(event, run.steps, delta=failure, **options)
    else:
        cost, claimed = float(run.epsilon or 0), None
        failure = accounting.delta(event, run.steps, epsilon=cost, **options)
    report = _report(run, event, epsilon=cost, delta=failure, noise_multiplier=sigma, claimed=claimed)
    kept = claimed is None or cost <= claimed * (1 + 1e-6)
    sentence = f"{_steps(run)} cost epsilon {_number(cost)} at delta {rounded_up(failure)} under {run.adjacency}"
    if claimed is not None:
        sentence += f", {'within' if kept else 'more than'} the claimed {shown(claimed)}"
    _print("Privacy cost", report, f"{sentence}.", as_json)
    raise typer.Exit(0 if kept else 1)


def calibrate(
    context: typer.Context,
    path: SpecArgument = None,
    spec: SpecOption = None,
    num_units: NumUnits = None,
    batch_size: BatchSize = None,
    steps: Steps = None,
    epsilon: Annotated[float | None, typer.Option(help="The claim to keep.", show_default=False)] = None,
    delta: Delta = None,
    accountant: AccountantOption = Accountant.PLD,
    adjacency: AdjacencyOption = Adjacency.ADD_OR_REMOVE_ONE,
    scheme: SchemeOption = Scheme.POISSON,
    truncated_batch_size: Truncated = None,
    records_per_unit: RecordsPerUnit = 1,
    as_json: Json = False,
) -> None:
    """How much noise does a claim need? The smallest noise multiplier that keeps it.

    The search is coarse, the answer is certified: its epsilon never exceeds the claim and lies within 0.1% of it. Six
    significant digits, so that it can be copied into a spec unchanged.
    """
    from tfdp.spec.numbers import shown

    run = _read(context, path, spec)
    if run is None:
        run = from_flags(
            {"--num-units": num_units, "--steps": steps, "--epsilon": epsilon, "--delta": delta},
            batch_size, accountant, adjacency, scheme, truncated_batch_size, records_per_unit, epsilon, delta,
        )  # fmt: skip
    found = _calibrated(run)
    report = _report(
        run,
        found.event,
        epsilon=found.epsilon,
        delta=found.delta,
        noise_multiplier=found.noise_multiplier,
        claimed=found.target_epsilon,
    )
    sentence = (
        f"Noise multiplier {shown(found.noise_multiplier)} keeps {_steps(run)} within epsilon "
        f"{shown(found.target_epsilon)}: certified {_number(found.epsilon)} at delta "
        f"{shown(found.delta)} under {run.adjacency}."
    )
    _print("Calibrated noise", report, sentence, as_json)


def _read(context: typer.Context, path: str | None, option: str | None) -> Run | None:
    """The run of a spec; None when there is none and the flags count."""
    if path is not None and option is not None:
        raise typer.BadParameter("Expected one spec. Received one as an argument and one as --spec.")
    path = path or option
    if path is None:
        return None
    given = [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name not in ("path", "spec", "as_json")
        and parameter.name is not None
        and _is_typed(context, parameter.name)
    ]
    if given:
        raise typer.BadParameter(
            f"Expected a spec or flags, not both. Received {path} and {', '.join(given)}. "
            "Change the spec, or repeat all of its numbers as flags."
        )
    return from_spec(path)


def _is_typed(context: typer.Context, name: str) -> bool:
    # By name: typer may carry a click of its own, whose enumeration is another one.
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _event(run: Run, sigma: float) -> DpEvent:
    from tfdp import accounting

    return accounting.step_event(**run.sampler, noise_multiplier=sigma)


def _calibrated(run: Run) -> Calibration:
    from tfdp import accounting
    from tfdp.errors import AccountingError

    if run.epsilon is None or run.delta is None:
        raise AccountingError("Expected a claim to calibrate to: epsilon and delta. Received less.")

    return accounting.calibrate_noise_multiplier(
        **run.sampler,
        target_epsilon=run.epsilon,
        delta=run.delta,
        steps=run.steps,
        accountant=run.accountant,
        adjacency=run.adjacency,
    )


def _report(
    run: Run, event: DpEvent, *, epsilon: float, delta: float, noise_multiplier: float, claimed: float | None
) -> dict[str, Any]:
    """The result and everything that it rests on; what is unbounded is null."""
    from tfdp import accounting

    unamplified = None
    if run.delta is not None:
        unamplified = accounting.unamplified_epsilon(
            noise_multiplier=noise_multiplier,
            sampling_probability=run.sampling_probability,
            steps=run.steps,
            delta=delta,
            adjacency=run.adjacency,
            accountant=run.accountant,
            records_per_unit=run.records_per_unit,
        )
    one_record, generic = _of_one_record(run, noise_multiplier)
    grid = None
    if run.accountant != "rdp" and noise_multiplier > 0:
        grid = accounting.default_grid(event, run.steps, run.adjacency)
    return {
        "epsilon": _finite(epsilon),
        "unbounded": not math.isfinite(epsilon),
        "delta": delta,
        "claimed_epsilon": claimed,
        "noise_multiplier": noise_multiplier,
        "steps": run.steps,
        "num_units": run.num_units,
        "privacy_unit": run.unit,
        "sampled": "records" if run.records_per_unit > 1 else "units",
        "records_per_unit": run.records_per_unit,
        "expected_batch_size": run.sampling_probability * run.num_units,
        "sampling_probability": run.sampling_probability,
        "scheme": run.scheme,
        "truncated_batch_size": run.truncated_batch_size,
        "adjacency": run.adjacency,
        "accountant": run.accountant,
        "answered_by": accounting.describe_accountant(run.accountant),
        "library": f"dp-accounting {accounting.library_version()}",
        "grid": grid,
        "unamplified_epsilon": None if unamplified is None else _finite(unamplified),
        "epsilon_of_one_record": None if one_record is None else _finite(one_record),
        "generic_group_epsilon": None if generic is None else _finite(generic),
        "step_event": accounting.event_to_dict(event),
        "spec_digest": run.spec_digest,
    }


def _of_one_record(run: Run, noise_multiplier: float) -> tuple[float | None, float | None]:
    """Under group privacy: epsilon of one record, and what the generic bound makes of it for k of them."""
    from tfdp import accounting

    if run.records_per_unit == 1 or run.delta is None:
        return None, None
    event = accounting.step_event(**{**run.sampler, "records_per_unit": 1}, noise_multiplier=noise_multiplier)
    setting: dict[str, Any] = {"delta": run.delta, "accountant": run.accountant, "adjacency": run.adjacency}
    generic = accounting.generic_group_epsilon(event, run.steps, group_size=run.records_per_unit, **setting)
    return accounting.epsilon(event, run.steps, **setting), generic


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _number(value: float | None) -> str:
    from tfdp.spec.numbers import rounded_up

    return "unbounded" if value is None or not math.isfinite(value) else rounded_up(value)


def _steps(run: Run) -> str:
    return f"{run.steps} step{'' if run.steps == 1 else 's'}"


def _print(title: str, report: Mapping[str, Any], sentence: str, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(report, indent=2, allow_nan=False))
        return
    from rich.console import Console
    from rich.table import Table

    from tfdp.spec.numbers import rounded_up, shown

    sampled, scheme = report["sampled"], report["scheme"]
    if report["truncated_batch_size"] is not None:
        scheme += f", at most {report['truncated_batch_size']}"
    grid = "" if report["grid"] is None else f", grid {shown(report['grid'])}"
    rows = {
        "epsilon": _number(report["epsilon"]),
        "delta": rounded_up(report["delta"]),
        "noise multiplier": shown(report["noise_multiplier"]),
        "steps": str(report["steps"]),
        "sampling": f"{scheme}, q = {shown(report['expected_batch_size'])} / {report['num_units']} {sampled}"
        f" = {report['sampling_probability']:.6g}",
        "privacy unit": report["privacy_unit"],
        "adjacency": report["adjacency"],
        "accountant": f"{report['answered_by']}, {report['library']}{grid}",
        "without amplification": f"epsilon {_number(report['unamplified_epsilon'])}",
    }
    if report["unamplified_epsilon"] is None:
        del rows["without amplification"]
    if report["records_per_unit"] > 1 and report["epsilon_of_one_record"] is not None:
        rows["one record"] = f"epsilon {_number(report['epsilon_of_one_record'])}: protects records, not units"
        rows["generic group bound"] = f"epsilon {_number(report['generic_group_epsilon'])} for the unit, for comparison"
    table = Table(title=title, show_header=False, title_justify="left")
    for name, value in rows.items():
        table.add_row(name, value)
    console = Console(highlight=False)
    console.print(table)
    console.print(sentence, soft_wrap=True)
