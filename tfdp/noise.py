"""Gaussian noise on sums.

| `rng`    | bits from `tfdp.entropy`                                      | for                              |
|----------|---------------------------------------------------------------|----------------------------------|
| "csprng" | ChaCha20, keyed by `os.urandom` anew for every 131,072 values | private training (the default)   |
| "prng"   | Philox, keyed by (seed, step, variable)                       | tests only; a card must name it: |
|          |                                                               | its noise is not secret          |

Sum and noise are both rounded to whole multiples of one step, 2^-38 of the standard deviation (a power of two), before
they are added, in float64. What leaves is a function of an integer that the noise shifts by an integer: its low bits,
which give away sums that are added in plain floating point (Mironov 2012), hold nothing that the noise does not
hide. Rounding moves a sum of d values by at most sqrt(d) * 2^-38 standard deviations, 1e-7 for d = 10^9.

Noise is computed in float64. Its tails end at 9.4 standard deviations, where they have a mass of 2^-64.
"""

from __future__ import annotations

import concurrent.futures
import math
import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tfdp.entropy import WordBuffer, seeded_generator
from tfdp.errors import MisuseError

# Values per piece of work: its arrays stay in a processor's cache, and taking turns at the GIL costs little beside it.
_CHUNK = 131_072
_MAX_THREADS = 8

# Values of float32 in 64 bytes, the alignment of TensorFlow's memory.
_LINE = 16

# Outside of this, float32 would round noise to zero or to infinity.
_SMALLEST_STDDEV = 1e-30
_LARGEST_STDDEV = 1e30

_STEP_BITS = 38

