from __future__ import annotations

import importlib.util
import pathlib
import struct
import sys

import keras
import numpy as np
import pytest

import tfdp

_PATH = pathlib.Path(__file__).parents[2] / "examples" / "stories260k.py"
_ANIMALS = ("cat", "dog", "bear", "bird", "frog", "fish", "fox", "mouse")


@pytest.fixture(scope="module")
def stories():
    specification = importlib.util.spec_from_file_location("stories260k", _PATH)
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module  # dataclasses look their module up
    specification.loader.exec_module(module)
    yield module
    del sys.modules[specification.name]


def _random_checkpoint(path, shape, seed=0):
    dim, hidden, layers, heads, key_value_heads, vocabulary, length = shape
    head = dim // heads
    generator = np.random.default_rng(seed)
    sizes = [
        (vocabulary, dim),
        (layers, dim),
        (layers, dim, dim),
        (layers, key_value_heads * head, dim),
        (layers, key_value_heads * head, dim),
        (layers, dim, dim),
        (layers, dim),
        (layers, hidden, dim),
        (layers, dim, hidden),
        (layers, hidden, dim),
        (dim,),
        (length, head // 2),
        (length, head // 2),
    ]
    arrays = [generator.normal(0.0, 0.4, size).astype("<f4") for size in sizes]
    path.write_bytes(struct.pack("<7i", *shape) + b"".join(array.tobytes() for array in arrays))
    return arrays


def _plain_logits(shape, arrays, tokens):
    """The model written out for one text, with rotations of neighbouring pairs as complex numbers."""
    _, _, layers, heads, key_value_heads, _, _ = shape
    embedding, norm1, query, key, value, output, norm2, gate, down, up, final = (a.astype("f8") for a in arrays[:11])
    head = embedding.shape[1] // heads
    angles = np.outer(np.arange(len(tokens)), 10000.0 ** (-np.arange(0, head, 2) / head))

    def normalise(x, scale):
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-5) * scale

    def rotate(x):
        turned = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)[:, None, :]
        return np.stack((turned.real, turned.imag), axis=-1).reshape(x.shape)

    x = embedding[tokens]
    mask = np.triu(np.full((len(tokens), len(tokens)), -np.inf), 1)
    for layer in range(layers):
        y = normalise(x, norm1[layer])
        q = rotate((y @ query[layer].T).reshape(len(tokens), heads, head))
        k = rotate((y @ key[layer].T).reshape(len(tokens), key_value_heads, head))
        v = (y @ value[layer].T).reshape(len(tokens), key_value_heads, head)
        mixed = []
        for number in range(heads):
            source = number // (heads // key_value_heads)
            scores = q[:, number] @ k[:, source].T / np.sqrt(head) + mask
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            mixed.append(weights / weights.sum(axis=-1, keepdims=True) @ v[:, source])
        x = x + np.concatenate(mixed, axis=-1) @ output[layer].T
        y = normalise(x, norm2[layer])
        opened = y @ gate[layer].T
        x = x + (opened / (1.0 + np.exp(-opened)) * (y @ up[layer].T)) @ down[layer].T
    return normalise(x, final) @ embedding.T


def test_converted_model_equals_the_formulas(stories, tmp_path):
    shape = (16, 24, 2, 4, 2, 11, 12)
    arrays = _random_checkpoint(tmp_path / "model.bin", shape)
    backbone = stories.build_backbone(*stories.read_checkpoint(tmp_path / "model.bin"))
    tokens = np.array([1, 7, 3, 3, 10, 0, 5])
    hidden = backbone({"token_ids": tokens[None], "padding_mask": np.ones((1, 7), np.int32)})
    logits = np.asarray(backbone.token_embedding(hidden, reverse=True))[0]
    np.testing.assert_allclose(logits, _plain_logits(shape, arrays, tokens), rtol=1e-4, atol=1e-4)


def test_damaged_checkpoints_are_refused(stories, tmp_path):
    path = tmp_path / "model.bin"
    _random_checkpoint(path, (16, 24, 2, 4, 2, 11, 12))
    content = path.read_bytes()
    for damaged, message in (
        (content[:-4], "as its header says"),
        (content[:20], "at least 28 bytes"),
        (struct.pack("<7i", 16, 24, 2, 4, 2, -11, 12) + content[28:], "shared embedding"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=message):
            stories.read_checkpoint(path)


def test_tokenizer_merges_the_best_score_first(stories):
    pieces = [b"<unk>", b"\n<s>\n", b"\n</s>\n", *(b"<0x%02X>" % byte for byte in range(256)), b" ", b"a", b"b", b"c"]
    scores = [0.0] * len(pieces)
    pieces += [b"ab", b"bc", b" ab"]
    scores += [-2.0, -1.0, -0.5]
    tokenizer = stories.Tokenizer(pieces, scores)
    # "bc" beats "ab", so " ab" can never form; the letter that is not in the table becomes its two bytes.
    assert [tokenizer.pieces[number] for number in tokenizer.encode("abcé")[1:]] == [
        b" ",
        b"a",
        b"bc",
        b"<0xC3>",
        b"<0xA9>",
    ]
    assert tokenizer.decode(tokenizer.encode("abcé")) == "abcé"
    assert tokenizer.encode("") == [stories.BEGIN]
    assert tokenizer.decode([*tokenizer.encode("ab"), stories.BEGIN, *tokenizer.encode("c")]) == "ab"


def test_stories260k_tells_the_printed_story(stories, shared):
    folder = pathlib.Path(shared) / "data" / "models" / "stories260K"
    printed = (folder / "stories260K.md").read_text(encoding="utf-8").split("-t 0.0\n", 1)[1].split("\n```", 1)[0]
    model, tokenizer = stories.load(folder / "stories260K.bin", folder / "tok512.bin")
    assert stories.tell(model, tokenizer) == printed
    assert tokenizer.decode(tokenizer.encode(printed)) == printed
    # A prompt that is the beginning of the greedy story must not change how it goes on.
    assert printed.startswith(stories.tell(model, tokenizer, "Once upon a time", tokens=40))


@pytest.mark.parametrize("lora_rank", [None, 2])
def test_stories260k_is_trained_privately(stories, shared, plan_of, tmp_path, lora_rank):
    """In full, with its tied table, and by adapters: what trains moves, and nothing else."""
    folder = pathlib.Path(shared) / "data" / "models" / "stories260K"
    model, tokenizer = stories.load(folder / "stories260K.bin", folder / "tok512.bin")
    if lora_rank:
        model.backbone.enable_lora(lora_rank)
    texts = [f"Once upon a time there was a {animal} who liked to play." for animal in _ANIMALS]
    plan = plan_of(num_units=len(texts), batch=4, steps=2)
    model.compile(
        optimizer=tfdp.dp_optimizer("adamw", plan, learning_rate=1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=[],
    )
    records = [tokenizer.encode(text) for text in texts]
    batches = tfdp.poisson_batches(records, plan, sequence_length=20)
    before = [variable.numpy() for variable in model.variables]
    callback = tfdp.PrivacyCallback(plan, tmp_path / "ledger.jsonl")
    model.fit(batches, steps_per_epoch=2, callbacks=[callback], verbose=0, shuffle=False)
    assert tfdp.read_ledger(tmp_path / "ledger.jsonl").steps == 2
    trained = {variable.path for variable in model.trainable_variables}
    assert all("lora" in path for path in trained) == (lora_rank is not None)
    for variable, old in zip(model.variables, before, strict=True):
        if "seed" not in variable.path:
            assert (variable.numpy() != old).any() == (variable.path in trained), variable.path
