"""The rules that came with the table of findings: heard where they should be, silent where they should be."""

from __future__ import annotations

import copy
import re

import pytest

from tfdp.review import REVIEWERS_RULES, RULES, review
from tfdp.review.catalogue import BASE
from tfdp.spec import PrivacySpec

VALUES = PrivacySpec.from_text(BASE).to_dict()
USER = {"kind": "user", "description": "one account", "id_field": "account", "max_records_per_unit": 5}
GROUP = {
    "claim.privacy_unit": USER | {"method": "group_privacy"},
    "data.num_units": 12000,
    "data.num_records": 60000,
    "claim.delta": 5e-6,
}
CALIBRATED = {"mechanism.noise_multiplier": None}


def changed(changes: dict) -> dict:
    values = copy.deepcopy(VALUES)
    for path, value in changes.items():
        *sections, name = path.split(".")
        section = values
        for part in sections:
            section = section[part]
        section[name] = value
    return values


def found(id: str, changes: dict, rules=RULES) -> list[str]:
    spec = PrivacySpec.from_dict(changed(changes))
    findings = [finding for finding in review(spec, rules=rules) if finding.id == id]
    return [f"{finding.severity.value} {finding.where}" for finding in findings]


# One record costs 1.068, and a unit of five 6.635.
@pytest.mark.parametrize(
    ("epsilon", "refused_as"), [(1.06, "PS020"), (1.1, "PS006"), (1.3, "PS006"), (2.0, "PS020"), (6.7, None)]
)
def test_ps006_is_the_cost_of_one_record(epsilon, refused_as):
    for id in ("PS006", "PS020"):
        expected = ["error claim.epsilon"] if id == refused_as else []
        assert found(id, GROUP | {"claim.epsilon": epsilon}) == expected


@pytest.mark.parametrize(
    ("unit", "warned"),
    [
        ({"kind": "example", "description": "x", "id_field": "account"}, True),
        ({"kind": "sequence", "description": "x", "id_field": "account", "sequence_length": 8}, True),
        ({"kind": "example", "description": "x"}, False),
        (USER | {"max_records_per_unit": 1}, False),
        (USER | {"kind": "document", "max_records_per_unit": 1}, False),
    ],
)
def test_ps007(unit, warned):
    assert found("PS007", CALIBRATED | {"claim.privacy_unit": unit}) == ["warning claim.privacy_unit.kind"] * warned


@pytest.mark.parametrize(
    ("deduplication", "unit", "warned"),
    [
        ("none", VALUES["claim"]["privacy_unit"], True),
        ("none", USER | {"kind": "document", "max_records_per_unit": 1}, True),
        ("none", USER | {"max_records_per_unit": 1}, False),
        ("exact", VALUES["claim"]["privacy_unit"], False),
        ("near", VALUES["claim"]["privacy_unit"], False),
    ],
)
def test_ps008(deduplication, unit, warned):
    changes = CALIBRATED | {"data.deduplication": deduplication, "claim.privacy_unit": unit}
    assert found("PS008", changes) == ["warning data.deduplication"] * warned


@pytest.mark.parametrize(
    ("changes", "noted"),
    [
        ({}, False),
        ({"data.size_is_public": False}, True),
        ({"data.size_is_public": False, "claim.adjacency": "zero_out"}, False),
        ({"data.size_is_public": False, "claim.adjacency": "replace_one"}, False),
        ({"data.size_is_public": False, "sampling.expected_batch_size": None, "sampling.probability": 0.01}, False),
    ],
)
def test_ps018(changes, noted):
    assert found("PS018", CALIBRATED | changes) == ["note sampling.expected_batch_size"] * noted


# The mechanism costs 1.193.
@pytest.mark.parametrize(("epsilon", "noted"), [(1.2, False), (1.32, False), (1.33, True), (5, True), (1.0, False)])
def test_ps021_unused(epsilon, noted):
    assert found("PS021", {"claim.epsilon": epsilon}) == ["note claim.epsilon"] * noted


@pytest.mark.parametrize(
    ("accountant", "rules", "noted"),
    [("rdp", REVIEWERS_RULES, True), ("pld", REVIEWERS_RULES, False), ("rdp", RULES, False)],
)
def test_ps021_a_looser_accountant(accountant, rules, noted):
    assert (
        found("PS021", {"accountant.name": accountant, "claim.epsilon": 1.3}, rules) == ["note accountant.name"] * noted
    )


@pytest.mark.parametrize(
    ("changes", "warned"),
    [
        ({"accountant.name": "rdp", "mechanism.noise_multiplier": 0.2}, True),
        ({"accountant.name": "rdp"}, False),
        ({"accountant.name": "rdp", **CALIBRATED}, False),
        ({"mechanism.noise_multiplier": 0.2, "sampling.epochs": 0.1}, False),
    ],
)
def test_ps022(changes, warned):
    assert found("PS022", {"claim.epsilon": 1e5} | changes) == ["warning accountant.name"] * warned


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        ({}, []),
        ({"epsilon_cap": 1.19}, ["PS032 error budget.epsilon_cap"]),
        ({"epsilon_cap": 1.2}, ["PS033 warning budget.epsilon_cap"]),
        ({"epsilon_cap": 1.499}, ["PS033 warning budget.epsilon_cap"]),
        ({"epsilon_cap": 1.5}, []),
        ({"delta_cap": 0.9e-6}, ["PS032 error budget.delta_cap"]),
        ({"delta_cap": 1e-4, "epsilon_cap": 12.0}, []),
    ],
)
def test_ps032_ps033(budget, expected):
    changes = CALIBRATED | {"budget": {"dataset_id": "mails", **budget}}
    assert [f"{id} {text}" for id in ("PS032", "PS033") for text in found(id, changes)] == expected


def test_ps021_says_nothing_of_a_mechanism_that_hides_one_record_only():
    """With method native and k = 5 the cost is that of one record: no claim to aim at."""
    changes = {"claim.epsilon": 20.0, "data.num_units": 12000, "claim.delta": 5e-6}
    for method, expected in (("native", []), ("user_wise_dp_sgd", ["note claim.epsilon"])):
        assert found("PS021", changes | {"claim.privacy_unit": USER | {"method": method}}) == expected


@pytest.mark.parametrize("method", ["user_wise_dp_sgd", "group_privacy"])
def test_ps009_is_mended_by_what_it_says(method):
    """Each way out is a line to copy, with what it means."""
    changes = CALIBRATED | {"claim.privacy_unit": USER, "data.num_records": 100_000}
    (finding,) = [finding for finding in review(PrivacySpec.from_dict(changed(changes))) if finding.id == "PS009"]
    assert re.search(rf"method: {method} \([a-z]", finding.fix)
    assert found("PS009", changes | {"claim.privacy_unit": USER | {"method": method}}) == []
    assert found("PS009", changes | {"claim.privacy_unit": USER | {"max_records_per_unit": 1}}) == []
