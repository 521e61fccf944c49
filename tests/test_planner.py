"""The comparison of methods against the plans that they stand for, and against loops."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest

from tfdp import accounting, make_plan
from tfdp.cli import main
from tfdp.errors import PlanError
from tfdp.planner import best, compare_methods, plot_comparison, recommendation
from tfdp.sampling.units import UnitMap
from tfdp.spec import PrivacySpec

_SIZES = [1] * 60 + [3] * 25 + [12] * 15
_IDS = [f"secret{unit}" for unit, size in enumerate(_SIZES) for _ in range(size)]
_TOKENS = np.arange(len(_IDS)) % 17 + 1
_KS = (1, 3, 8)


def spec_of(method="user_wise_dp_sgd", k=3, kind="user", adjacency="add_or_remove_one", selection="random", **more):
    kept = sum(min(k, size) for size in _SIZES)
    return PrivacySpec.from_dict(
        {
            "schema_version": "1.0",
            "claim": {
                "epsilon": 4.0,
                "delta": 1e-3,
                "adjacency": adjacency,
                "privacy_unit": {
                    "kind": kind, "description": "one writer", "id_field": "sender", "max_records_per_unit": k,
                    "method": method, "selection": selection,
                },
                "data_accesses": ["training"],
            },
            "data": {"num_units": 100, "num_records": kept, "size_is_public": True, "deduplication": "exact"},
            "mechanism": {"clip_norm": 1.0},
            "sampling": {"scheme": "poisson", "expected_batch_size": 12.0, "steps": 40, **more},
        }
    )  # fmt: skip


@pytest.fixture(scope="module")
def units():
    return UnitMap.from_ids(_IDS)


@pytest.fixture(scope="module")
def rows(units):
    return compare_methods(spec_of(), units, ks=_KS, tokens=_TOKENS, num_weights=10_000)


@pytest.mark.parametrize("method", ["user_wise_dp_sgd", "group_privacy"])
def test_the_row_of_the_spec_is_its_plan(units, method):
    """Same probability, batch and steps; sigma to one percent, and never below what the claim takes."""
    spec = spec_of(method)
    (row,) = (each for each in compare_methods(spec, units, ks=[3]) if each.method == method)
    plan = make_plan(spec)
    assert (row.batch, row.probability, row.steps) == pytest.approx(
        (plan.expected_batch_size, plan.sampling_probability, plan.steps)
    )
    assert plan.noise_multiplier * 0.999 <= row.noise_multiplier <= plan.noise_multiplier * 1.01


def test_every_row_keeps_the_claim_and_costs_the_same(rows):
    assert [(each.method, each.k) for each in rows] == [
        (method, k) for method in ("group_privacy", "user_wise_dp_sgd") for k in _KS
    ]
    for each in rows:
        grouped = each.method == "group_privacy"
        kept = sum(min(each.k, size) for size in _SIZES)
        population = kept if grouped else 100
        assert each.cost == pytest.approx(36)
        assert each.batch == pytest.approx(each.probability * population)
        event = accounting.step_event(
            scheme="poisson", sampling_probability=each.probability, noise_multiplier=each.noise_multiplier,
            num_units=population, records_per_unit=each.k if grouped else 1,
        )  # fmt: skip
        spent = accounting.epsilon(event, 40, delta=1e-3, adjacency="add_or_remove_one")
        assert 0.97 * 4 < spent <= 4
        assert each.noise_to_signal == pytest.approx(each.noise_multiplier * 100 / each.batch)
        assert each.records_used == pytest.approx(kept / len(_IDS))
        assert each.records_seen == pytest.approx(40 * each.probability * kept)
        assert each.user == 4
        # One record: the replacement of what is sampled, two clip norms apart.
        single = accounting.step_event(
            scheme="poisson", sampling_probability=each.probability, noise_multiplier=each.noise_multiplier,
            num_units=population,
        )  # fmt: skip
        one = accounting.epsilon(single, 40, delta=1e-3, adjacency="replace_one")
        assert each.example == each.document == pytest.approx(one, rel=0.01)


def test_tokens_of_a_random_and_of_a_longest_selection(units):
    owners = {}
    for record, owner in enumerate(_IDS):
        owners.setdefault(owner, []).append(int(_TOKENS[record]))
    for selection in ("random", "longest"):
        rows = compare_methods(spec_of(selection=selection), units, ks=[3], tokens=_TOKENS)
        for row in rows:
            expected = 0.0
            for tokens in owners.values():
                mean = sum(tokens) * min(1, 3 / len(tokens))
                expected += sum(sorted(tokens)[-3:]) if selection == "longest" else mean
            assert row.tokens_seen == pytest.approx(40 * row.probability * expected)
    assert compare_methods(spec_of(), units, ks=[1])[0].tokens_seen is None


def test_of_a_document_nothing_follows_for_a_user(units):
    for row in compare_methods(spec_of(kind="document"), units, ks=[2]):
        assert (row.document, row.user) == (4, None)
        assert row.example != 4


def test_what_is_not_modelled_says_why(units):
    rows = compare_methods(spec_of(adjacency="replace_one"), units, ks=[2])
    grouped, user_wise = rows
    assert grouped.noise_multiplier is None
    assert "does not model" in grouped.reason
    assert (user_wise.user, user_wise.reason) == (4, None)
    assert user_wise.example <= 4
    assert best(rows) is user_wise
    assert "user_wise_dp_sgd with k = 2" in recommendation(rows)
    assert "No method" in recommendation([grouped])


def test_the_best_row_has_the_least_noise(rows):
    first = best(rows)
    assert first.noise_to_signal == min(each.noise_to_signal for each in rows)
    text = recommendation(rows)
    assert f"{first.method} with k = {first.k}" in text
    assert f"uses {first.records_used:.0%} of the records" in text


def test_averaging_breaks_even_where_it_says(rows):
    """Vectors of norm 1 with that cosine, made and averaged: the shorter mean makes up for the larger noise exactly."""
    first = best(rows)
    row = next(each for each in rows if each.method == "user_wise_dp_sgd" and each.k == 8)
    assert row.break_even(row) is None
    assert dataclasses.replace(row, noise_to_signal=9 * first.noise_to_signal).break_even(first) is None
    row = dataclasses.replace(row, noise_to_signal=1.2 * first.noise_to_signal)
    mean = row.records_seen / (40 * row.batch)
    cosine = row.break_even(first)
    assert 0 < cosine < 1
    # m is no whole number: the squared norm of a mean of m and m + 1 vectors, by loops, interpolated in 1 / m.
    norms = {}
    for count in (math.floor(mean), math.floor(mean) + 1):
        gram = np.full((count, count), cosine)
        np.fill_diagonal(gram, 1.0)
        vectors = np.linalg.cholesky(gram)
        norms[count] = float((vectors.mean(0) ** 2).sum())
    (low, high) = norms
    share = (1 / mean - 1 / high) / (1 / low - 1 / high)
    squared = share * norms[low] + (1 - share) * norms[high]
    assert math.sqrt(squared) * row.noise_to_signal == pytest.approx(first.noise_to_signal, rel=1e-6)


def test_single_records_and_other_samplers_are_refused(units):
    example = spec_of().to_dict()
    example["claim"]["privacy_unit"] = {"kind": "example", "description": "one mail"}
    with pytest.raises(PlanError, match="kind example"):
        compare_methods(PrivacySpec.from_dict(example), units)
    with pytest.raises(PlanError, match="scheme truncated_poisson"):
        compare_methods(spec_of(scheme="truncated_poisson", truncated_batch_size=30), units)


def test_plots(rows, tmp_path):
    assert plot_comparison(rows, tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in plot_comparison(rows, tmp_path / "a.svg").read_bytes()


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "spec.json").write_text(json.dumps(spec_of().to_dict()))
    lines = [json.dumps({"body": "x" * (4 * int(n)), "sender": owner}) for n, owner in zip(_TOKENS, _IDS, strict=True)]
    (tmp_path / "mails.jsonl").write_text("\n".join(lines))
    arguments = ["plan", "compare", "--spec", str(tmp_path / "spec.json"), "--data", str(tmp_path / "mails.jsonl")]

    def call(*more):
        with pytest.raises(SystemExit) as caught:
            main([*arguments, "--k", "3", "--text-field", "body", *more])
        return caught.value.code or 0, *capsys.readouterr()

    code, out, err = call("--plot", str(tmp_path / "plot.png"))
    assert code == 0
    assert (tmp_path / "plot.png").exists()
    assert "user_wise_dp_sgd" in out
    assert "least noise over signal" in out
    assert "secret" not in out + err
    code, out, _ = call("--json")
    found = json.loads(out)
    expected = compare_methods(spec_of(), UnitMap.from_ids(_IDS), ks=[3], tokens=_TOKENS)
    assert [row["tokens_seen"] for row in found["rows"]] == pytest.approx([row.tokens_seen for row in expected])
    assert found["concentration"] is None
    with pytest.raises(SystemExit) as caught:
        main([*arguments, "--concentration", "gpt2:tiny"])
    assert caught.value.code == 2
