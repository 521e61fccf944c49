"""The fields of a privacy spec: what each one means, and which values it can hold at all.

A field is constrained here only as far as its own value goes. Everything that takes two fields to see is a rule of
`tfdp.review`. Nothing that defines the claim has a default; where there is one, it is the choice that claims least.
"""

from __future__ import annotations

import datetime
import math
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

# Beyond this a whole number is no longer exact as a float, and every count becomes a float in the accounting.
MAX_COUNT = 2**53

Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
PositiveNumber = Annotated[float, Field(gt=0)]
OpenProbability = Annotated[float, Field(gt=0, lt=1)]
# Written out, because what \s holds differs between the regular expressions of Python, Rust and ECMAScript.
Text = Annotated[str, Field(pattern=r"[^\s\x1c-\x1f\x85\ufeff]")]

# Which of two kinds a value is, a number or something else, tells itself; pydantic puts the name of it into its paths.
NUMBER, FIELDS, WORD = KINDS = "<number>", "<fields>", "<word>"
NUMBER_IN_WORDS = re.compile(r"\s*[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?\s*")


def _kind(value: Any) -> str:
    return FIELDS if isinstance(value, dict | BaseModel) else NUMBER


def _number_or_word(value: Any) -> str:
    return WORD if isinstance(value, str) and not NUMBER_IN_WORDS.fullmatch(value[:200]) else NUMBER


DataAccess = Literal["training", "tuning", "clip_selection", "evaluation"]


