"""What a validation found, before it is printed in one format or another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tfdp.cli.checking.sources import Source
from tfdp.findings import Finding, Severity
from tfdp.review.waivers import Waived
from tfdp.spec import Waiver

ORDER = (Severity.ERROR, Severity.WARNING, Severity.NOTE)


@dataclass(frozen=True)
class Report:
    """Findings of all sources.

    Attributes:
        sources: what was read, in order.
        specs: how many specs they hold.
        findings: in the order of the files.
        waived: what a waiver excuses.
        idle: waivers that excuse nothing of what was found.
        fail_on: the mildest severity that fails.
    """

    sources: Sequence[Source]
    specs: int
    findings: Sequence[Finding]
    waived: Sequence[Waived]
    fail_on: Severity
    idle: Sequence[Waiver] = ()

    def count(self, severity: Severity) -> int:
        return sum(finding.severity is severity for finding in self.findings)

    def fails(self, finding: Finding) -> bool:
        """Whether this finding makes the validation fail."""
        return ORDER.index(finding.severity) <= ORDER.index(self.fail_on)

    @property
    def failed(self) -> bool:
        return any(self.fails(finding) for finding in self.findings)
