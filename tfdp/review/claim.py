"""Rules on the claim: delta, the unit, and how far the claim reaches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tfdp.findings import Finding, Severity
from tfdp.review.waivers import written_waiver
from tfdp.spec import PrivacySpec
from tfdp.spec.choices import meaning
from tfdp.spec.fields import Clipping
from tfdp.spec.numbers import rounded_down, shown, with_article

RELATIVE_SLACK = 1e-6  # floating point only: never a tolerance of the claim
LARGE_EPSILON = 10.0


def delta_against_size(spec: PrivacySpec) -> Iterator[Finding]:
    """PS003, PS004."""
    delta, units = spec.claim.delta, spec.data.num_units
    fix = f"Use at most 1/(10 num_units) = {rounded_down(0.1 / units)}."
    received = f"received {shown(delta)} for {units} units"
    if not delta * units < 1:
        most = rounded_down(1 / units, 3)
        message = f"expected delta below 1/num_units = {most}, {received}: one whole unit may be published."
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
            by = "" if unit.method == "native" else f" by method {unit.method}"
            message = f"expected {name} for {with_article(unit.kind)} unit{by}, received nothing."
            path = ("claim", "privacy_unit", name)
            fix = f"Add {name}. {_description(type(unit), name)} {spec.such_as(path)}"
            yield spec.finding("PS005", Severity.ERROR, path, message, fix)
    if unit.method == "group_privacy" and unit.max_records_per_unit != 1 and spec.data.num_records is None:
        message = "expected data.num_records with group_privacy, where records are sampled, received nothing."
        records = ("data", "num_records")
        fix = f"Add the public number of records, at least num_units. {spec.such_as(records)}"
        yield spec.finding("PS005", Severity.ERROR, records, message, fix)


def method_protects_unit(spec: PrivacySpec) -> Iterator[Finding]:
    """PS009."""
    unit = spec.claim.privacy_unit
    records = unit.max_records_per_unit or 1
    path, a_unit = ("claim", "privacy_unit", "method"), f"{with_article(unit.kind)} unit"
    if unit.kind in ("example", "sequence"):
        if unit.method != "native":
            several = f" with max_records_per_unit {records}" if records > 1 else ""
            message = f"expected method native for {a_unit}, which is one record, received {unit.method}{several}."
            fix = f"Delete {'both' if several else 'it'}, or claim a document or user unit."
            yield spec.finding("PS009", Severity.ERROR, path, message, fix)
        elif records > 1:
            message = f"expected max_records_per_unit 1 for {a_unit}, which is one record, received {records}."
            path = ("claim", "privacy_unit", "max_records_per_unit")
            yield spec.finding("PS009", Severity.ERROR, path, message, "Delete it, or claim a document or user unit.")
    elif unit.method == "native" and records > 1:
        message = (
            f"expected a method that covers all {records} records of {with_article(unit.kind)}, received native, "
            "which samples and clips each record on its own and hides one record only."
        )
        unused = ", and num_records goes unused" if spec.data.num_records is not None else ""
        ways = [
            f"{spec.snippet('method', method)} ({meaning('PrivacyUnit.method', method)}; {counts})"
            for method, counts in (
                ("user_wise_dp_sgd", f"expected_batch_size then counts {unit.kind}s{unused}"),
                ("group_privacy", "expected_batch_size counts records"),
            )
        ]
        one = f"{spec.snippet('max_records_per_unit', '1')}, which leaves out the other records of a {unit.kind}"
        fix = f"Write {', or '.join(ways)}, or {one}."
        yield spec.finding("PS009", Severity.ERROR, path, message, fix)
    if unit.max_tokens_per_unit is not None and unit.method != "user_wise_dp_sgd":
        message = (
            "expected method user_wise_dp_sgd with max_tokens_per_unit, which limits what a unit gives to the mean of "
            f"its records, received {unit.method}, which clips records on their own."
        )
        path = ("claim", "privacy_unit", "max_tokens_per_unit")
        yield spec.finding("PS009", Severity.ERROR, path, message, "Use user_wise_dp_sgd, or delete it.")
    if unit.selection == "random_chunk" and unit.method != "user_wise_dp_sgd":
        message = (
            "expected method user_wise_dp_sgd with selection random_chunk, which cuts a new span of all records of a "
            f"unit in every step, received {unit.method}, which samples records."
        )
        path = ("claim", "privacy_unit", "selection")
        fix = "Use user_wise_dp_sgd, or another selection, such as random."
        yield spec.finding("PS009", Severity.ERROR, path, message, fix)


def unit_is_the_person(spec: PrivacySpec) -> Iterator[Finding]:
    """PS007."""
    unit = spec.claim.privacy_unit
    if unit.kind in ("example", "sequence") and unit.id_field is not None:
        message = (
            f"expected a user or document unit, because records name their owner in {_quoted(unit.id_field)}, "
            f"received {unit.kind}: who owns several records is protected less than the claim sounds."
        )
        fix = "Claim a user unit with max_records_per_unit, or delete id_field where no two records share an owner."
        yield spec.finding("PS007", Severity.WARNING, ("claim", "privacy_unit", "kind"), message, fix)


def duplicates_are_removed(spec: PrivacySpec) -> Iterator[Finding]:
    """PS008."""
    unit = spec.claim.privacy_unit
    if unit.kind != "user" and spec.data.deduplication == "none":
        stated = spec.states(("data", "deduplication"))
        received = "deduplication none" if stated else "no deduplication (none is assumed)"
        message = (
            f"expected duplicates to be removed with {with_article(unit.kind)} unit, received {received}: of a text "
            "that occurs twice the claim hides one copy, and the other stays in the data."
        )
        fix = f"Remove exact duplicates at least, and write {spec.snippet('deduplication', 'exact')}."
        yield spec.finding("PS008", Severity.WARNING, ("data", "deduplication"), message, fix)


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
    clipping = spec.mechanism.clip_norm
    paid = {"clip_selection"} if isinstance(clipping, Clipping) and clipping.quantile is not None else set()
    for access in ("clip_selection", "evaluation"):
        if access in claim.data_accesses and access not in paid:
            message = (
                f"expected data_accesses that are accounted, received {access}: epsilon counts training steps only."
            )
            fix = f"Delete {access}: the card then lists it as not covered."
            yield spec.finding("PS012", Severity.ERROR, path, message, fix)

    covered, tuning = "tuning" in claim.data_accesses, spec.tuning
    if covered and tuning is None:
        message = "expected a tuning section, because the claim covers tuning, received nothing."
        fix = f"Delete tuning here, or say how it was done. {spec.such_as(('tuning',))}"
        yield spec.finding("PS040", Severity.ERROR, path, message, fix)
    elif covered and tuning is not None and tuning.kind == "private":
        message = (
            "expected tuning on no or public data, because epsilon here counts one training only, received private."
        )
        fix = "Delete tuning from data_accesses: the card then lists it as not covered."
        yield spec.finding("PS012" if tuning.accounted else "PS040", Severity.ERROR, path, message, fix)
    elif tuning is not None and tuning.kind == "private" and not tuning.accounted:
        message = "expected private tuning to be accounted, received accounted: false. Each trial has read the data."
        said = spec.change(("tuning", "accounted"), "true")
        fix = (
            f"Train the trials under specs with the same ledger in budget, and {said}, or tune on public data, or "
            f"accept it: {written_waiver(spec, 'PS040')}. The card lists tuning as not covered."
        )
        yield spec.finding("PS040", Severity.WARNING, ("tuning", "accounted"), message, fix)
    elif tuning is not None and tuning.kind == "private" and (spec.budget is None or spec.budget.ledger is None):
        message = (
            "expected a ledger in budget, on which the trials are counted, received accounted: true without one: "
            "nothing supports it."
        )
        if spec.budget is None:
            ledger = {"dataset_id": "<name of the data set>", "ledger": "<file of the ledger>"}
            such = spec.such_as(("budget",), ledger)
        else:
            such = spec.such_as(("budget", "ledger"))
        fix = (
            f"Write the ledger under which the trials ran. {such} Or, where they are not "
            f"counted, {spec.change(('tuning', 'accounted'), 'false')} and accept it: {written_waiver(spec, 'PS040')}."
        )
        yield spec.finding("PS040", Severity.WARNING, ("tuning", "accounted"), message, fix)


def epsilon_is_small(spec: PrivacySpec) -> Iterator[Finding]:
    """PS023."""
    if not spec.claim.epsilon <= LARGE_EPSILON:
        message = (
            f"expected epsilon of at most {shown(LARGE_EPSILON)}, received {shown(spec.claim.epsilon)}: "
            "such a bound says little."
        )
        fix = "Aim lower, or be ready to show attacks instead of the bound."
        yield spec.finding("PS023", Severity.WARNING, ("claim", "epsilon"), message, fix)


def randomness_is_secret(spec: PrivacySpec) -> Iterator[Finding]:
    """PS042."""
    if spec.mechanism.rng != "csprng":
        message = f"expected randomness from the operating system, received {spec.mechanism.rng}: for tests only."
        fix = f"Write {spec.snippet('rng', 'csprng')} for a release."
        yield spec.finding("PS042", Severity.NOTE, ("mechanism", "rng"), message, fix)


def claim_fits_budget(spec: PrivacySpec) -> Iterator[Finding]:
    """PS032, PS033, for this claim alone; what was spent before is in the ledgers."""
    if spec.budget is None:
        return
    for name in ("epsilon", "delta"):
        cap, claimed = getattr(spec.budget, f"{name}_cap"), getattr(spec.claim, name)
        if cap is None:
            continue
        path = ("budget", f"{name}_cap")
        message = (
            f"expected the claim to stay within {name} {rounded_down(cap, 6)} for {_quoted(spec.budget.dataset_id)}, "
            f"received {shown(claimed)}"
        )
        if not claimed <= cap * (1 + RELATIVE_SLACK):
            fix = f"Claim at most {rounded_down(cap, 6)}, or have the cap of the data set reviewed."
            yield spec.finding("PS032", Severity.ERROR, path, f"{message}.", fix)
        elif not claimed <= 0.8 * cap * (1 + RELATIVE_SLACK):
            fix = "Plan what the rest is for: later releases of the same data count too."
            yield spec.finding("PS033", Severity.WARNING, path, f"{message}, {claimed / cap:.0%} of it.", fix)


def _description(section: Any, name: str) -> str:
    return " ".join((section.model_fields[name].description or "").split())


def _quoted(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
