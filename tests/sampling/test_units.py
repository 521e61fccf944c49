"""The map from units to records, and the counts of contributions, against dictionaries."""

from __future__ import annotations

import collections
import tracemalloc

import numpy as np
import pytest

from tfdp.errors import DataError
from tfdp.sampling.units import UnitMap, count_contributions


def by_hand(ids):
    found = collections.defaultdict(list)
    for index, value in enumerate(ids):
        found[value].append(index)
    return list(found.values())


def lists(units):
    return [units.of(unit).tolist() for unit in range(units.num_units)]


@pytest.mark.parametrize(
    "ids",
    [
        ["b", "a", "b", "c", "a", "b"],
        np.array([7, 3, 7, 7, 1]),
        np.array(["x", "yy", "x"]),
        ["only"],
        [b"\xff", b"\xfe", b"\xff"],
        [f"u{number % 37}" for number in range(500)],
    ],
    ids=["strings", "numbers", "numpy strings", "one", "bytes", "many"],
)
def test_every_record_is_in_the_unit_of_its_id(ids):
    units = UnitMap.from_ids(ids)
    assert lists(units) == by_hand(list(ids))
    assert units.counts.tolist() == [len(records) for records in by_hand(list(ids))]
    assert units.records[units.owners == 0].tolist() == units.of(0).tolist()


def test_records_without_an_id_are_refused_with_their_number_or_dropped():
    ids = ["a", None, "b", "", "  ", float("nan"), "a"]
    with pytest.raises(DataError, match=r"Received: 4 of 7 records without one.*--drop-missing"):
        UnitMap.from_ids(ids)
    units = UnitMap.from_ids(ids, drop_missing=True)
    assert (lists(units), units.missing) == ([[0, 6], [2]], 4)
    with pytest.raises(DataError, match="at least one record with an id"):
        UnitMap.from_ids([None, ""], drop_missing=True)


@pytest.mark.parametrize("value", [1.5, True, ["a"], {"a": 1}])
def test_ids_of_other_types(value):
    with pytest.raises(DataError, match=f"Received: {type(value).__name__}"):
        UnitMap.from_ids(["a", value])


def test_parts_of_a_map():
    units = UnitMap.from_ids(["a", "b", "a", "c", "b", "a"])
    assert lists(units.only(np.array([2, 0]))) == [[3], [0, 2, 5]]
    assert lists(units.only(np.array([], np.int64))) == []
    assert lists(units.where(np.array([True, False, True, False, False, True]))) == [[0, 5], [], [3]]
    assert lists(units.where(np.zeros(6, bool))) == [[], [], []]


def test_the_digest_is_about_who_owns_what():
    digest = UnitMap.from_ids(["a", "b", "a"]).digest
    assert UnitMap.from_ids(np.array(["a", "b", "a"])).digest == digest
    others = [["a", "b", "b"], ["a", "b", "c"], ["b", "a", "b"], ["a", "b"], [1, 2, 1]]
    assert len({digest, *(UnitMap.from_ids(ids).digest for ids in others)}) == 6


def test_counts_against_a_loop():
    generator = np.random.default_rng(3)
    ids = [f"u{int(number)}" for number in generator.zipf(1.4, 3000) % 400]
    counts = sorted(collections.Counter(ids).values())
    found = count_contributions(UnitMap.from_ids([*ids, None], drop_missing=True), caps=(1, 3, 100_000))
    assert (found.num_units, found.num_records, found.missing) == (len(counts), 3000, 1)
    assert found.heaviest == tuple(counts[::-1][:10])
    for k, share, beyond in found.over:
        assert share == pytest.approx(sum(c > k for c in counts) / len(counts))
        assert beyond == pytest.approx(sum(max(0, c - k) for c in counts) / 3000)
    for share, value in found.quantiles:
        assert sum(c <= value for c in counts) >= share * len(counts)  # so many have at most this,
        assert sum(c < value for c in counts) <= share * len(counts)  # and no smaller number will do
    assert [(low, high) for low, high, _, _ in found.histogram][:4] == [(1, 1), (2, 2), (3, 4), (5, 8)]
    for low, high, units, records in found.histogram:
        assert units == sum(low <= c <= high for c in counts)
        assert records == sum(c for c in counts if low <= c <= high)
    assert sum(units for _, _, units, _ in found.histogram) == len(counts)


def test_half_a_million_records_take_little_memory():
    """The ids themselves belong to the caller; beside them the map, its making included, stays below 64 MB."""
    ids = [f"person{number % 90_000}@example.org" for number in range(500_000)]
    tracemalloc.start()
    units = UnitMap.from_ids(ids)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (units.num_units, len(units.records)) == (90_000, 500_000)
    assert peak < 64e6
