"""Two privacy specs."""

from __future__ import annotations

import math
from functools import partial

from tfdp.comparison import orders
from tfdp.comparison.changes import Change, Comparison, Direction
from tfdp.comparison.engine import judged, ranked
from tfdp.comparison.orders import Judgement, Rule
from tfdp.comparison.rules import MECHANISM, PART_OF_THE_MECHANISM, REVIEW, SPEC_RULES, SPEC_WHOLE
from tfdp.errors import AccountingError
from tfdp.findings import errors
from tfdp.review import review
from tfdp.spec import PrivacySpec
from tfdp.spec.numbers import shown

_PROMISE = frozenset(
    {
        REVIEW,
        *(f"claim.privacy_unit.{name}" for name in ("kind", "description", "id_field", "sequence_length")),
        "claim.adjacency",
        "sampling.scheme",
    }
)
_AMOUNTS = frozenset({"claim.delta", "claim.epsilon", MECHANISM})
_IN_THE_EVENT = frozenset(
    {
        *(name for name, rule in SPEC_RULES.items() if rule is PART_OF_THE_MECHANISM),
        "claim.privacy_unit.max_records_per_unit",
        "claim.privacy_unit.method",
    }
)
_ROUNDING = 1e-6
_CALIBRATION = 2e-3  # a calibrated noise multiplier stays up to a thousandth below the claim


def compare_specs(old: PrivacySpec, new: PrivacySpec, *, old_name: str = "old", new_name: str = "new") -> Comparison:
    """What changed, whether privacy became weaker or stronger, and why.

    The claim counts, and what the mechanism costs where its noise is given: a claim that stays while the noise shrinks
    is weaker too. Errors of the review count as well, because a claim that is not earned promises nothing.
    """
    two_steps = _two_steps_suffice(old, new)
    method, neighbours = new.claim.privacy_unit.method, new.claim.adjacency
    contained = two_steps or method == "group_privacy" or neighbours == "replace_one"
    special: dict[str, Rule] = {
        "claim.privacy_unit.kind": partial(orders.unit_kind, contained=contained),
        "claim.adjacency": partial(
            orders.adjacency,
            two_steps_suffice=two_steps,
            size_is_public=old.data.size_is_public and new.data.size_is_public,
        ),
        "data.size_is_public": partial(orders.size_is_public, hidden=old.claim.adjacency == "add_or_remove_one"),
        "claim.privacy_unit.method": partial(
            orders.unit_method, same_unit=old.claim.privacy_unit.kind == new.claim.privacy_unit.kind
        ),
        "sampling.scheme": _scheme,
    }
    changes = judged(old.to_dict(), new.to_dict(), SPEC_RULES, SPEC_WHOLE, special)
    if changes:
        changes += [*_mechanism(old, new, changes), *_review(old, new)]
    return Comparison("spec", old_name, new_name, ranked(changes, SPEC_RULES, _PROMISE, _AMOUNTS))


def _two_steps_suffice(old: PrivacySpec, new: PrivacySpec) -> bool:
    """Whether the new claim, about data sets two neighbours apart, is within the old one."""
    epsilon, delta = orders.two_steps(new.claim.epsilon, new.claim.delta)
    return epsilon <= old.claim.epsilon and delta <= old.claim.delta


def _scheme(old: str, new: str) -> Judgement:
    if new == "shuffle":
        return Direction.WEAKER, "Shuffled batches have no amplification to claim."
    if old == "shuffle":
        return Direction.STRONGER, "Each unit joins each batch independently now, and the accountant models that."
    return PART_OF_THE_MECHANISM(old, new)


def _mechanism(old: PrivacySpec, new: PrivacySpec, changes: list[Change]) -> list[Change]:
    """What both mechanisms cost at one delta, where the noise of at least one is given."""
    changed = {change.where for change in changes}
    given = [spec for spec in (old, new) if spec.mechanism.noise_multiplier is not None]
    shuffled = "shuffle" in (old.sampling.scheme, new.sampling.scheme)
    if not given or shuffled or not changed & _IN_THE_EVENT:
        return []
    if changed & {"claim.privacy_unit.kind", "claim.adjacency"}:
        return []  # another quantity; those two have been judged
    calibrated = [spec for spec in (old, new) if spec not in given]
    delta = calibrated[0].claim.delta if calibrated else new.claim.delta
    one, other = _costs(old, new, delta)
    if one is None or other is None:
        why = "What the mechanisms cost could not be computed for both, so nobody can tell: see the review."
        return [Change(MECHANISM, _told(one), _told(other), Direction.INCOMPARABLE, why)]
    slack = _CALIBRATION if calibrated else _ROUNDING
    how = f"Computed at delta {shown(delta)}; with noise that is calibrated it is the claimed epsilon."
    if math.isclose(one, other, rel_tol=slack):
        return [Change(MECHANISM, _told(one), _told(other), Direction.UNCHANGED, how)]
    direction = Direction.WEAKER if not other <= one else Direction.STRONGER
    return [Change(MECHANISM, _told(one), _told(other), direction, how)]


def _costs(old: PrivacySpec, new: PrivacySpec, delta: float) -> tuple[float | None, float | None]:
    """By the same accountant for both: a tighter one is no progress of the mechanism. None: not computable."""
    costs = _cost_if_any(old, delta, "pld"), _cost_if_any(new, delta, "pld")
    if None in costs:
        costs = _cost_if_any(old, delta, "rdp"), _cost_if_any(new, delta, "rdp")
    return costs


def _cost_if_any(spec: PrivacySpec, delta: float, accountant: str) -> float | None:
    try:
        return _cost(spec, delta, accountant)
    except (AccountingError, ValueError):
        return None


def _cost(spec: PrivacySpec, delta: float, accountant: str) -> float:
    sigma = spec.mechanism.noise_multiplier
    if sigma is None:
        return spec.claim.epsilon
    from tfdp import accounting

    schedule = spec.schedule
    event = accounting.step_event(
        scheme=spec.sampling.scheme,
        sampling_probability=schedule.sampling_probability,
        noise_multiplier=sigma,
        num_units=schedule.population,
        truncated_batch_size=spec.sampling.truncated_batch_size,
        records_per_unit=schedule.records_per_unit,
    )
    return accounting.epsilon(event, schedule.steps, delta=delta, accountant=accountant, adjacency=spec.claim.adjacency)


def _told(epsilon: float | None) -> float | str:
    if epsilon is None:
        return "not computable"
    return epsilon if math.isfinite(epsilon) else "unbounded"


def _review(old: PrivacySpec, new: PrivacySpec) -> list[Change]:
    """Errors of the review: a claim that is not earned promises nothing."""
    found = errors(review(new))
    one, other = ([finding.model_dump(mode="json") for finding in side] for side in (errors(review(old)), found))
    if not one and not other:
        return []
    direction, why = orders.error_findings(one, other)
    before, after = (sorted({finding["id"] for finding in side}) for side in (one, other))
    details = tuple(f"{finding.id}: {finding.where}: {finding.message}" for finding in found)
    return [Change(REVIEW, before, after, direction, why, details=details)]
