"""What `tfdp account` and `tfdp calibrate` are asked about: a run, from a spec or from flags."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from tfdp.spec import PrivacySpec


class Accountant(enum.StrEnum):
    """Who computes epsilon."""

    PLD = "pld"
    RDP = "rdp"
    PRV = "prv"


class Adjacency(enum.StrEnum):
    """How two neighbouring data sets differ."""

    ADD_OR_REMOVE_ONE = "add_or_remove_one"
    REPLACE_ONE = "replace_one"
    ZERO_OUT = "zero_out"


class Scheme(enum.StrEnum):
    """How batches are drawn."""

    POISSON = "poisson"
    TRUNCATED_POISSON = "truncated_poisson"
    FULL_BATCH = "full_batch"


@dataclass(frozen=True)
class Run:
    """What is accounted, from a spec or from flags."""

    scheme: str
    sampling_probability: float
    num_units: int
    steps: int
    accountant: str
    adjacency: str
    truncated_batch_size: int | None = None
    records_per_unit: int = 1
    noise_multiplier: float | None = None
    epsilon: float | None = None
    delta: float | None = None
    unit: str = "one unit"
    spec_digest: str | None = None

    @property
    def sampler(self) -> dict[str, Any]:
        return {
            "scheme": self.scheme,
            "sampling_probability": self.sampling_probability,
            "num_units": self.num_units,
            "truncated_batch_size": self.truncated_batch_size,
            "records_per_unit": self.records_per_unit,
        }


def from_spec(path: str) -> Run:
    from tfdp.errors import PlanError
    from tfdp.findings import errors
    from tfdp.review import review
    from tfdp.spec import PrivacySpec

    spec = PrivacySpec.from_file(path)
    # A claim that is too small is what these commands are asked about; anything else makes the number meaningless.
    blocking = [finding for finding in errors(review(spec)) if finding.id not in ("PS006", "PS020")]
    if blocking:
        lines = "\n  ".join(str(finding) for finding in blocking)
        raise PlanError(f"Expected a spec that can be accounted. Received:\n  {lines}", blocking)
    schedule = spec.schedule
    return Run(
        scheme=spec.sampling.scheme,
        sampling_probability=schedule.sampling_probability,
        num_units=schedule.population,
        steps=schedule.steps,
        accountant=spec.accountant.name,
        adjacency=spec.claim.adjacency,
        truncated_batch_size=spec.sampling.truncated_batch_size,
        records_per_unit=schedule.records_per_unit,
        noise_multiplier=spec.mechanism.noise_multiplier,
        epsilon=spec.claim.epsilon,
        delta=spec.claim.delta,
        unit=_unit(spec),
        spec_digest=spec.digest,
    )


def _unit(spec: PrivacySpec) -> str:
    unit = spec.claim.privacy_unit
    k = unit.max_records_per_unit or 1
    if k == 1:
        return f"one {unit.kind}"
    how = "group privacy" if unit.method == "group_privacy" else "clipped together"
    return f"one {unit.kind}, up to {k} records ({how})"


def from_flags(
    required: Mapping[str, Any],
    batch_size: float | None,
    accountant: Accountant,
    adjacency: Adjacency,
    scheme: Scheme,
    truncated_batch_size: int | None,
    records_per_unit: int,
    epsilon: float | None,
    delta: float | None,
) -> Run:
    from tfdp.spec.numbers import shown

    missing = [flag for flag, value in required.items() if value is None]
    if batch_size is None and scheme is not Scheme.FULL_BATCH:
        missing.append("--batch-size")
    if scheme is Scheme.TRUNCATED_POISSON and truncated_batch_size is None:
        missing.append("--truncated-batch-size")
    if missing:
        raise typer.BadParameter(f"Expected a spec, or the flags of a run. Missing: {', '.join(missing)}.")
    if scheme is not Scheme.TRUNCATED_POISSON and truncated_batch_size is not None:
        raise typer.BadParameter("Expected --truncated-batch-size with --scheme truncated_poisson only.")
    num_units = required["--num-units"]
    size = float(num_units) if batch_size is None else batch_size
    if not 0 < size <= num_units:
        raise typer.BadParameter(
            f"Expected --batch-size above 0 and at most --num-units {num_units}. Received: {shown(size)}."
        )
    if scheme is Scheme.FULL_BATCH and size != num_units:
        raise typer.BadParameter(
            f"Expected no --batch-size but {num_units} with --scheme full_batch. Received: {shown(size)}."
        )
    sigma = required.get("--noise-multiplier")
    if sigma is not None and not (math.isfinite(sigma) and sigma >= 0):
        raise typer.BadParameter(f"Expected a finite --noise-multiplier of at least 0. Received: {sigma}.")
    if epsilon is not None and not (math.isfinite(epsilon) and epsilon > 0):
        raise typer.BadParameter(f"Expected a finite --epsilon above 0. Received: {epsilon}.")
    if delta is not None and not 0 < delta < 1:
        raise typer.BadParameter(f"Expected --delta above 0 and below 1. Received: {delta}.")
    return Run(
        scheme=scheme.value,
        sampling_probability=size / num_units,
        num_units=num_units,
        steps=required["--steps"],
        accountant=accountant.value,
        adjacency=adjacency.value,
        truncated_batch_size=truncated_batch_size,
        records_per_unit=records_per_unit,
        noise_multiplier=sigma,
        epsilon=epsilon,
        delta=delta,
        unit="one unit" if records_per_unit == 1 else f"one unit, up to {records_per_unit} records (group privacy)",
    )
