"""Membership inference: telling units that were trained on from others like them, by a score.

The curve is scikit-learn's. The attack suite of TensorFlow Privacy 0.7.3 was considered and left: it calls the
*non*-members positive, so that its curve does not give the true positive rate of members at a low false positive rate
(which is what an attacker wants, and what Carlini et al. 2022 ask to be reported); it has no intervals and no units of
several records, and needs pandas beside scikit-learn.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdp.auditing.intervals import auc_interval, clopper_pearson
from tfdp.errors import DataError

FALSE_POSITIVE_RATES = (0.001, 0.01)
_POINTS = 65


@dataclasses.dataclass(frozen=True)
class Rate:
    """How many members an attack finds when it may be wrong about few non-members.

    Attributes:
        false_positive_rate: the share of non-members that may be taken for members; with fewer than its inverse of
            them, none may.
        true_positive_rate: the largest share of members that is found.
        interval: of that share (Clopper and Pearson), for the threshold that was taken.
    """

    false_positive_rate: float
    true_positive_rate: float
    interval: tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Membership:
    """What one attack found.

    Attributes:
        members, non_members: how many units were attacked.
        auc: the chance that a member scores above a non-member; a half is guessing.
        auc_interval: of the auc, at `confidence`.
        advantage: the largest true minus false positive rate over all thresholds.
        advantage_by_chance: what it stays below with that confidence when the scores tell nothing.
        rates: true positives at few false positives.
        roc: [points, 2] false and true positive rates, thinned out to be drawn.
    """

    members: int
    non_members: int
    auc: float
    auc_interval: tuple[float, float]
    advantage: float
    advantage_by_chance: float
    rates: tuple[Rate, ...]
    roc: np.ndarray
    confidence: float = 0.95


def attack(
    member_scores: Any,
    non_member_scores: Any,
    *,
    false_positive_rates: Sequence[float] = FALSE_POSITIVE_RATES,
    confidence: float = 0.95,
) -> Membership:
    """What a threshold on the scores tells about membership.

    Args:
        member_scores: [members], one score per unit that was trained on; higher says "member".
        non_member_scores: [non-members], of units from the same source that were not.
        false_positive_rates: where true positives are read.
        confidence: of all intervals.

    Raises:
        DataError: fewer than two units on a side, or a score that is not finite.
    """
    from sklearn.metrics import roc_auc_score, roc_curve

    member, other = _checked(member_scores, "members"), _checked(non_member_scores, "non-members")
    labels = np.repeat([1, 0], [len(member), len(other)])
    scores = np.concatenate([member, other])
    fpr, tpr, _ = roc_curve(labels, scores, drop_intermediate=False)
    rates = []
    for allowed in false_positive_rates:
        found = float(tpr[fpr <= allowed * (1 + 1e-12)].max())
        rates.append(Rate(allowed, found, clopper_pearson(round(found * len(member)), len(member), confidence)))
    return Membership(
        members=len(member),
        non_members=len(other),
        auc=float(roc_auc_score(labels, scores)),
        auc_interval=auc_interval(member, other, confidence),
        advantage=float(np.max(tpr - fpr)),
        # The one-sided statistic of Kolmogorov and Smirnov, at its limit distribution.
        advantage_by_chance=min(
            1.0, math.sqrt(-math.log(1 - confidence) / 2 * (len(member) + len(other)) / (len(member) * len(other)))
        ),
        rates=tuple(rates),
        roc=_thinned(fpr, tpr),
        confidence=confidence,
    )


def attack_groups(
    member_scores: Any,
    non_member_scores: Any,
    member_groups: Sequence[str],
    non_member_groups: Sequence[str],
    *,
    minimum: int = 2,
    confidence: float = 0.95,
) -> dict[str, Membership | None]:
    """`attack` within each group, members against non-members of the same group; None where either are too few.

    Args:
        member_groups, non_member_groups: the group of each unit.
        minimum: fewest members, and non-members, of a group that is shown.
    """
    member, other = np.asarray(member_scores, np.float64), np.asarray(non_member_scores, np.float64)
    own, others = np.asarray(member_groups, object), np.asarray(non_member_groups, object)
    found: dict[str, Membership | None] = {}
    for group in sorted({*own.tolist(), *others.tolist()}):
        one, two = member[own == group], other[others == group]
        enough = min(len(one), len(two)) >= max(2, minimum)
        found[group] = attack(one, two, confidence=confidence) if enough else None
    return found


def _checked(scores: Any, side: str) -> np.ndarray:
    scores = np.asarray(scores, np.float64)
    if scores.ndim != 1 or len(scores) < 2 or not np.isfinite(scores).all():
        raise DataError(
            f"Expected a finite score of each of at least two {side}. Received: shape {scores.shape}, "
            f"{int((~np.isfinite(scores)).sum())} not finite. Hold units out before training, and look for overflow."
        )
    return scores


def _thinned(fpr: np.ndarray, tpr: np.ndarray) -> np.ndarray:
    """Corners of the curve at false positive rates that are even on a logarithmic axis, both ends among them."""
    steps = fpr[fpr > 0]
    wanted = np.concatenate([[0.0], np.geomspace(steps[0], 1.0, _POINTS - 1)])
    chosen = np.unique(np.searchsorted(fpr, wanted * (1 + 1e-12), side="right") - 1)
    return np.stack([fpr[chosen], tpr[chosen]], axis=1)
