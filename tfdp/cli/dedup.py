"""`tfdp data dedup`: leaves records out that repeat an earlier one."""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

EXAMPLE = """Examples:

```
tfdp data dedup mails.jsonl --id-field sender --method exact --scope unit -o unique.jsonl
tfdp data dedup mails.jsonl.gz --method 20gram --scope all -o unique.jsonl
```

exact: the same text, character for character. 20gram: any 20 words in a row of an earlier record that stays; a record
of fewer words is compared as a whole.

unit: with the records of the same unit, which is a part of what the unit contributes. all: with every record, so
that one unit's data decide what another's contribute; the claim does not cover that, and the card says so.
"""
_INPUTS = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")


def dedup(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Records: .jsonl, .jsonl.gz.", exists=True, dir_okay=False)
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="PATH", help="The records that stay: .jsonl.")],
    method: Annotated[str, typer.Option(metavar="exact|20gram", help="What counts as a repetition.")] = "exact",
    scope: Annotated[str, typer.Option(metavar="unit|all", help="Within each unit, or across all.")] = "unit",
    text_field: Annotated[str, typer.Option(help="Field with the text.")] = "text",
    id_field: Annotated[
        str | None, typer.Option(help="Field that names the privacy unit; scope unit needs it.", show_default=False)
    ] = None,
    normalise: Annotated[
        bool, typer.Option("--normalise", help="exact: compare words in lower case, not characters.")
    ] = False,
) -> None:
    """Leave out records that repeat an earlier one, within each privacy unit or across all.

    The first stays, and lines are copied as they stand. Beside the result, PATH.dedup.json says how it was made; `tfdp
    train --data PATH` puts that on the card. The counts that are printed are exact numbers of private data, which no
    epsilon covers. Exits with 1 where the file cannot be read.
    """
    from rich.console import Console
    from rich.progress import Progress

    from tfdp.datasets.notes import DeduplicationStep, read_note, write_note
    from tfdp.datasets.rows import read_rows, text_at, unit_id_at
    from tfdp.errors import DataError
    from tfdp.files import atomic_file
    from tfdp.sampling.dedup import METHODS, SCOPES, deduplicate

    _check(file, out, method, scope, id_field, METHODS, SCOPES)
    earlier = read_note(file)
    state = file.stat()
    fields = [text_field] if id_field is None else [text_field, id_field]
    lines: list[int] = []
    units: list[str] = []

    def texts() -> Iterator[str]:
        for line, row in read_rows(file, fields):
            lines.append(line)
            units.append("" if id_field is None else unit_id_at(file, line, id_field, row))
            yield text_at(file, line, text_field, row)

    with Progress(console=Console(stderr=True), transient=True) as progress:
        count = sum(1 for _ in progress.track(_lines(file), total=None, description="counting"))
        records = progress.track(texts(), total=count, description="comparing")
        # The list grows while it is read: each unit is there as soon as its record is.
        done = deduplicate(records, iter(units), method=method, scope=scope, normalise=normalise)  # type: ignore[arg-type]
        kept = {line for line, stays in zip(lines, done.kept.tolist(), strict=True) if stays}
        with atomic_file(out) as target:
            for line, content in enumerate(progress.track(_lines(file), total=count, description="writing"), start=1):
                if line in kept:
                    target.write(content.removeprefix(b"\xef\xbb\xbf").rstrip(b"\r\n") + b"\n")
            now = file.stat()
            if (now.st_size, now.st_mtime_ns) != (state.st_size, state.st_mtime_ns):
                raise DataError(f"Expected {file} to stay as it is. Received: another file meanwhile. Begin again.")
    write_note(out, [*earlier, DeduplicationStep(method, scope, id_field if scope == "unit" else None)])
    _print(Console(highlight=False, soft_wrap=True), out, method, scope, done, len(set(units)) if id_field else None)


def _check(
    file: Path,
    out: Path,
    method: str,
    scope: str,
    id_field: str | None,
    methods: Iterable[str],
    scopes: Iterable[str],
) -> None:
    for name, value, known in (("--method", method, methods), ("--scope", scope, scopes)):
        if value not in known:
            raise typer.BadParameter(f"Expected {name} {' or '.join(known)}. Received: {value}.")
    if scope == "unit" and id_field is None:
        raise typer.BadParameter("Expected --id-field with --scope unit. Received: none. Name the field of the unit.")
    if not file.name.lower().endswith(_INPUTS) or out.suffix.lower() not in _INPUTS:
        raise typer.BadParameter(
            f"Expected JSON lines: FILE ending in {', '.join(_INPUTS)}, --out in .jsonl. Received: {file.name} and "
            f"{out.name}."
        )
    if out.resolve() == file.resolve():
        raise typer.BadParameter("Expected another file in --out. Received: FILE itself.")


def _lines(file: Path) -> Iterator[bytes]:
    with gzip.open(file) if file.suffix.lower() == ".gz" else open(file, "rb") as stream:
        yield from stream


def _print(console: Any, out: Path, method: str, scope: str, done: Any, units: int | None) -> None:
    from rich.table import Table

    table = Table(title="Deduplication", show_header=False, title_justify="left")
    rows = {
        "records": f"{len(done.kept):,}" + ("" if units is None else f" of {units:,} units"),
        "left out": f"{done.num_dropped:,} ({done.num_dropped / max(1, len(done.kept)):.1%})",
        "kept": f"{len(done.indices):,} in {out}",
        "method": f"{method}, " + ("within each unit" if scope == "unit" else "across units"),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)
    if scope == "all":
        console.print("Across units, one unit's data decide what another's contribute: the claim does not cover that.")
    console.print("These are exact numbers of private data, which no epsilon covers.")
