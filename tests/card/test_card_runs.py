"""Runs under a spec in review: what differs, what it costs together, and what cannot be added up."""

from __future__ import annotations

import json
import shutil

import pytest

from tfdp.card.runs import compare_runs
from tfdp.spec import PrivacySpec


def ids(findings):
    return sorted({(finding.id, finding.severity.value) for finding in findings})


def rewritten(run, **header):
    """The ledger with a header that says something else, and a chain that holds together again."""
    from tfdp.files import sha256_bytes

    lines = run.ledger.read_bytes().splitlines()
    first = json.loads(lines[0])
    for name, values in header.items():
        first[name] = {**first[name], **values}
    out, previous = [], "0" * 64
    for entry in (first, *map(json.loads, lines[1:])):
        line = json.dumps({**entry, "prev": previous}, sort_keys=True, separators=(",", ":")).encode("ascii")
        previous = sha256_bytes(line)
        out.append(line)
    run.ledger.write_bytes(b"\n".join(out) + b"\n")


def test_the_run_of_the_spec_has_no_finding(run):
    run.train()
    assert compare_runs(run.spec(), [run.directory]) == []
    assert compare_runs(run.spec(), [run.ledger]) == []


def test_what_concerns_the_release_only_may_change_afterwards(run):
    run.train()
    waivers = [{"finding": "PS008", "reason": "r", "owner": "A", "expires": "2999-01-01"}]
    assert compare_runs(run.spec(waivers=waivers, evaluation={"group_field": "x"}), [run.directory]) == []


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"mechanism": {"clip_norm": 1.0}}, "mechanism.clip_norm"),
        ({"mechanism": {"noise_multiplier": 0.9}}, "mechanism.noise_multiplier"),
        ({"sampling": {"steps": 31}}, "sampling.steps"),
        ({"sampling": {"expected_batch_size": 51}}, "sampling.expected_batch_size"),
        ({"claim": {"adjacency": "zero_out"}}, "claim.adjacency"),
        ({"claim": {"delta": 2e-5}}, "claim.delta"),
        ({"claim": {"epsilon": 7.0}}, "claim.epsilon"),
        ({"accountant": {"name": "rdp"}}, "accountant.name"),
    ],
)
def test_a_spec_that_was_changed_after_training(run, changes, field):
    run.train()
    findings = compare_runs(run.spec(**changes), [run.directory])
    assert ("PS031", "error") in ids(findings)
    assert field in {finding.where for finding in findings if finding.id == "PS030"}


def test_a_description_is_part_of_the_claim(run):
    run.train()
    unit = {**run.SPEC["claim"]["privacy_unit"], "description": "one author"}
    assert ids(compare_runs(run.spec(claim={"privacy_unit": unit}), [run.directory])) == [("PS031", "error")]


def test_places_are_those_of_the_spec(run):
    run.train()
    text = json.dumps(run.spec(mechanism={"clip_norm": 1.0}).to_dict(), indent=1)
    spec = PrivacySpec.from_text(text, "json", "privacy.json")
    (finding,) = [f for f in compare_runs(spec, [run.directory]) if f.where == "mechanism.clip_norm"]
    assert finding.file == "privacy.json"
    assert text.splitlines()[finding.line - 1][finding.column - 1 :].startswith("1.0")


def test_another_library(run):
    run.train()
    rewritten(run, versions={"dp-accounting": "0.5.0"})
    (finding,) = compare_runs(run.spec(), [run.directory])
    assert (finding.id, finding.severity.value) == ("PS030", "warning")
    assert "0.5.0" in finding.message


def test_a_header_that_was_changed(run):
    run.train()
    rewritten(run, plan={"noise_multiplier": 2.0})
    findings = compare_runs(run.spec(), [run.directory])
    assert {finding.where for finding in findings if finding.id == "PS030"} >= {"spec", "mechanism.noise_multiplier"}


def test_more_steps_than_planned(run):
    run.train(steps=45)
    findings = compare_runs(run.spec(), [run.directory])
    assert ("PS030", "error") in ids(findings)
    assert "received 45" in next(finding.message for finding in findings if finding.id == "PS030")


def test_steps_that_cost_more_than_the_claim(run):
    cheap = {**run.SPEC["claim"], "epsilon": 2.7}
    run.train(run.plan(claim=cheap), steps=90)
    assert ("PS020", "error") in ids(compare_runs(run.spec(claim=cheap), [run.directory]))


