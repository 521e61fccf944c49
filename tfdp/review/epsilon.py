"""Rules on the number itself: is epsilon what the mechanism costs, and is it computed well?"""

from __future__ import annotations

import math
from collections.abc import Iterator

from tfdp.errors import AccountingError
from tfdp.findings import Finding, Severity, errors
from tfdp.review import costs
from tfdp.review.claim import RELATIVE_SLACK, delta_against_size, method_protects_unit
from tfdp.review.sampling import accountable, accountant_models_sampler
from tfdp.spec import PrivacySpec, Schedule
from tfdp.spec.numbers import counted, rounded_up, shown, with_article

UNUSED = 0.1  # of the budget, above which it is worth a word
_SAME_COST = 1.25  # times the cost of one record: a claim up to there was computed for one record


def epsilon_is_earned(spec: PrivacySpec) -> Iterator[Finding]:
    """PS006, PS020, and PS021 for what is left over."""
    yield from _earned(spec, calibrated=False)


def epsilon_is_earned_or_how(spec: PrivacySpec) -> Iterator[Finding]:
    """The same, with the noise that keeps the claim: a search, so only for a reviewer."""
    yield from _earned(spec, calibrated=True)


def _earned(spec: PrivacySpec, *, calibrated: bool) -> Iterator[Finding]:
    schedule = priced(spec)
    if schedule is None:
        return
    claimed, sigma, path = spec.claim.epsilon, spec.mechanism.noise_multiplier, ("claim", "epsilon")
    fix = "Raise noise_multiplier in mechanism (null calibrates it), lower the steps, or claim what it costs."
    fix += f" {_command(spec, schedule)} says how much noise the claim takes."
    try:
        recomputed = costs.epsilon(spec, schedule)
    except AccountingError as error:
        message = f"expected an epsilon that can be recomputed, received: {str(error).rstrip('.')}."
        yield spec.finding("PS020", Severity.ERROR, path, message, fix)
        return
    cost = rounded_up(recomputed) if math.isfinite(recomputed) else "unbounded"
    setting = (
        f"at delta {shown(spec.claim.delta)} ({counted(schedule.steps, 'step')}, "
        f"q = {schedule.sampling_probability:.4g}, sigma = {shown(sigma or 0.0)}, {spec.accountant.name}, "
        f"{spec.claim.adjacency})"
    )
    if not recomputed <= claimed * (1 + RELATIVE_SLACK):
        fix = _remedy(spec, schedule, recomputed) if calibrated else fix
        single = _cost_of_one_record(spec, schedule)
        if single is not None and single <= claimed * (1 + RELATIVE_SLACK) and claimed <= single * _SAME_COST:
            message = (
                f"expected epsilon for all {schedule.records_per_unit} records of "
                f"{with_article(spec.claim.privacy_unit.kind)}, {cost} {setting}, "
                f"received {shown(claimed)}, which hides one record only (that costs {rounded_up(single)})."
            )
            yield spec.finding("PS006", Severity.ERROR, path, message, fix)
            return
        message = f"expected the mechanism to cost at most the claimed {shown(claimed)}, received {cost} {setting}."
        yield spec.finding("PS020", Severity.ERROR, path, message, fix)
    elif recomputed < (1 - UNUSED) * claimed and not errors([*delta_against_size(spec), *method_protects_unit(spec)]):
        message = (
            f"expected a claim within {UNUSED:.0%} of what the mechanism costs, received {shown(claimed)} where it "
            f"costs {cost} {setting}: {1 - recomputed / claimed:.0%} of the budget is not used."
        )
        fix = (
            f"Claim {cost}, or use what is left: more steps, or less noise ({spec.snippet('noise_multiplier', 'null')} "
            f"computes the least; {_command(spec, schedule)} shows it)."
        )
        yield spec.finding("PS021", Severity.NOTE, path, message, fix)


