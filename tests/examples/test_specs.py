"""The example specs: one for each scheme and unit, all of them pass, and the numbers in their comments are right."""

from __future__ import annotations

import pathlib
import re

import pytest

from tfdp import accounting
from tfdp.findings import errors
from tfdp.review import review
from tfdp.spec import PrivacySpec

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "examples" / "specs"
PATHS = sorted(FOLDER.glob("*.yaml"))
SPECS = {path.stem: PrivacySpec.from_file(path) for path in PATHS}


def test_every_scheme_unit_method_and_adjacency_has_one():
    specs = SPECS.values()
    assert {spec.sampling.scheme for spec in specs} == {"poisson", "truncated_poisson", "full_batch"}
    assert {spec.claim.privacy_unit.kind for spec in specs} == {"example", "sequence", "document", "user"}
    units = {(spec.claim.privacy_unit.kind, spec.claim.privacy_unit.method) for spec in specs}
    assert {(kind, how) for kind in ("user", "document") for how in ("group_privacy", "user_wise_dp_sgd")} <= units
    assert {spec.claim.adjacency for spec in specs} == {"add_or_remove_one", "replace_one", "zero_out"}
    assert {spec.claim.release for spec in specs} == {"all_checkpoints", "final_model", "predictions"}


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_it_passes_and_its_numbers_are_right(path):
    text, spec = path.read_text(encoding="utf-8"), SPECS[path.stem]
    assert errors(review(spec)) == []
    assert text.startswith("# "), "says what it is for"
    schedule, claim = spec.schedule, spec.claim
    said = re.search(r"# +q = (\S+) / (\d+) (units|records) = (\S+) in each of (\d+) steps, .* (\S+) times", text)
    assert said is not None
    assert float(said[1]) == pytest.approx(schedule.expected_batch_size)
    assert (int(said[2]), int(said[5])) == (schedule.population, schedule.steps)
    assert (said[3] == "records") == (schedule.records_per_unit > 1)
    assert float(said[4]) == pytest.approx(schedule.sampling_probability, rel=1e-3)
    assert float(said[6]) == pytest.approx(schedule.sampling_probability * schedule.steps, rel=1e-2)

    said = re.search(r"sigma = (\S+?),? (?:which )?costs epsilon (\S+) of the claimed (\S+) \((\w+), (\w+)\)", text)
    assert said is not None
    sigma, epsilon = float(said[1]), float(said[2])
    assert spec.mechanism.noise_multiplier in (None, sigma)
    assert (float(said[3]), said[4], said[5]) == (claim.epsilon, spec.accountant.name, claim.adjacency)
    event = accounting.step_event(
        scheme=spec.sampling.scheme,
        sampling_probability=schedule.sampling_probability,
        noise_multiplier=sigma,
        num_units=schedule.population,
        truncated_batch_size=spec.sampling.truncated_batch_size,
        records_per_unit=schedule.records_per_unit,
    )
    cost = accounting.epsilon(
        event, schedule.steps, delta=claim.delta, accountant=spec.accountant.name, adjacency=claim.adjacency
    )
    assert cost == pytest.approx(epsilon, rel=1e-3)
    assert cost <= claim.epsilon
    if spec.mechanism.noise_multiplier is None:
        assert cost > 0.998 * claim.epsilon, "calibration leaves less than that unused"

    said = re.search(r"delta \* num_units = (\S+):", text)
    assert said is not None
    assert float(said[1]) == pytest.approx(claim.delta * spec.data.num_units, rel=0.1)
    assert claim.delta * spec.data.num_units <= 0.1
    if (alone := re.search(r"the gradients alone get .* = (\S+):", text)) is not None:
        clipping = spec.mechanism.clip_norm
        assert float(alone[1]) == pytest.approx((sigma**-2 - (2 * clipping.count_noise) ** -2) ** -0.5, rel=1e-6)
