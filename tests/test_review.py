"""Each rule of the review both ways: silent where it should be, and heard where it should be."""

from __future__ import annotations

import copy
import datetime
import glob
import pathlib
from typing import Any

import pytest

import tfdp
from tfdp.errors import SpecError
from tfdp.findings import Finding, Severity
from tfdp.review import REVIEWERS_RULES, RULES, review
from tfdp.review.waivers import apply_waivers
from tfdp.spec import PrivacySpec

ROOT = pathlib.Path(__file__).resolve().parents[1]

# The reference run: 1.1337 by pld, 1.2811 by rdp, 1.9284 under replace_one, 20.56 without amplification, at delta 1e-5.
BASE: dict[str, Any] = {
    "schema_version": "1.0",
    "claim": {
        "epsilon": 1.2,
        "delta": 1e-5,
        "privacy_unit": {"kind": "example", "description": "one text"},
        "adjacency": "add_or_remove_one",
        "data_accesses": ["training"],
    },
    "data": {"num_units": 60000, "size_is_public": True, "deduplication": "exact"},
    "mechanism": {"clip_norm": 1.0, "noise_multiplier": 1.1},
    "sampling": {"scheme": "poisson", "expected_batch_size": 256, "epochs": 15},
    "accountant": {"name": "pld"},
}
USER = {"kind": "user", "id_field": "account", "max_records_per_unit": 5}
NO_NOISE = {"mechanism.noise_multiplier": None}  # where epsilon is beside the point: saves the accounting


def spec_with(changes: dict[str, Any] | None = None) -> PrivacySpec:
    """BASE with dotted fields replaced; a value of `...` deletes the field."""
    values = copy.deepcopy(BASE)
    for path, value in (changes or {}).items():
        *sections, name = path.split(".")
        section = values
        for part in sections:
            section = section.setdefault(part, {})
        if value is ...:
            del section[name]
        elif isinstance(value, dict):
            section.setdefault(name, {}).update(value)
        else:
            section[name] = value
    return PrivacySpec.from_dict(values)


def found(id: str, changes: dict[str, Any] | None = None) -> list[Finding]:
    return [finding for finding in review(spec_with(changes)) if finding.id == id]


def blocks(changes: dict[str, Any]) -> set[str]:
    return {finding.id for finding in review(spec_with(changes)) if finding.severity is Severity.ERROR}


def test_the_reference_run_passes_but_for_its_delta():
    (finding,) = review(spec_with())
    assert (finding.id, finding.severity) == ("PS004", Severity.WARNING)


class TestDelta:
    @pytest.mark.parametrize(("delta", "units"), [(1 / 1000, 1000), (0.5, 2), (2e-3, 1000), (0.9999, 1)])
    def test_ps003(self, delta, units):
        changes = {"claim.delta": delta, "data.num_units": units, "sampling.expected_batch_size": 1, **NO_NOISE}
        (finding,) = found("PS003", changes) or [None]
        if delta * units < 1:
            assert finding is None, "delta 0.9999 is below 1/1"
        else:
            assert (finding.severity, finding.where) == (Severity.ERROR, "claim.delta")
            assert not found("PS004", changes)

    @pytest.mark.parametrize(("delta", "warned"), [(9.99e-4, True), (1.01e-4, True), (1e-4, False), (9e-5, False)])
    def test_ps004(self, delta, warned):
        changes = {"claim.delta": delta, "data.num_units": 1000, **NO_NOISE}
        assert bool(found("PS004", changes)) is warned
        assert not found("PS003", changes)

    def test_group_privacy_is_measured_in_units_not_in_records(self):
        unit = {"claim.privacy_unit": USER | {"method": "group_privacy"}, "data.num_records": 60000, **NO_NOISE}
        assert found("PS003", unit | {"data.num_units": 12000, "claim.delta": 1 / 12000})
        assert not found("PS003", unit | {"data.num_units": 12000, "claim.delta": 1 / 60000})


