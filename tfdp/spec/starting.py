"""The text of a first spec: a few answers, and a comment at every number that says what it does."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Literal

_KINDS = {
    "example": "one record of the data; or sequence, document, user",
    "sequence": "one record of sequence_length tokens; or example, document, user",
    "document": "all records of one document; or example, sequence, user",
    "user": "all records of one person or account; or example, sequence, document",
}
_ADJACENCIES = {
    "add_or_remove_one": "neighbours differ in one unit that is there or not",
    "replace_one": "neighbours differ in one unit that is replaced; costs about twice as much",
    "zero_out": "neighbours differ in one unit that contributes nothing; the size is public",
}
_SCHEMES = {
    "poisson": "each unit joins each batch by its own coin toss",
    "truncated_poisson": "each unit joins by its own coin toss; a batch that gets too large is cut at random",
    "full_batch": "every unit is in every batch: no sampling, and no amplification",
}
_DEDUPLICATION = {
    "none": "or exact, near; of a text that occurs twice the claim hides one copy only",
    "exact": "identical texts were removed; or none, near",
    "near": "similar texts were removed; or none, exact",
}
_TUNING = {
    "none": "the settings are defaults; nothing was chosen by looking at data",
    "public": "the settings were chosen on public data",
    "private": "the settings were chosen on this data: every trial has looked at it, and counts",
}


@dataclass(frozen=True)
class Answers:
    """What a first spec has to be told; the fields are those of the spec."""

    unit: str
    description: str
    num_units: int
    epsilon: float
    delta: float
    adjacency: str = "add_or_remove_one"
    id_field: str | None = None
    max_records_per_unit: int | None = None
    max_tokens_per_unit: int | None = None
    selection: str | None = None
    sequence_length: int | None = None
    num_records: int | None = None
    method: str | None = None
    clip_norm: float = 1.0
    noise_multiplier: float | None = None
    scheme: str = "poisson"
    expected_batch_size: float | None = None
    truncated_batch_size: int | None = None
    steps: int | None = None
    epochs: float | None = None
    microbatch_size: int | Literal["auto"] | None = None
    accountant: str = "pld"
    deduplication: str = "none"
    tuning: str | None = None


def suggested_delta(num_units: int) -> float:
    """The largest power of ten that is at most 1/(10 num_units), where a tenth of a unit is left open."""
    return float(f"1e-{len(str(max(1, num_units) * 10 - 1))}")


def suggested_batch_size(num_units: int) -> int:
    """A tenth of the data, at most 256."""
    return max(1, min(256, num_units // 10))


def suggested_truncation(expected_batch_size: float, num_units: int) -> int:
    """Four standard deviations above the expected size: about one draw in 30000 is cut."""
    return min(num_units, math.ceil(expected_batch_size + 4 * math.sqrt(expected_batch_size)))


def commented_spec(answers: Answers) -> str:
    """YAML with a comment on every field. Says what it was told: `tfdp.review` says whether that is a good idea."""
    sections = [_claim(answers), _data(answers), _mechanism(answers), _sampling(answers)]
    sections.append([("accountant:", None), (f"  name: {answers.accountant}", "pld is the tightest; rdp is faster")])
    if answers.tuning is not None:
        sections.append([("tuning:", None), (f"  kind: {answers.tuning}", _TUNING.get(answers.tuning))])
    head = (
        "# A privacy claim, and the training that is to earn it. Review it like code:\n"
        "#   tfdp validate FILE      is the claim complete, consistent and earned?\n"
        "#   tfdp account FILE       what does it cost, and how much noise does it take?\n"
        "#   tfdp diff OLD NEW       did a change make privacy weaker?\n"
        'schema_version: "1.0"\n'
    )
    return "\n".join([head, *("\n".join(map(_line, section)) + "\n" for section in sections)])


_Line = tuple[str, str | None]


def _claim(answers: Answers) -> list[_Line]:
    lines: list[_Line] = [
        ("claim:", None),
        (f"  epsilon: {_number(answers.epsilon)}", "the bound on the privacy loss: smaller is more private"),
        (
            f"  delta: {_number(answers.delta)}",
            f"left out of the bound; {answers.delta * answers.num_units:.2g} of a unit in {answers.num_units}",
        ),
        ("  privacy_unit:", None),
        (f"    kind: {answers.unit}", _KINDS.get(answers.unit)),
        (f"    description: {_text(answers.description)}", None),
    ]
    if answers.id_field is not None:
        lines.append((f"    id_field: {_text(answers.id_field)}", "the field of a record that names its unit"))
    if answers.max_records_per_unit is not None:
        beyond = "what a unit has beyond it is refused" if answers.selection is None else "the rest of a unit stays out"
        lines.append((f"    max_records_per_unit: {answers.max_records_per_unit}", f"k; {beyond}"))
    if answers.max_tokens_per_unit is not None:
        lines.append(
            (f"    max_tokens_per_unit: {answers.max_tokens_per_unit}", "a unit gives records as long as they fit")
        )
    if answers.sequence_length is not None:
        lines.append((f"    sequence_length: {answers.sequence_length}", "tokens"))
    if answers.method is not None:
        lines.append((f"    method: {answers.method}", "native, group_privacy or user_wise_dp_sgd"))
    if answers.selection is not None:
        lines.append((f"    selection: {answers.selection}", "which records of a unit stay"))
    return [
        *lines,
        (f"  adjacency: {answers.adjacency}", _ADJACENCIES.get(answers.adjacency)),
        ("  trust_model: central", "whoever trains sees the raw data"),
        ("  release: all_checkpoints", "what may leave; or less: final_model, predictions"),
        ("  data_accesses: [training]", "what epsilon counts; anything else stands on the card as not covered"),
    ]


def _data(answers: Answers) -> list[_Line]:
    lines: list[_Line] = [
        ("data:", None),
        (f"  num_units: {answers.num_units}", "N: privacy units that are trained on"),
    ]
    if answers.num_records is not None:
        lines.append((f"  num_records: {answers.num_records}", "records that may be sampled"))
    return [
        *lines,
        ("  size_is_public: true", "batch size and denominator are computed from it"),
        (f"  deduplication: {answers.deduplication}", _DEDUPLICATION.get(answers.deduplication)),
    ]


def _mechanism(answers: Answers) -> list[_Line]:
    sigma = "null" if answers.noise_multiplier is None else _number(answers.noise_multiplier)
    calibrated = "sigma; null: the least noise that keeps the claim is computed when training begins"
    given = "sigma: standard deviation of the noise / clip_norm; null computes the least that keeps the claim"
    return [
        ("mechanism:", None),
        (
            f"  clip_norm: {_number(answers.clip_norm)}",
            "C: the most one unit moves a sum of gradients, in L2; or per_layer, quantile",
        ),
        (f"  noise_multiplier: {sigma}", calibrated if answers.noise_multiplier is None else given),
    ]


def _sampling(answers: Answers) -> list[_Line]:
    lines: list[_Line] = [
        ("sampling:", None),
        (f"  scheme: {answers.scheme}", _SCHEMES.get(answers.scheme)),
    ]
    population = answers.num_records if answers.method == "group_privacy" else answers.num_units
    probability = 1.0
    if answers.expected_batch_size is not None:
        probability = answers.expected_batch_size / (population or answers.num_units)
        lines.append(
            (
                f"  expected_batch_size: {_number(answers.expected_batch_size)}",
                f"q = {_number(answers.expected_batch_size)} / {population} = {probability:.4g}",
            )
        )
    if answers.truncated_batch_size is not None:
        lines.append((f"  truncated_batch_size: {answers.truncated_batch_size}", "the largest batch"))
    if answers.steps is not None:
        lines.append((f"  steps: {answers.steps}", f"noisy updates; {answers.steps * probability:.4g} epochs"))
    if answers.epochs is not None:
        steps = math.floor(answers.epochs / probability + 1e-9) if probability > 0 else 0
        lines.append((f"  epochs: {_number(answers.epochs)}", f"epochs / q = {steps} noisy updates"))
    if answers.microbatch_size is not None:
        does = "the fastest, found by timing" if answers.microbatch_size == "auto" else "memory only"
        lines.append((f"  microbatch_size: {answers.microbatch_size}", f"{does}; no effect on privacy"))
    return lines


def _line(line: _Line) -> str:
    text, comment = line
    return text if comment is None else f"{text:<32} # {comment}"


def _number(value: float) -> str:
    """Shortest text that reads back as the same number; whole numbers without a point."""
    return (
        str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(float(value)).replace("e-0", "e-")
    )


def _text(value: str) -> str:
    """A quoted scalar: JSON's strings are YAML's, apart from characters that have no business in a spec."""
    return json.dumps(value, ensure_ascii=False)
