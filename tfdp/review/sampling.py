"""Rules on the sampler: is it modelled by the accountant, and do its numbers agree?"""

from __future__ import annotations

from collections.abc import Iterator

from tfdp.errors import AccountingError
from tfdp.findings import Finding, Severity
from tfdp.review import costs
from tfdp.review.claim import unit_is_complete
from tfdp.spec import PrivacySpec, Schedule
from tfdp.spec.consistency import conflicts, population
from tfdp.spec.numbers import rounded_up, shown


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
        fix = (
            f"Write {spec.snippet('accountant.name', 'pld')}, which counts it twice and needs more noise (tfdp "
            "calibrate says how much), or claim adjacency add_or_remove_one."
        )
        yield spec.finding("PS017", Severity.ERROR, path, message, fix)
        return
    reason = costs.unsupported_reason(spec, schedule)
    if reason is not None:
        message = (
            f"expected an accountant that models {spec.sampling.scheme} sampling under {adjacency}, received {name}:"
        )
        fix = _what_is_modelled(spec, schedule)
        yield spec.finding("PS011", Severity.ERROR, path, f"{message} {reason.rstrip('.')}.", fix)


def _what_is_modelled(spec: PrivacySpec, schedule: Schedule) -> str:
    """The one change of accountant, adjacency or scheme after which the accountant models the sampler."""
    ways = []
    for section, field, values in (
        ("accountant", "name", ("pld", "rdp")),
        ("claim", "adjacency", ("add_or_remove_one", "replace_one", "zero_out")),
        ("sampling", "scheme", ("poisson",)),
    ):
        for value in values:
            part = getattr(spec, section)
            changed = spec.model_copy(update={section: part.model_copy(update={field: value})})
            known_gap = (changed.accountant.name, changed.claim.adjacency) == ("rdp", "replace_one")
            if value != getattr(part, field) and not known_gap and costs.unsupported_reason(changed, schedule) is None:
                also = " (and delete truncated_batch_size)" if spec.sampling.truncated_batch_size is not None else ""
                ways.append(f"{spec.snippet(f'{section}.{field}', value)}{also if field == 'scheme' else ''}")
    if not ways:
        return "Choose another accountant, adjacency or scheme."
    return f"Write {' or '.join(ways)}. Then tfdp calibrate says how much noise the claim takes."


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
            fix = f"Write {spec.snippet(field, str(most))} or less, or correct {name}. "
            fix += "Then tfdp account says what it costs."
            yield spec.finding("PS013", Severity.ERROR, ("sampling", field), message, fix)


def numbers_agree(spec: PrivacySpec) -> Iterator[Finding]:
    """PS014."""
    for path, message, fix in conflicts(spec):
        yield spec.finding("PS014", Severity.ERROR, path, message, fix)


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
    public = spec.snippet("size_is_public", "true")
    fix = f"Write sampling.probability, or state {public}, or claim zero_out or replace_one."
    yield spec.finding("PS018", Severity.NOTE, ("sampling", "expected_batch_size"), message, fix)


def accountable(spec: PrivacySpec) -> Schedule | None:
    """The schedule when it can be accounted; None after PS005, PS013 or PS014, which already block the spec."""
    if any(finding for rule in (unit_is_complete, batch_fits_data, numbers_agree) for finding in rule(spec)):
        return None
    return spec.schedule
