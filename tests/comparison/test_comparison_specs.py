"""Two specs: which change is weaker, which is stronger, and which nobody can order."""

from __future__ import annotations

import itertools
import math

import pytest
from pydantic import BaseModel

from tfdp.comparison import Comparison, Direction, compare_specs, render_markdown, render_text
from tfdp.comparison.changes import Change, Rank
from tfdp.comparison.orders import two_steps
from tfdp.comparison.rules import MECHANISM, REVIEW, SPEC_RULES
from tfdp.review import review
from tfdp.spec import PrivacySpec

EXAMPLE = {"kind": "example", "description": "one text"}
USER = {
    "kind": "user",
    "description": "one text",
    "id_field": "sender",
    "max_records_per_unit": 4,
    "method": "user_wise_dp_sgd",
}
BASE = {
    "schema_version": "1.0",
    "claim": {
        "epsilon": 4.0,
        "delta": 1e-6,
        "privacy_unit": EXAMPLE,
        "adjacency": "add_or_remove_one",
        "release": "final_model",
        "data_accesses": ["training"],
    },
    "data": {"num_units": 1000, "size_is_public": True, "deduplication": "exact"},
    "mechanism": {"clip_norm": 1.0},
    "sampling": {"scheme": "poisson", "expected_batch_size": 50, "steps": 20},
    "tuning": {"kind": "none"},
    "evaluation": {"min_group_size": 50, "membership_inference": "required"},
    "budget": {"dataset_id": "mails", "ledger": "l.jsonl", "epsilon_cap": 8.0, "delta_cap": 1e-5},
    "waivers": [{"finding": "PS050", "reason": "r", "owner": "o", "expires": "2099-01-30"}],
}


def spec(**changes):
    """The base spec with dotted paths (dots as two underscores) set; None deletes."""
    values = PrivacySpec.from_dict(BASE).to_dict()
    for name, value in changes.items():
        *path, last = name.split("__")
        place = values
        for part in path:
            place = place[part]
        place[last] = value
    return PrivacySpec.from_dict(values)


def compared(old=None, **changes) -> Comparison:
    return compare_specs(spec(**(old or {})), spec(**{**(old or {}), **changes}))


def directions(comparison):
    return {change.where: change.direction.value for change in comparison.changes}


def test_nothing_changed():
    comparison = compared()
    assert (comparison.changes, comparison.verdict) == ((), Direction.UNCHANGED)


def test_every_field_of_a_spec_has_a_rule():
    def fields(model: type[BaseModel], above=""):
        for name, field in model.model_fields.items():
            inside = [part for part in _models(field.annotation) if name != "waivers"]
            path = f"{above}{name}"
            yield from fields(inside[0], f"{path}.") if inside and path != "tuning" else [path]
            if name == "clip_norm":  # which may be a number, too
                yield path

    def _models(annotation):
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            return [annotation]
        return [model for part in getattr(annotation, "__args__", ()) for model in _models(part)]

    assert set(fields(PrivacySpec)) == set(SPEC_RULES) - {MECHANISM, REVIEW}


def waiver(**fields):
    return [{**BASE["waivers"][0], **fields}]


