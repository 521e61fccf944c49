"""A lower bound of epsilon from one training.

Steinke, Nasr and Jagielski 2023, "Privacy auditing with one (1) training run", arXiv 2305.08846. m canary units are
each let into the training data by a fair coin. Afterwards an auditor who sees the model guesses some of the coins and
abstains from the others. If the training is (epsilon, delta)-DP, the number W of correct ones among r guesses is hardly
larger than Binomial(r, p) with p = e^epsilon / (1 + e^epsilon):

    P[W >= v] <= f(v) + 2 m delta max over i = 1..m of (f(v - i) - f(v)) / i,    f(v) = P[Binomial(r, p) >= v]

(their theorem for approximate DP). An epsilon for which that is below the allowed failure probability is refuted.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import optimize, stats

from tfdp.errors import DataError

SHARES = (0.05, 0.1, 0.25, 0.5, 1.0)
_LARGEST = 100.0  # where a guess is certain in double precision, and nothing refuted


@dataclasses.dataclass(frozen=True)
class OneRunAudit:
    """What the coins of the canaries told.

    Attributes:
        canaries, included: how many there were, and how many of them the coins let in.
        guesses, correct: of the choice that gave the best bound.
        epsilon: refuted below; 0 where nothing is.
        confidence: with which, over the coins and the training.
        delta: at which.
    """

    canaries: int
    included: int
    guesses: int
    correct: int
    epsilon: float
    confidence: float
    delta: float


def p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """The chance, at most, of so many correct guesses or more under (epsilon, delta)-DP.

    Args:
        canaries: m, all of them, abstentions included.
        guesses: r.
        correct: v.
    """
    if not 0 <= correct <= guesses <= canaries or epsilon < 0 or not 0 <= delta <= 1:
        raise DataError(
            "Expected 0 <= correct <= guesses <= canaries, epsilon >= 0 and delta in [0, 1]. Received: "
            f"{correct}, {guesses}, {canaries}, {epsilon}, {delta}."
        )
    p = 1.0 / (1.0 + math.exp(-epsilon))
    tail = float(stats.binom.sf(correct - 1, guesses, p))
    if correct == 0 or delta == 0:
        return min(1.0, tail)
    # P[v - i <= Binomial < v] for i = 1..v
    below = np.cumsum(stats.binom.pmf(np.arange(correct - 1, -1, -1), guesses, p))
    return float(min(1.0, tail + 2 * canaries * delta * np.max(below / np.arange(1, correct + 1))))


def epsilon_lower_bound(canaries: int, guesses: int, correct: int, delta: float, confidence: float = 0.95) -> float:
    """The largest epsilon that so many correct guesses refute, at that confidence; 0 where they refute none."""
    failure = 1.0 - confidence

    def excess(epsilon: float) -> float:
        return p_value(canaries, guesses, correct, epsilon, delta) - failure

    if excess(0.0) >= 0:
        return 0.0
    found = float(optimize.brentq(excess, 0.0, _LARGEST, xtol=1e-9))
    return found if excess(found) <= 0 else max(0.0, found - 1e-8)


def audit_in_one_run(
    scores: Any, included: Any, *, delta: float, confidence: float = 0.95, shares: Sequence[float] = SHARES
) -> OneRunAudit:
    """Guesses the coins of the canaries by their scores, and bounds epsilon from below.

    Of r guesses, the half with the highest scores is "in" and the half with the lowest "out". Several r are tried; the
    failure probability is divided among them (Bonferroni), so that the best may be reported.

    Args:
        scores: [canaries], higher says "in"; made from the model and the canaries, without the coins.
        included: [canaries] the coins.
        delta: of the claim.
        confidence: of the bound.
        shares: of the canaries that are guessed; fixed before looking.
    """
    scores, coins = np.asarray(scores, np.float64), np.asarray(included, bool)
    m = len(scores)
    if scores.shape != coins.shape or m < 2 or not np.isfinite(scores).all():
        raise DataError(
            f"Expected a finite score and a coin of each of at least two canaries. Received: shapes {scores.shape} and "
            f"{coins.shape}, {int((~np.isfinite(scores)).sum())} scores not finite."
        )
    order = np.argsort(-scores, kind="stable")
    halves = sorted({min(m // 2, max(1, round(share * m / 2))) for share in shares})
    each = 1.0 - (1.0 - confidence) / len(halves)
    results = []
    for half in halves:
        correct = int(coins[order[:half]].sum() + (~coins[order[m - half :]]).sum())
        bound = epsilon_lower_bound(m, 2 * half, correct, delta, each)
        results.append(OneRunAudit(m, int(coins.sum()), 2 * half, correct, bound, confidence, delta))
    return max(results, key=lambda result: (result.epsilon, result.guesses))
