"""A clip norm that follows a noisy count: both noises together cost what is accounted, and the norm moves as stated."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting import dp_event
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tfdp import accounting
from tfdp.accounting import AdaptiveClipping, adaptive_clipping
from tfdp.errors import AccountingError

RULE = AdaptiveClipping(quantile=0.5, learning_rate=0.2, count_noise=5.0, gradient_noise_multiplier=1.1)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(sigma=st.floats(1e-3, 1e3), over=st.floats(1.001, 1e6), batch=st.floats(0.1, 1e6))
def test_both_noises_together_are_the_noise_that_was_asked_for(sigma, over, batch):
    """1/z_g^2 + 1/(2 sigma_b)^2 = 1/z^2: the squared lengths of one unit's contributions, in units of noise, add up."""
    for count_noise in (sigma / 2 * over, None):
        made = adaptive_clipping(
            noise_multiplier=sigma, quantile=0.5, expected_batch_size=batch, count_noise=count_noise
        )
        lengths = 1 / made.gradient_noise_multiplier**2 + 0.5**2 / made.count_noise**2
        assert lengths == pytest.approx(1 / sigma**2, rel=1e-9)
        assert made.joint_noise_multiplier == pytest.approx(sigma, rel=1e-9)
        assert made.gradient_noise_multiplier > sigma or made.count_noise > 1e6 * sigma


@pytest.mark.parametrize("adjacency", ["add_or_remove_one", "zero_out", "replace_one"])
@pytest.mark.parametrize("count_noise", [0.8, 1.5, 20.0])
def test_the_count_is_paid_for(adjacency, count_noise):
    """Against another way to count: the two releases of every step composed as two mechanisms, without sampling."""
    sigma, steps, delta = 1.5, 4, 1e-5
    made = adaptive_clipping(noise_multiplier=sigma, quantile=0.5, expected_batch_size=10, count_noise=count_noise)
    gradients = dp_event.GaussianDpEvent(made.gradient_noise_multiplier)
    count = dp_event.GaussianDpEvent(made.count_noise / 0.5)  # one unit moves it by a half
    apart, _ = accounting.composed_epsilon([(gradients, steps), (count, steps)], delta=delta, adjacency=adjacency)
    event = accounting.step_event(scheme="full_batch", sampling_probability=1.0, noise_multiplier=sigma, num_units=100)
    together = accounting.epsilon(event, steps, delta=delta, adjacency=adjacency)
    assert apart == pytest.approx(together, rel=2e-3)
    alone = accounting.epsilon(gradients, steps, delta=delta, adjacency=adjacency)
    assert alone < together


@pytest.mark.parametrize("adjacency", ["add_or_remove_one", "zero_out", "replace_one"])
@pytest.mark.parametrize(("sigma", "count_noise"), [(4.0, 2.1), (4.0, 20.0), (1.5, 0.8)])
def test_epsilon_of_full_batches_is_that_of_the_closed_form(adjacency, sigma, count_noise):
    """Balle and Wang 2018 with mu from the noises as they run: neither less noise nor more is accounted than there is.

    One unit moves the sum by 1/z_g and the count by 1/(2 sigma_b) standard deviations, twice that where it is replaced.
    """
    made = adaptive_clipping(noise_multiplier=sigma, quantile=0.5, expected_batch_size=10, count_noise=count_noise)
    steps, delta = 9, 1e-5
    moved = math.hypot(1 / made.gradient_noise_multiplier, 0.5 / made.count_noise) * (1 + (adjacency == "replace_one"))
    mu = moved * math.sqrt(steps)
    event = accounting.step_event(scheme="full_batch", sampling_probability=1.0, noise_multiplier=sigma, num_units=100)
    found = accounting.epsilon(event, steps, delta=delta, adjacency=adjacency)

    def delta_of(epsilon):
        return stats.norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * stats.norm.cdf(-mu / 2 - epsilon / mu)

    assert delta_of(found) <= delta * (1 + 1e-6) < delta_of(found * (1 - 2e-3))


