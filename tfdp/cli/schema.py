"""`tfdp schema`: the JSON schemas, for editors and other tools."""

from __future__ import annotations

import enum
import importlib
import json
import pathlib
from typing import Annotated

import typer

# Name of a schema -> module and function that makes it.
SCHEMAS = {"privacy-spec": ("tfdp.spec", "json_schema"), "model-card": ("tfdp.card", "json_schema")}


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("schema", epilog="Example:\n\n```\ntfdp schema --output privacy-spec-1.0.json\n```\n")(schema)


class Draft(enum.StrEnum):
    """Versions of JSON Schema."""

    NEW = "2020-12"
    OLD = "07"


def render(name: str, draft: str = "2020-12") -> str:
    """The text of a schema file."""
    module, function = SCHEMAS[name]
    made = getattr(importlib.import_module(module), function)(draft)
    return json.dumps(made, indent=2, allow_nan=False) + "\n"


def schema(
    name: Annotated[str, typer.Argument(help=f"Which schema: {', '.join(SCHEMAS)}.")] = "privacy-spec",
    draft: Annotated[Draft, typer.Option("--draft", help="07 is for editors that know no later one.")] = Draft.NEW,
    output: Annotated[
        pathlib.Path | None, typer.Option("--output", "-o", help="File to write; else it is printed.")
    ] = None,
) -> None:
    """Print or write a JSON schema.

    Editors complete and check a spec with it as you type: put `# yaml-language-server: $schema=PATH` on its first
    line. It is a help, not the check: `tfdp validate` is.
    """
    from tfdp.files import atomic_write_text

    if name not in SCHEMAS:
        raise typer.BadParameter(f"expected {' or '.join(SCHEMAS)}, received {name!r}.", param_hint="NAME")
    if output is None:
        typer.echo(render(name, draft.value), nl=False)
        return
    try:
        atomic_write_text(output, render(name, draft.value))
    except OSError as error:
        typer.echo(f"tfdp: cannot write {output}: {error.strerror}.", err=True)
        raise typer.Exit(1) from None