class TestUnit:
    @pytest.mark.parametrize(
        ("unit", "missing"),
        [
            ({"kind": "user"}, {"id_field", "max_records_per_unit"}),
            ({"kind": "document", "id_field": "path"}, {"max_records_per_unit"}),
            ({"kind": "user", "max_records_per_unit": 1}, {"id_field"}),
            ({"kind": "sequence"}, {"sequence_length"}),
            ({"kind": "user", "method": "user_wise_dp_sgd", "id_field": "a"}, {"max_records_per_unit"}),
            ({"kind": "example"}, set()),
            ({"kind": "sequence", "sequence_length": 128}, set()),
            ({"kind": "document", "id_field": "path", "max_records_per_unit": 1}, set()),
        ],
    )
    def test_ps005(self, unit, missing):
        where = {finding.where for finding in found("PS005", {"claim.privacy_unit": unit, **NO_NOISE})}
        assert where == {f"claim.privacy_unit.{name}" for name in missing}

    def test_ps005_group_privacy_needs_the_number_of_records(self):
        unit = {"claim.privacy_unit": USER | {"method": "group_privacy"}, **NO_NOISE}
        assert [finding.where for finding in found("PS005", unit)] == ["data.num_records"]
        assert not found("PS005", unit | {"data.num_records": 100_000})

    @pytest.mark.parametrize(
        ("unit", "refused"),
        [
            (USER, True),
            (USER | {"kind": "document"}, True),
            (USER | {"max_records_per_unit": 1}, False),
            (USER | {"method": "user_wise_dp_sgd"}, False),
            (USER | {"method": "group_privacy"}, False),
            ({"kind": "example"}, False),
            ({"kind": "example", "max_records_per_unit": 1}, False),
            ({"kind": "example", "max_records_per_unit": 2}, True),
            ({"kind": "example", "max_records_per_unit": 2, "method": "group_privacy"}, True),
            ({"kind": "sequence", "sequence_length": 8, "method": "user_wise_dp_sgd"}, True),
            (USER | {"method": "user_wise_dp_sgd", "selection": "random_chunk"}, False),
            (USER | {"method": "group_privacy", "selection": "random_chunk"}, True),
            (USER | {"max_records_per_unit": 1, "selection": "random_chunk"}, True),
            (USER | {"method": "user_wise_dp_sgd", "max_tokens_per_unit": 500}, False),
            (USER | {"method": "group_privacy", "max_tokens_per_unit": 500}, True),
        ],
    )
    def test_ps009_a_native_unit_is_one_record(self, unit, refused):
        assert bool(found("PS009", {"claim.privacy_unit": unit, "data.num_records": 100_000, **NO_NOISE})) is refused


class TestSampler:
    def test_ps010_prints_what_shuffling_costs(self):
        (finding,) = found("PS010", {"sampling.scheme": "shuffle"})
        assert (finding.severity, finding.where) == (Severity.ERROR, "sampling.scheme")
        assert "epsilon 20.56" in finding.message
        assert "claimed is 1.2" in finding.message

    def test_ps010_also_without_numbers(self):
        assert found("PS010", {"sampling.scheme": "shuffle", **NO_NOISE})
        assert found("PS010", {"sampling.scheme": "shuffle", "sampling.epochs": ...})

    def test_ps010_even_when_the_claim_is_wide_enough(self):
        assert blocks({"sampling.scheme": "shuffle", "claim.epsilon": 50}) == {"PS010"}

    @pytest.mark.parametrize("scheme", ["poisson", "truncated_poisson", "full_batch"])
    def test_ps010_silent(self, scheme):
        assert not found("PS010", {"sampling.scheme": scheme, **NO_NOISE})

    @pytest.mark.parametrize(
        ("accountant", "adjacency", "sampling", "refused"),
        [
            ("pld", "add_or_remove_one", {}, False),
            ("pld", "replace_one", {}, False),
            ("pld", "zero_out", {}, False),
            ("prv", "replace_one", {}, False),
            ("rdp", "add_or_remove_one", {}, False),
            ("rdp", "replace_one", {}, True),
            ("rdp", "add_or_remove_one", {"scheme": "truncated_poisson", "truncated_batch_size": 320}, True),
            ("pld", "add_or_remove_one", {"scheme": "truncated_poisson", "truncated_batch_size": 320}, False),
        ],
    )
    @pytest.mark.parametrize("noise", [None, 1.1])
    def test_ps011_ps017(self, accountant, adjacency, sampling, refused, noise):
        changes = {
            "accountant.name": accountant,
            "claim.adjacency": adjacency,
            "sampling": sampling,
            "mechanism.noise_multiplier": noise,
            "claim.epsilon": 2,
        }
        expected = "PS017" if (accountant, adjacency) == ("rdp", "replace_one") else "PS011"
        assert blocks(changes) == ({expected} if refused else set()), "an unsupported epsilon is not computed either"

    def test_ps011_group_privacy_with_truncation(self):
        changes = {
            "claim.privacy_unit": USER | {"method": "group_privacy"},
            "data.num_records": 100_000,
            "sampling": {"scheme": "truncated_poisson", "truncated_batch_size": 320},
        }
        assert blocks(changes) == {"PS011"}


