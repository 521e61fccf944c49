"""Epsilon and delta against reference tables, closed forms and dp-accounting used directly."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import math
import time

import dp_accounting
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from scipy import stats
from scipy.special import log_ndtr

from tfdp import accounting
from tfdp.accounting import accountants
from tfdp.errors import AccountingError

RELATIONS = {
    "add_or_remove_one": dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
    "replace_one": dp_accounting.NeighboringRelation.REPLACE_ONE,
    "zero_out": dp_accounting.NeighboringRelation.REPLACE_SPECIAL,
}
MIXTURE = dp_event.MixtureOfGaussiansDpEvent(1.0, (0.0, 1.0, 2.0), (0.81, 0.18, 0.01))
TRUNCATED = dp_event.TruncatedSubsampledGaussianDpEvent(1000, 0.1, 120, 1.0)


def poisson(q: float, sigma: float) -> dp_event.DpEvent:
    return dp_event.PoissonSampledDpEvent(q, dp_event.GaussianDpEvent(sigma))


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Balle & Wang (2018), theorem 8: delta of the Gaussian mechanism with sensitivity / sigma = mu."""
    return stats.norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu))


def sampled_gaussian_delta(q: float, sigma: float, epsilon: float) -> float:
    """One Poisson-sampled step, by integrating the hockey stick over the half line where it is positive."""
    # Removing: (1-q) N(0) + q N(1) against N(0), positive above the point where the ratio is exp(epsilon).
    cut = sigma**2 * math.log((math.expm1(epsilon) + q) / q) + 0.5
    tail = stats.norm.sf(cut / sigma)
    removing = (1 - q) * tail + q * stats.norm.sf((cut - 1) / sigma) - math.exp(epsilon) * tail
    # Adding: N(0) against the mixture, positive below the point where 1 / ratio is exp(epsilon), if there is one.
    adding = 0.0
    if math.exp(-epsilon) > 1 - q:
        cut = sigma**2 * math.log((math.expm1(-epsilon) + q) / q) + 0.5
        head = stats.norm.cdf(cut / sigma)
        adding = head - math.exp(epsilon) * ((1 - q) * head + q * stats.norm.cdf((cut - 1) / sigma))
    return max(removing, adding)


@functools.cache
def _reference(path):
    return json.loads(path.read_text())["cases"]


def _reference_event(case):
    total = case.get("num_units") or case["num_records"]
    return accounting.step_event(
        scheme="truncated_poisson" if case["kind"] == "truncated_poisson" else "poisson",
        sampling_probability=case["expected_batch_size"] / total,
        noise_multiplier=case["noise_multiplier"],
        num_units=total,
        truncated_batch_size=case.get("truncated_batch_size"),
        records_per_unit=case.get("records_per_unit", 1),
    )


@pytest.mark.parametrize(
    ("kind", "accountant", "adjacency", "count"),
    [
        ("poisson", "pld", "add_or_remove_one", 5),
        ("poisson", "pld", "replace_one", 5),
        ("poisson", "pld", "zero_out", 5),
        ("poisson", "rdp", "add_or_remove_one", 5),
        ("poisson", "rdp", "zero_out", 5),
        ("group_privacy", "pld", "add_or_remove_one", 3),
        ("truncated_poisson", "pld", "add_or_remove_one", 2),
        ("truncated_poisson", "pld", "zero_out", 2),
    ],
)
def test_reference_table(shared, kind, accountant, adjacency, count):
    cases = [
        case
        for case in _reference(shared / "reference" / "accounting.json")
        if (case["kind"], case["accountant"], case["adjacency"]) == (kind, accountant, adjacency)
    ]
    assert len(cases) == count  # 32 in all
    for case in cases:
        event = _reference_event(case)
        assert accounting.supports(event, accountant, adjacency) is case["supported"]
        value = accounting.epsilon(
            event, case["steps"], delta=case["delta"], accountant=accountant, adjacency=adjacency, grid=case["grid"]
        )
        assert value == pytest.approx(case["epsilon"], rel=1e-6), case
        # The grid that is used when nobody names one is the grid of the table, or a coarser one that still agrees.
        grid = accounting.default_grid(event, case["steps"], adjacency)
        if accountant == "pld" and grid != case["grid"]:
            value = accounting.epsilon(event, case["steps"], delta=case["delta"], adjacency=adjacency)
            assert value == pytest.approx(case["epsilon"], rel=1e-4), case


