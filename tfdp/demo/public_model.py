"""The small public GPT-2 that the demo starts from: its shape, its tokenizer, and how it is stored in the package.

It was trained by `tfdp.demo.pretrain` on the help topics alone, so it has seen nothing of the private docstrings.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfdp.errors import DataError

FOLDER = pathlib.Path(__file__).parent
WEIGHTS = "public_model.npz"
TOKENIZER = "public_model.tokenizer.json"
PROVENANCE = "public_model.json"

END = "<|endoftext|>"  # starts and ends every text; id 0, which is also the padding
SEQUENCE_LENGTH = 128
SHAPE = {"num_layers": 4, "num_heads": 4, "hidden_dim": 160, "intermediate_dim": 640}


def load_public_model(folder: pathlib.Path = FOLDER, *, dropout: float = 0.0, compile: bool = True) -> Any:
    """The public model as a `keras_hub.models.GPT2CausalLM` with its preprocessor, in float32.

    Raises:
        DataError: the stored files are damaged or do not belong together.
    """
    import keras

    provenance = public_model_provenance(folder)
    for name, digest in provenance["digests"].items():
        received = _digest(folder / name)
        if received != digest:
            raise DataError(
                f"Expected {folder / name} with SHA-256 {digest}. Received: {received}. Install tfdp again, "
                "or run `python -m tfdp.demo.pretrain` to make the model anew."
            )
    model = build_model(load_tokenizer(folder), dropout=dropout, compile=compile)
    with np.load(folder / WEIGHTS, allow_pickle=False) as stored:
        weights = {name: stored[name].astype("float32") for name in stored.files}
    if [weight.path for weight in model.weights] != list(weights):
        raise DataError(
            f"Expected weights {[weight.path for weight in model.weights]} in {folder / WEIGHTS}. "
            f"Received: {list(weights)}. Run `python -m tfdp.demo.pretrain` to make the model anew."
        )
    for weight in model.weights:
        weight.assign(keras.ops.convert_to_tensor(weights[weight.path]))
    return model


def public_model_provenance(folder: pathlib.Path = FOLDER) -> dict[str, Any]:
    """How the shipped model was made: script, versions, data, settings, losses, digests of its files."""
    loaded: dict[str, Any] = json.loads((folder / PROVENANCE).read_text(encoding="utf-8"))
    return loaded


def load_tokenizer(folder: pathlib.Path = FOLDER) -> Any:
    """The byte-level tokenizer, whose merges were learned on the public part; any text survives the round trip."""
    import keras_hub

    stored = json.loads((folder / TOKENIZER).read_text(encoding="utf-8"))
    return keras_hub.models.GPT2Tokenizer(
        vocabulary={token: number for number, token in enumerate(stored["vocabulary"])}, merges=stored["merges"]
    )


def build_model(tokenizer: Any, *, dropout: float, compile: bool = True) -> Any:
    """An untrained GPT-2 of the demo's shape around `tokenizer`."""
    import keras_hub

    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=tokenizer.vocabulary_size(),
        dropout=dropout,
        max_sequence_length=SEQUENCE_LENGTH,
        name="public_gpt2",
        **SHAPE,
    )
    preprocessor = keras_hub.models.GPT2CausalLMPreprocessor(tokenizer, sequence_length=SEQUENCE_LENGTH)
    # The task compiles itself when it is made; a caller that only evaluates need not wait for that.
    task = keras_hub.models.GPT2CausalLM(backbone=backbone, preprocessor=preprocessor)
    if compile:
        task.compile(optimizer="adam", loss=_token_loss(), weighted_metrics=[])
    return task


def token_records(texts: Sequence[str], tokenizer: Any, sequence_length: int = SEQUENCE_LENGTH) -> list[np.ndarray]:
    """Each text as `[end, tokens..., end]`, cut to `sequence_length + 1`: inputs are t[:-1], targets t[1:]."""
    end = tokenizer.token_to_id(END)
    records = []
    for text in texts:
        tokens = np.asarray(tokenizer(text), dtype=np.int32)[:sequence_length]
        record = np.concatenate(([end], tokens, [end])).astype(np.int32)
        records.append(record[: sequence_length + 1])
    return records


def save_public_model(
    model: Any, tokenizer: Mapping[str, Any], provenance: Mapping[str, Any], folder: pathlib.Path
) -> None:
    """Writes weights (float16), tokenizer and provenance with the digests of the two."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = {weight.path: np.asarray(weight).astype(np.float16) for weight in model.weights}
    with (folder / WEIGHTS).open("wb") as file:
        np.savez_compressed(file, **arrays)
    (folder / TOKENIZER).write_text(json.dumps(tokenizer, ensure_ascii=True) + "\n", encoding="utf-8")
    digests = {name: _digest(folder / name) for name in (WEIGHTS, TOKENIZER)}
    text = json.dumps({**provenance, "digests": digests}, indent=2, sort_keys=True)
    (folder / PROVENANCE).write_text(text + "\n", encoding="utf-8")


def _token_loss() -> Any:
    import keras

    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _digest(path: pathlib.Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
