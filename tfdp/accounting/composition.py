"""Several runs on the same data, and the choice of the best of them.

A later run may start from what an earlier one released. Its own event and steps have to be fixed without looking at
that: a bound composed of costs that were themselves chosen in view of results needs a cap set beforehand, which is
what `budget.epsilon_cap` is. One bound for all runs is tighter than the sum of their epsilons.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import dp_accounting
from dp_accounting import dp_event
from dp_accounting.rdp import rdp_privacy_accountant

from tfdp.accounting.accountants import (
    _RELATIONS,
    _check_delta,
    _check_names,
    _check_steps,
    _composed_pld,
    _delta_error,
    _guarded,
    _renyi_divergences,
    _without_order_warnings,
    supports,
)
from tfdp.accounting.grids import default_grid
from tfdp.accounting.limits import countable, is_free, is_unbounded
from tfdp.errors import AccountingError

Run = tuple[dp_accounting.DpEvent, int]


@dataclasses.dataclass(frozen=True)
class Selection:
    """The best of several runs, of which only that one is ever looked at; see `selected_epsilon`.

    Attributes:
        event, steps: of each run.
        mean: of the number of runs, above 1.
        shape: of its distribution: 1 geometric, 0 logarithmic, infinity Poisson.
    """

    event: dp_accounting.DpEvent
    steps: int
    mean: float
    shape: float

    def __post_init__(self) -> None:
        if not (self.mean > 1 and math.isfinite(self.mean)):
            raise AccountingError(f"Expected a mean number of runs above 1. Received: mean={self.mean}.")
        if not self.shape >= 0:
            raise AccountingError(f"Expected a shape of at least 0 (1: geometric). Received: shape={self.shape}.")

    @property
    def repeated(self) -> dp_accounting.DpEvent:
        """As dp-accounting calls it."""
        runs = dp_event.SelfComposedDpEvent(self.event, _check_steps(self.steps))
        return dp_event.RepeatAndSelectDpEvent(runs, self.mean, self.shape)


def composed_epsilon(
    runs: Sequence[Run], *, delta: float, adjacency: str, selections: Sequence[Selection] = ()
) -> tuple[float, str]:
    """Epsilon of all runs together, and the accountant that gave it.

    The accountant is one for all: pld where it models every event, else rdp, whatever each run was planned with. Both
    bound the same mechanisms. Only rdp models a selection.

    Args:
        runs: (event of one step, steps) each.
        selections: runs of which only the best was looked at; they are not among `runs`.
        delta: of all together.
        adjacency: the same for all: bounds under different ones do not add up.

    Raises:
        AccountingError: no accountant models all of them.
    """
    _check_names("pld", adjacency)
    _check_delta(delta)
    steps: dict[dp_accounting.DpEvent, int] = {}
    for event, count in runs:
        if _check_steps(count) and not is_free(event):
            event = countable(event)
            steps[event] = steps.get(event, 0) + count
    events = [*steps, *(selection.repeated for selection in selections)]
    chosen = next((name for name in ("pld", "rdp") if all(supports(event, name, adjacency) for event in events)), None)
    if chosen is None:
        names = ", ".join(sorted({type(event).__name__ for event in events}))
        raise AccountingError(
            f"Expected runs that one accountant models under {adjacency}. Received: {names}. Add the epsilons and the "
            "deltas of groups of runs that go together."
        )
    if not events:
        return 0.0, chosen
    if any(is_unbounded(event) for event in (*steps, *(selection.event for selection in selections))):
        return math.inf, chosen
    if selections:
        return _with_selections(steps, selections, delta, adjacency), chosen
    if chosen == "pld":
        return _by_privacy_losses(steps, delta, adjacency), chosen
    return _by_renyi_divergences(steps, delta, adjacency), chosen


def _by_privacy_losses(steps: dict[dp_accounting.DpEvent, int], delta: float, adjacency: str) -> float:
    error = sum(_delta_error(count) for count in steps.values())
    if delta < 10 * error:
        raise AccountingError(
            f"Expected delta of at least {10 * error:.1e} for {sum(steps.values())} steps. Received: delta={delta}. "
            "Below that the rounding error of the pld accountant is as large as delta itself."
        )
    grid = max(default_grid(event, count, adjacency) for event, count in steps.items())
    total = None
    for event, count in steps.items():
        one = _composed_pld(event, count, adjacency, grid)
        total = one if total is None else total.compose(one)
    assert total is not None
    composed = total
    return max(0.0, _guarded(lambda: composed.get_epsilon_for_delta(delta - error), next(iter(steps)), grid))


def _by_renyi_divergences(steps: dict[dp_accounting.DpEvent, int], delta: float, adjacency: str) -> float:
    total: dict[float, float] = {}
    for index, (event, count) in enumerate(steps.items()):
        one = _renyi_divergences(event, adjacency).by_order(count)
        total = one if index == 0 else {order: total[order] + one[order] for order in total.keys() & one.keys()}
    if not total:
        return math.inf
    orders = sorted(total)
    return float(rdp_privacy_accountant.compute_epsilon(orders, [total[order] for order in orders], delta)[0])


def _with_selections(
    steps: dict[dp_accounting.DpEvent, int], selections: Sequence[Selection], delta: float, adjacency: str
) -> float:
    accountant = rdp_privacy_accountant.RdpAccountant(neighboring_relation=_RELATIONS[adjacency])
    with _without_order_warnings():
        for event, count in steps.items():
            accountant.compose(event, count)
        for selection in selections:
            accountant.compose(selection.repeated)
        return max(0.0, float(accountant.get_epsilon(delta)))


def selected_epsilon(
    event: dp_accounting.DpEvent, steps: int, *, delta: float, adjacency: str, mean: float, shape: float
) -> float:
    """Epsilon of the best of several runs of `steps` steps each, of which only that one is ever looked at.

    The number of runs has to be drawn at random, before the first one and independently of the data, from a truncated
    negative binomial distribution (Papernot and Steinke 2022, arXiv 2110.03620), and every run has to have the same
    event: what differs between them, such as the learning rate, is drawn at random too, or fixed in a list without
    looking at the data. A grid of trials that was fixed in number composes instead: `composed_epsilon`.

    Args:
        event, steps, delta, adjacency: of each run.
        mean: of the number of runs, above 1.
        shape: of its distribution: 1 geometric, 0 logarithmic, infinity Poisson.

    Raises:
        AccountingError: no accountant models it.
    """
    return composed_epsilon([], delta=delta, adjacency=adjacency, selections=[Selection(event, steps, mean, shape)])[0]
