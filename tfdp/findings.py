"""What every check returns: a finding with an id, a severity, a place, a message and a remedy."""

from __future__ import annotations

import enum
from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict


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
        return f"{prefix}{self.id} {self.severity.value}: {self.where}: {self.message} {self.fix}"


def errors(findings: Iterable[Finding]) -> list[Finding]:
    """The findings that block."""
    return [finding for finding in findings if finding.severity is Severity.ERROR]
