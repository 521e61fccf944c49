"""The rules that turn a privacy spec into findings.

| id    | severity     | what is wrong                                                                        |
|-------|--------------|--------------------------------------------------------------------------------------|
| PS003 | error        | delta allows publishing one whole unit: delta >= 1/num_units                         |
| PS004 | warning      | delta is within a factor of ten of that                                              |
| PS005 | error        | the privacy unit lacks a field without which it means nothing                        |
| PS009 | error        | the method does not protect a whole unit                                             |
| PS010 | error        | batches are shuffled, and shuffling has no amplification to claim                    |
| PS011 | error        | the accountant does not model this sampler under this adjacency                      |
| PS012 | error        | the claim reaches further than what is accounted here                                |
| PS013 | error        | a batch is larger than the data, or q > 1                                            |
| PS014 | error        | probability, batch sizes, steps, epochs, sizes: too few, too many, or contradictory  |
| PS020 | error        | the mechanism costs more epsilon than is claimed                                     |
| PS023 | warning      | epsilon > 10                                                                         |
| PS024 | note         | prv is answered by the pld accountant                                                |
| PS040 | error/warning| private tuning is covered by the claim (or spent outside it) without being accounted |

PS000 (not a valid spec), PS001 and PS002 come from reading the file. Rules live outside pydantic, which does not look
at two fields together once one of them has failed. Comparisons are written so that a value that cannot be compared
fails.
"""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from tfdp.errors import AccountingError, SpecError
from tfdp.findings import Finding, Severity
from tfdp.spec import PrivacySpec, Schedule
from tfdp.spec.consistency import conflicts, population

if TYPE_CHECKING:
    from dp_accounting import DpEvent

Rule = Callable[[PrivacySpec], Iterator[Finding]]

RELATIVE_SLACK = 1e-6  # floating point only: never a tolerance of the claim
LARGE_EPSILON = 10.0


def review(spec: PrivacySpec) -> list[Finding]:
    """Every finding of the rules above, in the order of the file.

    Without an error among them the claim is earned by the mechanism as written, provided that what runs is what is
    written; a calibrated noise multiplier (null) is left to the plan.

    Raises:
        SpecError: `spec` is not a PrivacySpec, or was changed into something that could not have been read.
    """
    if not isinstance(spec, PrivacySpec):
        received = type(spec).__name__
        raise SpecError(f"expected a PrivacySpec, received {received}. Read the file with PrivacySpec.from_file first.")
    PrivacySpec.from_dict(spec.to_dict())  # model_copy and model_construct check nothing
    findings = [finding for rule in RULES for finding in rule(spec)]
    return sorted(findings, key=lambda finding: (finding.line or 0, finding.column or 0))


def delta_against_size(spec: PrivacySpec) -> Iterator[Finding]:
    """PS003, PS004."""
    delta, units = spec.claim.delta, spec.data.num_units
    fix = f"Use at most 1/(10 num_units) = {0.1 / units:.2g}."
    received = f"received {delta:g} for {units} units"
    if not delta * units < 1:
        message = f"expected delta below 1/num_units = {1 / units:.3g}, {received}: one whole unit may be published."
        yield spec.finding("PS003", Severity.ERROR, ("claim", "delta"), message, fix)
    elif not delta * units * 10 <= 1 + RELATIVE_SLACK:
        message = (
            f"expected delta at most 1/(10 num_units), {received}: delta leaves {delta * units:.0%} of a unit open."
        )
        yield spec.finding("PS004", Severity.WARNING, ("claim", "delta"), message, fix)


def unit_is_complete(spec: PrivacySpec) -> Iterator[Finding]:
    """PS005."""
    unit = spec.claim.privacy_unit
    required = {
        "example": [],
        "sequence": ["sequence_length"],
        "document": ["id_field", "max_records_per_unit"],
        "user": ["id_field", "max_records_per_unit"],
    }[unit.kind]
    if unit.method != "native":
        required = list(dict.fromkeys([*required, "max_records_per_unit"]))
    for name in required:
        if getattr(unit, name) is None:
            message = f"expected {name} for a {unit.kind} unit by method {unit.method}, received nothing."
            fix = f"Add {name}: {_description(type(unit), name)}"
            yield spec.finding("PS005", Severity.ERROR, ("claim", "privacy_unit", name), message, fix)
    if unit.method == "group_privacy" and (unit.max_records_per_unit or 1) > 1 and spec.data.num_records is None:
        message = "expected data.num_records with group_privacy, where records are sampled, received nothing."
        yield spec.finding(
            "PS005", Severity.ERROR, ("data", "num_records"), message, "Add the public number of records."
        )


