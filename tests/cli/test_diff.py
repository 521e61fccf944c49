"""`tfdp diff`: exit codes, formats, git, and text that is hostile to whoever prints it."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess

import pytest

from tfdp.cli import main
from tfdp.comparison.rendering import code, shown

SPEC = """\
schema_version: "1.0"
claim:
  epsilon: 4
  delta: 1e-6
  adjacency: add_or_remove_one
  privacy_unit: {kind: example, description: one text}
  data_accesses: [training]
data: {num_units: 1000, size_is_public: true}
mechanism: {clip_norm: 1.0}
sampling: {scheme: poisson, expected_batch_size: 50, steps: 20}
"""


@pytest.fixture
def run(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")

    def call(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main(["diff", *(str(argument) for argument in arguments)])
        out, err = capsys.readouterr()
        return caught.value.code or 0, out, err

    return call


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Writes specs with a part replaced, in the working directory."""
    monkeypatch.chdir(tmp_path)

    def write(name: str, old: str = "", new: str = "") -> str:
        assert old in SPEC
        pathlib.Path(name).write_text(SPEC.replace(old, new) if old else SPEC, encoding="utf-8")
        return name

    return write


def test_text(run, files):
    code, out, err = run(files("a.yaml"), files("b.yaml", "epsilon: 4", "epsilon: 5"))
    assert (code, err) == (1, "")
    assert out.splitlines() == [
        "weaker: claim.epsilon: 4 -> 5",
        "    The bound on the privacy loss is larger.",
        "a.yaml -> b.yaml: Privacy becomes weaker.",
    ]


def test_nothing_changed_but_the_notation(run, files):
    code, out, _ = run(files("a.yaml"), files("b.yaml", "epsilon: 4", "epsilon: 4.0  # as before"))
    assert (code, out) == (0, "a.yaml -> b.yaml: Nothing changed.\n")


@pytest.mark.parametrize(
    ("old", "new", "codes"),
    [
        ("epsilon: 4", "epsilon: 3", (0, 0, 0)),
        ("epsilon: 4", "epsilon: 5", (1, 1, 0)),
        ("one text", "one word", (1, 0, 0)),
        ("epsilon: 4\n  delta: 1e-6", "epsilon: 3\n  delta: 2e-6", (1, 1, 0)),
    ],
    ids=["stronger", "weaker", "incomparable", "mixed"],
)
def test_exit_codes(run, files, old, new, codes):
    one, other = files("a.yaml"), files("b.yaml", old, new)
    assert tuple(run(one, other, "--fail-on", level)[0] for level in ("incomparable", "weaker", "never")) == codes


def test_json(run, files):
    code, out, _ = run(files("a.yaml"), files("b.yaml", "1e-6", "1e-7"), "--format", "json")
    report = json.loads(out)
    assert code == 0
    assert (report["verdict"], report["failed"], report["kind"]) == ("stronger", False, "spec")
    (change,) = report["changes"]
    assert change["where"] == "claim.delta"
    assert (change["old"], change["new"], change["direction"]) == (1e-6, 1e-7, "stronger")


def test_markdown(run, files):
    code, out, _ = run(
        files("a.yaml"), files("b.yaml", "epsilon: 4", "epsilon: 5").replace("b", "b"), "--format", "markdown"
    )
    assert code == 1
    lines = out.splitlines()
    assert lines[0] == "### Privacy becomes weaker"
    assert "| **weaker** | `claim.epsilon` | `4` | `5` | The bound on the privacy loss is larger. |" in lines


HOSTILE = "x|y `z` ``` @team #1 <img src=x onerror=alert(1)> [a](javascript:b) \\u001b[31m \\n---\\n\\u202e"


def test_what_a_file_says_is_text(run, files):
    one, other = files("a.yaml"), files("b.yaml", "one text", f'"{HOSTILE}"')
    _, out, _ = run(one, other, "--format", "markdown")
    (row,) = [line for line in out.splitlines() if "`claim.privacy_unit.description`" in line]
    cells = row.split("|")
    assert len(cells) == 7, "five cells: the pipe of the text makes none"
    assert cells[4].strip().startswith("````") and cells[4].strip().endswith("````")  # noqa: PT018
    for format in ("markdown", "text"):
        _, out, _ = run(one, other, "--format", format)
        assert not {"\x1b", "\u202e"} & set(out)
        assert "\\x1b[31m" in out


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a", "`a`"), ("`", "`` ` ``"), ("a``b", "```a``b```"), ("a|b", "`a\u00a6b`"), ("", "` `"), (" \n", "`\\x0a`")],
)
def test_code_spans(text, expected):
    assert code(text) == expected


