"""`tfdp ledger verify`: what it sees, and how it says so."""

from __future__ import annotations

import json
import pathlib
import types

import numpy as np
import pytest

from tfdp.card import export
from tfdp.ledger import Ledger, read_ledger
from tfdp.resume import Position, write_checkpoint
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


class Model:
    """All that a checkpoint and an export ask of a model."""

    name = "model"
    trainable_variables = (np.ones(3),)
    optimizer = types.SimpleNamespace(variables=[], iterations=types.SimpleNamespace(numpy=lambda: 3))

    def get_weights(self):
        return list(self.trainable_variables)

    def save(self, path):
        pathlib.Path(path).write_bytes(b"weights")


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("harm", ["cut", "another"])
def test_what_a_checkpoint_remembers(command, run, tmp_path, elsewhere, harm):
    """A ledger that holds together, and is shorter than the checkpoint says, or not its own."""
    folder, plan = run
    path, directory = folder / "ledger.jsonl", tmp_path / ("kept" if elsewhere else "checkpoint")
    with Ledger.create_or_open(path, plan.to_dict()) as ledger:
        write_checkpoint(directory, Model(), plan, ledger, Position())
    arguments = ("ledger", "verify", folder, *(("--checkpoint", directory) if elsewhere else ()))
    code, out, _ = command(*arguments)
    assert code == 0
    assert f"holds what {directory / 'checkpoint.npz'} remember" in out
    if harm == "cut":
        path.write_bytes(b"".join(lines_of(path)[:-1]))
    else:
        path.unlink()
        with Ledger.create_or_open(path, plan.to_dict()) as ledger:
            for step in range(1, 9):
                ledger.append_step(step)
    code, _, err = command(*arguments)
    assert code == 1
    assert "with 5 lines or more. Received: " + ("4 lines of it" if harm == "cut" else "9 lines of another") in err


def test_what_a_card_remembers(command, run):
    folder, plan = run
    path = folder / "ledger.jsonl"
    export(Model(), folder)
    with Ledger.create_or_open(path, plan.to_dict()) as ledger:
        ledger.append_step(4)  # a longer one is still the one that the card was made from
    code, out, _ = command("ledger", "verify", folder)
    assert code == 0
    assert "MODEL_CARD.json remember" in out
    path.write_bytes(b"".join(lines_of(path)[:-2]))
    code, _, err = command("ledger", "verify", folder)
    assert code == 1
    assert "the ledger that" in err
    assert "never had the digest" in err


def test_no_ledger(command, tmp_path):
    assert command("ledger", "verify", tmp_path)[0] == 1
    assert command("ledger", "verify", tmp_path / "none")[0] == 2
