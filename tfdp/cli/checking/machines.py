"""Findings for programs: JSON, GitHub annotations, SARIF 2.1.0 and JUnit XML.

What stands in a spec is written by somebody else: each format gets its own escaping, and nothing that steers a terminal
goes through (`printable`).
"""

from __future__ import annotations

import json
import os
import pathlib
import urllib.parse
import xml.etree.ElementTree as ElementTree
from typing import Any

from tfdp import __version__
from tfdp.cli.checking.report import ORDER, Report
from tfdp.files import sha256_text
from tfdp.findings import Finding, printable
from tfdp.review.catalogue import CATALOGUE

SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_GITHUB = {"error": "error", "warning": "warning", "note": "notice"}


def to_json(report: Report) -> str:
    """One JSON object; its fields are only ever added to."""
    values = {
        "files": [source.name for source in report.sources],
        "specs": report.specs,
        **{f"{severity.value}s": report.count(severity) for severity in ORDER},
        "failed": report.failed,
        "findings": [finding.model_dump(mode="json") for finding in report.findings],
        "waived": [
            {"finding": waived.finding.model_dump(mode="json"), "waiver": waived.waiver.model_dump(mode="json")}
            for waived in report.waived
        ],
    }
    return json.dumps(values, indent=2) + "\n"


def to_github(report: Report) -> str:
    """Workflow commands, which GitHub shows beside the line of the pull request."""
    return "".join(_annotation(finding) for finding in report.findings)


def to_sarif(report: Report) -> str:
    """A SARIF 2.1.0 log, for code scanning and editors; waived findings are in it as suppressed."""
    shown = [*report.findings, *(waived.finding for waived in report.waived)]
    ids = sorted({finding.id for finding in shown})
    results = [_sarif_result(finding, ids) for finding in report.findings]
    for waived in report.waived:
        reason = f"{waived.waiver.reason} (owner {waived.waiver.owner}, until {waived.waiver.expires})"
        suppressed = {"kind": "inSource", "status": "accepted", "justification": printable(reason)}
        results.append({**_sarif_result(waived.finding, ids), "suppressions": [suppressed]})
    driver = {"name": "tfdp", "version": __version__, "rules": [_sarif_rule(id) for id in ids]}
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}
    return json.dumps({"$schema": SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2) + "\n"


def to_junit(report: Report) -> str:
    """JUnit XML: a suite for each file, a failed case for each finding that fails."""
    root = ElementTree.Element("testsuites", name="tfdp validate")
    by_file: dict[str, list[Finding]] = {source.name: [] for source in report.sources}
    for finding in report.findings:
        by_file.setdefault(finding.file or "run", []).append(finding)
    total = failed = 0
    for name, findings in by_file.items():
        shown = printable(name)
        failing = sum(report.fails(finding) for finding in findings)
        cases = max(1, len(findings))
        total, failed = total + cases, failed + failing
        counts = {"name": shown, "tests": str(cases), "failures": str(failing), "errors": "0"}
        suite = ElementTree.SubElement(root, "testsuite", counts)
        if not findings:
            ElementTree.SubElement(suite, "testcase", classname=shown, name="review")
        for finding in findings:
            title = printable(f"{finding.id} {finding.where}")
            if finding.line is not None:
                title += f" (line {finding.line})"
            case = ElementTree.SubElement(suite, "testcase", classname=shown, name=title)
            if report.fails(finding):
                failure = {"type": finding.severity.value, "message": printable(finding.message)}
                ElementTree.SubElement(case, "failure", failure).text = str(finding)
            else:
                ElementTree.SubElement(case, "system-out").text = str(finding)
    root.set("tests", str(total))
    root.set("failures", str(failed))
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _annotation(finding: Finding) -> str:
    properties = {"file": finding.file, "line": finding.line, "col": finding.column, "title": finding.id}
    shown = ",".join(f"{name}={_escaped(value, ':,')}" for name, value in properties.items() if value is not None)
    message = _escaped(f"{finding.where}: {finding.message} {finding.fix}")
    return f"::{_GITHUB[finding.severity.value]} {shown}::{message}\n"


def _escaped(value: object, also: str = "") -> str:
    """GitHub's own escaping, the percent sign first."""
    text = printable(str(value)).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    for character in also:
        text = text.replace(character, f"%{ord(character):02X}")
    return text


def _sarif_rule(id: str) -> dict[str, Any]:
    entry = CATALOGUE[id]
    text = f"{entry.why} {entry.fix}"
    return {
        "id": id,
        "shortDescription": {"text": entry.title},
        "fullDescription": {"text": entry.why},
        "help": {"text": text, "markdown": f"**{entry.title}** {entry.why}\n\n*What to do:* {entry.fix}"},
        "defaultConfiguration": {"level": entry.severities[0]},
    }


def _sarif_result(finding: Finding, ids: list[str]) -> dict[str, Any]:
    where = printable(finding.where)
    location: dict[str, Any] = {"logicalLocations": [{"fullyQualifiedName": where}]}
    if finding.file is not None:
        location["physicalLocation"] = {"artifactLocation": {"uri": _uri(finding.file)}}
        if finding.line is not None:
            region = {"startLine": finding.line, "startColumn": finding.column or 1}
            location["physicalLocation"]["region"] = region
    return {
        "ruleId": finding.id,
        "ruleIndex": ids.index(finding.id),
        "level": finding.severity.value,
        "message": {"text": printable(f"{finding.where}: {finding.message} {finding.fix}")},
        "locations": [location],
        # Not the line: what was seen before stays the same finding when lines are added above it.
        "partialFingerprints": {"finding/v1": sha256_text(f"{finding.file} {finding.id} {where}")},
    }


def _uri(name: str) -> str:
    if os.path.isabs(name):
        return pathlib.Path(os.path.normpath(name)).as_uri()
    path = os.path.normpath(name).replace(os.sep, "/")
    return urllib.parse.quote(os.fsencode(path))