def test_values_on_one_line():
    assert len(shown("a\nb\u2028\x9b\x0c").splitlines()) == 1
    assert shown(1 / 3) == "0.333333"
    assert shown("y" * 500) == "y" * 157 + "..."
    assert [shown(value) for value in (None, True, 3, ["a", "b"], [])] == ["nothing", "true", "3", "a, b", "nothing"]


def test_values_that_look_alike_are_shown_with_every_digit(run, files):
    code, out, _ = run(files("a.yaml"), files("b.yaml", "epsilon: 4", "epsilon: 4.0000001"))
    assert code == 1
    assert "claim.epsilon: 4.0 -> 4.0000001" in out


def git(*arguments: str) -> None:
    identity = {
        "GIT_AUTHOR_NAME": "a",
        "GIT_AUTHOR_EMAIL": "a@b",
        "GIT_COMMITTER_NAME": "a",
        "GIT_COMMITTER_EMAIL": "a@b",
    }
    environment = {**os.environ, **identity, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    subprocess.run(["git", *arguments], check=True, capture_output=True, env=environment)


def test_git(run, files, monkeypatch):
    git("init", "--initial-branch=main")
    pathlib.Path("specs").mkdir()
    files("specs/privacy.yaml")
    git("add", ".")
    git("commit", "-m", "first")
    files("specs/privacy.yaml", "epsilon: 4", "epsilon: 5")
    git("commit", "-am", "second")
    files("specs/privacy.yaml", "epsilon: 4", "epsilon: 3")

    assert run("HEAD~1:specs/privacy.yaml", "HEAD:specs/privacy.yaml")[0] == 1
    code, out, _ = run("HEAD:specs/privacy.yaml", "specs/privacy.yaml")
    assert code == 0
    assert "HEAD:specs/privacy.yaml -> specs/privacy.yaml: Privacy becomes stronger." in out
    monkeypatch.chdir("specs")
    assert run("main~1:./privacy.yaml", "privacy.yaml")[0] == 0
    for wrong in ("main:absent.yaml", "absent:privacy.yaml", "--output=x:y.yaml", ":privacy.yaml"):
        assert run("--", wrong, "privacy.yaml")[0] == 2, wrong


def test_what_git_holds_is_read_as_strictly(run, files):
    git("init", "--initial-branch=main")
    files("privacy.yaml", "epsilon: 4", "epsilon: '4'")
    git("add", ".")
    git("commit", "-m", "first")
    code, out, err = run("main:privacy.yaml", files("new.yaml"))
    assert (code, out) == (1, "")
    assert "main:privacy.yaml:3:12: PS002" in err


class TestSeveralSpecs:
    """A YAML file with a spec in each document."""

    @pytest.fixture
    def two(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        second = SPEC.replace("one text", "one letter").replace("1000", "2000")

        def write(name: str, epsilon: str = "4", *, only: bool = False) -> str:
            text = second.replace("epsilon: 4", f"epsilon: {epsilon}")
            pathlib.Path(name).write_text(text if only else f"{SPEC}---\n{text}", encoding="utf-8")
            return name

        return write

    def test_text(self, run, two):
        code, out, err = run(two("a.yaml"), two("b.yaml", "5"))
        assert (code, err) == (1, "")
        assert out.splitlines() == [
            "a.yaml (document 1 of 2) -> b.yaml (document 1 of 2): Nothing changed.",
            "weaker: claim.epsilon: 4 -> 5",
            "    The bound on the privacy loss is larger.",
            "a.yaml (document 2 of 2) -> b.yaml (document 2 of 2): Privacy becomes weaker.",
            "a.yaml -> b.yaml: Privacy becomes weaker.",
        ]

    @pytest.mark.parametrize(
        ("epsilon", "only", "codes"),
        [("4", False, (0, 0)), ("3", False, (0, 0)), ("5", False, (1, 1)), ("4", True, (1, 1))],
    )
    def test_exit_codes(self, run, two, epsilon, only, codes):
        one, other = two("a.yaml"), two("b.yaml", epsilon, only=only)
        assert tuple(run(one, other, "--fail-on", level)[0] for level in ("incomparable", "weaker")) == codes

    def test_a_spec_that_is_new(self, run, two):
        old, new = two("a.yaml", only=True), two("b.yaml")
        code, out, _ = run(old, new)
        assert code == 1
        assert "incomparable: spec: nothing -> present\n    It is one more release" in out
        _, out, _ = run(old, new, "--format", "markdown")
        assert "| **incomparable** | `spec` | `nothing` | `present` | It is one more release" in out
        assert "without effect on the guarantee" not in out
        assert run(old, new, "--fail-on", "weaker")[0] == 0

    def test_markdown(self, run, two):
        _, out, _ = run(two("a.yaml"), two("b.yaml", "5"), "--format", "markdown")
        lines = out.splitlines()
        assert lines[0] == "### Privacy becomes weaker"
        assert [line for line in lines if line.startswith("####")] == ["#### Privacy becomes weaker"]
        assert "`a.yaml (document 2 of 2)` compared with `b.yaml (document 2 of 2)`" in lines
        assert "| **weaker** | `claim.epsilon` | `4` | `5` | The bound on the privacy loss is larger. |" in lines

    def test_json(self, run, two):
        report = json.loads(run(two("a.yaml"), two("b.yaml", "3"), "--format", "json")[1])
        assert (report["verdict"], report["failed"], report["kind"]) == ("stronger", False, "spec")
        (change,) = report["changes"]
        assert (change["where"], change["old_document"], change["new_document"]) == ("claim.epsilon", 2, 2)

    def test_git(self, run, two):
        git("init", "--initial-branch=main")
        two("privacy.yaml")
        git("add", ".")
        git("commit", "-m", "first")
        assert run("main:privacy.yaml", two("privacy.yaml", "3"))[0] == 0
        code, out, _ = run("main:privacy.yaml", two("privacy.yaml", "5"))
        assert code == 1
        assert "main:privacy.yaml (document 2 of 2) -> privacy.yaml (document 2 of 2): Privacy becomes weaker." in out

    def test_one_that_is_broken_stops_the_comparison(self, run, two):
        code, out, err = run(two("a.yaml"), two("b.yaml", "'5'"))
        assert (code, out) == (1, "")
        assert "b.yaml:14:12: PS002" in err
        assert "(Document 2 of 2.)" in err


def test_wrong_calls(run, files, tmp_path):
    spec = files("a.yaml")
    assert run(spec)[0] == 2
    assert run(spec, tmp_path)[0] == 2, "a directory without a card"
    for arguments in ((spec, "absent.yaml"), ("absent.yaml", spec), (spec, "absent.yaml", "--format", "json")):
        code, out, err = run(*arguments)
        assert (code, out) == (2, "")
        assert "absent.yaml" in err


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("  data_accesses: [training]\n", ""),
        ("epsilon: 4", "epsilon: null"),
        ("one text", '"a|b `x` @team \\u202e"\n  z: ['),
    ],
)
@pytest.mark.parametrize("level", ["incomparable", "never"])
def test_a_spec_that_is_not_valid(run, files, old, new, level):
    valid, broken = files("a.yaml"), files("b.yaml", old, new)
    for side, pair in (("new", (valid, broken)), ("old", (broken, valid))):
        code, out, err = run(*pair, "--format", "json", "--fail-on", level)
        report = json.loads(out)
        assert (code, err, report["verdict"], report["failed"], report["changes"]) == (1, "", "incomparable", True, [])
        assert list(report["invalid"]) == [side]
        assert any(line.startswith("b.yaml:") for line in report["invalid"][side])
        code, out, err = run(*pair, "--format", "markdown", "--fail-on", level)
        assert (code, err) == (1, "")
        assert f"The {side} file is not valid, hence not comparable." in out
        faults = [line for line in out.splitlines() if "b.yaml:" in line]
        assert faults
        assert all(line.startswith("- `") and line.endswith("`") for line in faults)
        assert "\u202e" not in out
    _, out, _ = run(broken, broken, "--format", "markdown")
    assert "The old and the new files are not valid, hence not comparable." in out
