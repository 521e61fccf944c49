"""The lines of a ledger: strict JSON objects, encoded in one way only."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tfdp.errors import LedgerError
from tfdp.files import sha256_bytes

FORMAT = "1.0"
FIRST = "0" * 64
PLAN_FIELDS = (
    "digest",
    "spec_digest",
    "num_units",
    "sampling_probability",
    "expected_batch_size",
    "scheme",
    "steps",
    "clip_norm",
    "noise_multiplier",
    "adjacency",
    "accountant",
    "target_epsilon",
    "delta",
    "step_event",
)


def encode(entry: Mapping[str, Any]) -> bytes:
    return json.dumps(entry, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def decode(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        entry = json.loads(line, object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant)
    except ValueError as error:  # covers bad UTF-8 too
        refuse(path, number, "one JSON object", error)
    if not isinstance(entry, dict):
        refuse(path, number, "one JSON object", type(entry).__name__)
    return entry


def chain(
    path: Path, raw: bytes, check: Callable[[int, dict[str, Any]], None]
) -> tuple[list[dict[str, Any]], str, bytes]:
    """Reads lines of which each carries the hash of the one before.

    Args:
        path, raw: the file and its content.
        check: looks at every line, by its number from 1, once it was found to follow.

    Returns:
        (entries, hash of the last complete line, what comes after it: b"" or a torn line).

    Raises:
        LedgerError: a line that does not follow, with its number.
    """
    *lines, tail = raw.split(b"\n")
    entries, previous = [], FIRST
    for number, line in enumerate(lines, start=1):
        entry = decode(path, number, line)
        if entry.get("prev") != previous:
            refuse(path, number, f"prev to be {previous[:16]}..., the hash of the line before", entry.get("prev"))
        check(number, entry)
        entries.append(entry)
        previous = sha256_bytes(line)
    return entries, previous, tail


def _without_duplicates(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key twice")
    return found


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not a JSON number")


def plain(value: Mapping[str, Any], what: str) -> dict[str, Any]:
    """What reading the ledger back will give."""
    try:
        return json.loads(json.dumps(dict(value), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise LedgerError(
            f"Expected {what} to be plain JSON with finite numbers, received: {error}. "
            "Convert arrays and objects to lists, numbers and strings first."
        ) from error


def refuse(path: Path, number: int, expected: str, received: object) -> NoReturn:
    """A line that is not as it was written."""
    raise LedgerError(
        f"{path}, line {number}: expected {expected}, received: {received}. "
        "The ledger was changed or damaged: restore it from a copy. Without it nothing can be claimed for this run."
    )