@pytest.mark.parametrize(("seed", "severity"), [(3, "error"), (None, "warning")])
def test_randomness(run, seed, severity):
    run.train(run.plan(mechanism={"rng": "prng"}, seed=seed))
    assert ids(compare_runs(run.spec(mechanism={"rng": "prng"}), [run.directory])) == [("PS042", severity)]


def test_what_the_card_measured(run):
    run.train().export(evaluation=None)
    assert {"PS050", "PS052", "PS070"} <= {finding.id for finding in compare_runs(run.spec(), [run.directory])}
    (run.directory / "MODEL_CARD.json").write_text("{}")
    assert ids(compare_runs(run.spec(), [run.directory])) == [("PS080", "error")]


class TestBudget:
    @pytest.fixture
    def other(self, run, tmp_path):
        """A discarded run of the same data beside the run of the spec; each costs about 1.97."""
        run.train()
        other = type(run)(tmp_path / "other")
        other.train(other.plan(sampling={**run.SPEC["sampling"], "steps": 31}))
        return other

    def spent(self, run, *directories, **budget):
        spec = run.spec(budget={"dataset_id": "letters", **budget})
        return [f for f in compare_runs(spec, directories) if f.id in ("PS032", "PS033", "PS034")]

    def test_every_run_counts(self, run, other):
        from tfdp.ledger import read_ledger

        total = read_ledger(run.ledger).epsilon() + read_ledger(other.ledger).epsilon()
        both = (run.directory, other.directory)
        assert ids(self.spent(run, *both, epsilon_cap=total * 0.99)) == [("PS032", "error")]
        assert ids(self.spent(run, *both, epsilon_cap=total * 1.01)) == [("PS033", "warning")]
        assert ids(self.spent(run, *both, epsilon_cap=total * 1.26)) == []
        assert ids(self.spent(run, run.directory, epsilon_cap=total)) == []

    def test_delta_too(self, run, other):
        both = (run.directory, other.directory)
        assert ids(self.spent(run, *both, delta_cap=1.9e-5)) == [("PS032", "error")]
        assert ids(self.spent(run, *both, delta_cap=3e-5)) == []

    def test_a_claim_that_has_not_run_counts_with_them(self, run, other):
        third = run.spec(sampling={"steps": 29}, budget={"dataset_id": "letters", "epsilon_cap": 8.5})
        findings = compare_runs(third, [run.directory, other.directory])
        assert ("PS032", "error") in ids(findings)
        assert ("PS031", "error") in ids(findings), "no run of this spec among them"

    @pytest.mark.parametrize("change", ["adjacency", "unit"])
    def test_different_currencies_are_not_added_up(self, run, tmp_path, change):
        run.train()
        unit = {"kind": "user", "description": "one author", "id_field": "author", "max_records_per_unit": 1}
        fields = {"adjacency": "zero_out"} if change == "adjacency" else {"privacy_unit": unit}
        other = type(run)(tmp_path / "other")
        other.train(other.plan(claim={**run.SPEC["claim"], **fields}))
        findings = self.spent(run, run.directory, other.directory, epsilon_cap=0.1)
        assert ids(findings) == [("PS034", "error")]


def test_ledgers_that_cannot_be_read(run, tmp_path):
    run.train()
    (tmp_path / "broken").mkdir()
    shutil.copy(run.ledger, tmp_path / "broken" / "ledger.jsonl")
    with open(tmp_path / "broken" / "ledger.jsonl", "ab") as file:
        file.write(b"{}\n")
    findings = compare_runs(run.spec(), [run.directory, tmp_path / "broken", tmp_path / "absent"])
    assert [finding.id for finding in findings] == ["PS030", "PS030"]


def test_the_command(run, tmp_path, capsys, monkeypatch):
    from tfdp.cli import main

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    run.train()
    path = tmp_path / "privacy.json"
    for changes, code in (({}, 0), ({"mechanism": {"clip_norm": 1.0}}, 1)):
        path.write_text(json.dumps(run.spec(**changes).to_dict()))
        with pytest.raises(SystemExit) as caught:
            main(["validate", str(path), "--run", str(run.directory)])
        assert (caught.value.code or 0) == code
    out = capsys.readouterr().out
    assert "error[PS031]" in out
    assert "error[PS030]: mechanism.clip_norm" in out
