"""`tfdp budget show`."""

from __future__ import annotations

import json
import re

import pytest

from tfdp import PrivacySpec, make_plan
from tfdp.budget import note_head, register
from tfdp.ledger import Ledger


@pytest.fixture
def spec(plan_of, tmp_path):
    """A spec with two runs, of which one was cut short, on its ledger."""

    def write(**budget):
        stated = plan_of(steps=10, noise=2.0).spec.to_dict()
        stated["budget"] = {"dataset_id": "letters", "ledger": str(tmp_path / "budget.jsonl"), **budget}
        (tmp_path / "privacy.json").write_text(json.dumps(stated))
        return tmp_path / "privacy.json"

    plan = make_plan(PrivacySpec.from_file(write()))
    for name, steps in (("a", 10), ("b", 3)):
        with Ledger.create_or_open(tmp_path / name / "ledger.jsonl", plan.to_dict()) as ledger:
            register(plan, ledger)
            for step in range(1, steps + 1):
                ledger.append_step(step)
            note_head(plan, ledger)
    return write


def test_numbers(command, spec, tmp_path):
    code, out, err = command("budget", "show", spec(epsilon_cap=100.0), "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert [(run["steps"], run["planned_steps"], run["state"]) for run in report["runs"]] == [
        (10, 10, "spent"),
        (3, 10, "spent"),
    ]
    alone = [run["epsilon"]["value"] for run in report["runs"]]
    assert max(alone) < report["epsilon"]["value"] < sum(alone)
    assert (report["delta"], report["epsilon_cap"], report["state"]) == (1e-3, 100.0, "within the cap")
    less = json.loads(command("budget", "show", tmp_path / "budget.jsonl", "--delta", "1e-6", "--json")[1])
    assert less["epsilon"]["value"] > report["epsilon"]["value"]
    assert (less["epsilon_cap"], less["state"]) == (None, "no cap")


def test_text_and_caps(command, spec):
    total = json.loads(command("budget", "show", spec(), "--json")[1])["epsilon"]["value"]
    for cap, code, state in ((total * 2, 0, "within the cap"), (total * 1.1, 0, "PS033"), (total * 0.9, 1, "PS032")):
        found, out, _ = command("budget", "show", spec(epsilon_cap=cap))
        assert found == code
        assert state in out
        told = re.search(r"epsilon (\S+) of (\S+) at delta", out)
        assert total <= float(told[1]) < total * 1.001  # rounded up: who copies it claims no less than it costs
        assert float(told[2]) == cap
        assert "letters at delta 0.001" in out


def test_a_ledger_that_was_cut_counts_as_planned(command, spec, tmp_path):
    """What it costs then is over a cap that it was within."""
    before = json.loads(command("budget", "show", spec(), "--json")[1])["epsilon"]["value"]
    path = tmp_path / "b" / "ledger.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    code, out, _ = command("budget", "show", spec(epsilon_cap=before * 1.01), "--json")
    report = json.loads(out)
    assert [(run["steps"], run["state"]) for run in report["runs"]] == [(10, "spent"), (10, "ledger changed")]
    assert (code, report["state"]) == (1, "PS032: over the cap")
    assert "1 run counts as planned: its ledger is missing or was changed" in command("budget", "show", spec())[1]


def test_wrong_calls(command, spec, tmp_path):
    path = spec()
    stated = json.loads(path.read_text())
    stated["budget"] = None
    path.write_text(json.dumps(stated))
    code, _, err = command("budget", "show", path)
    assert code == 2
    assert "Expected a spec with budget.ledger" in err
    assert command("budget", "show", tmp_path / "budget.jsonl", "--delta", "2")[0] == 2
    assert command("budget", "show", tmp_path / "none")[0] == 2
    (tmp_path / "budget.jsonl").write_text("{}\n")
    assert command("budget", "show", tmp_path / "budget.jsonl")[0] == 1


def test_trials_are_declared(command, spec, tmp_path):
    path = spec()
    code, out, _ = command("budget", "trials", path, "--mean", "6")
    assert code == 0
    count = int(out.split()[1])
    assert count >= 1
    assert "release the best of them only" in out
    (line,) = [
        each for each in map(json.loads, (tmp_path / "budget.jsonl").read_text().splitlines()) if "count" in each
    ]
    assert (line["count"], line["mean"], line["shape"]) == (count, 6.0, 1.0)
    assert command("budget", "trials", path, "--mean", "1")[0] == 2
