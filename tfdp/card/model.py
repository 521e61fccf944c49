"""The model card as data: one frozen object, from which the JSON, the Markdown and the HTML are made.

Every number is a real number; an unbounded epsilon is `{"value": null, "unbounded": true}`, so that no reader can
take a string or an infinity for a guarantee. `None` means "not measured" or "not stated", and each has a finding.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue

from tfdp.card.audits import Attack, Audit
from tfdp.card.fields import Bound, Count, Digest, FileName, Probability, Section, Text
from tfdp.findings import Finding


class Claim(Section):
    """1. The claim in one sentence."""

    status: Literal["claimed", "not claimed"]
    """"not claimed" when something that the claim rests on does not hold; the reasons say what."""
    sentence: Text
    reasons: tuple[Text, ...]
    epsilon: Bound
    """Of the executed steps; unbounded when nothing is claimed."""
    delta: Probability
    privacy_unit: str
    adjacency: str
    trust_model: str
    release: str


class UserLevel(Section):
    """What holds for a whole person."""

    possible: bool
    epsilon: Bound | None
    statement: Text


class MembershipBound(Section):
    """The most that any membership-inference attack can reach, whatever it knows."""

    false_positive_rate: Probability
    max_true_positive_rate: Probability


class Guarantee(Section):
    """2. Target, what was realised, and what it means."""

    target_epsilon: float
    realised_epsilon: Bound
    delta: Probability
    delta_times_units: Annotated[float, Field(ge=0)]
    unit_kind: str
    unit_definition: Text
    unit_id_field: Text | None
    unit_method: str
    max_records_per_unit: Count | None
    selection: str | None
    """Which records of a unit stay when it has more."""
    sequence_length: Count | None
    user_level: UserLevel
    membership: tuple[MembershipBound, ...]
    max_membership_advantage: Probability


class StepPoint(Section):
    step: Count
    epsilon: Bound


class DeltaPoint(Section):
    delta: Probability
    epsilon: Bound


class ClipNormPoint(Section):
    step: Count
    clip_norm: Annotated[float, Field(gt=0)]


class AdaptiveClipping(Section):
    """A clip norm that followed a noisy count of units."""

    quantile: Annotated[float, Field(gt=0, lt=1)]
    """Share of the units that was to stay below it."""
    learning_rate: Annotated[float, Field(gt=0)]
    count_noise: Annotated[float, Field(gt=0)]
    """Standard deviation of the noise on the count."""
    gradient_noise_multiplier: Annotated[float, Field(gt=0)]
    """Of the gradients alone; noise_multiplier is that of gradients and count together."""
    count_share: Annotated[float, Field(gt=0, lt=1)]
    """The count's part of 1/noise_multiplier^2, which the gradients have the rest of."""
    first: Annotated[float, Field(gt=0)]
    """Clip norm of the first step."""
    last: Annotated[float, Field(gt=0)]
    smallest: Annotated[float, Field(gt=0)]
    largest: Annotated[float, Field(gt=0)]
    over_steps: tuple[ClipNormPoint, ...]
    """As steps used it: the first, the last, and some between."""


class Accounting(Section):
    """3. What ran, and how it was counted."""

    accountant: str
    accountant_version: str
    adjacency: str
    sampler_assumed: str
    """What the accountant was told."""
    sampler_ran: str
    """What the ledger says drew the batches."""
    num_units: Count
    num_records: Count | None
    """Under group privacy, the public number of records that the probability was computed from."""
    sampling_probability: Probability
    expected_batch_size: Annotated[float, Field(gt=0)]
    """The public denominator of every update."""
    truncated_batch_size: Count | None
    records_per_unit: Count
    """The most records that are averaged, and clipped, as one unit."""
    group_size: Count
    """The most records of one unit that are clipped singly, and that epsilon covers all at once."""
    noise_multiplier: Annotated[float, Field(ge=0)]
    clip_norm: Annotated[float, Field(gt=0)]
    noise_stddev: Annotated[float, Field(ge=0)]
    layer_clip_norms: dict[str, Annotated[float, Field(gt=0)]] | None = None
    """Where each layer, or group of variables, was clipped on its own; clip_norm is the root of the sum of squares."""
    adaptive_clipping: AdaptiveClipping | None = None
    """Where the clip norm followed a quantile; clip_norm and noise_stddev are then those of the first step."""
    steps_planned: Count
    steps_executed: Count
    torn_last_line: bool
    """A crash cut the last line of the ledger; it counts as a step."""
    epsilon_with_amplification: Bound
    epsilon_without_amplification: Bound
    """As if every unit were in every batch, which needs nothing of the sampler."""
    epsilon_of_one_record: Bound | None
    """Under group privacy, what one record costs: it protects records, not units."""
    generic_group_epsilon: Bound | None
    """Under group privacy, what follows for a unit from the epsilons of one record alone; for comparison."""
    epsilon_over_steps: tuple[StepPoint, ...]
    epsilon_of_delta: tuple[DeltaPoint, ...]


class DataAccess(Section):
    """4. One way in which private data was, or may have been, looked at."""

    name: Text
    status: Literal["covered", "not covered", "no access", "not stated"]
    note: Text


class Exclusion(Section):
    """5. Something that the guarantee does not speak about."""

    what: Text
    why: Text


DeduplicationScope = Literal["unit", "all"]


