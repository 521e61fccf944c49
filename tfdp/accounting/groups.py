"""What an epsilon of single records says about a group of them, without looking at how they are sampled."""

from __future__ import annotations

import contextlib
import math

import dp_accounting
import numpy as np

from tfdp.accounting.accountants import delta_curve
from tfdp.accounting.grids import default_grid
from tfdp.errors import AccountingError

_SMALLEST, _LARGEST = 1e-4, 1e3
_POINTS = 200


def generic_group_epsilon(
    event: dp_accounting.DpEvent,
    steps: int,
    *,
    delta: float,
    group_size: int,
    accountant: str = "pld",
    adjacency: str,
) -> float:
    """Epsilon for k records at once, from (epsilon, delta) to (k epsilon, k e^((k-1) epsilon) delta).

    Every pair that a single record has may be put in; what is returned is the smallest k epsilon whose delta stays
    within the target, on a fine grid. It is there for comparison with the mixture-of-Gaussians event, which knows how
    the records are sampled (Vadhan 2017, lemma 2.2; Chua et al. 2024).

    Args:
        event: one step, as for a single record.
        steps: number of optimizer steps.
        delta: of the group.
        group_size: k.
        accountant: "rdp" for Renyi bounds only. Otherwise the smaller of both accountants counts at every epsilon,
            since the deltas that this takes are often too small for privacy loss distributions.
        adjacency: of one record.

    Returns:
        Infinity where no pair is good enough.
    """

    def curve(epsilons: np.ndarray, by: str) -> np.ndarray:
        """Deltas of one record; the grid is coarse, which keeps them bounds."""
        grid = None if by == "rdp" else 10 * default_grid(event, steps, adjacency)
        return np.array(
            delta_curve(event, steps, epsilons=epsilons.tolist(), accountant=by, adjacency=adjacency, grid=grid)
        )

    def smallest(epsilons: np.ndarray, single: np.ndarray) -> float:
        """The first epsilon whose delta for the group is within the target."""
        with np.errstate(divide="ignore"):
            of_group = math.log(group_size) + (group_size - 1) * epsilons + np.log(single)
        within = np.flatnonzero(of_group <= math.log(delta))
        return float(epsilons[within[0]]) if within.size else math.inf

    epsilons = np.geomspace(_SMALLEST, _LARGEST, _POINTS)
    if curve(epsilons[-1:], "rdp")[0] >= 1:
        return math.inf
    best = smallest(epsilons, curve(epsilons, "rdp"))
    around = np.linspace(0.5, 1.0, _POINTS) * min(best, _LARGEST)
    single = curve(around, "rdp")
    if accountant != "rdp":
        with contextlib.suppress(AccountingError):  # the Renyi bound holds on its own
            single = np.minimum(single, curve(around, accountant))
    return group_size * min(best, smallest(around, single))
