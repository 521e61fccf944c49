"""The smallest noise multiplier whose certified epsilon stays within a target."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import dp_accounting
from scipy import optimize

from tfdp.accounting import accountants
from tfdp.accounting.events import step_event
from tfdp.accounting.grids import default_grid, search_grid
from tfdp.errors import AccountingError
from tfdp.spec.numbers import shown

_SMALLEST_SIGMA, _LARGEST_SIGMA = 1e-3, 1e7
# A certificate this close below the target ends the search; the aim lies in the middle of that window.
_SLACK = 1e-3
_AIM = 1 - _SLACK / 2
_MAX_CERTIFICATES = 20


@dataclass(frozen=True)
class Calibration:
    """A noise multiplier and the certificate for it.

    Attributes:
        noise_multiplier: sigma, with six significant digits, so that it can be copied into a spec unchanged.
        epsilon: certified for exactly this sigma; at most `target_epsilon`.
        grid: cell width of the certificate, None for accountants without one.
        certificates: how many values were certified on the way.
    """

    noise_multiplier: float
    epsilon: float
    target_epsilon: float
    delta: float
    steps: int
    event: dp_accounting.DpEvent
    accountant: str
    adjacency: str
    grid: float | None
    certificates: int


def calibrate_noise_multiplier(
    *,
    target_epsilon: float,
    delta: float,
    steps: int,
    scheme: str,
    sampling_probability: float,
    num_units: int,
    adjacency: str,
    accountant: str = "pld",
    truncated_batch_size: int | None = None,
    records_per_unit: int = 1,
    grid: float | None = None,
) -> Calibration:
    """Searches on a coarse grid, then certifies on the fine one; what it returns never exceeds the target.

    The certified epsilon lies within 0.1% of the target unless the accountant's own resolution is coarser than that.

    Raises:
        AccountingError: the target cannot be reached, or needs no noise at all, or the mechanism is not supported.
    """
    if not (math.isfinite(target_epsilon) and target_epsilon > 0):
        raise AccountingError(f"Expected a finite target epsilon above 0. Received: target_epsilon={target_epsilon}.")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise AccountingError(f"Expected steps to be an integer of at least 1. Received: steps={steps!r}.")

    def event_at(sigma: float) -> dp_accounting.DpEvent:
        return step_event(
            scheme=scheme,
            sampling_probability=sampling_probability,
            noise_multiplier=sigma,
            num_units=num_units,
            truncated_batch_size=truncated_batch_size,
            records_per_unit=records_per_unit,
        )

    def grid_at(sigma: float) -> float | None:
        if accountant == "rdp":
            return None
        return default_grid(event_at(sigma), steps, adjacency) if grid is None else grid

    def certify(sigma: float) -> float:
        return accountants.epsilon(
            event_at(sigma), steps, delta=delta, accountant=accountant, adjacency=adjacency, grid=grid_at(sigma)
        )

    def estimate(sigma: float) -> float:
        event = event_at(sigma)
        coarse = None if accountant == "rdp" else search_grid(event, steps, adjacency)
        if coarse is not None and grid is not None:
            coarse = max(coarse, grid)
        return accountants.epsilon(event, steps, delta=delta, accountant=accountant, adjacency=adjacency, grid=coarse)

    search = _Search(target_epsilon)
    start = search.root(estimate)
    sigma, value, certificates = _certified(certify, start, target_epsilon, search.slope)
    return Calibration(
        noise_multiplier=sigma,
        epsilon=value,
        target_epsilon=float(target_epsilon),
        delta=float(delta),
        steps=steps,
        event=event_at(sigma),
        accountant=accountant,
        adjacency=adjacency,
        grid=grid_at(sigma),
        certificates=certificates,
    )


class _Search:
    """Root of log(epsilon) over log(sigma), remembering what it evaluated.

    Attributes:
        slope: d log(epsilon) / d log(sigma) near the root, for the first correction on the fine grid.
    """

    def __init__(self, target: float):
        self._target = target
        self._excess: dict[float, float] = {}
        self.slope = -1.0

    def root(self, estimate: Callable[[float], float]) -> float:
        def excess(log_sigma: float) -> float:
            if log_sigma not in self._excess:
                value = estimate(math.exp(log_sigma))
                logarithm = math.log(value) if value > 0 else -math.inf
                self._excess[log_sigma] = max(-50.0, min(50.0, logarithm - math.log(self._target * _AIM)))
            return self._excess[log_sigma]

        low, high = self._bracket(excess)
        log_sigma = optimize.brentq(excess, low, high, xtol=1e-4, rtol=1e-8)
        self._measure_slope()
        return math.exp(log_sigma)

    def _bracket(self, excess: Callable[[float], float]) -> tuple[float, float]:
        low = high = 0.0
        stride = math.log(2)
        while excess(high) > 0:
            low, high = high, high + stride
            stride *= 1.5
            if high > math.log(_LARGEST_SIGMA):
                raise AccountingError(
                    f"Expected a target epsilon that a noise multiplier below {_LARGEST_SIGMA:g} reaches. "
                    f"Received: target_epsilon={shown(self._target)}. Raise the target or delta, take fewer steps, "
                    "or use accountant pld where rdp was asked: its orders end at 1024."
                )
        if high > 0:
            return low, high
        while excess(low) <= 0:
            low, high = low - math.log(2), low
            if low < math.log(_SMALLEST_SIGMA):
                raise AccountingError(
                    "Expected a target epsilon that depends on the noise. "
                    f"Received: target_epsilon={shown(self._target)}, which even the noise multiplier "
                    f"{_SMALLEST_SIGMA:g} satisfies, because epsilon is that large or because a unit is sampled with a "
                    "chance below delta. Lower epsilon or delta."
                )
        return low, high

    def _measure_slope(self) -> None:
        nearest = sorted(self._excess.items(), key=lambda item: abs(item[1]))[:2]
        if len(nearest) == 2:
            (x0, y0), (x1, y1) = nearest
            if x0 != x1 and max(abs(y0), abs(y1)) < 1:
                self.slope = _plausible((y1 - y0) / (x1 - x0))


def _plausible(slope: float) -> float:
    """Epsilon falls with sigma; a slope outside of this range is the noise of a grid."""
    return min(-0.3, max(-20.0, slope))


def _round_up(sigma: float) -> float:
    """Six significant digits, never below `sigma`."""
    unit = 10.0 ** (math.floor(math.log10(sigma)) - 5)
    rounded = float(f"{math.ceil(sigma / unit - 1e-9) * unit:.6g}")
    return rounded if rounded >= sigma else float(f"{rounded + unit:.6g}")


def _certified(
    certify: Callable[[float], float], start: float, target: float, slope: float
) -> tuple[float, float, int]:
    """Moves `start` until its certificate lies just below the target: (sigma, epsilon, certificates taken)."""
    too_small: float | None = None
    best: tuple[float, float] | None = None
    previous: tuple[float, float] | None = None
    sigma = _round_up(start)
    for count in range(1, _MAX_CERTIFICATES + 1):
        value = certify(sigma)
        if value <= target:
            if best is None or sigma < best[0]:
                best = (sigma, value)
            if value >= target * (1 - _SLACK):
                return sigma, value, count
        elif too_small is None or sigma > too_small:
            too_small = sigma
        x, y = math.log(sigma), math.log(value) if 0 < value < math.inf else math.nan
        if previous is not None and math.isfinite(y) and abs(x - previous[0]) > 1e-5:
            slope = _plausible((y - previous[1]) / (x - previous[0]))
        if math.isfinite(y):
            previous = (x, y)
            proposal = math.exp(x + (math.log(target * _AIM) - y) / slope)
        else:
            proposal = 2 * sigma if value > target else sigma / 2
        # Corrections must move, and must stay between what is known to fail and what is known to hold.
        proposal = max(proposal, sigma * (1 + 1e-5)) if value > target else min(proposal, sigma * (1 - 1e-5))
        if too_small is not None and best is not None:
            if best[0] <= too_small * (1 + 4e-6):
                return best[0], best[1], count
            if not too_small < proposal < best[0]:
                proposal = math.sqrt(too_small * best[0])
        sigma = _round_up(proposal)
    if best is None:
        raise AccountingError(
            f"Expected a noise multiplier that certifies epsilon {shown(target)}. Received: none within "
            f"{_MAX_CERTIFICATES} attempts, the last one {shown(sigma)}. Use accountant rdp, or a "
            "target that is less extreme."
        )
    return best[0], best[1], _MAX_CERTIFICATES