class Data(Section):
    """6. The private data, in public facts."""

    source: Text | None
    num_units: Count
    num_records: Count | None
    size_is_public: bool
    deduplication: str
    deduplication_scope: DeduplicationScope | None
    """Among which records duplicates were looked for: those of the same unit, or all. null: not stated."""
    contribution_map: Text


Column = Literal["private", "non_private", "public"]
Direction = Literal["lower", "higher"]


class Metric(Section):
    """7. One metric of the private model beside the one trained without privacy and the public starting point."""

    name: Text
    split: Text | None = None
    private: float | None = None
    interval: tuple[float, float] | None = None
    """Confidence interval of the private value."""
    non_private: float | None = None
    public: float | None = None
    n: Count | None = None
    """Units, or records, that it was measured on."""
    better: Direction | None = None
    not_finite: tuple[Column, ...] = ()
    """Columns that were measured and are not finite numbers."""


class Utility(Section):
    metrics: tuple[Metric, ...]
    training: dict[str, tuple[float | None, ...]] | None
    """Per epoch, as the progress bar showed them: exact values on private data. null: not finite."""


class Group(Section):
    """8. One group; value and n are removed when it is smaller than the minimum."""

    name: Text
    n: Count | None = None
    value: float | None = None
    interval: tuple[float, float] | None = None
    before: float | None = None
    """The same metric before private training."""
    non_private: float | None = None
    """The same metric of the model trained without privacy."""
    gap: float | None = None
    """Value minus the value of the whole."""
    suppressed: bool = False


class Groups(Section):
    field: Text | None
    metric: Text | None
    better: Direction | None
    whole: float | None
    minimum_size: Count | None
    rows: tuple[Group, ...]
    worst: Text | None


class Use(Section):
    """10. Intended use and limits."""

    intended_use: Text | None
    limits: Text | None


class ModelFacts(Section):
    name: Text
    kind: Text | None = None
    parameters: Count | None = None
    trainable_parameters: Count | None = None


class Provenance(Section):
    """11. Where everything came from."""

    model: ModelFacts
    spec_digest: Digest
    plan_digest: Digest
    ledger_digest: Digest
    ledger_file: FileName
    ledger_created: Text
    parameters_digest: Digest
    """Of the weights as the model held them, which the ledger records as every epoch and fit ends."""
    weights_digest: Digest
    weights_file: FileName
    versions: dict[str, Text]
    """When training began."""
    gradients: Text = "not stated"
    """How per-unit gradients were taken."""
    rng: str
    seed: int | None
    hardware: Text | None
    command: Text | None
    timings: dict[Text, float]
    """Seconds."""
    written_by: Text


class OtherRun(Section):
    """A run on the same data, as the data set's ledger had it when the card was written."""

    began: Text
    state: Text
    """"spent", or why its planned steps count: "running", "ledger missing", "ledger changed"."""
    steps: Count
    step_event: dict[str, JsonValue]
    trial: bool = False
    """One of declared trials, which `selections` counts together."""


class Trials(Section):
    """Runs of which only the best was looked at; their number was drawn before the first."""

    mean: Annotated[float, Field(gt=1)]
    shape: Annotated[float, Field(ge=0)] | None
    """Of the distribution of their number: 1 geometric; null: infinite, which is Poisson."""
    steps: Count
    step_event: dict[str, JsonValue]


class Budget(Section):
    """12. What all releases from this data set may spend, before and after this one."""

    dataset_id: Text | None
    epsilon_cap: float | None
    delta_cap: float | None
    spent_before: float | None
    spent_by_this_run: Bound
    spent_after: Bound | None
    other_runs: Text
    others: tuple[OtherRun, ...] | None = None
    """The other runs on the data set's ledger, which compose with this one; null where no ledger is kept."""
    selections: tuple[Trials, ...] = ()
    is_trial: bool = False
    """This run is one of the trials in `selections`."""


WaiverState = Literal["in force", "expired", "without owner", "refused", "not needed"]


class Waiver(Section):
    finding: str
    reason: Text
    owner: Text | None
    expires: str
    state: WaiverState


class Review(Section):
    """13. What the checks say."""

    findings: tuple[Finding, ...]
    waivers: tuple[Waiver, ...]


class Term(Section):
    term: Text
    meaning: Text


class Legal(Section):
    """14. Licence, citation, glossary."""

    licence: Text | None
    citation: Text | None
    glossary: tuple[Term, ...]


class PrivacyCard(Section):
    """A model card whose privacy numbers come from the ledger of what ran."""

    schema_version: Literal["1.0"]
    title: Text
    created: str
    claim: Claim
    guarantee: Guarantee
    accounting: Accounting
    data_accesses: tuple[DataAccess, ...]
    not_covered: tuple[Exclusion, ...]
    data: Data
    utility: Utility
    groups: Groups
    attacks: tuple[Attack, ...]
    """As the owner reported them."""
    audit: Audit | None = None
    """As `tfdp audit` found them."""
    use: Use
    provenance: Provenance
    budget: Budget
    review: Review
    legal: Legal


def plain(card: PrivacyCard) -> dict[str, Any]:
    return card.model_dump(mode="json")


def to_json(card: PrivacyCard) -> str:
    """Canonical JSON: sorted keys, real numbers, one line end."""
    return canonical(plain(card))


def canonical(values: dict[str, Any]) -> str:
    return json.dumps(values, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
