"""All attacks on one finished run, with a clock: what `tfdp audit` does."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tfdp.auditing import (
    Canaries,
    Membership,
    attack,
    attack_groups,
    audit_in_one_run,
    exposure,
    exposure_by_chance,
    extract,
    ratio_scores,
    threshold_scores,
    unit_losses,
)
from tfdp.auditing.extraction import CONTINUATION, PREFIX, SHORTEST
from tfdp.card.audits import Attack, Audit, Exposure, Extracted, Gradients, RatePoint, Skipped
from tfdp.errors import DataError
from tfdp.evaluation import perplexity
from tfdp.inspection import verify
from tfdp.ledger import Clock, timestamp
from tfdp.sampling.claims import claims_whole_unit
from tfdp.spec import PrivacySpec
from tfdp.workflow.language_models import encode_texts, token_loss
from tfdp.workflow.records import NO_GROUP, TextRecords

LOSS, RATIO, CANARIES = "loss threshold", "loss ratio", "canaries"
THREATS = {
    LOSS: "sees the loss of the model on whole units, of which some were trained on.",
    RATIO: "sees the losses of the model and of the public model that it started from.",
    CANARIES: "sees the same, and chose units of its own that coins let into the training data or kept out.",
}
_SMALLEST_GROUP = 20  # where the spec does not say
_PROMPTS_AT_A_TIME = 64
_VERIFIED = 4  # units whose gradients are materialised
_TOO_LATE = "the time budget was used up"

Progress = Callable[[str, int, int], None]
"""(part, done, of how many) is called as the work goes on."""


@dataclasses.dataclass(frozen=True)
class AuditSettings:
    """How much is attacked.

    Attributes:
        most_units: of each side; more are chosen at random.
        candidates: other secrets that the one of a canary is ranked among.
        prompts: most documents of each side that are prompted with.
        confidence: of intervals and bounds.
        seconds: of the whole audit; what has not been done by then is skipped. None: no limit.
    """

    most_units: int = 2000
    candidates: int = 1023
    prompts: int = 200
    confidence: float = 0.95
    seconds: float | None = None


class _OutOfTimeError(Exception):
    pass


class _Clock:
    """Counts the work of a part, and ends the part when the time is up."""

    def __init__(self, seconds: float | None, progress: Progress):
        self.began = time.monotonic()
        self._end = None if seconds is None else self.began + seconds
        self._progress = progress
        self._part, self._done, self._total = "", 0, 1

    def start(self, part: str, total: int) -> None:
        self._part, self._done, self._total = part, 0, max(1, total)
        self.tick(0)

    def tick(self, count: int) -> None:
        if self._end is not None and time.monotonic() > self._end:
            raise _OutOfTimeError
        self._done += count
        self._progress(self._part, self._done, self._total)


def audit_run(
    spec: PrivacySpec,
    models: Mapping[str, Any],
    reference: Any,
    members: TextRecords,
    non_members: TextRecords,
    *,
    parameters_digest: str,
    sequence_length: int,
    canaries: Canaries | None = None,
    trained: Any = None,
    settings: AuditSettings | None = None,
    progress: Progress | None = None,
    clock: Clock | None = None,
) -> Audit:
    """Attacks a private model, and a twin that was trained without privacy.

    Args:
        spec: of the run: the unit of the claim, delta, the smallest group to show.
        models: "private" and, optionally, "non_private": from token_ids and padding_mask to logits.
        reference: the public model that both began with, with its preprocessor.
        members, non_members: records of units that were trained on, and of others; canaries are in neither.
        parameters_digest: of the private model, as on its card.
        sequence_length: tokens of a record, as in training.
        canaries: that were put among the members.
        trained: the private model with the variables that were trained, whose gradients are verified. None: no.
        settings: how much is attacked.
        progress: is told what is being done.
        clock: gives the time in the result; for tests.
    """
    settings = settings or AuditSettings()
    watch = _Clock(settings.seconds, progress or (lambda part, done, total: None))
    whole = claims_whole_unit(spec.claim.privacy_unit)
    work = _Work(spec, models, reference, sequence_length, settings, watch, whole)
    attacks: list[Attack] = []
    gradients: list[Gradients] = []
    exposures: list[Exposure] = []
    extractions: list[Extracted] = []
    skipped: list[Skipped] = []
    generator = np.random.default_rng(0)  # which units stand for all; the same ones when the audit is repeated
    sides = [_some_units(side, whole, settings.most_units, generator) for side in (members, non_members)]

    def gradients_part() -> None:
        if trained is not None:
            gradients.append(work.gradients(trained, sides[1] if len(sides[1]) > 1 else sides[0]))

    def canary_part() -> None:
        if canaries is None:
            raise DataError("the run was trained without canaries.")
        found, exposed = work.canaries(canaries)
        attacks.extend(found)
        exposures.extend(exposed)

    def membership_part() -> None:
        attacks[:0] = work.membership(*sides)

    def extraction_part() -> None:
        extractions.extend(work.extraction(*sides))

    parts = {
        "gradients of a private step": gradients_part,
        "canaries": canary_part,
        "membership inference": membership_part,
        "extraction": extraction_part,
    }
    for name, part in parts.items():
        try:
            part()
        except _OutOfTimeError:
            skipped.append(Skipped(part=name, reason=f"{_TOO_LATE}."))
        except DataError as error:
            skipped.append(Skipped(part=name, reason=str(error)))
    return Audit(
        schema_version="1.0",
        created=timestamp(clock),
        parameters_digest=parameters_digest,
        seconds=round(time.monotonic() - watch.began, 1),
        gradients=gradients[0] if gradients else None,
        attacks=tuple(attacks),
        exposures=tuple(exposures),
        extractions=tuple(extractions),
        prefix_tokens=PREFIX,
        continuation_tokens=CONTINUATION,
        skipped=tuple(skipped),
    )


@dataclasses.dataclass(frozen=True)
class _Work:
    spec: PrivacySpec
    models: Mapping[str, Any]
    reference: Any
    sequence_length: int
    settings: AuditSettings
    watch: _Clock
    whole: bool

    def gradients(self, trained: Any, records: TextRecords) -> Gradients:
        """The gradients of a private step against materialised ones, on some records."""
        self.watch.start("gradients of a private step", 1)
        arrays = encode_texts(self.reference, records.texts[:_VERIFIED], self.sequence_length)
        trained.compile(optimizer="sgd", loss=token_loss())
        found = verify(trained, arrays, units=_VERIFIED)
        self.watch.tick(1)
        # The fields are the same; JSON holds no infinity.
        values: dict[str, Any] = {name: value if value != np.inf else None for name, value in vars(found).items()}
        return Gradients(**values)

    def canaries(self, canaries: Canaries) -> tuple[list[Attack], list[Exposure]]:
        """The coins guessed, and the secrets ranked."""
        texts = canaries.texts + canaries.candidates(self.settings.candidates)
        arrays = encode_texts(self.reference, texts, self.sequence_length)
        if np.asarray(arrays[2]).all(axis=1).any():
            raise DataError(
                f"Expected canaries that end within the {self.sequence_length} tokens of a record. Received: longer "
                "ones, whose secret may be cut off. Use a shorter pattern."
            )
        known, losses = self._losses("canaries", arrays, None)
        included = canaries.included
        if not 2 <= included.sum() <= len(included) - 2:
            raise DataError("Expected canaries on both sides of the coin. Received: hardly any on one. Use more.")
        attacks, exposures = [], []
        # Several copies that are units of their own are no single unit, and no bound for one follows from them.
        one_unit = self.whole or canaries.repetitions == 1
        for name, found in losses.items():
            scores = ratio_scores(found, known)
            own, others = scores[: canaries.count], scores[canaries.count :]
            result = attack(own[included], own[~included], confidence=self.settings.confidence)
            row = _row(CANARIES, name, result)
            if one_unit:
                audited = audit_in_one_run(
                    own, included, delta=self.spec.claim.delta, confidence=self.settings.confidence
                )
                row = row.model_copy(update={"epsilon_lower_bound": audited.epsilon})
            attacks.append(row)
            exposed = exposure(own[included], others)
            exposures.append(
                Exposure(
                    model=_side(name),
                    pattern=canaries.pattern,
                    canaries=int(included.sum()),
                    repetitions=canaries.repetitions,
                    candidates=len(others),
                    mean=float(exposed.mean()),
                    median=float(np.median(exposed)),
                    highest=float(exposed.max()),
                    mean_by_chance=exposure_by_chance(len(others)),
                )
            )
        return attacks, exposures

    def membership(self, members: TextRecords, non_members: TextRecords) -> list[Attack]:
        """Loss and ratio, of all and by group."""
        if self.spec.claim.privacy_unit.kind == "sequence":
            raise DataError("Expected units that are texts, or their owners. Received: sequences packed of several.")
        if not len(non_members):
            raise DataError("Expected units that were held out. Received: none. Train with --holdout above 0.")
        together = TextRecords(
            members.texts + non_members.texts,
            None if members.unit_ids is None else members.unit_ids + (non_members.unit_ids or ()),
        )
        ids = together.unit_ids if self.whole else None
        count = members.num_units if self.whole else len(members)
        arrays = encode_texts(self.reference, together.texts, self.sequence_length)
        known, losses = self._losses("membership inference", arrays, ids)
        rows = []
        for name, found in losses.items():
            for kind, scores in ((LOSS, threshold_scores(found)), (RATIO, ratio_scores(found, known))):
                rows.append(
                    _row(kind, name, attack(scores[:count], scores[count:], confidence=self.settings.confidence))
                )
        evaluation = self.spec.evaluation
        if evaluation is not None and evaluation.group_field is not None:
            rows += self._by_group(ratio_scores(losses["private"], known), members, non_members, count)
        return rows

    def _by_group(self, scores: np.ndarray, members: TextRecords, non_members: TextRecords, count: int) -> list[Attack]:
        evaluation = self.spec.evaluation
        minimum = (evaluation.min_group_size if evaluation is not None else None) or _SMALLEST_GROUP
        found = attack_groups(
            scores[:count],
            scores[count:],
            _groups_of_units(members, self.whole),
            _groups_of_units(non_members, self.whole),
            minimum=minimum,
            confidence=self.settings.confidence,
        )
        return [
            _row(RATIO, "private", result).model_copy(update={"group": group, "roc": ()})
            for group, result in found.items()
            if result is not None
        ]

    def extraction(self, members: TextRecords, non_members: TextRecords) -> list[Extracted]:
        """Documents of both sides, their beginnings given to every model."""
        sides = {"members": members, "non_members": non_members}
        documents = {side: self._documents(records) for side, records in sides.items()}
        if not documents["members"]:
            raise DataError(
                f"Expected documents of at least {PREFIX + SHORTEST} tokens. Received: none within the "
                f"{self.sequence_length} tokens of a record."
            )
        batch_size = min(_PROMPTS_AT_A_TIME, max(map(len, documents.values())))
        batches = sum(-(-len(each) // batch_size) for each in documents.values())
        self.watch.start("extraction", batches * CONTINUATION * len(self.models))
        rows = []
        for name, model in self.models.items():
            next_tokens = _greedy(model, self.watch)
            for side, tokens in documents.items():
                found = extract(tokens, next_tokens, batch_size=batch_size)
                rows.append(
                    Extracted(
                        model=_side(name),
                        documents="members" if side == "members" else "non_members",
                        prompts=found.prompts,
                        exact=found.exact,
                        approximate=found.approximate,
                        interval=found.interval(),
                    )
                )
        return rows

    def _documents(self, records: TextRecords) -> list[np.ndarray]:
        if not len(records):
            return []
        x, _, _ = encode_texts(self.reference, records.texts, self.sequence_length)
        rows = (tokens[mask.astype(bool)] for tokens, mask in zip(x["token_ids"], x["padding_mask"], strict=True))
        return [row for row in rows if len(row) >= PREFIX + SHORTEST][: self.settings.prompts]

    def _losses(self, part: str, arrays: Any, ids: Any) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Losses of units under the reference, and under each model."""
        self.watch.start(part, len(arrays[1]) * (1 + len(self.models)))

        def of(model: Any) -> np.ndarray:
            found = perplexity(model, arrays, on_batch=self.watch.tick)
            return unit_losses(found.losses, found.tokens, ids)

        return of(self.reference), {name: of(model) for name, model in self.models.items()}