class Section(BaseModel):
    """One mapping of the spec: immutable, no unknown fields, no conversion between types, finite numbers."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )


class PrivacyUnit(Section):
    """What one person, document or record is, for the purpose of the claim."""

    kind: Literal["example", "sequence", "document", "user"]
    """What is added or removed between two neighbouring data sets."""
    description: Text
    """The unit in the words of the data set, such as "one answer of one respondent" or "all e-mails of one address"."""
    id_field: Text | None = None
    """Field of a record that names its unit. Required for document and user."""
    max_records_per_unit: Count | None = None
    """The most records one unit contributes (k). Required for document and user."""
    max_tokens_per_unit: Count | None = None
    """With user_wise_dp_sgd, the most tokens that one unit contributes to a step: it gives records as long as they fit,
    up to max_records_per_unit. null: as many as the records have."""
    sequence_length: Count | None = None
    """Tokens in one sequence. Required for kind sequence."""
    method: Literal["native", "group_privacy", "user_wise_dp_sgd"] = "native"
    """How the unit is protected: native (a unit is one record), group_privacy (records are sampled, the accounting
    covers k of them at once) or user_wise_dp_sgd (units are sampled, and one unit's records are clipped together)."""
    selection: (
        Literal["random", "longest", "shortest", "highest_perplexity", "lowest_perplexity", "random_chunk"] | None
    ) = None
    """Which records stay when a unit has more than max_records_per_unit."""


class Claim(Section):
    """What is promised, to whom, about what."""

    epsilon: PositiveNumber
    """Upper bound of the privacy loss, for the whole of the training."""
    delta: OpenProbability
    """Probability left out of the bound. Below 1/num_units, or one whole unit may be published."""
    privacy_unit: PrivacyUnit
    """Whose presence the claim hides."""
    adjacency: Literal["add_or_remove_one", "replace_one", "zero_out"]
    """How two neighbouring data sets differ in one unit."""
    trust_model: Literal["central", "local", "distributed"] = "central"
    """Who sees raw data. In the central model the trainer does."""
    release: Literal["all_checkpoints", "final_model", "predictions"] = "all_checkpoints"
    """What leaves the trust boundary."""
    data_accesses: Annotated[tuple[DataAccess, ...], Field(min_length=1, strict=False)]
    """The accesses to private data that the claim covers."""


class Data(Section):
    """Public facts about the private data."""

    num_units: Count
    """Number of privacy units (N)."""
    num_records: Count | None = None
    """Number of records; required for group_privacy, where records are what is sampled."""
    size_is_public: bool
    """Whether the size may be known to anyone. The batch size and the denominator are derived from it."""
    deduplication: Literal["none", "exact", "near"] = "none"
    """Duplicates removed before training. A text that occurs twice is protected once."""


# Where float32 holds norms and noise well; a noisy count may drive a clip norm anywhere in between.
MOVING_CLIP_NORMS = (1e-6, 1e12)
NormsByPattern = Annotated[dict[str, PositiveNumber], Field(min_length=1)]


class Clipping(Section):
    """A clip norm for each layer, or one that follows a quantile of the norms. One of the two."""

    per_layer: (
        Annotated[Annotated[PositiveNumber, Tag(NUMBER)] | Annotated[NormsByPattern, Tag(FIELDS)], Discriminator(_kind)]
        | None
    ) = None
    """A number C: each of the L layers that train is clipped to C / sqrt(L). Or a norm for each pattern of variable
    paths, such as {"*embedding*": 0.5, "*": 1.0}; C is then the root of the sum of their squares."""
    quantile: OpenProbability | None = None
    """The part of the units that is to stay below the clip norm, such as 0.5. A noisy count of them moves the norm
    after every step (Andrew et al. 2021); it costs a part of epsilon, which noise_multiplier counts in."""
    initial: PositiveNumber | None = None
    """With quantile, the clip norm of the first step. Required there; from 1e-6 to 1e12."""
    learning_rate: PositiveNumber | None = None
    """With quantile, how fast the clip norm moves: by a factor exp(-learning_rate * (counted part - quantile)) a step.
    null: 0.2."""
    count_noise: PositiveNumber | None = None
    """With quantile, standard deviation of the noise that is added to the count; above half the noise_multiplier.
    null: a twentieth of the expected batch size, but at least noise_multiplier."""


class Mechanism(Section):
    """What each step does to the gradients."""

    clip_norm: Annotated[
        Annotated[PositiveNumber, Tag(NUMBER)] | Annotated[Clipping, Tag(FIELDS)], Discriminator(_kind)
    ]
    """The most one unit moves the sum of gradients, in L2 (C): a number; or fields, per_layer or quantile."""
    noise_multiplier: PositiveNumber | None = None
    """Standard deviation of the noise divided by clip_norm (sigma). null: calibrated to the claim. With
    clip_norm.quantile it is that of gradients and count together: the gradients get a little more."""
    rng: Literal["csprng", "prng"] = "csprng"
    """Source of the noise: the operating system's, or a seeded generator for tests."""

    @property
    def total_clip_norm(self) -> float | None:
        """C, over all layers together; with a quantile, of the first step. None where that is not stated."""
        if not isinstance(self.clip_norm, Clipping):
            return self.clip_norm
        if isinstance(self.clip_norm.per_layer, dict):
            return math.hypot(*self.clip_norm.per_layer.values())
        return self.clip_norm.per_layer or self.clip_norm.initial


class Sampling(Section):
    """How batches are drawn, and how many."""

    scheme: Literal["poisson", "truncated_poisson", "full_batch", "shuffle"]
    """poisson: each unit joins each batch independently. shuffle can be written down, but never passes review."""
    expected_batch_size: PositiveNumber | None = None
    """Expected number of sampled units per step. Either this or probability."""
    probability: PositiveNumber | None = None
    """Probability that a unit joins a batch (q). Either this or expected_batch_size."""
    steps: Count | None = None
    """Number of noisy updates. Either this or epochs."""
    epochs: PositiveNumber | None = None
    """Expected number of times that a unit is used. Either this or steps."""
    truncated_batch_size: Count | None = None
    """Largest batch of truncated_poisson; a larger draw keeps a uniformly random part."""
    microbatch_size: (
        Annotated[Annotated[Count, Tag(NUMBER)] | Annotated[Literal["auto"], Tag(WORD)], Discriminator(_number_or_word)]
        | None
    ) = None
    """Units per forward pass, or auto: the fastest number, by a short timed search on made-up data. Has no effect on
    privacy."""


class Accountant(Section):
    """Who computes epsilon."""

    name: Literal["pld", "rdp", "prv"] = "pld"
    """pld: privacy loss distributions. rdp: Renyi, looser. prv is answered by pld, of the same family."""


class Tuning(Section):
    """How hyperparameters were, or will be, chosen."""

    kind: Literal["none", "public", "private"]
    """On nothing, on public data, or on the private data."""
    trials: Count | None = None
    """Training runs on the private data before this one."""
    accounted: bool = False
    """Whether the privacy loss of the trials is counted, in this claim or in a budget."""


class Evaluation(Section):
    """What the model card has to show."""

    group_field: Text | None = None
    """Field of a record that names its group, for metrics per group."""
    metrics: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """Names of the metrics."""
    min_group_size: Count | None = None
    """Groups with fewer units are suppressed."""
    membership_inference: Literal["required", "not_required"] = "not_required"
    """Whether a membership-inference test belongs to the release."""


class Budget(Section):
    """What all releases from one data set may spend together."""

    dataset_id: Text
    """Name of the data set in the ledger of budgets."""
    ledger: Text | None = None
    """Where earlier spending is recorded."""
    epsilon_cap: PositiveNumber | None = None
    """The most epsilon that all releases may spend."""
    delta_cap: OpenProbability | None = None
    """The most delta that all releases may spend."""


def _calendar_date(value: Any) -> Any:
    """Refuses what pydantic would also take for a date: seconds since 1970, and a time of day."""
    if isinstance(value, str) and not re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", value):
        raise PydanticCustomError("date_parsing", "expected YYYY-MM-DD")
    if not isinstance(value, str | datetime.date) or isinstance(value, datetime.datetime):
        raise PydanticCustomError("date_type", "expected YYYY-MM-DD")
    return value


class Waiver(Section):
    """A finding that somebody accepts, for a reason and for a time."""

    finding: Annotated[str, Field(pattern=r"^PS[0-9]{3}$")]
    """Id of the finding."""
    reason: Text
    """Why it is acceptable here."""
    owner: Text | None = None
    """Who answers for it."""
    expires: Annotated[datetime.date, BeforeValidator(_calendar_date), Field(strict=False)]
    """Last day of the waiver, as YYYY-MM-DD."""
