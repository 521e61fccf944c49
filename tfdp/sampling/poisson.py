"""Which units join a logical batch: independent Bernoulli draws from operating-system entropy.

The accountant assumes that every unit joins every logical batch independently with probability q. `PoissonSampler.draw`
has exactly that law, and its cost grows with q*N, not with N: it draws the gaps between sampled units instead of one
coin per unit.

| case                  | what `draw` returns                                                              |
|-----------------------|----------------------------------------------------------------------------------|
| 0 < q < 1             | a random set, its size is Binomial(N, q); it can be empty                        |
| q = 1                 | every unit, every time (full batch)                                              |
| more than the cut-off | a uniformly random subset of the draw, of exactly `truncated_batch_size` units   |

Why floating point does not bend the law. The gap before the next sampled unit is geometric, P(gap >= g) = (1-q)^g, and
is computed as floor(ln U / ln(1-q)) for a uniform U. A uniform of finitely many bits names an interval, not a number:
64 bits r stand for U in [r, r+1) / 2^64. Where the whole interval, widened by a bound on the rounding of log and of the
division, has one and the same floor, that floor is the gap of every U in it. Where it has not (r = 0 is the extreme
case), further bits are drawn and the logarithms are taken in decimal arithmetic until it has. So the gap has the exact
geometric law of the double q, down to events that no fixed number of bits could express, and no unit is
unreachable. The slow way is taken with a probability of about 1e-14 / q per gap.
"""

from __future__ import annotations

import decimal
import math
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from tfdp.entropy import Words, WordSource, words_of
from tfdp.errors import DataError, PlanError

Indices: TypeAlias = npt.NDArray[np.int64]

# Gaps are clipped to N and added up in int64: at most 2^20 of them at a time, N at most 2^40, so a sum is below 2^61.
_MAX_UNITS = 2**40
_MAX_GAPS = 2**20

# log is good to 4 units in the last place in every numpy build, log1p and the division to one: 2^-48 is 16 or more.
_RELATIVE_ROUNDING = 2.0**-48


class PoissonSampler:
    """Draws logical batches: each unit independently with probability q.

    A draw has no memory: there is no state to replay, to checkpoint or to copy into another process. The
    exception is `seed`, which exists for tests. A seeded draw is keyed by the seed and by a draw number that is
    shared by all samplers of that seed and only moves forward, so that even there a process never sees a draw
    twice; another process with the same seed does. A card must report it.

    Args:
        num_units: N, the number of privacy units; a public number.
        probability: q, 0 < q <= 1.
        truncated_batch_size: keep at most this many units of a draw, chosen uniformly at random. Only for an
            accountant that models the truncation.
        seed: tests only; a non-negative integer below 2^64.

    Raises:
        PlanError: an argument is out of range.
        DataError: there are no units, or more than 2^40.
    """

    def __init__(
        self,
        num_units: int,
        probability: float,
        *,
        truncated_batch_size: int | None = None,
        seed: int | None = None,
    ):
        if not 1 <= num_units <= _MAX_UNITS:
            raise DataError(
                f"Expected between 1 and 2**40 privacy units. Received: num_units={num_units}. "
                "Check that the records were loaded."
            )
        if not 0.0 < probability <= 1.0:
            raise PlanError(
                f"Expected a sampling probability q with 0 < q <= 1. Received: probability={probability}. "
                "q is the expected batch size divided by the number of units."
            )
        if truncated_batch_size is not None and truncated_batch_size < 1:
            raise PlanError(
                f"Expected a truncated batch size of at least 1. Received: {truncated_batch_size}. "
                "Leave it out for plain Poisson sampling."
            )
        if seed is not None and not 0 <= seed < 2**64:
            raise PlanError(
                f"Expected a seed between 0 and 2**64 - 1. Received: seed={seed}. Leave it out to be private."
            )
        self.num_units = int(num_units)
        self.probability = float(probability)
        self.truncated_batch_size = None if truncated_batch_size is None else int(truncated_batch_size)
        self.seed = seed

    def draw(self) -> Indices:
        """Draws one logical batch.

        Returns:
            The indices of the sampled units, int64 [n], increasing, without repetition; n may be 0.
        """
        words = words_of(self.seed)
        if self.probability == 1.0:
            chosen = np.arange(self.num_units, dtype=np.int64)
        else:
            chosen = _skip_sample(self.num_units, self.probability, words)
        limit = self.truncated_batch_size
        return chosen if limit is None or len(chosen) <= limit else _random_subset(chosen, limit, words)


