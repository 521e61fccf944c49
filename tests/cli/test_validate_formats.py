"""The formats of `tfdp validate`: what a person sees, and what other programs read."""

from __future__ import annotations

import json
import os
import pathlib
import pty
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import jsonschema
import pytest

from tfdp.cli.checking import machines, text
from tfdp.cli.checking.report import Report
from tfdp.cli.checking.sources import Source
from tfdp.findings import Finding, Severity, printable
from tfdp.review.catalogue import BASE

# The whole schema of SARIF 2.1.0 (release 2.1.0-rtm.5, written in draft 04), unchanged, from the npm package
# @microsoft/jest-sarif 1.0.0-beta.0, licence MIT.
SCHEMA = json.loads((pathlib.Path(__file__).parent / "sarif-schema-2.1.0.json").read_text(encoding="utf-8"))
WAIVED = (
    BASE.replace("deduplication: exact", "deduplication: none").replace("epsilon: 1.2", "epsilon: '1.2'")
    + "---\n"
    + BASE.replace("deduplication: exact", "deduplication: none")
    + "waivers:\n  - {finding: PS008, reason: 'known', owner: Ada, expires: 2999-01-01}\n"
)
HOSTILE = "a: b,c%\r\n::error::d\x1b[31m\u202e]]>&<\"'\u2028"


def report(*findings: Finding, source: str = "", format: str = "yaml") -> Report:
    return Report([Source("a.yaml", source, format)], 1, findings, [], Severity.ERROR)


def finding(line: int | None = 1, column: int | None = 1, message: str = "m", **fields: object) -> Finding:
    values = {"id": "PS002", "severity": "error", "where": "claim.epsilon", "fix": "f.", "file": "a.yaml", **fields}
    return Finding(message=message, line=line, column=column, **values)


class TestText:
    @pytest.mark.parametrize(
        ("line", "column", "shown", "caret"),
        [
            ("  epsilon: 8  # e", 12, "  epsilon: 8  # e", "           ^"),
            ("  epsilon: '8 9' # e", 12, "  epsilon: '8 9' # e", "           ^^^^^"),
            ("a: {b: 12, c: 1}", 8, "a: {b: 12, c: 1}", "       ^^"),
            ('{"epsilon": 8}', 2, '{"epsilon": 8}', " ^^^^^^^^^"),
            ("epoch: 10", 1, "epoch: 10", "^^^^^"),
            ("units: 60,000 or so  # e", 8, "units: 60,000 or so  # e", "       ^^^^^^^^^^^^"),
            ("at: 10:30#x", 5, "at: 10:30#x", "    ^^^^^^^"),
            ("\tx: 1", 2, " x: 1", " ^"),
            ("\u6f22\u5b57: 1", 5, "\u6f22\u5b57: 1", "      ^"),
            ("x\x1b[31m: 1", 9, "x\\x1b[31m: 1", "           ^"),
            ("a: ", 4, "a:", "   ^"),
        ],
    )
    def test_caret(self, line, column, shown, caret):
        lines = text.render(report(finding(1, column), source=line), colour=False).splitlines()
        assert lines[1:4] == ["  |", f"1 | {shown}", f"  | {caret}"]

    def test_a_long_line_is_cut_around_its_column(self):
        lines = text.render(report(finding(1, 5001), source="x" * 5000 + "yy," + "x" * 5000), colour=False).splitlines()
        assert max(map(len, lines)) < 140
        assert lines[2][lines[3].index("^") :].startswith("yy")

    @pytest.mark.parametrize("position", [(99, 1), (1, 99), (None, None)])
    def test_a_place_outside_of_the_file_does_no_harm(self, position):
        assert "m" in text.render(report(finding(*position), source="a: 1"), colour=False)

    def test_lines_are_counted_as_the_reader_counts_them(self):
        rendered = text.render(report(finding(3, 1), source="a: 1\r\nb: 2\rc: 3\n"), colour=False)
        assert "3 | c: 3" in rendered

    def test_colour_on_a_terminal_only(self, tmp_path):
        path = tmp_path / "privacy.yaml"
        path.write_text(BASE.replace("1.2", "'1.2'"))
        call = [sys.executable, "-c", "from tfdp.cli import main; main()", "validate", str(path)]
        environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | {"TERM": "xterm"}

        def on_terminal(**more: str) -> str:
            above, below = pty.openpty()
            process = subprocess.Popen(call, stdout=below, env=environment | more)
            os.close(below)
            shown = b""
            while True:
                try:
                    part = os.read(above, 4096)
                except OSError:
                    break
                if not part:
                    break
                shown += part
            os.close(above)
            assert process.wait() == 1
            return shown.decode()

        assert "\x1b[31;1merror[PS002]\x1b[0m" in on_terminal()
        assert "\x1b" not in on_terminal(NO_COLOR="1")
        assert "\x1b" not in subprocess.run(call, env=environment, capture_output=True, text=True).stdout


