"""What every check returns: a finding with an id, a severity, a place, a message and a remedy."""

from __future__ import annotations

import enum
import unicodedata
from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict

# Control, format, surrogate, unassigned to anyone (private use), and the two separators that break lines.
_STEERING = frozenset({"Cc", "Cf", "Cs", "Co", "Zl", "Zp"})


class Severity(enum.StrEnum):
    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


class Finding(BaseModel):
    """One result of a check.

    Attributes:
        id: stable identifier, such as "PS003".
        severity: an error blocks, a warning wants a decision, a note informs.
        where: dotted path of the offending field ("claim.delta") or name of the layer.
        message: what was expected and what was received.
        fix: what to do about it.
        file, line, column: position in the file, 1-based, when it came from one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    severity: Severity
    where: str
    message: str
    fix: str
    file: str | None = None
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        position = [str(part) for part in (self.file, self.line, self.column) if part is not None]
        prefix = ":".join(position) + ": " if position else ""
        return printable(f"{prefix}{self.id} {self.severity.value}: {self.where}: {self.message} {self.fix}")


def printable(text: str) -> str:
    r"""The text with everything that could steer a terminal or hide a word written out, such as an escape as \x1b.

    Field names, file names and quoted values come from files that somebody else wrote: control characters, lone
    surrogates, line separators and marks that reverse the direction of reading are shown, not sent.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(_visible(character) for character in text)


def _visible(character: str) -> str:
    if unicodedata.category(character) not in _STEERING:
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def errors(findings: Iterable[Finding]) -> list[Finding]:
    """The findings that block."""
    return [finding for finding in findings if finding.severity is Severity.ERROR]