# The path, the better value, the worse one.
SCALES = [
    ("claim__epsilon", 4.0, 4.001),
    ("claim__delta", 1e-6, 2e-6),
    ("claim__adjacency", "replace_one", "add_or_remove_one"),
    ("claim__adjacency", "add_or_remove_one", "zero_out"),
    ("data__deduplication", "near", "exact"),
    ("data__deduplication", "exact", "none"),
    ("mechanism__rng", "csprng", "prng"),
    ("tuning", {"kind": "none"}, {"kind": "private", "accounted": True, "trials": 3}),
    ("tuning", {"kind": "public"}, {"kind": "private", "accounted": False, "trials": 3}),
    ("tuning", {"kind": "private", "accounted": True}, {"kind": "private", "accounted": False}),
    ("tuning", {"kind": "private", "trials": 3}, {"kind": "private", "trials": 4}),
    ("tuning", {"kind": "private", "trials": 3}, {"kind": "private"}),
    ("tuning", {"kind": "private"}, None),
    ("evaluation__min_group_size", 50, 20),
    ("evaluation__min_group_size", 50, None),
    ("evaluation__membership_inference", "required", "not_required"),
    ("evaluation", BASE["evaluation"], None),
    ("budget__epsilon_cap", 8.0, 9.0),
    ("budget__epsilon_cap", 8.0, None),
    ("budget__delta_cap", 1e-5, 2e-5),
    ("budget__ledger", "l.jsonl", None),
    ("budget", BASE["budget"], None),
    ("waivers", [], waiver()),
    ("waivers", waiver(), waiver(expires="2099-01-31")),
    ("waivers", waiver(), [*waiver(), *waiver(finding="PS052")]),
]


@pytest.mark.parametrize(("path", "better", "worse"), SCALES)
def test_a_scale_goes_both_ways(path, better, worse):
    old, new = spec(**{path: better}), spec(**{path: worse})
    assert compare_specs(old, new).verdict is Direction.WEAKER
    assert compare_specs(new, old).verdict is Direction.STRONGER


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("claim__privacy_unit__description", "one letter of a text"),
        ("claim__release", "all_checkpoints"),
        ("budget__dataset_id", "other"),
        ("budget__ledger", "elsewhere.jsonl"),
    ],
)
def test_what_no_rule_can_order(path, value):
    assert compared(**{path: value}).verdict is Direction.INCOMPARABLE


def test_a_release_that_the_claim_no_longer_covers():
    assert compared(claim__release="predictions").verdict is Direction.WEAKER


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("claim__privacy_unit__description", "One  Text"),
        ("mechanism__clip_norm", 2.0),
        ("mechanism__clip_norm", {"per_layer": 2.0}),
        ("mechanism__clip_norm", {"quantile": 0.5, "initial": 2.0, "count_noise": 40.0}),
        ("sampling__steps", 40),
        ("sampling__microbatch_size", 8),
        ("sampling__microbatch_size", "auto"),
        ("accountant__name", "rdp"),
        ("evaluation__group_field", "language"),
        ("tuning", {"kind": "public"}),
        ("waivers", waiver(reason="another")),
        ("data__size_is_public", False),
    ],
)
def test_what_leaves_a_calibrated_claim_as_it_is(path, value):
    comparison = compared(**{path: value})
    assert comparison.changes
    assert comparison.verdict is Direction.UNCHANGED


def test_accesses_that_the_claim_covers():
    both = {"claim__data_accesses": ["training", "tuning"]}
    assert compared(**both).verdict is Direction.STRONGER
    assert compared(both, claim__data_accesses=["training"]).verdict is Direction.WEAKER
    assert compared(both, claim__data_accesses=["tuning", "training"]).verdict is Direction.UNCHANGED