@pytest.mark.parametrize(
    ("expected", "options"),
    [
        (1.1337, {}),
        (1.1337, {"accountant": "prv"}),
        (1.2811, {"accountant": "rdp"}),
        (1.9284, {"adjacency": "replace_one"}),
    ],
)
def test_published_vector(expected, options):
    options = {"adjacency": "add_or_remove_one", **options}
    value = accounting.epsilon(poisson(256 / 60000, 1.1), 3515, delta=1e-5, **options)
    assert value == pytest.approx(expected, abs=6e-5)


def test_published_vector_without_amplification_and_for_a_group():
    run = {"sampling_probability": 256 / 60000, "noise_multiplier": 1.1}
    unamplified = accounting.unamplified_epsilon(**run, steps=3515, delta=1e-5, adjacency="add_or_remove_one")
    assert unamplified == pytest.approx(20.56, abs=6e-3)
    event = accounting.step_event(scheme="poisson", num_units=60000, records_per_unit=5, **run)
    assert accounting.epsilon(event, 3515, delta=1e-5, adjacency="add_or_remove_one") == pytest.approx(7.048, abs=6e-4)


@pytest.mark.parametrize(
    ("sigma", "steps", "delta", "adjacency", "sensitivity"),
    [
        (8.0, 50, 1e-4, "add_or_remove_one", 1),
        (8.0, 50, 1e-4, "replace_one", 2),
        (1.0, 1, 1e-6, "zero_out", 1),
        (300.0, 1, 1e-5, "replace_one", 2),
        (0.2, 4, 1e-9, "add_or_remove_one", 1),
    ],
)
def test_full_batch_is_the_gaussian_mechanism(sigma, steps, delta, adjacency, sensitivity):
    event = accounting.step_event(scheme="full_batch", sampling_probability=1.0, noise_multiplier=sigma, num_units=1000)
    epsilon = accounting.epsilon(event, steps, delta=delta, adjacency=adjacency)
    true_delta = gaussian_delta(sensitivity * math.sqrt(steps) / sigma, epsilon)
    assert true_delta <= delta  # a bound
    assert true_delta >= 0.995 * delta  # and a tight one
    at_epsilon = accounting.delta(event, steps, epsilon=epsilon, adjacency=adjacency)
    assert true_delta <= at_epsilon <= delta * 1.001


@pytest.mark.parametrize("q", [1e-6, 1e-3, 0.05, 0.7])
@pytest.mark.parametrize("sigma", [0.6, 1.5])
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_one_sampled_step_by_integration(q, sigma, accountant):
    epsilon = accounting.epsilon(poisson(q, sigma), 1, delta=1e-7, accountant=accountant, adjacency="add_or_remove_one")
    true_delta = sampled_gaussian_delta(q, sigma, epsilon)
    assert true_delta <= 1e-7
    if accountant == "pld" and q > 1e-6:  # where epsilon itself is below a cell of the grid
        assert true_delta >= 0.98e-7


def test_rounding_error_of_the_composition_is_charged():
    # 100,000 steps that together are one Gaussian with mu = 1.054: dp-accounting alone ends up below the true epsilon.
    steps, delta, event = 100_000, 2.3e-10, poisson(1.0, 300.0)
    mu = math.sqrt(steps) / 300.0
    options = {"adjacency": "add_or_remove_one", "grid": 1e-5}
    naive = PLDAccountant(value_discretization_interval=1e-5).compose(event, steps).get_epsilon(delta)
    assert gaussian_delta(mu, naive) > 1.005 * delta
    assert gaussian_delta(mu, accounting.epsilon(event, steps, delta=delta, **options)) <= delta
    naive_delta = PLDAccountant(value_discretization_interval=1e-5).compose(event, steps).get_delta(6.9)
    assert naive_delta < gaussian_delta(mu, 6.9) < accounting.delta(event, steps, epsilon=6.9, **options)


