"""Epsilon and delta of `steps` copies of one event, by dp-accounting, and the combinations that are refused.

| accountant | answered by                               | refuses                                               |
|------------|-------------------------------------------|-------------------------------------------------------|
| pld        | privacy loss distributions, pessimistic   | what dp-accounting's `supports` refuses               |
| prv        | the PLD accountant: same numerical family | the same                                              |
| rdp        | Renyi divergences, default orders         | also replace_one, whose doubled sensitivity it misses |

Every value is an upper bound on the true one: the grid rounds privacy losses pessimistically, and the rounding error of
the floating-point arithmetic itself is charged against delta (pld) or the divergences (rdp).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import dp_accounting
import numpy as np
from dp_accounting import dp_event
from dp_accounting.pld import pld_privacy_accountant
from dp_accounting.pld import privacy_loss_distribution as pld
from dp_accounting.rdp import rdp_privacy_accountant

from tfdp.accounting.grids import default_grid
from tfdp.accounting.limits import countable, is_free, is_unbounded
from tfdp.accounting.mixtures import from_mixture_gaussian_mechanism
from tfdp.errors import AccountingError

_Answer = TypeVar("_Answer")

ACCOUNTANTS = ("pld", "rdp", "prv")
ADJACENCIES = ("add_or_remove_one", "replace_one", "zero_out")

_RELATIONS = {
    "add_or_remove_one": dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
    "replace_one": dp_accounting.NeighboringRelation.REPLACE_ONE,
    "zero_out": dp_accounting.NeighboringRelation.REPLACE_SPECIAL,
}

# Raising a Fourier transform to the power `steps` multiplies its rounding error by `steps`. Against the closed form of
# the Gaussian mechanism the error in delta was at most 4e-17 per step; this charges five times that.
_DELTA_ERROR_PER_STEP = 2.2e-16
# The mass that self-composition cuts off, and moves to infinity, is 1e-15.
_DELTA_ERROR_BASE = 2e-15
# Series for fractional Renyi orders stop at terms of exp(-30), about 1e-13.
_RENYI_ERROR = 1e-12
# More steps than anybody trains for are composed in stages.
_MOST_AT_ONCE = 200_000
_STAGE = 1000


def library_version() -> str:
    """Version of dp-accounting, which every epsilon should be quoted with."""
    return importlib.metadata.version("dp-accounting")


def describe_accountant(accountant: str) -> str:
    """The accountant in words, for people who read the number."""
    _check_names(accountant, "add_or_remove_one")
    return {
        "pld": "privacy loss distributions (pessimistic grid)",
        "prv": "privacy loss distributions (prv is the same numerical family and is answered by pld)",
        "rdp": "Renyi differential privacy (default orders)",
    }[accountant]


def supports(event: dp_accounting.DpEvent, accountant: str, adjacency: str) -> bool:
    """Whether the accountant gives a valid bound for this event under this adjacency."""
    return unsupported_reason(event, accountant, adjacency) is None


def unsupported_reason(event: dp_accounting.DpEvent, accountant: str, adjacency: str) -> str | None:
    """Why `supports` says no, as a sentence with a remedy; None when it says yes."""
    _check_names(accountant, adjacency)
    if accountant == "rdp" and adjacency == "replace_one":
        return (
            "the rdp accountant ignores that replacing one unit moves the sum by up to twice the clip norm, so its "
            "epsilon would be too small; use accountant pld for replace_one"
        )
    if accountant == "rdp":
        asked: dp_accounting.PrivacyAccountant = rdp_privacy_accountant.RdpAccountant(
            neighboring_relation=_RELATIONS[adjacency]
        )
    else:
        asked = pld_privacy_accountant.PLDAccountant(_RELATIONS[adjacency])
    if asked.supports(event):
        return None
    name = type(event).__name__
    if isinstance(event, dp_event.MixtureOfGaussiansDpEvent):
        name = "group privacy for several records of a unit"
    remedy = "use accountant pld" if accountant == "rdp" else "use adjacency add_or_remove_one or zero_out"
    return f"the {accountant} accountant of dp-accounting does not model {name} under {adjacency}; {remedy}"


def epsilon(
    event: dp_accounting.DpEvent,
    steps: int,
    *,
    delta: float,
    accountant: str = "pld",
    adjacency: str,
    grid: float | None = None,
) -> float:
    """Certified epsilon of `steps` adaptive repetitions of `event`: an upper bound, infinite when there is none.

    Args:
        event: one step, from `step_event`.
        steps: number of optimizer steps (updates, not microbatches). Zero costs nothing.
        delta: 0 < delta < 1.
        accountant: one of `ACCOUNTANTS`.
        adjacency: one of `ADJACENCIES`.
        grid: width of the cells of privacy loss (pld); None for `default_grid`.

    Raises:
        AccountingError: the combination is not supported, or delta is below what double precision can certify.
    """
    return epsilon_curve(event, [steps], delta=delta, accountant=accountant, adjacency=adjacency, grid=grid)[0]


def epsilon_curve(
    event: dp_accounting.DpEvent,
    steps_list: Sequence[int],
    *,
    delta: float,
    accountant: str = "pld",
    adjacency: str,
    grid: float | None = None,
) -> list[float]:
    """`epsilon` at many step counts; the single step is analysed once and then composed with itself."""
    _check_delta(delta)
    steps_list = [_check_steps(steps) for steps in steps_list]
    _require_support(event, accountant, adjacency)
    event = countable(event)
    if is_free(event) or not any(steps_list):
        return [0.0 for _ in steps_list]
    if is_unbounded(event):
        return [math.inf if steps else 0.0 for steps in steps_list]
    if accountant == "rdp":
        divergences = _renyi_divergences(event, adjacency)
        return [divergences.epsilon(steps, delta) if steps else 0.0 for steps in steps_list]
    if grid is None:
        grid = default_grid(event, max(steps_list), adjacency)
    return [_pld_epsilon(event, steps, delta, adjacency, grid) if steps else 0.0 for steps in steps_list]


def delta(
    event: dp_accounting.DpEvent,
    steps: int,
    *,
    epsilon: float,
    accountant: str = "pld",
    adjacency: str,
    grid: float | None = None,
) -> float:
    """Certified delta of `steps` repetitions of `event` at this epsilon; arguments as for `epsilon`."""
    return delta_curve(event, steps, epsilons=[epsilon], accountant=accountant, adjacency=adjacency, grid=grid)[0]


def delta_curve(
    event: dp_accounting.DpEvent,
    steps: int,
    *,
    epsilons: Sequence[float],
    accountant: str = "pld",
    adjacency: str,
    grid: float | None = None,
) -> list[float]:
    """`delta` at many epsilons; the steps are composed once."""
    wrong = [value for value in epsilons if not (math.isfinite(value) and value >= 0)]
    if wrong:
        raise AccountingError(f"Expected a finite epsilon of at least 0. Received: epsilon={wrong[0]}.")
    steps = _check_steps(steps)
    _require_support(event, accountant, adjacency)
    event = countable(event)
    if steps == 0 or is_free(event):
        return [0.0 for _ in epsilons]
    if is_unbounded(event):
        return [1.0 for _ in epsilons]
    if accountant == "rdp":
        divergences = _renyi_divergences(event, adjacency)
        return [divergences.delta(steps, value) for value in epsilons]
    if grid is None:
        grid = default_grid(event, steps, adjacency)
    composed = _composed_pld(event, steps, adjacency, grid)
    values = _guarded(lambda: [composed.get_delta_for_epsilon(float(value)) for value in epsilons], event, grid)
    return [min(1.0, max(0.0, value) + _delta_error(steps)) for value in values]


def unamplified_epsilon(
    *,
    noise_multiplier: float,
    sampling_probability: float,
    steps: int,
    delta: float,
    adjacency: str,
    accountant: str = "pld",
    records_per_unit: int = 1,
) -> float:
    """Epsilon without the help of sampling: each unit takes part once an epoch and everybody may know when.

    This is what fixed or shuffled batches of the same size cost: the Gaussian mechanism composed ceil(q * steps) times.
    """
    # Rounding error in q * steps must not add an epoch that does not exist.
    participations = max(1, math.ceil(sampling_probability * steps - 1e-9)) if steps else 0
    event = dp_event.GaussianDpEvent(noise_multiplier / records_per_unit)
    return epsilon(event, participations, delta=delta, accountant=accountant, adjacency=adjacency)


def best_renyi_order(
    event: dp_accounting.DpEvent, steps: int, *, delta: float, adjacency: str
) -> tuple[float, bool] | None:
    """The Renyi order that epsilon of the rdp accountant comes from, and whether it is the first or last one tried.

    At the boundary a better order may lie outside: epsilon is valid, but larger than it need be. None where there
    is nothing to choose.
    """
    _check_delta(delta)
    _require_support(event, "rdp", adjacency)
    event = countable(event)
    if is_free(event) or is_unbounded(event) or not _check_steps(steps):
        return None
    return _renyi_divergences(event, adjacency).order(steps, delta)


def _check_names(accountant: str, adjacency: str) -> None:
    if accountant not in ACCOUNTANTS:
        raise AccountingError(
            f"Expected accountant to be one of {', '.join(ACCOUNTANTS)}. Received: accountant={accountant!r}."
        )
    if adjacency not in ADJACENCIES:
        raise AccountingError(
            f"Expected adjacency to be one of {', '.join(ADJACENCIES)}. Received: adjacency={adjacency!r}."
        )


def _check_delta(value: float) -> None:
    if not 0.0 < value < 1.0:
        raise AccountingError(
            f"Expected delta above 0 and below 1, well below 1 / number of units. Received: delta={value}."
        )


def _check_steps(steps: int) -> int:
    if isinstance(steps, bool) or not isinstance(steps, int | np.integer) or steps < 0:
        raise AccountingError(f"Expected steps to be an integer of at least 0. Received: steps={steps!r}.")
    return int(steps)


def _require_support(event: dp_accounting.DpEvent, accountant: str, adjacency: str) -> None:
    reason = unsupported_reason(event, accountant, adjacency)
    if reason is not None:
        raise AccountingError(
            "Expected an accountant that models the sampler under the stated adjacency. "
            f"Received: accountant={accountant!r}, adjacency={adjacency!r}, event={type(event).__name__}: {reason}."
        )


def _delta_error(steps: int) -> float:
    return _DELTA_ERROR_BASE + _DELTA_ERROR_PER_STEP * steps


@functools.lru_cache(maxsize=256)
def _pld_epsilon(event: dp_accounting.DpEvent, steps: int, delta: float, adjacency: str, grid: float) -> float:
    error = _delta_error(steps)
    if delta < 10 * error:
        raise AccountingError(
            f"Expected delta of at least {10 * error:.1e} for {steps} steps: below that, the rounding error of the pld "
            f"accountant is as large as delta itself. Received: delta={delta}. Use accountant rdp, or a larger delta."
        )
    composed = _composed_pld(event, steps, adjacency, grid)
    value = _guarded(lambda: composed.get_epsilon_for_delta(delta - error), event, grid)
    if math.isnan(value):
        raise AccountingError(f"Expected a number. Received: epsilon={value} for {event} at grid {grid}.")
    return max(0.0, value)


def _composed_pld(event: dp_accounting.DpEvent, steps: int, adjacency: str, grid: float) -> pld.PrivacyLossDistribution:
    if not (math.isfinite(grid) and grid > 0):
        raise AccountingError(f"Expected a grid above 0. Received: grid={grid}.")
    if isinstance(event, dp_event.GaussianDpEvent):
        # Without sampling, `steps` Gaussians are one Gaussian: exact, and nothing to convolve.
        event = dp_event.GaussianDpEvent(event.noise_multiplier / math.sqrt(steps))
        return _guarded(lambda: _single_pld(event, adjacency, grid), event, grid)
    return _guarded(lambda: _self_composed(_single_pld(event, adjacency, grid), steps), event, grid)


def _self_composed(single: pld.PrivacyLossDistribution, steps: int, cut: float = 1e-15) -> pld.PrivacyLossDistribution:
    """`steps` copies; a great many in stages, because the library first computes cells ** steps as a whole number.

    Args:
        cut: the most mass that is moved to infinity, over all stages together.
    """
    if steps <= _MOST_AT_ONCE:
        return single.self_compose(steps, cut)
    stages, rest = divmod(steps, _STAGE)
    stage = single.self_compose(_STAGE, cut / (4 * stages))
    composed = _self_composed(stage, stages, cut / 4)
    return composed.compose(single.self_compose(rest, cut / 4), cut / 4) if rest else composed


@functools.lru_cache(maxsize=4)
def _single_pld(event: dp_accounting.DpEvent, adjacency: str, grid: float) -> pld.PrivacyLossDistribution:
    relation = _RELATIONS[adjacency]
    if isinstance(event, dp_event.GaussianDpEvent):
        return pld.from_gaussian_mechanism(
            event.noise_multiplier, value_discretization_interval=grid, neighboring_relation=relation
        )
    if isinstance(event, dp_event.PoissonSampledDpEvent) and isinstance(event.event, dp_event.GaussianDpEvent):
        return pld.from_gaussian_mechanism(
            event.event.noise_multiplier,
            sampling_prob=event.sampling_probability,
            value_discretization_interval=grid,
            neighboring_relation=relation,
        )
    if isinstance(event, dp_event.MixtureOfGaussiansDpEvent):
        return from_mixture_gaussian_mechanism(
            event.standard_deviation, event.sensitivities, event.sampling_probs, grid
        )
    if isinstance(event, dp_event.TruncatedSubsampledGaussianDpEvent):
        return pld.from_truncated_subsampled_gaussian_mechanism(
            event.dataset_size,
            event.sampling_probability,
            event.truncated_batch_size,
            event.noise_multiplier,
            value_discretization_interval=grid,
            neighboring_relation=relation,
        )
    raise AccountingError(f"Expected an event made by step_event. Received: {event}.")


def _guarded(compute: Callable[[], _Answer], event: dp_accounting.DpEvent, grid: float | None) -> _Answer:
    """A numerical failure inside the library is an answer that cannot be certified, not a crash."""
    try:
        # A quotient that overflows is infinite, and compares as it should; what is undefined is a failure.
        with np.errstate(over="ignore", divide="raise", invalid="raise"):
            return compute()
    except AccountingError:
        raise
    except (ArithmeticError, ValueError, TypeError, MemoryError, RecursionError) as error:
        accountant, at, other = ("rdp", "", "pld") if grid is None else ("pld", f" at grid {grid}", "rdp")
        raise AccountingError(
            f"Expected the {accountant} accountant to be able to analyse the mechanism. "
            f"Received: {event}{at}: {error}. "
            f"Use parameters that are less extreme, or accountant {other}."
        ) from error


@contextlib.contextmanager
def _without_order_warnings() -> Iterator[None]:
    """An order whose series does not converge counts as infinite, which is sound: nobody has to act on the warning."""
    logger = logging.getLogger("absl")

    def keep(record: logging.LogRecord) -> bool:
        return "Excluding this order" not in record.getMessage()

    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


class _RenyiDivergences:
    """Divergences of one step at the default orders, rounded up."""

    def __init__(self, orders: np.ndarray, per_step: np.ndarray):
        # dp-accounting reads a negative divergence (rounding error at tiny q) as epsilon 0: such orders prove nothing.
        usable = np.isfinite(per_step) & (per_step >= 0)
        self._orders = orders[usable]
        self._per_step = per_step[usable]

    def epsilon(self, steps: int, delta: float) -> float:
        if not self._orders.size:
            return math.inf
        return float(rdp_privacy_accountant.compute_epsilon(self._orders, steps * self._per_step, delta)[0])

    def by_order(self, steps: int) -> dict[float, float]:
        return {float(order): steps * float(value) for order, value in zip(self._orders, self._per_step, strict=True)}

    def order(self, steps: int, delta: float) -> tuple[float, bool] | None:
        if not self._orders.size:
            return None
        best = float(rdp_privacy_accountant.compute_epsilon(self._orders, steps * self._per_step, delta)[1])
        return best, best in (float(self._orders[0]), float(self._orders[-1]))

    def delta(self, steps: int, epsilon: float) -> float:
        if not self._orders.size:
            return 1.0
        return float(rdp_privacy_accountant.compute_delta(self._orders, steps * self._per_step, epsilon)[0])


@functools.lru_cache(maxsize=16)
def _renyi_divergences(event: dp_accounting.DpEvent, adjacency: str) -> _RenyiDivergences:
    accountant = rdp_privacy_accountant.RdpAccountant(neighboring_relation=_RELATIONS[adjacency])
    with _without_order_warnings():
        _guarded(lambda: accountant.compose(event), event, None)
    orders, per_step = accountant.orders, accountant.rdp
    if isinstance(event, dp_event.PoissonSampledDpEvent):
        per_step = per_step + _RENYI_ERROR / (orders - 1)
    return _RenyiDivergences(orders, per_step)