class TestUnits:
    def test_a_smaller_unit_is_weaker_however_small_epsilon_gets(self):
        comparison = compared({"claim__privacy_unit": USER}, claim__privacy_unit=EXAMPLE, claim__epsilon=0.1)
        assert comparison.verdict is Direction.WEAKER
        found = directions(comparison)
        assert found["claim.privacy_unit.kind"] == "weaker"
        assert found["claim.epsilon"] == "incomparable", "it bounds another thing"

    def test_a_larger_unit_at_the_same_epsilon_cannot_be_ordered(self):
        found = directions(compared(claim__privacy_unit=USER))
        assert found["claim.privacy_unit.kind"] == "incomparable"

    @pytest.mark.parametrize(
        "changes",
        [
            {"claim__epsilon": 2.0, "claim__delta": 1e-6 / (1 + math.exp(2))},
            {"claim__privacy_unit": {**USER, "method": "group_privacy"}, "data__num_records": 2000},
        ],
    )
    def test_a_larger_unit_that_holds_for_its_parts_is_stronger(self, changes):
        comparison = compared(**{"claim__privacy_unit": USER, **changes})
        assert comparison.verdict is Direction.STRONGER

    def test_under_replacement_a_part_is_one_step(self):
        old = {"claim__adjacency": "replace_one"}
        assert compared(old, claim__privacy_unit=USER).verdict is Direction.STRONGER

    def test_example_and_sequence_do_not_hold_each_other(self):
        sequence = {"kind": "sequence", "description": "one text", "sequence_length": 128}
        assert compared(claim__privacy_unit=sequence).verdict is Direction.INCOMPARABLE
        shorter = {**sequence, "sequence_length": 64}
        assert compared({"claim__privacy_unit": sequence}, claim__privacy_unit=shorter).verdict is Direction.WEAKER

    def test_fewer_records_of_a_unit(self):
        fewer = {**USER, "max_records_per_unit": 2}
        assert compared({"claim__privacy_unit": USER}, claim__privacy_unit=fewer).verdict is Direction.INCOMPARABLE
        assert compared({"claim__privacy_unit": fewer}, claim__privacy_unit=USER).verdict is Direction.UNCHANGED

    def test_another_field_that_names_the_unit(self):
        other = {**USER, "id_field": "thread"}
        assert compared({"claim__privacy_unit": USER}, claim__privacy_unit=other).verdict is Direction.INCOMPARABLE

    @pytest.mark.parametrize(("old", "new"), [(USER, EXAMPLE), (EXAMPLE, USER)])
    def test_the_method_of_another_unit_is_not_called_that_of_the_same(self, old, new):
        comparison = compared({"claim__privacy_unit": old}, claim__privacy_unit=new)
        (method,) = [change for change in comparison.changes if change.where == "claim.privacy_unit.method"]
        assert "the same" not in method.why
        assert "another one" in method.why
        assert not any(" a example" in change.why for change in comparison.changes)

    def test_the_method_of_the_same_unit(self):
        grouped = {**USER, "method": "group_privacy"}
        old = {"claim__privacy_unit": USER, "data__num_records": 2000}
        comparison = compared(old, claim__privacy_unit=grouped)
        (method,) = [change for change in comparison.changes if change.where == "claim.privacy_unit.method"]
        assert "The unit is the same" in method.why


