"""Calibration never spends more than the target, and hardly less."""

from __future__ import annotations

import math
import time

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdp import accounting
from tfdp.accounting import calibration
from tfdp.errors import AccountingError

RELATIONS = {
    "add_or_remove_one": dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
    "replace_one": dp_accounting.NeighboringRelation.REPLACE_ONE,
    "zero_out": dp_accounting.NeighboringRelation.REPLACE_SPECIAL,
}
RUN = {
    "target_epsilon": 3.0,
    "delta": 1e-6,
    "steps": 2000,
    "scheme": "poisson",
    "sampling_probability": 1024 / 200_000,
    "num_units": 200_000,
    "adjacency": "add_or_remove_one",
}


def calibrate(**changes):
    return accounting.calibrate_noise_multiplier(**{**RUN, **changes})


def independent_epsilon(found):
    """Epsilon of what was found, by the library alone."""
    relation = RELATIONS[found.adjacency]
    if found.accountant == "rdp":
        accountant = RdpAccountant(neighboring_relation=relation)
    else:
        accountant = PLDAccountant(relation, value_discretization_interval=found.grid)
    return accountant.compose(found.event, found.steps).get_epsilon(found.delta)


def check(found, slack=5e-3):
    assert found.epsilon <= found.target_epsilon
    assert found.epsilon >= found.target_epsilon * (1 - slack)
    assert independent_epsilon(found) <= found.epsilon * (1 + 1e-9)
    assert found.noise_multiplier == float(f"{found.noise_multiplier:.6g}")


def test_ordinary_run_in_seconds():
    accounting.epsilon(accounting.step_event(**_sampler(RUN), noise_multiplier=1.0), 1, delta=0.1, adjacency="zero_out")
    start = time.process_time()
    found = calibrate()
    assert time.process_time() - start < 5.0
    check(found, slack=1e-3)
    # sigma 0.76 costs 2.99941 (reference table): the answer lies within 0.03% of it.
    assert found.noise_multiplier == pytest.approx(0.76, rel=3e-4)
    assert found.grid == 1e-4
    assert found.event == accounting.step_event(**_sampler(RUN), noise_multiplier=found.noise_multiplier)


def _sampler(run):
    return {name: run[name] for name in ("scheme", "sampling_probability", "num_units")}


@settings(derandomize=True, max_examples=20, deadline=None, database=None)
@given(
    target=st.floats(0.05, 20.0),
    log_delta=st.floats(-8, -4),
    steps=st.integers(1, 3000),
    probability=st.one_of(st.floats(1e-3, 0.2), st.just(1.0)),
    adjacency=st.sampled_from(sorted(RELATIONS)),
    accountant=st.sampled_from(["pld", "rdp"]),
)
def test_never_overshoots_and_is_tight(target, log_delta, steps, probability, adjacency, accountant):
    found = calibrate(
        target_epsilon=target,
        delta=10**log_delta,
        steps=steps,
        sampling_probability=probability,
        adjacency=adjacency,
        accountant="pld" if adjacency == "replace_one" else accountant,
    )
    check(found)


@pytest.mark.parametrize(
    "changes",
    [
        {"target_epsilon": 0.01},
        {"target_epsilon": 50.0},
        {"target_epsilon": 0.01, "sampling_probability": 1.0, "steps": 1, "adjacency": "replace_one"},
        {"target_epsilon": 50.0, "sampling_probability": 1.0, "steps": 1},
        {"steps": 1},
        {"steps": 100_000},
        {"accountant": "rdp", "target_epsilon": 0.05},
        {"accountant": "prv"},
        {"scheme": "truncated_poisson", "truncated_batch_size": 1100},
        {"records_per_unit": 4, "steps": 200},
        {"scheme": "full_batch", "sampling_probability": 1.0, "records_per_unit": 4, "steps": 10},
    ],
    ids=str,
)
def test_extremes(changes):
    check(calibrate(**changes))


def test_caller_may_choose_the_grid():
    found = calibrate(grid=1e-2)
    assert found.grid == 1e-2
    check(found)
    assert found.noise_multiplier > 1.005 * 0.76  # a coarse certificate costs noise


@pytest.mark.parametrize("bias", [0.5, 0.9, 0.9999, 1.0, 1.0001, 1.2, 4.0])
def test_a_wrong_start_is_corrected(bias):
    # epsilon = 2 / sigma: the smallest sigma within a target of 4 is 0.5.
    sigma, value, _ = calibration._certified(lambda s: 2 / s, 0.5 * bias, 4.0, slope=-1.0)
    assert value == 2 / sigma
    assert 0.5 <= sigma <= 0.5 * 1.0011


@pytest.mark.parametrize("slope", [-0.3, -1.0, -20.0])
def test_a_staircase_ends_on_the_side_that_keeps_the_target(slope):
    # 10% steps, as a coarse grid may give: no sigma comes within 0.1% of the target of 1.
    def staircase(sigma):
        return 0.97 * 1.1 ** math.ceil(-math.log(sigma / 0.7) / math.log(1.1) + 0.5)

    sigma, value, _ = calibration._certified(staircase, 0.69, 1.0, slope)
    assert value <= 1.0
    assert staircase(sigma * 0.99) > 1.0


def test_unbounded_and_zero_certificates_are_walked_away_from():
    def cliff(sigma):
        return math.inf if sigma < 3 else (0.0 if sigma > 3.5 else 4 - sigma)

    for start in (0.5, 10.0):
        sigma, value, _ = calibration._certified(cliff, start, 0.9, slope=-1.0)
        assert value <= 0.9
        assert 3.09 < sigma < 3.12


def test_no_certificate_is_an_error():
    with pytest.raises(AccountingError, match="certifies epsilon 1"):
        calibration._certified(lambda sigma: 2.0, 1.0, 1.0, slope=-1.0)


@pytest.mark.parametrize("sigma", [0.7600000001, 0.76, 123456.7, 1e-3, 9.999999])
def test_rounding_is_upwards(sigma):
    rounded = calibration._round_up(sigma)
    assert sigma <= rounded <= sigma * (1 + 1e-5)
    assert float(f"{rounded:.6g}") == rounded


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_epsilon": 0.0}, r"target epsilon above 0\. Received: target_epsilon=0\.0"),
        ({"target_epsilon": math.inf}, "target_epsilon=inf"),
        ({"target_epsilon": math.nan}, "target_epsilon=nan"),
        ({"steps": 0}, "steps=0"),
        ({"delta": 1e-15}, r"delta of at least 4\.4e-12 for 2000 steps"),
        ({"delta": 1.0}, "delta above 0 and below 1"),
        ({"accountant": "rdp", "target_epsilon": 1e-3}, "Raise the target or delta"),
        ({"delta": 0.01, "sampling_probability": 1e-6, "steps": 10}, "chance below delta"),
        ({"accountant": "rdp", "adjacency": "replace_one"}, "twice the clip norm"),
        ({"records_per_unit": 2, "adjacency": "replace_one"}, "does not model"),
    ],
    ids=str,
)
def test_what_cannot_be_is_said(changes, message):
    with pytest.raises(AccountingError, match=message):
        calibrate(**changes)
