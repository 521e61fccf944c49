"""The model of a job: a KerasHub preset, or a small GPT-2 that needs no download; LoRA; texts as its arrays."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tfdp.errors import DataError

GPT2_TINY = "gpt2:tiny"
_TINY_SHAPE = {"num_layers": 2, "num_heads": 4, "hidden_dim": 64, "intermediate_dim": 256}
_TINY_LENGTH = 512
_END = "<|endoftext|>"
# The tokenizer cannot be without merges; these pairs are the most common ones of any English text.
_MERGES = ("Ġ t", "h e", "Ġ a", "i n", "r e", "o n", "Ġt he", "e r", "Ġ s", "a t")
_TEXTS_AT_A_TIME = 512


def build_model(name: str | os.PathLike[str], *, lora_rank: int | None = None) -> Any:
    """A `keras_hub.models.CausalLM` with its preprocessor.

    Args:
        name: "gpt2:tiny" (170,000 weights, random and the same every time, byte-level tokenizer, nothing downloaded), a
            KerasHub preset such as "gpt2_base_en" (downloaded), or a directory that `save_to_preset` wrote.
        lora_rank: train low-rank adapters of that rank and freeze everything else; None trains everything.

    Raises:
        DataError: no such preset, or not a causal language model with a preprocessor.
    """
    name = os.fspath(name)
    model = _tiny_gpt2() if name == GPT2_TINY else _from_preset(name)
    if lora_rank is not None:
        add_lora(model, lora_rank)
    return model


def add_lora(model: Any, rank: int) -> None:
    """Freezes `model` and adds low-rank adapters to its attention layers."""
    if rank < 1:
        raise DataError(f"Expected a LoRA rank of at least 1. Received: {rank}. Use 4, 8 or 16, or leave it out.")
    backbone: Any = getattr(model, "backbone", None)
    if not hasattr(backbone, "enable_lora"):
        raise DataError(
            f"Expected a KerasHub task, whose backbone takes LoRA. Received: {type(model).__name__}. Call enable_lora "
            "on "
            "its layers yourself, or train all weights."
        )
    backbone.enable_lora(rank)


def encode_texts(model: Any, texts: Sequence[str], sequence_length: int) -> tuple[dict[str, np.ndarray], Any, Any]:
    """Texts as `(x, y, sample_weight)` arrays of `sequence_length` tokens, by the model's own preprocessor.

    A longer text is cut: what is beyond `sequence_length` is neither trained on nor counted. A shorter one is padded,
    with weight 0.

    Raises:
        DataError: no preprocessor, no texts, or more tokens than the model has positions for.
    """
    preprocessor = getattr(model, "preprocessor", None)
    if preprocessor is None:
        raise DataError(
            f"Expected a model with its preprocessor. Received: {type(model).__name__} without one. Encode the texts "
            "before "
            "model.preprocessor is set to None."
        )
    if not texts:
        raise DataError("Expected texts. Received: none.")
    most = getattr(getattr(model, "backbone", None), "max_sequence_length", None)
    if sequence_length < 2 or (most is not None and sequence_length > most):
        limit = "" if most is None else f" and at most {most}, the positions of {model.backbone.name}"
        raise DataError(f"Expected a sequence length of at least 2{limit}. Received: {sequence_length}.")
    parts = []
    for start in range(0, len(texts), _TEXTS_AT_A_TIME):
        x, y, weight = preprocessor(list(texts[start : start + _TEXTS_AT_A_TIME]), sequence_length=sequence_length)
        parts.append(({key: np.asarray(value) for key, value in x.items()}, np.asarray(y), np.asarray(weight)))
    x = {key: np.concatenate([part[0][key] for part in parts]) for key in parts[0][0]}
    y = np.concatenate([part[1] for part in parts])
    return x, y, np.concatenate([part[2] for part in parts]).astype(np.float32)


def token_loss() -> Any:
    """What the workflow minimises: cross-entropy of logits, per token of a text and not per position.

    It is then comparable between lengths.
    """
    import keras

    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight")


def _tiny_gpt2() -> Any:
    import keras_hub

    tokenizer = _byte_tokenizer()
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=tokenizer.vocabulary_size(),
        max_sequence_length=_TINY_LENGTH,
        dropout=0.0,
        name="tiny_gpt2",
        **_TINY_SHAPE,
    )
    # Own draws: a run that is continued has to start from the same frozen weights, and no global seed is touched.
    generator = np.random.default_rng(0)
    for weight in backbone.weights:
        if len(weight.shape) > 1:
            weight.assign(generator.normal(0.0, 0.02, weight.shape).astype("float32"))
    preprocessor = keras_hub.models.GPT2CausalLMPreprocessor(tokenizer, sequence_length=_TINY_LENGTH)
    return keras_hub.models.GPT2CausalLM(backbone=backbone, preprocessor=preprocessor)


def _byte_tokenizer() -> Any:
    """A GPT-2 tokenizer whose tokens are the 256 bytes and hardly more."""
    import keras_hub

    # GPT-2 writes a byte as the character with its number where that is printable, and else as one from 256 on.
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    letters = [chr(byte if byte in printable else next(others)) for byte in range(256)]
    tokens = [_END, *letters, *(merge.replace(" ", "") for merge in _MERGES)]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    return keras_hub.models.GPT2Tokenizer(vocabulary=vocabulary, merges=list(_MERGES))


def _from_preset(name: str) -> Any:
    import keras_hub

    try:
        model = keras_hub.models.CausalLM.from_preset(name)
    except Exception as error:  # KerasHub and the hubs behind it raise what they like
        reason = (str(error).strip().splitlines() or [""])[0][:200]
        where = "a directory" if Path(name).is_dir() else "no directory"
        raise DataError(
            f'Expected --model to be "{GPT2_TINY}", a KerasHub preset of a causal language model, or a directory that '
            f"save_to_preset wrote. Received: {name!r} ({where}), and {type(error).__name__}: {reason} "
            "A preset by name is downloaded: without a network, use a directory."
        ) from error
    if getattr(model, "preprocessor", None) is None:
        raise DataError(
            f"Expected a preset with its preprocessor. Received: {name!r} without one. Save the whole task with "
            "save_to_preset, its tokenizer included."
        )
    return model
