"""Text records from a file, and which of them are trained on.

Whatever is decided about a unit here (which record stays, whether it is held out) is decided by its own records alone.
That is what the claim needs: another unit's presence must not change what this one contributes. It is also why
duplicates are not looked for across units.

Messages name a line and a field, never what stands there; the columns of a CSV file are not named either, because
without a header its first line is a record.
"""

from __future__ import annotations

import collections
import contextlib
import csv
import dataclasses
import functools
import gzip
import hashlib
import io
import json
import os
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from tfdp.errors import DataError

_JSON_LINES = (".jsonl", ".ndjson", ".json")
_SEPARATORS = {".csv": ",", ".tsv": "\t"}
_SELECTIONS = ("longest", "shortest", "random")


@dataclasses.dataclass(frozen=True)
class TextRecords:
    """Texts and the privacy units that they belong to.

    Attributes:
        texts: one text per record.
        unit_ids: the unit of each record; None where every record is a unit of its own.
        num_blank: how many records without text were left out.
    """

    texts: tuple[str, ...] = dataclasses.field(repr=False)
    unit_ids: tuple[str, ...] | None = dataclasses.field(default=None, repr=False)
    num_blank: int = 0

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, indices: Sequence[int]) -> TextRecords:
        """The records at `indices`, in that order."""
        ids = None if self.unit_ids is None else tuple(self.unit_ids[index] for index in indices)
        return TextRecords(tuple(self.texts[index] for index in indices), ids)


def read_text_records(
    path: str | os.PathLike[str], *, text_field: str = "text", id_field: str | None = None
) -> TextRecords:
    """Reads JSON lines (.jsonl, .ndjson, .json) or a table with a header (.csv, .tsv), also gzipped (.gz), in UTF-8.

    Records whose text is empty or blank are left out. Ids are compared as they are written: "A@x.org" and "a@x.org"
    are two units. Numbers are taken as ids of JSON lines, too.

    Args:
        path: the file.
        text_field: the field or column with the text.
        id_field: the field or column that names the privacy unit; None where a record is a unit.

    Raises:
        DataError: with the number of the line, and without what stands in it.
    """
    path = Path(path)
    endings = [suffix.lower() for suffix in path.suffixes]
    ending = endings[-2] if len(endings) > 1 and endings[-1] == ".gz" else (endings or [""])[-1]
    rows: Callable[[BinaryIO, Path, list[str]], Iterator[tuple[int, dict[str, Any]]]]
    if ending in _JSON_LINES:
        rows = _json_rows
    elif ending in _SEPARATORS:
        rows = functools.partial(_table_rows, separator=_SEPARATORS[ending])
    else:
        _refuse(
            path,
            None,
            f"a file that ends in {', '.join((*_JSON_LINES, *_SEPARATORS))}, or one of these and .gz",
            f"ending {ending!r}",
            "Convert the data to JSON lines.",
        )
    fields = [text_field] if id_field is None else [text_field, id_field]
    texts: list[str] = []
    ids: list[str] = []
    blank = 0
    try:
        with _opened(path, compressed=endings[-1] == ".gz") as stream:
            for line, row in rows(stream, path, fields):
                text = _text(path, line, text_field, row)
                if not text.strip():
                    blank += 1
                    continue
                texts.append(text)
                if id_field is not None:
                    ids.append(_unit_id(path, line, id_field, row))
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        _refuse(path, None, "a file that can be read to its end", reason, "Check the path and the file.")
    if not texts:
        _refuse(path, None, "at least one record with text", f"{blank} without text", "Check the file.")
    return TextRecords(tuple(texts), tuple(ids) if id_field is not None else None, blank)


def one_record_per_unit(records: TextRecords, selection: str | None = None) -> TextRecords:
    """Keeps one record of every unit, in the order in which units first appear.

    Args:
        records: with or without ids; without them nothing changes.
        selection: as in `claim.privacy_unit.selection` of a spec: "longest", "shortest", or "random", which goes by a
            digest of id and text and is the same in every run. None: units must have one record each.

    Raises:
        DataError: units with several records and no selection, or one that is not built.
    """
    if selection is not None and selection not in _SELECTIONS:
        raise DataError(
            f"Expected claim.privacy_unit.selection to be one of {', '.join(_SELECTIONS)}. Received: {selection}. "
            "Choose one of these, or keep one record per unit in the file yourself."
        )
    if records.unit_ids is None:
        return records
    members: dict[str, list[int]] = collections.defaultdict(list)
    for index, unit in enumerate(records.unit_ids):
        members[unit].append(index)
    several = [indices for indices in members.values() if len(indices) > 1]
    if several and selection is None:
        raise DataError(
            f"Expected one record per privacy unit (max_records_per_unit is 1). Received: {len(several)} of "
            f"{len(members)} "
            f"ids with several records, {sum(map(len, several))} in all, at most {max(map(len, several))}. Merge the "
            "records "
            "of a unit into one, or say in the spec which one stays: claim.privacy_unit.selection: longest (or "
            "shortest, "
            "random)."
        )

    def rank(index: int) -> tuple[int, bytes]:
        assert records.unit_ids is not None
        text = records.texts[index]
        digest = _digest(records.unit_ids[index], text)  # a tie must not depend on the order of the file
        return {"longest": -len(text), "shortest": len(text)}.get(selection or "", 0), digest

    return records.take([min(indices, key=rank) for indices in members.values()])


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


