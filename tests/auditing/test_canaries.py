"""Canaries and their exposure, against an enumeration of a small space."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from scipy import stats

from tfdp.auditing import Canaries, exposure, exposure_by_chance
from tfdp.errors import DataError


def test_texts_follow_the_pattern_and_are_all_different():
    canaries = Canaries.draw(300, pattern="pin ##-##", seed=1)
    everything = canaries.texts + canaries.candidates(5000)
    assert len(set(everything)) == 5300
    assert all(re.fullmatch(r"pin \d\d-\d\d", text) for text in everything)
    assert len(set(canaries.owners)) == 300
    assert Canaries.draw(300, pattern="pin ##-##", seed=1).texts == canaries.texts
    assert set(Canaries(canaries.pattern, 300, 1, canaries.key).texts) == set(canaries.texts)
    # A larger set begins with the smaller one: what was inserted does not depend on what is asked later.
    assert canaries.candidates(10) == canaries.candidates(5000)[:10]


def test_every_secret_of_a_small_space_can_come():
    canaries = Canaries.draw(2, pattern="#", seed=0)
    assert sorted(canaries.texts + canaries.candidates(8)) == list("0123456789")
    with pytest.raises(DataError, match="at most 8 candidates"):
        canaries.candidates(9)


def test_coins_and_digits_are_fair():
    """Chi-squared and binomial tests, false alarm below 1e-4 each, on a fixed key."""
    canaries = Canaries.draw(4000, pattern="######", seed=2)
    assert stats.binomtest(int(canaries.included.sum()), 4000).pvalue > 1e-4
    digits = np.array([[int(digit) for digit in text] for text in canaries.texts])
    for column in digits.T:
        assert stats.chisquare(np.bincount(column, minlength=10)).pvalue > 1e-4
    # Coin and secret have nothing to do with each other.
    low = digits[:, 0] < 5
    table = [[np.sum(low & canaries.included), np.sum(low & ~canaries.included)],
             [np.sum(~low & canaries.included), np.sum(~low & ~canaries.included)]]  # fmt: skip
    assert stats.fisher_exact(table).pvalue > 1e-4


def test_two_draws_share_nothing():
    one, two = Canaries.draw(50), Canaries.draw(50)
    assert one.key != two.key
    assert not set(one.texts) & set(two.texts)
    assert not set(one.owners) & set(two.owners)
    assert one.key.hex() not in repr(one)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"count": 0}, "at least one canary"),
        ({"count": 3, "repetitions": 0}, "at least one canary"),
        ({"count": 3, "pattern": "#"}, "at least four secrets"),
        ({"count": 3, "pattern": "no secret"}, "at least four secrets"),
    ],
)
def test_what_makes_no_canary_is_refused(settings, message):
    with pytest.raises(DataError, match=message):
        Canaries.draw(**settings)


def test_exposure_is_that_of_the_enumerated_space():
    """All 100 secrets are scored, in every position: log2 100 - log2 rank."""
    generator = np.random.default_rng(0)
    scores = generator.permutation(100).astype(float)
    for secret in range(100):
        rank = 1 + sum(scores[other] > scores[secret] for other in range(100))
        found = exposure([scores[secret]], np.delete(scores, secret))
        assert found[0] == pytest.approx(math.log2(100) - math.log2(rank))


def test_ties_expose_nothing():
    assert exposure([0.0, 1.0], np.zeros(15)).tolist() == [0.0, 4.0]


def test_exposure_by_chance_is_the_mean_over_all_ranks():
    for candidates in (1, 7, 1023):
        total = candidates + 1
        mean = np.mean([math.log2(total / rank) for rank in range(1, total + 1)])
        assert exposure_by_chance(candidates) == pytest.approx(mean)
    assert exposure_by_chance(10**6) == pytest.approx(math.log2(math.e), abs=1e-4)
