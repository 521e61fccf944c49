"""How finely privacy losses are discretised when the caller does not say.

The bound holds at any grid; a fine one is tight, a coarse one is fast. The usual grid is refined for steps whose
privacy loss is hardly larger than a cell, and coarsened where an array would not fit into a few seconds.
"""

from __future__ import annotations

import math

import dp_accounting
from dp_accounting import dp_event

_USUAL_GRID = 1e-4
# Mixtures cost about 1e-4 s a cell, and truncation widens the range: a tenth of the resolution, as in published tables.
_USUAL_GRID_MIXED = 1e-3
_FINEST_EXPONENT, _COARSEST_EXPONENT = -7, 2
_MAX_CELLS_REFINED = 100_000
_MAX_CELLS_ONE_STEP = 600_000
_MAX_CELLS_COMPOSED = 4_000_000
# Privacy losses are cut where exp(-50) of the mass is left: about 10 standard deviations.
_TAIL = 10.0


def default_grid(event: dp_accounting.DpEvent, steps: int, adjacency: str) -> float:
    """Width of a cell of privacy loss for `steps` copies of `event`: a power of ten, 1e-4 for ordinary runs."""
    exponent = round(math.log10(_usual_grid(event)))
    cells_per_deviation = 10 if exponent == -4 else 4
    _, sigma, probability = _shape(event)
    deviation = _loss_deviation(sigma, probability, steps)
    one_step, composed = _loss_ranges(event, steps, adjacency)
    while (
        exponent > _FINEST_EXPONENT
        and deviation < 10.0**exponent * cells_per_deviation
        and one_step < 10.0 ** (exponent - 1) * _MAX_CELLS_REFINED
    ):
        exponent -= 1
    while exponent < _COARSEST_EXPONENT and (
        one_step > _MAX_CELLS_ONE_STEP * 10.0**exponent or composed > _MAX_CELLS_COMPOSED * 10.0**exponent
    ):
        exponent += 1
    return float(f"1e{exponent}")


def search_grid(event: dp_accounting.DpEvent, steps: int, adjacency: str) -> float:
    """A grid for trial values: ten times coarser where that saves time."""
    fine = default_grid(event, steps, adjacency)
    one_step, composed = _loss_ranges(event, steps, adjacency)
    cheap = not isinstance(event, dp_event.MixtureOfGaussiansDpEvent) and max(one_step * 10, composed) < 1e5 * fine
    return fine if cheap else 10 * fine


def _usual_grid(event: dp_accounting.DpEvent) -> float:
    mixed = isinstance(event, dp_event.MixtureOfGaussiansDpEvent | dp_event.TruncatedSubsampledGaussianDpEvent)
    return _USUAL_GRID_MIXED if mixed else _USUAL_GRID


def _shape(event: dp_accounting.DpEvent) -> tuple[float, float, float]:
    """(largest sensitivity in units of the clip norm, sigma, chance to take part) of one step."""
    if isinstance(event, dp_event.PoissonSampledDpEvent) and isinstance(event.event, dp_event.GaussianDpEvent):
        return 1.0, event.event.noise_multiplier, event.sampling_probability
    if isinstance(event, dp_event.MixtureOfGaussiansDpEvent):
        return max(event.sensitivities), event.standard_deviation, min(1.0, 1.0 - event.sampling_probs[0])
    if isinstance(event, dp_event.TruncatedSubsampledGaussianDpEvent):
        # A unit that joins a full batch pushes another one out.
        return 2.0, event.noise_multiplier, event.sampling_probability
    if isinstance(event, dp_event.GaussianDpEvent):
        return 1.0, event.noise_multiplier, 1.0
    return 1.0, 1.0, 1.0


def _loss_deviation(sigma: float, probability: float, steps: int) -> float:
    """Standard deviation of the privacy loss of one step (of the whole run without sampling, which is one Gaussian)."""
    if probability == 1.0:
        return math.sqrt(steps) / sigma
    return probability * math.sqrt(math.expm1(min(sigma**-2, 700.0)))


def _log_mixed(probability: float, exponent: float) -> float:
    """log(1 - q + q * exp(exponent)) without overflow."""
    if exponent > 500.0:
        return exponent + math.log(probability)
    return math.log1p(probability * math.expm1(exponent))


def _loss_ranges(event: dp_accounting.DpEvent, steps: int, adjacency: str) -> tuple[float, float]:
    """Estimated widths of the privacy loss: of the distribution that is built, and of the composed one."""
    sensitivity, sigma, probability = _shape(event)
    sides = 1.0
    if adjacency == "replace_one":
        sensitivity, sides = 2 * sensitivity, 2.0
    sigma = sigma / sensitivity
    if probability == 1.0 and isinstance(event, dp_event.GaussianDpEvent):
        shift = math.sqrt(steps) / sigma
        width = shift * shift + 2 * _TAIL * shift
        return width, width
    one_step = sides * max(0.0, _log_mixed(probability, 0.5 / sigma**2 + _TAIL / sigma))
    # Two estimates of the composed width, each too large somewhere: by how often a unit joins, and by the variance.
    expected = steps * probability
    joined = min(float(steps), expected + _TAIL * math.sqrt(expected) + _TAIL)
    if isinstance(event, dp_event.MixtureOfGaussiansDpEvent):
        # A unit rarely joins with all of its records at once.
        squares = sum(w * c * c for w, c in zip(event.sampling_probs, event.sensitivities, strict=True)) / probability
        sigma *= sensitivity / math.sqrt(squares)
    typical = max(0.0, _log_mixed(probability, 0.5 / sigma**2))
    by_joining = joined * typical + _TAIL * math.sqrt(joined) / sigma + one_step
    deviation = probability * math.sqrt(math.expm1(min(sigma**-2, 700.0)))
    by_variance = 0.5 * steps * deviation**2 + _TAIL * math.sqrt(steps) * deviation + one_step
    return one_step, 2 * min(by_joining, by_variance)
