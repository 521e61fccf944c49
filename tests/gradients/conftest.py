"""The oracle of the gradient tests: a Python loop over single units. Tiny models, and what is compared."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import keras_hub
import numpy as np
import pytest
import tensorflow as tf

from tfdp.gradients import clipped_gradients

tf.get_logger().setLevel("ERROR")

VOCABULARY, TOKENS, WIDTH = 23, 6, 8


def rows(data: Any, start: int, stop: int) -> Any:
    """Records start..stop of nested arrays."""
    return tf.nest.map_structure(lambda leaf: leaf[start:stop], data)


@dataclasses.dataclass
class Reference:
    """Per-unit gradients, one unit at a time."""

    gradients: list[list[np.ndarray]]
    losses: np.ndarray

    @property
    def norms(self) -> np.ndarray:
        return np.array([np.sqrt(sum(np.sum(g.astype(np.float64) ** 2) for g in unit)) for unit in self.gradients])

    def sums(self, clip_norm: float, weight: Any = None) -> list[np.ndarray]:
        factors = clip_norm / np.maximum(self.norms, clip_norm)
        factors = factors if weight is None else factors * np.asarray(weight)
        columns = zip(*self.gradients, strict=True)
        return [sum(f * g for f, g in zip(factors, column, strict=True) if f) for column in columns]

    def first(self, count: int) -> Reference:
        return Reference(self.gradients[:count], self.losses[:count])


def reference_of(model: Any, data: Any, records_per_unit: int = 1) -> Reference:
    """Gradient of `model.compute_loss` for each unit alone, with Keras's own train-mode forward pass."""
    variables = [v.value for v in model.trainable_variables]
    gradients, losses = [], []
    for start in range(0, len(tf.nest.flatten(data)[0]), records_per_unit):
        one = tf.nest.map_structure(tf.convert_to_tensor, rows(data, start, start + records_per_unit))
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(one)
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x=x, y=y, y_pred=model(x, training=True), sample_weight=sample_weight)
        unit = tape.gradient(loss, variables, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        gradients.append([tf.convert_to_tensor(g).numpy() for g in unit])
        losses.append(float(loss))
    return Reference(gradients, np.array(losses))


def flat(gradients: Any) -> np.ndarray:
    return np.concatenate([np.asarray(g, np.float64).ravel() for g in gradients])


def distance(sums: Any, expected: Any) -> float:
    return float(np.linalg.norm(flat(sums) - flat(expected)) / max(np.linalg.norm(flat(expected)), 1e-30))


def private(model: Any, data: Any, clip_norm: float, **options: Any) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """`clipped_gradients` traced, as the train step runs it."""
    function = traced(model, clip_norm, **options)
    return function(data, np.ones(len(tf.nest.flatten(data)[0]) // options.get("records_per_unit", 1), np.float32))


def traced(model: Any, clip_norm: float, **options: Any) -> Callable[[Any, Any], Any]:
    jit_compile = options.pop("jit_compile", False)

    @tf.function(autograph=False, jit_compile=jit_compile)
    def function(data: Any, weight: Any) -> Any:
        return clipped_gradients(model, data, clip_norm, unit_weight=weight, **options)

    def run(data: Any, weight: Any) -> Any:
        data = tf.nest.map_structure(tf.convert_to_tensor, data)
        return tf.nest.map_structure(lambda leaf: leaf.numpy(), function(data, tf.constant(weight, tf.float32)))

    return run


def assert_agrees(result: Any, expected: Reference, clip_norm: float, weight: Any = None) -> None:
    """Norms to 1e-5, losses to 1e-5, sums to 1e-4, relative."""
    sums, norms, losses = result
    present = np.ones(len(norms), bool) if weight is None else np.asarray(weight) > 0
    np.testing.assert_allclose(norms, np.where(present, expected.norms, 0.0), rtol=1e-5)
    np.testing.assert_allclose(losses, np.where(present, expected.losses, 0.0), rtol=1e-5)
    wanted = expected.sums(clip_norm, present)
    assert [s.shape for s in sums] == [np.shape(w) for w in wanted]
    assert all(s.dtype == np.float32 for s in sums)
    assert norms.dtype == np.float32
    assert distance(sums, wanted) < 1e-4
    for got, want in zip(sums, wanted, strict=True):  # no variable hides behind a larger one
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-5 * clip_norm)


def shaken(model: Any, scale: float = 0.1) -> Any:
    """Moves every variable off its initial value (zeros and ones hide mistakes)."""
    generator = np.random.default_rng(3)
    for variable in model.trainable_variables:
        variable.assign(variable.numpy() + scale * generator.normal(size=variable.shape))
    return model


def language_model(kind: str, *, lora: int = 0, dropout: float = 0.0, dtype: Any = None, tokens: int = TOKENS) -> Any:
    """One-layer KerasHub models: gpt2, llama (grouped queries, untied), llama_tied, bert, masked (tied head)."""
    keras.utils.set_random_seed(1)
    shape = {"vocabulary_size": VOCABULARY, "num_layers": 1, "hidden_dim": WIDTH, "intermediate_dim": 12}
    shape["dtype"] = dtype
    if kind == "gpt2":
        backbone = keras_hub.models.GPT2Backbone(num_heads=2, dropout=dropout, max_sequence_length=tokens + 2, **shape)
        model = keras_hub.models.GPT2CausalLM(backbone=backbone, preprocessor=None)
    elif kind in ("llama", "llama_tied"):
        backbone = keras_hub.models.LlamaBackbone(
            num_query_heads=4, num_key_value_heads=2, tie_word_embeddings=kind == "llama_tied", dropout=dropout, **shape
        )
        model = keras_hub.models.LlamaCausalLM(backbone=backbone, preprocessor=None)
    else:
        backbone = keras_hub.models.BertBackbone(num_heads=2, dropout=dropout, max_sequence_length=tokens, **shape)
        if kind == "bert":
            model = keras_hub.models.BertTextClassifier(backbone, num_classes=3, preprocessor=None, dropout=dropout)
        else:
            backbone.get_layer("pooled_dense").trainable = False  # the masked-LM head does not use it
            model = keras_hub.models.BertMaskedLM(backbone, preprocessor=None)
    if lora:
        backbone.enable_lora(lora)
    model.compile(optimizer="sgd", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return shaken(model)


def records(kind: str, count: int, *, tokens: int = TOKENS, seed: int = 0) -> Any:
    """What KerasHub's preprocessors return: ragged lengths behind a padding mask, token weights."""
    generator = np.random.default_rng(seed)
    ids = generator.integers(1, VOCABULARY, (count, tokens))
    mask = np.arange(tokens) < generator.integers(2, tokens + 1, (count, 1))
    x = {"token_ids": (ids * mask).astype("int32"), "padding_mask": mask}
    if kind in ("bert", "masked"):
        x["segment_ids"] = generator.integers(0, 2, ids.shape).astype("int32")
    if kind == "bert":
        return x, generator.integers(0, 3, count)
    if kind == "masked":
        x["mask_positions"] = generator.integers(0, tokens, (count, 3)).astype("int32")
        return x, generator.integers(0, VOCABULARY, (count, 3)), generator.integers(0, 2, (count, 3)).astype("float32")
    return x, generator.integers(0, VOCABULARY, (count, tokens)), mask.astype("float32")


@pytest.fixture(scope="session")
def oracle() -> Any:
    """This file's helpers, for test modules that are not importable from one another."""
    import types

    return types.SimpleNamespace(
        reference_of=reference_of,
        private=private,
        traced=traced,
        assert_agrees=assert_agrees,
        distance=distance,
        flat=flat,
        rows=rows,
        shaken=shaken,
        language_model=language_model,
        records=records,
    )
