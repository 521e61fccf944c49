"""An example that triggers each finding, from each place that it can be told from, and the same example mended.

The page of findings shows them, and a test runs every one of them both ways: as it is, and mended.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tfdp.review.catalogue import Severity, Source

Fields = Mapping[str, Any]


@dataclass(frozen=True)
class Ran:
    """The ledger of a training.

    Attributes:
        spec: dotted fields that the spec had when it began, where they differ.
        header: dotted fields of its first line that were written over.
        steps: how many ran.
        seed: makes it repeatable, as only a test may be.
        public_look: what was said of the data whose gradients were looked at before; None where nobody looked.
    """

    spec: Fields = field(default_factory=dict)
    header: Fields = field(default_factory=dict)
    steps: int = 2
    seed: int | None = None
    public_look: bool | None = None


@dataclass(frozen=True)
class Example:
    """What somebody hands in for review.

    Attributes:
        spec: dotted fields of `BASE` and their values; `...` deletes a field.
        data: counts of the data.
        runs: ledgers of trainings.
        export: arguments of `tfdp.export`; those that are not named leave nothing to be desired.
        card: dotted fields of MODEL_CARD.json that were written over.
        absent: files that are no longer beside the card.
        code: Python that defines `model`, or exports it.
    """

    spec: Fields = field(default_factory=dict)
    data: Fields = field(default_factory=dict)
    runs: tuple[Ran, ...] = ()
    export: Fields = field(default_factory=dict)
    card: Fields = field(default_factory=dict)
    absent: tuple[str, ...] = ()
    code: str = ""


@dataclass(frozen=True)
class Case:
    """A finding, told from one place, and what becomes of it when the example is mended."""

    source: Source
    severity: Severity
    triggers: Example
    mended: Example


def _spec(severity: Severity, triggers: Fields, mended: Fields, source: Source = "spec") -> Case:
    return Case(source, severity, Example(triggers), Example(mended))


def _file(triggers: Fields, mended: Fields) -> Case:
    return _spec("error", triggers, mended, "file")


def _data(severity: Severity, triggers: Fields, mended: Fields) -> Case:
    return Case("data", severity, Example(data=triggers), Example(data=mended))


def _run(severity: Severity, spec: Fields, triggers: tuple[Ran, ...], mended: tuple[Ran, ...] = (Ran(),)) -> Case:
    return Case("run", severity, Example(spec, runs=triggers), Example(spec, runs=mended))


def _card(severity: Severity, triggers: Example, mended: Example = Example()) -> Case:
    return Case("card", severity, triggers, mended)


def _measured(severity: Severity, triggers: Fields, mended: Fields, spec: Fields | None = None) -> Case:
    one, other = (Example(spec or {}, export={"evaluation": values}) for values in (triggers, mended))
    return Case("card", severity, one, other)


def _model(triggers: str, mended: str) -> Case:
    return Case("model", "error", Example(code=triggers), Example(code=mended))


_USER = {"kind": "user", "description": "one account", "id_field": "account", "max_records_per_unit": 5}
_USER_WISE = {**_USER, "method": "user_wise_dp_sgd"}
_GROUP = {
    "claim.privacy_unit": {**_USER, "method": "group_privacy"},
    "data.num_records": 60000,
    "data.num_units": 12000,
    "claim.delta": 5e-6,
}
_TRUNCATED = {"sampling.scheme": "truncated_poisson", "sampling.truncated_batch_size": 320}
_CALIBRATED = {"mechanism.noise_multiplier": None}
_SHORT = {"claim.epsilon": 0.17, "sampling.epochs": ..., "sampling.steps": 20}
_COSTLY = {"claim.epsilon": 3.1, "mechanism.noise_multiplier": 0.5, "sampling.epochs": ..., "sampling.steps": 1}
_CLIP_SELECTION = {
    "claim.data_accesses": ["training", "clip_selection"],
    "mechanism.clip_norm": {"quantile": 0.5, "initial": 1.0},
}
_WAIVER = {"finding": "PS008", "reason": "known", "owner": "Ada", "expires": "2999-01-31"}
_EXPIRED = {"waivers": [{**_WAIVER, "expires": "2020-01-31"}]}
_UNOWNED = {"waivers": [{name: value for name, value in _WAIVER.items() if name != "owner"}]}
_OWNED = {"waivers": [_WAIVER]}
METRIC = {
    "name": "perplexity",
    "private": 59.8,
    "interval": [57.9, 61.8],
    "non_private": 47.2,
    "public": 142.6,
    "n": 680,
}
GROUPS = {"group_field": "language", "group_metric": "perplexity"}
ATTACK = {"members": 500, "non_members": 500, "auc": 0.51, "tpr_at_fpr": {0.01: 0.012}}

STATED = {
    "intended_use": "Completing e-mails at work.",
    "limits": "English only.",
    "data_source": "E-mails of 2019 to 2023.",
    "licence": "apache-2.0",
    "citation": "none",
    "command": "tfdp train privacy.yaml",
    "hardware": "one workstation",
}


def _budget(cap: float) -> Fields:
    return {"budget": {"dataset_id": "mails", "epsilon_cap": cap}}


def _layers(*lines: str) -> str:
    inside = "".join(f"        {line},\n" for line in lines)
    return f"model = keras.Sequential(\n    [\n{inside}    ]\n)"


EXAMPLES: dict[str, tuple[Case, ...]] = {
    "PS000": (_file({"sampling.epoch": 15}, {"sampling.epochs": 15}),),
    "PS001": (_file({"claim.delta": ...}, {"claim.delta": 1e-6}),),
    "PS002": (_file({"claim.epsilon": "1.2"}, {"claim.epsilon": 1.2}),),
    "PS003": (_spec("error", {"claim.delta": 2e-5}, {"claim.delta": 1e-6}),),
    "PS004": (_spec("warning", {"claim.delta": 1e-5}, {"claim.delta": 1.6e-6}),),
    "PS005": (_spec("error", {"claim.privacy_unit.kind": "user"}, {"claim.privacy_unit": _USER_WISE}),),
    "PS006": (_spec("error", _GROUP, {**_GROUP, "claim.epsilon": 6.7}),),
    "PS007": (
        _spec("warning", {"claim.privacy_unit.id_field": "account"}, {"claim.privacy_unit": _USER_WISE}),
        _data("warning", {"has_user_id": True}, {"has_user_id": False}),
    ),
    "PS008": (
        _spec("warning", {"data.deduplication": "none"}, {"data.deduplication": "exact"}),
        _data("warning", {"duplicates": 3}, {"duplicates": 0}),
    ),
    "PS009": (_spec("error", {"claim.privacy_unit": _USER}, {"claim.privacy_unit": _USER_WISE}),),
    "PS010": (_spec("error", {"sampling.scheme": "shuffle"}, {"sampling.scheme": "poisson"}),),
    "PS011": (_spec("error", {"accountant.name": "rdp", **_TRUNCATED}, {"accountant.name": "pld", **_TRUNCATED}),),
    "PS012": (_spec("error", {"claim.trust_model": "local"}, {"claim.trust_model": "central"}),),
    "PS013": (
        _spec("error", {"sampling.expected_batch_size": 60001}, {"sampling.expected_batch_size": 60000, **_CALIBRATED}),
        _data("error", {"num_units": 200}, {"num_units": 60000}),
    ),
    "PS014": (
        _spec("error", {"sampling.steps": 4000}, {"sampling.steps": 4000, "sampling.epochs": ...}),
        _data("error", {"num_units": 59999}, {"num_units": 60000}),
    ),
    "PS015": (
        _spec(
            "warning",
            {**_TRUNCATED, "sampling.truncated_batch_size": 250, **_CALIBRATED},
            {**_TRUNCATED, **_CALIBRATED},
        ),
    ),
    "PS017": (
        _spec(
            "error",
            {"claim.adjacency": "replace_one", "accountant.name": "rdp"},
            {"claim.adjacency": "replace_one", "accountant.name": "pld"},
        ),
    ),
    "PS018": (
        _spec(
            "note",
            {"data.size_is_public": False},
            {"data.size_is_public": False, "sampling.expected_batch_size": ..., "sampling.probability": 0.004},
        ),
    ),
    "PS020": (
        _spec("error", {"claim.epsilon": 1.0}, {"claim.epsilon": 1.2}),
        _run("error", _SHORT, (Ran(steps=90),), (Ran(steps=20),)),
        _card("error", Example(_SHORT, runs=(Ran(steps=90),)), Example(_SHORT, runs=(Ran(steps=20),))),
    ),
    "PS021": (_spec("note", {"claim.epsilon": 3.0}, {"claim.epsilon": 1.3}),),
    "PS022": (
        _spec(
            "warning",
            {"accountant.name": "rdp", "mechanism.noise_multiplier": 0.2, "claim.epsilon": 100000},
            {"accountant.name": "pld", "mechanism.noise_multiplier": 0.2, "claim.epsilon": 100000},
        ),
    ),
    "PS023": (_spec("warning", {"claim.epsilon": 12, **_CALIBRATED}, {"claim.epsilon": 10, **_CALIBRATED}),),
    "PS024": (_spec("note", {"accountant.name": "prv"}, {"accountant.name": "pld"}),),
    "PS030": (
        _run("error", {}, (Ran({"mechanism.clip_norm": 0.5}),)),
        _run("warning", {}, (Ran(header={"versions": {"dp-accounting": "0.5.0"}}),)),
        _card("error", Example(runs=(Ran(header={"plan.clip_norm": 0.5}),)), Example(runs=(Ran(),))),
    ),
    "PS031": (
        _run("error", {}, (Ran({"claim.privacy_unit.description": "one letter"}),)),
        _card("error", Example(runs=(Ran(header={"plan.spec_digest": "0" * 64}),)), Example(runs=(Ran(),))),
    ),
    "PS032": (
        _spec(
            "error",
            _budget(1.0),
            _budget(1.5),
        ),
        _run("error", _budget(3.5), (Ran(), Ran(_COSTLY, steps=1), Ran(_COSTLY, steps=1))),
        _card(
            "error",
            Example(_budget(1.5), export={"details": {"spent_before": 1.6}}),
            Example(_budget(1.5), export={"details": {"spent_before": 0.0}}),
        ),
    ),
    "PS033": (
        _spec(
            "warning",
            _budget(1.3),
            _budget(1.5),
        ),
        _run("warning", _budget(3.5), (Ran(), Ran(_COSTLY, steps=1))),
        _card(
            "warning",
            Example(_budget(1.5), export={"details": {"spent_before": 1.2}}),
            Example(_budget(1.5), export={"details": {"spent_before": 0.0}}),
        ),
    ),
    "PS034": (
        _run("error", {}, (Ran(), Ran({"claim.adjacency": "zero_out"})), (Ran(), Ran({"mechanism.clip_norm": 0.5}))),
    ),
    "PS040": (
        _spec("warning", {"tuning": {"kind": "private"}}, {"tuning": {"kind": "public"}}),
        _spec(
            "error",
            {"tuning": {"kind": "private"}, "claim.data_accesses": ["training", "tuning"]},
            {"tuning": {"kind": "public"}, "claim.data_accesses": ["training", "tuning"]},
        ),
        _card(
            "warning",
            Example({"tuning": {"kind": "private", "trials": 9, "accounted": True}}),
            Example({"tuning": {"kind": "public"}}),
        ),
    ),
    "PS041": (
        _data("warning", {"clip_norm_source": "private"}, {"clip_norm_source": "public"}),
        _card("warning", Example(runs=(Ran(public_look=False),)), Example(runs=(Ran(public_look=True),))),
        _card(
            "error",
            Example(_CLIP_SELECTION, runs=(Ran(public_look=False),)),
            Example(_CLIP_SELECTION, runs=(Ran(public_look=True),)),
        ),
    ),
    "PS042": (
        _spec("note", {"mechanism.rng": "prng"}, {"mechanism.rng": "csprng"}),
        _run("warning", {}, (Ran({"mechanism.rng": "prng"}),)),
        _run("error", {}, (Ran({"mechanism.rng": "prng"}, seed=3),)),
        _card("warning", Example({"mechanism.rng": "prng"}), Example({"mechanism.rng": "csprng"})),
    ),
    "PS043": (
        _model(
            _layers("keras.Input((8,))", "keras.layers.Dense(4)", "keras.layers.BatchNormalization()"),
            _layers("keras.Input((8,))", "keras.layers.Dense(4)", "keras.layers.LayerNormalization()"),
        ),
    ),
    "PS044": (
        _model(
            _layers("keras.Input((8, 3))", "keras.layers.Conv1DTranspose(4, 2)"),
            _layers("keras.Input((8, 3))", "keras.layers.Conv1D(4, 2)"),
        ),
    ),
    "PS045": (
        _model(
            _layers("keras.Input((8,))", 'keras.layers.Dense(4, activity_regularizer="l2")'),
            _layers("keras.Input((8,))", 'keras.layers.Dense(4, kernel_regularizer="l2")'),
        ),
    ),
    "PS046": (
        _model(
            _layers("keras.layers.Dense(4)"),
            _layers("keras.Input((8,))", "keras.layers.Dense(4)"),
        ),
    ),
    "PS050": (
        _measured(
            "warning",
            {"metrics": [METRIC]},
            {"metrics": [METRIC], **GROUPS, "groups": [{"name": "German", "n": 400, "value": 48.0, "before": 120.0}]},
        ),
    ),
    "PS051": (
        _measured(
            "note",
            {**GROUPS, "groups": [{"name": "Sorbian", "n": 12, "value": 91.2, "before": 88.1}]},
            {**GROUPS, "groups": [{"name": "Slavic", "n": 400, "value": 61.0, "before": 120.0}]},
            {"evaluation": {"min_group_size": 50}},
        ),
    ),
    "PS052": (
        _measured("warning", {"metrics": [METRIC]}, {"membership_inference": ATTACK}),
        _measured(
            "error",
            {"metrics": [METRIC]},
            {"membership_inference": ATTACK},
            {"evaluation": {"membership_inference": "required"}},
        ),
    ),
    "PS053": (
        _measured(
            "error",
            {"membership_inference": {**ATTACK, "epsilon_lower_bound": 1.9, "confidence": 0.95}},
            {"membership_inference": {**ATTACK, "epsilon_lower_bound": 0.01, "confidence": 0.95}},
        ),
    ),
    "PS054": (_measured("note", {"membership_inference": {"auc": 0.51}}, {"membership_inference": ATTACK}),),
    "PS060": (
        _spec("error", _EXPIRED, _OWNED),
        _card("error", Example(_EXPIRED), Example(_OWNED)),
    ),
    "PS061": (
        _spec("warning", _UNOWNED, _OWNED),
        _card("warning", Example(_UNOWNED), Example(_OWNED)),
    ),
    "PS062": (_spec("warning", {"waivers": [{**_WAIVER, "finding": "PS020"}]}, _OWNED),),
    "PS070": (_measured("warning", {"membership_inference": ATTACK}, {"metrics": [METRIC]}),),
    "PS071": (_measured("note", {"metrics": [{"name": "perplexity", "private": 59.8}]}, {"metrics": [METRIC]}),),
    "PS072": (
        _measured(
            "warning",
            {"metrics": [{**METRIC, "private": 150.3, "interval": [146.0, 155.1]}]},
            {"metrics": [METRIC]},
        ),
    ),
    "PS073": (_measured("warning", {"metrics": [{**METRIC, "private": float("inf")}]}, {"metrics": [METRIC]}),),
    "PS074": (_card("note", Example(export={"details": {}}), Example(export={"details": STATED})),),
    "PS080": (_card("error", Example(card={"claim.epsilon.value": 0.01})),),
    "PS081": (_card("warning", Example(absent=("model.keras",))),),
    "PS082": (_card("warning", Example(card={"accounting.accountant_version": "dp-accounting 0.5.0"})),),
    "PS083": (
        _card(
            "error",
            Example(code='model.fit(mails, labels)  # without PrivacyCallback\ntfdp.export(model, "run/")'),
            Example(code='tfdp.export(model, "run/")'),
        ),
    ),
}
