"""Losses of whole units, and the scores that an attacker makes of them. A higher score says "was trained on"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdp.errors import DataError
from tfdp.sampling.units import UnitMap


def unit_losses(losses: Any, tokens: Any, unit_ids: Sequence[Any] | None = None) -> np.ndarray:
    """[units] mean loss of a token in all records of a unit, in nats; units in the order of their first record.

    An attack has to aim at what is protected: where a person is the unit, at all that the person wrote.

    Args:
        losses: [records] summed loss of each record.
        tokens: [records] how many tokens (or other predictions) the sum is over.
        unit_ids: the unit of each record; None where every record is one.

    Raises:
        DataError: a unit without anything to predict.
    """
    sums, counts = np.asarray(losses, np.float64), np.asarray(tokens, np.float64)
    if unit_ids is not None:
        units = UnitMap.from_ids(unit_ids)
        # Every unit has a record, so no slice is empty.
        sums = np.add.reduceat(sums[units.records], units.starts[:-1])
        counts = np.add.reduceat(counts[units.records], units.starts[:-1])
    if sums.shape != counts.shape or not np.all(counts > 0):
        raise DataError(
            f"Expected at least one token of each of {len(sums)} units. Received: {int(np.sum(counts <= 0))} units "
            "without one. Leave them out: there is nothing to attack."
        )
    return sums / counts


def threshold_scores(losses: Any) -> np.ndarray:
    """The loss itself: what the model knows well it may have seen (Yeom et al. 2018)."""
    return -np.asarray(losses, np.float64)


def ratio_scores(losses: Any, reference_losses: Any) -> np.ndarray:
    """By how much the model knows a unit better than a reference model that never saw it.

    The difference of the losses is the logarithm of the ratio of the likelihoods, per token. The reference takes out
    how easy a text is by itself, which the loss alone mistakes for memory.

    Args:
        losses: [units] of the model under attack.
        reference_losses: [units] of the same units, under the public model.
    """
    return np.asarray(reference_losses, np.float64) - np.asarray(losses, np.float64)
