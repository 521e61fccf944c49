from __future__ import annotations

import numpy as np
import pytest

from tfdp.errors import DataError
from tfdp.sampling.records import as_records
from tfdp.sampling.structures import Leaf

SECRET = "a-secret-value"


class Source:
    """A random-access source, as tfds data sources are."""

    def __init__(self, items):
        self.items = items
        self.reads = []

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        self.reads.append(index)
        return self.items[index]


def indices(*values):
    return np.array(values, np.int64)


class TestColumns:
    def test_tuple_of_columns_with_a_dict(self):
        x = {"a": np.arange(8).reshape(4, 2), "b": (np.arange(4.0), np.arange(12).reshape(4, 3))}
        y, weight = np.arange(4, dtype=np.int16), np.ones((4, 5), np.float32)
        records = as_records((x, y, weight))
        assert len(records) == 4
        assert records.template["x"]["a"] == Leaf("x/a", (2,), np.dtype(np.int64))
        assert records.template["x"]["b"][0] == Leaf("x/b/0", (), np.dtype(np.float32))  # float64, as in fit
        assert records.template["y"] == Leaf("y", (), np.dtype(np.int16))
        taken = records.take(indices(1, 3), rows=5)
        np.testing.assert_array_equal(taken["x"]["a"], [[2, 3], [6, 7], [0, 0], [0, 0], [0, 0]])
        np.testing.assert_array_equal(taken["x"]["b"][0], [1, 3, 0, 0, 0])
        assert taken["x"]["b"][0].dtype == np.float32
        np.testing.assert_array_equal(taken["y"], [1, 3, 0, 0, 0])
        np.testing.assert_array_equal(taken["sample_weight"].sum(1), [5, 5, 0, 0, 0])

    def test_absent_parts_are_left_out(self):
        x, w = np.zeros((3, 2), np.float32), np.ones(3, np.float32)
        assert set(as_records((x,)).template) == {"x"}
        assert set(as_records((x, None, w)).template) == {"x", "sample_weight"}
        assert set(as_records({"a": x}).template) == {"x"}
        assert set(as_records(x).template) == {"x"}

    def test_a_list_inside_a_tuple_is_an_array(self):
        records = as_records(([[1, 2], [3, 4], [5, 6]], [0, 1, 0]))
        assert records.template["x"].shape == (2,)
        assert records.take(indices(2))["x"].tolist() == [[5, 6]]

    def test_no_record_and_every_record(self):
        records = as_records((np.arange(6).reshape(3, 2), np.arange(3)))
        assert records.take(indices())["x"].shape == (0, 2)
        assert records.take(indices(0, 1, 2))["y"].tolist() == [0, 1, 2]

    def test_memory_mapped(self, tmp_path):
        array = np.lib.format.open_memmap(tmp_path / "x.npy", mode="w+", dtype=np.float64, shape=(100, 3))
        array[:] = np.arange(300).reshape(100, 3)
        assert as_records((array,)).take(indices(99))["x"].tolist() == [[297, 298, 299]]


ITEMS = tuple(({"ids": [i, i + 1], "mask": np.array([True, False])}, i % 2, 1.0) for i in range(6))
RAGGED = ([1, 2, 3, 4, 5, 6], [7, 8], [9], [], [10, 11, 12, 13])


