"""The one-run bound: against its formula, against mechanisms whose epsilon is known, and against an enumeration."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from tfdp.auditing import audit_in_one_run, epsilon_lower_bound, p_value
from tfdp.errors import DataError


def _formula(m, r, v, epsilon, delta):
    """Term by term, with sums of binomial coefficients."""
    p = math.exp(epsilon) / (1 + math.exp(epsilon))

    def tail(least):
        return sum(math.comb(r, k) * p**k * (1 - p) ** (r - k) for k in range(max(0, least), r + 1))

    slope = max(((tail(v - i) - tail(v)) / i for i in range(1, m + 1)), default=0.0)
    return min(1.0, tail(v) + 2 * m * delta * slope)


@pytest.mark.parametrize("delta", [0.0, 1e-5, 1e-2])
@pytest.mark.parametrize(("m", "r", "v"), [(10, 10, 9), (30, 12, 12), (30, 12, 7), (25, 25, 20), (8, 4, 0), (5, 5, 1)])
def test_against_the_formula(m, r, v, delta):
    for epsilon in (0.0, 0.3, 1.0, 4.0):
        assert p_value(m, r, v, epsilon, delta) == pytest.approx(_formula(m, r, v, epsilon, delta), rel=1e-9)


@pytest.mark.parametrize(("correct", "confidence"), [(20, 0.95), (20, 0.99), (40, 0.95)])
def test_closed_form_when_every_guess_is_right(correct, confidence):
    """p^r = 1 - confidence."""
    p = (1 - confidence) ** (1 / correct)
    found = epsilon_lower_bound(correct, correct, correct, 0.0, confidence)
    assert found == pytest.approx(math.log(p / (1 - p)), abs=1e-6)


def test_the_bound_is_the_end_of_what_is_refuted():
    for m, r, v, delta in ((100, 50, 45, 0.0), (200, 200, 150, 1e-4), (1000, 100, 90, 1e-5)):
        found = epsilon_lower_bound(m, r, v, delta)
        assert found > 0
        assert p_value(m, r, v, found, delta) <= 0.05 + 1e-9
        assert p_value(m, r, v, found + 1e-6, delta) > 0.05
    assert epsilon_lower_bound(100, 50, 25, 0.0) == 0.0
    assert epsilon_lower_bound(100, 0, 0, 0.0) == 0.0
    # Delta can only take away.
    bounds = [epsilon_lower_bound(200, 100, 90, delta) for delta in (0.0, 1e-5, 1e-3, 1e-1)]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[0] > bounds[-1] == 0.0


def _randomised_response(generator, m, epsilon):
    """Each coin is told truly with e^epsilon / (1 + e^epsilon): exactly (epsilon, 0)-DP."""
    coins = generator.random(m) < 0.5
    truth = generator.random(m) < math.exp(epsilon) / (1 + math.exp(epsilon))
    told = np.where(truth, coins, ~coins)
    return told + 1e-3 * generator.random(m), coins


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_randomised_response_is_not_overestimated(epsilon):
    """At 90% confidence a bound above epsilon in at most a tenth of 300 audits; false alarm below 1e-3."""
    generator = np.random.default_rng(round(10 * epsilon))
    bounds = [audit_in_one_run(*_randomised_response(generator, 100, epsilon), delta=0.0, confidence=0.9).epsilon
              for _ in range(300)]  # fmt: skip
    assert stats.binom.sf(sum(bound > epsilon for bound in bounds) - 1, 300, 0.1) > 1e-3
    assert max(bounds) > 0


@pytest.mark.parametrize("epsilon", [0.5, 2.0, 4.0])
def test_randomised_response_is_found_with_many_canaries(epsilon):
    generator = np.random.default_rng(7)
    scores, coins = _randomised_response(generator, 20_000, epsilon)
    found = audit_in_one_run(scores, coins, delta=0.0)
    assert 0.88 * epsilon < found.epsilon <= epsilon
    assert found.guesses >= 1000
    assert found.included == coins.sum()


def test_leaks_that_delta_allows_are_not_held_against_epsilon():
    """With probability delta everything is told, else nothing: (0, delta)-DP, though at times all guesses are right."""
    m = 30
    assert epsilon_lower_bound(m, m, m, 0.0) > 2
    # The formula's promise at epsilon 0: all m right with at most 2^-m + (delta part).
    for delta in (1e-3, 1e-2):
        assert p_value(m, m, m, 0.0, delta) >= delta
        assert epsilon_lower_bound(m, m, m, delta, 1 - delta) == 0.0


def test_enumeration_of_all_coins_and_answers():
    """Every outcome of randomised response on m = 6 coins, with its probability, for every r: the bound fails with at
    most the allowed probability, exactly. The mechanism that attains the tail comes close to it."""
    m, epsilon, confidence = 6, 1.0, 0.7
    p = math.exp(epsilon) / (1 + math.exp(epsilon))
    for guesses in (2, 4, 6):
        failed = 0.0
        for wrong in itertools.product([False, True], repeat=guesses):
            chance = math.prod((1 - p) if each else p for each in wrong)
            if epsilon_lower_bound(m, guesses, guesses - sum(wrong), 0.0, confidence) > epsilon:
                failed += chance
        assert failed <= 1 - confidence


def test_a_lucky_choice_of_guesses_is_paid_for():
    generator = np.random.default_rng(11)
    scores, coins = generator.random(100), generator.random(100) < 0.5
    several = audit_in_one_run(scores, coins, delta=0.0)
    assert several.epsilon <= max(
        audit_in_one_run(scores, coins, delta=0.0, shares=(share,)).epsilon for share in (0.05, 0.1, 0.25, 0.5, 1.0)
    )
    # Five choices at 95%: each at 99%.
    perfect = audit_in_one_run(coins + 0.1 * scores, coins, delta=0.0)
    half = min(coins.sum(), 100 - coins.sum())
    assert perfect.epsilon == pytest.approx(
        max(epsilon_lower_bound(100, 100, 100 - abs(50 - half), 0.0, 0.99), epsilon_lower_bound(100, 50, 50, 0.0, 0.99))
    )


@pytest.mark.parametrize(("scores", "coins"), [([1.0], [True]), ([1.0, math.nan], [True, False]), ([1.0, 2.0], [True])])
def test_what_cannot_be_audited_is_refused(scores, coins):
    with pytest.raises(DataError, match="at least two canaries"):
        audit_in_one_run(scores, coins, delta=0.0)
    with pytest.raises(DataError, match="correct <= guesses"):
        p_value(4, 2, 3, 1.0, 0.0)
