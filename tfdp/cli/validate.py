"""`tfdp validate`: reviews privacy specs, as a compiler does with source files."""

from __future__ import annotations

import enum
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tfdp.findings import Finding

_EXAMPLE = """Examples:

```
tfdp validate privacy.yaml
tfdp validate specs/*.yaml --format json
```
"""
_COLOURS = {"error": "bold red", "warning": "yellow", "note": "cyan"}


class OutputFormat(enum.StrEnum):
    """How findings are printed."""

    TEXT = "text"
    JSON = "json"


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("validate", epilog=_EXAMPLE)(validate)


def validate(
    paths: Annotated[list[str], typer.Argument(metavar="PATH", help="Privacy specs (.yaml, .yml, .json).")],
    format: Annotated[
        OutputFormat, typer.Option("--format", help="text for people, json for programs.")
    ] = OutputFormat.TEXT,
) -> None:
    """Review privacy specs: is the claim complete, consistent and earned?

    Prints one finding per fault, with file, line and column, what was expected and what to do. Epsilon is recomputed
    when the noise multiplier is given. Nothing is trained and TensorFlow is not loaded. Exits with 1 when a finding
    is an error.
    """
    from tfdp.findings import errors

    findings = [finding for path in paths for finding in _findings(path)]
    blocking = len(errors(findings))
    if format is OutputFormat.JSON:
        report = {
            "files": paths,
            "errors": blocking,
            "findings": [finding.model_dump(mode="json") for finding in findings],
        }
        typer.echo(json.dumps(report, indent=2))
    else:
        _print(paths, findings, blocking)
    raise typer.Exit(1 if blocking else 0)


def _findings(path: str) -> list[Finding]:
    from tfdp.errors import SpecError
    from tfdp.review import review
    from tfdp.spec import PrivacySpec

    try:
        return review(PrivacySpec.from_file(path))
    except SpecError as error:
        if not error.findings:
            raise
        return list(error.findings)


def _print(paths: Sequence[str], findings: Sequence[Finding], blocking: int) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(soft_wrap=True, highlight=False)
    for finding in findings:
        position = ":".join(str(part) for part in (finding.file, finding.line, finding.column) if part is not None)
        severity = finding.severity.value
        console.print(
            Text.assemble(
                (f"{position}: ", "bold"),
                (f"{finding.id} {severity}", _COLOURS[severity]),
                f": {finding.where}: {finding.message}\n",
                (f"    {finding.fix}", "dim"),
            )
        )
    others = len(findings) - blocking
    counted = f"{_count(len(paths), 'spec')}: {_count(blocking, 'error')}, {_count(others, 'other finding')}."
    console.print(Text(counted, style="bold red" if blocking else "bold green"))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
