"""Rules on the sampler: is it modelled by the accountant, and do its numbers agree?"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from tfdp.errors import AccountingError
from tfdp.findings import Finding, Severity
from tfdp.review import costs
from tfdp.review.claim import unit_is_complete
from tfdp.spec import PrivacySpec, Schedule
from tfdp.spec.consistency import conflicts, population
from tfdp.spec.documents import Path
from tfdp.spec.numbers import rounded_up, shown
from tfdp.spec.starting import suggested_truncation

_OFTEN = 0.05  # the share of batches that are cut, above which somebody should have meant it


def shuffled_batches(spec: PrivacySpec) -> Iterator[Finding]:
    """PS010."""
    if spec.sampling.scheme != "shuffle":
        return
    message = (
        "expected batches that each unit joins independently, received shuffle, which has no amplification to claim."
    )
    schedule, sigma = accountable(spec), spec.mechanism.noise_multiplier
    if schedule is not None and sigma is not None:
        try:
            unamplified = costs.unamplified_epsilon(spec, schedule)
            message += (
                f" Used once in every pass over the data and without amplification, a unit costs epsilon "
                f"{rounded_up(unamplified)} at delta {shown(spec.claim.delta)}; "
                f"claimed is {shown(spec.claim.epsilon)}."
            )
        except AccountingError:
            message += " What it costs without amplification could not be computed."
    fix = (
        f"Write {spec.snippet('scheme', 'poisson')} with the same expected batch size. The accountant models it, and "
        "PS020 or tfdp calibrate then says how much noise the claim takes."
    )
    yield spec.finding("PS010", Severity.ERROR, ("sampling", "scheme"), message, fix)


def accountant_models_sampler(spec: PrivacySpec) -> Iterator[Finding]:
    """PS011, PS017."""
    schedule = accountable(spec)
    if schedule is None or spec.sampling.scheme == "shuffle":
        return
    name, adjacency, path = spec.accountant.name, spec.claim.adjacency, ("accountant", "name")
    if (name, adjacency) == ("rdp", "replace_one"):
        message = (
            "expected an accountant that counts twice the clip norm, by which replacing one unit moves the sum, "
            "received rdp, which counts it once: its epsilon would be too small."
        )
        pld, write = _with(spec, path, "pld"), spec.change(path, "pld")
        if costs.unsupported_reason(pld, schedule) is None:
            other = _adjacency(spec, ["add_or_remove_one"])
            fix = f"I{write[1:]}, which counts it twice and may need more noise (tfdp calibrate says how much), or "
            fix += f"{other}."
        else:
            fix = f"I{write[1:]}, and beside it: {_what_is_modelled(pld, schedule)}"
        yield spec.finding("PS017", Severity.ERROR, path, message, fix)
        return
    reason = costs.unsupported_reason(spec, schedule)
    if reason is not None:
        message = (
            f"expected an accountant that models {spec.sampling.scheme} sampling under {adjacency}, received {name}:"
        )
        fix = _what_is_modelled(spec, schedule)
        why = reason.partition(";")[0].rstrip(".")  # what it goes on to propose takes no heed of the claim
        yield spec.finding("PS011", Severity.ERROR, path, f"{message} {why}.", fix[0].upper() + fix[1:])


def _what_is_modelled(spec: PrivacySpec, schedule: Schedule) -> str:
    """The one change after which the accountant models the sampler: first those that leave the claim as it is."""
    method, name = ("claim", "privacy_unit", "method"), ("accountant", "name")
    ways = [spec.change(name, value) for value in ("pld", "rdp") if _models(spec, schedule, name, value)]
    if schedule.records_per_unit > 1 and _models(
        spec, dataclasses.replace(schedule, records_per_unit=1), method, "user_wise_dp_sgd"
    ):
        ways.append(
            f"{spec.change(method, 'user_wise_dp_sgd')} (which keeps {spec.claim.adjacency}; expected_batch_size then "
            f"counts {spec.claim.privacy_unit.kind}s)"
        )
    if _models(spec, schedule, ("sampling", "scheme"), "poisson"):
        also = " (and delete truncated_batch_size)" if spec.sampling.truncated_batch_size is not None else ""
        ways.append(f"{spec.change(('sampling', 'scheme'), 'poisson')}{also}")
    adjacency = ("claim", "adjacency")
    others = ("add_or_remove_one", "replace_one", "zero_out")
    if modelled := [value for value in others if _models(spec, schedule, adjacency, value)]:
        ways.append(_adjacency(spec, modelled))
    if not ways:
        return "choose another accountant, adjacency or scheme."
    return f"{', or '.join(ways)}. Then tfdp calibrate says how much noise the claim takes."


def _models(spec: PrivacySpec, schedule: Schedule, path: Path, value: str) -> bool:
    """Whether another value at a path is one with which the accountant models the sampler."""
    changed = _with(spec, path, value)
    known_gap = (changed.accountant.name, changed.claim.adjacency) == ("rdp", "replace_one")
    return changed != spec and not known_gap and costs.unsupported_reason(changed, schedule) is None


def _adjacency(spec: PrivacySpec, values: list[str]) -> str:
    """The remedy of another adjacency, which is another claim."""
    weaker = "a weaker claim: replacing one unit is then bounded by about twice epsilon"
    what = weaker if spec.claim.adjacency == "replace_one" else "another claim: is it the one that was promised?"
    return f"{spec.change(('claim', 'adjacency'), ' or '.join(values))} ({what})"


def _with(spec: PrivacySpec, path: Path, value: str) -> PrivacySpec:
    """The spec with another value at a path."""

    def changed(part: Any, path: Path) -> Any:
        name = str(path[0])
        return part.model_copy(update={name: changed(getattr(part, name), path[1:]) if path[1:] else value})

    found: PrivacySpec = changed(spec, path)
    return found


def batch_fits_data(spec: PrivacySpec) -> Iterator[Finding]:
    """PS013."""
    sampling, (most, name) = spec.sampling, population(spec)
    if sampling.probability is not None and not sampling.probability <= 1:
        message = f"expected a probability of at most 1, received {shown(sampling.probability)}."
        fix = "Write q between 0 and 1, such as 0.01."
        if 1 < sampling.probability <= most and sampling.expected_batch_size is None:
            instead = spec.snippet("expected_batch_size", shown(sampling.probability))
            fix += f" Is it a batch size? Then write {instead} instead."
        yield spec.finding("PS013", Severity.ERROR, ("sampling", "probability"), message, fix)
    for field in ("expected_batch_size", "truncated_batch_size"):
        size = getattr(sampling, field)
        if size is not None and not size <= most:
            message = f"expected {field} of at most {name} = {most}, received {shown(size)}."
            full = f"{most} itself puts everything into every batch"
            if field == "expected_batch_size" and sampling.truncated_batch_size is not None:
                full += f"; truncated_batch_size, {sampling.truncated_batch_size}, has to stay well above it"
            fix = f"Write {spec.snippet(field, str(most))} or less ({full}), or correct {name}. "
            fix += "Then tfdp account says what it costs."
            yield spec.finding("PS013", Severity.ERROR, ("sampling", field), message, fix)


def numbers_agree(spec: PrivacySpec) -> Iterator[Finding]:
    """PS014."""
    for path, message, fix in conflicts(spec):
        yield spec.finding("PS014", Severity.ERROR, path, message, fix)


def few_batches_are_cut(spec: PrivacySpec) -> Iterator[Finding]:
    """PS015."""
    most, schedule = spec.sampling.truncated_batch_size, accountable(spec)
    if schedule is None or most is None:
        return
    mean = schedule.expected_batch_size
    deviation = math.sqrt(mean * (1 - schedule.sampling_probability))
    above = most + 0.5 - mean  # the binomial distribution by the normal one, with the continuity correction
    cut = math.erfc(above / deviation / math.sqrt(2)) / 2 if deviation > 0 else float(above < 0)
    if cut > _OFTEN:
        message = (
            f"expected truncated_batch_size above most draws, received {most} where {shown(mean)} are expected: about "
            f"{cut:.0%} of the batches are cut, and cost no less privacy for it."
        )
        enough = suggested_truncation(mean, schedule.population)
        fix = f"Write {spec.snippet('truncated_batch_size', str(enough))}"
        smaller = math.floor((math.sqrt(most + 4) - 2) ** 2)  # the size whose suggested truncation is this one
        if spec.sampling.expected_batch_size is not None and smaller >= 1:
            fix += f", or {spec.snippet('expected_batch_size', str(smaller))} to keep {most} as the largest batch"
        path = ("sampling", "truncated_batch_size")
        yield spec.finding("PS015", Severity.WARNING, path, message, f"{fix}.")


def size_is_known(spec: PrivacySpec) -> Iterator[Finding]:
    """PS018."""
    sampling = spec.sampling
    if spec.data.size_is_public or spec.claim.adjacency != "add_or_remove_one" or sampling.expected_batch_size is None:
        return
    message = (
        f"expected a probability, because the number of units is private, received expected_batch_size "
        f"{shown(sampling.expected_batch_size)}: divided by that number it gives q, and add_or_remove_one protects the "
        f"number."
    )
    probability = shown(sampling.expected_batch_size / population(spec)[0])
    public = spec.change(("data", "size_is_public"), "true")
    fix = (
        f"Write {spec.snippet('probability', probability)} in its place, or {public}, or claim zero_out or replace_one."
    )
    yield spec.finding("PS018", Severity.NOTE, ("sampling", "expected_batch_size"), message, fix)


def accountable(spec: PrivacySpec) -> Schedule | None:
    """The schedule when it can be accounted; None after PS005, PS013 or PS014, which already block the spec."""
    if any(finding for rule in (unit_is_complete, batch_fits_data, numbers_agree) for finding in rule(spec)):
        return None
    return spec.schedule