# Streams of "prng": for sums of gradients, and for counts.
_SUMS, _COUNTS = "sums", "counts"


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
        self._last_steps = {_SUMS: -1, _COUNTS: -1}
        self._lock = threading.Lock()

    def noisy_means(
        self,
        sums: Sequence[npt.NDArray[np.float32]],
        stddev: float,
        denominator: float,
        *,
        step: int,
        room: npt.NDArray[np.float32] | None = None,
    ) -> list[npt.NDArray[np.float32]]:
        """(sum + noise) / denominator, for every value of every array.

        Args:
            sums: one array per variable.
            stddev: the standard deviation itself: noise multiplier times clip norm.
            denominator: a public constant.
            step: number of the logical step. "prng": has to grow from call to call; "csprng" ignores it.
            room: memory for the result, of `room_for(sums)` values; None takes fresh memory.

        Returns:
            float32 arrays of the shapes of `sums`, in `room`.

        Raises:
            MisuseError: `stddev` is not a positive number that float32 can hold, or a "prng" step comes again.
        """
        stddev = _checked_stddev(stddev)
        if self.seed is not None:
            self._advance(step, _SUMS)
        means = _aligned(sums, np.empty(room_for(sums), np.float32) if room is None else room)
        groups = _groups(sums, means)

        def work(groups: list[_Group]) -> None:
            scratch = _Scratch(max((sum(len(mean) for _, mean in group) for group in groups), default=0))
            for group in groups:
                scratch.add(group, stddev, denominator)

        if self.seed is not None:
            rounding = _rounding_step(stddev)
            for index, (total, mean) in enumerate(zip(sums, means, strict=True)):
                noise = seeded_generator(self.seed, step, index).standard_normal(mean.size)
                noise *= stddev / rounding
                _add(total.reshape(-1), noise, mean.reshape(-1), np.empty(mean.size), rounding, denominator)
        elif len(groups) == 1:
            work(groups)
        else:
            # The cipher and the arithmetic release the GIL. A pool that is kept would be dead after a fork.
            workers = min(_MAX_THREADS, os.cpu_count() or 1)
            with concurrent.futures.ThreadPoolExecutor(workers) as pool:
                list(pool.map(work, [groups[worker::workers] for worker in range(workers)]))
        return means

    def noisy_count(self, count: float, stddev: float, *, step: int) -> float:
        """Count + noise, from a stream of its own beside that of `noisy_means`.

        Args:
            count: a sum over units.
            stddev, step: as for `noisy_means`.

        Raises:
            MisuseError: as there.
        """
        stddev = _checked_stddev(stddev)
        result = np.empty(1)
        rounding = _rounding_step(stddev)
        if self.seed is None:
            noise = _Scratch(1).gaussians(1, stddev / rounding)
        else:
            self._advance(step, _COUNTS)
            noise = seeded_generator(self.seed, step, 0, for_count=True).standard_normal(1) * (stddev / rounding)
        _add(np.array([count], np.float64), noise, result, np.empty(1), rounding, 1.0)
        return float(result[0])

    def tensors(self, sums: Sequence[Any], stddev: float | Any, denominator: float, step: Any) -> list[Any]:
        """`noisy_means` of all variables of a step as one operation of a TensorFlow graph.

        The operation is stateful, so it draws anew at every execution of the graph.

        Args:
            sums: float32 tensors of static shapes, one per variable.
            stddev: as for `noisy_means`; or a scalar float64 tensor, where it differs from step to step.
            denominator: as for `noisy_means`.
            step: number of the logical step, an integer tensor or a Python integer.

        Returns:
            A list of float32 tensors of the same shapes.
        """
        import tensorflow as tf

        if not sums:
            return []
        moving = [stddev] if tf.is_tensor(stddev) else []
        fixed = None if moving else _checked_stddev(stddev)

        def draw(step: Any, room: Any, *inputs: Any) -> list[npt.NDArray[np.float32]]:
            size = float(inputs[0]) if fixed is None else fixed
            return self.noisy_means(inputs[len(moving) :], size, denominator, step=int(step), room=room)

        # TensorFlow's memory: NumPy's would stay with the process beside it. Not before the sums: it would lie there.
        with tf.control_dependencies(sums[:1]), tf.device("CPU:0"):
            room = tf.raw_ops.Empty(shape=[room_for(sums)], dtype=tf.float32)
        inputs = [tf.cast(step, tf.int64), room, *moving, *sums]
        means = tf.numpy_function(draw, inputs, [tf.float32] * len(sums), stateful=True)
        # Run eagerly, TensorFlow hands a single output back bare.
        means = list(means) if isinstance(means, (list, tuple)) else [means]
        for mean, total in zip(means, sums, strict=True):
            mean.set_shape(total.shape)
        return means

    def _advance(self, step: int, stream: str) -> None:
        with self._lock:
            if step <= self._last_steps[stream]:
                raise MisuseError(
                    f"Expected a step above {self._last_steps[stream]}. Received: step={step}. "
                    "The same noise would be used twice: go on counting steps, or start with another seed."
                )
            self._last_steps[stream] = step


def _checked_stddev(stddev: float) -> float:
    stddev = float(stddev)
    if not _SMALLEST_STDDEV <= stddev <= _LARGEST_STDDEV:
        raise MisuseError(
            f"Expected a standard deviation between {_SMALLEST_STDDEV} and {_LARGEST_STDDEV}. "
            f"Received: stddev={stddev}. "
            "Without noise there is no privacy: check the noise multiplier and the clip norm."
        )
    return stddev


