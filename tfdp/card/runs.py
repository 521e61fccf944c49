"""What ran against what is claimed: the ledgers of runs, and the cards beside them, under a spec in review."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfdp.accounting import AdaptiveClipping
from tfdp.card import checks
from tfdp.card.writing import CARD_JSON, LEDGER, load_card
from tfdp.errors import AccountingError, CardError, LedgerError, SpecError
from tfdp.findings import Finding, Severity
from tfdp.ledger import LedgerRecord, read_ledger
from tfdp.review import RELATIVE_SLACK
from tfdp.spec import PrivacySpec
from tfdp.spec.documents import Path as FieldPath
from tfdp.spec.numbers import rounded_up, shown

# Of another spec than the one in review these say nothing about the training.
_ABOUT_RELEASE = frozenset({"waivers", "evaluation", "budget"})
_MEASURED = frozenset(
    "PS043 PS044 PS045 PS050 PS051 PS052 PS053 PS054 PS070 PS071 PS072 PS073 PS074".split()  # noqa: SIM905 - a line
)
_FIELDS: dict[str, FieldPath] = {
    "target_epsilon": ("claim", "epsilon"),
    "delta": ("claim", "delta"),
    "adjacency": ("claim", "adjacency"),
    "accountant": ("accountant", "name"),
    "clip_norm": ("mechanism", "clip_norm"),
    **dict.fromkeys(
        (
            "adaptive_clipping",
            *(f"adaptive_clipping.{each.name}" for each in dataclasses.fields(AdaptiveClipping)),
        ),
        ("mechanism", "clip_norm"),
    ),
    "noise_multiplier": ("mechanism", "noise_multiplier"),
    "rng": ("mechanism", "rng"),
    "records_per_unit": ("claim", "privacy_unit", "max_records_per_unit"),
    "group_size": ("claim", "privacy_unit", "max_records_per_unit"),
    "num_units": ("data", "num_units"),
    "num_records": ("data", "num_records"),
    "sampling_probability": ("sampling",),
    "expected_batch_size": ("sampling", "expected_batch_size"),
    "steps": ("sampling", "steps"),
    "scheme": ("sampling", "scheme"),
    "truncated_batch_size": ("sampling", "truncated_batch_size"),
    "step_event": ("sampling",),
}


@dataclass(frozen=True)
class _Run:
    record: LedgerRecord
    spec: PrivacySpec
    card: Path | None


def compare_runs(spec: PrivacySpec, paths: Sequence[str | os.PathLike[str]]) -> list[Finding]:
    """PS020 and PS030 to PS034 of runs under a spec, with PS042 and what their cards measured.

    A run whose spec trains in another way counts for the budget only, as long as one of the others is the run of this
    spec; alone it is compared, and differs. Findings of a card are those it states: `check_card` recomputes them.

    Args:
        spec: the spec in review.
        paths: folders of runs, or ledgers; several count together for the budget of the data set.
    """
    runs: list[_Run] = []
    findings: list[Finding] = []
    for path in paths:
        try:
            runs.append(_open(Path(path)))
        except (LedgerError, SpecError) as error:
            message = f"expected the ledger of a run, received one that cannot be read: {error}"
            fix = "Name the folder of a run; restore its ledger from a copy."
            findings.append(_at(spec, "PS030", "error", (), message, fix))
    own = [run for run in runs if not _changed(spec, run.spec)] or (runs if len(runs) == 1 else [])
    if runs and not own:
        message = f"expected one of {len(runs)} runs to be that of this spec, received only runs of others."
        findings.append(_at(spec, "PS031", "error", (), message, "Name the run of this spec too."))
    for run in own:
        findings += _one(spec, run)
    findings += _together(spec, runs, planned=not own)
    return sorted(findings, key=lambda finding: (finding.line or 0, finding.column or 0))


def _open(path: Path) -> _Run:
    folder = path if path.is_dir() else path.parent
    record = read_ledger(path / LEDGER if path.is_dir() else path)
    card = folder / CARD_JSON
    return _Run(record, PrivacySpec.from_dict(record.spec, str(record.path)), card if card.is_file() else None)


def _changed(spec: PrivacySpec, ran: PrivacySpec) -> list[str]:
    """The sections that differ and matter to what ran."""
    ours, theirs = spec.to_dict(), ran.to_dict()
    return [name for name in ours if name not in _ABOUT_RELEASE and ours[name] != theirs[name]]


def _one(spec: PrivacySpec, run: _Run) -> Iterator[Finding]:
    record = run.record
    if changed := _changed(spec, run.spec):
        message = (
            f"expected the spec that {record.path} was begun under, received one that differs in {', '.join(changed)}."
        )
        fix = "Train again under this spec, or claim the one in the ledger."
        yield _at(spec, "PS031", "error", (changed[0],), message, fix)
    if checks.contract_digest(record.plan) != record.plan["digest"]:
        message = f"expected the plan in {record.path} to have the digest that it carries, received another."
        yield _at(spec, "PS030", "error", (), message, "The header was changed: restore the ledger.")
    for name, expected, received in checks.compared(record, spec):
        if not _same(expected, received):
            message = f"expected {name} {expected} in {record.path}, as the spec says, received {received}."
            yield _at(spec, "PS030", "error", _FIELDS[name], message, "Train again as the spec says.")
    if record.steps > record.plan["steps"] + record.torn:
        message = f"expected at most {record.plan['steps']} steps in {record.path}, received {record.steps}."
        yield _at(spec, "PS030", "error", ("sampling",), message, "Plan the steps that are run.")
    version, installed = record.versions.get("dp-accounting"), importlib.metadata.version("dp-accounting")
    if version != installed:
        message = f"expected dp-accounting {version}, under which {record.path} was begun, received {installed}."
        fix = "Epsilon may differ in its last digits: have both versions compute it."
        yield _at(spec, "PS030", "warning", ("accountant", "name"), message, fix)
    realised = _epsilon(record)
    if not realised <= spec.claim.epsilon * (1 + RELATIVE_SLACK):
        cost = rounded_up(realised) if math.isfinite(realised) else "no bound"
        message = (
            f"expected the {record.steps} steps in {record.path} to cost at most {shown(spec.claim.epsilon)}, "
            f"received {cost}."
        )
        fix = "Claim what it costs, in a reviewed spec."
        yield _at(spec, "PS020", "error", ("claim", "epsilon"), message, fix)
    for finding in checks.randomness(record):
        yield _at(spec, finding.id, finding.severity.value, ("mechanism", "rng"), finding.message, finding.fix)
    if run.card is not None:
        yield from _of_card(spec, run.card)


def _of_card(spec: PrivacySpec, path: Path) -> Iterator[Finding]:
    try:
        card = load_card(path)
    except CardError as error:
        yield _at(spec, "PS080", "error", (), str(error), "Export the card again.")
        return
    for finding in card.review.findings:
        if finding.id in _MEASURED:
            yield finding.model_copy(update={"file": str(path)})


def _together(spec: PrivacySpec, runs: Sequence[_Run], *, planned: bool) -> Iterator[Finding]:
    """PS032 to PS034: what all runs cost, with the claim itself where it has not been run yet."""
    kinds = {_currency(run.spec): run for run in runs}
    ours = _currency(spec)
    for currency, run in kinds.items():
        if currency != ours and len(runs) > 1:
            message = (
                f"expected ledgers of one unit and adjacency to be added up, {_words(ours)}, received "
                f"{_words(currency)} in {run.record.path}."
            )
            yield _at(spec, "PS034", "error", ("claim", "privacy_unit"), message, "Keep a budget for each.")
    if spec.budget is None or not runs or any(currency != ours for currency in kinds):
        return
    for name in ("epsilon", "delta"):
        cap = getattr(spec.budget, f"{name}_cap")
        if cap is None:
            continue
        spent = [_epsilon(run.record) if name == "epsilon" else run.record.plan["delta"] for run in runs]
        total = sum(spent) + (getattr(spec.claim, name) if planned else 0.0)
        message = (
            f"expected {name} of at most {shown(cap)} for {spec.budget.dataset_id[:60]!r}, "
            f"received {rounded_up(total)} in {len(runs)} runs" + (" and this claim." if planned else ".")
        )
        path = ("budget", f"{name}_cap")
        if not total <= cap * (1 + RELATIVE_SLACK):
            yield _at(spec, "PS032", "error", path, message, "Release less, or have the cap reviewed.")
        elif not total <= 0.8 * cap * (1 + RELATIVE_SLACK):
            yield _at(spec, "PS033", "warning", path, message, "Plan what the rest is for.")


def _currency(spec: PrivacySpec) -> tuple[Any, ...]:
    unit = spec.claim.privacy_unit
    return unit.kind, unit.id_field, unit.max_records_per_unit, spec.claim.adjacency


def _words(currency: tuple[Any, ...]) -> str:
    kind, id_field, records, adjacency = currency
    named = f" by {id_field[:60]!r}" if id_field else ""
    return f"{kind}{named}{f' of {records} records' if records else ''} under {adjacency}"


def _epsilon(record: LedgerRecord) -> float:
    try:
        return record.epsilon()
    except (AccountingError, TypeError, ValueError):
        return math.inf


def _same(expected: Any, received: Any) -> bool:
    if isinstance(expected, float) and isinstance(received, int | float):
        return math.isclose(expected, received, rel_tol=1e-12)
    return bool(expected == received)


def _at(spec: PrivacySpec, id: str, severity: str, path: FieldPath, message: str, fix: str) -> Finding:
    return spec.finding(id, Severity(severity), path, message, fix)
