"""Rows of JSON lines and of tables, read one by one.

Messages name a line and a field, never what stands there; the columns of a CSV file are not named either, because
without a header its first line is a record.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import gzip
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


def read_rows(
    path: str | os.PathLike[str], fields: Sequence[str], *, optional: Sequence[str] = ()
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number of the line and content of every row.

    JSON lines (.jsonl, .ndjson, .json) or a table with a header (.csv, .tsv), also gzipped (.gz), in UTF-8.

    Args:
        path: the file.
        fields: fields or columns that every row must have.
        optional: fields that a line of JSON may lack, and columns that a table must have all the same. Rows of a table
            hold no other columns than these two name.

    Raises:
        DataError: with the number of the line, and without what stands in it.
    """
    path = Path(path)
    endings = [suffix.lower() for suffix in path.suffixes]
    ending = endings[-2] if len(endings) > 1 and endings[-1] == ".gz" else (endings or [""])[-1]
    rows: Callable[[BinaryIO, Path, Sequence[str]], Iterator[tuple[int, dict[str, Any]]]]
    if ending in _JSON_LINES:
        rows = _json_rows
    elif ending in _SEPARATORS:
        rows = functools.partial(_table_rows, separator=_SEPARATORS[ending])
        fields = [*fields, *optional]
    else:
        refuse(
            path,
            None,
            f"a file that ends in {', '.join((*_JSON_LINES, *_SEPARATORS))}, or one of these and .gz",
            f"ending {ending!r}",
            "Convert the data to JSON lines.",
        )
    try:
        with _opened(path, compressed=endings[-1] == ".gz") as stream:
            yield from rows(stream, path, fields)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        refuse(path, None, "a file that can be read to its end", reason, "Check the path and the file.")


@contextlib.contextmanager
def _opened(path: Path, *, compressed: bool) -> Iterator[BinaryIO]:
    with open(path, "rb") as raw:
        if not compressed:
            yield raw
            return
        with gzip.open(raw) as stream:
            yield stream  # type: ignore[misc]


def _json_rows(stream: BinaryIO, path: Path, fields: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    for line, content in enumerate(stream, start=1):
        content = content.removeprefix(b"\xef\xbb\xbf") if line == 1 else content
        if not content.strip():
            continue
        try:
            row = json.loads(content.decode("utf-8"), object_pairs_hook=_without_duplicates)
        except UnicodeDecodeError:
            refuse(path, line, "UTF-8", "bytes that are not", "Convert the file to UTF-8.")
        except (ValueError, RecursionError) as error:
            reason = str(error) if isinstance(error, _DuplicateKeyError) else "something that cannot be parsed"
            refuse(path, line, "one JSON object", reason, "Mend the line.")
        if not isinstance(row, dict):
            refuse(path, line, "one JSON object", _kind(row), 'Write {"text": ...} on every line.')
        for field in fields:
            if field not in row:
                refuse(path, line, f"the field {field!r}", "an object without it", _FIELD_HELP)
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
    stream: BinaryIO, path: Path, fields: Sequence[str], *, separator: str
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
                refuse(path, 1, f"one column {field!r} in the header", f"{received} among {len(header)}", _FIELD_HELP)
        line = reader.line_num + 1
        for values in reader:
            if values and len(values) != len(header):
                received = f"{len(values)} values"
                refuse(path, line, f"{len(header)} values, as in the header", received, "Mend the row, or quote it.")
            if values:
                yield line, {field: values[header.index(field)] for field in fields}
            line = reader.line_num + 1
    except UnicodeDecodeError:
        refuse(path, line, "UTF-8 here or soon after", "bytes that are not", "Convert the file to UTF-8.")
    except csv.Error as error:
        refuse(path, line, "a row of a table", str(error), "Mend the quotes of the row that begins there.")
    finally:
        csv.field_size_limit(before)
        text.detach()  # the stream is the caller's to close


def text_at(path: str | os.PathLike[str], line: int, field: str, row: dict[str, Any]) -> str:
    """The text in a field of a row; raises DataError where it is none."""
    value = row[field]
    if not isinstance(value, str):
        refuse(path, line, f"text in {field!r}", _kind(value), "Write a string, or name another field.")
    return value.encode("utf-8", "replace").decode()  # half of a surrogate pair is no text, and no tokenizer takes it


def is_missing(value: Any) -> bool:
    """Whether a field names no unit: absent, null or blank."""
    return value is None or (isinstance(value, str) and not value.strip())


def unit_id_at(path: str | os.PathLike[str], line: int, field: str, row: dict[str, Any]) -> str:
    """The privacy unit that a field of a row names, a text or a number; raises DataError where it names none."""
    value = row[field]
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value.strip():
        received = "an empty one" if isinstance(value, str) else _kind(value)
        fix = "Every record must belong to a unit: fill the id in, or leave the record out."
        refuse(path, line, f"an id in {field!r}", received, fix)
    return value


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", bool: "true or false", int: "a number", float: "a number"}
    return "null" if value is None else kinds.get(type(value), "a string")


def refuse(path: str | os.PathLike[str], line: int | None, expected: str, received: str, fix: str) -> NoReturn:
    """Raises DataError for a place in a file."""
    place = os.fspath(path) if line is None else f"{path}, line {line}"
    raise DataError(f"{place}: expected {expected}. Received: {received}. {fix}") from None
