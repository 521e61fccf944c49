"""A `---` that cuts one spec in two: told once, in place of every section that each half lacks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from tfdp.findings import Finding, Severity
from tfdp.spec.documents import Document, ReadingError


@dataclass(frozen=True)
class Cut:
    """A separator that was perhaps not meant.

    Attributes:
        before: the document above it, when what that one lacks stands below.
        below: the document that it begins, and which is no spec of its own.
        line: where it is.
    """

    before: Document | None
    below: Document
    line: int

    def finding(self, file: str | None) -> Finding:
        known = [key for key in self.below.value if key in _SECTIONS]
        received = f"only {', '.join(known)}" if known else "none of its sections"
        return Finding(
            id="PS000",
            severity=Severity.ERROR,
            where="spec",
            message=f"expected a whole spec after ---, where document {self.below.number} begins at line {self.line}, "
            f"received {received}.",
            fix="Is this line meant? Delete it when what follows belongs to the document above.",
            file=file,
            line=self.line,
            column=1,
        )

    def explains(self, document: Document, finding: Finding) -> bool:
        """Whether a finding of a document would go away with the separator."""
        if document is self.below:
            return "." not in finding.where
        *_, name = finding.where.split(".")
        above = self.before is not None and document.number < self.below.number
        return above and "received nothing" in finding.message and name in self.below.value


def find_cuts(documents: Sequence[Document | ReadingError], required: Sequence[str]) -> list[Cut]:
    """The separators below which most of a spec is not there, or just what is not there above."""
    found: list[Cut] = []
    for above, below in itertools.pairwise(documents):
        if isinstance(below, ReadingError) or below.separator is None or not isinstance(below.value, dict):
            continue
        lacking = [name for name in required if name not in below.value]
        before = above if isinstance(above, Document) and isinstance(above.value, dict) else None
        split = before is not None and any(name not in before.value for name in required)
        if split and before is not None and any(name in before.value for name in below.value):
            split = False
        if 2 * len(lacking) > len(required) or (lacking and split):
            found.append(Cut(before, below, below.separator))
    return found


_SECTIONS = frozenset({"schema_version", "claim", "data", "mechanism", "sampling", "accountant"})