class TestScope:
    @pytest.mark.parametrize("model", ["local", "distributed"])
    def test_ps012_trust_model(self, model):
        assert [f.where for f in found("PS012", {"claim.trust_model": model, **NO_NOISE})] == ["claim.trust_model"]
        assert not found("PS012", {"claim.trust_model": "central", **NO_NOISE})

    @pytest.mark.parametrize(
        ("accesses", "count"),
        [
            (["training"], 0),
            (["training", "evaluation"], 1),
            (["training", "evaluation", "clip_selection"], 2),
            (["evaluation"], 2),
            (["tuning"], 1),
        ],
    )
    def test_ps012_accesses_that_nobody_accounts(self, accesses, count):
        changes = {"claim.data_accesses": accesses, "tuning.kind": "public", **NO_NOISE}
        assert len(found("PS012", changes)) == count

    @pytest.mark.parametrize(
        ("tuning", "covered", "expected"),
        [
            (None, False, set()),
            (None, True, {("PS040", "error")}),
            ({"kind": "none"}, True, set()),
            ({"kind": "public"}, True, set()),
            ({"kind": "private"}, True, {("PS040", "error")}),
            ({"kind": "private", "accounted": True}, True, {("PS012", "error")}),
            ({"kind": "private"}, False, {("PS040", "warning")}),
            ({"kind": "private", "accounted": True}, False, {("PS040", "warning")}),
        ],
    )
    def test_ps040(self, tuning, covered, expected):
        changes = {"claim.data_accesses": ["training", "tuning"] if covered else ["training"], **NO_NOISE}
        if tuning:
            changes["tuning"] = tuning
        findings = [f for f in review(spec_with(changes)) if f.id != "PS004"]
        assert {(f.id, f.severity.value) for f in findings} == expected