def test_delta_below_what_double_precision_certifies_is_refused():
    with pytest.raises(AccountingError, match=r"delta of at least 2\.2e-10 for 100000 steps.*Received: delta=1e-10"):
        accounting.epsilon(poisson(0.01, 1.0), 100_000, delta=1e-10, adjacency="add_or_remove_one")


def test_negative_renyi_divergences_prove_nothing():
    event = poisson(1e-10, 200.0)
    logging.disable()
    try:
        library = RdpAccountant().compose(event, 100_000).get_epsilon(1e-12)
    finally:
        logging.disable(logging.NOTSET)
    assert library == 0.0  # rounding error, taken for proof
    value = accounting.epsilon(event, 100_000, delta=1e-12, accountant="rdp", adjacency="add_or_remove_one")
    assert value == pytest.approx(0.01926, rel=1e-3)


def test_orders_that_do_not_converge_are_left_out_quietly(caplog):
    accounting.epsilon(poisson(0.0695, 0.8), 1, delta=1e-5, accountant="rdp", adjacency="zero_out")
    assert caplog.records == []
    assert logging.getLogger("absl").filters == []


@pytest.mark.parametrize("adjacency", RELATIONS)
@pytest.mark.parametrize("event", [poisson(0.02, 1.0), TRUNCATED])
def test_agrees_with_the_accountant_of_the_library(event, adjacency):
    composed = dp_event.SelfComposedDpEvent(event, 30)
    library = PLDAccountant(RELATIONS[adjacency], value_discretization_interval=1e-3).compose(composed)
    value = accounting.epsilon(event, 30, delta=1e-5, adjacency=adjacency, grid=1e-3)
    assert value == pytest.approx(library.get_epsilon(1e-5), rel=1e-7)


def test_epsilon_is_that_of_composing_steps_one_by_one():
    one_by_one = PLDAccountant(value_discretization_interval=1e-2)
    for _ in range(3):
        one_by_one.compose(MIXTURE)
    value = accounting.epsilon(MIXTURE, 3, delta=1e-5, adjacency="add_or_remove_one", grid=1e-2)
    assert value == pytest.approx(one_by_one.get_epsilon(1e-5), rel=1e-7)


def test_replacing_a_unit_doubles_the_sensitivity_of_a_full_batch():
    twice = accounting.epsilon(dp_event.GaussianDpEvent(4.0), 10, delta=1e-5, adjacency="replace_one")
    half = accounting.epsilon(dp_event.GaussianDpEvent(2.0), 10, delta=1e-5, adjacency="add_or_remove_one")
    assert twice == pytest.approx(half, rel=1e-6)
    assert twice > 2 * accounting.epsilon(dp_event.GaussianDpEvent(4.0), 10, delta=1e-5, adjacency="zero_out")


def test_rdp_with_replace_one_is_refused_although_the_library_would_answer():
    event = dp_event.GaussianDpEvent(2.0)
    assert RdpAccountant(neighboring_relation=RELATIONS["replace_one"]).supports(event)
    assert not accounting.supports(event, "rdp", "replace_one")
    assert "twice the clip norm" in accounting.unsupported_reason(event, "rdp", "replace_one")
    with pytest.raises(
        AccountingError, match=r"Received: accountant='rdp', adjacency='replace_one'.*use accountant pld"
    ):
        accounting.epsilon(event, 10, delta=1e-5, accountant="rdp", adjacency="replace_one")
    with pytest.raises(AccountingError, match="twice the clip norm"):
        accounting.delta(event, 10, epsilon=1.0, accountant="rdp", adjacency="replace_one")


