"""Section 9: what an audit puts on a card, what follows from it, and what stays unsaid without one."""

from __future__ import annotations

import json

import pytest

from tfdp.accounting import max_true_positive_rate
from tfdp.card import Audit, attach_audit, check_card, load_card
from tfdp.card.roc import pictures
from tfdp.errors import CardError

_SECRET = "<script>zebra"


def _attack(**changes):
    return {
        "name": "loss ratio",
        "threat_model": "Sees the weights.",
        "members": 500,
        "non_members": 400,
        "auc": 0.5123,
        "auc_interval": (0.49, 0.53),
        "advantage": 0.041,
        "advantage_by_chance": 0.082,
        "tpr_at_fpr": (
            {"false_positive_rate": 0.001, "true_positive_rate": 0.002, "interval": (0.0, 0.01)},
            {"false_positive_rate": 0.01, "true_positive_rate": 0.0137, "interval": (0.005, 0.03)},
        ),
        "roc": ((0.0, 0.0), (0.0025, 0.004), (0.1, 0.12), (1.0, 1.0)),
        "confidence": 0.95,
        **changes,
    }


def _audit(run, **changes):
    values = {
        "schema_version": "1.0",
        "created": "2026-02-03T04:05:06Z",
        "parameters_digest": run.card["provenance"]["parameters_digest"],
        "seconds": 61.0,
        "gradients": {
            "units": 4,
            "reference": "every unit alone",
            "allowed": 1e-4,
            "norms": 1.25e-07,
            "sums": 3.5e-07,
            "losses_of_others": 0.0,
            "gradients_of_others": 0.0,
        },
        "attacks": (
            _attack(),
            _attack(model="non_private", auc=0.83, auc_interval=(0.8, 0.86), epsilon_lower_bound=50.0),
            _attack(name="canaries", members=51, non_members=49, epsilon_lower_bound=0.75),
            _attack(group=_SECRET, members=60, non_members=70),
        ),
        "exposures": (
            {
                "model": "private",
                "pattern": "code ####",
                "canaries": 51,
                "repetitions": 2,
                "candidates": 1023,
                "mean": 1.51,
                "median": 1.1,
                "highest": 6.25,
                "mean_by_chance": 1.44,
            },
        ),
        "extractions": (
            {"model": "private", "documents": "members", "prompts": 90, "exact": 1, "approximate": 3,
             "interval": (0.006, 0.094)},
            {"model": "private", "documents": "non_members", "prompts": 80, "exact": 0, "approximate": 2,
             "interval": (0.003, 0.087)},
        ),
        "prefix_tokens": 50,
        "continuation_tokens": 50,
        "skipped": ({"part": "nothing", "reason": "time"},),
        **changes,
    }  # fmt: skip
    return Audit.model_validate(values)


@pytest.fixture
def audited(run):
    run.train().export()
    attach_audit(run.directory, _audit(run))
    return run


def test_the_numbers_are_on_both_pages(audited):
    for page in (audited.html, audited.markdown):
        for number in ("1.2e-07", "3.5e-07", "1.0e-04"):  # of the gradients
            assert number in page, number
        for number in ("0.5123", "0.49 to 0.53", "0.83", "0.0137", "51", "1.51", "6.25", "at least", "0.75", "90"):
            assert number in page, number
        assert "not measured" not in page[page.index("Exposure of canaries") :].split("Intended use")[0]
        assert "<script>" not in page
    assert {finding.id for finding in check_card(audited.directory)} == set()
    assert audited.card["created"] == "2026-02-03T04:05:06Z"
    status = {row["name"]: row["status"] for row in audited.card["data_accesses"]}
    assert status["Attacks for an audit"] == "not covered"


def test_without_an_audit_nothing_is_said_to_be_measured(run):
    run.train().export(evaluation=None)
    assert "PS052" in run.ids("warning")
    assert "tfdp audit" in run.markdown
    for page in (run.html, run.markdown):
        assert "Membership inference: " in page
        assert "Exposure" not in page
    status = {row["name"]: row["status"] for row in run.card["data_accesses"]}
    assert status["Attacks for an audit"] == "not stated"
    attach_audit(run.directory, _audit(run, exposures=(), extractions=()))
    assert "PS052" not in run.ids()
    assert "Exposure: not measured" in run.markdown
    assert "Extraction: not measured" in run.markdown