class TestNumbers:
    @pytest.mark.parametrize(
        ("sampling", "where"),
        [
            ({"expected_batch_size": 60001}, "sampling.expected_batch_size"),
            ({"expected_batch_size": ..., "probability": 1.0001}, "sampling.probability"),
            ({"scheme": "truncated_poisson", "truncated_batch_size": 60001}, "sampling.truncated_batch_size"),
            ({"expected_batch_size": 60000}, None),
            ({"expected_batch_size": ..., "probability": 1}, None),
            ({"scheme": "truncated_poisson", "truncated_batch_size": 60000}, None),
            ({"microbatch_size": 70000}, None),
        ],
    )
    def test_ps013(self, sampling, where):
        changes = {f"sampling.{name}": value for name, value in sampling.items()} | NO_NOISE
        assert [finding.where for finding in found("PS013", changes)] == ([where] if where else [])

    @pytest.mark.parametrize(
        ("sampling", "says"),
        [
            ({"expected_batch_size": ...}, "received neither"),
            ({"probability": 0.01}, "256 and 0.01 * 60000 = 600"),
            ({"probability": 256 / 60000}, "received both"),
            ({"epochs": ...}, "received neither"),
            ({"steps": 4000}, "4000 and 15 epochs, which are 3515 steps"),
            ({"epochs": 0.004}, "less than one"),
            ({"scheme": "full_batch"}, "full batch of data.num_units = 60000, received 256"),
            ({"scheme": "full_batch", "expected_batch_size": ..., "probability": 0.5}, "probability 1"),
            ({"scheme": "truncated_poisson"}, "received nothing"),
            ({"truncated_batch_size": 320}, "received 320"),
        ],
    )
    def test_ps014(self, sampling, says):
        changes = {f"sampling.{name}": value for name, value in sampling.items()}
        (finding,) = found("PS014", changes)
        assert says in finding.message
        assert finding.severity is Severity.ERROR
        assert not found("PS020", changes), "no epsilon is printed for numbers that contradict each other"

    @pytest.mark.parametrize(
        "sampling",
        [
            {},
            {"epochs": ..., "steps": 3515},
            {"expected_batch_size": ..., "probability": 0.01},
            {"scheme": "full_batch", "expected_batch_size": ...},
            {"scheme": "full_batch", "expected_batch_size": 60000},
            {"scheme": "full_batch", "expected_batch_size": ..., "probability": 1},
            {"scheme": "truncated_poisson", "truncated_batch_size": 320},
        ],
    )
    def test_ps014_silent(self, sampling):
        assert not found("PS014", {f"sampling.{name}": value for name, value in sampling.items()} | NO_NOISE)

    @pytest.mark.parametrize(
        ("records", "method", "refused"),
        [
            (59999, "user_wise_dp_sgd", True),
            (60000, "user_wise_dp_sgd", False),
            (300_001, "user_wise_dp_sgd", False),  # counted before contributions are bounded
            (300_001, "group_privacy", True),
            (300_000, "group_privacy", False),
        ],
    )
    def test_ps014_sizes(self, records, method, refused):
        changes = {"claim.privacy_unit": USER | {"method": method}, "data.num_records": records, **NO_NOISE}
        assert bool(found("PS014", changes)) is refused


class TestEpsilon:
    @pytest.mark.parametrize(
        ("claimed", "changes", "received"),
        [
            (1.13, {}, "1.13375"),
            (1.1338, {}, None),
            (1.92, {"claim.adjacency": "replace_one"}, "1.928"),
            (1.93, {"claim.adjacency": "replace_one"}, None),
            (1.28, {"accountant.name": "rdp"}, "1.281"),
            (1.29, {"accountant.name": "rdp"}, None),
            (1.15, {"sampling": {"scheme": "truncated_poisson", "truncated_batch_size": 320}}, "1.16"),
        ],
    )
    def test_ps020(self, claimed, changes, received):
        findings = found("PS020", {"claim.epsilon": claimed, **changes})
        assert bool(findings) is (received is not None)
        if received:
            assert f"received {received}" in findings[0].message
            assert (findings[0].severity, findings[0].where) == (Severity.ERROR, "claim.epsilon")

    def test_ps020_the_slack_is_for_floating_point_only(self):
        from tfdp import accounting

        event = accounting.step_event(
            scheme="poisson", sampling_probability=256 / 60000, noise_multiplier=1.1, num_units=60000
        )
        exact = accounting.epsilon(event, 3515, delta=1e-5, accountant="rdp", adjacency="add_or_remove_one")
        rdp = {"accountant.name": "rdp"}
        assert not found("PS020", {"claim.epsilon": exact, **rdp})
        assert not found("PS020", {"claim.epsilon": exact * (1 - 5e-7), **rdp})
        assert found("PS020", {"claim.epsilon": exact * (1 - 2e-6), **rdp})

    def test_ps020_counts_all_records_of_a_unit_under_group_privacy(self):
        changes = {
            "claim.privacy_unit": USER | {"method": "group_privacy"},
            "data": {"num_units": 12000, "num_records": 60000},
        }
        (finding,) = found("PS020", {"claim.epsilon": 7, **changes})
        assert "received 7.04" in finding.message, "five records: 7.048, where one costs 1.13"
        assert not found("PS020", {"claim.epsilon": 7.1, **changes})

    def test_ps020_does_not_apply_when_noise_is_calibrated(self):
        assert not found("PS020", {"claim.epsilon": 0.01, **NO_NOISE})

    def test_ps020_when_delta_is_too_small_to_certify(self):
        assert found("PS020", {"claim.delta": 1e-300, "claim.epsilon": 5})

    @pytest.mark.parametrize(("epsilon", "warned"), [(10, False), (10.01, True), (1000, True), (0.1, False)])
    def test_ps023(self, epsilon, warned):
        findings = found("PS023", {"claim.epsilon": epsilon, **NO_NOISE})
        assert [finding.severity for finding in findings] == [Severity.WARNING] * warned


