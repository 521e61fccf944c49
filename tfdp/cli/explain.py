"""`tfdp explain`: what a finding means."""

from __future__ import annotations

from typing import Annotated

import typer

_EXAMPLE = """Examples:

```
tfdp explain PS010
tfdp explain            # all findings, one a line
```
"""


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("explain", epilog=_EXAMPLE)(explain)


def explain(
    ids: Annotated[
        list[str] | None, typer.Argument(metavar="ID", help="Findings, such as PS010; none: a list of all.")
    ] = None,
    page: Annotated[bool, typer.Option("--page", help="Print the Markdown page of all findings.")] = False,
) -> None:
    """Say what a finding means: why it matters, what to do, and an example that triggers it."""
    from tfdp.review import pages
    from tfdp.review.catalogue import CATALOGUE

    if page:
        typer.echo(pages.page(), nl=False)
        return
    if not ids:
        typer.echo(pages.list_text(), nl=False)
        return
    wanted = [id.upper() for id in ids]
    unknown = [id for id in wanted if id not in CATALOGUE]
    if unknown:
        raise typer.BadParameter(
            f"expected ids such as PS010, received {', '.join(map(repr, unknown))}. tfdp explain lists them.",
            param_hint="ID",
        )
    typer.echo("\n".join(pages.entry_text(CATALOGUE[id]) for id in wanted), nl=False)