@pytest.mark.parametrize("event", [dp_event.GaussianDpEvent(1.0), poisson(0.1, 1.0), MIXTURE, TRUNCATED])
@pytest.mark.parametrize("adjacency", RELATIONS)
def test_otherwise_the_library_decides_what_is_supported(event, adjacency):
    assert accounting.supports(event, "pld", adjacency) is PLDAccountant(RELATIONS[adjacency]).supports(event)
    assert accounting.supports(event, "prv", adjacency) is accounting.supports(event, "pld", adjacency)
    if adjacency != "replace_one":
        expected = RdpAccountant(neighboring_relation=RELATIONS[adjacency]).supports(event)
        assert accounting.supports(event, "rdp", adjacency) is expected


def test_group_privacy_under_replace_one_is_refused_with_a_remedy():
    reason = accounting.unsupported_reason(MIXTURE, "pld", "replace_one")
    assert "group privacy for several records of a unit under replace_one; use adjacency add_or_remove_one" in reason
    with pytest.raises(AccountingError, match="use accountant pld"):
        accounting.epsilon(TRUNCATED, 1, delta=1e-5, accountant="rdp", adjacency="zero_out")


def test_prv_says_that_pld_answers():
    options = {"delta": 1e-5, "adjacency": "add_or_remove_one"}
    event = poisson(0.01, 1.0)
    assert accounting.epsilon(event, 9, accountant="prv", **options) == accounting.epsilon(event, 9, **options)
    assert "answered by pld" in accounting.describe_accountant("prv")


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_more_steps_more_sampling_and_less_noise_cost_more(accountant):
    def cost(q=0.01, sigma=1.0, steps=100):
        return accounting.epsilon(
            poisson(q, sigma), steps, delta=1e-6, accountant=accountant, adjacency="add_or_remove_one"
        )

    by_steps = [cost(steps=steps) for steps in (0, 1, 2, 10, 100, 1000)]
    by_sigma = [cost(sigma=sigma) for sigma in (4.0, 1.5, 1.0, 0.7, 0.4)]
    by_probability = [cost(q=q) for q in (1e-4, 1e-3, 0.01, 0.1, 1.0)]
    for values in (by_steps, by_sigma, by_probability):
        assert all(earlier < later for earlier, later in itertools.pairwise(values)), values


def test_coarser_grids_only_ever_claim_less():
    values = [
        accounting.epsilon(poisson(0.005, 0.9), 500, delta=1e-6, adjacency="add_or_remove_one", grid=grid)
        for grid in (1e-2, 1e-3, 1e-4)
    ]
    assert values[0] > values[1] > values[2]


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_nothing_costs_nothing_and_no_noise_is_unbounded(accountant):
    options = {"accountant": accountant, "adjacency": "add_or_remove_one"}
    assert accounting.epsilon(poisson(0.1, 1.0), 0, delta=1e-5, **options) == 0.0
    assert accounting.delta(poisson(0.1, 1.0), 0, epsilon=1.0, **options) == 0.0
    for event in (poisson(0.1, 0.0), dp_event.GaussianDpEvent(0.0)):
        assert accounting.epsilon(event, 0, delta=1e-5, **options) == 0.0
        assert accounting.epsilon(event, 1, delta=1e-5, **options) == math.inf
        assert accounting.delta(event, 1, epsilon=50.0, **options) == 1.0
    assert accounting.epsilon_curve(poisson(0.1, 0.0), [0, 2], delta=1e-5, **options) == [0.0, math.inf]


@pytest.mark.parametrize(
    ("event", "accountant"),
    [(poisson(0.01, 0.9), "pld"), (poisson(0.01, 0.9), "rdp"), (dp_event.GaussianDpEvent(9.0), "pld")],
)
def test_curve_is_epsilon_at_each_point(event, accountant):
    options = {"delta": 1e-5, "accountant": accountant, "adjacency": "add_or_remove_one", "grid": 1e-3}
    steps = [0, 200, 1, 50]
    expected = [accounting.epsilon(event, count, **options) for count in steps]
    assert accounting.epsilon_curve(event, steps, **options) == expected
    assert accounting.epsilon_curve(event, [], **options) == []


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_delta_inverts_epsilon(accountant):
    options = {"accountant": accountant, "adjacency": "add_or_remove_one"}
    epsilon = accounting.epsilon(poisson(0.01, 0.9), 300, delta=1e-6, **options)
    assert accounting.delta(poisson(0.01, 0.9), 300, epsilon=epsilon, **options) == pytest.approx(1e-6, rel=1e-3)