class _Scratch:
    """Memory in which one thread works, piece after piece: fresh memory would cost as much as the arithmetic.

    Args:
        size: of the largest piece.
    """

    def __init__(self, size: int):
        pairs = -(-size // 2)
        self._words = WordBuffer(2 * pairs)
        self._floats = np.empty(4 * pairs)

    def gaussians(self, count: int, stddev: float) -> npt.NDArray[np.float64]:
        """[count] Gaussian values that nobody can foresee or draw again, until the next call."""
        pairs = -(-count // 2)
        words = self._words.fill(2 * pairs).reshape(2, pairs)
        return gaussians(words, self._floats[: 4 * pairs].reshape(4, pairs), stddev).reshape(-1)[:count]

    def add(self, group: _Group, stddev: float, denominator: float) -> None:
        """Writes the noisy means of a group."""
        step = _rounding_step(stddev)
        noise = self.gaussians(sum(len(mean) for _, mean in group), stddev / step)
        room = self._floats[-len(noise) :]  # not where `noise` is
        for total, mean in group:
            count = len(mean)
            _add(total, noise[:count], mean, room[:count], step, denominator)
            noise = noise[count:]


def room_for(sums: Sequence[Any]) -> int:
    """Values of memory that the noisy means of such sums (arrays or tensors of static shape) are written to."""
    return _LINE + sum(_lines(total.shape) for total in sums)


def _lines(shape: Sequence[int]) -> int:
    """Values of an array, with what is left of its last line."""
    return -(-math.prod(shape) // _LINE) * _LINE


def _aligned(sums: Sequence[npt.NDArray[np.float32]], room: npt.NDArray[np.float32]) -> list[npt.NDArray[np.float32]]:
    """Arrays like `sums` in `room`, which TensorFlow takes over without a copy because of where they begin."""
    begin = -room.ctypes.data % (4 * _LINE) // 4
    arrays = []
    for total in sums:
        arrays.append(room[begin : begin + total.size].reshape(total.shape))
        begin += _lines(total.shape)
    return arrays


# Flat pieces of sums, and of the means that are to be written, which draw their noise together.
_Group = list[tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]]


def _groups(sums: Sequence[npt.NDArray[np.float32]], means: Sequence[npt.NDArray[np.float32]]) -> list[_Group]:
    """Cuts and joins arrays to groups of about `_CHUNK` values, at most twice as many."""
    groups: list[_Group] = [[]]
    size = 0
    for total, mean in zip(sums, means, strict=True):
        for start in range(0, mean.size, _CHUNK):
            if size >= _CHUNK:
                groups.append([])
                size = 0
            piece = slice(start, start + _CHUNK)
            groups[-1].append((total.reshape(-1)[piece], mean.reshape(-1)[piece]))
            size += len(groups[-1][-1][1])
    return groups


def _rounding_step(stddev: float) -> float:
    """What sums and noise are rounded to multiples of: a power of two."""
    return math.ldexp(1.0, math.frexp(stddev)[1] - 1 - _STEP_BITS)


def _add(
    total: npt.NDArray[Any],
    noise: npt.NDArray[np.float64],
    mean: npt.NDArray[Any],
    room: npt.NDArray[np.float64],
    step: float,
    denominator: float,
) -> None:
    """Writes (total + step * noise) / denominator to `mean`. All are 1-D; overwrites `noise` and `room`."""
    room[:] = total
    room *= 1.0 / step
    np.rint(room, out=room)
    np.rint(noise, out=noise)
    noise += room
    np.multiply(noise, step / denominator, out=mean, casting="same_kind")


def gaussians(
    words: npt.NDArray[np.uint64], scratch: npt.NDArray[np.float64], stddev: float
) -> npt.NDArray[np.float64]:
    """Two independent Gaussian values per pair of uniform words (Box and Muller 1958).

    r cos(a) and r sin(a) with r = stddev * sqrt(-2 ln u), u from 63 bits of the first word, and the angle a from the
    second. One tangent serves both: t = tan(a / 2), cos(a) = 2 / (1 + t^2) - 1, sin(a) = 2 t / (1 + t^2).

    Args:
        words: [2, pairs]; overwritten.
        scratch: [4, pairs] to work in.
        stddev: of the values.

    Returns:
        [2, pairs], the first rows of `scratch`.
    """
    cosine, sine, radius, tangent = scratch
    words[0] >>= np.uint64(1)
    radius[:] = words[0].view(np.int64)  # signed words convert faster
    radius += 0.5
    radius *= 2.0**-63
    np.log(radius, out=radius)
    radius *= -2.0 * stddev**2
    np.sqrt(radius, out=radius)
    tangent[:] = words[1].view(np.int64)
    tangent *= math.pi / 2 * 2.0**-63
    np.tan(tangent, out=tangent)
    np.multiply(tangent, tangent, out=cosine)
    cosine += 1.0
    np.divide(radius, cosine, out=cosine)
    cosine *= 2.0
    np.multiply(cosine, tangent, out=sine)
    cosine -= radius
    return scratch[:2]
