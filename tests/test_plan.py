"""The plan: numbers that follow from the spec, a certificate that keeps the claim, refusals."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
from typing import Any

import pytest
from dp_accounting import dp_event

from tfdp import accounting
from tfdp.errors import AccountingError, PlanError
from tfdp.plan import Plan, make_plan
from tfdp.spec import PrivacySpec

pytestmark = pytest.mark.quick

# The reference run: 15 epochs are 3515 steps and cost 1.13374 with sigma 1.1 at delta 1e-5.
BASE: dict[str, Any] = {
    "schema_version": "1.0",
    "claim": {
        "epsilon": 1.2,
        "delta": 1e-5,
        "privacy_unit": {"kind": "example", "description": "one text"},
        "adjacency": "add_or_remove_one",
        "data_accesses": ["training"],
    },
    "data": {"num_units": 60000, "size_is_public": True},
    "mechanism": {"clip_norm": 0.5, "noise_multiplier": 1.1},
    "sampling": {"scheme": "poisson", "expected_batch_size": 256, "epochs": 15, "microbatch_size": 16},
    "accountant": {"name": "pld"},
}


def spec_with(**changes: Any) -> PrivacySpec:
    """BASE with fields replaced, as section__field=value; `...` deletes."""
    values = copy.deepcopy(BASE)
    for path, value in changes.items():
        *sections, name = path.split("__")
        section = values
        for part in sections:
            section = section[part]
        if value is ...:
            del section[name]
        else:
            section[name] = value
    return PrivacySpec.from_dict(values)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(spec_with())


def test_numbers_follow_from_the_spec(plan):
    assert plan.num_units == 60000
    assert plan.sampling_probability == 256 / 60000
    assert plan.expected_batch_size == 256.0
    assert plan.steps == 3515  # floor(15 * 60000 / 256)
    assert plan.steps_per_epoch == 234  # round(60000 / 256)
    assert plan.epochs == 16  # 15 * 234 = 3510 steps do not suffice
    assert plan.noise_multiplier == 1.1
    assert plan.noise_stddev == pytest.approx(0.55)
    assert (plan.scheme, plan.truncated_batch_size, plan.microbatch_size) == ("poisson", None, 16)
    assert (plan.adjacency, plan.accountant, plan.delta) == ("add_or_remove_one", "pld", 1e-5)
    assert (plan.target_epsilon, plan.clip_norm, plan.rng, plan.seed) == (1.2, 0.5, "csprng", None)
    assert plan.records_per_unit == 1
    assert plan.step_event == dp_event.PoissonSampledDpEvent(256 / 60000, dp_event.GaussianDpEvent(1.1))
    assert plan.spec_digest == plan.spec.digest


def test_epsilon_of_the_run(plan):
    assert plan.epsilon(3515) == pytest.approx(1.13374, abs=1e-5)
    assert plan.epsilon(0) == 0.0
    assert plan.epsilon(100) == accounting.epsilon(plan.step_event, 100, delta=1e-5, adjacency="add_or_remove_one")
    assert plan.epsilon(4000) > plan.epsilon(3515)


def test_epsilon_is_computed_once(plan, monkeypatch):
    first = plan.epsilon(1234)
    monkeypatch.setattr(accounting, "epsilon", lambda *a, **k: pytest.fail("computed again"))
    assert plan.epsilon(1234) == first


def test_bound_holds_at_every_step_and_ends_on_the_certificate(plan):
    bounds = [plan.epsilon_bound(steps) for steps in range(3516)]
    assert bounds[0] == 0.0
    assert all(earlier <= later for earlier, later in itertools.pairwise(bounds))
    assert bounds[3515] == plan.epsilon(3515)
    assert bounds[3514] <= plan.epsilon(3515)
    assert 30 <= len(set(bounds)) <= 42
    for steps in (1, 15, 16, 500, 2000, 3400):
        exact = plan.epsilon(steps)
        assert exact <= bounds[steps] <= exact + 0.07
    assert plan.epsilon_bound(3600) == plan.epsilon(3600)


def test_bound_of_a_short_run():
    short = make_plan(spec_with(sampling__epochs=..., sampling__steps=3))
    assert [short.epsilon_bound(steps) for steps in (1, 3)] == [
        pytest.approx(short.epsilon(1), abs=0.02),
        short.epsilon(3),
    ]
    assert (short.steps_per_epoch, short.epochs) == (3, 1)


def test_noise_is_calibrated_when_the_spec_leaves_it_open():
    plan = make_plan(spec_with(mechanism__noise_multiplier=None))
    assert 1.2 * 0.998 <= plan.epsilon(plan.steps) <= 1.2
    assert 1.0 < plan.noise_multiplier < 1.1
    assert plan.step_event.event.noise_multiplier == plan.noise_multiplier


def test_claim_that_is_not_kept_is_refused():
    with pytest.raises(PlanError, match=r"1 error:\n.*PS020.*1\.133.*received 1\.13375") as caught:
        make_plan(spec_with(claim__epsilon=1.133))
    assert [finding.id for finding in caught.value.findings] == ["PS020"]
    # The claim may be the certificate itself; floating point is forgiven, 1e-6 relative and no more.
    certified = make_plan(spec_with()).epsilon(3515)
    make_plan(spec_with(claim__epsilon=certified * (1 - 5e-7)))
    with pytest.raises(PlanError):
        make_plan(spec_with(claim__epsilon=certified * (1 - 2e-6)))


def test_certificate_does_not_rest_on_the_review(monkeypatch):
    monkeypatch.setattr("tfdp.plan.review", lambda spec: [])
    with pytest.raises(AccountingError, match=r"claimed epsilon 1\.1 at delta 1e-05\. Received: 1\.13375"):
        make_plan(spec_with(claim__epsilon=1.1))


@pytest.mark.parametrize(
    ("changes", "ids"),
    [
        ({"sampling__scheme": "shuffle"}, ["PS010"]),
        ({"claim__delta": 2e-5}, ["PS003"]),
        ({"accountant__name": "rdp", "claim__adjacency": "replace_one"}, ["PS017"]),
        ({"claim__trust_model": "local"}, ["PS012"]),
        ({"sampling__expected_batch_size": 60001}, ["PS013"]),
        ({"sampling__steps": 100}, ["PS014"]),
    ],
)
def test_errors_of_the_review_block(changes, ids):
    with pytest.raises(PlanError, match="Expected a spec that passes review") as caught:
        make_plan(spec_with(mechanism__noise_multiplier=None, **changes))
    assert [finding.id for finding in caught.value.findings] == ids


def test_size_at_hand_must_be_the_size_of_the_spec():
    assert make_plan(spec_with(), num_units=60000).num_units == 60000
    with pytest.raises(PlanError, match=r"Received: 60000 in the spec, num_units=59999"):
        make_plan(spec_with(), num_units=59999)


def test_full_batch_and_truncated_poisson():
    changes = {"sampling": {"scheme": "full_batch", "steps": 20}, "mechanism__noise_multiplier": None}
    full = make_plan(spec_with(**changes, claim__adjacency="replace_one"))
    assert (full.sampling_probability, full.expected_batch_size, full.steps_per_epoch, full.epochs) == (1, 60000, 1, 20)
    assert full.step_event == dp_event.GaussianDpEvent(full.noise_multiplier)
    # Replacing a unit moves the sum twice as far as adding one.
    assert full.noise_multiplier == pytest.approx(2 * make_plan(spec_with(**changes)).noise_multiplier, rel=1e-3)
    truncated = make_plan(
        spec_with(sampling__scheme="truncated_poisson", sampling__truncated_batch_size=320, claim__epsilon=1.17)
    )
    assert truncated.step_event == dp_event.TruncatedSubsampledGaussianDpEvent(60000, 256 / 60000, 320, 1.1)
    assert truncated.epsilon(truncated.steps) == pytest.approx(1.16562, abs=1e-5)  # reference table
    assert truncated.epsilon_bound(1000) >= truncated.epsilon(1000)


def test_probability_and_steps_given_directly():
    plan = make_plan(spec_with(sampling={"scheme": "poisson", "probability": 0.1, "epochs": 3}, claim__epsilon=20.0))
    assert plan.steps == 30  # 3 / 0.1 in floating point is 29.999...
    assert plan.expected_batch_size == pytest.approx(6000)
    assert (plan.steps_per_epoch, plan.epochs, plan.microbatch_size) == (10, 3, None)


def test_rdp_plan():
    plan = make_plan(spec_with(accountant__name="rdp", claim__epsilon=1.3))
    assert plan.epsilon(3515) == pytest.approx(1.28114, abs=1e-5)
    assert plan.epsilon(2000) <= plan.epsilon_bound(2000) <= plan.epsilon(2200)


def test_seed_is_for_tests_only():
    with pytest.raises(PlanError, match=r"no seed with mechanism\.rng: csprng.*Received: seed=3"):
        make_plan(spec_with(), seed=3)
    assert make_plan(spec_with(mechanism__rng="prng"), seed=3).seed == 3
    for seed in (-1, True, 1.0):
        with pytest.raises(PlanError, match="seed to be an integer"):
            make_plan(spec_with(mechanism__rng="prng"), seed=seed)


def test_what_is_not_a_spec():
    with pytest.raises(PlanError, match=r"Expected a PrivacySpec\. Received: dict"):
        make_plan(BASE)


def test_dictionary_is_plain_json(plan):
    data = json.loads(json.dumps(plan.to_dict(), allow_nan=False))
    assert data == plan.to_dict()
    assert accounting.event_from_dict(data["step_event"]) == plan.step_event
    assert PrivacySpec.from_dict(data["spec"]) == plan.spec
    assert data["digest"] == plan.digest
    assert data["noise_stddev"] == plan.noise_stddev
    fields = {field.name for field in dataclasses.fields(Plan) if not field.name.startswith("_")}
    # Left out where there is none: the digest of such a plan is what it has always been.
    assert set(data) == fields - {"adaptive_clipping"} | {"noise_stddev", "digest"}


def test_dictionary_of_a_clip_norm_that_moves(plan_of):
    moving = plan_of(clip="{quantile: 0.5, initial: 2.0, count_noise: 2.0}", noise=1.5)
    data = json.loads(json.dumps(moving.to_dict(), allow_nan=False))
    fields = {field.name for field in dataclasses.fields(Plan) if not field.name.startswith("_")}
    assert set(data) == fields | {"noise_stddev", "digest"}
    assert accounting.AdaptiveClipping.from_dict(data["adaptive_clipping"]) == moving.adaptive_clipping
    assert data["noise_stddev"] == pytest.approx(2.0 / (1 / 1.5**2 - 1 / 4**2) ** 0.5)
    others = ("{quantile: 0.4, initial: 2.0, count_noise: 2.0}", "{quantile: 0.5, initial: 2.0, count_noise: 2.1}")
    assert len({moving.digest, *(plan_of(clip=clip, noise=1.5).digest for clip in others)}) == 3


def test_same_spec_same_digest(plan):
    again = make_plan(spec_with())
    assert (again.digest, again) == (plan.digest, plan)
    assert len(plan.digest) == 64
    int(plan.digest, 16)


# Every field but the event and the sampler, which can only change together, and the spec, which has its own digest.
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", 3516),
        ("steps_per_epoch", 235),
        ("epochs", 15),
        ("clip_norm", 0.6),
        ("adjacency", "zero_out"),
        ("accountant", "prv"),
        ("target_epsilon", 1.3),
        ("delta", 2e-5),
        ("microbatch_size", 8),
        ("rng", "prng"),
        ("seed", 7),
    ],
)
def test_digest_covers(plan, name, value):
    changed = copy.deepcopy(plan)
    vars(changed).pop("digest", None)
    object.__setattr__(changed, name, value)
    assert changed.digest != plan.digest


def test_digest_covers_the_mechanism_and_the_spec(plan):
    digests = {
        plan.digest,
        make_plan(spec_with(mechanism__noise_multiplier=1.2)).digest,
        make_plan(spec_with(sampling__expected_batch_size=255)).digest,
        make_plan(spec_with(data__num_units=60001)).digest,
        make_plan(spec_with(claim__privacy_unit={"kind": "example", "description": "one page"})).digest,
    }
    assert len(digests) == 5


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("noise_multiplier", 0.9),
        ("sampling_probability", 0.01),
        ("scheme", "full_batch"),
        ("num_units", 50000),
        ("expected_batch_size", 128.0),
        ("truncated_batch_size", 300),
        ("step_event", dp_event.GaussianDpEvent(1.1)),
        ("spec_digest", "0" * 64),
        ("steps", 10_000),
        ("clip_norm", 5.0),
        ("delta", 0.1),
        ("target_epsilon", 50.0),
        ("adjacency", "zero_out"),
        ("accountant", "rdp"),
        ("rng", "prng"),
        ("seed", 3),
    ],
)
def test_a_plan_that_was_tampered_with_is_refused(plan, name, value):
    with pytest.raises(PlanError):
        dataclasses.replace(plan, **{name: value})


def test_a_plan_can_be_copied_and_hashed(plan):
    assert copy.deepcopy(plan) == plan
    assert hash(plan) == hash(make_plan(spec_with()))
