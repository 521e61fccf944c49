"""Several runs together, against dp-accounting's own composition and closed forms."""

from __future__ import annotations

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import pld_privacy_accountant
from dp_accounting.rdp import rdp_privacy_accountant
from scipy import optimize, stats

from tfdp.accounting import composed_epsilon, epsilon, selected_epsilon, step_event
from tfdp.errors import AccountingError

ADD = "add_or_remove_one"


def poisson(probability=0.05, sigma=1.0):
    return step_event(scheme="poisson", sampling_probability=probability, noise_multiplier=sigma, num_units=1000)


def gaussian(sigma):
    return step_event(scheme="full_batch", sampling_probability=1.0, noise_multiplier=sigma, num_units=1000)


def gaussian_epsilon(sigma, delta):
    """Balle and Wang 2018: the exact curve of one Gaussian mechanism of sensitivity 1."""

    def excess(value):
        left = stats.norm.cdf(0.5 / sigma - value * sigma)
        return left - np.exp(value) * stats.norm.cdf(-0.5 / sigma - value * sigma) - delta

    return optimize.brentq(excess, 0, 100)


def test_gaussians_add_up_in_closed_form():
    runs = [(gaussian(2.0), 3), (gaussian(5.0), 10), (gaussian(1.5), 1)]
    together = 1 / math.sqrt(3 / 4 + 10 / 25 + 1 / 2.25)
    found, accountant = composed_epsilon(runs, delta=1e-5, adjacency=ADD)
    assert accountant == "pld"
    exact = gaussian_epsilon(together, 1e-5)
    assert exact <= found <= exact + 2e-3


def test_different_mechanisms_against_dp_accounting():
    runs = [(poisson(), 40), (poisson(0.2, 2.0), 15), (gaussian(4.0), 2)]
    reference = pld_privacy_accountant.PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    reference.compose(dp_event.ComposedDpEvent([dp_event.SelfComposedDpEvent(event, count) for event, count in runs]))
    found, _ = composed_epsilon(runs, delta=1e-5, adjacency=ADD)
    assert found == pytest.approx(reference.get_epsilon(1e-5), rel=2e-3)
    alone = [epsilon(event, count, delta=1e-5, adjacency=ADD) for event, count in runs]
    assert max(alone) < found < sum(alone)


def test_the_same_event_in_two_runs_is_one_longer_run():
    event = poisson()
    found, _ = composed_epsilon([(event, 30), (event, 70)], delta=1e-5, adjacency=ADD)
    assert found == pytest.approx(epsilon(event, 100, delta=1e-5, adjacency=ADD), rel=1e-9)


def test_the_order_does_not_matter():
    runs = [(poisson(), 40), (gaussian(4.0), 2), (poisson(0.2, 2.0), 15)]
    found = {composed_epsilon(each, delta=1e-5, adjacency=ADD)[0] for each in (runs, runs[::-1])}
    assert max(found) == pytest.approx(min(found), rel=1e-9)


def test_nothing_costs_nothing_and_no_noise_costs_everything():
    assert composed_epsilon([], delta=1e-5, adjacency=ADD)[0] == 0.0
    assert composed_epsilon([(poisson(), 0)], delta=1e-5, adjacency=ADD)[0] == 0.0
    assert composed_epsilon([(poisson(), 1), (poisson(sigma=0.0), 1)], delta=1e-5, adjacency=ADD)[0] == math.inf


def test_what_only_rdp_models_takes_rdp_for_all(monkeypatch):
    from tfdp.accounting import composition

    runs = [(poisson(), 40), (poisson(0.2, 2.0), 15)]
    monkeypatch.setattr(composition, "supports", lambda event, accountant, adjacency: accountant == "rdp")
    found, accountant = composed_epsilon(runs, delta=1e-5, adjacency=ADD)
    reference = rdp_privacy_accountant.RdpAccountant()
    for event, count in runs:
        reference.compose(event, count)
    assert accountant == "rdp"
    assert found == pytest.approx(reference.get_epsilon(1e-5), rel=1e-6)


def test_refusals():
    mixture = step_event(
        scheme="poisson", sampling_probability=0.05, noise_multiplier=1.0, num_units=1000, records_per_unit=2
    )
    with pytest.raises(AccountingError, match="one accountant models under replace_one"):
        composed_epsilon([(mixture, 3)], delta=1e-5, adjacency="replace_one")
    with pytest.raises(AccountingError, match="rounding error"):
        composed_epsilon([(poisson(), 100), (gaussian(1.0), 10)], delta=1e-14, adjacency=ADD)
    with pytest.raises(AccountingError, match="delta"):
        composed_epsilon([(poisson(), 1)], delta=0.0, adjacency=ADD)


class TestSelection:
    def test_against_the_theorem(self):
        """Papernot and Steinke 2022, theorem 2, for the geometric distribution and Gaussian runs, minimised by hand."""
        sigma, steps, mean, delta = 8.0, 4, 10.0, 1e-5
        rho = steps / (2 * sigma**2)  # the divergence of order a is a * rho
        gamma = 1 / mean  # geometric: the chance to stop
        orders = np.array([1 + x / 10 for x in range(1, 100)] + list(range(11, 64)) + [128, 256, 512, 1024])
        best = math.inf
        for order in orders:
            # epsilon'(a) = eps(a) + (1 + shape)(1 - 1/b) eps(b) + (1 + shape) log(1/gamma)/b + log(mean)/(a - 1)
            tail = min((1 - 1 / b) * b * rho + math.log(1 / gamma) / b for b in orders)
            renyi = order * rho + 2 * tail + math.log(mean) / (order - 1)
            best = min(best, renyi + math.log1p(-1 / order) - math.log(delta * order) / (order - 1))
        found = selected_epsilon(gaussian(sigma), steps, delta=delta, adjacency=ADD, mean=mean, shape=1.0)
        assert found == pytest.approx(best, rel=0.02)

    def test_costs_more_than_one_run_and_less_than_many(self):
        one = epsilon(poisson(), 50, delta=1e-5, adjacency=ADD)
        found = selected_epsilon(poisson(), 50, delta=1e-5, adjacency=ADD, mean=30, shape=1.0)
        many, _ = composed_epsilon([(poisson(), 50 * 30)], delta=1e-5, adjacency=ADD)
        assert one < found < many
        fewer = selected_epsilon(poisson(), 50, delta=1e-5, adjacency=ADD, mean=3, shape=1.0)
        assert one < fewer < found

    def test_refusals(self):
        with pytest.raises(AccountingError, match="mean"):
            selected_epsilon(poisson(), 5, delta=1e-5, adjacency=ADD, mean=1.0, shape=1.0)
        with pytest.raises(AccountingError, match="shape"):
            selected_epsilon(poisson(), 5, delta=1e-5, adjacency=ADD, mean=2.0, shape=-0.5)
        with pytest.raises(AccountingError, match="replace_one"):
            selected_epsilon(poisson(), 5, delta=1e-5, adjacency="replace_one", mean=2.0, shape=1.0)
        assert selected_epsilon(poisson(sigma=0.0), 5, delta=1e-5, adjacency=ADD, mean=2.0, shape=1.0) == math.inf
