"""Trains the public model that the package ships: `python -m tfdp.demo.pretrain [folder]`.

Data: the help topics of the running Python and nothing else. Not private, and not part of any demo run; it is here so
that anyone can make the model again. Took 24 minutes on two busy cores.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import pathlib
import platform
import time
from typing import Any

import numpy as np

from tfdp.demo import corpus, public_model

# A word with its space, a number, punctuation with the line ends after it, line ends with indentation before, spaces.
_WORDS = r" ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_HELD_OUT_EVERY = 16


def train_tokenizer(texts: list[str], vocabulary_size: int) -> dict[str, Any]:
    """Learns byte-level merges; the result holds every single byte, so nothing is ever unknown."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[public_model.END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    learned = json.loads(tokenizer.to_str())["model"]
    return {
        "vocabulary": sorted(learned["vocab"], key=learned["vocab"].__getitem__),
        "merges": [" ".join(pair) for pair in learned["merges"]],
    }


def paragraphs(topics: dict[str, str]) -> list[str]:
    """Cuts the topics at blank lines and takes the indentation away, which is how a docstring reads."""
    pieces = []
    for text in topics.values():
        for block in text.split("\n\n"):
            lines = [line.strip() for line in block.strip().splitlines()]
            if lines:
                pieces.append("\n".join(lines))
    return pieces


def streams(topics: dict[str, str], tokenizer: Any) -> tuple[np.ndarray, np.ndarray]:
    """Token streams for training and for watching over-fitting: every sixteenth paragraph is held out."""
    end = tokenizer.token_to_id(public_model.END)
    parts: tuple[list[int], list[int]] = ([], [])
    for number, text in enumerate(paragraphs(topics)):
        part = parts[number % _HELD_OUT_EVERY == _HELD_OUT_EVERY - 1]
        part.extend([end, *np.asarray(tokenizer(text)).tolist()])
    return np.array(parts[0], np.int32), np.array(parts[1], np.int32)


def windows(stream: np.ndarray, length: int, generator: np.random.Generator) -> np.ndarray:
    """One epoch of windows of `length + 1` tokens; the offset moves, so that a text is not always cut in one place."""
    offset = int(generator.integers(0, length))
    count = (len(stream) - offset - 1) // length
    starts = offset + length * np.arange(count)
    generator.shuffle(starts)
    return np.stack([stream[start : start + length + 1] for start in starts])


def train(
    folder: pathlib.Path, *, epochs: int, vocabulary_size: int, batch_size: int, rate: float, dropout: float
) -> None:
    """Trains, keeps the epoch with the best held-out loss, writes model, tokenizer and provenance into `folder`."""
    import keras

    keras.utils.set_random_seed(0)
    generator = np.random.default_rng(0)
    began = time.monotonic()
    topics = corpus.public_topics()
    stored_tokenizer = train_tokenizer(paragraphs(topics), vocabulary_size)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / public_model.TOKENIZER).write_text(json.dumps(stored_tokenizer) + "\n", encoding="utf-8")
    tokenizer = public_model.load_tokenizer(folder)
    training, watched = streams(topics, tokenizer)
    length = public_model.SEQUENCE_LENGTH
    model = public_model.build_model(tokenizer, dropout=dropout)
    model.preprocessor = None
    steps = epochs * (len(training) // length // batch_size)
    model.compile(
        optimizer=keras.optimizers.AdamW(
            keras.optimizers.schedules.CosineDecay(0.0, steps, warmup_target=rate, warmup_steps=steps // 20),
            weight_decay=0.1,
            global_clipnorm=1.0,
            beta_2=0.98,
        ),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=[],
        jit_compile=True,
    )
    print(f"{len(training):,} tokens, {model.count_params():,} parameters, {steps:,} steps", flush=True)
    check = windows(watched, length, np.random.default_rng(0))
    best, best_weights = np.inf, model.get_weights()
    for epoch in range(epochs):
        batch = windows(training, length, generator)
        batch = batch[: len(batch) // batch_size * batch_size]
        inputs = {"token_ids": batch[:, :-1], "padding_mask": np.ones_like(batch[:, :-1])}
        history = model.fit(inputs, batch[:, 1:], batch_size=batch_size, shuffle=False, verbose=0)
        inputs = {"token_ids": check[:, :-1], "padding_mask": np.ones_like(check[:, :-1])}
        loss = model.evaluate(inputs, check[:, 1:], batch_size=len(check), verbose=0, return_dict=True)["loss"]
        print(f"epoch {epoch + 1}/{epochs}: loss {history.history['loss'][0]:.3f}, held out {loss:.3f}", flush=True)
        if loss < best:
            best, best_weights = loss, model.get_weights()
    model.set_weights(best_weights)
    digest = hashlib.sha256(json.dumps(topics, sort_keys=True).encode()).hexdigest()
    provenance = {
        "script": "python -m tfdp.demo.pretrain",
        "data": {"source": "pydoc_data.topics", "python": platform.python_version(), "sha256": digest},
        "versions": {"keras": keras.__version__},
        "settings": {
            "batch_size": batch_size,
            "dropout": dropout,
            "epochs": epochs,
            "learning_rate": rate,
            "sequence_length": length,
            "vocabulary_size": vocabulary_size,
            **public_model.SHAPE,
        },
        "parameters": model.count_params(),
        "held_out_topics_loss": round(float(best), 4),
        "seconds": round(time.monotonic() - began),
    }
    public_model.save_public_model(model, stored_tokenizer, provenance, folder)


def main() -> None:
    """The command line of the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=pathlib.Path, nargs="?", default=public_model.FOLDER)
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--vocabulary-size", type=int, default=1500)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--dropout", type=float, default=0.2)
    chosen = parser.parse_args()
    train(
        chosen.folder,
        epochs=chosen.epochs,
        vocabulary_size=chosen.vocabulary_size,
        batch_size=chosen.batch_size,
        rate=chosen.rate,
        dropout=chosen.dropout,
    )


if __name__ == "__main__":
    main()
