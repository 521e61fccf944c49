"""`tfdp card`: render a model card, and check it against its ledger."""

from __future__ import annotations

import json
import pathlib
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tfdp.findings import Finding

_COLOURS = {"error": "bold red", "warning": "yellow", "note": "cyan"}

_Path = Annotated[
    pathlib.Path, typer.Argument(metavar="RUN_DIR|CARD", help="Folder of a run, or its MODEL_CARD.json.", exists=True)
]


def register(app: typer.Typer) -> None:
    """Adds the group."""
    group = typer.Typer(no_args_is_help=True, help="Render a model card, and check it against the ledger of its run.")
    group.command("render", epilog="Example:\n\n```\ntfdp card render run/\n```\n")(render)
    group.command("check", epilog="Examples:\n\n```\ntfdp card check run/\ntfdp card check run/ --json\n```\n")(check)
    app.add_typer(group, name="card")


def render(path: _Path) -> None:
    """Write MODEL_CARD.md and MODEL_CARD.html again, from MODEL_CARD.json.

    Training writes them already; this is for a new version of the templates. It computes nothing: `tfdp card check`
    does.
    """
    from tfdp.card import render_card

    for page in render_card(path).values():
        typer.echo(str(page))


def check(
    path: _Path,
    ledger: Annotated[
        pathlib.Path | None,
        typer.Option("--ledger", help="Ledger of the run; else the one that the card names, beside it.", exists=True),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compute a card again from the ledger of its run, and fail on any difference.

    Compares steps, noise, clip norm, sampling, epsilon, digests and every sentence that follows from them; that the
    Markdown and the HTML are what the JSON renders to; and the digest of the weights. Errors that stand on the card
    itself fail too. Exits with 1 when something is wrong.
    """
    from tfdp.card import check_card
    from tfdp.findings import errors

    findings = check_card(path, ledger)
    blocking = len(errors(findings))
    if as_json:
        report = {
            "card": str(path),
            "errors": blocking,
            "findings": [finding.model_dump(mode="json") for finding in findings],
        }
        typer.echo(json.dumps(report, indent=2))
    else:
        _print(path, findings, blocking)
    raise typer.Exit(1 if blocking else 0)


def _print(path: pathlib.Path, findings: Sequence[Finding], blocking: int) -> None:
    from rich.console import Console
    from rich.text import Text

    from tfdp.findings import printable

    console = Console(soft_wrap=True, highlight=False)
    for finding in findings:
        console.print(
            Text.assemble(
                (f"{finding.id} {finding.severity.value}", _COLOURS[finding.severity.value]),
                f": {printable(finding.where)}: {printable(finding.message)}\n",
                (f"    {printable(finding.fix)}", "dim"),
            )
        )
    if blocking:
        counted = "1 error" if blocking == 1 else f"{blocking} errors"
        console.print(Text(f"{path}: the card does not hold: {counted}.", style="bold red"))
    else:
        console.print(Text(f"{path}: the card agrees with its ledger.", style="bold green"))
