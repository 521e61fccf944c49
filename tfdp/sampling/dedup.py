"""Leaving out records that repeat an earlier one: word for word, or in any run of 20 words.

| method   | a record goes when an earlier record that stays ...                                                  |
|----------|------------------------------------------------------------------------------------------------------|
| "exact"  | is the same text (the same tokens)                                                                   |
| "20gram" | shares a run of 20 words (tokens) with it; a record of fewer is one run, which only its equal shares |

| scope  | "earlier" means                  | what it does to the claim                                              |
|--------|----------------------------------|------------------------------------------------------------------------|
| "unit" | of the same privacy unit         | a part of what a unit contributes: decided by its own records alone    |
| "all"  | of any unit                      | one unit's data decide what another's contribute: not covered          |

The order is that of the input, so the first of two stays; nothing is random, and two runs keep the same records. Words
are the runs of letters, digits and underscores of a text, in lower case, in Unicode's composed compatibility form
(NFKC): punctuation, spacing and quote marks do not hide a repetition. A record without words has no run and stays.

Runs are compared by a keyed hash of 64 bits: 20 words, each hashed by BLAKE2b with a fixed key, times odd multipliers,
one for each place, summed modulo 2^64. Two different runs have the same hash with a probability of about 2^-64 (times a
small power of two where words recur in them), and a wrong match only ever drops a record too many. With n runs there
are n^2/2 pairs: at 1.4 * 10^8 runs, of 500,000 mails of 300 words, one wrong match in all happens with a probability of
about 5 * 10^-4. Within a unit a hash meets only those of the same unit, so that no collision lets another unit decide.
Whole texts are compared by 128 bits of BLAKE2b.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import re
import unicodedata
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from tfdp.errors import DataError

Method = Literal["exact", "20gram"]
Scope = Literal["unit", "all"]
METHODS: tuple[Method, ...] = ("exact", "20gram")
SCOPES: tuple[Scope, ...] = ("unit", "all")
RUN_LENGTH = 20

_KEY = b"tfdp.sampling.dedup"
_WORD = re.compile(r"\w+")
_BATCH_RECORDS = 1024
_REMEMBERED_WORDS = 500_000
_Hashes = npt.NDArray[np.uint64]


@dataclasses.dataclass(frozen=True, eq=False)
class Deduplication:
    """Which records stay.

    Attributes:
        kept: bool [records], in the order of the input.
        method, scope: see the module.
    """

    kept: npt.NDArray[np.bool_] = dataclasses.field(repr=False)
    method: Method
    scope: Scope

    @property
    def indices(self) -> npt.NDArray[np.int64]:
        """The numbers of the records that stay, ascending."""
        return np.flatnonzero(self.kept)

    @property
    def num_dropped(self) -> int:
        """Records that go: an exact number of private data."""
        return int(len(self.kept) - self.kept.sum())

    def details(self) -> dict[str, str]:
        """What the card has to know, for `tfdp.export(details=...)`."""
        return {"deduplication_scope": self.scope}


def deduplicate(
    records: Iterable[str | Sequence[int]],
    unit_ids: Iterable[Hashable] | None = None,
    *,
    method: Method = "exact",
    scope: Scope = "unit",
    normalise: bool = False,
) -> Deduplication:
    """Decides about all records of an iterator, holding hashes of them only.

    Args:
        records: texts, or sequences of tokens.
        unit_ids: the privacy unit of each record; needed for the scope "unit".
        method, scope: see the module.
        normalise: compare whole texts by their words (see the module) too, and not character for character.

    Raises:
        DataError: an unknown method or scope, the scope "unit" without ids, or another number of ids than of records.
    """
    flags = kept_flags(records, unit_ids, method=method, scope=scope, normalise=normalise)
    return Deduplication(np.fromiter(flags, np.bool_), method, scope)


def kept_flags(
    records: Iterable[str | Sequence[int]],
    unit_ids: Iterable[Hashable] | None = None,
    *,
    method: Method = "exact",
    scope: Scope = "unit",
    normalise: bool = False,
) -> Iterator[bool]:
    """`deduplicate` as a stream: one flag for each record, a bounded number of records later."""
    if method not in METHODS or scope not in SCOPES:
        raise DataError(
            f"Expected a method of {', '.join(METHODS)} and a scope of {', '.join(SCOPES)}. "
            f"Received: method={method!r}, scope={scope!r}. Choose one of each."
        )
    if scope == "unit" and unit_ids is None:
        raise DataError(
            'Expected the unit of each record for scope="unit". Received: unit_ids=None. Pass the ids, or '
            'scope="all", which lets one unit decide what another contributes.'
        )
    ids = itertools.repeat(None) if scope == "all" or unit_ids is None else unit_ids
    pairs = _pairs(records, ids, strict=scope == "unit")
    return _exact_flags(pairs, normalise) if method == "exact" else _run_flags(pairs)


def words_of(text: str) -> list[str]:
    """The words of a text as they are compared; see the module."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).lower())


