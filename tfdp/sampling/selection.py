"""Which of its records a unit contributes: at most k, chosen by the unit's own records alone.

| strategy            | keeps                                                                    |
|---------------------|--------------------------------------------------------------------------|
| random              | any k, every subset alike; the key of each record is 64 fresh random bits |
| longest, shortest   | the k with most or fewest tokens                                         |
| highest_perplexity, | the k that the public model finds least or most likely; the scores come  |
| lowest_perplexity   | from the caller                                                          |

Of records that rank alike the earlier ones stay. What another unit holds never matters: it changes neither ranks nor
random bits, and that is what the claim needs (Chua et al. 2024, section 4).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tfdp.entropy import WordSource
from tfdp.errors import DataError
from tfdp.sampling.structures import Array, Indices
from tfdp.sampling.units import UnitMap

RANDOM = ("random",)
BY_LENGTH = ("longest", "shortest")
BY_PERPLEXITY = ("highest_perplexity", "lowest_perplexity")
RANDOM_CHUNK = "random_chunk"
_DESCENDING = ("longest", "highest_perplexity")


def checked_scores(scores: Any, num_records: int) -> Array:
    """One finite number per record, as float64.

    Raises:
        DataError: another number of them, or some that cannot be compared.
    """
    array = np.asarray(scores, np.float64)
    if array.shape != (num_records,):
        raise DataError(
            f"Expected one score per record, {num_records}. Received: shape {array.shape}. "
            "A score is a length or a perplexity, in the order of the records."
        )
    if np.isnan(array).any():
        raise DataError(
            f"Expected scores that can be compared. Received: {int(np.isnan(array).sum())} that are no numbers. "
            "A perplexity that overflows may be infinite."
        )
    return array


def keep_records(
    units: UnitMap,
    most: int,
    strategy: str | None,
    *,
    scores: Array | None = None,
    words: WordSource | None = None,
    tokens: tuple[Array, int] | None = None,
) -> UnitMap:
    """At most `most` records of every unit.

    Args:
        units: the map.
        most: k.
        strategy: see the table above; None where no unit may have more than k records.
        scores: [all records] what the strategy ranks by; not for "random".
        words: source of random bits for "random".
        tokens: ([all records] number of tokens, most tokens of a unit): records are taken in the order of the strategy
            as long as they fit; the first one always is.

    Raises:
        DataError: units with more than k records and no strategy, or a strategy without its scores.
    """
    counts = units.counts
    if strategy is None:
        refuse_more_than(most, units)
        order = np.arange(len(units.records))
    elif strategy in RANDOM:
        if words is None:
            raise DataError("Expected a source of random bits for the selection random. Received: none.")
        order = _random_order(units, words)
    else:
        if scores is None:
            what = "perplexities under the public model" if strategy in BY_PERPLEXITY else "lengths"
            raise DataError(
                f"Expected one score per record for the selection {strategy}. Received: none. Pass scores=..., {what}."
            )
        keys = scores[units.records]
        # Stable: of equal ones the earlier stays. Units are one after the other already.
        order = np.lexsort((-keys if strategy in _DESCENDING else keys, units.owners))
    rank = np.arange(len(order)) - np.repeat(units.starts[:-1], counts)
    taken = rank < most
    if tokens is not None:
        taken &= _within(tokens[0][units.records[order]], units, rank, tokens[1])
    kept = np.zeros(len(order), np.bool_)
    kept[order[taken]] = True
    return units.where(kept)


def refuse_more_than(most: int, units: UnitMap) -> None:
    """Raises DataError where a unit has more than `most` records, and nothing says which of them stay."""
    over = int((units.counts > most).sum())
    if over:
        raise DataError(
            f"Expected at most {most} records of a privacy unit (max_records_per_unit). Received: {over} of "
            f"{units.num_units} units with more, at most {int(units.counts.max())}. Merge the records of a unit, or "
            "say which of them stay in claim.privacy_unit.selection: random, longest, shortest, highest_perplexity or "
            "lowest_perplexity."
        )


def _random_order(units: UnitMap, words: WordSource) -> Indices:
    """A uniformly random order of the records of every unit."""
    owners = units.owners
    while True:
        keys = words(len(owners))
        order = np.lexsort((keys, owners))
        same = (keys[order[1:]] == keys[order[:-1]]) & (owners[order[1:]] == owners[order[:-1]])
        # Equal keys would favour a record by its place; by symmetry, drawing again favours none.
        if not same.any():
            return order


def _within(tokens: Array, units: UnitMap, rank: Indices, most: int) -> Array:
    total = np.cumsum(tokens)
    before = np.concatenate([[0], total])[units.starts[:-1]]
    return np.asarray((total - np.repeat(before, units.counts) <= most) | (rank == 0))


def uniform_below(limits: Indices, words: WordSource) -> Indices:
    """One integer in 0..limit-1 per limit, each value exactly as likely as any other.

    A 64-bit word is divided with remainder; words beyond the last whole multiple of the limit are drawn again.
    """
    limit = limits.astype(np.uint64)
    largest = np.uint64(2**64 - 1)
    last = largest - (largest % limit + np.uint64(1)) % limit  # the last word of a whole multiple
    drawn = words(len(limit)).copy()
    while (beyond := np.flatnonzero(drawn > last)).size:
        drawn[beyond] = words(len(beyond))
    return (drawn % limit).astype(np.int64)
