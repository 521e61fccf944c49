"""`tfdp validate`, `tfdp schema`, and the frame they hang in."""

from __future__ import annotations

import json
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
GOOD = ROOT / "examples" / "specs" / "poisson.yaml"


@pytest.fixture
def run(command):
    return command


@pytest.fixture
def bad(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text(GOOD.read_text().replace("epsilon: 8", "epsilon: '8'"))
    return path


def test_good_spec(run):
    assert run("validate", GOOD) == (0, "1 spec: 0 errors, 0 warnings, 0 notes.\n", "")


def test_finding_as_a_compiler_prints_it(run, bad):
    code, out, err = run("validate", bad)
    assert (code, err) == (1, "")
    assert out.splitlines() == [
        f"{bad}:5:12: error[PS002]: claim.epsilon: expected a number, received '8'.",
        "  |",
        "5 |   epsilon: '8'",
        "  |            ^^^",
        "  = fix: Write 8 without quotes.",
        "",
        "1 spec: 1 error, 0 warnings, 0 notes.",
        "Why it matters: tfdp explain PS002",
    ]


def test_warning_does_not_block(run, tmp_path):
    path = tmp_path / "warned.yaml"
    path.write_text(GOOD.read_text().replace("epsilon: 8", "epsilon: 80"))
    code, out, _ = run("validate", path)
    assert code == 0
    assert "warning[PS023]" in out
    assert "1 spec: 0 errors, 1 warning, 0 notes." in out
    assert run("validate", path, "--fail-on", "warning")[0] == 1
    assert run("validate", GOOD, "--fail-on", "note")[0] == 0


@pytest.mark.parametrize(("deduplication", "told"), [("exact", True), ("none", False)])
def test_a_waiver_that_excuses_nothing_is_told(run, tmp_path, deduplication, told):
    path = tmp_path / "waived.yaml"
    text = GOOD.read_text().replace("deduplication: exact", f"deduplication: {deduplication}")
    path.write_text(f"{text}waivers: [{{finding: PS008, reason: r, owner: o, expires: 2999-12-31}}]\n")
    assert f"deduplication: {deduplication}" in path.read_text()
    code, out, _ = run("validate", path, "--fail-on", "note")
    assert code == 0
    assert ("Waived, but not found: PS008." in out) == told
    assert ("1 waived" in out) != told


@pytest.mark.parametrize("written", ["PS04", "PS4"])
def test_an_id_of_a_waiver_is_told_with_titles(run, tmp_path, written):
    path = tmp_path / "waived.yaml"
    path.write_text(f"{GOOD.read_text()}waivers: [{{finding: {written}, reason: r, expires: 2999-12-31}}]\n")
    _, out, _ = run("validate", path)
    assert "= fix: Did you mean PS004 (delta is above 1/(10 num_units)) or PS040 (Tuning on private data is not " in out


def test_several_files_are_all_reviewed(run, bad, tmp_path):
    code, out, _ = run("validate", bad, tmp_path / "absent.yaml", GOOD, tmp_path)
    assert code == 1
    assert "2 errors" in out
    assert "3 specs" in out, "the folder holds one that was named already"
    assert "absent.yaml: error[PS000]" in out


def test_json(run, bad):
    code, out, _ = run("validate", GOOD, bad, "--format", "json")
    assert code == 1
    report = json.loads(out)
    assert report["files"] == [str(GOOD), str(bad)]
    assert report["errors"] == 1
    (finding,) = report["findings"]
    assert (finding["id"], finding["severity"], finding["line"], finding["column"]) == ("PS002", "error", 5, 12)


def test_json_when_all_is_well(run):
    code, out, _ = run("validate", GOOD, "--format", "json")
    assert (code, json.loads(out)["findings"]) == (0, [])


def test_no_escape_sequences_and_no_markup(run, tmp_path):
    path = tmp_path / "[bold]x.yaml"
    path.write_text(GOOD.read_text().replace("kind: example", "kind: '[red]e[/red]'"))
    _, out, _ = run("validate", path)
    assert "\x1b" not in out
    assert "[bold]x.yaml:" in out
    assert "'[red]e[/red]'" in out


def test_long_messages_are_not_broken(run, tmp_path):
    path = tmp_path / ("x" * 120 + ".yaml")
    path.write_text(GOOD.read_text().replace("epsilon: 8", "epsilon: 0"))
    _, out, _ = run("validate", path)
    assert len(out.splitlines()) == 8


@pytest.mark.parametrize(
    "arguments", [("validate",), ("validate", GOOD, "--format", "xml"), ("validat", GOOD), ("schema", "nothing"), ()]
)
def test_wrong_calls(run, arguments):
    assert run(*arguments)[0] == 2


def test_help_teaches(run):
    code, out, _ = run("validate", "--help")
    assert code == 0
    assert "tfdp validate privacy.yaml" in out
    for option in ("--format", "--fail-on", "--data", "--run"):
        assert option in out
    code, out, _ = run("--help")
    assert code == 0
    assert "validate" in out
    assert "Exit codes" in out


def test_version(run):
    assert run("--version") == (0, "tfdp 0.1.0\n", "")


def test_errors_of_the_library_are_one_message(run, monkeypatch):
    from tfdp.errors import AccountingError

    def fail(*_: object) -> list[object]:
        raise AccountingError("expected this, received that.")

    monkeypatch.setattr("tfdp.cli.validate._findings", fail)
    assert run("validate", GOOD) == (1, "", "tfdp: expected this, received that.\n")


def test_schema_is_printed_and_written(run, tmp_path):
    code, out, _ = run("schema")
    assert code == 0
    assert json.loads(out)["$schema"].endswith("2020-12/schema")
    assert out == (ROOT / "schemas" / "privacy-spec-1.0.json").read_text()
    target = tmp_path / "schema.json"
    assert run("schema", "privacy-spec", "--output", target) == (0, "", "")
    assert target.read_text() == out


def test_schema_that_cannot_be_written(run, tmp_path):
    code, out, err = run("schema", "--output", tmp_path / "absent" / "schema.json")
    assert (code, out) == (1, "")
    assert "cannot write" in err