@pytest.mark.parametrize("steps", [-1, 1.5, True, "3"])
def test_steps_are_whole(steps):
    with pytest.raises(AccountingError, match=r"steps to be an integer of at least 0\. Received: steps="):
        accounting.epsilon(poisson(0.1, 1.0), steps, delta=1e-5, adjacency="zero_out")


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, math.nan])
def test_delta_lies_between_zero_and_one(delta):
    with pytest.raises(AccountingError, match="Expected delta above 0 and below 1"):
        accounting.epsilon(poisson(0.1, 1.0), 1, delta=delta, adjacency="zero_out")


def test_names_are_checked():
    with pytest.raises(
        AccountingError, match=r"accountant to be one of pld, rdp, prv\. Received: accountant='moments'"
    ):
        accounting.epsilon(poisson(0.1, 1.0), 1, delta=1e-5, accountant="moments", adjacency="zero_out")
    with pytest.raises(AccountingError, match=r"Received: adjacency='substitute'"):
        accounting.supports(poisson(0.1, 1.0), "pld", "substitute")
    with pytest.raises(AccountingError, match="epsilon of at least 0"):
        accounting.delta(poisson(0.1, 1.0), 1, epsilon=math.inf, adjacency="zero_out")
    with pytest.raises(AccountingError, match="grid above 0"):
        accounting.epsilon(poisson(0.1, 1.0), 1, delta=1e-5, adjacency="zero_out", grid=0.0)


def test_events_of_other_kinds_are_refused():
    with pytest.raises(AccountingError, match="made by step_event"):
        accounting.epsilon(dp_event.LaplaceDpEvent(1.0), 1, delta=1e-5, adjacency="add_or_remove_one")


@pytest.mark.parametrize(
    ("event", "steps", "grid"),
    [
        (poisson(1024 / 200000, 0.76), 2000, 1e-4),  # an ordinary run
        (poisson(1024 / 200000, 70.0), 2000, 1e-6),  # a step loses less than a cell of the usual grid
        (poisson(1024 / 200000, 0.1), 2000, 2e-3),  # losses up to 145 nats
        (dp_event.GaussianDpEvent(0.01), 1, 0.02),
        (MIXTURE, 100, 1e-3),
        (TRUNCATED, 100, 1e-3),
    ],
)
def test_default_grid(event, steps, grid):
    assert accounting.default_grid(event, steps, "add_or_remove_one") == grid


@pytest.mark.parametrize("sigma", [5e-324, 1e-160, 1e7, 7594019468156.0, 1e100])
@pytest.mark.parametrize(
    ("scheme", "records", "accountant"),
    [("poisson", 1, "pld"), ("poisson", 2, "pld"), ("truncated_poisson", 1, "pld"), ("poisson", 1, "rdp")],
)
@pytest.mark.parametrize("steps", [450, 9_230_389])
def test_extreme_noise(scheme, records, accountant, sigma, steps):
    """Found by fuzzing: the library bisected and recursed without an end, and warned of overflows (errors here)."""
    event = accounting.step_event(
        scheme=scheme,
        sampling_probability=0.004,
        noise_multiplier=sigma,
        num_units=250_000,
        truncated_batch_size=1200 if scheme == "truncated_poisson" else None,
        records_per_unit=records,
    )
    value = accounting.epsilon(event, steps, delta=5e-7, accountant=accountant, adjacency="add_or_remove_one")
    # With hardly any noise a unit that joins is seen, and it joins with a chance far above delta.
    assert value == math.inf if sigma < 1 else 0 <= value < 0.02


