"""`tfdp ledger verify`: what it sees, and how it says so."""

from __future__ import annotations

import json

import pytest

from tfdp.ledger import Ledger, read_ledger
from tfdp.spec.numbers import rounded_up


@pytest.fixture
def run(tmp_path, plan_of):
    plan = plan_of(steps=9)
    with Ledger.create_or_open(tmp_path / "ledger.jsonl", plan.to_dict()) as ledger:
        for step in (1, 2, 3):
            ledger.append_step(step)
    return tmp_path, plan


def test_a_ledger_that_holds(command, run):
    folder, plan = run
    code, out, _ = command("ledger", "verify", folder)
    assert code == 0
    assert "4 lines follow from one another" in out
    assert "3 of 9 spent" in out
    assert f"epsilon  {rounded_up(plan.epsilon(3))} at delta" in out
    assert read_ledger(folder / "ledger.jsonl").head.digest in out
    code, out, _ = command("ledger", "verify", folder / "ledger.jsonl", "--json")
    report = json.loads(out)
    assert (code, report["steps"], report["lines"], report["torn_last_line"]) == (0, 3, 4, False)
    assert report["epsilon"] == {"value": pytest.approx(plan.epsilon(3)), "unbounded": False}
    assert report["compared_with"] == []


def lines_of(path):
    return path.read_bytes().splitlines(keepends=True)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda lines: [lines[0], lines[1].replace(b'"step":1', b'"step":7'), *lines[2:]], "line 2"),
        (lambda lines: [lines[0], lines[2], lines[1], lines[3]], "line 2"),
        (lambda lines: [lines[0], lines[1], lines[3]], "line 3"),
        (lambda lines: [lines[0].replace(b"1.0", b"1.5", 1), *lines[1:]], "line 2"),
    ],
    ids=["edited", "reordered", "removed", "header"],
)
def test_changes_are_named_with_their_line(command, run, change, expected):
    path = run[0] / "ledger.jsonl"
    path.write_bytes(b"".join(change(lines_of(path))))
    code, _, err = command("ledger", "verify", path)
    assert code == 1
    assert f"{path}, {expected}: expected" in err


def test_a_torn_line_is_spent(command, run):
    path = run[0] / "ledger.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    code, out, _ = command("ledger", "verify", path)
    assert code == 0
    assert "3 of 9 spent, the last of them torn by a crash" in out


def test_no_ledger(command, tmp_path):
    assert command("ledger", "verify", tmp_path)[0] == 1
    assert command("ledger", "verify", tmp_path / "none")[0] == 2
