"""`tfdp data`: what the records of a file say about privacy units, and which of them repeat others."""

from __future__ import annotations

from typing import Annotated

import typer

from tfdp.cli import dedup

_EXAMPLE = """Examples:

```
tfdp data report mails.jsonl --id-field sender
tfdp data report mails.csv.gz --id-field sender --text-field body --k 2 --k 8 --plot contributions.png \\
    --write contributions.json
tfdp validate privacy.yaml --data contributions.json
```
"""


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    data = typer.Typer(help="Look at private data: exact statistics, which no epsilon covers.", no_args_is_help=True)
    data.callback()(_group)
    data.command("report", epilog=_EXAMPLE)(report)
    data.command("dedup", epilog=dedup.EXAMPLE)(dedup.dedup)
    app.add_typer(data, name="data")


def _group() -> None:
    """Look at private data: exact statistics, which no epsilon covers."""


def report(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Records: .jsonl, .csv or .tsv, also .gz.")],
    id_field: Annotated[str, typer.Option(metavar="NAME", help="Field or column that names the privacy unit.")],
    text_field: Annotated[
        str | None, typer.Option(metavar="NAME", help="Field with the text: counts repeated ones.", show_default=False)
    ] = None,
    k: Annotated[
        list[int] | None,
        typer.Option("--k", min=1, help="A limit of records per unit to look at; several times.", show_default=False),
    ] = None,
    drop_missing: Annotated[
        bool, typer.Option("--drop-missing", help="Leave records without an id out instead of refusing them.")
    ] = False,
    plot: Annotated[
        str | None, typer.Option(metavar="PATH", help="Write a histogram, .png or .svg.", show_default=False)
    ] = None,
    write: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Write the counts for tfdp validate --data.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")] = False,
) -> None:
    """How many records does each privacy unit have, and how many would a limit of k leave out?

    Prints counts and shares, never an id. They are exact statistics of private data, which no epsilon covers: keep the
    report where the data are. Exits with 1 where records have no id.
    """
    import dataclasses
    import json
    import sys

    from rich.console import Console

    from tfdp import data
    from tfdp.data import UnitMap, count_contributions, read_unit_ids

    units = UnitMap.from_ids(read_unit_ids(file, id_field), drop_missing=drop_missing)
    counts = count_contributions(units, caps=sorted(set(k or (1, 2, 5, 10))))
    duplicates = None
    if text_field is not None:
        duplicates = data.count_duplicates(file, id_field=id_field, text_field=text_field)
    if plot is not None:
        print(f"wrote {data.plot_contributions(counts, plot)}", file=sys.stderr)
    if write is not None:
        print(f"wrote {data.write_contributions(counts, write, duplicates=duplicates)}", file=sys.stderr)
    if as_json:
        repeated = None if duplicates is None else {"same_unit": duplicates[0], "any_unit": duplicates[1]}
        values = {**dataclasses.asdict(counts), "repeated_texts": repeated, "not_covered": data.NOT_COVERED}
        typer.echo(json.dumps(values, indent=2))
    else:
        data.print_contributions(counts, Console(highlight=False), duplicates=duplicates)
