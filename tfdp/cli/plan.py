"""`tfdp plan compare`: the methods for whole units, before anything is trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from tfdp.planner import Candidate
    from tfdp.spec import PrivacySpec

_EXAMPLE = """Examples:

```
tfdp plan compare --spec privacy.yaml --data mails.jsonl --text-field body
tfdp plan compare --spec privacy.yaml --data mails.jsonl --k 1 --k 4 --k 16 --plot compare.png
tfdp plan compare --spec privacy.yaml --data mails.jsonl --concentration gpt2:tiny
```
"""
_BYTES_OF_A_TOKEN = 4


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    plan = typer.Typer(help="Compare ways to train before training.", no_args_is_help=True)
    plan.callback()(_group)
    plan.command("compare", epilog=_EXAMPLE)(compare)
    app.add_typer(plan, name="plan")


def _group() -> None:
    """Compare ways to train before training."""


def compare(
    spec: Annotated[str, typer.Option(metavar="PATH", help="A spec that claims a document or a user.")],
    data: Annotated[str, typer.Option(metavar="PATH", help="Records: .jsonl, .csv or .tsv, also .gz.")],
    k: Annotated[
        list[int] | None, typer.Option("--k", min=1, help="A k to compare; several times.", show_default="1, 2, 5, 10")
    ] = None,
    text_field: Annotated[
        str | None,
        typer.Option(help="Field with the text: counts tokens, of four bytes each.", show_default=False),
    ] = None,
    sequence_length: Annotated[int, typer.Option(min=1, help="Most tokens of a record that are used.")] = 128,
    weights: Annotated[int, typer.Option(min=1, help="Trained weights d; 1 compares the noise per weight.")] = 1,
    drop_missing: Annotated[
        bool, typer.Option("--drop-missing", help="Leave records without an id out instead of refusing them.")
    ] = False,
    concentration: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Also measure how alike units are under this model.", show_default=False),
    ] = None,
    plot: Annotated[str | None, typer.Option(metavar="PATH", help="Write a plot, .png or .svg.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as one JSON object.")] = False,
) -> None:
    """Group privacy or user-wise DP-SGD, and with which k?

    For every method and k: the noise that keeps the claim, noise over signal, tokens seen, epsilon of a record, a
    document and a user, at the same number of record slots a step and the same number of steps. Looks at private data,
    for counts and lengths; no epsilon covers what it prints.
    """
    import dataclasses
    import json
    import sys

    from rich.console import Console

    from tfdp.data import UnitMap
    from tfdp.planner import compare_methods, plot_comparison, recommendation
    from tfdp.spec import PrivacySpec

    reviewed = PrivacySpec.from_file(spec)
    if reviewed.claim.privacy_unit.id_field is None:
        raise typer.BadParameter("Expected a spec with claim.privacy_unit.id_field. Received: one without.")
    if concentration is not None and text_field is None:
        raise typer.BadParameter("Expected --text-field with --concentration, to have texts. Received: none.")
    ids, lengths = _read(data, reviewed.claim.privacy_unit.id_field, text_field, sequence_length)
    units = UnitMap.from_ids(ids, drop_missing=drop_missing)
    candidates = compare_methods(
        reviewed, units, ks=k or (1, 2, 5, 10), tokens=lengths if text_field is not None else None, num_weights=weights
    )
    said = recommendation(candidates)
    measured = None
    if concentration is not None:
        measured = _concentration(reviewed, data, text_field or "", concentration, sequence_length, drop_missing)
    if plot is not None:
        print(f"wrote {plot_comparison(candidates, plot)}", file=sys.stderr)
    if as_json:
        rows = [dataclasses.asdict(each) for each in candidates]
        typer.echo(json.dumps({"rows": rows, "recommendation": said, "concentration": measured}, indent=2))
        return
    console = Console(highlight=False)
    _print_table(console, candidates, units.num_units)
    for text in (said, *((measured["statement"],) if measured else ())):
        console.print(text, soft_wrap=True)


def _read(path: str, id_field: str, text_field: str | None, most: int) -> tuple[list[str | None], Any]:
    """Ids of all records, and their lengths in tokens of four bytes."""
    import array

    from tfdp.datasets.rows import is_missing, read_rows, text_at, unit_id_at

    ids: list[str | None] = []
    lengths = array.array("i")
    known: dict[str, str] = {}  # one object per id, however many records name it
    for line, row in read_rows(path, () if text_field is None else (text_field,), optional=(id_field,)):
        missing = is_missing(row.get(id_field))
        owner = None if missing else unit_id_at(path, line, id_field, row)
        ids.append(None if owner is None else known.setdefault(owner, owner))
        if text_field is not None:
            size = len(text_at(path, line, text_field, row).encode("utf-8"))
            lengths.append(min(most, -(-size // _BYTES_OF_A_TOKEN)))
    return ids, lengths


def _concentration(
    spec: PrivacySpec, path: str, text_field: str, model: str, sequence_length: int, drop_missing: bool
) -> dict[str, Any]:
    from tfdp.cli.startup import quiet_start
    from tfdp.workflow.records import read_text_records

    records = read_text_records(
        path, text_field=text_field, id_field=spec.claim.privacy_unit.id_field, drop_missing=drop_missing
    )
    with quiet_start():
        from tfdp.workflow import build_model
        from tfdp.workflow.concentration import measure_concentration

        network = build_model(model)
    found = measure_concentration(network, spec, records, sequence_length=sequence_length)
    return {"ratio": found.ratio, "units": found.units, "could_hold": found.could_hold, "statement": found.statement}


def _print_table(console: Any, candidates: Sequence[Candidate], num_units: int) -> None:
    from rich.table import Table

    first = candidates[0]
    table = Table(
        title=f"{first.steps:,} steps, {num_units:,} units; every row keeps the claim and costs the same",
        title_justify="left",
    )
    for name in (
        "method", "k", "batch", "q", "sigma", "noise/signal", "records", "tokens seen", "slots a step",
        "eps example", "document", "user",
    ):  # fmt: skip
        table.add_column(name, justify="left" if name == "method" else "right")
    for each in candidates:
        table.add_row(
            each.method,
            str(each.k),
            f"{each.batch:.4g}",
            f"{each.probability:.3g}",
            _number(each.noise_multiplier),
            _number(each.noise_to_signal),
            f"{each.records_used:.0%}",
            "unknown" if each.tokens_seen is None else f"{each.tokens_seen:,.0f}",
            f"{each.cost:.4g}",
            *(_level(each, value) for value in (each.example, each.document, each.user)),
        )
    console.print(table)
    for reason in sorted({each.reason for each in candidates if each.reason}):
        console.print(f"Not modelled: {reason}", soft_wrap=True)


def _number(value: float | None) -> str:
    return "not modelled" if value is None else f"{value:.4g}"


def _level(candidate: Candidate, value: float | None) -> str:
    if candidate.noise_multiplier is None:
        return "not modelled"
    return "none possible" if value is None else f"{value:.4g}"
