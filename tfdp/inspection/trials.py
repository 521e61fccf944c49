"""Running a model on some records without leaving a trace in it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp import keras_private
from tfdp.gradients import exact_products


@contextlib.contextmanager
def restored(model: Any) -> Iterator[Callable[[], None]]:
    """Gives a function that puts the model's state (seeds, counters) back to where it was; called again at the end."""
    state = [(variable, variable.numpy()) for variable in model.non_trainable_variables if variable.dtype != "string"]
    moved = {id(v) for v in keras_private.seed_states(model)}

    def rewind() -> None:
        for variable, value in state:
            if id(variable) in moved or not np.array_equal(variable.numpy(), value, equal_nan=value.dtype.kind == "f"):
                variable.assign(value)

    with exact_products():  # as the private fit does
        try:
            yield rewind
        finally:
            rewind()


def tensors(parts: Any) -> tuple[Any, Any, Any]:
    """(x, y, sample_weight) of records that were taken, as nested tensors."""
    three = (parts.get(name) for name in ("x", "y", "sample_weight"))
    return tuple(None if part is None else tf.nest.map_structure(tf.convert_to_tensor, part) for part in three)  # type: ignore[return-value]
