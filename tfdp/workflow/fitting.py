"""One private `fit`, with everything around it that a KerasHub task needs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfdp.ledger import read_ledger
from tfdp.plan import Plan

if TYPE_CHECKING:
    import keras


def private_fit(
    model: Any,
    plan: Plan,
    records: Any,
    *,
    ledger: str | os.PathLike[str],
    batch_options: Mapping[str, Any] | None = None,
    optimizer: Any = "adamw",
    learning_rate: Any = 1e-3,
    loss: Any = None,
    weighted_metrics: Sequence[Any] = (),
    callbacks: Sequence[Any] = (),
    checkpoint: str | os.PathLike[str] | None = None,
    save_freq: int | str = "epoch",
    verbose: int | str = 1,
) -> keras.callbacks.History:
    """Compiles `model` with a DP optimizer and fits it under `plan`, until the steps of the plan are spent.

    Where the plan says `microbatch_size: auto`, the size that the ledger names is kept; without one, sizes are timed
    first, on made-up data (`tfdp.time_microbatches`).

    A KerasHub preprocessor is taken off for the length of the fit: `records` are its arrays already (`encode_texts`).

    Args:
        model: a Keras model whose outputs are logits, or anything for which `loss` is given.
        plan: from `make_plan`.
        records: as for `poisson_batches`.
        ledger: path of the ledger; one that is there is continued.
        batch_options: more arguments of `poisson_batches`: `unit_ids` where the claim is about a document or a user.
        optimizer, learning_rate: as for `dp_optimizer`. `learning_rate` may be a schedule.
        loss: by default sparse categorical cross-entropy of logits, the mean over the tokens of a text.
        weighted_metrics: each is an exact value on private data, in the progress bar and the history.
        callbacks: more of them; they run after the ledger was written.
        checkpoint, save_freq: of `PrivacyCallback`: the same call goes on where an interrupted one was saved.
        verbose: of Keras; above 0, the time that is left is printed after every epoch.
    """
    from tfdp.callback import PrivacyCallback
    from tfdp.optimizer import dp_optimizer
    from tfdp.sampling.batches import poisson_batches
    from tfdp.workflow.language_models import token_loss
    from tfdp.workflow.progress import RemainingTime

    options = dict(batch_options or {})
    with detached_preprocessor(model):
        if loss is None:
            loss = token_loss()
        model.compile(
            optimizer=dp_optimizer(optimizer, plan, learning_rate=learning_rate),
            loss=loss,
            metrics=[],
            weighted_metrics=list(weighted_metrics),
        )
        if plan.microbatch_size == "auto" and options.get("microbatch_size") is None:
            options["microbatch_size"] = _timed_size(model, plan, records, options, Path(ledger), verbose)
        batches = poisson_batches(records, plan, **options)
        private = PrivacyCallback(plan, ledger=ledger, checkpoint=checkpoint, save_freq=save_freq)
        listed = [private, *callbacks]
        if verbose:
            listed.append(RemainingTime(private))
        return model.fit(
            batches,
            epochs=plan.epochs,
            steps_per_epoch=plan.steps_per_epoch,
            callbacks=listed,
            shuffle=False,  # the sampler's order is the point; Keras warns about its default
            verbose=verbose,
        )


def _timed_size(
    model: Any, plan: Plan, records: Any, options: Mapping[str, Any], ledger: Path, verbose: int | str
) -> int:
    """Units of a microbatch: those of the run on the ledger, else what is fastest."""
    from tfdp.microbatches import time_microbatches

    noted = read_ledger(ledger).of_kind("microbatches") if ledger.exists() else []
    if noted:
        size, told = int(noted[-1]["units"]), f"Microbatches of {noted[-1]['units']} units, as in this run before."
    else:
        times = time_microbatches(model, records, plan, batch_options=options)
        size, told = times.fastest, times.told
    if verbose:
        print(told, flush=True)
    return size


@contextlib.contextmanager
def detached_preprocessor(model: Any) -> Iterator[None]:
    """Takes the preprocessor off a KerasHub task, which would map it over the sampler's batches, and puts it back."""
    preprocessor = getattr(model, "preprocessor", None)
    if preprocessor is None:
        yield
        return
    model.preprocessor = None
    try:
        yield
    finally:
        model.preprocessor = preprocessor
