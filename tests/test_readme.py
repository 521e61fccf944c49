"""The README's Python runs as it stands, and its shell commands exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.mark.quick
def test_python_runs_and_the_card_holds(tmp_path, monkeypatch):
    import tfdp

    monkeypatch.chdir(tmp_path)
    (code,) = blocks("python")
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    record = tfdp.read_ledger("run/ledger.jsonl")
    assert record.steps == 20
    assert 0 < record.epsilon() <= 8.0
    assert not [f for f in tfdp.check_card("run") if f.severity == "error"]


def test_commands_exist():
    from tfdp.cli import app

    named = {line.split()[1] for block in blocks("sh") for line in block.splitlines() if line.startswith("tfdp ")}
    assert named >= {"validate", "account", "calibrate", "train", "card"}
    for command in named:
        assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0, command


def test_make_targets_exist():
    makefile = (Path(__file__).parents[1] / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make (\w+)", README, re.MULTILINE):
        assert f"\n{target}:" in makefile
