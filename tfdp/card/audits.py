"""What attacks on the released model found; also the content of audit.json beside the card."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tfdp.card.fields import Count, Digest, Probability, Section, Text
from tfdp.findings import Finding

Interval = tuple[float, float]
Attacked = Literal["private", "non_private"]
"""The released model, or its twin that was trained on the same data without privacy."""


class RatePoint(Section):
    false_positive_rate: Probability
    true_positive_rate: Probability
    interval: Interval | None = None
    """Of the true positive rate."""


class Attack(Section):
    """9. One attack."""

    name: Text
    model: Attacked = "private"
    threat_model: Text | None = None
    group: Text | None = None
    """Members against non-members of this group alone; null: of all."""
    members: Count | None = None
    non_members: Count | None = None
    auc: Probability | None = None
    auc_interval: Interval | None = None
    advantage: Annotated[float, Field(ge=-1, le=1)] | None = None
    advantage_by_chance: Probability | None = None
    """What the advantage stays below, at the confidence of the intervals, when the attack learns nothing."""
    tpr_at_fpr: tuple[RatePoint, ...] = ()
    roc: tuple[tuple[Probability, Probability], ...] = ()
    """False and true positive rates, to be drawn."""
    epsilon_lower_bound: Annotated[float, Field(ge=0)] | None = None
    confidence: Probability | None = None


class Exposure(Section):
    """How well the secrets of inserted canaries are known to the model, in bits (Carlini et al. 2019)."""

    model: Attacked
    pattern: Text
    """Every # is a random digit."""
    canaries: Count
    """Those that the coins let into the training data."""
    repetitions: Count
    candidates: Count
    """Other secrets that each is ranked among."""
    mean: Annotated[float, Field(ge=0)]
    median: Annotated[float, Field(ge=0)]
    highest: Annotated[float, Field(ge=0)]
    mean_by_chance: Annotated[float, Field(ge=0)]
    """The mean of secrets that a model knows nothing of."""


class Extracted(Section):
    """How many documents the model completes when it is given their beginning."""

    model: Attacked
    documents: Literal["members", "non_members"]
    """Documents that were trained on, or the control."""
    prompts: Count
    exact: Count
    approximate: Count
    """Within the tolerance; the exact ones among them."""
    interval: Interval | None
    """Of the share of approximate matches, at 95%."""


class Gradients(Section):
    """How near the gradients of a private step are to materialised ones, on the released model (`tfdp.verify`).

    Deviations are relative, the largest of all units or variables; null: not measured, or not finite.
    """

    units: Count
    reference: Text
    """What a unit's own gradient was taken from."""
    allowed: Annotated[float, Field(ge=0)]
    """What rounding explains."""
    norms: Annotated[float, Field(ge=0)] | None
    sums: Annotated[float, Field(ge=0)] | None
    losses_of_others: Annotated[float, Field(ge=0)] | None
    """When one unit is replaced."""
    gradients_of_others: Annotated[float, Field(ge=0)] | None
    findings: tuple[Finding, ...] = ()

    @property
    def deviations(self) -> dict[str, float | None]:
        """By what is compared."""
        return {
            "norms of units": self.norms,
            "clipped sum": self.sums,
            "losses of the others, one unit replaced": self.losses_of_others,
            "gradients of the others, one unit replaced": self.gradients_of_others,
        }


class Skipped(Section):
    """A part of the audit that was not done, and why."""

    part: Text
    reason: Text


class Audit(Section):
    """9. What `tfdp audit` found."""

    schema_version: Literal["1.0"]
    created: str
    parameters_digest: Digest
    """Of the weights that were attacked."""
    seconds: Annotated[float, Field(ge=0)]
    gradients: Gradients | None = None
    attacks: tuple[Attack, ...] = ()
    exposures: tuple[Exposure, ...] = ()
    extractions: tuple[Extracted, ...] = ()
    prefix_tokens: Count
    continuation_tokens: Count
    """Of an extraction, at most."""
    skipped: tuple[Skipped, ...] = ()
