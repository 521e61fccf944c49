"""Findings as a compiler prints them: place, message, the line with a caret, the remedy."""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence

from tfdp.cli.checking.report import ORDER, Report
from tfdp.cli.checking.sources import Source
from tfdp.findings import Finding, printable

_STYLES = {"error": "31;1", "warning": "33;1", "note": "36;1", "place": "1", "frame": "34;1", "good": "32;1"}
_MOST = 30  # findings of one file
_WIDTH = 100  # of an excerpt: a longer line is shown around its column
_YAML_LINE = re.compile("\r\n|[\n\r\x85\u2028\u2029]")
# A quoted text, a key, or a value: up to a comma or bracket within brackets, else up to a comment.
_QUOTED_OR_KEY = r'"(?:[^"\\]|\\.)*"|\'(?:[^\']|\'\')*\'|[\w.+-]+(?=\s*:(?:\s|$))|'
_IN_BRACKETS = re.compile(_QUOTED_OR_KEY + r"[^\s,#\]}](?:[^,#\]}\n]*[^\s,#\]}])?")
_IN_BLOCK = re.compile(_QUOTED_OR_KEY + r"[^\s#](?:\S|\s+(?=[^\s#]))*")

Style = Callable[[str, str], str]


def coloured(text: str, style: str) -> str:
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m"


def plain(text: str, style: str) -> str:
    return text


def render(report: Report, *, colour: bool) -> str:
    """The whole report, a line end at its end."""
    style = coloured if colour else plain
    texts = {source.name: source for source in report.sources}
    parts = []
    for name, group in itertools.groupby(report.findings, key=lambda finding: finding.file):
        findings = list(group)
        shown = _most_severe(findings)
        parts += [_finding(finding, texts.get(name or ""), style) for finding in shown]
        if left := len(findings) - len(shown):
            where = f"{printable(name)}: " if name else ""
            parts.append(f"{style(where, 'place')}and {_count(left, 'more finding')}; --format json lists all.\n\n")
    counts = [_count(report.count(severity), severity.value) for severity in ORDER]
    if report.waived:
        counts.append(f"{len(report.waived)} waived")
    summary = f"{_count(report.specs, 'spec')}: {', '.join(counts)}."
    parts.append(style(summary, "error" if report.failed else "good") + "\n")
    if report.idle:
        idle = ", ".join(dict.fromkeys(waiver.finding for waiver in report.idle))
        parts.append(f"Waived, but not found: {idle}. Delete such a waiver where nothing else needs it.\n")
    if report.findings:
        ids = list(dict.fromkeys(finding.id for finding in report.findings))
        parts.append(f"Why it matters: tfdp explain {' '.join(ids)}\n")
    return "".join(parts)


def _most_severe(findings: Sequence[Finding]) -> list[Finding]:
    """As many as a person reads, in their order."""
    chosen = sorted(range(len(findings)), key=lambda at: ORDER.index(findings[at].severity))[:_MOST]
    return [findings[at] for at in sorted(chosen)]


def _finding(finding: Finding, source: Source | None, style: Style) -> str:
    place = ":".join(str(part) for part in (finding.file, finding.line, finding.column) if part is not None)
    severity = finding.severity.value
    lines = [
        style(f"{printable(place)}: " if place else "", "place")
        + style(f"{severity}[{finding.id}]", severity)
        + f": {printable(finding.where)}: {printable(finding.message)}"
    ]
    margin = " "
    if source is not None and finding.line is not None and finding.column is not None:
        margin = " " * len(str(finding.line))
        lines += _excerpt(source, finding.line, finding.column, style, severity)
    lines.append(f"{margin} {style('=', 'frame')} fix: {printable(finding.fix)}")
    return "\n".join(lines) + "\n\n"


def _excerpt(source: Source, number: int, column: int, style: Style, severity: str) -> Iterator[str]:
    lines = _YAML_LINE.split(source.text) if source.format == "yaml" else source.text.split("\n")
    if not 1 <= number <= len(lines):
        return
    line = lines[number - 1].removeprefix("\ufeff") if number == 1 else lines[number - 1]
    at = min(column - 1, len(line))
    pattern = _IN_BRACKETS if source.format == "json" or any(bracket in line[:at] for bracket in "[{") else _IN_BLOCK
    token = pattern.match(line, at, at + 10 * _WIDTH)
    length = len(token[0]) if token else 1
    start = max(0, at - _WIDTH // 2) if len(line) > _WIDTH else 0
    before, marked = line[start:at], line[at : at + min(length, _WIDTH - (at - start))]
    after = line[at + len(marked) : start + _WIDTH]
    lead = "..." if start else ""
    shown = lead + "".join(printable(part.replace("\t", " ")) for part in (before, marked, after)).rstrip()
    if start + _WIDTH < len(line):
        shown += "..."
    margin = " " * len(str(number))
    bar = style("|", "frame")
    caret = "^" * max(1, _columns(printable(marked.replace("\t", " "))))
    yield f"{margin} {bar}"
    yield f"{style(str(number), 'frame')} {bar} {shown}"
    indent = " " * (len(lead) + _columns(printable(before.replace("\t", " "))))
    yield f"{margin} {bar} {indent}{style(caret, severity)}"


def _columns(text: str) -> int:
    """Columns of a terminal that a text takes."""
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
