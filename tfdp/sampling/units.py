"""Which records belong to which privacy unit, and how many each unit contributes.

The map is made from the ids alone and held as two arrays, so that 500,000 records take a few megabytes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from tfdp.errors import DataError
from tfdp.sampling.structures import Indices

_QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
_HEAVIEST = 10


@dataclasses.dataclass(frozen=True, eq=False)
class UnitMap:
    """The records of every unit, one unit after the other.

    Attributes:
        records: [records] numbers of the records; those of unit u stand at `starts[u]` to `starts[u + 1]`, in the order
            of the data.
        starts: [units + 1].
        digest: SHA-256 of the ids in the order of the records. Whoever has it can test a guess about the ids, so it
            stays in memory; see `tfdp.sampling.partition` for how it is remembered.
        missing: records without an id, which are in no unit.
    """

    records: Indices = dataclasses.field(repr=False)
    starts: Indices = dataclasses.field(repr=False)
    digest: bytes = dataclasses.field(repr=False, default=b"")
    missing: int = 0

    @classmethod
    def from_ids(cls, ids: Iterable[Any], *, drop_missing: bool = False) -> UnitMap:
        """Reads one id per record: strings, bytes or whole numbers, compared as they are.

        An id is missing where it is None, NaN or blank.

        Args:
            ids: in the order of the records.
            drop_missing: leave out records without an id instead of refusing them.

        Raises:
            DataError: records without an id (with their number), no record with one, or an id of another type.
        """
        table: dict[Any, int] = {}
        codes: list[int] = []
        for value in ids.tolist() if isinstance(ids, np.ndarray) else ids:
            codes.append(-1 if _is_missing(value) else table.setdefault(value, len(table)))
        code = np.array(codes, np.int64)
        missing = int((code < 0).sum())
        if missing and not drop_missing:
            raise DataError(
                f"Expected an id of its unit in every record. Received: {missing} of {len(code)} records without one. "
                "Fill the ids in, or leave these records out (drop_missing=True, --drop-missing)."
            )
        if not table:
            raise DataError("Expected at least one record with an id. Received: none. Check the name of the id field.")
        order = np.argsort(code, kind="stable")[missing:]
        counts = np.bincount(code[order], minlength=len(table))
        digest = hashlib.sha256(code.tobytes())
        for key in table:
            text = key if isinstance(key, bytes) else str(key).encode("utf-8", "surrogatepass")
            digest.update(f"{type(key).__name__}{len(text)}:".encode() + text)
        return cls(order, np.concatenate([[0], np.cumsum(counts)]), digest.digest(), missing)

    @property
    def num_units(self) -> int:
        return len(self.starts) - 1

    @property
    def counts(self) -> Indices:
        """[units] records of each unit."""
        return np.diff(self.starts)

    @property
    def owners(self) -> Indices:
        """[records] the unit of each entry of `records`."""
        return np.repeat(np.arange(self.num_units), self.counts)

    def of(self, unit: int) -> Indices:
        """The records of one unit."""
        return self.records[self.starts[unit] : self.starts[unit + 1]]

    def only(self, units: Indices) -> UnitMap:
        """The map of some units, in the order given."""
        counts = self.counts[units]
        starts = np.concatenate([[0], np.cumsum(counts)])
        offset = np.repeat(self.starts[units] - starts[:-1], counts)
        return UnitMap(self.records[np.arange(starts[-1]) + offset], starts)

    def where(self, kept: Any) -> UnitMap:
        """The map without the entries for which `kept` [records] is false. A unit may be left without a record."""
        counts = np.add.reduceat(np.append(kept, False).astype(np.int64), self.starts[:-1])
        counts[self.counts == 0] = 0
        return UnitMap(self.records[kept], np.concatenate([[0], np.cumsum(counts)]), self.digest, self.missing)


def _is_missing(value: Any) -> bool:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return True
    if isinstance(value, str | bytes):
        return not value.strip()
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise DataError(
            f"Expected ids that are strings, bytes or whole numbers. Received: {type(value).__name__}. "
            "Write every id as a string."
        )
    return False


@dataclasses.dataclass(frozen=True)
class ContributionCounts:
    """How many records the units of a data set contribute: exact values on private data, without any id.

    Attributes:
        num_units, num_records: with an id.
        missing: records without one.
        quantiles: (share of the units, records that so many of them have at most).
        histogram: (least, most, units that have between so many records, records of these units).
        heaviest: records of the units that have most, the largest first.
        over: (k, share of the units with more than k records, share of the records beyond k).
    """

    num_units: int
    num_records: int
    missing: int
    quantiles: tuple[tuple[float, int], ...]
    histogram: tuple[tuple[int, int, int, int], ...]
    heaviest: tuple[int, ...]
    over: tuple[tuple[int, float, float], ...]


def count_contributions(units: UnitMap, caps: Iterable[int] = (1, 2, 5, 10)) -> ContributionCounts:
    """Counts the records of every unit.

    Args:
        units: the map.
        caps: values of k to look at.
    """
    counts = np.sort(units.counts)
    total = int(counts.sum())
    edges = [0, *(2**power for power in range(int(counts[-1]).bit_length() + 1))]
    histogram = []
    for low, high in itertools.pairwise(edges):
        first, last = np.searchsorted(counts, [low, high], side="right")
        histogram.append((low + 1, high, int(last - first), int(counts[first:last].sum())))
    while not histogram[-1][2]:
        histogram.pop()
    over = [(k, float((counts > k).mean()), float(np.maximum(counts - k, 0).sum() / total)) for k in caps]
    places = [math.ceil(share * len(counts)) - 1 for share in _QUANTILES]
    return ContributionCounts(
        num_units=len(counts),
        num_records=total,
        missing=units.missing,
        quantiles=tuple((share, int(counts[max(0, place)])) for share, place in zip(_QUANTILES, places, strict=True)),
        histogram=tuple(histogram),
        heaviest=tuple(counts[::-1][:_HEAVIEST].tolist()),
        over=tuple(over),
    )