class TestWhole:
    def test_places_come_from_the_file(self, tmp_path):
        path = tmp_path / "privacy.yaml"
        text = (ROOT / "examples" / "specs" / "poisson.yaml").read_text()
        path.write_text(text.replace("epsilon: 8", "epsilon: 80").replace("  epochs: 10", "  epochs: 10\n  steps: 5"))
        epsilon, epochs = review(PrivacySpec.from_file(path))
        assert (epsilon.id, epsilon.file, epsilon.line, epsilon.column) == ("PS023", str(path), 5, 12)
        lines = path.read_text().splitlines()
        assert epochs.id == "PS014"
        assert lines[epochs.line - 1][epochs.column - 1 :] == "10"

    def test_a_field_that_is_absent_is_shown_at_its_section(self):
        spec = PrivacySpec.from_text((ROOT / "examples/specs/user-level.yaml").read_text().replace("id_field", "#"))
        (finding,) = review(spec)
        assert (finding.id, finding.where, finding.line) == ("PS005", "claim.privacy_unit.id_field", 7)

    @pytest.mark.parametrize("update", [{"epsilon": float("nan")}, {"epsilon": float("inf")}, {"delta": 2.0}])
    def test_values_that_no_file_could_hold_are_refused(self, update):
        spec = spec_with()
        smuggled = spec.model_copy(update={"claim": spec.claim.model_copy(update=update)})
        with pytest.raises(SpecError):
            review(smuggled)

    @pytest.mark.parametrize("value", ["privacy.yaml", BASE, None])
    def test_only_specs(self, value):
        with pytest.raises(SpecError, match="from_file"):
            review(value)

    def test_the_public_name_is_a_function_though_the_module_has_the_same_name(self):
        import tfdp.review  # importing the module binds tfdp.review to it

        assert tfdp.review(spec_with()) == review(spec_with())

    def test_rules_are_not_repeated(self):
        assert len(set(RULES)) == len(RULES)

    def test_pairs_of_changes_never_leave_a_broken_schedule_unreported(self):
        """Whatever cannot be accounted carries an error: silence is a promise."""
        options = [
            {"sampling.expected_batch_size": ...},
            {"sampling.probability": 2},
            {"sampling.steps": 3},
            {"sampling.epochs": ...},
            {"sampling.epochs": 1e-9},
            {"sampling.scheme": "full_batch"},
            {"sampling.scheme": "truncated_poisson"},
            {"sampling.truncated_batch_size": 100},
            {"claim.privacy_unit": USER | {"method": "group_privacy"}},
            {"data.num_records": 7},
        ]
        for first in options:
            for second in options:
                spec = spec_with(first | second | NO_NOISE)
                errors = [f for f in review(spec) if f.severity is Severity.ERROR]
                try:
                    schedule = spec.schedule
                except ValueError:
                    schedule = None
                if schedule is None or schedule.steps < 1 or not 0 < schedule.sampling_probability <= 1:
                    assert errors, (first, second)

    @pytest.mark.parametrize("path", sorted(glob.glob(str(ROOT / "examples" / "specs" / "*"))), ids=pathlib.Path)
    def test_examples_pass_without_a_single_finding(self, path):
        spec = PrivacySpec.from_file(path)
        found = review(spec, rules=REVIEWERS_RULES)
        assert apply_waivers(spec, found, datetime.date(2026, 12, 1)).findings == ()

    def test_every_scheme_has_an_example(self):
        specs = [PrivacySpec.from_file(path) for path in glob.glob(str(ROOT / "examples" / "specs" / "*"))]
        assert {spec.sampling.scheme for spec in specs} == {"poisson", "truncated_poisson", "full_batch"}
        assert {spec.claim.privacy_unit.method for spec in specs} == {"native", "group_privacy", "user_wise_dp_sgd"}


def test_tfdp_exports_review():
    assert tfdp.review(spec_with(NO_NOISE))[0].id == "PS004"
