"""What is wrong with, or missing from, a run and its card.

| id            | severity      | what is wrong                                                                |
|---------------|---------------|------------------------------------------------------------------------------|
| PS020         | error         | the executed steps cost more than the claim, or anything at all without noise|
| PS030         | error         | what ran is not what the spec says                                           |
| PS031         | error         | the spec in the ledger is not the one that the plan was made from            |
| PS032, PS033  | error/warning | the cap of the budget is exceeded, or nearly used up                         |
| PS040         | warning       | trials are called accounted that no ledger has                               |
| PS041         | error/warning | a clip norm chosen after a look at gradients of the private data             |
| PS042         | error/warning | randomness with a fixed seed, or not from the operating system               |
| PS043 - PS045 | error         | an audit found the gradients of the private step to be others than claimed   |
| PS050, PS051  | warning/note  | no metrics per group; a group too small to show                              |
| PS052 - PS054 | mixed         | no attack; an attack that refutes the claim; an attack without its numbers   |
| PS060, PS061  | error/warning | a waiver that has expired, or that nobody owns                               |
| PS070 - PS074 | warning/note  | no utility, no baseline or interval, nothing learned, not finite, not stated |
| PS083         | error         | the model is not one that the ledger's run left                              |

The findings of `tfdp.review` on the spec come first.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from tfdp import accounting
from tfdp.card import formats
from tfdp.card.inputs import CardInputs
from tfdp.card.model import Accounting, Budget, Groups, Waiver, WaiverState
from tfdp.errors import AccountingError
from tfdp.files import sha256_text
from tfdp.findings import Finding, Severity
from tfdp.ledger import LedgerRecord
from tfdp.review import RELATIVE_SLACK, review
from tfdp.spec import PrivacySpec
from tfdp.spec.fields import Clipping

# These errors block a release; the numbers on the card are true all the same.
_CLAIM_STANDS = frozenset({"PS032", "PS052", "PS060"})
_LOW_RATE = 0.01
# What the spec plans; the run tells what came of it.
_BETTER_KNOWN = frozenset({"PS021", "PS032", "PS033", "PS042"})


def findings(
    record: LedgerRecord, spec: PrivacySpec, account: Accounting, inputs: CardInputs, groups: Groups, spent: Budget
) -> list[Finding]:
    """Every finding, those of the spec first."""
    return [
        *(
            finding.model_copy(update={"file": None, "line": None, "column": None})
            for finding in review(spec)
            if finding.id not in _BETTER_KNOWN
        ),
        *_claim(record, spec, account),
        *_differences(record, spec, account),
        *randomness(record),
        *_looks(record, spec),
        *_model(record, inputs),
        *_budget(spec, spent),
        *_trials(spec, inputs),
        *_groups(groups),
        *_attacks(spec, account, inputs),
        *_utility(inputs),
        *_unstated(inputs),
    ]


def contract_digest(plan: dict[str, Any]) -> str:
    """The digest that a plan of these fields has; see `Plan.digest`."""
    contract = {name: value for name, value in plan.items() if name not in ("digest", "noise_stddev", "spec")}
    return sha256_text(json.dumps(contract, sort_keys=True, separators=(",", ":"), allow_nan=False))


def reasons_against_the_claim(found: Sequence[Finding], account: Accounting) -> list[str]:
    """Why nothing can be claimed, as sentences; empty when the claim stands."""
    reasons = [
        f"{finding.id}: {finding.where}: {finding.message}"
        for finding in found
        if finding.severity is Severity.ERROR and finding.id not in _CLAIM_STANDS
    ]
    if account.epsilon_with_amplification.unbounded and not reasons:
        reasons.append("Epsilon is unbounded.")
    return reasons


def waivers(spec: PrivacySpec, found: Sequence[Finding], created: str) -> tuple[Waiver, ...]:
    """The waivers of the spec, and whether each is in force. An error cannot be waived on a card."""
    ids = {finding.id for finding in found}
    errors = {finding.id for finding in found if finding.severity is Severity.ERROR}
    judged = []
    state: WaiverState
    for waiver in spec.waivers:
        if waiver.expires.isoformat() < created[:10]:
            state = "expired"
        elif not waiver.owner:
            state = "without owner"
        elif waiver.finding in errors:
            state = "refused"
        else:
            state = "in force" if waiver.finding in ids else "not needed"
        judged.append(
            Waiver(
                finding=waiver.finding,
                reason=waiver.reason,
                owner=waiver.owner,
                expires=waiver.expires.isoformat(),
                state=state,
            )
        )
    return tuple(judged)


def waiver_findings(judged: Sequence[Waiver]) -> list[Finding]:
    """PS060, PS061."""
    found = []
    for index, waiver in enumerate(judged):
        where = f"waivers.{index}"
        if waiver.state == "expired":
            message = (
                f"expected a waiver of {waiver.finding} that is in force, received one that ended {waiver.expires}."
            )
            fix = "Mend what it excuses, or have the waiver renewed in a review, with a later last day."
            found.append(_finding("PS060", "error", where, message, fix))
        elif waiver.state == "without owner":
            message = f"expected somebody who answers for the waiver of {waiver.finding}, received nobody."
            found.append(_finding("PS061", "warning", where, message, "Add owner; until then it excuses nothing."))
    return found


def _claim(record: LedgerRecord, spec: PrivacySpec, account: Accounting) -> Iterator[Finding]:
    realised, claimed = account.epsilon_with_amplification, spec.claim.epsilon
    if realised.value is None or not realised.value <= claimed * (1 + RELATIVE_SLACK):
        message = (
            f"expected the {record.steps:,} executed steps to cost at most the claimed {formats.exact(claimed)}, "
            f"received {formats.bound(realised)} at delta {formats.exact(record.plan['delta'])}."
        )
        yield _finding("PS020", "error", "claim.epsilon", message, "Claim what it costs, in a reviewed spec.")


def _model(record: LedgerRecord, inputs: CardInputs) -> Iterator[Finding]:
    if not record.left(inputs.parameters_digest):
        message = (
            "expected a model as an epoch or a fit on this ledger left it, received other weights "
            f"({inputs.parameters_digest[:12]}): what else changed them is not counted."
        )
        fix = "Export right after the private fit, with its ledger; train no further without privacy."
        yield _finding("PS083", "error", "model", message, fix)


def _differences(record: LedgerRecord, spec: PrivacySpec, account: Accounting) -> Iterator[Finding]:
    plan = record.plan
    if spec.digest != plan["spec_digest"]:
        message = (
            f"expected the spec that the plan was made from ({plan['spec_digest'][:12]}), received {spec.digest[:12]}."
        )
        yield _finding("PS031", "error", "spec", message, "Train again under the spec that is to be claimed.")
    digest = contract_digest(plan)
    if digest != plan["digest"]:
        message = f"expected the plan to have the digest it carries, {plan['digest'][:12]}, received {digest[:12]}."
        yield _finding("PS030", "error", "ledger.plan", message, "The header was changed: restore the ledger.")
    for name, expected, received in compared(record, spec):
        same = expected == received
        if not same and isinstance(expected, float) and isinstance(received, int | float):
            same = math.isclose(expected, received, rel_tol=1e-12)
        if not same:
            message = f"expected {name} to be {expected} as the spec says, received {received} in the ledger."
            yield _finding("PS030", "error", f"ledger.plan.{name}", message, "Train again as the spec says.")
    allowed = plan["steps"]
    if record.steps > allowed:
        message = f"expected at most {allowed:,} steps, received {record.steps:,} in the ledger."
        # A torn line is a step that was never applied, so one more than planned is what a crash at the end leaves.
        severity = "warning" if account.torn_last_line and record.steps == allowed + 1 else "error"
        yield _finding("PS030", severity, "ledger.steps", message, "Plan the steps that are run.")


def compared(record: LedgerRecord, spec: PrivacySpec) -> Iterator[tuple[str, Any, Any]]:
    """(field of the plan, what the spec says, what the ledger says)."""
    plan, unit = record.plan, spec.claim.privacy_unit
    yield "target_epsilon", spec.claim.epsilon, plan["target_epsilon"]
    yield "delta", spec.claim.delta, plan["delta"]
    yield "adjacency", spec.claim.adjacency, plan["adjacency"]
    yield "accountant", spec.accountant.name, plan["accountant"]
    yield "clip_norm", spec.mechanism.total_clip_norm, plan["clip_norm"]
    yield from _compared_clipping(spec, plan)
    if spec.mechanism.noise_multiplier is not None:
        yield "noise_multiplier", spec.mechanism.noise_multiplier, plan["noise_multiplier"]
    yield "scheme", spec.sampling.scheme, plan["scheme"]
    yield "truncated_batch_size", spec.sampling.truncated_batch_size, plan.get("truncated_batch_size")
    yield "rng", spec.mechanism.rng, plan.get("rng")
    most, together = unit.max_records_per_unit or 1, unit.method == "user_wise_dp_sgd"
    yield "records_per_unit", most if together else 1, plan.get("records_per_unit", 1)
    yield "num_units", spec.data.num_units, plan["num_units"]
    try:
        schedule = spec.schedule
    except ValueError:  # a finding of the review already
        return
    apart = schedule.records_per_unit
    yield "group_size", apart, plan.get("group_size", 1)
    yield "num_records", spec.data.num_records if apart > 1 else None, plan.get("num_records")
    yield "sampling_probability", schedule.sampling_probability, plan["sampling_probability"]
    yield "expected_batch_size", schedule.expected_batch_size, plan["expected_batch_size"]
    yield "steps", schedule.steps, plan["steps"]
    try:
        event = accounting.step_event(
            scheme=spec.sampling.scheme,
            sampling_probability=schedule.sampling_probability,
            noise_multiplier=plan["noise_multiplier"],
            num_units=schedule.population,
            truncated_batch_size=spec.sampling.truncated_batch_size,
            records_per_unit=schedule.records_per_unit,
        )
    except AccountingError:  # a finding of the review already
        return
    yield "step_event", _event_text(accounting.event_to_dict(event)), _event_text(plan["step_event"])


def _compared_clipping(spec: PrivacySpec, plan: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """A clip norm that moves, as the spec says; that its two noises are what was accounted, the ledger was read for."""
    clipping, described = spec.mechanism.clip_norm, plan.get("adaptive_clipping")
    if not isinstance(clipping, Clipping) or clipping.quantile is None or described is None:
        moves = isinstance(clipping, Clipping) and clipping.quantile is not None
        yield "adaptive_clipping", moves, described is not None
        return
    try:
        wanted = accounting.adaptive_clipping(
            noise_multiplier=plan["noise_multiplier"],
            quantile=clipping.quantile,
            expected_batch_size=plan["expected_batch_size"],
            learning_rate=clipping.learning_rate,
            count_noise=clipping.count_noise,
        )
    except AccountingError as error:
        yield "adaptive_clipping", "noises that the noise multiplier covers", str(error)
        return
    for name, value in wanted.to_dict().items():
        yield f"adaptive_clipping.{name}", value, described.get(name)


def _event_text(event: dict[str, Any]) -> str:
    """Lists and tuples alike, floats with the digits that every machine agrees on."""
    if isinstance(event, dict):
        return "{" + ", ".join(f"{key}: {_event_text(event[key])}" for key in sorted(event)) + "}"
    if isinstance(event, list | tuple):
        return "[" + ", ".join(_event_text(item) for item in event) + "]"
    return f"{event:.12g}" if isinstance(event, float) else str(event)


def randomness(record: LedgerRecord) -> Iterator[Finding]:
    seed, rng = record.plan.get("seed"), record.plan.get("rng")
    fix = "Train with csprng as mechanism.rng, and without a seed."
    if seed is not None:
        message = f"expected randomness that nobody can repeat, received the fixed seed {seed}: for tests only."
        yield _finding("PS042", "error", "mechanism.rng", message, fix)
    elif rng != "csprng":
        message = f"expected randomness from the operating system, received {rng}."
        yield _finding("PS042", "warning", "mechanism.rng", message, fix)


def _looks(record: LedgerRecord, spec: PrivacySpec) -> Iterator[Finding]:
    """PS041."""
    if any(look.get("what") == "clip_norm" and not look.get("public") for look in record.of_kind("data_access")):
        message = (
            "expected a clip norm chosen on nothing or on public data, received one chosen after a look at gradients "
            "of the private data, an access that epsilon does not count."
        )
        fix = "Use a default such as 1.0, choose it on public data, or let it follow a quantile, which is paid for."
        severity = "error" if "clip_selection" in spec.claim.data_accesses else "warning"
        yield _finding("PS041", severity, "mechanism.clip_norm", message, fix)


def _budget(spec: PrivacySpec, spent: Budget) -> Iterator[Finding]:
    if spec.budget is None or spec.budget.epsilon_cap is None:
        return
    cap, after = spec.budget.epsilon_cap, spent.spent_after or spent.spent_by_this_run
    total = math.inf if after.value is None else after.value
    message = (
        f"expected at most epsilon {formats.exact(cap)} from {spec.budget.dataset_id}, "
        f"received {formats.bound(total)} in all."
    )
    if math.isinf(total) or total > cap * (1 + RELATIVE_SLACK):
        yield _finding("PS032", "error", "budget.epsilon_cap", message, "Release less, or decide on another cap.")
    elif total > 0.8 * cap:
        yield _finding("PS033", "warning", "budget.epsilon_cap", message, "Plan what the rest is for.")


def _trials(spec: PrivacySpec, inputs: CardInputs) -> Iterator[Finding]:
    """PS040: trials that are said to be counted have to be on the ledger of the data set."""
    tuning = spec.tuning
    if tuning is None or tuning.kind != "private" or not tuning.accounted:
        return
    counted, stated = len(inputs.others or ()), tuning.trials or 1
    if counted < stated:
        message = (
            f"expected the {stated} trials that the spec calls accounted among the other runs on the data set's "
            f"ledger, received {counted} other runs."
        )
        fix = "Train the trials under specs with the same budget.ledger, or state false as tuning.accounted."
        yield _finding("PS040", "warning", "tuning.accounted", message, fix)


def _groups(groups: Groups) -> Iterator[Finding]:
    if not groups.rows:
        message = "expected metrics per group, received none: clipping shrinks what is unusual, so groups suffer first."
        yield _finding("PS050", "warning", "evaluation.groups", message, "Pass evaluation={'groups': [...]} to export.")
    for row in groups.rows:
        if row.suppressed:
            message = (
                f"expected at least {groups.minimum_size} units in group {row.name!r}, received fewer or no count."
            )
            yield _finding("PS051", "note", "evaluation.groups", message, "Its values are left out; join small groups.")


def _attacks(spec: PrivacySpec, account: Accounting, inputs: CardInputs) -> Iterator[Finding]:
    where = "evaluation.membership_inference"
    if not any(attack.model == "private" for attack in inputs.every_attack):
        required = spec.evaluation is not None and spec.evaluation.membership_inference == "required"
        message = "expected a membership-inference result" + (", which the spec requires" if required else "")
        severity = "error" if required else "warning"
        fix = "Attack the model: tfdp audit RUN_DIR, or evaluation={'membership_inference': {...}} of export."
        yield _finding("PS052", severity, where, f"{message}, received none.", fix)
    realised = account.epsilon_with_amplification.value
    if inputs.audit is not None and inputs.audit.gradients is not None:
        yield from inputs.audit.gradients.findings
    for attack in inputs.every_attack:
        lower = attack.epsilon_lower_bound
        if attack.model == "private" and lower is not None and realised is not None and lower > realised:
            message = (
                f"expected {attack.name} to stay below epsilon {formats.bound(realised)}, received a lower bound of "
                f"{formats.exact(lower)}."
            )
            yield _finding("PS053", "error", where, message, "The training is not private as claimed: find the fault.")
        low = any(point.false_positive_rate <= _LOW_RATE for point in attack.tpr_at_fpr)
        missing = [] if low else [f"a true positive rate at a false positive rate of at most {_LOW_RATE:g}"]
        missing += [name for name in ("members", "non_members") if getattr(attack, name) is None]
        if missing:
            message = f"expected {attack.name} with {', '.join(missing)}, received none."
            yield _finding("PS054", "note", where, message, "Averages hide the few who are exposed: report them.")


def _utility(inputs: CardInputs) -> Iterator[Finding]:
    where = "evaluation.metrics"
    if not inputs.metrics:
        fix = "Pass evaluation={'metrics': [...]} to export."
        yield _finding("PS070", "warning", where, "expected a metric of utility, received none.", fix)
    for metric in inputs.metrics:
        if metric.not_finite:
            message = f"expected finite values of {metric.name}, received others for {', '.join(metric.not_finite)}."
            yield _finding("PS073", "warning", where, message, "Look for overflow, or for a model that diverged.")
        missing = [
            name.replace("_", "-")
            for name in ("private", "interval", "non_private", "public", "n")
            if getattr(metric, name) is None and name not in metric.not_finite
        ]
        if missing:
            message = f"expected {metric.name} beside its baselines and interval, received no {', '.join(missing)}."
            yield _finding("PS071", "note", where, message, "Measure what is missing: the card says it was not.")
        if metric.private is not None and metric.public is not None and metric.better is not None:
            gain = metric.public - metric.private if metric.better == "lower" else metric.private - metric.public
            if gain <= 0:
                message = (
                    f"expected {metric.name} to become better than {formats.number(metric.public)}, where it started, "
                    f"received {formats.number(metric.private)}."
                )
                yield _finding("PS072", "warning", where, message, "Budget was spent and nothing learned: look why.")


def _unstated(inputs: CardInputs) -> Iterator[Finding]:
    names = ("intended_use", "limits", "data_source", "licence", "citation", "command", "hardware")
    missing = [name for name in names if getattr(inputs, name) is None]
    if missing:
        message = f"expected the owner to state {', '.join(missing)}, received nothing."
        yield _finding("PS074", "note", "details", message, "Pass details={...} to export: the card says not stated.")
    if not inputs.training:
        message = "expected the history of the fit, received none."
        yield _finding("PS074", "note", "history", message, "Pass history=model.history.history to export.")


def _finding(id: str, severity: str, where: str, message: str, fix: str) -> Finding:
    return Finding(id=id, severity=Severity(severity), where=where, message=message, fix=fix)