class TestAdjacency:
    @pytest.mark.parametrize("before", [True, False])
    @pytest.mark.parametrize("after", [True, False])
    def test_replacing_hides_no_size(self, before, after):
        """A mechanism that publishes the number of units is (0, 0)-private under replace_one."""
        comparison = compared(
            {"data__size_is_public": before}, data__size_is_public=after, claim__adjacency="replace_one"
        )
        expected = Direction.STRONGER if before and after else Direction.INCOMPARABLE
        assert comparison.verdict is expected

    @pytest.mark.parametrize("public", [True, False])
    def test_replacing_reaches_a_null_record_only_where_it_is_a_record(self, public):
        old = {"claim__adjacency": "zero_out", "data__size_is_public": public}
        assert compared(old, claim__adjacency="replace_one").verdict is Direction.INCOMPARABLE
        back = {"claim__adjacency": "replace_one", "data__size_is_public": public}
        assert compared(back, claim__adjacency="zero_out").verdict is Direction.WEAKER

    @pytest.mark.parametrize("before", [True, False])
    @pytest.mark.parametrize("after", [True, False])
    def test_adding_hides_a_size_that_was_not_public(self, before, after):
        """The number of units is hidden now, a replacement less well: neither claim implies the other."""
        old = {"claim__adjacency": "replace_one", "data__size_is_public": before}
        comparison = compared(old, claim__adjacency="add_or_remove_one", data__size_is_public=after)
        assert comparison.verdict is (Direction.WEAKER if before and after else Direction.INCOMPARABLE)

    @pytest.mark.parametrize(
        ("adjacency", "expected"),
        [
            ("add_or_remove_one", Direction.WEAKER),
            ("replace_one", Direction.UNCHANGED),
            ("zero_out", Direction.UNCHANGED),
        ],
    )
    def test_a_size_is_published(self, adjacency, expected):
        """Neighbours differ in the number of units only under add_or_remove_one: only that claim hid it."""
        old = {"claim__adjacency": adjacency, "data__size_is_public": False}
        assert compared(old, data__size_is_public=True).verdict is expected
        assert compared(old, data__size_is_public=True, claim__epsilon=3.0).verdict is (
            Direction.INCOMPARABLE if expected is Direction.WEAKER else Direction.STRONGER
        )

    def test_half_of_epsilon_makes_up_for_two_steps(self):
        old = {"claim__adjacency": "replace_one"}
        new = {"claim__adjacency": "add_or_remove_one", "claim__delta": 1e-8}
        assert compared(old, **new, claim__epsilon=2.0).verdict is Direction.STRONGER
        comparison = compared(old, **new, claim__epsilon=2.01)
        assert comparison.verdict is Direction.WEAKER
        assert directions(comparison)["claim.epsilon"] == "incomparable"

    def test_two_steps_agree_with_a_mechanism(self):
        """Randomized response on two data sets two flips apart; the worst delta by enumerating all events."""
        epsilon, delta = 0.7, 0.01
        near = {0: (delta, 0), 1: (0, delta)}
        keep = (1 - delta) * math.exp(epsilon) / (1 + math.exp(epsilon))

        def outcome(bit):
            return [
                near[bit][0],
                near[bit][1],
                keep if bit == 0 else 1 - delta - keep,
                keep if bit else 1 - delta - keep,
            ]

        def product(bits):
            return [a * b for a, b in itertools.product(outcome(bits[0]), outcome(bits[1]))]

        twice, twofold = two_steps(epsilon, delta)
        one, other = product((0, 0)), product((1, 1))
        worst = sum(max(0.0, p - math.exp(twice) * q) for p, q in zip(one, other, strict=True))
        assert worst <= twofold
        assert (twice, twofold) == pytest.approx((1.4, 0.01 * (1 + math.exp(0.7))))


class TestMechanism:
    GIVEN = {"mechanism__noise_multiplier": 2.0, "claim__epsilon": 100.0, "budget": None}  # noqa: RUF012

    def test_less_noise_is_weaker_though_the_claim_stays(self):
        comparison = compared(self.GIVEN, mechanism__noise_multiplier=1.9)
        assert comparison.verdict is Direction.WEAKER
        (change,) = [change for change in comparison.changes if change.where == MECHANISM]
        assert 0 < change.old < change.new < 4

    def test_more_noise_is_stronger(self):
        assert compared(self.GIVEN, mechanism__noise_multiplier=2.1).verdict is Direction.STRONGER

    def test_the_same_mechanism_in_other_words(self):
        comparison = compared(self.GIVEN, sampling__expected_batch_size=None, sampling__probability=0.05)
        assert comparison.verdict is Direction.UNCHANGED
        assert directions(comparison)[MECHANISM] == "unchanged"

    def test_more_steps_at_the_same_noise(self):
        assert compared(self.GIVEN, sampling__steps=21).verdict is Direction.WEAKER

    def test_another_sampler_counts_through_epsilon(self):
        full = {"sampling": {"scheme": "full_batch", "steps": 20}}
        comparison = compared(self.GIVEN, **full)
        assert comparison.verdict is Direction.WEAKER
        assert directions(comparison)["sampling.scheme"] == "unchanged"

    def test_a_tighter_accountant_is_no_progress(self):
        old = {**self.GIVEN, "accountant__name": "rdp"}
        comparison = compared(old, accountant__name="pld", sampling__steps=21)
        assert comparison.verdict is Direction.WEAKER

    def test_giving_up_a_margin_for_calibration(self):
        assert compared(self.GIVEN, mechanism__noise_multiplier=None).verdict is Direction.WEAKER

    def test_what_cannot_be_computed_cannot_be_compared(self):
        comparison = compared(self.GIVEN, sampling__steps=None)
        assert directions(comparison)[MECHANISM] == "incomparable"
        (change,) = [change for change in comparison.changes if change.where == MECHANISM]
        assert 0 < change.old < 4
        assert change.new == "not computable"
        assert "nothing -> nothing" not in render_text(comparison)
        assert comparison.verdict is Direction.WEAKER, "and the review finds PS014"


