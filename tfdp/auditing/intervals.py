"""Confidence intervals of rates and of the area under a ROC curve."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy import stats


def clopper_pearson(successes: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """The exact interval of a rate: it holds for any true rate, at the price of some width."""
    tail = (1.0 - confidence) / 2.0
    low = 0.0 if successes == 0 else float(stats.beta.ppf(tail, successes, trials - successes + 1))
    high = 1.0 if successes == trials else float(stats.beta.ppf(1.0 - tail, successes + 1, trials - successes))
    return low, high


def auc_interval(member_scores: Any, non_member_scores: Any, confidence: float = 0.95) -> tuple[float, float]:
    """Interval of the chance that a member scores above a non-member, ties counting half (DeLong et al. 1988).

    The variance is that of the placements of each side among the other. It is taken on the logit scale, which keeps
    the interval within 0 and 1. Where all scores are on their side, or all tie, the variance is zero and says nothing;
    then members paired with as many non-members are independent trials, and Clopper and Pearson's interval holds.

    Args:
        member_scores: [members], at least two.
        non_member_scores: [non-members], at least two.
    """
    member, other = np.asarray(member_scores, np.float64), np.asarray(non_member_scores, np.float64)
    m, n = len(member), len(other)
    together = stats.rankdata(np.concatenate([member, other]))
    of_members = (together[:m] - stats.rankdata(member)) / n
    of_others = 1.0 - (together[m:] - stats.rankdata(other)) / m
    auc = float(of_members.mean())
    deviation = math.sqrt(of_members.var(ddof=1) / m + of_others.var(ddof=1) / n)
    if deviation == 0:
        pairs = min(m, n)
        return clopper_pearson(round(auc * pairs), pairs, confidence)
    middle, reach = math.log(auc / (1 - auc)), stats.norm.ppf((1 + confidence) / 2) * deviation / (auc * (1 - auc))
    low, high = (1.0 / (1.0 + math.exp(-(middle + sign * reach))) for sign in (-1, 1))
    return low, high
