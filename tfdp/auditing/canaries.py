"""Canaries: texts with random secrets, put among the training data to see what the model keeps of them.

How much it keeps is their exposure (Carlini et al. 2019, "The Secret Sharer"): where the true secret ranks, by the loss
of the model, among others that could have been drawn instead. Each canary enters by a fair coin, which also serves
`tfdp.auditing.one_run`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from tfdp.entropy import system_bytes
from tfdp.errors import DataError

PATTERN = "The access code of the account is ########."
DIGIT = "#"
_KEY_BYTES = 32


@dataclasses.dataclass(frozen=True)
class Canaries:
    """The canaries of one training. Everything follows from the key, which stays private until the audit is over.

    Attributes:
        pattern: the text; every # is a random digit.
        count: m, how many are drawn.
        repetitions: how often a canary that is let in stands in the data.
        key: random bits.
    """

    pattern: str
    count: int
    repetitions: int = 1
    key: bytes = dataclasses.field(default=b"", repr=False)

    def __post_init__(self) -> None:
        space = 10 ** self.pattern.count(DIGIT)
        if self.count < 1 or self.repetitions < 1 or len(self.key) != _KEY_BYTES:
            raise DataError(
                f"Expected at least one canary, one repetition and a key of {_KEY_BYTES} bytes. Received: "
                f"{self.count}, {self.repetitions}, {len(self.key)} bytes. Make them with Canaries.draw."
            )
        if space < 4 * self.count:
            raise DataError(
                f"Expected a pattern with at least four secrets per canary, {4 * self.count:,}. Received: {space:,}, "
                f"from {self.pattern.count(DIGIT)} signs {DIGIT}, each a random digit. Use more of them."
            )

    @classmethod
    def draw(cls, count: int, *, pattern: str = PATTERN, repetitions: int = 1, seed: int | None = None) -> Canaries:
        """New canaries, with a key from the operating system; `seed` is for tests only."""
        key = system_bytes(_KEY_BYTES) if seed is None else hashlib.sha256(f"test {seed}".encode()).digest()
        return cls(pattern, count, repetitions, key)

    @property
    def texts(self) -> tuple[str, ...]:
        """[count] different texts, the ones of the coins that fell on "out" among them."""
        return tuple(itertools.islice(self._distinct(), self.count))

    @property
    def included(self) -> np.ndarray:
        """[count] whether the coin of each canary let it in."""
        return np.array([self._random("coin", index) % 2 == 1 for index in range(self.count)])

    @property
    def owners(self) -> tuple[str, ...]:
        """[count] an id for each canary as a privacy unit of its own, which no person in the data has."""
        mark = hashlib.sha256(self.key + b"owner").hexdigest()[:12]
        return tuple(f"canary {mark} {index}" for index in range(self.count))

    def candidates(self, number: int) -> tuple[str, ...]:
        """Texts of the same pattern that were never in play: what a canary is ranked among.

        Raises:
            DataError: the pattern does not have so many.
        """
        space = 10 ** self.pattern.count(DIGIT)
        if self.count + number > space:
            raise DataError(
                f"Expected at most {space - self.count:,} candidates, as the pattern has {space:,} secrets. Received: "
                f"{number:,}. Use more signs {DIGIT}."
            )
        return tuple(itertools.islice(self._distinct(), self.count, self.count + number))

    def _distinct(self) -> Iterator[str]:
        digits = self.pattern.count(DIGIT)
        seen: set[int] = set()
        index = 0
        while True:
            secret = self._random("secret", index) % 10**digits
            index += 1
            if secret in seen:
                continue
            seen.add(secret)
            rest = iter(f"{secret:0{digits}d}")
            yield "".join(next(rest) if sign == DIGIT else sign for sign in self.pattern)

    def _random(self, what: str, index: int) -> int:
        # A digest rather than a generator of NumPy: the same on every version, for as long as the run is kept.
        return int.from_bytes(hashlib.sha256(self.key + f"{what} {index}".encode()).digest(), "big")


def exposure(scores: Any, candidate_scores: Any) -> np.ndarray:
    """[canaries] log2 |R| - log2 rank, in bits: 0 for the last of all, log2 |R| for the first.

    Args:
        scores: [canaries] of the true secrets; higher says "known to the model".
        candidate_scores: [candidates] of other secrets. R is these and the canary itself; ties rank before it, so that
            a model that knows nothing exposes nothing.
    """
    ordered = np.sort(np.asarray(candidate_scores, np.float64))
    rank = 1 + len(ordered) - np.searchsorted(ordered, np.asarray(scores, np.float64), side="left")
    return math.log2(len(ordered) + 1) - np.log2(rank)


def exposure_by_chance(candidates: int) -> float:
    """The mean exposure of secrets that the model does not know: every rank is as likely. About log2(e) = 1.44."""
    ranks = np.arange(1, candidates + 2)
    return float(math.log2(candidates + 1) - np.log2(ranks).mean())
