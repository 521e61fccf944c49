"""The command line: `tfdp COMMAND`.

Exit codes: 0 when all is well, 1 for a finding that blocks or a failure, 2 for a wrong call. Each group of commands
is a module of its own; what is slow to import (TensorFlow, accounting) is imported inside the command that needs it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from tfdp import __version__
from tfdp.cli import (
    account,
    audit,
    budget,
    card,
    data,
    demo,
    diff,
    explain,
    init,
    ledger,
    plan,
    schema,
    train,
    validate,
)
from tfdp.errors import TfdpError

app = typer.Typer(
    name="tfdp",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,  # its tracebacks would print local variables, private records among them
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tfdp {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Differentially private training of Keras language models: from a reviewed spec to a model card.

    Exit codes: 0 all is well, 1 a finding that blocks or a failure, 2 a wrong call.
    """


validate.register(app)
explain.register(app)
init.register(app)
diff.register(app)
schema.register(app)
account.register(app)
data.register(app)
plan.register(app)
train.register(app)
audit.register(app)
card.register(app)
ledger.register(app)
budget.register(app)
demo.register(app)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits; errors of the library become one message on stderr."""
    try:
        app(args=None if arguments is None else list(arguments), prog_name="tfdp")
    except TfdpError as error:
        from tfdp.findings import printable

        print("\n".join(printable(line) for line in f"tfdp: {error}".splitlines()), file=sys.stderr)
        sys.exit(1)
