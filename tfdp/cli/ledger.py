"""`tfdp ledger`: whether a ledger holds together, and what it says was spent."""

from __future__ import annotations

import json
import pathlib
from typing import Annotated, Any

import typer

_EXAMPLE = """Examples:

```
tfdp ledger verify run/
tfdp ledger verify run/ledger.jsonl --checkpoint elsewhere/checkpoint --json
```
"""


def register(app: typer.Typer) -> None:
    """Adds the group."""
    group = typer.Typer(no_args_is_help=True, help="Verify the ledger of a run.")
    group.callback()(lambda: None)  # keeps the name of a lone command
    group.command("verify", epilog=_EXAMPLE)(verify)
    app.add_typer(group, name="ledger")


def verify(
    path: Annotated[
        pathlib.Path, typer.Argument(metavar="RUN_DIR|LEDGER", help="Folder of a run, or its ledger.", exists=True)
    ],
    checkpoint: Annotated[
        pathlib.Path | None,
        typer.Option("--checkpoint", help="Directory of its checkpoint; else the one beside the ledger.", exists=True),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check every line of a ledger against the one before it, and say what was spent.

    Edits, lines that were moved, removed or put in from elsewhere, and lines that were cut off after a checkpoint or a
    card was written are errors, named with their line. Lines cut off that nothing else remembers cannot be seen: keep
    the printed head where the trainer cannot write. Exits with 1 when something is wrong.
    """
    from tfdp.ledger import read_ledger
    from tfdp.spec.numbers import rounded_up, shown

    file = path / "ledger.jsonl" if path.is_dir() else path
    record = read_ledger(file)
    compared = [*_against_checkpoint(record, checkpoint), *_against_card(record)]
    epsilon = record.epsilon()
    report: dict[str, Any] = {
        "ledger": str(file),
        "lines": record.head.lines,
        "head": record.head.digest,
        "steps": record.steps,
        "planned_steps": record.plan["steps"],
        "torn_last_line": record.torn,
        "epsilon": {"value": None, "unbounded": True}
        if epsilon == float("inf")
        else {"value": epsilon, "unbounded": False},
        "delta": record.plan["delta"],
        "compared_with": compared,
    }
    if as_json:
        typer.echo(json.dumps(report, indent=2))
        return
    typer.echo(f"{file}: {record.head.lines} lines follow from one another, none was changed.")
    torn = ", the last of them torn by a crash" if record.torn else ""
    typer.echo(f"steps    {record.steps} of {record.plan['steps']} spent{torn}")
    typer.echo(f"epsilon  {rounded_up(epsilon)} at delta {shown(record.plan['delta'])}")
    typer.echo(f"head     {record.head.digest}")
    typer.echo(f"holds what {' and '.join(compared)} remember" if compared else "nothing else remembers its length")


def _against_checkpoint(record: Any, directory: pathlib.Path | None) -> list[str]:
    from tfdp.errors import LedgerError
    from tfdp.resume import read_checkpoint

    found = read_checkpoint(directory or record.path.parent / "checkpoint")
    if found is None:
        return []
    if found.ledger != record.identity or not record.contains(found.head):
        raise LedgerError(
            f"{record.path}: expected the ledger that {found.path} was written beside, with {found.head.lines} lines "
            f"or more. Received: {record.head.lines} lines"
            + (" of it" if found.ledger == record.identity else " of another ledger")
            + ". Spent steps were cut off or changed: restore the ledger from a copy."
        )
    return [str(found.path)]


def _against_card(record: Any) -> list[str]:
    from tfdp.card.writing import CARD_JSON, load_card
    from tfdp.errors import LedgerError

    path = record.path.parent / CARD_JSON
    if not path.is_file():
        return []
    digest = load_card(path).provenance.ledger_digest
    if not record.once_was(digest):
        raise LedgerError(
            f"{record.path}: expected the ledger that {path} was made from, or a longer one. Received: one that never "
            f"had the digest {digest[:16]}... Spent steps were cut off or changed, or the card is of another run: "
            "restore the ledger from a copy."
        )
    return [str(path)]
