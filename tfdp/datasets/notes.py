"""How a file of records was deduplicated, noted beside it: the card of a run says what that does to the claim."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path

from tfdp.errors import DataError
from tfdp.files import atomic_write_text, sha256_file

_FORMAT = "tfdp deduplication 1"


@dataclasses.dataclass(frozen=True)
class DeduplicationStep:
    """One pass over a file.

    Attributes:
        method: "exact" or "20gram".
        scope: "unit" or "all": among which records repetitions were looked for.
        id_field: the field that named the unit; None across units.
    """

    method: str
    scope: str
    id_field: str | None


def note_path(path: str | os.PathLike[str]) -> Path:
    """Where the note of a file lies: its name and ".dedup.json"."""
    return Path(f"{os.fspath(path)}.dedup.json")


def write_note(path: str | os.PathLike[str], steps: Sequence[DeduplicationStep]) -> Path:
    """Notes beside a file all steps that made it, with its digest."""
    content = {"format": _FORMAT, "sha256": sha256_file(path), "steps": [dataclasses.asdict(step) for step in steps]}
    return atomic_write_text(note_path(path), json.dumps(content, indent=2) + "\n")


def read_note(path: str | os.PathLike[str]) -> tuple[DeduplicationStep, ...]:
    """The steps that made a file; none where nothing is noted.

    Raises:
        DataError: the note cannot be read, or the file is no longer the one that it was written for.
    """
    place = note_path(path)
    try:
        content = json.loads(place.read_text(encoding="utf-8"))
        steps = tuple(DeduplicationStep(**step) for step in content["steps"])
        digest, known = content["sha256"], content["format"] == _FORMAT
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, TypeError, KeyError):
        digest, known, steps = "", False, ()
    if not known or digest != sha256_file(path):
        raise DataError(
            f"Expected {place} to be the note of tfdp data dedup on this very file. Received: another note, or a file "
            "that was changed since. Run the deduplication again, or delete the note: the card then says that it is "
            "not known how duplicates were removed."
        )
    return steps


def scope_for(steps: Sequence[DeduplicationStep], id_field: str | None) -> str | None:
    """What the steps together are for the units that `id_field` names: "unit", "all", or None without any step.

    Units of another field are not those of the claim: one of its units may then decide about another.
    """
    if not steps:
        return None
    within = all(step.scope == "unit" and step.id_field == id_field and id_field is not None for step in steps)
    return "unit" if within else "all"
