"""jax_privacy's side of run.py: its Keras API on the JAX backend, the KerasHub GPT-2 of ../step.py.

python with_jax_privacy.py VARIANT...     # lora or full, then :plain or :N, the microbatch size; N = 16 is none
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

os.environ["KERAS_BACKEND"] = "jax"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import keras
import keras_hub
import numpy as np
from jax_privacy import keras_api
from protocol import BATCH, HEADS, LAYERS, RANK, TOKENS, VOCABULARY, WIDTH, batch_of_sequences, serve


def make(variant: str) -> Callable[[], float]:
    train, kind = variant.split(":")
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=VOCABULARY,
        num_layers=LAYERS,
        num_heads=HEADS,
        hidden_dim=WIDTH,
        intermediate_dim=4 * WIDTH,
        max_sequence_length=TOKENS,
    )
    if train == "lora":
        backbone.enable_lora(RANK)
    model = keras_hub.models.GPT2CausalLM(backbone=backbone, preprocessor=None)
    if kind != "plain":
        config = keras_api.DPKerasConfig(
            epsilon=8.0,
            delta=1e-3,
            clipping_norm=1.0,
            batch_size=BATCH,
            gradient_accumulation_steps=1,
            train_steps=1000,
            train_size=BATCH,
            noise_multiplier=100.0,
            rescale_to_unit_norm=False,
            microbatch_size=None if int(kind) == BATCH else int(kind),
        )
        model = keras_api.make_private(model, config)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(1e-4), loss=loss, weighted_metrics=[], jit_compile=True)
    inputs, targets = batch_of_sequences()
    x = {"token_ids": inputs, "padding_mask": np.ones((BATCH, TOKENS), bool)}
    return lambda: float(np.asarray(model.train_on_batch(x, targets)).ravel()[0])


if __name__ == "__main__":
    serve(make, sys.argv[1:])
