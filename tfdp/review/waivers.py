"""What a waiver excuses: a warning or a note, for a reason, by an owner, until a day.

No error can be waived. Most errors say that the claim is not true, and no signature makes it so; the others (PS032, the
cap of a budget; PS052, an attack that the spec requires) come from a field of the spec, and changing that field is the
reviewed way. Findings about waivers cannot be waived either.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from dataclasses import dataclass

from tfdp.findings import Finding, Severity
from tfdp.review.catalogue import CATALOGUE
from tfdp.spec import PrivacySpec, Waiver

_SYNTAX = (
    ("finding", "{id}"),
    ("reason", "<why it is acceptable here>"),
    ("owner", "<who answers for it>"),
    ("expires", "<YYYY-MM-DD>"),
)


@dataclass(frozen=True)
class Waived:
    """A finding that is accepted, and by which waiver."""

    finding: Finding
    waiver: Waiver


@dataclass(frozen=True)
class Judged:
    """Findings after the waivers of their spec.

    Attributes:
        findings: what is left, with the findings about the waivers themselves.
        waived: what is accepted.
        idle: waivers in force of findings that are not there; with other data or another run they may be.
    """

    findings: tuple[Finding, ...]
    waived: tuple[Waived, ...]
    idle: tuple[Waiver, ...] = ()


def written_waiver(spec: PrivacySpec, id: str) -> str:
    """A waiver to be copied, apart from what only its owner knows."""
    fields = ", ".join(spec.snippet(name, value.format(id=id)) for name, value in _SYNTAX)
    return f"add to waivers {{{fields}}}" if spec.waivers else spec.snippet("waivers", f"[{{{fields}}}]")


def waivable(finding: Finding) -> bool:
    """Whether anybody can excuse this finding."""
    entry = CATALOGUE.get(finding.id)
    return finding.severity is not Severity.ERROR and entry is not None and entry.waivable


def apply_waivers(spec: PrivacySpec, findings: Sequence[Finding], today: datetime.date) -> Judged:
    """Takes out of `findings` what the waivers of `spec` excuse on the day `today`; the last day still counts."""
    in_force: dict[str, Waiver] = {}
    ended: dict[str, Waiver] = {}
    about: list[Finding] = []
    for index, waiver in enumerate(spec.waivers):
        about += (problems := _problems(spec, index, waiver, today))
        if not problems:
            in_force.setdefault(waiver.finding, waiver)
        elif waiver.expires < today:
            ended[waiver.finding] = waiver
    kept: list[Finding] = []
    waived: list[Waived] = []
    for finding in findings:
        if finding.id in in_force and waivable(finding):
            waived.append(Waived(finding, in_force[finding.id]))
        elif finding.id in in_force:
            fix = f"{finding.fix} The waiver of {finding.id} has no effect: an error cannot be waived."
            kept.append(finding.model_copy(update={"fix": fix}))
        elif finding.id in ended:
            fix = f"{finding.fix} Its waiver ended on {ended[finding.id].expires}."
            kept.append(finding.model_copy(update={"fix": fix}))
        else:
            kept.append(finding)
    kept = sorted([*kept, *about], key=lambda finding: (finding.line or 0, finding.column or 0))
    there = {finding.id for finding in findings}
    idle = [waiver for id, waiver in in_force.items() if id not in there]
    return Judged(tuple(kept), tuple(waived), tuple(idle))


def titled(finding: Finding) -> Finding:
    """A finding about the id of a waiver, with the titles of the ids that it may stand for."""
    if not re.fullmatch(r"waivers\[\d+\]\.finding", finding.where) or not finding.fix.startswith("Did you mean PS"):
        return finding
    meant = [CATALOGUE[id] for id in re.findall(r"PS\d{3}", finding.fix) if id in CATALOGUE]
    if not meant:
        return finding.model_copy(update={"fix": "No finding has such an id: `tfdp explain` lists every one."})
    told = " or ".join(f"{entry.id} ({entry.title.removesuffix('.')})" for entry in meant)
    return finding.model_copy(update={"fix": f"Did you mean {told}?"})


def _problems(spec: PrivacySpec, index: int, waiver: Waiver, today: datetime.date) -> list[Finding]:
    """PS060, PS061, PS062."""
    found = []
    entry = CATALOGUE.get(waiver.finding)
    if entry is None or not entry.waivable:
        what = "no such finding" if entry is None else "an error" if "error" in entry.severities else "never excused"
        message = f"expected the id of a warning or a note, received {waiver.finding}, which is {what}."
        fix = "Delete the waiver: it has no effect."
        # Nothing else about it matters: an owner or a later day would not help.
        return [spec.finding("PS062", Severity.WARNING, ("waivers", index, "finding"), message, fix)]
    if waiver.expires < today:
        message = f"expected a waiver of {waiver.finding} that is in force, received one that ended {waiver.expires}."
        later = today + datetime.timedelta(days=90)
        fix = (
            f"Mend what it excuses, or have it renewed in a review and write the new last day in "
            f"waivers[{index}].expires, such as {spec.snippet('expires', str(later))}."
        )
        found.append(spec.finding("PS060", Severity.ERROR, ("waivers", index, "expires"), message, fix))
    if waiver.owner is None:
        message = f"expected somebody who answers for the waiver of {waiver.finding}, received nobody."
        owner = spec.snippet("owner", "<who answers for it>")
        fix = f"Add owner to waivers[{index}], such as {owner}; until then it excuses nothing."
        found.append(spec.finding("PS061", Severity.WARNING, ("waivers", index, "owner"), message, fix))
    if index == 0 and found:
        written = ", ".join(spec.snippet(name, value.format(id=waiver.finding)) for name, value in _SYNTAX)
        fix = f"{found[0].fix} A waiver is written: {{{written}}}"
        found[0] = found[0].model_copy(update={"fix": fix})
    return found