def test_attacks_on_the_twin_alone_say_nothing_of_the_model(run):
    run.train().export(evaluation=None)
    attach_audit(run.directory, _audit(run, attacks=(_attack(model="non_private", epsilon_lower_bound=50.0),)))
    assert "PS052" in run.ids()
    assert "PS053" not in run.ids()
    assert run.card["claim"]["status"] == "claimed"


def test_a_lower_bound_above_the_claim_takes_it_away(run):
    run.train().export()
    epsilon = run.card["claim"]["epsilon"]["value"]
    for bound, refuted in ((epsilon * 0.999, False), (epsilon * 1.001, True)):
        attach_audit(run.directory, _audit(run, attacks=(_attack(epsilon_lower_bound=bound),)))
        assert ("PS053" in run.ids("error")) is refuted
        assert (run.card["claim"]["status"] == "not claimed") is refuted
    assert "PS053" in {finding.id for finding in check_card(run.directory)}


def test_wrong_gradients_take_the_claim_away(run):
    run.train().export()
    fault = {"id": "PS044", "severity": "error", "where": "model", "message": "expected 1, received 2.", "fix": ""}
    gradients = {"units": 4, "reference": "every unit alone", "allowed": 1e-4, "norms": 0.5, "sums": None,
                 "losses_of_others": 0.0, "gradients_of_others": 0.0, "findings": (fault,)}  # fmt: skip
    attach_audit(run.directory, _audit(run, gradients=gradients))
    assert "PS044" in run.ids("error")
    assert run.card["claim"]["status"] == "not claimed"
    assert "PS044" in {finding.id for finding in check_card(run.directory)}
    attach_audit(run.directory, _audit(run, gradients=None))
    assert "Gradients of a private step: not measured" in run.markdown
    assert run.card["claim"]["status"] == "claimed"


def test_an_attack_without_low_rates_is_noted(run):
    run.train().export()
    attach_audit(run.directory, _audit(run, attacks=(_attack(tpr_at_fpr=(), members=None),)))
    assert "PS054" in run.ids("note")


def test_only_an_audit_of_these_weights_counts(audited):
    before = audited.card
    with pytest.raises(CardError, match="audit of the weights"):
        attach_audit(audited.directory, _audit(audited, parameters_digest="0" * 64))
    assert audited.card == before
    # A later export of the same weights takes the audit along; of others, not.
    audited.export()
    assert audited.card["audit"]["attacks"][0]["auc"] == 0.5123
    path = audited.directory / "audit.json"
    path.write_text(path.read_text().replace(before["provenance"]["parameters_digest"], "1" * 64))
    assert {finding.id for finding in check_card(audited.directory)} == {"PS080"}
    audited.export()
    assert audited.card["audit"] is None
    path.write_text("{}")
    with pytest.raises(CardError, match="written by tfdp audit"):
        audited.export()


def test_a_changed_or_missing_file_is_found(audited):
    path = audited.directory / "audit.json"
    values = json.loads(path.read_text())
    values["attacks"][0]["auc"] = 0.5
    path.write_text(json.dumps(values))
    assert [(finding.id, finding.where) for finding in check_card(audited.directory)] == [("PS080", "audit.json")]
    path.unlink()
    assert [finding.id for finding in check_card(audited.directory)] == ["PS081"]
    audited.change("audit", "attacks", 0, "epsilon_lower_bound", 90.0)
    assert "PS053" in {finding.id for finding in check_card(audited.directory)}


def test_the_ceiling_is_drawn_where_the_guarantee_puts_it(audited):
    card = load_card(audited.directory / "MODEL_CARD.json")
    (name, picture), (second, _) = pictures(card)
    assert (name, second) == ("loss ratio", "canaries")
    for label in ("private model", "without privacy", "ceiling by the guarantee", "guessing"):
        assert label in picture
    # The path of the ceiling, read back: y is logarithmic from 1e-3 at the bottom to 1 at the top.
    path = picture.split('class="line-d" d="M')[1].split('"')[0]
    points = [tuple(map(float, point.split())) for point in path.split("L")]
    left, right, top, bottom = 64, 780 - 18, 34, 270 - 46
    epsilon, delta = card.claim.epsilon.value, card.claim.delta
    for x, y in points:
        rate = 10 ** (-3 + 3 * (x - left) / (right - left))
        height = 10 ** (-3 * (y - top) / (bottom - top))
        assert height == pytest.approx(max_true_positive_rate(epsilon, delta, rate), rel=0.02)
    assert len(points) > 40