class TestSarif:
    @pytest.mark.parametrize("stated", [WAIVED, BASE, "x", "", HOSTILE])
    def test_schema(self, command, tmp_path, stated):
        path = tmp_path / "privacy.yaml"
        path.write_text(stated)
        _, out, _ = command("validate", path, "--format", "sarif")
        jsonschema.Draft4Validator(SCHEMA, format_checker=jsonschema.Draft4Validator.FORMAT_CHECKER).validate(
            json.loads(out)
        )

    def test_content(self, command, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        pathlib.Path("a b#.yaml").write_text(WAIVED)
        code, out, _ = command("validate", "./a b#.yaml", "--format", "sarif")
        assert code == 1
        (run,) = json.loads(out)["runs"]
        assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == ["PS002", "PS008"]
        error, waived = run["results"]
        assert (error["ruleId"], error["ruleIndex"], error["level"]) == ("PS002", 0, "error")
        place = error["locations"][0]["physicalLocation"]
        assert place == {"artifactLocation": {"uri": "a%20b%23.yaml"}, "region": {"startLine": 3, "startColumn": 12}}
        assert (waived["ruleIndex"], waived["level"]) == (1, "warning")
        assert waived["suppressions"][0]["justification"] == "known (owner Ada, until 2999-01-01)"

    def test_the_schema_refuses_what_is_not_sarif(self):
        log = json.loads(machines.to_sarif(report(finding())))
        for change in (
            {"level": "fatal"},
            {"ruleIdd": "x"},
            {"message": {}},
            {"locations": [{"physicalLocation": {}}]},
        ):
            broken = json.loads(json.dumps(log))
            broken["runs"][0]["results"][0].update(change)
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate(broken, SCHEMA)


class TestGithub:
    def test_escaping(self):
        (line,) = machines.to_github(report(finding(message=HOSTILE, file="a,b:c%.yaml"))).splitlines()
        assert line.startswith("::error file=a%2Cb%3Ac%25.yaml,line=1,col=1,title=PS002::claim.epsilon: a: b,c%25")
        assert "\\x0d\\x0a::error::d\\x1b[31m\\u202e" in line

    def test_own_escapes(self):
        assert machines._escaped("%\r\n:,", ":,") == "%25\\x0d\\x0a%3A%2C"

    def test_severities(self):
        shown = machines.to_github(
            report(finding(severity="warning"), finding(severity="note", line=None, column=None))
        )
        assert re.findall(r"^::\w+ ", shown, re.MULTILINE) == ["::warning ", "::notice "]


class TestJunit:
    def test_counts_and_escaping(self):
        findings = [finding(message=HOSTILE), finding(severity="warning"), finding(None, None, file=None)]
        shown = Report([Source("a.yaml"), Source("b&.yaml")], 2, findings, [], Severity.ERROR)
        root = ElementTree.fromstring(machines.to_junit(shown))
        assert (root.get("tests"), root.get("failures")) == ("4", "2")
        assert [(suite.get("name"), suite.get("tests"), suite.get("failures")) for suite in root] == [
            ("a.yaml", "2", "1"),
            ("b&.yaml", "1", "0"),
            ("run", "1", "1"),
        ]
        assert root[0][0][0].get("message") == printable(HOSTILE)
        assert root[0][1][0].tag == "system-out"

    def test_fail_on_decides_what_fails(self):
        shown = Report([], 1, [finding(severity="warning")], [], Severity.WARNING)
        assert ElementTree.fromstring(machines.to_junit(shown)).get("failures") == "1"


def test_json_holds_what_was_waived(command, tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(WAIVED)
    shown = json.loads(command("validate", path, "--format", "json")[1])
    assert (shown["specs"], shown["errors"], shown["warnings"], shown["notes"], shown["failed"]) == (2, 1, 0, 0, True)
    assert shown["waived"][0]["finding"]["id"] == "PS008"
    assert shown["waived"][0]["waiver"]["owner"] == "Ada"
