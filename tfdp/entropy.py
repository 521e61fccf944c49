"""The only source of the randomness that privacy rests on: noise, draws, choices within a unit, subsets, trial counts.

| from                             | bits                                                                            |
|----------------------------------|---------------------------------------------------------------------------------|
| `system_words`, `..._bits`, ...  | the operating system's generator, asked anew by every call                      |
| `WordBuffer`                     | ChaCha20 under a key of the operating system's, a new one for every fill: as     |
|                                  | hard to foresee, and 15 times faster where millions of words are needed         |
| `system_generator`               | numpy's distributions on Philox under such a key: public numbers only           |
| `seeded_words`, `..._generator`  | Philox under a seed: repeatable, for tests only; a card must name it            |

Nothing of the system's is kept between two calls, so there is no state to save, to replay, or to share with a fork. The
rest of the package draws nothing for itself; `tests/test_entropy.py` reads the sources for it.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

Words: TypeAlias = npt.NDArray[np.uint64]
WordSource: TypeAlias = Callable[[int], Words]

# The last counter word of a seeded stream says what it is for; the first ones count within the stream.
_FOR_DRAWS, _FOR_NOISE, _FOR_COUNTS = 1, 2, 3

_seeded_draws: dict[int, itertools.count[int]] = {}
_seeded_draws_lock = threading.Lock()


def system_words(count: int) -> Words:
    """`count` independent uniform 64-bit words."""
    return np.frombuffer(os.urandom(8 * count), dtype=np.uint64)


def system_bits(count: int) -> int:
    """A uniform integer of `count` bits."""
    return int.from_bytes(os.urandom(-(-count // 8))) >> (-count % 8)


def system_bytes(count: int) -> bytes:
    """`count` uniform bytes, as for a key."""
    return os.urandom(count)


def system_generator() -> np.random.Generator:
    """Numpy's distributions, for a few numbers that are not secret: Philox is no cipher."""
    return np.random.Generator(np.random.Philox(key=system_words(2)))


class WordBuffer:
    """Memory that is filled with uniform words again and again; fresh memory would cost as much as the words.

    Args:
        size: most words of a fill.
    """

    def __init__(self, size: int):
        self._zeros = memoryview(bytes(8 * size))
        self._words = bytearray(8 * size)

    def fill(self, count: int) -> Words:
        """`count` words that nobody can foresee or draw again. The caller may overwrite them; the next fill does."""
        stream = Cipher(algorithms.ChaCha20(os.urandom(32), os.urandom(16)), mode=None).encryptor()
        stream.update_into(self._zeros[: 8 * count], self._words)
        return np.frombuffer(self._words, np.uint64, count)


def words_of(seed: int | None) -> WordSource:
    """The source of random words for one draw, or for what is chosen within its units: the operating system's."""
    return system_words if seed is None else seeded_words(seed)


def seeded_words(seed: int) -> WordSource:
    """Words of the next draw under a seed: a process never sees the same draw twice, another one does."""
    with _seeded_draws_lock:
        number = next(_seeded_draws.setdefault(seed, itertools.count()))
    philox = np.random.Philox(key=np.array([seed, number], dtype=np.uint64), counter=[0, 0, 0, _FOR_DRAWS])
    return lambda count: np.asarray(philox.random_raw(count), dtype=np.uint64)


def seeded_generator(seed: int, step: int, index: int, *, for_count: bool = False) -> np.random.Generator:
    """The generator for the noise of one variable, or one count, in one step under a seed."""
    counter = np.array([0, index, step, _FOR_COUNTS if for_count else _FOR_NOISE], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=np.array([seed, 0], dtype=np.uint64), counter=counter))