def method_protects_unit(spec: PrivacySpec) -> Iterator[Finding]:
    """PS009."""
    unit = spec.claim.privacy_unit
    records = unit.max_records_per_unit or 1
    path = ("claim", "privacy_unit", "method")
    if unit.kind in ("example", "sequence"):
        if unit.method != "native":
            message = f"expected method native for a {unit.kind} unit, which is one record, received {unit.method}."
            yield spec.finding("PS009", Severity.ERROR, path, message, "Use native, or claim a document or user unit.")
        elif records > 1:
            message = (
                f"expected max_records_per_unit 1 for a {unit.kind} unit, which is one record, received {records}."
            )
            path = ("claim", "privacy_unit", "max_records_per_unit")
            yield spec.finding("PS009", Severity.ERROR, path, message, "Delete it, or claim a document or user unit.")
    elif unit.method == "native" and records > 1:
        message = (
            f"expected a method that covers all {records} records of a {unit.kind}, received native, "
            "which samples and clips each record on its own and hides one record only."
        )
        fix = "Use user_wise_dp_sgd or group_privacy, or max_records_per_unit: 1."
        yield spec.finding("PS009", Severity.ERROR, path, message, fix)


def shuffled_batches(spec: PrivacySpec) -> Iterator[Finding]:
    """PS010."""
    if spec.sampling.scheme != "shuffle":
        return
    message = (
        "expected batches that each unit joins independently, received shuffle, which has no amplification to claim."
    )
    schedule, sigma = _schedule(spec), spec.mechanism.noise_multiplier
    if schedule is not None and sigma is not None:
        from tfdp import accounting

        try:
            unamplified = accounting.unamplified_epsilon(
                noise_multiplier=sigma,
                sampling_probability=schedule.sampling_probability,
                steps=schedule.steps,
                delta=spec.claim.delta,
                adjacency=spec.claim.adjacency,
                accountant=spec.accountant.name,
                records_per_unit=schedule.records_per_unit,
            )
            message += (
                f" Used once in every pass over the data and without amplification, a unit costs epsilon "
                f"{unamplified:.4g} at delta {spec.claim.delta:g}; claimed is {spec.claim.epsilon:g}."
            )
        except AccountingError as error:
            message += f" What it costs without amplification is unknown: {error}"
    fix = "Use scheme poisson: same expected batch size, and the accountant models it."
    yield spec.finding("PS010", Severity.ERROR, ("sampling", "scheme"), message, fix)


def accountant_models_sampler(spec: PrivacySpec) -> Iterator[Finding]:
    """PS011."""
    schedule = _schedule(spec)
    if schedule is None or spec.sampling.scheme == "shuffle":
        return
    from tfdp import accounting

    name, adjacency, path = spec.accountant.name, spec.claim.adjacency, ("accountant", "name")
    try:
        # Support depends on the kind of event only: any sigma serves while it is not calibrated.
        event = _step_event(spec, schedule, spec.mechanism.noise_multiplier or 1.0)
        reason = accounting.unsupported_reason(event, name, adjacency)
    except AccountingError as error:
        reason = str(error)
    if reason is not None:
        message = (
            f"expected an accountant that models {spec.sampling.scheme} sampling under {adjacency}, received {name}:"
        )
        fix = "Choose another accountant, adjacency or scheme."
        yield spec.finding("PS011", Severity.ERROR, path, f"{message} {reason.rstrip('.')}.", fix)


def claim_is_covered(spec: PrivacySpec) -> Iterator[Finding]:
    """PS012, PS040."""
    claim = spec.claim
    if claim.trust_model != "central":
        message = (
            f"expected trust_model central, received {claim.trust_model}: this library trains on raw data in one place."
        )
        fix = "Claim the central model; noise on the devices is not what runs here."
        yield spec.finding("PS012", Severity.ERROR, ("claim", "trust_model"), message, fix)
    path = ("claim", "data_accesses")
    if "training" not in claim.data_accesses:
        message = "expected training among data_accesses, received a claim that leaves the training out."
        yield spec.finding("PS012", Severity.ERROR, path, message, "Add training.")
    for access in ("clip_selection", "evaluation"):
        if access in claim.data_accesses:
            message = (
                f"expected data_accesses that are accounted, received {access}: epsilon counts training steps only."
            )
            fix = f"Delete {access}: the card then lists it as not covered."
            yield spec.finding("PS012", Severity.ERROR, path, message, fix)

    covered, tuning = "tuning" in claim.data_accesses, spec.tuning
    if covered and tuning is None:
        message = "expected a tuning section, because the claim covers tuning, received nothing."
        yield spec.finding("PS040", Severity.ERROR, path, message, "State tuning.kind, or delete tuning here.")
    elif covered and tuning is not None and tuning.kind == "private":
        message = (
            "expected tuning on no or public data, because epsilon here counts one training only, received private."
        )
        fix = "Delete tuning from data_accesses: the card then lists it as not covered."
        yield spec.finding("PS012" if tuning.accounted else "PS040", Severity.ERROR, path, message, fix)
    elif tuning is not None and tuning.kind == "private" and not tuning.accounted:
        message = "expected private tuning to be accounted, received accounted: false. Each trial has read the data."
        fix = "Account the trials in a budget, or tune on public data."
        yield spec.finding("PS040", Severity.WARNING, ("tuning", "accounted"), message, fix)


