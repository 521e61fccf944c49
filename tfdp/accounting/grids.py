"""How finely privacy losses are discretised when the caller does not say.

The bound holds at any grid; a fine one is tight, a coarse one is fast. The usual grid is refined for steps whose
privacy loss is hardly larger than a cell, and coarsened where an array would not fit into a few seconds.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import dp_accounting
from dp_accounting import dp_event

_USUAL_GRID = 1e-4
# Truncation widens the range and mixtures are slow to build: a tenth of the resolution, as in published tables.
_USUAL_GRID_MIXED = 1e-3
_FINEST_GRID = 1e-7
_COARSENING = (2.0, 2.5, 2.0)  # 1, 2, 5, 10
_MAX_CELLS_REFINED = 100_000
_MAX_CELLS_ONE_STEP = 600_000
_MAX_CELLS_MIXTURE = 25_000  # about 1e-4 s a cell
_MAX_CELLS_COMPOSED = 4_000_000
# dp-accounting cuts privacy losses where exp(-50) of the mass is left, 10 standard deviations of a Gaussian.
_LOG_TAIL = 50.0
_TAIL = 10.0


def default_grid(event: dp_accounting.DpEvent, steps: int, adjacency: str) -> float:
    """Width of a cell of privacy loss for `steps` copies of `event`: 1e-4 for ordinary training runs."""
    mixture = isinstance(event, dp_event.MixtureOfGaussiansDpEvent)
    mixed = mixture or isinstance(event, dp_event.TruncatedSubsampledGaussianDpEvent)
    grid, cells_per_deviation = (_USUAL_GRID_MIXED, 4) if mixed else (_USUAL_GRID, 10)
    shape = _shape(event, adjacency)
    one_step, composed = _loss_ranges(shape, steps)
    deviation = _loss_deviation(_shape(event, "zero_out"), steps)
    while (
        grid > 1.5 * _FINEST_GRID
        and deviation < grid * cells_per_deviation
        and one_step < 0.1 * grid * (_MAX_CELLS_MIXTURE if mixture else _MAX_CELLS_REFINED)
    ):
        grid = _tidy(grid / 10)
    most = _MAX_CELLS_MIXTURE if mixture else _MAX_CELLS_ONE_STEP
    for factor in itertools.cycle(_COARSENING):
        if one_step <= most * grid and composed <= _MAX_CELLS_COMPOSED * grid:
            return grid
        grid = _tidy(grid * factor)
    raise AssertionError("unreachable")


def search_grid(event: dp_accounting.DpEvent, steps: int, adjacency: str) -> float:
    """A grid for trial values: ten times coarser where that saves time."""
    fine = default_grid(event, steps, adjacency)
    one_step, composed = _loss_ranges(_shape(event, adjacency), steps)
    cheap = not isinstance(event, dp_event.MixtureOfGaussiansDpEvent) and max(one_step * 10, composed) < 1e5 * fine
    return fine if cheap else _tidy(10 * fine)


def _tidy(grid: float) -> float:
    """The float that the decimal digits name, so that a grid prints as 0.001."""
    return float(f"{grid:.3g}")


@dataclass(frozen=True)
class _Shape:
    """One step as a mixture: with probability w the sum moves by c standard deviations of the noise.

    Attributes:
        moves: pairs (c, w) with c > 0.
        sides: 2 when both neighbours may move the sum, else 1.
        sampled: whether units join by chance; if not, all steps together are one Gaussian.
    """

    moves: tuple[tuple[float, float], ...]
    sides: int
    sampled: bool

    @property
    def joining(self) -> float:
        return min(1.0, sum(weight for _, weight in self.moves))


def _shape(event: dp_accounting.DpEvent, adjacency: str) -> _Shape:
    moves: tuple[tuple[float, float], ...]
    sampled = True
    if isinstance(event, dp_event.PoissonSampledDpEvent) and isinstance(event.event, dp_event.GaussianDpEvent):
        moves = ((1 / event.event.noise_multiplier, event.sampling_probability),)
    elif isinstance(event, dp_event.TruncatedSubsampledGaussianDpEvent):
        # A unit that joins a full batch pushes another one out: that moves the sum twice.
        moves = ((2 / event.noise_multiplier, event.sampling_probability),)
    elif isinstance(event, dp_event.MixtureOfGaussiansDpEvent):
        pairs = zip(event.sensitivities, event.sampling_probs, strict=True)
        moves = tuple((c / event.standard_deviation, weight) for c, weight in pairs if c > 0 and weight > 0)
    elif isinstance(event, dp_event.GaussianDpEvent):
        moves, sampled = ((1 / event.noise_multiplier, 1.0),), False
    else:
        moves = ((1.0, 1.0),)
    if adjacency != "replace_one":
        return _Shape(moves, 1, sampled)
    return _Shape(tuple((2 * c, weight) for c, weight in moves), 2, sampled)


def _loss_deviation(shape: _Shape, steps: int) -> float:
    """Standard deviation of the privacy loss of one step (of the whole run without sampling, which is one Gaussian)."""
    if not shape.sampled:
        return math.sqrt(steps) * shape.moves[0][0]
    # The chi-square distance of the mixture from the noise, crossing each move with itself only.
    return math.sqrt(sum(weight**2 * math.expm1(min(c * c, 700.0)) for c, weight in shape.moves))


def _loss(shape: _Shape, position: float) -> float:
    """log(1 - q + sum of w exp(c x - c^2 / 2)): the privacy loss of an outcome x standard deviations above the mean."""
    logarithms = [math.log(weight) + c * position - c * c / 2 for c, weight in shape.moves]
    if shape.joining < 1:
        logarithms.append(math.log1p(-shape.joining))
    top = max(logarithms)
    return top + math.log(sum(math.exp(value - top) for value in logarithms))


def _loss_ranges(shape: _Shape, steps: int) -> tuple[float, float]:
    """Estimated widths of the privacy loss: of the distribution that is built, and of the composed one."""
    if not shape.sampled:
        shift = math.sqrt(steps) * shape.moves[0][0]
        width = shift * shift + 2 * _TAIL * shift
        return width, width
    highest = max(c + math.sqrt(max(0.0, 2 * (_LOG_TAIL + math.log(weight)))) for c, weight in shape.moves)
    one_step = shape.sides * max(0.0, _loss(shape, highest))
    # Two estimates of the composed width, each too large somewhere: by how often a unit joins, and by the variance.
    expected = steps * shape.joining
    joined = min(float(steps), expected + _TAIL * math.sqrt(expected) + _TAIL)
    # A unit of several records rarely joins with all of them at once.
    move = math.sqrt(sum(weight * c * c for c, weight in shape.moves) / shape.joining)
    by_joining = joined * max(0.0, _loss(shape, move)) + _TAIL * math.sqrt(joined) * move + one_step
    deviation = _loss_deviation(shape, steps)
    by_variance = 0.5 * steps * deviation**2 + _TAIL * math.sqrt(steps) * deviation + one_step
    return one_step, 2 * min(by_joining, by_variance)
