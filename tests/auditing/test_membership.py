"""Membership inference against counting: every pair, every threshold."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from tfdp.auditing import (
    attack,
    attack_groups,
    auc_interval,
    clopper_pearson,
    ratio_scores,
    threshold_scores,
    unit_losses,
)
from tfdp.errors import DataError


def _scores(members, others, shift=0.7, seed=0, decimals=1):
    """Rounded, so that there are ties within and across the sides."""
    generator = np.random.default_rng(seed)
    draws = generator.normal(shift, 1.0, members), generator.normal(0.0, 1.0, others)
    return tuple(np.round(each, decimals) for each in draws)


def _auc(member, other):
    wins = sum((one > two) + 0.5 * (one == two) for one in member for two in other)
    return wins / (len(member) * len(other))


@pytest.mark.parametrize("seed", range(4))
def test_every_number_is_that_of_a_loop(seed):
    member, other = _scores(23, 31, seed=seed)
    found = attack(member, other, false_positive_rates=(0.01, 0.1, 0.5))
    assert (found.members, found.non_members) == (23, 31)
    assert found.auc == pytest.approx(_auc(member, other), abs=1e-12)
    thresholds = [math.inf, *sorted({*member, *other}, reverse=True)]
    corners = [(np.mean(other >= each), np.mean(member >= each)) for each in thresholds]
    assert found.advantage == pytest.approx(max(tpr - fpr for fpr, tpr in corners))
    for rate in found.rates:
        best = max(tpr for fpr, tpr in corners if fpr <= rate.false_positive_rate)
        assert rate.true_positive_rate == pytest.approx(best)
        assert rate.interval == clopper_pearson(round(best * 23), 23)
    drawn = {(round(fpr, 9), round(tpr, 9)) for fpr, tpr in found.roc}
    assert drawn <= {(round(fpr, 9), round(tpr, 9)) for fpr, tpr in corners}
    assert (found.roc[0, 0], *found.roc[-1]) == (0.0, 1.0, 1.0)


def test_a_low_rate_is_that_of_members_not_of_others():
    """A tenth of the members stands out far above everybody; no non-member stands out below."""
    member = np.concatenate([np.full(10, 100.0), np.zeros(90)])
    other = np.concatenate([np.zeros(90), np.full(10, 1.0)])
    rate = attack(member, other, false_positive_rates=(0.01,)).rates[0]
    assert rate.true_positive_rate == 0.1
    # With fewer than 1000 non-members a rate of 0.1% allows no error at all.
    assert attack(member, other).rates[0].true_positive_rate == 0.1
    worst = attack(np.zeros(50), np.ones(50))
    assert (worst.auc, worst.advantage, worst.rates[1].true_positive_rate) == (0.0, 0.0, 0.0)


def test_guessing_stays_below_what_chance_reaches():
    """One attack in twenty is above; 400 of them: between 8 and 35, false alarm below 1e-3 (binomial)."""
    generator = np.random.default_rng(1)
    above = inside = 0
    for _ in range(400):
        found = attack(generator.normal(size=60), generator.normal(size=90))
        above += found.advantage > found.advantage_by_chance
        inside += found.auc_interval[0] <= 0.5 <= found.auc_interval[1]
    assert 8 <= above + 6 <= 41  # the limit distribution is a little wide for so few
    assert stats.binom.cdf(inside, 400, 0.95) > 1e-4
    assert inside < 400


def test_interval_of_a_rate_against_its_definition():
    for successes, trials in ((0, 20), (3, 20), (20, 20), (7, 1000)):
        low, high = clopper_pearson(successes, trials, 0.9)
        reference = stats.binomtest(successes, trials).proportion_ci(0.9, method="exact")
        assert (low, high) == pytest.approx((reference.low, reference.high))
        if successes:
            assert stats.binom.sf(successes - 1, trials, low) == pytest.approx(0.05)


def test_interval_of_the_auc_covers_it():
    """True AUC of two unit normals at distance d: Phi(d / sqrt 2). 300 intervals at 95%: false alarm below 1e-3."""
    generator = np.random.default_rng(2)
    truth = stats.norm.cdf(1.5 / math.sqrt(2))
    covered = 0
    for _ in range(300):
        low, high = auc_interval(generator.normal(1.5, 1, 40), generator.normal(0, 1, 50))
        covered += low <= truth <= high
    assert stats.binom.cdf(covered, 300, 0.95) > 1e-3
    assert covered < 300


def test_variance_of_the_auc_is_that_of_placements():
    member, other = _scores(12, 9)
    of_members = [np.mean([(one > two) + 0.5 * (one == two) for two in other]) for one in member]
    of_others = [np.mean([(one > two) + 0.5 * (one == two) for one in member]) for two in other]
    deviation = math.sqrt(np.var(of_members, ddof=1) / 12 + np.var(of_others, ddof=1) / 9)
    auc = _auc(member, other)
    low, high = auc_interval(member, other)
    width = math.log(high / (1 - high)) - math.log(low / (1 - low))
    assert width == pytest.approx(2 * 1.959964 * deviation / (auc * (1 - auc)), rel=1e-5)


def test_where_the_variance_is_zero_the_interval_still_has_a_width():
    assert auc_interval(np.ones(30) + np.arange(30), np.zeros(20)) == pytest.approx((clopper_pearson(20, 20)[0], 1.0))
    low, high = auc_interval(np.zeros(30), np.zeros(20))
    assert low < 0.3
    assert high > 0.7


def test_groups_are_attacked_apart():
    member, other = _scores(60, 60)
    names = ["small"] * 5 + ["a"] * 25 + ["b"] * 30
    found = attack_groups(member, other, names, names[::-1], minimum=10)
    assert found["small"] is None
    assert found["a"].auc == pytest.approx(_auc(member[5:30], other[30:55]))
    assert found["b"].members == 30
    # Few on one side are few, however many there are on the other.
    assert attack_groups(member, other, ["a"] * 60, ["a"] * 5 + ["b"] * 55, minimum=10) == {"a": None, "b": None}


@pytest.mark.parametrize("scores", [[1.0], [1.0, math.nan], [[1.0, 2.0]]])
def test_what_cannot_be_attacked_is_refused(scores):
    with pytest.raises(DataError, match="at least two members"):
        attack(scores, [0.0, 1.0])


def test_losses_of_a_unit_are_over_all_its_tokens():
    losses, tokens, ids = [2.0, 9.0, 4.0, 1.0], [1, 3, 2, 1], ["b", "a", "b", "c"]
    assert unit_losses(losses, tokens, ids).tolist() == [6.0 / 3, 3.0, 1.0]
    assert unit_losses(losses, tokens).tolist() == [2.0, 3.0, 2.0, 1.0]
    with pytest.raises(DataError, match="1 units without one"):
        unit_losses([1.0, 2.0], [3, 0])


def test_the_ratio_takes_out_how_easy_a_text_is():
    """Losses are a common difficulty plus a little memory: the loss alone sees little, the ratio all."""
    generator = np.random.default_rng(3)
    reference = generator.normal(5.0, 2.0, 400)
    losses = reference - np.repeat([0.5, 0.0], 200) + generator.normal(0.0, 0.05, 400)
    weak = attack(*np.split(threshold_scores(losses), 2)).auc
    strong = attack(*np.split(ratio_scores(losses, reference), 2)).auc
    assert weak < 0.75
    assert strong > 0.99