def batch_fits_data(spec: PrivacySpec) -> Iterator[Finding]:
    """PS013."""
    sampling, (most, name) = spec.sampling, population(spec)
    if sampling.probability is not None and not sampling.probability <= 1:
        message = f"expected a probability of at most 1, received {sampling.probability:g}."
        yield spec.finding("PS013", Severity.ERROR, ("sampling", "probability"), message, "Write q between 0 and 1.")
    for field in ("expected_batch_size", "truncated_batch_size"):
        size = getattr(sampling, field)
        if size is not None and not size <= most:
            message = f"expected {field} of at most {name} = {most}, received {size:g}."
            fix = f"Lower it, or correct {name}."
            yield spec.finding("PS013", Severity.ERROR, ("sampling", field), message, fix)


def numbers_agree(spec: PrivacySpec) -> Iterator[Finding]:
    """PS014."""
    for path, message, fix in conflicts(spec):
        yield spec.finding("PS014", Severity.ERROR, path, message, fix)


def epsilon_is_earned(spec: PrivacySpec) -> Iterator[Finding]:
    """PS020."""
    schedule, sigma = _schedule(spec), spec.mechanism.noise_multiplier
    if schedule is None or sigma is None or spec.sampling.scheme == "shuffle" or any(accountant_models_sampler(spec)):
        return
    from tfdp import accounting

    claimed, path = spec.claim.epsilon, ("claim", "epsilon")
    fix = "Raise mechanism.noise_multiplier (null calibrates it), lower the steps, or claim what it costs."
    try:
        recomputed = accounting.epsilon(
            _step_event(spec, schedule, sigma),
            schedule.steps,
            delta=spec.claim.delta,
            accountant=spec.accountant.name,
            adjacency=spec.claim.adjacency,
        )
    except AccountingError as error:
        message = f"expected an epsilon that can be recomputed, received: {str(error).rstrip('.')}."
        yield spec.finding("PS020", Severity.ERROR, path, message, fix)
        return
    if not recomputed <= claimed * (1 + RELATIVE_SLACK):
        cost = f"{recomputed:.6g}" if math.isfinite(recomputed) else "unbounded"
        message = (
            f"expected the mechanism to cost at most the claimed {claimed:.6g}, received {cost} at delta "
            f"{spec.claim.delta:g} ({schedule.steps} steps, q = {schedule.sampling_probability:.4g}, "
            f"sigma = {sigma:g}, {spec.accountant.name}, {spec.claim.adjacency})."
        )
        yield spec.finding("PS020", Severity.ERROR, path, message, fix)


def epsilon_is_small(spec: PrivacySpec) -> Iterator[Finding]:
    """PS023."""
    if not spec.claim.epsilon <= LARGE_EPSILON:
        message = (
            f"expected epsilon of at most {LARGE_EPSILON:g}, received {spec.claim.epsilon:g}: such a bound says little."
        )
        fix = "Aim lower, or be ready to show attacks instead of the bound."
        yield spec.finding("PS023", Severity.WARNING, ("claim", "epsilon"), message, fix)


def prv_is_pld(spec: PrivacySpec) -> Iterator[Finding]:
    """PS024."""
    if spec.accountant.name == "prv":
        message = "received accountant prv: it is answered by the pld accountant, of the same numerical family."
        yield spec.finding(
            "PS024", Severity.NOTE, ("accountant", "name"), message, "Write pld to say what is computed."
        )


RULES: tuple[Rule, ...] = (
    delta_against_size,
    unit_is_complete,
    method_protects_unit,
    shuffled_batches,
    accountant_models_sampler,
    claim_is_covered,
    batch_fits_data,
    numbers_agree,
    epsilon_is_earned,
    epsilon_is_small,
    prv_is_pld,
)


def _schedule(spec: PrivacySpec) -> Schedule | None:
    """The schedule when it can be accounted; None after PS005, PS013 or PS014, which already block the spec."""
    if any(finding for rule in (unit_is_complete, batch_fits_data, numbers_agree) for finding in rule(spec)):
        return None
    return spec.schedule


def _step_event(spec: PrivacySpec, schedule: Schedule, noise_multiplier: float) -> DpEvent:
    from tfdp import accounting

    return accounting.step_event(
        scheme=spec.sampling.scheme,
        sampling_probability=schedule.sampling_probability,
        noise_multiplier=noise_multiplier,
        num_units=schedule.population,
        truncated_batch_size=spec.sampling.truncated_batch_size,
        records_per_unit=schedule.records_per_unit,
    )


def _description(section: Any, name: str) -> str:
    return " ".join((section.model_fields[name].description or "").split())


class _CallableModule(types.ModuleType):
    """`tfdp.review` is this module and the public function: importing the module must not take the function away."""

    def __call__(self, spec: PrivacySpec) -> list[Finding]:
        return review(spec)


sys.modules[__name__].__class__ = _CallableModule
