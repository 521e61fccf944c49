"""Export and check: numbers come from the ledger, and a card that does not agree with it fails."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import re

import numpy as np
import pytest

from tfdp import accounting
from tfdp.card import check_card, json_schema, load_card, render_card
from tfdp.errors import CardError
from tfdp.findings import errors

ROOT = pathlib.Path(__file__).resolve().parents[2]


def bad(run, **arguments):
    return [(finding.id, finding.where) for finding in errors(check_card(run.directory, **arguments))]


def test_all_files_are_written_and_agree(run):
    paths = run.train().export()
    assert {path.name for path in paths.values()} == {
        "model.keras",
        "MODEL_CARD.json",
        "MODEL_CARD.md",
        "MODEL_CARD.html",
        "ledger.jsonl",
    }
    assert sorted(os.listdir(run.directory)) == sorted(path.name for path in paths.values())
    assert check_card(run.directory) == []
    assert check_card(run.directory / "MODEL_CARD.json", run.ledger) == []


def test_epsilon_is_that_of_the_executed_steps_and_not_of_the_plan(run):
    run.train(steps=20).export()
    event = accounting.step_event(scheme="poisson", sampling_probability=0.05, noise_multiplier=1.0, num_units=1000)
    executed = accounting.epsilon(event, 20, delta=1e-5, adjacency="add_or_remove_one")
    planned = accounting.epsilon(event, 30, delta=1e-5, adjacency="add_or_remove_one")
    card = run.card
    assert card["claim"]["epsilon"] == {"value": executed, "unbounded": False}
    assert card["guarantee"]["realised_epsilon"]["value"] == executed < planned
    assert card["guarantee"]["target_epsilon"] == 8.0
    assert card["accounting"]["steps_executed"] == 20
    assert card["accounting"]["steps_planned"] == 30
    assert card["accounting"]["noise_stddev"] == 0.5
    assert card["accounting"]["expected_batch_size"] == 50.0
    without = accounting.epsilon(
        accounting.step_event(scheme="full_batch", sampling_probability=1.0, noise_multiplier=1.0, num_units=1000),
        1,
        delta=1e-5,
        adjacency="add_or_remove_one",
    )
    assert card["accounting"]["epsilon_without_amplification"]["value"] == without > executed


def test_curves_end_at_the_claim_and_are_monotone(run):
    run.train().export()
    account, epsilon = run.card["accounting"], run.card["claim"]["epsilon"]["value"]
    steps = [(point["step"], point["epsilon"]["value"]) for point in account["epsilon_over_steps"]]
    assert steps[0] == (0, 0.0)
    assert steps[-1] == (20, epsilon)
    assert steps == sorted(steps)
    assert [value for _, value in steps] == sorted(value for _, value in steps)
    deltas = {point["delta"]: point["epsilon"]["value"] for point in account["epsilon_of_delta"]}
    assert deltas[1e-5] == epsilon
    values = [deltas[delta] for delta in sorted(deltas)]
    assert len(values) >= 8
    assert values == sorted(values, reverse=True)


def test_digests_are_those_of_the_files(run):
    run.train().export()
    provenance = run.card["provenance"]
    assert provenance["weights_digest"] == hashlib.sha256(b"weights").hexdigest()
    assert provenance["ledger_digest"] == hashlib.sha256(run.ledger.read_bytes()).hexdigest()
    assert provenance["spec_digest"] == run.spec().digest


def test_json_is_canonical(run):
    run.train().export()
    text = (run.directory / "MODEL_CARD.json").read_text(encoding="utf-8")
    assert text == json.dumps(json.loads(text), sort_keys=True, indent=2, ensure_ascii=False) + "\n"
    assert json.loads(text)["created"] == "2026-01-02T03:04:05Z"
    before = {path.name: path.read_bytes() for path in run.directory.iterdir()}
    run.export()
    render_card(run.directory)
    assert {path.name: path.read_bytes() for path in run.directory.iterdir()} == before


def test_card_fits_its_schema(run):
    jsonschema = pytest.importorskip("jsonschema")
    run.train().export()
    jsonschema.Draft202012Validator(json_schema()).validate(run.card)
    card = run.card
    card["claim"]["epsilon"]["value"] = "8"
    assert not jsonschema.Draft202012Validator(json_schema()).is_valid(card)


def test_schema_file_has_not_drifted():
    stored = (ROOT / "schemas" / "model-card-1.0.json").read_text(encoding="utf-8")
    assert json.loads(stored) == json_schema(), "write it again: tfdp schema model-card -o schemas/model-card-1.0.json"
    assert {"$schema", "$id"} <= json.loads(stored).keys()


class TestNothingIsWrittenWithoutSteps:
    def test_no_ledger(self, run):
        with pytest.raises(CardError, match="Expected the ledger"):
            run.export()
        assert not run.directory.exists()

    def test_no_steps(self, run):
        run.train(steps=0)
        with pytest.raises(CardError, match="at least one executed step"):
            run.export()
        assert os.listdir(run.directory) == ["ledger.jsonl"]

    @pytest.mark.parametrize(
        ("argument", "value"),
        [
            ("evaluation", {"metric": []}),
            ("evaluation", {"metrics": [{"name": "x", "valeu": 1}]}),
            ("evaluation", {"metrics": [{"name": "x", "private": "1"}]}),
            ("evaluation", {"metrics": ["x"]}),
            ("evaluation", {"membership_inference": {"auc": 1.5}}),
            ("evaluation", {"membership_inference": {"tpr_at_fpr": [1, 2]}}),
            ("evaluation", {"groups": [{"name": "x", "gap": 1.0}]}),
            ("details", {"license": "mit"}),
            ("details", {"limits": 3}),
            ("history", {"loss": ["a"]}),
        ],
    )
    def test_what_does_not_belong_on_a_card(self, run, argument, value):
        run.train()
        with pytest.raises(CardError):
            run.export(**{argument: value})
        assert os.listdir(run.directory) == ["ledger.jsonl"]


def test_numpy_values_are_taken(run):
    metric = {"name": "loss", "private": np.float32(1.5), "interval": np.array([1.0, 2.0]), "n": np.int64(7)}
    run.train().export(evaluation={"metrics": [metric]}, history={"loss": np.array([1.0, 2.0], np.float32)})
    assert run.card["utility"]["metrics"][0]["interval"] == [1.0, 2.0]
    assert run.card["utility"]["training"] == {"loss": [1.0, 2.0]}
    assert check_card(run.directory) == []


def test_history_of_the_model_is_the_default(run):
    model = type(run.model)()
    model.history = type("History", (), {"history": {"loss": [3.0]}})()
    run.train().export(model=model, history=None)
    assert run.card["utility"]["training"] == {"loss": [3.0]}


class TestLedgerElsewhere:
    def test_is_copied_so_that_the_card_can_be_checked(self, run, tmp_path):
        run.train(path=tmp_path / "elsewhere")
        run.export(ledger=tmp_path / "elsewhere")
        assert run.ledger.read_bytes() == (tmp_path / "elsewhere").read_bytes()
        assert check_card(run.directory) == []

    def test_a_longer_one_replaces_its_own_beginning(self, run, tmp_path):
        plan = run.plan()
        for _ in range(2):
            run.train(plan, steps=10, path=tmp_path / "elsewhere")
            run.export(ledger=tmp_path / "elsewhere")
        assert run.card["accounting"]["steps_executed"] == 20
        assert check_card(run.directory) == []

    def test_another_run_is_never_overwritten(self, run, tmp_path):
        run.train(steps=30)
        before = run.ledger.read_bytes()
        run.train(steps=1, path=tmp_path / "elsewhere")
        with pytest.raises(CardError, match="another run"):
            run.export(ledger=tmp_path / "elsewhere")
        assert run.ledger.read_bytes() == before
        assert os.listdir(run.directory) == ["ledger.jsonl"]


def test_a_failed_save_leaves_the_old_model(run):
    run.train().export()
    broken = type("Broken", (type(run.model),), {"save": lambda self, path: 1 / 0})()
    with pytest.raises(ZeroDivisionError):
        run.export(model=broken)
    assert (run.directory / "model.keras").read_bytes() == b"weights"
    assert check_card(run.directory) == []


class TestCheck:
    @pytest.fixture
    def done(self, run):
        run.train().export()
        return run

    @pytest.mark.parametrize(
        ("path", "value"),
        [
            (("claim", "epsilon", "value"), 1.0),
            (("guarantee", "realised_epsilon", "value"), 1.0),
            (("guarantee", "target_epsilon"), 3.0),
            (("guarantee", "unit_kind"), "user"),
            (("accounting", "steps_executed"), 19),
            (("accounting", "noise_multiplier"), 1.1),
            (("accounting", "clip_norm"), 0.4),
            (("accounting", "sampling_probability"), 0.01),
            (("accounting", "epsilon_with_amplification", "value"), 0.1),
            (("accounting", "accountant"), "rdp"),
            (("provenance", "spec_digest"), "0" * 64),
            (("provenance", "plan_digest"), "0" * 64),
            (("provenance", "ledger_digest"), "0" * 64),
            (("provenance", "weights_digest"), "0" * 64),
            (("claim", "sentence"), "Perfectly private."),
            (("data_accesses",), []),
            (("not_covered",), []),
            (("review", "findings"), []),
        ],
    )
    def test_a_changed_field_is_found_even_with_pages_to_match(self, done, path, value):
        if path == ("review", "findings"):
            done.export(evaluation=None)
        done.change(*path, value)
        render_card(done.directory)
        where = {"weights_digest": "model.keras"}.get(path[-1], ".".join(path))
        assert any(id == "PS080" and at.startswith(where) for id, at in bad(done))

    def test_the_last_digit_of_epsilon_may_differ_and_the_seventh_not(self, done):
        epsilon = done.card["claim"]["epsilon"]["value"]
        done.change("claim", "epsilon", "value", epsilon * (1 + 1e-8))
        render_card(done.directory)
        assert bad(done) == []
        done.change("claim", "epsilon", "value", epsilon * (1 - 1e-5))
        render_card(done.directory)
        assert bad(done) == [("PS080", "claim.epsilon.value")]

    def test_any_digit_of_the_json_counts(self, done):
        """Also one that is within the rounding that check allows: the pages carry the digest of the JSON."""
        path = done.directory / "MODEL_CARD.json"
        content, card = path.read_bytes(), done.card
        digits = [place for place, byte in enumerate(content) if byte in b"0123456789"]
        for place in digits[::5]:  # many of them: one check takes a hundredth of a second
            changed = bytearray(content)
            changed[place] = ord("0") + (changed[place] - ord("0") + 5) % 10
            path.write_bytes(changed)
            try:
                if done.card == card:  # beyond what a double holds: the same number
                    continue
                found = {where for _, where in bad(done)}
            except (CardError, ValueError):  # no longer a card, or no longer JSON
                continue
            assert found >= {"MODEL_CARD.md", "MODEL_CARD.html"}, content[place - 40 : place + 20]

    @pytest.mark.parametrize("name", ["MODEL_CARD.md", "MODEL_CARD.html"])
    def test_an_edited_page(self, done, name):
        page = done.directory / name
        page.write_text(page.read_text(encoding="utf-8").replace("not covered", "covered", 1), encoding="utf-8")
        assert bad(done) == [("PS080", name)]
        render_card(done.directory)
        assert bad(done) == []

    def test_other_weights(self, done):
        (done.directory / "model.keras").write_bytes(b"others")
        assert bad(done) == [("PS080", "model.keras")]

    def test_steps_after_the_card(self, done):
        done.train(steps=1)
        assert ("PS080", "accounting.steps_executed") in bad(done)
        assert ("PS080", "claim.epsilon.value") in bad(done)

    def test_files_that_are_not_there_are_told_and_a_ledger_is_needed(self, done):
        for name in ("model.keras", "MODEL_CARD.md", "MODEL_CARD.html"):
            (done.directory / name).unlink()
        found = check_card(done.directory)
        assert [finding.id for finding in found] == ["PS081"] * 3
        assert errors(found) == []
        done.ledger.unlink()
        with pytest.raises(CardError, match="Expected the ledger of the card"):
            check_card(done.directory)

    @pytest.mark.parametrize(
        ("old", "new"),
        [
            ('"unbounded": false', '"unbounded": true'),
            ('"schema_version": "1.0"', '"schema_version": "2.0"'),
            ('"steps_executed": 20', '"steps_executed": "20"'),
            ('"steps_executed": 20', '"steps_executed": 20, "steps_executed": 20'),
            ('"steps_executed": 20', '"steps_executed": NaN'),
            ('"ledger_file": "ledger.jsonl"', '"ledger_file": "../ledger.jsonl"'),
            ("{", "["),
        ],
    )
    def test_not_a_card(self, done, old, new):
        path = done.directory / "MODEL_CARD.json"
        path.write_text(path.read_text(encoding="utf-8").replace(old, new, 1), encoding="utf-8")
        with pytest.raises(CardError):
            load_card(path)

    def test_no_card(self, tmp_path):
        with pytest.raises(CardError, match="Expected a card"):
            check_card(tmp_path)


def test_no_page_speaks_of_anonymity_or_of_missing_information(run):
    run.train().export(evaluation=None, history=None, details=None)
    for page in (run.markdown, run.html, json.dumps(run.card)):
        assert not re.search("anonym|more information needed", page, re.IGNORECASE)