@contextlib.contextmanager
def _opened(path: Path, *, compressed: bool) -> Iterator[BinaryIO]:
    with open(path, "rb") as raw:
        if not compressed:
            yield raw
            return
        with gzip.open(raw) as stream:
            yield stream  # type: ignore[misc]


def _json_rows(stream: BinaryIO, path: Path, fields: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    for line, content in enumerate(stream, start=1):
        content = content.removeprefix(b"\xef\xbb\xbf") if line == 1 else content
        if not content.strip():
            continue
        try:
            row = json.loads(content.decode("utf-8"), object_pairs_hook=_without_duplicates)
        except UnicodeDecodeError:
            _refuse(path, line, "UTF-8", "bytes that are not", "Convert the file to UTF-8.")
        except (ValueError, RecursionError) as error:
            reason = str(error) if isinstance(error, _DuplicateKeyError) else "something that cannot be parsed"
            _refuse(path, line, "one JSON object", reason, "Mend the line.")
        if not isinstance(row, dict):
            _refuse(path, line, "one JSON object", _kind(row), 'Write {"text": ...} on every line.')
        for field in fields:
            if field not in row:
                _refuse(path, line, f"the field {field!r}", "an object without it", _FIELD_HELP)
        yield line, row


_FIELD_HELP = "Name the fields with --text-field and --id-field (text_field=, id_field=)."


class _DuplicateKeyError(ValueError):
    pass


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _DuplicateKeyError("a field twice")
    return found


def _table_rows(
    stream: BinaryIO, path: Path, fields: list[str], *, separator: str
) -> Iterator[tuple[int, dict[str, Any]]]:
    text = io.TextIOWrapper(stream, "utf-8-sig", newline="")
    reader = csv.reader(text, delimiter=separator, strict=True)
    before = csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # global, and by default too small for a long mail
    line = 1
    try:
        header = next(reader, [])
        for field in fields:
            if header.count(field) != 1:
                received = "none" if field not in header else "several"
                _refuse(path, 1, f"one column {field!r} in the header", f"{received} among {len(header)}", _FIELD_HELP)
        line = reader.line_num + 1
        for values in reader:
            if values and len(values) != len(header):
                received = f"{len(values)} values"
                _refuse(path, line, f"{len(header)} values, as in the header", received, "Mend the row, or quote it.")
            if values:
                yield line, {field: values[header.index(field)] for field in fields}
            line = reader.line_num + 1
    except UnicodeDecodeError:
        _refuse(path, line, "UTF-8 here or soon after", "bytes that are not", "Convert the file to UTF-8.")
    except csv.Error as error:
        _refuse(path, line, "a row of a table", str(error), "Mend the quotes of the row that begins there.")
    finally:
        csv.field_size_limit(before)
        text.detach()  # the stream is the caller's to close


def _text(path: Path, line: int, field: str, row: dict[str, Any]) -> str:
    value = row[field]
    if not isinstance(value, str):
        _refuse(path, line, f"text in {field!r}", _kind(value), "Write a string, or name another field.")
    return value.encode("utf-8", "replace").decode()  # half of a surrogate pair is no text, and no tokenizer takes it


def _unit_id(path: Path, line: int, field: str, row: dict[str, Any]) -> str:
    value = row[field]
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value.strip():
        received = "an empty one" if isinstance(value, str) else _kind(value)
        fix = "Every record must belong to a unit: fill the id in, or leave the record out."
        _refuse(path, line, f"an id in {field!r}", received, fix)
    return value


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", bool: "true or false", int: "a number", float: "a number"}
    return "null" if value is None else kinds.get(type(value), "a string")


def _refuse(path: Path, line: int | None, expected: str, received: str, fix: str) -> NoReturn:
    place = f"{path}" if line is None else f"{path}, line {line}"
    raise DataError(f"{place}: expected {expected}. Received: {received}. {fix}") from None
