"""What the sampling section comes to in numbers: probability, expected batch size, steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tfdp.spec.privacy_spec import PrivacySpec


@dataclass(frozen=True)
class Schedule:
    """Sampling in numbers.

    Attributes:
        population: how many items the sampler chooses from: the units, or the records under group privacy.
        sampling_probability: probability q that one item joins a batch.
        expected_batch_size: q * population, the denominator of every update.
        steps: number of noisy updates.
        records_per_unit: sampled items that one privacy unit may own, so k under group privacy, else 1.
    """

    population: int
    sampling_probability: float
    expected_batch_size: float
    steps: int
    records_per_unit: int


def schedule(spec: PrivacySpec) -> Schedule:
    """The schedule of a spec.

    Raises:
        ValueError: the sampling section says too little or too much; `tfdp.review` tells what, as PS014 or PS005.
    """
    sampling, unit = spec.sampling, spec.claim.privacy_unit
    records_per_unit = (unit.max_records_per_unit or 1) if unit.method == "group_privacy" else 1
    population = spec.data.num_units
    if records_per_unit > 1:
        if spec.data.num_records is None:
            raise ValueError("group_privacy samples records: expected data.num_records.")
        population = spec.data.num_records

    given = [value for value in (sampling.expected_batch_size, sampling.probability) if value is not None]
    if sampling.scheme == "full_batch":
        probability = Fraction(1)
    elif len(given) != 1:
        raise ValueError("expected either sampling.expected_batch_size or sampling.probability.")
    elif sampling.probability is not None:
        probability = Fraction(sampling.probability)
    else:
        probability = Fraction(given[0]) / population

    if sampling.steps is not None and sampling.epochs is None:
        steps = sampling.steps
    elif sampling.epochs is not None and sampling.steps is None:
        steps = _steps(Fraction(sampling.epochs) / probability)
    else:
        raise ValueError("expected either sampling.steps or sampling.epochs.")
    return Schedule(
        population=population,
        sampling_probability=float(probability),
        expected_batch_size=float(probability * population),
        steps=steps,
        records_per_unit=records_per_unit,
    )


def _steps(exact: Fraction) -> int:
    """Rounds down, except that 29.9999999999 is 30: 3 epochs at probability 0.1 are 30 steps."""
    nearest = round(exact)
    return nearest if abs(exact - nearest) <= Fraction(1, 10**9) * nearest else math.floor(exact)
