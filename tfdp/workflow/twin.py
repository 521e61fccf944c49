"""The twin of a private model: same start, data, loss and optimizer, without privacy. To compare, not to release."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from tfdp.errors import DataError
from tfdp.workflow.fitting import detached_preprocessor
from tfdp.workflow.language_models import token_loss


def plain_fit(
    model: Any,
    arrays: Any,
    *,
    steps: int,
    batch_size: int,
    optimizer: Any = "adamw",
    learning_rate: Any = 1e-3,
    verbose: int = 1,
) -> float:
    """Ordinary training on shuffled batches; returns the seconds that it took.

    Args:
        model: a KerasHub task, or anything whose outputs are logits.
        arrays: `(x, y, sample_weight)`; records without a weight anywhere are left out.
        steps, batch_size: of the fit; the expected batch size of the private one is comparable.
        optimizer: the name of an optimizer of Keras.
        learning_rate: its rate, or a schedule.
        verbose: of Keras.
    """
    import keras
    import tensorflow as tf

    there = np.flatnonzero(np.asarray(arrays[2]).sum(axis=1) > 0)
    if not len(there):
        raise DataError("Expected records to train on. Received: none with a token to predict.")
    arrays = tf.nest.map_structure(lambda leaf: np.asarray(leaf)[there], arrays)
    batches = tf.data.Dataset.from_tensor_slices(arrays).shuffle(len(there)).repeat().batch(batch_size)
    began = time.monotonic()
    with detached_preprocessor(model):
        chosen = keras.optimizers.get(optimizer)
        chosen.learning_rate = learning_rate
        model.compile(
            optimizer=chosen,
            loss=token_loss(),
            weighted_metrics=[],
        )
        model.fit(batches.prefetch(2), steps_per_epoch=steps, shuffle=False, verbose=verbose)
    return time.monotonic() - began


def check_new_twin(directory: str | os.PathLike[str]) -> None:
    """Refuses a directory that holds something: before the training, not after it."""
    directory = Path(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise DataError(
            f"Expected a new directory for the twin. Received: {directory}, which is not empty. Choose another."
        )


def save_twin(model: Any, directory: str | os.PathLike[str]) -> None:
    """Saves where `tfdp audit --against` looks for it."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    model.save(directory / "model.keras")
