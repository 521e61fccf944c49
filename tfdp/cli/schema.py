"""`tfdp schema`: the JSON schemas, for editors and other tools."""

from __future__ import annotations

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


def render(name: str) -> str:
    """The text of a schema file."""
    module, function = SCHEMAS[name]
    return json.dumps(getattr(importlib.import_module(module), function)(), indent=2) + "\n"


def schema(
    name: Annotated[str, typer.Argument(help=f"Which schema: {', '.join(SCHEMAS)}.")] = "privacy-spec",
    output: Annotated[
        pathlib.Path | None, typer.Option("--output", "-o", help="File to write; else it is printed.")
    ] = None,
) -> None:
    """Print or write a JSON schema (draft 2020-12).

    Editors complete and check a spec with it as you type: put `# yaml-language-server: $schema=PATH` on its first
    line. It is a help, not the check: `tfdp validate` is.
    """
    from tfdp.files import atomic_write_text

    if name not in SCHEMAS:
        raise typer.BadParameter(f"expected {' or '.join(SCHEMAS)}, received {name!r}.", param_hint="NAME")
    if output is None:
        typer.echo(render(name), nl=False)
        return
    try:
        atomic_write_text(output, render(name))
    except OSError as error:
        typer.echo(f"tfdp: cannot write {output}: {error.strerror}.", err=True)
        raise typer.Exit(1) from None
