"""Converts a llama2.c checkpoint (stories260K) to a KerasHub Llama and lets it tell a story.

    python examples/stories260k.py --checkpoint stories260K.bin --tokenizer tok512.bin --prompt "Once upon a time"

The checkpoint is the "legacy" layout of llama2.c: seven int32 (dim, hidden dim, layers, heads, key-value heads,
vocabulary size, sequence length), then float32 arrays, every layer of one kind together. A positive vocabulary size
says that the output projection is the embedding itself.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import pathlib
import re
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

BEGIN, END = 1, 2
_BYTE = re.compile(rb"<0x([0-9A-F]{2})>")


@dataclasses.dataclass(frozen=True)
class Shape:
    """The seven numbers at the head of a checkpoint."""

    dim: int
    hidden_dim: int
    layers: int
    heads: int
    key_value_heads: int
    vocabulary: int
    sequence_length: int

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


def read_checkpoint(path: pathlib.Path) -> tuple[Shape, dict[str, np.ndarray]]:
    """The shape and the arrays of a checkpoint, as they are stored: [layers, outputs, inputs].

    Raises:
        ValueError: the file is shorter or longer than its own header says.
    """
    content = path.read_bytes()
    if len(content) < 28:
        raise ValueError(f"Expected a llama2.c checkpoint of at least 28 bytes. Received: {len(content)} in {path}.")
    shape = Shape(*struct.unpack("<7i", content[:28]))
    if min(dataclasses.astuple(shape)) <= 0:
        raise ValueError(
            f"Expected seven positive numbers (a shared embedding) at the head of {path}. Received: {shape}. "
            "Give a checkpoint in llama2.c's legacy layout with a shared embedding."
        )
    key_value_dim = shape.key_value_heads * shape.head_dim
    sizes = {
        "embedding": (shape.vocabulary, shape.dim),
        "attention_norm": (shape.layers, shape.dim),
        "query": (shape.layers, shape.dim, shape.dim),
        "key": (shape.layers, key_value_dim, shape.dim),
        "value": (shape.layers, key_value_dim, shape.dim),
        "attention_output": (shape.layers, shape.dim, shape.dim),
        "feedforward_norm": (shape.layers, shape.dim),
        "gate": (shape.layers, shape.hidden_dim, shape.dim),
        "down": (shape.layers, shape.dim, shape.hidden_dim),
        "up": (shape.layers, shape.hidden_dim, shape.dim),
        "final_norm": (shape.dim,),
        "rotary_cos": (shape.sequence_length, shape.head_dim // 2),
        "rotary_sin": (shape.sequence_length, shape.head_dim // 2),
    }
    expected = 28 + 4 * sum(int(np.prod(size)) for size in sizes.values())
    if len(content) != expected:
        raise ValueError(f"Expected {expected} bytes in {path}, as its header says. Received: {len(content)}.")
    arrays, offset = {}, 28
    for name, size in sizes.items():
        arrays[name] = np.frombuffer(content, "<f4", int(np.prod(size)), offset).reshape(size)
        offset += arrays[name].nbytes
    return shape, arrays


def build_backbone(shape: Shape, arrays: dict[str, np.ndarray]) -> Any:
    """A `keras_hub.models.LlamaBackbone` with the weights of the checkpoint."""
    import keras_hub

    backbone = keras_hub.models.LlamaBackbone(
        vocabulary_size=shape.vocabulary,
        num_layers=shape.layers,
        num_query_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        hidden_dim=shape.dim,
        intermediate_dim=shape.hidden_dim,
        layer_norm_epsilon=1e-5,
        rope_max_wavelength=10000,
        tie_word_embeddings=True,
    )
    values = {
        "token_embedding/embeddings": arrays["embedding"],
        "sequence_output_layernorm/scale": arrays["final_norm"],
    }
    for layer in range(shape.layers):
        prefix = f"transformer_layer_{layer}"
        values |= {
            f"{prefix}/self_attention/query/kernel": _rotated_heads(arrays["query"][layer], shape.heads),
            f"{prefix}/self_attention/key/kernel": _rotated_heads(arrays["key"][layer], shape.key_value_heads),
            f"{prefix}/self_attention/value/kernel": _heads(arrays["value"][layer], shape.key_value_heads),
            f"{prefix}/self_attention/attention_output/kernel": (
                arrays["attention_output"][layer].T.reshape(shape.heads, shape.head_dim, shape.dim)
            ),
            f"{prefix}/self_attention_layernorm/scale": arrays["attention_norm"][layer],
            f"{prefix}/feedforward_layernorm/scale": arrays["feedforward_norm"][layer],
            f"{prefix}/feedforward_gate_dense/kernel": arrays["gate"][layer].T,
            f"{prefix}/feedforward_intermediate_dense/kernel": arrays["up"][layer].T,
            f"{prefix}/feedforward_output_dense/kernel": arrays["down"][layer].T,
        }
    for weight in backbone.weights:
        weight.assign(values.pop(weight.path))
    if values:
        raise ValueError(f"Expected a place for every array of the checkpoint. Received: none for {sorted(values)}.")
    return backbone


def _heads(weight: np.ndarray, heads: int) -> np.ndarray:
    """[heads * head_dim, dim] as it is stored -> [dim, heads, head_dim]."""
    outputs, dim = weight.shape
    return weight.reshape(heads, outputs // heads, dim).transpose(2, 0, 1)


def _rotated_heads(weight: np.ndarray, heads: int) -> np.ndarray:
    """The same for queries and keys.

    llama2.c turns the pairs (0, 1), (2, 3), ... of a head, KerasHub the pairs (0, h/2), (1, h/2 + 1), ...; putting the
    even places before the odd ones makes them the same pairs, and scores do not change when both sides move alike.
    """
    kernel = _heads(weight, heads)
    return np.concatenate((kernel[..., 0::2], kernel[..., 1::2]), axis=-1)


class Tokenizer:
    """Byte-pair tokenizer read from llama2.c's `tokenizer.bin` layout: merges the pair with the best score first."""

    def __init__(self, pieces: Sequence[bytes], scores: Sequence[float]):
        self.pieces = list(pieces)
        self.scores = list(scores)
        self._ids = {piece: number for number, piece in reversed(list(enumerate(pieces)))}
        # No piece spans two words: each can be merged alone, once for all the places where it stands.
        spanning = any(b" " in piece[1:] for piece in self.pieces)
        self._word = re.compile(".+" if spanning else " [^ ]*", re.DOTALL)
        self._merge_once = functools.lru_cache(1 << 16)(self._merge)

    @classmethod
    def from_file(cls, path: pathlib.Path) -> Tokenizer:
        """Reads int32 (longest piece), then float32 score, int32 length and bytes of every piece."""
        content = path.read_bytes()
        pieces, scores, offset = [], [], 4
        while offset < len(content):
            score, length = struct.unpack_from("<fi", content, offset)
            offset += 8
            if length < 0 or offset + length > len(content):
                raise ValueError(f"Expected a piece of {length} bytes at {offset} in {path}. Received: end of file.")
            scores.append(score)
            pieces.append(content[offset : offset + length])
            offset += length
        return cls(pieces, scores)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text` after the begin token; an unknown character becomes its UTF-8 bytes."""
        words = self._word.findall(" " + text) if text else []
        return [BEGIN, *itertools.chain.from_iterable(map(self._merge_once, words))]

    def _merge(self, word: str) -> list[int]:
        tokens: list[int] = []
        for character in word:
            encoded = character.encode()
            known = self._ids.get(encoded)
            tokens += [known] if known is not None else [self._ids[b"<0x%02X>" % byte] for byte in encoded]
        while True:
            merged = [self._ids.get(self.pieces[a] + self.pieces[b]) for a, b in itertools.pairwise(tokens)]
            known_merges = [(-self.scores[number], place) for place, number in enumerate(merged) if number is not None]
            if not known_merges:
                return tokens
            place = min(known_merges)[1]
            replacement = merged[place]
            assert replacement is not None
            tokens[place : place + 2] = [replacement]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text up to the first begin or end token after the start; the space before the first word is dropped."""
        pieces = []
        for number in tokens[1:] if len(tokens) and tokens[0] == BEGIN else tokens:
            if number in (BEGIN, END):
                break
            byte = _BYTE.fullmatch(self.pieces[number])
            pieces.append(bytes.fromhex(byte[1].decode()) if byte else self.pieces[number])
        return b"".join(pieces).decode("utf-8", errors="replace").removeprefix(" ")


def load(checkpoint: pathlib.Path, tokenizer: pathlib.Path) -> tuple[Any, Tokenizer]:
    """The checkpoint as a `keras_hub.models.LlamaCausalLM` that samples greedily, and its tokenizer."""
    import keras_hub

    shape, arrays = read_checkpoint(checkpoint)
    reader = Tokenizer.from_file(tokenizer)
    if len(reader.pieces) != shape.vocabulary:
        raise ValueError(
            f"Expected a tokenizer with {shape.vocabulary} pieces for {checkpoint}. "
            f"Received: {len(reader.pieces)} in {tokenizer}. Give the two files that were made together."
        )
    model = keras_hub.models.LlamaCausalLM(backbone=build_backbone(shape, arrays), preprocessor=None)
    model.compile(sampler="greedy")
    return model, reader


def tell(model: Any, tokenizer: Tokenizer, prompt: str = "", tokens: int = 256) -> str:
    """`prompt` continued greedily until it is `tokens` long (the begin token not counted)."""
    beginning = tokenizer.encode(prompt)
    length = max(tokens + 1, len(beginning))
    token_ids = np.zeros((1, length), np.int32)
    token_ids[0, : len(beginning)] = beginning
    mask = (np.arange(length) < len(beginning))[np.newaxis].astype(np.int32)
    output = model.generate({"token_ids": token_ids, "padding_mask": mask}, stop_token_ids=[BEGIN, END])
    valid = np.asarray(output["padding_mask"])[0].astype(bool)
    return tokenizer.decode(np.asarray(output["token_ids"])[0][valid].tolist())


def main() -> None:
    """The command line of the example."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=pathlib.Path, required=True, help="stories260K.bin")
    parser.add_argument("--tokenizer", type=pathlib.Path, required=True, help="tok512.bin")
    parser.add_argument("--prompt", default="", help="how the story begins")
    parser.add_argument("--tokens", type=int, default=256, help="length of the story in tokens")
    parser.add_argument("--save", type=pathlib.Path, help="write the converted model to this .keras file")
    chosen = parser.parse_args()
    model, tokenizer = load(chosen.checkpoint, chosen.tokenizer)
    print(tell(model, tokenizer, chosen.prompt, chosen.tokens))
    if chosen.save:
        model.save(chosen.save)


if __name__ == "__main__":
    main()
