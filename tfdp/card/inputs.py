"""What a card is told, as opposed to what it reads from the ledger: evaluation, history, and the owner's words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from pydantic import Field, ValidationError

from tfdp.card.audits import Attack, Audit, RatePoint
from tfdp.card.fields import Digest, FileName, Section, Text
from tfdp.card.model import DeduplicationScope, Group, Metric, ModelFacts, OtherRun, PrivacyCard, Trials
from tfdp.errors import CardError
from tfdp.evaluation import better_direction

_EVALUATION_KEYS = ("metrics", "groups", "group_field", "group_metric", "membership_inference", "attacks")
_DETAIL_KEYS = (
    "title",
    "model_name",
    "intended_use",
    "limits",
    "licence",
    "citation",
    "data_source",
    "deduplication_scope",
    "command",
    "hardware",
    "timings",
    "spent_before",
)

_Model = TypeVar("_Model", bound=Section)


class GroupInputs(Section):
    """Values per group, and of the whole."""

    field: Text | None = None
    metric: Text | None = None
    whole: float | None = None
    rows: tuple[Group, ...] = ()


class CardInputs(Section):
    """Everything on a card that does not follow from the ledger."""

    title: Text
    created: str
    written_by: Text
    model: ModelFacts
    parameters_digest: Digest
    weights_digest: Digest
    weights_file: FileName
    ledger_file: FileName
    metrics: tuple[Metric, ...] = ()
    training: dict[str, tuple[float | None, ...]] | None = None
    groups: GroupInputs = GroupInputs()
    attacks: tuple[Attack, ...] = ()
    audit: Audit | None = None
    intended_use: Text | None = None
    limits: Text | None = None
    licence: Text | None = None
    citation: Text | None = None
    data_source: Text | None = None
    deduplication_scope: DeduplicationScope | None = None
    command: Text | None = None
    hardware: Text | None = None
    timings: dict[Text, float] = Field(default_factory=dict)
    spent_before: float | None = None
    others: tuple[OtherRun, ...] | None = None
    selections: tuple[Trials, ...] = ()
    is_trial: bool = False

    @property
    def every_attack(self) -> tuple[Attack, ...]:
        """Those that the owner reports, and those of the audit."""
        return self.attacks + (self.audit.attacks if self.audit is not None else ())


def inputs_of(card: PrivacyCard) -> CardInputs:
    """The inputs that a card was made from: with the ledger, they make the same card again."""
    return CardInputs(
        title=card.title,
        created=card.created,
        written_by=card.provenance.written_by,
        model=card.provenance.model,
        parameters_digest=card.provenance.parameters_digest,
        weights_digest=card.provenance.weights_digest,
        weights_file=card.provenance.weights_file,
        ledger_file=card.provenance.ledger_file,
        metrics=card.utility.metrics,
        training=card.utility.training,
        groups=GroupInputs(
            field=card.groups.field, metric=card.groups.metric, whole=card.groups.whole, rows=card.groups.rows
        ),
        attacks=card.attacks,
        audit=card.audit,
        intended_use=card.use.intended_use,
        limits=card.use.limits,
        licence=card.legal.licence,
        citation=card.legal.citation,
        data_source=card.data.source,
        deduplication_scope=card.data.deduplication_scope,
        command=card.provenance.command,
        hardware=card.provenance.hardware,
        timings=card.provenance.timings,
        spent_before=None if card.budget.others is not None else card.budget.spent_before,
        others=card.budget.others,
        selections=card.budget.selections,
        is_trial=card.budget.is_trial,
    )


def read_inputs(
    *,
    evaluation: Mapping[str, Any] | None,
    history: Mapping[str, Sequence[Any]] | None,
    details: Mapping[str, Any] | None,
    **facts: Any,
) -> CardInputs:
    """Checks what the caller gives; an unknown key would otherwise silently become "not measured".

    Args:
        evaluation: {"metrics": [...], "groups": [...], "group_field", "group_metric", "membership_inference": {...},
            "attacks": [...]}; see `tfdp.card.export`.
        history: `History.history` of a fit: name to one value per epoch.
        details: the owner's words, keyed as in `tfdp.card.export`.
        **facts: the remaining fields of `CardInputs`.

    Raises:
        CardError: an unknown key, or a value of the wrong kind.
    """
    evaluation = _checked_keys("evaluation", evaluation, _EVALUATION_KEYS)
    details = _checked_keys("details", details, _DETAIL_KEYS)
    title = details.pop("title", None)
    model_name = details.pop("model_name", None)
    model: ModelFacts = facts.pop("model")
    if model_name is not None:
        model = _built(ModelFacts, {**model.model_dump(), "name": model_name}, "details.model_name")
    attacks = [evaluation["membership_inference"]] if evaluation.get("membership_inference") else []
    attacks += evaluation.get("attacks") or []
    metrics = tuple(_metric(index, row) for index, row in enumerate(evaluation.get("metrics") or []))
    return _built(
        CardInputs,
        {
            **facts,
            **details,
            "title": title if title is not None else f"Model card of {model.name}",
            "model": model,
            "metrics": metrics,
            "training": _history(history),
            "groups": _groups(evaluation, metrics),
            "attacks": tuple(_attack(index, row) for index, row in enumerate(attacks)),
        },
        "details",
    )


def _metric(index: int, row: Any) -> Metric:
    where = f"evaluation['metrics'][{index}]"
    row = _mapping(where, row)
    not_finite = []
    for column in ("private", "non_private", "public"):
        value = row.get(column)
        if isinstance(value, float) and not math.isfinite(value):
            not_finite.append(column)
            row[column] = None
    row["not_finite"] = tuple(not_finite)
    row.setdefault("better", better_direction(str(row.get("name", ""))))
    return _built(Metric, row, where)


def _groups(evaluation: Mapping[str, Any], metrics: Sequence[Metric]) -> GroupInputs:
    rows = [_mapping(f"evaluation['groups'][{index}]", row) for index, row in enumerate(evaluation.get("groups") or [])]
    if not rows:
        return GroupInputs()
    metric = evaluation.get("group_metric") or (metrics[0].name if metrics else None)
    whole = next((one.private for one in metrics if one.name == metric), None)
    groups = []
    for index, row in enumerate(rows):
        if {"gap", "suppressed"} & row.keys():
            _refuse(f"evaluation['groups'][{index}]", "name, n, value, interval, before and non_private", sorted(row))
        groups.append(_built(Group, row, f"evaluation['groups'][{index}]"))
    values = {"field": evaluation.get("group_field"), "metric": metric, "whole": whole, "rows": tuple(groups)}
    return _built(GroupInputs, values, "evaluation['groups']")


def _attack(index: int, row: Any) -> Attack:
    where = f"evaluation's attack {index}"
    row = _mapping(where, row)
    row.setdefault("name", "membership inference")
    rates = row.get("tpr_at_fpr") or ()
    pairs = rates.items() if isinstance(rates, Mapping) else rates
    points = []
    for pair in pairs:
        if isinstance(pair, Mapping):
            points.append(_built(RatePoint, dict(pair), where))
            continue
        try:
            fpr, tpr = (float(value) for value in pair)
        except (TypeError, ValueError):
            _refuse(where, "tpr_at_fpr as {false positive rate: true positive rate}", rates)
        points.append(_built(RatePoint, {"false_positive_rate": fpr, "true_positive_rate": tpr}, where))
    row["tpr_at_fpr"] = tuple(sorted(points, key=lambda point: point.false_positive_rate))
    return _built(Attack, row, where)


def _history(history: Mapping[str, Sequence[Any]] | None) -> dict[str, tuple[float | None, ...]] | None:
    if not history:
        return None
    read: dict[str, tuple[float | None, ...]] = {}
    for name, values in history.items():
        try:
            numbers = [float(value) for value in values]
        except (TypeError, ValueError):
            _refuse(f"history[{name!r}]", "one number per epoch", values)
        read[str(name)] = tuple(value if math.isfinite(value) else None for value in numbers)
    return read


def _checked_keys(what: str, values: Mapping[str, Any] | None, known: Sequence[str]) -> dict[str, Any]:
    checked = _mapping(what, values if values is not None else {})
    unknown = [key for key in checked if key not in known]
    if unknown:
        _refuse(what, f"the keys {', '.join(known)}", unknown)
    return checked


def _mapping(what: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        _refuse(what, "a dictionary", value)
    return {key: _plain(item) for key, item in value.items()}


def _plain(value: Any) -> Any:
    """Python numbers and tuples for NumPy scalars, arrays and lists."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return tuple(_plain(item) for item in value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _built(kind: type[_Model], values: dict[str, Any], where: str) -> _Model:
    try:
        return kind(**values)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        _refuse(where, f"{place}: {first['msg']}", first.get("input"))


def _refuse(where: str, expected: str, received: object) -> NoReturn:
    raise CardError(
        f"{where}: expected {expected}. Received: {received!r}. Mend it, or leave it out: the card then says so."
    )
