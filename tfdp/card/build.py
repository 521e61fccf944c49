"""From the ledger and the inputs to the card: one function, which is also how a card is checked.

Epsilon comes from the steps in the ledger. Nothing is claimed when anything that the claim rests on does not hold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from tfdp import accounting
from tfdp.card import checks, formats, words
from tfdp.card.fields import UNBOUNDED, Bound
from tfdp.card.inputs import CardInputs
from tfdp.card.model import (
    Accounting,
    AdaptiveClipping,
    Budget,
    Claim,
    ClipNormPoint,
    Data,
    DeltaPoint,
    Group,
    Groups,
    Guarantee,
    Legal,
    MembershipBound,
    PrivacyCard,
    Provenance,
    Review,
    StepPoint,
    Use,
    UserLevel,
    Utility,
)
from tfdp.errors import AccountingError, CardError, SpecError
from tfdp.evaluation import better_direction
from tfdp.findings import Finding
from tfdp.ledger import LedgerRecord
from tfdp.spec import PrivacySpec

_CURVE_POINTS = 16
_CLIP_NORM_POINTS = 40
_CURVE_DELTAS = tuple(10.0**exponent for exponent in range(-10, -1))
_FALSE_POSITIVE_RATES = (0.001, 0.01, 0.05, 0.1)


def build_card(record: LedgerRecord, inputs: CardInputs) -> PrivacyCard:
    """The card of a run.

    Raises:
        CardError: no step ran, or the ledger holds a spec that cannot be read.
    """
    if record.steps == 0:
        raise CardError(
            f"Expected a ledger with at least one executed step, received {record.path} with none. "
            "Train with tfdp.PrivacyCallback(plan, ledger=...) first, and export with that ledger."
        )
    try:
        spec = PrivacySpec.from_dict(record.spec)
    except SpecError as error:
        raise CardError(
            f"Expected {record.path} to hold the spec of the run, received one that cannot be read: {error}"
        ) from error
    try:
        account = _accounting(record)
    except (TypeError, ValidationError) as error:
        raise CardError(
            f"Expected {record.path} to hold the plan of the run, received one that cannot be accounted: {error}. "
            "The header was changed: restore the ledger from a copy."
        ) from error
    realised = account.epsilon_with_amplification
    groups = _groups(spec, inputs)
    spent = _budget(spec, record, inputs, realised)
    findings = checks.findings(record, spec, account, inputs, groups, spent)
    waivers = checks.waivers(spec, findings, inputs.created)
    findings += checks.waiver_findings(waivers)
    reasons = checks.reasons_against_the_claim(findings, account)
    return PrivacyCard(
        schema_version="1.0",
        title=inputs.title,
        created=inputs.created,
        claim=_claim(spec, record, realised, reasons),
        guarantee=_guarantee(spec, record, realised, claimed=not reasons),
        accounting=account,
        data_accesses=words.data_accesses(spec, inputs, account, record.of_kind("data_access"), claimed=not reasons),
        not_covered=words.exclusions(spec, inputs),
        data=Data(
            source=inputs.data_source,
            num_units=spec.data.num_units,
            num_records=spec.data.num_records,
            size_is_public=spec.data.size_is_public,
            deduplication=spec.data.deduplication,
            deduplication_scope=inputs.deduplication_scope,
            contribution_map=words.contribution_map(spec),
        ),
        utility=Utility(metrics=inputs.metrics, training=inputs.training),
        groups=groups,
        attacks=inputs.attacks,
        audit=inputs.audit,
        use=Use(intended_use=inputs.intended_use, limits=inputs.limits),
        provenance=_provenance(record, inputs),
        budget=spent,
        review=Review(findings=tuple(findings), waivers=waivers),
        legal=Legal(licence=inputs.licence, citation=inputs.citation, glossary=words.GLOSSARY),
    )


def _accounting(record: LedgerRecord) -> Accounting:
    plan = record.plan
    setting = {"accountant": plan["accountant"], "adjacency": plan["adjacency"]}
    event, adaptive = record.event, _adaptive_clipping(record)
    epsilon = record.epsilon()
    # Epsilon grows like a root of the steps: points lie denser at the beginning.
    steps = sorted(
        {math.ceil(record.steps * (index / _CURVE_POINTS) ** 1.5) for index in range(1, _CURVE_POINTS)} | {1}
    )
    curve = accounting.epsilon_curve(event, steps, delta=plan["delta"], grid=_curve_grid(record), **setting)
    # On the coarser grid a point may stand above the certified end; fewer steps never cost more.
    points = [(step, min(value, epsilon)) for step, value in zip(steps, curve, strict=True) if step < record.steps]
    return Accounting(
        accountant=plan["accountant"],
        accountant_version=f"dp-accounting {accounting.library_version()}",
        adjacency=plan["adjacency"],
        sampler_assumed=words.sampler_of(event),
        sampler_ran=plan["scheme"],
        num_units=plan["num_units"],
        num_records=plan.get("num_records"),
        sampling_probability=plan["sampling_probability"],
        expected_batch_size=float(plan["expected_batch_size"]),
        truncated_batch_size=plan.get("truncated_batch_size"),
        records_per_unit=plan.get("records_per_unit", 1),
        group_size=words.sensitivity_of(event),
        noise_multiplier=float(plan["noise_multiplier"]),
        clip_norm=float(plan["clip_norm"]),
        noise_stddev=(adaptive.gradient_noise_multiplier if adaptive else float(plan["noise_multiplier"]))
        * float(plan["clip_norm"]),
        layer_clip_norms=_layer_clip_norms(record),
        adaptive_clipping=adaptive,
        steps_planned=plan["steps"],
        steps_executed=record.steps,
        torn_last_line=record.torn or any("torn" in entry for entry in record.of_kind("step")),
        epsilon_with_amplification=Bound.of(epsilon),
        epsilon_without_amplification=Bound.of(_without_amplification(record)),
        epsilon_of_one_record=_of_one_record(record, group=False),
        generic_group_epsilon=_of_one_record(record, group=True),
        epsilon_over_steps=tuple(
            StepPoint(step=step, epsilon=Bound.of(value))
            for step, value in [(0, 0.0), *points, (record.steps, epsilon)]
        ),
        epsilon_of_delta=_epsilon_of_delta(record, epsilon),
    )


def _adaptive_clipping(record: LedgerRecord) -> AdaptiveClipping | None:
    described = record.plan.get("adaptive_clipping")
    if described is None:
        return None
    # Lines that were cut short hold no norm.
    used = [(entry["step"], entry["clip_norm"]) for entry in record.of_kind("step") if "clip_norm" in entry]
    norms = [norm for _, norm in used] or [float(record.plan["clip_norm"])]
    last = len(used) - 1
    kept = sorted({index * last // _CLIP_NORM_POINTS for index in range(_CLIP_NORM_POINTS + 1)}) if used else []
    return AdaptiveClipping(
        **described,
        count_share=accounting.AdaptiveClipping.from_dict(described).count_share,
        first=norms[0],
        last=norms[-1],
        smallest=min(norms),
        largest=max(norms),
        over_steps=tuple(ClipNormPoint(step=used[index][0], clip_norm=used[index][1]) for index in kept),
    )


def _layer_clip_norms(record: LedgerRecord) -> dict[str, float] | None:
    """Those of the last fit: which layers train may change between two, C does not."""
    fits = record.of_kind("fit_begin")
    return fits[-1].get("layer_clip_norms") if fits else None


def _without_amplification(record: LedgerRecord) -> float:
    plan = record.plan
    return accounting.unamplified_epsilon(
        noise_multiplier=plan["noise_multiplier"],
        sampling_probability=plan["sampling_probability"],
        steps=record.steps,
        delta=plan["delta"],
        adjacency=plan["adjacency"],
        accountant=plan["accountant"],
        records_per_unit=words.sensitivity_of(record.event),
    )


def _of_one_record(record: LedgerRecord, *, group: bool) -> Bound | None:
    """Under group privacy, epsilon of one record, or what follows from such epsilons for the whole group."""
    plan, size = record.plan, words.sensitivity_of(record.event)
    if size == 1:
        return None
    event = accounting.step_event(
        scheme=plan["scheme"],
        sampling_probability=plan["sampling_probability"],
        noise_multiplier=plan["noise_multiplier"],
        num_units=plan.get("num_records") or plan["num_units"],
    )
    setting = {"delta": plan["delta"], "accountant": plan["accountant"], "adjacency": plan["adjacency"]}
    if group:
        return Bound.of(accounting.generic_group_epsilon(event, record.steps, group_size=size, **setting))
    return Bound.of(accounting.epsilon(event, record.steps, **setting))


def _curve_grid(record: LedgerRecord) -> float | None:
    """Ten times coarser than what the claim is certified on: still an upper bound, and quick."""
    if record.plan["accountant"] == "rdp" or record.plan["noise_multiplier"] == 0:
        return None
    grid = accounting.default_grid(record.event, record.steps, record.plan["adjacency"])
    return grid if record.plan["scheme"] == "truncated_poisson" else 10 * grid  # whose grid is coarse already


def _epsilon_of_delta(record: LedgerRecord, epsilon: float) -> tuple[DeltaPoint, ...]:
    plan = record.plan
    points = [(plan["delta"], epsilon)]
    for delta in _CURVE_DELTAS:
        if math.isclose(delta, plan["delta"]):
            continue
        try:
            (value,) = accounting.epsilon_curve(
                record.event,
                [record.steps],
                delta=delta,
                accountant=plan["accountant"],
                adjacency=plan["adjacency"],
                grid=_curve_grid(record),
            )
        except AccountingError:  # below what double precision can certify: no point there
            continue
        points.append((delta, min(value, epsilon) if delta > plan["delta"] else value))
    return tuple(DeltaPoint(delta=delta, epsilon=Bound.of(value)) for delta, value in sorted(points))


def _claim(spec: PrivacySpec, record: LedgerRecord, realised: Bound, reasons: Sequence[str]) -> Claim:
    if reasons:
        sentence = (
            f"No differential privacy is claimed for this model. {' '.join(reasons)} "
            "The numbers below say what was computed, not what is guaranteed."
        )
    else:
        sentence = words.claim_sentence(spec, formats.bound(realised), formats.exact(record.plan["delta"]))
    return Claim(
        status="not claimed" if reasons else "claimed",
        sentence=sentence,
        reasons=tuple(reasons),
        epsilon=UNBOUNDED if reasons else realised,
        delta=record.plan["delta"],
        privacy_unit=spec.claim.privacy_unit.kind,
        adjacency=record.plan["adjacency"],
        trust_model=spec.claim.trust_model,
        release=spec.claim.release,
    )


def _guarantee(spec: PrivacySpec, record: LedgerRecord, realised: Bound, *, claimed: bool) -> Guarantee:
    unit = spec.claim.privacy_unit
    delta = record.plan["delta"]
    # Where nothing is claimed nothing follows from epsilon either.
    epsilon = realised.value if claimed and realised.value is not None else math.inf
    possible = claimed and unit.kind == "user"
    return Guarantee(
        target_epsilon=record.plan["target_epsilon"],
        realised_epsilon=realised,
        delta=delta,
        delta_times_units=delta * spec.data.num_units,
        unit_kind=unit.kind,
        unit_definition=unit.description,
        unit_id_field=unit.id_field,
        unit_method=unit.method,
        max_records_per_unit=unit.max_records_per_unit,
        selection=unit.selection,
        sequence_length=unit.sequence_length,
        user_level=UserLevel(
            possible=possible,
            epsilon=realised if possible else None,
            statement=words.user_level(spec, claimed=claimed),
        ),
        membership=tuple(
            MembershipBound(
                false_positive_rate=rate, max_true_positive_rate=accounting.max_true_positive_rate(epsilon, delta, rate)
            )
            for rate in _FALSE_POSITIVE_RATES
        ),
        max_membership_advantage=accounting.max_membership_advantage(epsilon, delta),
    )


def _groups(spec: PrivacySpec, inputs: CardInputs) -> Groups:
    given = inputs.groups
    minimum = spec.evaluation.min_group_size if spec.evaluation else None
    stated = next((one.better for one in inputs.metrics if one.name == given.metric), None)
    direction = stated or better_direction(given.metric or "")
    rows = []
    for row in given.rows:
        small = row.suppressed or (minimum is not None and (row.n is None or row.n < minimum))
        if small:
            rows.append(Group(name=row.name, suppressed=True))
            continue
        gap = None if row.value is None or given.whole is None else row.value - given.whole
        rows.append(row.model_copy(update={"gap": gap}))
    shown = [row for row in rows if row.value is not None]
    worst = None
    if shown and direction:
        worst = (max if direction == "lower" else min)(shown, key=lambda row: row.value or 0.0).name
    return Groups(
        field=given.field,
        metric=given.metric,
        better=direction,
        whole=given.whole,
        minimum_size=minimum,
        rows=tuple(rows),
        worst=worst,
    )


def _provenance(record: LedgerRecord, inputs: CardInputs) -> Provenance:
    return Provenance(
        model=inputs.model,
        spec_digest=record.plan["spec_digest"],
        plan_digest=record.plan["digest"],
        ledger_digest=record.digest,
        ledger_file=inputs.ledger_file,
        ledger_created=record.created,
        parameters_digest=inputs.parameters_digest,
        weights_digest=inputs.weights_digest,
        weights_file=inputs.weights_file,
        versions=record.versions,
        gradients=words.gradients(record),
        rng=record.plan.get("rng", "not stated"),
        seed=record.plan.get("seed"),
        hardware=inputs.hardware,
        command=inputs.command,
        timings=inputs.timings,
        written_by=inputs.written_by,
    )


def _budget(spec: PrivacySpec, record: LedgerRecord, inputs: CardInputs, realised: Bound) -> Budget:
    budget, before, after = spec.budget, inputs.spent_before, None
    if inputs.others is not None:
        delta = (budget.delta_cap if budget else None) or record.plan["delta"]
        runs = [(_event(run.step_event), run.steps) for run in inputs.others if not run.trial]
        selections = [
            accounting.Selection(_event(each.step_event), each.steps, each.mean, each.shape or math.inf)
            for each in inputs.selections
        ]
        setting = {"delta": delta, "adjacency": record.plan["adjacency"], "selections": selections}
        others, _ = accounting.composed_epsilon(runs, **setting)
        own = [] if inputs.is_trial else [(record.event, record.steps)]
        together, _ = accounting.composed_epsilon([*runs, *own], **setting)
        before, after = None if math.isinf(others) else others, Bound.of(together)
    elif before is not None:
        after = UNBOUNDED if realised.value is None else Bound.of(before + realised.value)
    return Budget(
        dataset_id=budget.dataset_id if budget else None,
        epsilon_cap=budget.epsilon_cap if budget else None,
        delta_cap=budget.delta_cap if budget else None,
        spent_before=before,
        spent_by_this_run=realised,
        spent_after=after,
        other_runs=words.other_runs(inputs),
        others=inputs.others,
        selections=inputs.selections,
        is_trial=inputs.is_trial,
    )


def _event(fields: Mapping[str, Any]) -> Any:
    return accounting.event_from_dict(dict(fields))


def errors_of(card: PrivacyCard) -> list[Finding]:
    """The findings on a card that block a release."""
    return [finding for finding in card.review.findings if finding.severity.value == "error"]
