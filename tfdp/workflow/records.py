"""Text records from a file, and which of them are trained on.

Whatever is decided about a unit here (whether it is held out) is decided by its own records alone. That is what the
claim needs: another unit's presence must not change what this one contributes. It is also why duplicates are not looked
for across units.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Sequence

from tfdp.datasets.rows import is_missing, read_rows, refuse, text_at, unit_id_at
from tfdp.errors import DataError

NO_GROUP = "none"


@dataclasses.dataclass(frozen=True)
class TextRecords:
    """Texts and the privacy units that they belong to.

    Attributes:
        texts: one text per record.
        unit_ids: the unit of each record; None where every record is a unit of its own.
        groups: the group of each record, for what is reported by group; None where none are told apart.
        absent: records that only keep the place of a unit and are not trained on; see `with_canaries`. None: no record.
        num_blank: how many records without text were left out.
        num_missing: how many records without an id were left out.
    """

    texts: tuple[str, ...] = dataclasses.field(repr=False)
    unit_ids: tuple[str, ...] | None = dataclasses.field(default=None, repr=False)
    num_blank: int = 0
    num_missing: int = 0
    groups: tuple[str, ...] | None = dataclasses.field(default=None, repr=False)
    absent: tuple[bool, ...] | None = None

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def num_units(self) -> int:
        """How many units there are."""
        return len(self) if self.unit_ids is None else len(set(self.unit_ids))

    def take(self, indices: Sequence[int]) -> TextRecords:
        """The records at `indices`, in that order."""
        ids = None if self.unit_ids is None else tuple(self.unit_ids[index] for index in indices)
        groups = None if self.groups is None else tuple(self.groups[index] for index in indices)
        absent = None if self.absent is None else tuple(self.absent[index] for index in indices)
        return TextRecords(tuple(self.texts[index] for index in indices), ids, groups=groups, absent=absent)


def read_text_records(
    path: str | os.PathLike[str],
    *,
    text_field: str = "text",
    id_field: str | None = None,
    group_field: str | None = None,
    drop_missing: bool = False,
) -> TextRecords:
    """Reads JSON lines (.jsonl, .ndjson, .json) or a table with a header (.csv, .tsv), also gzipped (.gz), in UTF-8.

    Records whose text is empty or blank are left out. Ids are compared as they are written: "A@x.org" and "a@x.org"
    are two units. Numbers are taken as ids of JSON lines, too.

    Args:
        path: the file.
        text_field: the field or column with the text.
        id_field: the field or column that names the privacy unit; None where a record is a unit.
        group_field: the field or column that names the group; a record without one is in the group "none".
        drop_missing: leave records without an id out instead of refusing them.

    Raises:
        DataError: with the number of the line, and without what stands in it; records without an id are counted.
    """
    texts: list[str] = []
    ids: list[str] = []
    groups: list[str] = []
    blank = missing = first = 0
    optional = [field for field in (id_field, group_field) if field is not None]
    for line, row in read_rows(path, [text_field], optional=optional):
        text = text_at(path, line, text_field, row)
        if not text.strip():
            blank += 1
            continue
        if id_field is not None:
            if is_missing(row.get(id_field)):
                missing, first = missing + 1, first or line
                continue
            ids.append(unit_id_at(path, line, id_field, row))
        if group_field is not None:
            value = row.get(group_field)
            groups.append(NO_GROUP if is_missing(value) else str(value))
        texts.append(text)
    if missing and not drop_missing:
        fix = "Fill the ids in, name another field, or leave these records out (--drop-missing, drop_missing=True)."
        refuse(path, first, f"an id in {id_field!r} of every record", f"{missing} records without one", fix)
    if not texts:
        refuse(path, None, "at least one record with text", f"{blank} without text", "Check the file.")
    return TextRecords(
        tuple(texts),
        tuple(ids) if id_field is not None else None,
        blank,
        missing,
        tuple(groups) if group_field is not None else None,
    )


def split_held_out(records: TextRecords, share: float = 0.1) -> tuple[TextRecords, TextRecords]:
    """Sets units aside by a digest of their id (of the text, without ids): `(to train on, held out)`.

    A unit is on the same side in every run, whatever else is in the file. Held-out units are not trained on, and what
    is measured on them is exact: neither their presence nor their text is covered by epsilon.

    Raises:
        DataError: a share that is not in [0, 1), or one that leaves nothing to train on.
    """
    if not 0 <= share < 1:
        raise DataError(
            f"Expected a held-out share of at least 0 and below 1. Received: {share}. Use 0.1, or 0 for none."
        )
    keys = records.unit_ids if records.unit_ids is not None else records.texts
    limit = round(share * 2**64)
    aside = [int.from_bytes(_digest("held out", key)[:8], "big") < limit for key in keys]
    train = records.take([index for index, out in enumerate(aside) if not out])
    if not len(train):
        raise DataError(f"Expected units to train on. Received: all {len(records)} held out. Hold out a smaller share.")
    return train, records.take([index for index, out in enumerate(aside) if out])


def _digest(*parts: str) -> bytes:
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).digest()
