"""When a claim stands and when it does not, and what a card says about what was not measured."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from tfdp import accounting
from tfdp.accounting import max_membership_advantage, max_true_positive_rate
from tfdp.card import check_card
from tfdp.errors import CardError
from tfdp.findings import errors
from tfdp.ledger import Ledger


def quiet(plan):
    """The plan without noise."""
    event = accounting.step_event(scheme="poisson", sampling_probability=0.05, noise_multiplier=0.0, num_units=1000)
    return {**plan, "noise_multiplier": 0.0, "step_event": accounting.event_to_dict(event)}


def test_how_gradients_were_taken(run):
    run.train(steps=0)
    with Ledger.create_or_open(run.ledger, run.plan(), clock=run.clock) as ledger:
        ledger.append("fit_begin", gradients="bookkeeping")
        ledger.append("fit_begin", gradients="hybrid", layers_without_rule=["up (Conv1DTranspose)", "cell (LSTMCell)"])
        ledger.append("fit_begin", gradients="bookkeeping")
        ledger.append("fit_begin", gradients="vectorized", replicas=2)
    run.train().export()
    told = "book-keeping; then book-keeping; formed per unit for the variables of up (Conv1DTranspose), cell (LSTMCell)"
    told += "; then formed per unit (vectorized), on 2 replicas of one machine"
    assert run.card["provenance"]["gradients"] == told
    assert told in run.markdown
    assert told in run.html
    assert check_card(run.directory) == []


def test_how_many_units_a_forward_pass_held(run):
    run.train(steps=0)
    with Ledger.create_or_open(run.ledger, run.plan(), clock=run.clock) as ledger:
        ledger.append("fit_begin", gradients="bookkeeping")  # which met no data
        for units in (8, 8, 16):
            ledger.append("fit_begin", gradients="bookkeeping")
            ledger.append("microbatches", units=units)
    run.train().export()
    told = "book-keeping, in microbatches of 8; then book-keeping, in microbatches of 16"
    assert run.card["provenance"]["gradients"] == told
    assert told in run.markdown
    assert check_card(run.directory) == []


def test_the_sentence_holds_all_six_parts_and_rounds_up(run):
    run.train().export()
    claim = run.card["claim"]
    assert claim["status"] == "claimed"
    shown = float(claim["sentence"].split("(")[1].split(",")[0])
    assert claim["epsilon"]["value"] <= shown <= claim["epsilon"]["value"] * 1.001
    for part in ("1e-5)-differential privacy", "one example", '"one sentence"', "central", "released model", "or not"):
        assert part in claim["sentence"]


class TestNoClaim:
    def void(self, run, *ids):
        card = run.card
        assert card["claim"]["status"] == "not claimed"
        assert card["claim"]["epsilon"] == {"value": None, "unbounded": True}
        assert card["claim"]["sentence"].startswith("No differential privacy is claimed")
        assert set(ids) <= run.ids("error")
        assert card["guarantee"]["user_level"]["possible"] is False
        assert {row["max_true_positive_rate"] for row in card["guarantee"]["membership"]} == {1.0}
        assert card["data_accesses"][0]["status"] == "not covered"
        assert "No privacy claim" in run.html
        assert "No privacy claim" in run.markdown
        assert "epsilon: null" in run.markdown.split("---")[1].replace("epsilon:\n", "epsilon: null\n")
        assert errors(check_card(run.directory))

    def test_without_noise_epsilon_is_unbounded(self, run):
        run.train(quiet(run.plan())).export()
        self.void(run, "PS020", "PS030")
        assert run.card["guarantee"]["realised_epsilon"] == {"value": None, "unbounded": True}
        assert run.card["accounting"]["epsilon_without_amplification"]["unbounded"] is True
        assert "unbounded" in run.html

    def test_more_steps_than_the_claim_allows(self, run):
        plan = run.plan(claim={**run.SPEC["claim"], "epsilon": 2.5})
        run.train(plan, steps=80).export()
        self.void(run, "PS020", "PS030")
        assert run.card["guarantee"]["realised_epsilon"]["value"] > 2.5

    def test_a_fixed_seed(self, run):
        run.train(run.plan(seed=7, mechanism={"rng": "prng"})).export()
        self.void(run, "PS042")
        assert run.card["provenance"]["seed"] == 7
        assert "fixed seed" in run.html

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("clip_norm", 1.0),
            ("noise_multiplier", 2.0),
            ("sampling_probability", 0.01),
            ("expected_batch_size", 40.0),
            ("steps", 100),
            ("num_units", 999),
            ("adjacency", "zero_out"),
            ("accountant", "rdp"),
            ("delta", 1e-4),
            ("target_epsilon", 9.0),
            ("scheme", "full_batch"),
            ("rng", "prng"),
        ],
    )
    def test_what_ran_is_not_what_the_spec_says(self, run, field, value):
        run.train({**run.plan(), field: value}).export()
        self.void(run, "PS030")
        wheres = {finding["where"] for finding in run.card["review"]["findings"] if finding["id"] == "PS030"}
        assert f"ledger.plan.{field}" in wheres
        assert "ledger.plan" in wheres, "the digest of the plan no longer fits"

    def test_an_accountant_that_was_told_something_else(self, run):
        plan = run.plan()
        event = accounting.step_event(scheme="poisson", sampling_probability=0.05, noise_multiplier=9.0, num_units=1000)
        run.train({**plan, "step_event": accounting.event_to_dict(event)}).export()
        self.void(run, "PS030")

    def test_a_spec_that_changed_after_the_plan(self, run):
        plan = run.plan()
        spec = run.spec(claim={**run.SPEC["claim"], "delta": 9e-6}).to_dict()
        run.train({**plan, "spec": spec}).export()
        self.void(run, "PS031", "PS030")

    def test_an_attack_that_refutes_it(self, run):
        run.train().export(evaluation={"membership_inference": {"epsilon_lower_bound": 50.0, "confidence": 0.95}})
        self.void(run, "PS053")


def test_plans_as_made_raise_no_difference(run):
    run.train().export()
    assert run.ids("error") == set()
    for adjacency, accountant in (("replace_one", "pld"), ("zero_out", "rdp"), ("add_or_remove_one", "prv")):
        other = type(run)(run.directory.parent / adjacency)
        claim = {**run.SPEC["claim"], "adjacency": adjacency, "epsilon": 20.0}
        other.train(other.plan(claim=claim, accountant={"name": accountant})).export()
        assert other.ids("error") == set()
        assert check_card(other.directory) == []


def test_truncated_and_calibrated_plans_raise_no_difference(run):
    sampling = {**run.SPEC["sampling"], "scheme": "truncated_poisson", "truncated_batch_size": 80}
    run.train(run.plan(sampling=sampling, mechanism={"noise_multiplier": None})).export()
    assert run.ids("error") == set()
    assert run.card["accounting"]["sampler_assumed"] == "truncated_poisson"
    assert run.card["accounting"]["truncated_batch_size"] == 80


def test_a_torn_last_line_is_a_step_and_is_told(run):
    run.train(steps=20)
    run.ledger.write_bytes(run.ledger.read_bytes() + b'{"kind":"st')
    run.export()
    assert run.card["accounting"]["steps_executed"] == 21
    assert run.card["accounting"]["torn_last_line"] is True
    assert "A crash cut a line" in run.html
    assert check_card(run.directory) == []


def test_a_ledger_whose_plan_is_of_the_wrong_kind(run):
    run.train({**run.plan(), "num_units": "many"})
    with pytest.raises(CardError, match="cannot be accounted"):
        run.export()


class TestModelOfTheRun:
    """A card is about the weights that the run left, and about no others."""

    def test_weights_that_the_ledger_records(self, run):
        run.train().export()
        assert "PS083" not in run.ids()
        assert run.card["claim"]["epsilon"]["value"] is not None

    @pytest.mark.parametrize("other", [b"weightz", b"weight", b"weights and more"])
    def test_other_weights_claim_nothing(self, run, other):
        run.train()
        run.export(model=type(run.model)(other))
        assert "PS083" in run.ids("error")
        assert run.card["claim"]["epsilon"]["value"] is None
        assert "No privacy claim" in run.html

    def test_an_earlier_epoch_of_the_run_is_covered_too(self, run):
        earlier = type(run.model)(b"earlier")
        run.train(model=earlier).train(steps=2)
        run.export(model=earlier)
        assert "PS083" not in run.ids()


class TestNotMeasured:
    def test_everything_missing_says_so_and_is_a_finding(self, run):
        run.train().export(evaluation=None, history=None, details=None)
        assert {"PS050", "PS052", "PS070", "PS074"} <= run.ids()
        assert run.card["claim"]["status"] == "claimed"
        for page in (run.html, run.markdown):
            assert page.count("not measured") >= 4
            assert page.count("not stated") >= 6
        assert run.card["attacks"] == []
        assert run.card["utility"] == {"metrics": [], "training": None}

    def test_everything_given_has_no_such_finding(self, run):
        run.train().export()
        assert run.ids() == {"PS051"}

    def test_a_required_attack_blocks_without_voiding_the_claim(self, run):
        run.train(run.plan(evaluation={"membership_inference": "required"})).export(evaluation=None)
        assert "PS052" in run.ids("error")
        assert run.card["claim"]["status"] == "claimed"

    def test_half_a_metric(self, run):
        run.train().export(evaluation={"metrics": [{"name": "loss", "private": 2.0, "public": 1.0}]})
        assert {"PS071", "PS072"} <= run.ids()

    def test_values_that_are_not_finite(self, run):
        run.train().export(evaluation={"metrics": [{"name": "perplexity", "private": math.inf, "public": 3.0}]})
        assert "PS073" in run.ids("warning")
        assert run.card["utility"]["metrics"][0]["private"] is None
        assert "not finite" in run.html
        assert check_card(run.directory) == []

    def test_an_attack_without_its_numbers(self, run):
        run.train().export(evaluation={"membership_inference": {"auc": 0.5, "tpr_at_fpr": {0.1: 0.1}}})
        assert "PS054" in run.ids("note")


def test_small_groups_are_removed_and_the_worst_is_named(run):
    run.train().export()
    groups = run.card["groups"]
    assert [row["suppressed"] for row in groups["rows"]] == [False, False, True]
    assert groups["rows"][2]["value"] is groups["rows"][2]["n"] is groups["rows"][2]["before"] is None
    assert groups["worst"] == "poor"
    assert groups["rows"][1]["gap"] == pytest.approx(64.5 - 59.8)
    for page in (run.html, run.markdown, str(run.card)):
        assert "91.24" not in page
        assert "91.2357" not in page
        assert "88.12" not in page


def test_data_accesses(run):
    run.train(run.plan(tuning={"kind": "private", "trials": 12})).export()
    status = {row["name"]: row["status"] for row in run.card["data_accesses"]}
    assert status == {
        "Training": "covered",
        "Tuning of hyperparameters": "not covered",
        "Removal of duplicates": "not covered",  # of examples: across units
        "Choice of the clip norm": "not stated",
        "Choice of the checkpoint": "not stated",
        "Metrics in the progress bar": "not covered",
        "Evaluation": "not covered",
        "Attacks for an audit": "not covered",
        "Public pretraining": "not covered",
    }
    notes = " ".join(row["note"] for row in run.card["data_accesses"])
    assert "12 trials" in notes
    assert "loss, val_loss" in notes
    assert "exact values on private data" in run.html


def test_the_user_level_is_not_invented(run):
    run.train().export()
    assert run.card["guarantee"]["user_level"]["possible"] is False
    assert "None possible" in run.html
    user = {"kind": "user", "description": "one author", "id_field": "author", "max_records_per_unit": 1}
    other = type(run)(run.directory.parent / "user")
    other.train(other.plan(claim={**run.SPEC["claim"], "privacy_unit": user})).export()
    level = other.card["guarantee"]["user_level"]
    assert level["possible"] is True
    assert level["epsilon"] == other.card["guarantee"]["realised_epsilon"]


def test_budget_caps(run):
    budget = {"dataset_id": "letters", "epsilon_cap": 10.0}
    run.train(run.plan(budget=budget)).export()
    assert not {"PS032", "PS033"} & run.ids()
    spent = run.card["claim"]["epsilon"]["value"]
    run.export(details={"spent_before": 0.9 * 10.0 - spent})
    assert "PS033" in run.ids("warning")
    run.export(details={"spent_before": 9.9})
    assert "PS032" in run.ids("error")
    assert run.card["budget"]["spent_after"]["value"] == pytest.approx(9.9 + spent)
    assert run.card["claim"]["status"] == "claimed"


def test_waivers(run):
    def waiver(finding, **fields):
        return {"finding": finding, "reason": "known", "owner": "A", "expires": "2026-01-02", **fields}

    waivers = [
        waiver("PS050"),
        waiver("PS052", expires="2026-01-01"),
        waiver("PS070", owner=None),
        waiver("PS023"),
        waiver("PS042"),
    ]
    run.train(run.plan(waivers=waivers, mechanism={"rng": "prng"}, seed=3)).export(evaluation=None)
    states = [row["state"] for row in run.card["review"]["waivers"]]
    assert states == ["in force", "expired", "without owner", "not needed", "refused"]
    assert "PS060" in run.ids("error")
    assert "PS061" in run.ids("warning")


class TestMembershipBounds:
    @pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0])
    @pytest.mark.parametrize("rate", [0.001, 0.01, 0.3, 0.9])
    def test_pure_privacy_against_randomized_response(self, epsilon, rate):
        """The likelihood-ratio test between two biased coins is the tight case of (epsilon, 0)."""
        heads = math.exp(epsilon) / (1 + math.exp(epsilon))
        tails = 1 - heads
        # Reject on "1" first: its chance is `tails` without the unit and `heads` with it.
        if rate <= tails:
            best = heads * rate / tails
        else:
            best = heads + tails * (rate - tails) / heads
        assert max_true_positive_rate(epsilon, 0.0, rate) == pytest.approx(best)

    def test_gaussian_mechanism_never_beats_the_bound(self):
        event = accounting.step_event(scheme="full_batch", sampling_probability=1.0, noise_multiplier=1.0, num_units=9)
        epsilon = accounting.epsilon(event, 1, delta=1e-3, adjacency="add_or_remove_one")
        for rate in np.linspace(1e-4, 0.999, 50):
            power = stats.norm.cdf(stats.norm.ppf(rate) + 1.0)
            assert power <= max_true_positive_rate(epsilon, 1e-3, rate)
            assert power - rate <= max_membership_advantage(epsilon, 1e-3)

    def test_advantage_is_the_largest_gap(self):
        rates = np.linspace(0, 1, 100_001)
        for epsilon, delta in ((0.5, 0.0), (2.0, 1e-3), (8.0, 1e-6)):
            gap = max(max_true_positive_rate(epsilon, delta, rate) - rate for rate in rates)
            assert max_membership_advantage(epsilon, delta) == pytest.approx(gap, abs=1e-4)

    def test_ends(self):
        assert max_true_positive_rate(0.0, 0.0, 0.01) == pytest.approx(0.01)
        assert max_membership_advantage(0.0, 0.0) == 0.0
        assert max_true_positive_rate(math.inf, 1e-5, 0.01) == 1.0
        assert max_membership_advantage(math.inf, 1e-5) == 1.0
        assert max_true_positive_rate(1e4, 1e-5, 0.01) == 1.0


UNITS = {
    "example": {"kind": "example", "description": "one mail"},
    "sequence": {"kind": "sequence", "description": "1024 tokens after packing", "sequence_length": 1024},
    "document": {"kind": "document", "description": "a file", "id_field": "file", "max_records_per_unit": 1},
    "user": {"kind": "user", "description": "a sender", "id_field": "from", "max_records_per_unit": 1},
}


@pytest.mark.parametrize(
    ("kind", "stated", "scope", "status"),
    [
        ("user", "none", None, "no access"),
        ("user", "exact", "unit", "covered"),
        ("document", "near", "unit", "covered"),
        ("user", "exact", "all", "not covered"),
        ("user", "none", "all", "not covered"),  # what was done counts, and not what the spec forgot
        ("user", "near", None, "not stated"),
        ("example", "exact", None, "not covered"),  # a unit of one record has nothing but others to be compared with
        ("sequence", "near", "unit", "not covered"),
    ],
)
def test_removal_of_duplicates(run, kind, stated, scope, status):
    claim = {**run.SPEC["claim"], "privacy_unit": UNITS[kind]}
    details = {} if scope is None else {"deduplication_scope": scope}
    run.train(run.plan(claim=claim, data={"deduplication": stated})).export(details=details)
    (access,) = [row for row in run.card["data_accesses"] if row["name"] == "Removal of duplicates"]
    assert access["status"] == status
    assert run.card["data"]["deduplication_scope"] == scope
    assert check_card(run.directory) == []
    assert ("may depend on the records of another" in access["note"]) == (status in ("not covered", "not stated"))
    (duplicates,) = [row for row in run.card["not_covered"] if row["what"].startswith("Duplicates")]
    assert ("one unit's data decided" in duplicates["why"]) == (scope == "all")


@pytest.mark.parametrize("kind", UNITS)
def test_looks_that_choose_how_a_unit_is_protected(run, kind):
    claim = {**run.SPEC["claim"], "privacy_unit": UNITS[kind]}
    run.train(run.plan(claim=claim)).export()
    status = {row["name"]: row["status"] for row in run.card["data_accesses"]}
    for name in ("Choice of k", "Diagnostics of gradients"):
        assert status.get(name) == ("not stated" if kind in ("document", "user") else None)
    for command in ("tfdp data report", "tfdp plan compare --concentration"):
        assert (command in run.markdown) == (kind in ("document", "user"))
    assert check_card(run.directory) == []


def test_a_run_without_a_claim_covers_no_removal_of_duplicates(run):
    claim = {**run.SPEC["claim"], "privacy_unit": UNITS["user"]}
    run.train(quiet(run.plan(claim=claim))).export(details={"deduplication_scope": "unit"})
    (access,) = [row for row in run.card["data_accesses"] if row["name"] == "Removal of duplicates"]
    assert access["status"] == "not covered"


def test_another_scope_of_duplicates_is_refused(run):
    with pytest.raises(CardError, match="deduplication_scope"):
        run.train().export(details={"deduplication_scope": "senders"})


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("example", ["several examples"]),
        ("sequence", ["cut is protected only piece by piece", "texts of several people", "not in one document"]),
        ("document", ["All pieces of a document are protected together", "several documents"]),
        ("user", None),
    ],
)
def test_what_a_unit_that_is_no_person_leaves_open(run, kind, words):
    run.train(run.plan(claim={**run.SPEC["claim"], "privacy_unit": UNITS[kind]})).export()
    why = [row["why"] for row in run.card["not_covered"] if row["what"] == "Several units of one person"]
    assert len(why) == (words is not None)
    for part in words or []:
        assert part in why[0]
        assert part in run.markdown
        assert part in run.html
    assert run.card["guarantee"]["user_level"]["possible"] == (kind == "user")
