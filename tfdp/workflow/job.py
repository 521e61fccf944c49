"""From a plan, a model and texts to a trained model with its card, in one call that can be stopped and continued."""

from __future__ import annotations

import dataclasses
import os
import platform
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tfdp.errors import BudgetExhaustedError, DataError, LedgerError, PlanError
from tfdp.evaluation import Perplexity, perplexity, perplexity_metric
from tfdp.ledger import read_ledger
from tfdp.plan import Plan, make_plan
from tfdp.sampling.claims import checked_units, claims_whole_unit
from tfdp.sampling.partition import units_file
from tfdp.spec import PrivacySpec
from tfdp.spec.numbers import rounded_up, shown
from tfdp.workflow.canaries import without_absent
from tfdp.workflow.fitting import private_fit
from tfdp.workflow.language_models import encode_texts
from tfdp.workflow.records import TextRecords
from tfdp.workflow.units import records_for, splits_documents

LEDGER = "ledger.jsonl"
CHECKPOINT = "checkpoint"

_LIMITS = (
    "Held-out records were set aside before training, by a digest of their id or text: they were not trained on, and "
    "epsilon does not cover what the perplexities tell about them. Texts are cut at {length} tokens."
)


@dataclasses.dataclass(frozen=True)
class TrainingResult:
    """What a job has done.

    Attributes:
        plan: what it ran under.
        steps, epsilon: of the whole ledger, at the plan's delta.
        before, after: perplexity on the held-out texts; None without them.
        seconds: of the fit.
        paths: of what was written, as from `tfdp.export`.
        history: values per epoch of the last fit.
    """

    plan: Plan
    steps: int
    epsilon: float
    before: Perplexity | None
    after: Perplexity | None
    seconds: float
    paths: dict[str, Path]
    history: dict[str, list[float]]


def plan_for(spec: PrivacySpec, num_units: int) -> Plan:
    """`make_plan`, and where the sizes disagree, the number to write in the spec and what that means.

    Raises:
        PlanError: as `make_plan`.
    """
    if spec.data.num_units != num_units:
        private = (
            ""
            if spec.data.size_is_public
            else " The spec says that the size is not public, and yet the sampling probability, the denominator and "
            "the card "
            "tell it: decide whether it may be known before you write it there."
        )
        raise PlanError(
            "Expected data.num_units of the spec to be the number of units that are trained on, after held-out and "
            "blank "
            f"ones are set aside. Received: {spec.data.num_units} in the spec, {num_units} in the data. If the data "
            "are the "
            f"right ones, write num_units: {num_units} and have the spec reviewed again: sampling probability, "
            "denominator "
            f"and epsilon depend on it, and it is a claim about the data.{private}"
        )
    return make_plan(spec, num_units)


def steps_done(directory: str | os.PathLike[str], plan: Plan) -> int:
    """How many steps of `plan` were spent in a run directory; 0 in a new one.

    Raises:
        LedgerError: it holds a run under another plan, or a model without a ledger.
        BudgetExhaustedError: all steps are spent, and nothing is left to finish.
    """
    directory = Path(directory)
    path = directory / LEDGER
    card = directory / "MODEL_CARD.json"
    if not path.exists():
        if card.exists() or (directory / "model.keras").exists():
            raise LedgerError(
                f"Expected a new directory, or one with the ledger of this plan. Received: {directory}, with a model "
                "but no "
                f"{LEDGER}. Choose another --out."
            )
        return 0
    record = read_ledger(path)
    if record.plan["digest"] != plan.digest:
        raise LedgerError(
            f"Expected {path} to belong to this plan ({plan.digest[:12]}). Received: a run under another one "
            f"({record.plan['digest'][:12]}), with {record.steps} steps spent. Choose another --out: a run is not "
            "overwritten, "
            "and on the same data both count."
        )
    if record.steps >= plan.steps and (card.exists() or not (directory / CHECKPOINT).exists()):
        told = f"its card is {card}" if card.exists() else "and its last checkpoint is gone"
        raise BudgetExhaustedError(
            f"Expected steps left in the plan. Received: all {record.steps} steps spent in {path}, epsilon "
            f"{rounded_up(plan.epsilon(record.steps), 4)} of {shown(plan.target_epsilon)}; {told}. "
            "Training further needs a new, reviewed spec and another --out; on the same data both count."
        )
    return record.steps


