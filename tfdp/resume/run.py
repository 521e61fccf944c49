"""One fit that can be stopped and continued: where it goes on, when it is over, and which of the two ends it met.

"Planned steps" are the updates that `fit` was asked for, epochs times steps an epoch: as many as the run takes when
nothing happens. "Budget" is the last step of the plan, counted on the ledger: steps that were lost to interruptions are
on it, so a run that was interrupted may meet it first, with fewer updates.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from tfdp import keras_private
from tfdp.errors import MisuseError
from tfdp.ledger import Ledger
from tfdp.plan import Plan
from tfdp.resume.checkpoint import Position, read_checkpoint, restore, write_checkpoint

PLANNED, BUDGET, STOPPED = "planned steps", "budget", "stopped"

# Fits of this process that came to their end, by ledger: a script with several fits goes on in the right one.
_ended_fits: dict[str, int] = {}
# Where a fit of this process stands, by ledger: read from a checkpoint, or left by an interruption.
_positions: dict[str, Position] = {}


class ResumableRun:
    """The checkpoints of a callback, and its place in the run.

    Args:
        directory: for the checkpoint; None for none.
        save_freq: "epoch", or a number of updates.

    Raises:
        MisuseError: a `save_freq` that is neither.
    """

    def __init__(self, directory: str | os.PathLike[str] | None, save_freq: int | str):
        if save_freq != "epoch" and (not isinstance(save_freq, int) or isinstance(save_freq, bool) or save_freq < 1):
            raise MisuseError(f'Expected save_freq to be "epoch" or a number of steps. Received: {save_freq!r}.')
        self.directory = directory
        self.over = False  # nothing is left to do: the fit ended before, in this process or another
        self._save_freq = save_freq
        self._position = Position()
        self._fit = 1
        self._asked: tuple[int, int | None] = (1, None)
        self._epoch_before: int | None = None

    def begin(
        self, model: Any, plan: Plan, ledger: Ledger, *, epochs: int, steps: int | None, trained_here: bool
    ) -> str | None:
        """Restores the checkpoint into a model that this process has not trained, and skips what was done.

        Args:
            model: compiled, with its optimizer built.
            plan, ledger: of the fit.
            epochs, steps: what `fit` was asked for; no steps for data without end.
            trained_here: whether the model holds what this process trained under this ledger.

        Returns:
            What was restored, in words, or None.
        """
        self.over, told = False, None
        self._asked, self._epoch_before = (epochs, steps), keras_private.initial_epoch(model)
        self._fit = _ended_fits.get(ledger.identity, 0) + 1
        if self.directory is not None and not trained_here and (found := read_checkpoint(self.directory)) is not None:
            if found.updates >= int(model.optimizer.iterations.numpy()):
                restore(found, model, plan, ledger.path)
                told = (
                    f"Going on from {found.path}: {found.updates} updates are in the model, {ledger.steps} of "
                    f"{plan.steps} steps are spent."
                )
            _positions[ledger.identity] = found.position
        updates, kept = int(model.optimizer.iterations.numpy()), _positions.get(ledger.identity)
        if self.directory is None or kept is None or kept.fit < self._fit or updates < kept.updates_before:
            self._position = Position(self._fit, updates_before=updates)
            if told is not None and ledger.steps >= plan.steps:  # to have the model again is all that can be asked for
                self.over = True
                keras_private.set_initial_epoch(model, epochs)
            return told
        self._position = kept
        self.over = (
            kept.fit > self._fit or kept.ended == STOPPED or self.reason_to_stop(model, plan, ledger) is not None
        )
        if self.over:
            keras_private.set_initial_epoch(model, epochs)
        elif steps is not None and kept.first_epoch is not None:
            keras_private.set_initial_epoch(model, kept.first_epoch + (updates - kept.updates_before) // steps)
        return told

    def begin_epoch(self, epoch: int) -> None:
        """Keras tells a fit's first epoch here and nowhere before."""
        if self._position.first_epoch is None:
            self._position = dataclasses.replace(self._position, first_epoch=epoch)

    def reason_to_stop(self, model: Any, plan: Plan, ledger: Ledger) -> str | None:
        """Which end the run has met, None while it goes on."""
        (epochs, steps), position = self._asked, self._position
        if self.directory is not None and steps is not None and position.first_epoch is not None:
            done = int(model.optimizer.iterations.numpy()) - position.updates_before
            if done >= min((epochs - position.first_epoch) * steps, plan.steps):
                return PLANNED
        return BUDGET if ledger.steps >= plan.steps else None

    def after_update(self, model: Any, plan: Plan, ledger: Ledger) -> None:
        """Saves, where the number of updates says so."""
        if self._save_freq != "epoch" and int(model.optimizer.iterations.numpy()) % int(self._save_freq) == 0:
            self.save(model, plan, ledger)

    def after_epoch(self, model: Any, plan: Plan, ledger: Ledger) -> None:
        """Saves, where that is asked for after every epoch."""
        if self._save_freq == "epoch":
            self.save(model, plan, ledger)

    def interrupted(self, model: Any, plan: Plan, ledger: Ledger) -> None:
        """Saves between two steps, as what is left of a fit that goes no further."""
        _positions[ledger.identity] = self._position
        self.save(model, plan, ledger)

    def end(self, model: Any, plan: Plan, ledger: Ledger, *, stepped: bool) -> str:
        """Saves at the end of a fit in which a step was taken; says which end it met."""
        ended = self._position.ended or self.reason_to_stop(model, plan, ledger)
        ended = ended or (STOPPED if model.stop_training else PLANNED)
        if stepped:
            self._position = dataclasses.replace(self._position, ended=ended)
            self.save(model, plan, ledger)
        _ended_fits[ledger.identity] = self._fit
        return ended

    def leave(self, model: Any) -> None:
        """Takes off the model what `begin` put on it."""
        keras_private.set_initial_epoch(model, self._epoch_before)

    def save(self, model: Any, plan: Plan, ledger: Ledger) -> None:
        """Writes the checkpoint, where there is to be one.

        Raises:
            LedgerError: it could not be written; the one before is as it was.
        """
        if self.directory is not None:
            write_checkpoint(self.directory, model, plan, ledger, self._position)