def _skip_sample(num_units: int, q: float, words: WordSource) -> Indices:
    """The sampled positions among 0..num_units-1, each with probability q, 0 < q < 1."""
    mean = num_units * q
    # Enough gaps to pass the end in one go, nearly always; the loop goes on where they were not.
    count = min(_MAX_GAPS, int(mean + 5.0 * math.sqrt(mean)) + 8)
    parts: list[Indices] = []
    position = -1  # the last sampled unit
    while position < num_units:
        steps = _gaps(words(count), num_units, q, words) + 1
        positions = position + np.cumsum(steps, dtype=np.int64)
        parts.append(positions)
        position = int(positions[-1])
    chosen = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return chosen[: np.searchsorted(chosen, num_units)]


def _gaps(raw: Words, limit: int, q: float, words: WordSource) -> Indices:
    """min(G, limit) for one geometric G per word, P(G >= g) = (1-q)^g."""
    scale = -math.log1p(-q)
    # raw + 0.5 lies in the interval; 1/(raw+1) bounds what the interval and the conversion to float add to the log.
    uniform = (raw.astype(np.float64) + 0.5) * 2.0**-64
    exponential = -np.log(uniform)
    slack = exponential * _RELATIVE_ROUNDING + 2.0 / (raw.astype(np.float64) + 1.0) + 2.0**-51
    with np.errstate(over="ignore"):
        low = np.minimum((exponential - slack) / scale, limit)
        high = np.minimum((exponential + slack) / scale, limit)
    gaps = np.floor(high)
    unclear = np.flatnonzero(np.floor(low) != gaps)
    for index in unclear:
        gaps[index] = _exact_gap(int(raw[index]), limit, q, words)
    return gaps.astype(np.int64)


def _exact_gap(bits: int, limit: int, q: float, words: WordSource) -> int:
    """min(G, limit) for the uniform that starts with these 64 bits, drawing as many further bits as it takes."""
    length = 64
    digits = 80 + max(0, math.ceil(-math.log10(q)))
    while True:
        with decimal.localcontext(decimal.Context(prec=digits, Emin=decimal.MIN_EMIN, Emax=decimal.MAX_EMAX)):
            scale = (1 - decimal.Decimal(q)).ln()
            whole = decimal.Decimal(2**length)
            # Each operation is off by one unit in the last digit; this allows for many, and is far below the width.
            margin = decimal.Decimal(10) ** (40 - digits)
            low = max(decimal.Decimal(0), (decimal.Decimal(bits + 1) / whole).ln() / scale * (1 - margin))
            high = (decimal.Decimal(bits) / whole).ln() / scale * (1 + margin) if bits else decimal.Decimal("Infinity")
            at_least = limit if low >= limit else int(low)
            at_most = limit if high >= limit else int(high)
        if at_least == at_most:
            return at_least
        bits = (bits << 64) | int(words(1)[0])
        length += 64
        digits += 40


def _random_subset(chosen: Indices, size: int, words: WordSource) -> Indices:
    """A uniformly random subset of `size` elements, in the order of `chosen`: the ones with the smallest keys."""
    while True:
        keys = words(len(chosen))
        order = np.argpartition(keys, (size - 1, size))
        # Equal keys at the cut would favour an element by its place; by symmetry, drawing again favours none.
        if keys[order[size - 1]] != keys[order[size]]:
            return chosen[np.sort(order[:size])]
