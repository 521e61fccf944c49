"""A callback of a job: how long it will still take."""

from __future__ import annotations

import time
from typing import Any

import keras

from tfdp.callback import PrivacyCallback
from tfdp.spec.numbers import rounded_up, shown


class RemainingTime(keras.callbacks.Callback):
    """Says between two epochs how far the run is and how long the rest will take.

    The first step is left out of the estimate: it includes tracing.
    """

    def __init__(self, private: PrivacyCallback):
        super().__init__()
        self._private = private
        self._timed = 0
        self._since = 0.0
        self._epsilon: float | None = None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if not self._since:
            self._since = time.monotonic()
        else:
            self._timed += 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._epsilon = (logs or {}).get("epsilon")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        plan, steps = self._private.plan, self._private.steps
        left = plan.steps - steps
        if left <= 0 or not self._timed:
            return
        seconds = (time.monotonic() - self._since) / self._timed * left
        cost = ""
        if self._epsilon is not None:
            cost = f", epsilon {rounded_up(self._epsilon, 3)} of {shown(plan.target_epsilon)}"
        print(f"{steps} of {plan.steps} steps{cost}; about {duration(seconds)} to go.", flush=True)


def duration(seconds: float) -> str:
    """A length of time, as one would say it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
