"""Looks at private data before a run begins: noted beside the ledger that the run will have, then written into it.

A ledger holds a plan, and a plan a clip norm, so whoever looks at gradients to choose one has no ledger yet. The note
waits under the name of the ledger and ".accesses.jsonl" until the first fit copies it into the chain, where the card
finds it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tfdp.entropy import system_bytes
from tfdp.errors import LedgerError
from tfdp.files import fsync_directory
from tfdp.ledger.lines import plain
from tfdp.ledger.reading import read_ledger
from tfdp.ledger.writing import Ledger

KIND = "data_access"


def accesses_path(ledger: str | os.PathLike[str]) -> Path:
    """Where the notes for a ledger wait."""
    return Path(f"{os.fspath(ledger)}.accesses.jsonl")


def note_access(ledger: str | os.PathLike[str], what: str, **fields: Any) -> Path:
    """Notes that somebody is about to look at data; returns once that is on the disk.

    Args:
        ledger: path of the ledger that the run has, or will have.
        what: the look was for, such as "clip_norm".
        **fields: plain JSON that says what was looked at.

    Raises:
        LedgerError: the note cannot be written.
    """
    path = accesses_path(ledger)
    line = json.dumps({"id": system_bytes(8).hex(), "what": what, **plain(fields, "the note")}, sort_keys=True)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="ascii") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
        fsync_directory(path.parent)
    except OSError as error:
        raise LedgerError(
            f"Expected {path} to take a note of this look at the data, received: {error.strerror or error}. Free space "
            "or fix the permissions: nobody looks before it is noted."
        ) from error
    return path


def record_accesses(ledger: Ledger) -> None:
    """Writes every note that waits for this ledger into it, each once.

    Raises:
        LedgerError: a note that cannot be read.
    """
    there = {entry.get("id") for entry in read_ledger(ledger.path).of_kind(KIND)}
    for note in _notes(accesses_path(ledger.path)):
        if note["id"] not in there:
            ledger.append(KIND, **note)


def _notes(path: Path) -> Iterator[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise _unreadable(path, str(error)) from error
    for number, line in enumerate(lines, start=1):
        try:
            note = json.loads(line)
            if not isinstance(note, dict) or not {"id", "what"} <= note.keys():
                raise ValueError("no note")
        except ValueError as error:
            raise _unreadable(path, f"line {number} is not one") from error
        yield note


def _unreadable(path: Path, why: str) -> LedgerError:
    return LedgerError(
        f"Expected {path} to hold the notes of looks at private data, received: {why}. Restore it from a copy: the "
        "card has to list them."
    )
