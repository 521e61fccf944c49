"""How little and how much noise the library can account, and what the mechanisms beyond that cost."""

from __future__ import annotations

import dp_accounting
from dp_accounting import dp_event

# Below a ten-thousandth of the clip norm the privacy loss is in the tens of millions, and the library breaks down.
_NO_NOISE = 1e-4
# Above this the library's bisections, which end at an interval of 1e-7, would need more digits than a float has.
_MOST_NOISE = 1e7


def is_free(event: dp_accounting.DpEvent) -> bool:
    """Whether nothing is released at all."""
    return isinstance(event, dp_event.NoOpDpEvent)


def is_unbounded(event: dp_accounting.DpEvent) -> bool:
    """Whether the event releases something without any noise, or with so little that no bound is worth stating."""
    if isinstance(event, dp_event.PoissonSampledDpEvent):
        return is_unbounded(event.event)
    if isinstance(event, dp_event.MixtureOfGaussiansDpEvent):
        return event.standard_deviation < _NO_NOISE * max(event.sensitivities)
    if isinstance(event, dp_event.GaussianDpEvent | dp_event.TruncatedSubsampledGaussianDpEvent):
        return event.noise_multiplier < _NO_NOISE
    return isinstance(event, dp_event.NonPrivateDpEvent)


def countable(event: dp_accounting.DpEvent) -> dp_accounting.DpEvent:
    """The event, with no more noise than is counted: noise beyond that is added to its output, and costs nothing."""
    if isinstance(event, dp_event.PoissonSampledDpEvent):
        return dp_event.PoissonSampledDpEvent(event.sampling_probability, countable(event.event))
    if isinstance(event, dp_event.MixtureOfGaussiansDpEvent):
        deviation = min(event.standard_deviation, _MOST_NOISE)
        return dp_event.MixtureOfGaussiansDpEvent(deviation, event.sensitivities, event.sampling_probs)
    if isinstance(event, dp_event.GaussianDpEvent):
        return dp_event.GaussianDpEvent(min(event.noise_multiplier, _MOST_NOISE))
    if isinstance(event, dp_event.TruncatedSubsampledGaussianDpEvent):
        return dp_event.TruncatedSubsampledGaussianDpEvent(
            event.dataset_size,
            event.sampling_probability,
            event.truncated_batch_size,
            min(event.noise_multiplier, _MOST_NOISE),
        )
    return event