class TestItems:
    @pytest.mark.parametrize("make", [list, Source])
    def test_list_and_source_agree(self, make):
        records = as_records(make(ITEMS))
        taken = records.take(indices(0, 5), rows=3)
        assert taken["x"]["ids"].tolist() == [[0, 1], [5, 6], [0, 0]]
        assert taken["x"]["mask"].dtype == np.bool_
        assert taken["y"].tolist() == [0, 1, 0]
        assert taken["sample_weight"].dtype == np.float32
        assert taken["sample_weight"].tolist() == [1, 1, 0]

    def test_a_source_is_read_only_where_it_is_drawn(self):
        source = Source(ITEMS)
        records = as_records(source)
        assert source.reads == [0]
        records.take(indices(2, 4))
        assert source.reads == [0, 2, 4]

    def test_a_list_of_dicts_is_records_not_columns(self):
        records = as_records([{"a": np.zeros(3)}, {"a": np.ones(3)}])
        assert len(records) == 2
        assert records.template["x"]["a"].shape == (3,)

    @pytest.mark.parametrize(
        "bad",
        [
            ({"ids": [1, 2, 3], "mask": np.array([True, False])}, 0, 1.0),
            ({"ids": [1.5, 2.0], "mask": np.array([True, False])}, 0, 1.0),
            ({"ids": [1, 2]}, 0, 1.0),
            ({"ids": [1, 2], "mask": np.array([True, False])}, 0),
            ([1, 2], 0, 1.0),
            ({"ids": [SECRET, "b"], "mask": np.array([True, False])}, 0, 1.0),
            ({"ids": [[1], [2, 3]], "mask": np.array([True, False])}, 0, 1.0),
            "text",
        ],
    )
    def test_a_record_that_is_different_is_named_by_its_index_alone(self, bad):
        items = [*ITEMS[:3], bad, *ITEMS[3:]]
        with pytest.raises(DataError, match="record 3") as at_once:
            as_records(items)
        lazy = as_records(Source(items))
        lazy.take(indices(0, 1, 2, 4))
        with pytest.raises(DataError, match="record 3") as at_the_draw:
            lazy.take(indices(2, 3))
        for error in (at_once, at_the_draw):
            assert SECRET not in str(error.value)
            assert error.value.__suppress_context__ or error.value.__context__ is None

    def test_a_failing_source_does_not_leak_through_its_own_message(self):
        class Failing(Source):
            def __getitem__(self, index):
                if index == 2:
                    raise ValueError(SECRET)
                return super().__getitem__(index)

        with pytest.raises(DataError, match=r"record 2.*ValueError") as caught:
            as_records(Failing(ITEMS)).take(indices(2))
        assert SECRET not in str(caught.value)
        assert caught.value.__suppress_context__