def _row(kind: str, name: str, found: Membership) -> Attack:
    return Attack(
        name=kind,
        model=_side(name),
        threat_model=THREATS[kind],
        members=found.members,
        non_members=found.non_members,
        auc=found.auc,
        auc_interval=found.auc_interval,
        advantage=found.advantage,
        advantage_by_chance=found.advantage_by_chance,
        tpr_at_fpr=tuple(
            RatePoint(
                false_positive_rate=rate.false_positive_rate,
                true_positive_rate=rate.true_positive_rate,
                interval=rate.interval,
            )
            for rate in found.rates
        ),
        roc=tuple((float(fpr), float(tpr)) for fpr, tpr in found.roc),
        confidence=found.confidence,
    )


def _side(name: str) -> Any:
    if name not in ("private", "non_private"):
        raise DataError(f"Expected models named private and non_private. Received: {name!r}.")
    return name


def _some_units(records: TextRecords, whole: bool, most: int, generator: np.random.Generator) -> TextRecords:
    """The records of at most so many units, the units chosen at random."""
    if not len(records):
        return records
    keys = records.unit_ids if whole and records.unit_ids is not None else tuple(range(len(records)))
    units = list(dict.fromkeys(keys))
    order = generator.permutation(len(units))[:most]
    rank = {units[unit]: place for place, unit in enumerate(order.tolist())}
    chosen = [index for index, key in enumerate(keys) if key in rank]
    return records.take(sorted(chosen, key=lambda index: rank[keys[index]]))


def _groups_of_units(records: TextRecords, whole: bool) -> list[str]:
    """The group of each unit, in the order of `unit_losses`: that of its first record."""
    groups = records.groups or (NO_GROUP,) * len(records)
    if not whole or records.unit_ids is None:
        return list(groups)
    first: dict[str, str] = {}
    for owner, group in zip(records.unit_ids, groups, strict=True):
        first.setdefault(owner, group)
    return list(first.values())


def _greedy(model: Any, watch: _Clock) -> Callable[[np.ndarray, int], Any]:
    """The likeliest next token of a causal language model, whose later positions cannot be looked at."""
    import tensorflow as tf

    @tf.function(reduce_retracing=True)
    def likeliest(tokens: Any, position: Any) -> Any:
        seen = tf.broadcast_to(tf.range(tf.shape(tokens)[1])[None] < position, tf.shape(tokens))
        logits = model({"token_ids": tokens, "padding_mask": seen}, training=False)
        return tf.argmax(logits[:, position - 1], axis=-1, output_type=tf.int32)

    def next_tokens(tokens: np.ndarray, position: int) -> Any:
        watch.tick(1)
        return likeliest(tf.constant(tokens), tf.constant(position)).numpy()

    return next_tokens
