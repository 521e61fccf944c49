"""Privacy units in data: which records belong together, how many each unit has, and what that means for k.

    units = UnitMap.from_ids(read_unit_ids("mails.jsonl", "sender"))
    counts = count_contributions(units)
    print_contributions(counts)

Everything here is an exact statistic of private data. No noise is added and no epsilon covers it: who sees a report
learns from the data directly, and a k that is chosen by it is chosen on private data.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfdp.datasets.rows import is_missing, read_rows, text_at, unit_id_at
from tfdp.files import atomic_write_bytes, atomic_write_text
from tfdp.review.contributions import Contributions
from tfdp.sampling.units import ContributionCounts, UnitMap, count_contributions

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "ContributionCounts",
    "UnitMap",
    "count_contributions",
    "count_duplicates",
    "plot_contributions",
    "print_contributions",
    "read_unit_ids",
    "write_contributions",
]

NOT_COVERED = (
    "These are exact statistics of private data: no epsilon covers them. Keep them where the data are; a k that is "
    "chosen by them is chosen on private data, and the card has to say so."
)


def read_unit_ids(path: str | os.PathLike[str], id_field: str) -> Iterator[str | None]:
    """The id of every record of a file, None where a record has none; nothing else of a record is kept.

    Args:
        path: as for `tfdp.datasets.rows.read_rows`.
        id_field: the field or column that names the unit.

    Raises:
        DataError: a row that cannot be read, or an id that is neither text nor a whole number.
    """
    for line, row in read_rows(path, (), optional=(id_field,)):
        yield None if is_missing(row.get(id_field)) else unit_id_at(path, line, id_field, row)


def count_duplicates(path: str | os.PathLike[str], *, id_field: str, text_field: str) -> tuple[int, int]:
    """How many records repeat an earlier text character for character: of their own unit, and of any.

    Records without an id are left out, as in `UnitMap.from_ids(..., drop_missing=True)`.

    Args:
        path: as for `tfdp.datasets.rows.read_rows`.
        id_field, text_field: names of fields or columns.

    Raises:
        DataError: as `read_unit_ids`, or a record without text in that field.
    """
    seen: set[bytes] = set()
    of_unit: set[tuple[str, bytes]] = set()
    records = 0
    for line, row in read_rows(path, (text_field,), optional=(id_field,)):
        if is_missing(row.get(id_field)):
            continue
        text = text_at(path, line, text_field, row).encode("utf-8", "surrogatepass")
        digest = hashlib.blake2b(text, digest_size=16).digest()
        records += 1
        seen.add(digest)
        of_unit.add((sys.intern(unit_id_at(path, line, id_field, row)), digest))
    return records - len(of_unit), records - len(seen)


def print_contributions(
    counts: ContributionCounts, console: Console, *, duplicates: tuple[int, int] | None = None
) -> None:
    """Tables for people: no id is printed, units are known by their rank.

    Args:
        counts: from `count_contributions`.
        console: where to.
        duplicates: from `count_duplicates`.
    """
    from rich.table import Table

    total = Table(title="Contributions", show_header=False, title_justify="left")
    rows = {
        "units": f"{counts.num_units:,}",
        "records": f"{counts.num_records:,}",
        "records without an id": f"{counts.missing:,}, left out" if counts.missing else "0",
        "records of a unit": ", ".join(f"{_share(share)} {value:,}" for share, value in counts.quantiles),
        "heaviest units": ", ".join(f"{value:,}" for value in counts.heaviest),
    }
    if duplicates is not None:
        within, anywhere = duplicates
        rows["repeated texts"] = f"{within:,} of the same unit, {anywhere - within:,} more of another"
    for name, value in rows.items():
        total.add_row(name, value)
    spread = Table(title="Records of a unit", title_justify="left")
    for heading in ("records", "units", "share of units", "share of records"):
        spread.add_column(heading, justify="right")
    for low, high, units, records in counts.histogram:
        spread.add_row(
            str(low) if low == high else f"{low:,} to {high:,}",
            f"{units:,}",
            f"{units / counts.num_units:.1%}",
            f"{records / counts.num_records:.1%}",
        )
    caps = Table(title="What a limit of k records leaves out", title_justify="left")
    for heading in ("k", "units with more", "records beyond"):
        caps.add_column(heading, justify="right")
    for k, over, beyond in counts.over:
        caps.add_row(f"{k:,}", f"{over:.1%}", f"{beyond:.1%}")
    for table in (total, spread, caps):
        console.print(table)
    console.print(NOT_COVERED, soft_wrap=True)


def _share(share: float) -> str:
    return {0.0: "least", 1.0: "most"}.get(share, f"{share:.0%} at most")


def plot_contributions(counts: ContributionCounts, path: str | os.PathLike[str]) -> Path:
    """A histogram of units and of their records, as PNG or SVG by the ending of `path`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots(1, 2)
    labels = [str(low) if low == high else f"{low}-{high}" for low, high, _, _ in counts.histogram]
    for place, title, column, total in (
        (axes[0], "Units", 2, counts.num_units),
        (axes[1], "Their records", 3, counts.num_records),
    ):
        place.bar(labels, [row[column] / total for row in counts.histogram])
        place.set(title=title, xlabel="records of a unit", ylabel="share")
        place.tick_params(axis="x", rotation=60)
    return save_figure(figure, path)


def save_figure(figure: Any, path: str | os.PathLike[str]) -> Path:
    """Writes a figure as PNG or SVG, wholly or not at all."""
    import io

    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg" if Path(path).suffix.lower() == ".svg" else "png", dpi=150)
    return atomic_write_bytes(path, buffer.getvalue())


def write_contributions(
    counts: ContributionCounts, path: str | os.PathLike[str], *, duplicates: tuple[int, int] | None = None
) -> Path:
    """The counts as `tfdp validate --data` reads them."""
    values = Contributions(
        num_units=counts.num_units,
        num_records=counts.num_records,
        max_records_per_unit=counts.heaviest[0],
        has_user_id=True,
        duplicates=None if duplicates is None else duplicates[1],
    )
    return atomic_write_text(path, json.dumps(values.model_dump(exclude_none=True), indent=2) + "\n")
