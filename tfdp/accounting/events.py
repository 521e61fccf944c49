"""From a sampling scheme to the `DpEvent` of one optimizer step, and to plain JSON and back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attr
import dp_accounting
from dp_accounting import dp_event
from scipy import stats

from tfdp.errors import AccountingError

SCHEMES = ("poisson", "truncated_poisson", "full_batch")

# The only classes that a stored event may name: reading a ledger must not import whatever it asks for.
_EVENT_TYPES: dict[str, type[dp_event.DpEvent]] = {
    cls.__name__: cls
    for cls in (
        dp_event.NoOpDpEvent,
        dp_event.NonPrivateDpEvent,
        dp_event.GaussianDpEvent,
        dp_event.PoissonSampledDpEvent,
        dp_event.TruncatedSubsampledGaussianDpEvent,
        dp_event.MixtureOfGaussiansDpEvent,
        dp_event.SelfComposedDpEvent,
        dp_event.ComposedDpEvent,
    )
}


def step_event(
    *,
    scheme: str,
    sampling_probability: float,
    noise_multiplier: float,
    num_units: int,
    truncated_batch_size: int | None = None,
    records_per_unit: int = 1,
) -> dp_accounting.DpEvent:
    """The event of one step: sample, sum what was clipped to C, add noise of standard deviation sigma * C.

    | scheme            | k = 1                                     | k > 1 (each record clipped and sampled alone)   |
    |-------------------|-------------------------------------------|-------------------------------------------------|
    | full_batch, q = 1 | Gaussian(sigma)                           | Gaussian(sigma / k)                             |
    | poisson           | PoissonSampled(q, Gaussian(sigma))        | MixtureOfGaussians(sigma, 0..k, Binomial(k, q)) |
    | truncated_poisson | TruncatedSubsampledGaussian(N, q, B, ...) | refused: nobody models it                       |

    With q = 1 Poisson sampling is the plain Gaussian mechanism. A truncated event covers neighbouring data sets of at
    most `num_units` units: its chance of truncation grows with the size.

    Args:
        scheme: one of `SCHEMES`.
        sampling_probability: q, the chance of one record to join the batch, 0 < q <= 1.
        noise_multiplier: sigma, noise standard deviation over clip norm. Zero gives an event whose epsilon is infinite.
        num_units: N, the number of records that are sampled from.
        truncated_batch_size: B, the largest batch; with scheme truncated_poisson only.
        records_per_unit: k, the most records of one privacy unit (group privacy).

    Raises:
        AccountingError: the arguments do not describe a mechanism that can be accounted.
    """
    _check_arguments(scheme, sampling_probability, noise_multiplier, num_units, truncated_batch_size, records_per_unit)
    if scheme == "truncated_poisson":
        if records_per_unit != 1:
            raise AccountingError(
                "Expected records_per_unit=1 with scheme truncated_poisson. "
                f"Received: records_per_unit={records_per_unit}. "
                "Group privacy is modelled for poisson and full_batch: use one of those."
            )
        return dp_event.TruncatedSubsampledGaussianDpEvent(
            dataset_size=int(num_units),
            sampling_probability=float(sampling_probability),
            truncated_batch_size=int(truncated_batch_size or 0),
            noise_multiplier=float(noise_multiplier),
        )
    if sampling_probability == 1.0:
        return dp_event.GaussianDpEvent(float(noise_multiplier) / records_per_unit)
    if records_per_unit == 1:
        return dp_event.PoissonSampledDpEvent(
            float(sampling_probability), dp_event.GaussianDpEvent(float(noise_multiplier))
        )
    counts = range(records_per_unit + 1)
    weights = stats.binom.pmf(counts, records_per_unit, sampling_probability)
    return dp_event.MixtureOfGaussiansDpEvent(
        standard_deviation=float(noise_multiplier),
        sensitivities=tuple(float(count) for count in counts),
        sampling_probs=tuple(float(weight) for weight in weights),
    )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_arguments(
    scheme: str,
    sampling_probability: float,
    noise_multiplier: float,
    num_units: int,
    truncated_batch_size: int | None,
    records_per_unit: int,
) -> None:
    if scheme == "shuffle":
        raise AccountingError(
            "Expected a scheme in which every unit joins each batch independently. Received: scheme='shuffle'. "
            "Shuffled or fixed batches have no amplification that this package can certify: sample with poisson."
        )
    if scheme not in SCHEMES:
        raise AccountingError(f"Expected scheme to be one of {', '.join(SCHEMES)}. Received: scheme={scheme!r}.")
    if not (0.0 < sampling_probability <= 1.0):
        raise AccountingError(
            "Expected a sampling probability above 0 and at most 1 (expected batch size / number of units). "
            f"Received: sampling_probability={sampling_probability}."
        )
    if scheme == "full_batch" and sampling_probability != 1.0:
        raise AccountingError(
            "Expected sampling_probability=1 with scheme full_batch, which uses every unit in every step. "
            f"Received: sampling_probability={sampling_probability}. Use scheme poisson to sample."
        )
    if not (math.isfinite(noise_multiplier) and noise_multiplier >= 0.0):
        raise AccountingError(
            f"Expected a finite noise multiplier of at least 0. Received: noise_multiplier={noise_multiplier}."
        )
    if not _is_int(num_units) or num_units < 1:
        raise AccountingError(f"Expected num_units to be a positive integer. Received: num_units={num_units!r}.")
    if not _is_int(records_per_unit) or records_per_unit < 1:
        raise AccountingError(
            f"Expected records_per_unit to be a positive integer. Received: records_per_unit={records_per_unit!r}."
        )
    if scheme == "truncated_poisson":
        if not _is_int(truncated_batch_size) or truncated_batch_size < 1:  # type: ignore[operator]
            raise AccountingError(
                "Expected truncated_batch_size to be a positive integer with scheme truncated_poisson. "
                f"Received: truncated_batch_size={truncated_batch_size!r}."
            )
    elif truncated_batch_size is not None:
        raise AccountingError(
            f"Expected no truncated_batch_size with scheme {scheme}. "
            f"Received: truncated_batch_size={truncated_batch_size!r}. Use scheme truncated_poisson, or leave it out."
        )


def event_to_dict(event: dp_accounting.DpEvent) -> dict[str, Any]:
    """The event as plain JSON: its class name under "type", then its fields by name."""
    name = type(event).__name__
    if name not in _EVENT_TYPES:
        raise AccountingError(
            f"Expected an event of one of these types: {', '.join(sorted(_EVENT_TYPES))}. Received: {name}."
        )
    return {
        "type": name,
        **{field.name: _to_plain(getattr(event, field.name)) for field in attr.fields(type(event))},
    }


def _to_plain(value: Any) -> Any:
    if isinstance(value, dp_event.DpEvent):
        return event_to_dict(value)
    if isinstance(value, list | tuple):
        return [_to_plain(item) for item in value]
    return value


def event_from_dict(data: Mapping[str, Any]) -> dp_accounting.DpEvent:
    """The inverse of `event_to_dict`.

    Raises:
        AccountingError: the mapping names an unknown type, or its fields are not those of the type.
    """
    name = data.get("type") if isinstance(data, Mapping) else None
    cls = _EVENT_TYPES.get(name) if isinstance(name, str) else None
    if cls is None:
        raise AccountingError(
            f"Expected an event with a 'type' of {', '.join(sorted(_EVENT_TYPES))}. Received: {data!r}."
        )
    names = {field.name for field in attr.fields(cls)}
    received = set(data) - {"type"}
    if names != received:
        raise AccountingError(f"Expected {name} with the fields {sorted(names)}. Received: {sorted(received)}.")
    return cls(**{key: _from_plain(data[key]) for key in names})


def _from_plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return event_from_dict(value)
    if isinstance(value, list | tuple):
        return tuple(_from_plain(item) for item in value)
    return value