@pytest.mark.parametrize("count_noise", [0.55, 1.0, 8.0])
def test_epsilon_of_one_sampled_step_is_that_of_an_integral_over_sum_and_count(count_noise):
    """The two values that a step releases, one unit in it with probability q, on a grid; both directions."""
    sigma, q, delta = 1.0, 0.2, 1e-3
    made = adaptive_clipping(noise_multiplier=sigma, quantile=0.5, expected_batch_size=10, count_noise=count_noise)
    event = accounting.step_event(scheme="poisson", sampling_probability=q, noise_multiplier=sigma, num_units=100)
    found = accounting.epsilon(event, 1, delta=delta, adjacency="add_or_remove_one")
    axis = np.linspace(-9, 10, 1901)
    total, count = (  # density without the unit and with it, in standard deviations
        (stats.norm.pdf(axis), stats.norm.pdf(axis - moved))
        for moved in (1 / made.gradient_noise_multiplier, 0.5 / made.count_noise)
    )
    without = np.outer(total[0], count[0])
    sampled = (1 - q) * without + q * np.outer(total[1], count[1])

    def delta_of(epsilon):
        ways = ((sampled, without), (without, sampled))
        return max(np.maximum(p - math.exp(epsilon) * r, 0).sum() for p, r in ways) * (axis[1] - axis[0]) ** 2

    assert delta_of(found) <= delta * (1 + 1e-3)
    assert delta_of(found * 0.995) > delta


def test_without_a_count_noise_it_is_a_twentieth_of_the_batch_but_at_least_sigma():
    large = adaptive_clipping(noise_multiplier=1.5, quantile=0.5, expected_batch_size=1000)
    small = adaptive_clipping(noise_multiplier=1.5, quantile=0.5, expected_batch_size=20)
    assert (large.count_noise, small.count_noise) == (50, 1.5)
    assert large.gradient_noise_multiplier == pytest.approx(1.5, rel=2e-4)
    assert small.gradient_noise_multiplier == pytest.approx(1.5 / math.sqrt(0.75))
    assert large.learning_rate == 0.2


@pytest.mark.parametrize("count_noise", [0.75, 0.1, math.nan])
def test_a_count_that_takes_all_is_refused(count_noise):
    with pytest.raises(AccountingError, match=r"count_noise above half the noise multiplier 1\.5"):
        adaptive_clipping(noise_multiplier=1.5, quantile=0.5, expected_batch_size=9, count_noise=count_noise)


class TestFollowing:
    @pytest.mark.parametrize(("fraction", "factor"), [(0.5, 1.0), (1.0, math.exp(-0.1)), (0.0, math.exp(0.1))])
    def test_too_many_below_lower_it_and_too_few_raise_it(self, fraction, factor):
        assert RULE.following(3.0, fraction) == pytest.approx(3.0 * factor, rel=1e-7)

    @settings(derandomize=True, deadline=None)
    @given(norm=st.floats(1e-6, 1e12), fraction=st.floats(-1e300, 1e300))
    def test_it_stays_in_what_float32_holds_whatever_was_counted(self, norm, fraction):
        found = RULE.following(norm, fraction)
        assert found == float(np.float32(found))
        assert 0.99e-6 < found < 1.01e12

    def test_it_finds_the_quantile(self):
        """Norms of which 70% are below 4: without noise the clip norm comes there, from far below and far above."""
        norms = np.concatenate([np.linspace(0.1, 3.9, 700), np.linspace(4.1, 50, 300)])
        rule = AdaptiveClipping(quantile=0.7, learning_rate=0.2, count_noise=1.0, gradient_noise_multiplier=1.0)
        for norm in (1e-3, 1e3):
            for _ in range(3000):
                norm = rule.following(norm, np.mean(norms <= norm))
            assert 3.8 < norm < 4.2


def test_there_and_back():
    assert AdaptiveClipping.from_dict(RULE.to_dict()) == RULE


@pytest.mark.parametrize("change", [{"quantile": -1}, {"count_noise": "1"}, {"learning_rate": True}, {"more": 1.0}])
def test_other_fields_are_refused(change):
    with pytest.raises(AccountingError, match="Expected positive numbers"):
        AdaptiveClipping.from_dict({**RULE.to_dict(), **change})
