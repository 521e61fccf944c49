"""What (epsilon, delta) leaves to an attacker who guesses who was in the data: the ceiling over every attack.

For two neighbouring data sets, (epsilon, delta)-DP bounds false positive rate (FPR) and true positive rate (TPR) of any
test by TPR <= e^epsilon FPR + delta and 1 - FPR <= e^epsilon (1 - TPR) + delta (Kairouz, Oh and Viswanath 2015, "The
composition theorem for differential privacy"; Wasserman and Zhou 2010).
"""

from __future__ import annotations

import math


def max_true_positive_rate(epsilon: float, delta: float, false_positive_rate: float) -> float:
    """The most true positives that any test can have at a false positive rate, under (epsilon, delta)-DP."""
    if math.isinf(epsilon):
        return 1.0
    grown = math.exp(min(epsilon, 700.0)) * false_positive_rate + delta
    mirrored = 1.0 - math.exp(-epsilon) * (1.0 - delta - false_positive_rate)
    return max(0.0, min(1.0, grown, mirrored))


def max_membership_advantage(epsilon: float, delta: float) -> float:
    """The most that true positive rate minus false positive rate can be, under (epsilon, delta)-DP."""
    if epsilon > 700.0:
        return 1.0
    grown = math.exp(epsilon)
    return min(1.0, (grown - 1.0 + 2.0 * delta) / (grown + 1.0))