def train_text_model(
    plan: Plan,
    model: Any,
    records: TextRecords,
    directory: str | os.PathLike[str],
    *,
    held_out: TextRecords | None = None,
    sequence_length: int = 128,
    optimizer: Any = "adamw",
    learning_rate: Any = 1e-3,
    save_freq: int | str = "epoch",
    details: Mapping[str, Any] | None = None,
    verbose: int = 1,
) -> TrainingResult:
    """`train_arrays` on texts, which the model's own preprocessor cuts into tokens.

    Args:
        plan: from `plan_for(spec, records.num_units)`.
        model: from `build_model`, or any KerasHub causal language model with its preprocessor.
        records: one text per record, with ids where the plan claims a document or a user; see `with_canaries` for
            absent ones.
        directory, optimizer, learning_rate, save_freq, details, verbose: see `train_arrays`.
        held_out: texts for the perplexity before and after; not trained on, and not covered by epsilon.
        sequence_length: tokens of a text that are used.
    """
    steps_done(directory, plan)  # before any work is done for nothing
    if claims_whole_unit(plan.privacy_unit) and not splits_documents(plan.privacy_unit):  # pieces are not counted yet
        checked_units(plan, records.unit_ids)
    unit = plan.spec.claim.privacy_unit
    if unit.kind == "sequence" and unit.sequence_length != sequence_length:
        raise DataError(
            f"Expected the sequence length of the privacy unit, {unit.sequence_length}. Received: {sequence_length}. "
            "Train on sequences of the length that the spec claims."
        )
    texts = () if held_out is None else held_out.texts
    arrays, batch_options = records_for(plan, model, records, sequence_length)
    return train_arrays(
        plan,
        model,
        without_absent(arrays, records),
        directory,
        batch_options=batch_options,
        held_out=encode_texts(model, texts, sequence_length) if texts else None,
        optimizer=optimizer,
        learning_rate=learning_rate,
        save_freq=save_freq,
        details=details,
        verbose=verbose,
    )


def train_arrays(
    plan: Plan,
    model: Any,
    records: Any,
    directory: str | os.PathLike[str],
    *,
    batch_options: Mapping[str, Any] | None = None,
    held_out: Any = None,
    optimizer: Any = "adamw",
    learning_rate: Any = 1e-3,
    save_freq: int | str = "epoch",
    non_private: Perplexity | None = None,
    details: Mapping[str, Any] | None = None,
    verbose: int = 1,
) -> TrainingResult:
    """Trains a causal language model privately; writes model, ledger and card into `directory`.

    A second call with the same plan goes on after the steps of the first, from its last checkpoint; the steps since
    then are spent and lost.

    Args:
        plan: from `plan_for`.
        model: a Keras model from token_ids and padding_mask to logits.
        records: `(x, y, sample_weight)` arrays, one row per record; or what else `poisson_batches` takes.
        directory: is made where missing; see `steps_done` for what it may hold.
        batch_options: as for `private_fit`.
        held_out: `(x, y, sample_weight)` arrays, for the perplexity before and after.
        optimizer, learning_rate: as for `dp_optimizer`.
        save_freq: "epoch", or a number of steps between two checkpoints.
        non_private: perplexity of the same training without privacy, for the card.
        details: the owner's words for the card, as for `tfdp.export`.
        verbose: of Keras.
    """
    from tfdp.card import export

    directory = Path(directory)
    steps_done(directory, plan)
    before = None if held_out is None else perplexity(model, held_out)

    directory.mkdir(parents=True, exist_ok=True)
    ledger, checkpoint = directory / LEDGER, directory / CHECKPOINT
    began = time.monotonic()
    history = private_fit(
        model,
        plan,
        records,
        ledger=ledger,
        batch_options=batch_options,
        optimizer=optimizer,
        learning_rate=learning_rate,
        checkpoint=checkpoint,
        save_freq=save_freq,
        verbose=verbose,
    ).history
    seconds = time.monotonic() - began

    after = None if held_out is None else perplexity(model, held_out)
    metrics = [] if after is None else [perplexity_metric(after, public=before, non_private=non_private)]
    details = dict(details or {})
    own_words = {
        "limits": _LIMITS.format(length=np.shape(held_out[1])[1]) if held_out is not None else None,
        "hardware": f"{os.cpu_count()} processors, {platform.machine()}, {platform.system()}",
    }
    details["timings"] = {"fit": round(seconds, 1), **details.get("timings", {})}
    paths = export(
        model,
        directory,
        ledger=ledger,
        evaluation={"metrics": metrics},
        history=history,
        details={key: value for key, value in {**own_words, **details}.items() if value is not None},
    )
    shutil.rmtree(checkpoint, ignore_errors=True)
    if read_ledger(ledger).steps >= plan.steps:  # no later fit will ask for it
        units_file(ledger).unlink(missing_ok=True)
    steps = read_ledger(ledger).steps
    return TrainingResult(
        plan=plan,
        steps=steps,
        epsilon=plan.epsilon(steps),
        before=before,
        after=after,
        seconds=seconds,
        paths=paths,
        history=history,
    )