def test_more_noise_than_is_counted_costs_no_more():
    """All of them cost what the largest noise that is counted does: no less than the truth, and next to nothing."""
    for event in (dp_event.GaussianDpEvent, functools.partial(poisson, 0.01)):
        costs = [
            accounting.epsilon(event(sigma), 100, delta=1e-5, adjacency="zero_out") for sigma in (1e6, 1e7, 1e8, 1e300)
        ]
        assert costs[0] >= costs[1] == costs[2] == costs[3] < 1e-4


@pytest.mark.parametrize(("accountant", "records"), [("pld", 1), ("pld", 4), ("rdp", 1)])
def test_where_noise_begins_to_count(accountant, records):
    """The bound that is not stated any more is past any use: tens of millions, by the closed form of one Gaussian."""
    assert gaussian_delta(1 / 1e-4, 4.9e7) > 0.99
    options = {"scheme": "poisson", "sampling_probability": 0.5, "num_units": 100, "records_per_unit": records}
    setting = {"delta": 1e-5, "accountant": accountant, "adjacency": "add_or_remove_one"}
    assert accounting.epsilon(accounting.step_event(noise_multiplier=0.99e-4, **options), 1, **setting) == math.inf
    assert 40 < accounting.epsilon(accounting.step_event(noise_multiplier=0.1, **options), 1, **setting) < math.inf


@pytest.mark.parametrize(("q", "sigma", "steps"), [(0.004, 1.0, 3_515), (0.01, 3.0, 12_345), (0.5, 20.0, 4_000)])
def test_stages_agree_with_composing_at_once(q, sigma, steps, monkeypatch):
    """Rounding in two stages instead of one: far below what delta is charged for it."""
    setting = {"delta": 1e-5, "adjacency": "add_or_remove_one"}
    at_once = accounting.epsilon(poisson(q, sigma), steps, **setting)
    monkeypatch.setattr(accountants, "_MOST_AT_ONCE", 1000)
    accountants._pld_epsilon.cache_clear()
    assert accounting.epsilon(poisson(q, sigma), steps, **setting) == pytest.approx(at_once, rel=1e-6)
    accountants._pld_epsilon.cache_clear()


def test_a_great_many_steps_take_no_longer():
    """Found by fuzzing: cells ** steps as a whole number of millions of digits took half a minute."""
    before = time.process_time()
    value = accounting.epsilon(poisson(0.004, 0.1), 9_230_389, delta=5e-7, adjacency="add_or_remove_one")
    assert time.process_time() - before < 5
    # Each of about 36,900 takings part costs about 1 / (2 sigma^2) = 50.
    assert 9_230_389 * 0.004 * 40 < value < 9_230_389 * 0.004 * 60


def test_a_great_many_steps_of_a_group_give_no_warning():
    """Found by fuzzing: a quotient of masses overflowed. Warnings are errors here."""
    event = dp_event.MixtureOfGaussiansDpEvent(1.0, (0.0, 1.0, 2.0), (0.99149, 0.00849, 0.00002))
    one = accounting.epsilon(event, 100_000, delta=5e-7, adjacency="add_or_remove_one")
    assert accounting.epsilon(event, 9_230_389, delta=5e-7, adjacency="add_or_remove_one") > one


@pytest.mark.parametrize("error", [RecursionError, TypeError, FloatingPointError, ValueError, MemoryError])
def test_a_failure_inside_the_library_is_a_refusal(error, monkeypatch):
    def fails(*_arguments, **_options):
        raise error("deep inside")

    monkeypatch.setattr(accountants.pld, "from_gaussian_mechanism", fails)
    monkeypatch.setattr(accountants.rdp_privacy_accountant.RdpAccountant, "compose", fails)
    for accountant, other in (("pld", "rdp"), ("rdp", "pld")):
        with pytest.raises(AccountingError, match=f"deep inside.*or accountant {other}"):
            accounting.epsilon(
                poisson(0.0123, 1.2345), 17, delta=1e-5, accountant=accountant, adjacency="add_or_remove_one"
            )