class TestTokens:
    def expected(self, rows, length, pad):
        """The slow obvious way."""
        ids, mask, y, weight = [], [], [], []
        for row in rows:
            row = row[: length + 1]
            full = row + [pad] * (length + 1 - len(row))
            real = [True] * len(row) + [False] * (length + 1 - len(row))
            ids.append(full[:-1])
            mask.append(real[:-1])
            y.append(full[1:])
            weight.append([float(r) for r in real[1:]])
        return ids, mask, y, weight

    @pytest.mark.parametrize("length", [1, 3, 5, 9])
    @pytest.mark.parametrize(
        "make",
        [list, Source, lambda rows: [np.array(r, np.uint16) for r in rows], lambda rows: np.array(rows, object)],
    )
    def test_ragged_sequences(self, make, length):
        records = as_records(make(RAGGED), sequence_length=length, pad_value=99)
        assert len(records) == 5
        taken = records.take(indices(0, 1, 2, 3, 4), rows=6)
        ids, mask, y, weight = self.expected([*RAGGED, []], length, 99)
        assert taken["x"]["token_ids"].tolist() == ids
        assert taken["x"]["padding_mask"].tolist() == mask
        assert taken["y"].tolist() == y
        assert taken["sample_weight"].tolist() == weight
        assert taken["x"]["token_ids"].dtype == taken["y"].dtype == np.int32
        assert records.template["y"].shape == (length,)

    @pytest.mark.parametrize("make", [np.array, list, lambda rows: Source(list(rows))])
    @pytest.mark.parametrize("length", [None, 2, 4, 7])
    def test_equal_sequences(self, make, length):
        rows = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
        taken = as_records(make(rows), sequence_length=length).take(indices(1, 2))
        ids, mask, y, weight = self.expected(rows[1:], length or 3, 0)
        assert taken["x"]["token_ids"].tolist() == ids
        assert taken["x"]["padding_mask"].tolist() == mask
        assert (taken["y"].tolist(), taken["sample_weight"].tolist()) == (y, weight)

    def test_nothing_but_empty_sequences(self):
        taken = as_records([[], []], sequence_length=2, pad_value=1).take(indices(1))
        assert taken["x"]["token_ids"].tolist() == [[1, 1]]
        assert taken["sample_weight"].sum() == 0

    def test_different_lengths_need_a_public_length(self):
        with pytest.raises(DataError, match="Pass sequence_length"):
            as_records(list(RAGGED))
        lazy = as_records(Source([[1, 2, 3], [4, 5, 6], [7, 8]]))
        assert lazy.take(indices(1))["y"].tolist() == [[5, 6]]
        with pytest.raises(DataError, match=r"record 2 .*Pass sequence_length"):
            lazy.take(indices(2))

    @pytest.mark.parametrize("token", [2**31, -1])
    def test_tokens_that_do_not_fit(self, token):
        rows = [[1, 2], [3, token]]
        for records in (np.array(rows), Source(rows)):
            with pytest.raises(DataError, match="record 1"):
                as_records(records).take(indices(0, 1))
        with pytest.raises(DataError, match="record 1"):
            as_records(rows)

    def test_agrees_with_kerashub_on_the_meaning_of_the_parts(self):
        """Tokens [t0..t4], length 3: x = t0 t1 t2, y = t1 t2 t3, all weights one."""
        taken = as_records([[10, 11, 12, 13, 14], [20, 21]], sequence_length=3).take(indices(0, 1))
        assert taken["x"]["token_ids"].tolist() == [[10, 11, 12], [20, 21, 0]]
        assert taken["x"]["padding_mask"].tolist() == [[True, True, True], [True, True, False]]
        assert taken["y"].tolist() == [[11, 12, 13], [21, 0, 0]]
        assert taken["sample_weight"].tolist() == [[1, 1, 1], [1, 0, 0]]


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ((np.zeros((3, 2)), np.zeros(4)), "x has 3, y has 4"),
        (([np.zeros((4, 2)), np.zeros((4, 2))], np.zeros(4)), "dict or a tuple, not in a list"),
        ((np.zeros((0, 2)), np.zeros(0)), "at least one record"),
        (np.zeros((0, 5), int), "at least one record"),
        ([], "at least one record"),
        (Source([]), "at least one record"),
        ({}, "at least one array in x"),
        (({}, np.zeros(3)), "at least one array in x"),
        ((), "tuple of 0"),
        ((None, np.zeros(3)), "first of them None"),
        ((1, 2, 3, 4), "tuple of 4"),
        ((np.zeros((3, 2)), 5), "Received: a scalar"),
        ((np.array([SECRET] * 3), np.zeros(3)), "Turn text into token numbers"),
        ((np.array([SECRET, None], object), np.zeros(2)), "Turn text into token numbers"),
        ([SECRET, "b"], "Turn text into token numbers"),
        ([{"text": SECRET}], "Turn text into token numbers"),
        (([[1, 2], [3]], [0, 1]), "does not form an array"),
        (np.zeros((3, 2), complex), "array of numbers"),
        (SECRET, "Received: str"),
        (iter([1, 2]), "cannot be sampled"),
        ({1, 2}, "Received: set"),
        (None, "Received: NoneType"),
    ],
)
def test_refused(records, message):
    with pytest.raises(DataError, match=r"Expected .* Received: ") as caught:
        as_records(records)
    assert message in str(caught.value)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "records"),
    [
        ({"sequence_length": 0}, [[1, 2]]),
        ({"pad_value": -1}, [[1, 2]]),
        ({"sequence_length": 4}, (np.zeros((3, 2)), np.zeros(3))),
        ({"sequence_length": 4}, [({"a": [1.0]}, 1)]),
        ({}, [[1], [2]]),
        ({}, np.zeros((3, 1), int)),
    ],
)
def test_options_that_cannot_hold(options, records):
    with pytest.raises(DataError, match=r"Expected .* Received: "):
        as_records(records, **options)
