"""What is read from a text: plain values and where each of them stands, or the fault of the notation.

A text is untrusted: length, depth and the number of values are bounded, so that time and memory are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from tfdp.findings import printable

Format = Literal["yaml", "json"]
Path = tuple[str | int, ...]

MAX_CHARACTERS = 1 << 17
MAX_VALUES = 10_000
MAX_DEPTH = 32
MAX_DOCUMENTS = 100
_LONGEST = 200  # characters of a path in a message: it can be as long as the file
START = "Write a first one with tfdp init, which asks a few questions."


@dataclass(frozen=True)
class Position:
    """1-based place of a value, and of the key that it belongs to."""

    line: int
    column: int
    key_line: int
    key_column: int

    @property
    def is_empty(self) -> bool:
        """Whether nothing stands after the key, which is then the place of the value too."""
        return (self.line, self.column) == (self.key_line, self.key_column)


@dataclass(frozen=True)
class Document:
    """Plain values (dict, list, str, int, float, bool, None) and where they stand.

    Attributes:
        number, count: which of the documents of its file it is, and of how many.
        separator: line of the `---` before it, when there is one.
        elsewhere: of fields that stand in another place or by another name, the values.
    """

    value: Any
    positions: dict[Path, Position] = field(default_factory=dict)
    format: Format = "yaml"
    number: int = 1
    count: int = 1
    separator: int | None = None
    elsewhere: dict[Path, list[Any]] = field(default_factory=dict)

    def indentation(self, section: Path) -> int:
        """Spaces before the fields of a section that has a line for each; 0 where a line cannot simply be added."""
        inside = [place for path, place in self.positions.items() if path[:-1] == section and path]
        lines = {place.key_line for place in inside}
        own = self.positions[section].key_line if section in self.positions else 0
        apart = self.format == "yaml" and len(lines) == len(inside) and own not in lines
        return min((place.key_column for place in inside), default=1) - 1 if apart else 0

    def named(self, message: str) -> str:
        """A message, with the number of the document when there are several in the file."""
        return numbered(message, self.number, self.count)


def dotted(path: Path) -> str:
    """("waivers", 0, "owner") as "waivers[0].owner"; the empty path as "spec"."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return printable(text.removeprefix("."))[:_LONGEST] or "spec"


def holds(value: Any, path: Path) -> bool:
    """Whether plain values have something at a path."""
    for part in path:
        try:
            value = value[part]
        except (LookupError, TypeError):
            return False
    return True


def held(value: Any, path: Path) -> Any:
    """What plain values have at a path; None where that is nothing."""
    for part in path:
        try:
            value = value[part]
        except (LookupError, TypeError):
            return None
    return value


def numbered(message: str, number: int, count: int) -> str:
    """A message, with the number of the document when there are several in the file."""
    return message if count == 1 else f"{message} (Document {number} of {count}.)"


def finite_number(path: Path) -> str:
    """What to write in place of NaN and infinity."""
    return "Write a finite number" + (
        ", or null: then it is calibrated to the claim." if path and path[-1] == "noise_multiplier" else "."
    )


class ReadingError(Exception):
    """The text is not a document that can be checked field by field."""

    def __init__(
        self, id: str, message: str, fix: str, *, line: int | None = None, column: int | None = None, path: Path = ()
    ):
        super().__init__(message)
        self.id, self.message, self.fix = id, message, fix
        self.line, self.column, self.path = line, column, path


def duplicate(key: str, path: Path, line: int, column: int, *, first: int) -> NoReturn:
    """Refuses a field that stands twice."""
    raise ReadingError(
        "PS002",
        f"expected each field once, received {key[:80]!r} a second time (first on line {first}).",
        "Keep one of the two: which one counts would depend on the reader.",
        line=line,
        column=column,
        path=path,
    )


def too_deep(line: int | None = None, column: int | None = None) -> NoReturn:
    """Refuses sections within sections within sections."""
    raise ReadingError(
        "PS000",
        f"expected at most {MAX_DEPTH} levels, received more.",
        "Is this the right file?",
        line=line,
        column=column,
    )


def too_many(what: str, most: int, line: int, column: int) -> NoReturn:
    """Refuses what is too long to be a spec, or specs."""
    raise ReadingError(
        "PS000",
        f"expected at most {most} {what}, received more.",
        "Is this the right file? A spec is about a page long.",
        line=line,
        column=column,
    )