class TestReview:
    def test_a_claim_that_is_not_earned_is_weaker_however_small(self):
        new = spec(mechanism__noise_multiplier=2.0, claim__epsilon=0.1)
        comparison = compare_specs(spec(mechanism__noise_multiplier=2.0), new)
        assert comparison.changes[0].where == REVIEW
        assert "PS020" in comparison.changes[0].why
        (detail,) = comparison.changes[0].details
        (finding,) = [finding for finding in review(new) if finding.id == "PS020"]
        assert detail == f"PS020: {finding.where}: {finding.message}"
        assert f"    {detail}\n" in render_text(comparison)
        assert f"`{detail}`" in render_markdown(comparison)
        assert comparison.verdict is Direction.WEAKER

    def test_shuffling_is_weaker(self):
        comparison = compared(sampling__scheme="shuffle", claim__epsilon=0.1)
        assert directions(comparison)["sampling.scheme"] == "weaker"
        assert directions(comparison)["claim.epsilon"] == "incomparable"
        assert comparison.verdict is Direction.WEAKER

    def test_an_error_that_stays(self):
        old = {"mechanism__noise_multiplier": 2.0, "claim__epsilon": 0.2}
        assert compared(old, claim__epsilon=0.1).verdict is Direction.INCOMPARABLE

    def test_a_repair(self):
        old = {"claim__data_accesses": ["training", "evaluation"]}
        comparison = compared(old, claim__data_accesses=["training"])
        assert comparison.verdict is Direction.INCOMPARABLE, "it is earned now, and promises less: look at it"


class TestVerdict:
    @pytest.mark.parametrize(
        ("seen", "verdict"),
        [
            ([], "unchanged"),
            ([(2, "unchanged")], "unchanged"),
            ([(2, "stronger")], "stronger"),
            ([(1, "weaker"), (1, "incomparable")], "weaker"),
            ([(1, "weaker"), (1, "stronger")], "incomparable"),
            ([(1, "stronger"), (1, "incomparable")], "incomparable"),
            ([(0, "weaker"), (1, "stronger"), (2, "stronger")], "weaker"),
            ([(0, "incomparable"), (2, "stronger")], "incomparable"),
            ([(0, "stronger"), (1, "weaker")], "incomparable"),
            ([(1, "weaker"), (2, "stronger")], "weaker"),
            ([(0, "unchanged"), (1, "stronger"), (2, "incomparable")], "incomparable"),
        ],
    )
    def test_rank_by_rank(self, seen, verdict):
        changes = tuple(Change("x", 0, 1, Direction(name), "", Rank(rank)) for rank, name in seen)
        assert Comparison("spec", "a", "b", changes).verdict == verdict

    def test_delta_before_epsilon(self):
        comparison = compared(claim__delta=2e-6, claim__epsilon=1.0)
        assert [change.where for change in comparison.changes] == ["claim.delta", "claim.epsilon"]
        assert comparison.verdict is Direction.INCOMPARABLE

    def test_the_unit_comes_first(self):
        comparison = compared(
            claim__privacy_unit={**EXAMPLE, "description": "another"},
            claim__adjacency="zero_out",
            claim__epsilon=1.0,
            data__deduplication="none",
        )
        assert [change.where for change in comparison.changes] == [
            "claim.privacy_unit.description",
            "claim.adjacency",
            "claim.epsilon",
            "data.deduplication",
        ]