def _pairs(
    records: Iterable[str | Sequence[int]], ids: Iterable[Hashable], *, strict: bool
) -> Iterator[tuple[str | Sequence[int], Hashable]]:
    try:
        yield from zip(records, ids, strict=strict)
    except ValueError as error:
        if "zip()" not in str(error):
            raise
        raise DataError(
            "Expected one unit id for each record. Received: another number of ids. Pass both in the same order."
        ) from None


def _exact_flags(pairs: Iterable[tuple[str | Sequence[int], Hashable]], normalise: bool) -> Iterator[bool]:
    seen: dict[Hashable, set[bytes]] = {}
    for record, unit in pairs:
        digests = seen.setdefault(unit, set())
        digest = hashlib.blake2b(_content(record, normalise), digest_size=16).digest()
        yield digest not in digests
        digests.add(digest)


def _content(record: str | Sequence[int], normalise: bool) -> bytes:
    if isinstance(record, str):
        text = "\n".join(words_of(record)) if normalise else record
        return text.encode("utf-8", "surrogatepass")
    return np.asarray(record, np.int64).tobytes()


def _run_flags(pairs: Iterable[tuple[str | Sequence[int], Hashable]]) -> Iterator[bool]:
    kept: dict[Hashable, _Runs] = {}
    hasher = _RunHasher()
    stream = iter(pairs)
    while batch := list(itertools.islice(stream, _BATCH_RECORDS)):
        for hashes, (_, unit) in zip(hasher.runs([record for record, _ in batch]), batch, strict=True):
            earlier = kept.setdefault(unit, _Runs())
            repeated = earlier.contain_any_of(hashes)
            yield not repeated
            if not repeated:
                earlier.add(hashes)


class _Runs:
    """A set of hashes in sorted arrays, each more than twice the next: adding costs a logarithm of merges."""

    __slots__ = ("_sorted",)

    def __init__(self) -> None:
        self._sorted: list[_Hashes] = []

    def contain_any_of(self, hashes: _Hashes) -> bool:
        """`hashes` are sorted, which keeps the search in the cache."""
        for part in reversed(self._sorted):
            place = np.searchsorted(part, hashes)
            place[place == len(part)] = 0
            if (part[place] == hashes).any():
                return True
        return False

    def add(self, hashes: _Hashes) -> None:
        if not len(hashes):
            return
        parts = [*self._sorted, hashes]
        while len(parts) > 1 and len(parts[-2]) < 2 * len(parts[-1]):
            self._sorted = []  # nothing but the merged array stays in memory while it is sorted
            last = parts.pop()
            parts[-1] = np.concatenate([parts[-1], last])
            del last
            parts[-1].sort(kind="stable")
        self._sorted = parts


class _RunHasher:
    """Hashes of all runs of many records at once."""

    def __init__(self) -> None:
        multipliers = [int.from_bytes(_keyed(f"place {place}".encode()), "little") | 1 for place in range(RUN_LENGTH)]
        self._multipliers = np.array(multipliers, np.uint64)
        self._word = functools.lru_cache(_REMEMBERED_WORDS)(_hash_of_word)

    def runs(self, records: Sequence[str | Sequence[int]]) -> Iterator[_Hashes]:
        """For each record its distinct runs, sorted."""
        values = [self._values(record) for record in records]
        lengths = np.array([len(value) for value in values])
        flat = np.concatenate([*values, np.zeros(RUN_LENGTH - 1, np.uint64)])
        sums = np.zeros(len(flat) - RUN_LENGTH + 1, np.uint64)
        for place, multiplier in enumerate(self._multipliers):
            sums += flat[place : place + len(sums)] * multiplier
        sums = _mixed(sums)
        starts = np.cumsum(lengths) - lengths
        for value, start, length in zip(values, starts.tolist(), lengths.tolist(), strict=True):
            if length >= RUN_LENGTH:
                yield np.unique(sums[start : start + length - RUN_LENGTH + 1])
            else:
                # Its length is a word of its own: a short record is not the beginning of a long one.
                total = (value * self._multipliers[:length]).sum(dtype=np.uint64) + np.uint64(length)
                yield _mixed(np.array([total] if length else [], np.uint64))

    def _values(self, record: str | Sequence[int]) -> _Hashes:
        if isinstance(record, str):
            return np.fromiter(map(self._word, words_of(record)), np.uint64)
        return _mixed(np.asarray(record, np.int64).astype(np.uint64))


def _keyed(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=8, key=_KEY).digest()


def _hash_of_word(word: str) -> int:
    return int.from_bytes(_keyed(word.encode("utf-8", "surrogatepass")), "little")


def _mixed(values: _Hashes) -> _Hashes:
    """A one-to-one map of 64 bits that spreads every bit over all (the finalizer of SplitMix64)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(values ^ (values >> np.uint64(31)))