def _remedy(spec: PrivacySpec, schedule: Schedule, cost: float) -> str:
    """Each way out in numbers: they are certified or rounded so that they pass."""
    claim = ""
    if math.isfinite(cost):
        claim = f", or {spec.change(('claim', 'epsilon'), str(rounded_up(cost)))}, which is what it costs"
    try:
        sigma = costs.least_noise(spec, schedule)
    except AccountingError:
        sigma = None
    if sigma is None:
        null = spec.change(("mechanism", "noise_multiplier"), "null")
        ways = f"I{null[1:]}, which computes the least that keeps the claim{claim}, or take fewer steps."
        return f"{ways} {_command(spec, schedule)} says how much noise the claim takes."
    noise = spec.change(("mechanism", "noise_multiplier"), shown(sigma))
    return (
        f"I{noise[1:]}, the least that keeps the claim at this delta (null computes it anew){claim}, or take fewer "
        "steps."
    )


def _command(spec: PrivacySpec, schedule: Schedule) -> str:
    """The call that calibrates this claim, to be copied."""
    sampling = spec.sampling
    options = {
        "num-units": schedule.population,
        "batch-size": None if sampling.scheme == "full_batch" else shown(schedule.expected_batch_size),
        "steps": schedule.steps,
        "epsilon": shown(spec.claim.epsilon),
        "delta": shown(spec.claim.delta),
        "accountant": None if spec.accountant.name == "pld" else spec.accountant.name,
        "adjacency": None if spec.claim.adjacency == "add_or_remove_one" else spec.claim.adjacency,
        "scheme": None if sampling.scheme == "poisson" else sampling.scheme,
        "truncated-batch-size": sampling.truncated_batch_size,
        "records-per-unit": None if schedule.records_per_unit == 1 else schedule.records_per_unit,
    }
    flags = (f"--{name} {value}" for name, value in options.items() if value is not None)
    return f"`tfdp calibrate {' '.join(flags)}`"


def renyi_order_is_inside(spec: PrivacySpec) -> Iterator[Finding]:
    """PS022."""
    schedule = priced(spec)
    if schedule is None or spec.accountant.name != "rdp":
        return
    best = costs.renyi_order(spec, schedule)
    if best is not None and best[1]:
        message = (
            f"expected the best Renyi order inside the range that is tried, received order {shown(best[0])} at its "
            "end: epsilon holds, but a better order may lie outside."
        )
        yield spec.finding("PS022", Severity.WARNING, ("accountant", "name"), message, "Use accountant pld.")


def renyi_against_pld(spec: PrivacySpec) -> Iterator[Finding]:
    """PS021 for the choice of accountant; costs a second accounting, so only for a reviewer."""
    schedule = priced(spec)
    if schedule is None or spec.accountant.name != "rdp":
        return
    try:
        renyi, pld = costs.epsilon(spec, schedule), costs.epsilon(spec, schedule, accountant="pld")
    except AccountingError:
        return
    if pld * (1 + UNUSED) < renyi:
        message = (
            f"expected the tightest accountant, received rdp, by which the mechanism costs {rounded_up(renyi, 4)} "
            f"where pld shows {rounded_up(pld, 4)}."
        )
        yield spec.finding("PS021", Severity.NOTE, ("accountant", "name"), message, "Use accountant pld.")


def prv_is_pld(spec: PrivacySpec) -> Iterator[Finding]:
    """PS024."""
    if spec.accountant.name == "prv":
        message = "received accountant prv: it is answered by the pld accountant, of the same numerical family."
        yield spec.finding(
            "PS024", Severity.NOTE, ("accountant", "name"), message, "Write pld to say what is computed."
        )


def priced(spec: PrivacySpec) -> Schedule | None:
    """The schedule where there is an epsilon to compute: a stated sigma, a sampler and an accountant that fit."""
    if spec.mechanism.noise_multiplier is None or spec.sampling.scheme == "shuffle":
        return None
    schedule = accountable(spec)
    return None if schedule is None or any(accountant_models_sampler(spec)) else schedule


def _cost_of_one_record(spec: PrivacySpec, schedule: Schedule) -> float | None:
    if schedule.records_per_unit == 1:
        return None
    try:
        return costs.epsilon(spec, schedule, records_per_unit=1)
    except AccountingError:
        return None
