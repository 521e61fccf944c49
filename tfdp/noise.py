"""The only source of randomness for noise.

| `rng`    | bits from                                                     | for                              |
|----------|---------------------------------------------------------------|----------------------------------|
| "csprng" | ChaCha20, keyed by `os.urandom` anew for every 32,768 values   | private training (the default)   |
| "prng"   | Philox, keyed by (seed, step, variable)                       | tests only; a card must name it: |
|          |                                                               | its noise is not secret          |

Values are computed in float64 by inverting the normal distribution function and rounded to float32 once. The tails end
where they have a mass of 2^-65 (9.1 standard deviations). What is not covered: attacks on floating-point arithmetic
itself, that is on the low bits of the rounded sum of gradient and noise.
"""

from __future__ import annotations

import concurrent.futures
import math
import operator
import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from scipy import special

from tfdp.errors import MisuseError

# Values per piece of work: its arrays stay in a processor's cache, and calling into numpy costs little beside it.
_CHUNK = 32_768
# Below this, starting threads costs more than it saves.
_THREADS_FROM = 4 * _CHUNK
_MAX_THREADS = 8

# Outside of this, float32 would round noise to zero or to infinity.
_SMALLEST_STDDEV = 1e-30
_LARGEST_STDDEV = 1e30


class GaussianNoise:
    """Independent Gaussian noise; no value is ever produced twice.

    Args:
        rng: "csprng" or "prng".
        seed: for "prng" only, and needed there: a non-negative integer below 2^64.

    Raises:
        MisuseError: an unknown `rng`, a seed with "csprng", or "prng" without one.
    """

    def __init__(self, rng: str = "csprng", seed: int | None = None):
        if rng not in ("csprng", "prng"):
            raise MisuseError(f'Expected rng "csprng" or "prng". Received: {rng!r}. Use "csprng" for private training.')
        if (seed is None) == (rng == "prng"):
            raise MisuseError(
                f'Expected a seed with rng "prng" and none with "csprng". Received: rng={rng!r}, seed={seed!r}. '
                "Noise of a known seed is not private: a seed is for tests."
            )
        if seed is not None and not 0 <= seed < 2**64:
            raise MisuseError(f"Expected a seed between 0 and 2**64 - 1. Received: seed={seed}. Choose another.")
        self.rng = rng
        self.seed = seed
        self._last_steps: dict[int, int] = {}
        self._lock = threading.Lock()

    def sample(self, shape: Sequence[int], stddev: float, *, step: int, index: int) -> npt.NDArray[np.float32]:
        """Draws one array of noise.

        Args:
            shape: of the array.
            stddev: the standard deviation itself: noise multiplier times clip norm.
            step: number of the logical step. "prng": has to grow from call to call; "csprng" ignores it.
            index: number of the variable within the step. "csprng" ignores it.

        Returns:
            float32 array of `shape`.

        Raises:
            MisuseError: `stddev` is not a positive number that float32 can hold, or a "prng" step comes again.
        """
        stddev = _checked_stddev(stddev)
        out = np.empty(math.prod(shape), np.float32)
        if self.seed is None:
            _fill_from_system(out, stddev)
        else:
            out[:] = self._philox(self.seed, step, index).standard_normal(len(out)) * stddev
        return out.reshape(tuple(shape))

    def tensors(self, shapes: Sequence[Sequence[int]], stddev: float, step: Any) -> list[Any]:
        """Noise for all variables of a step as one operation of a TensorFlow graph.

        The operation is stateful, so it draws anew at every execution of the graph; it depends on nothing but `step`,
        so TensorFlow may run it beside the gradients.

        Args:
            shapes: fully defined, one per variable.
            stddev: as for `sample`.
            step: number of the logical step, an integer tensor or a Python integer.

        Returns:
            A list of float32 tensors of the given static shapes.
        """
        import tensorflow as tf

        sizes = [tuple(operator.index(size) for size in shape) for shape in shapes]
        stddev = _checked_stddev(stddev)
        if not sizes:
            return []

        def draw(step: Any) -> list[npt.NDArray[np.float32]]:
            return [self.sample(size, stddev, step=int(step), index=index) for index, size in enumerate(sizes)]

        tensors = tf.numpy_function(draw, [tf.cast(step, tf.int64)], [tf.float32] * len(sizes), stateful=True)
        # Run eagerly, TensorFlow hands a single output back bare.
        tensors = list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]
        for tensor, size in zip(tensors, sizes, strict=True):
            tensor.set_shape(size)
        return tensors

    def _philox(self, seed: int, step: int, index: int) -> np.random.Generator:
        with self._lock:
            if step <= self._last_steps.get(index, -1):
                raise MisuseError(
                    f"Expected a step above {self._last_steps[index]} for variable {index}. Received: step={step}. "
                    "The same noise would be used twice: go on counting steps, or start with another seed."
                )
            self._last_steps[index] = step
        # The lowest word counts within the array; the highest keeps this stream apart from the seeded sampler's.
        counter = np.array([0, index, step, 2], dtype=np.uint64)
        return np.random.Generator(np.random.Philox(key=np.array([seed, 0], dtype=np.uint64), counter=counter))


def _checked_stddev(stddev: float) -> float:
    stddev = float(stddev)
    if not _SMALLEST_STDDEV <= stddev <= _LARGEST_STDDEV:
        raise MisuseError(
            f"Expected a standard deviation between {_SMALLEST_STDDEV} and {_LARGEST_STDDEV}. "
            f"Received: stddev={stddev}. "
            "Without noise there is no privacy: check the noise multiplier and the clip norm."
        )
    return stddev


def _fill_from_system(out: npt.NDArray[np.float32], stddev: float) -> None:
    """Fills the 1-D array `out`, on several threads where it is long: os.urandom and the arithmetic release the GIL."""
    pieces = [out[start : start + _CHUNK] for start in range(0, len(out), _CHUNK)]

    def fill(piece: npt.NDArray[np.float32]) -> None:
        # The operating system's own generator is a keyed stream cipher too, but 15 times slower to read from.
        stream = Cipher(algorithms.ChaCha20(os.urandom(32), os.urandom(16)), mode=None).encryptor()
        words = np.frombuffer(stream.update(bytes(8 * len(piece))), dtype=np.uint64)
        np.multiply(standard_normal_from_words(words), stddev, out=piece, casting="same_kind")

    if len(out) < _THREADS_FROM:
        for piece in pieces:
            fill(piece)
        return
    # A pool per call: one that is kept would be dead in a forked process.
    with concurrent.futures.ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
        list(pool.map(fill, pieces))


def standard_normal_from_words(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """One standard normal value per uniform 64-bit word.

    The highest bit is the sign. The other 63 bits are a point u in (0, 1/2]: 2^-65 for the word 0, so the quantile
    stays finite, and both tails have the resolution that floating point has near zero.
    """
    values = (words & np.uint64(2**63 - 1)).astype(np.float64)
    values += 0.5
    values *= 2.0**-64
    special.ndtri(values, out=values)
    return np.copysign(values, words.view(np.float64), out=values)
