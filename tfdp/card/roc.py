"""ROC curves of attacks, with what the guarantee leaves to any attack beside them."""

from __future__ import annotations

import math

import numpy as np
from markupsafe import Markup

from tfdp.accounting import max_true_positive_rate
from tfdp.card.audits import Attack
from tfdp.card.model import PrivacyCard
from tfdp.card.plots import Axis, Series, line_chart

_LOWEST = 1e-3
_LABELS = {"private": "private model", "non_private": "without privacy"}
_STYLES = {"private": "line-a", "non_private": "line-b"}


def pictures(card: PrivacyCard) -> list[tuple[str, Markup]]:
    """(name of the attack, picture) of every attack with a curve, private model and twin in one picture.

    Both axes are logarithmic: what an attack finds while it is hardly ever wrong stands at the left, where a linear
    axis would hide it.
    """
    attacks = [*card.attacks, *(card.audit.attacks if card.audit is not None else ())]
    drawn: dict[str, list[Attack]] = {}
    for attack in attacks:
        if attack.group is None and len(attack.roc) > 1:
            drawn.setdefault(attack.name, []).append(attack)
    found = []
    for name, curves in drawn.items():
        picture = line_chart(
            [*(_curve(attack) for attack in curves), _ceiling(card), _chance()],
            x=Axis("false positive rate", log=True),
            y=Axis("true positive rate", log=True),
            title=f"ROC curve: {name}",
        )
        if picture is not None:
            found.append((name, picture))
    return found


def _curve(attack: Attack) -> Series:
    """Steps, from the lowest rate of the picture; where nothing is found yet there is no line."""
    points: list[tuple[float, float | None]] = []
    before = max((tpr for fpr, tpr in attack.roc if fpr <= _LOWEST), default=0.0)
    points.append((_LOWEST, _shown(before)))
    for fpr, tpr in attack.roc:
        if fpr > _LOWEST:
            points += [(fpr, _shown(before)), (fpr, _shown(tpr))]
            before = tpr
    return Series(_LABELS[attack.model], points, _STYLES[attack.model])


def _shown(rate: float) -> float | None:
    return rate if rate >= _LOWEST else None


def _ceiling(card: PrivacyCard) -> Series:
    bound = card.claim.epsilon.value
    epsilon = math.inf if bound is None else bound
    rates = np.geomspace(_LOWEST, 1.0, 49).tolist()
    points = [(rate, max_true_positive_rate(epsilon, card.claim.delta, rate)) for rate in rates]
    return Series("ceiling by the guarantee", points, "line-d")


def _chance() -> Series:
    return Series("guessing", [(rate, rate) for rate in (_LOWEST, 1.0)], "line-c")
