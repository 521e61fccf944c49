"""Slots of units and spans of their text against a loop; statistical tests state their false-alarm rate."""

from __future__ import annotations

import collections

import numpy as np
import pytest
from scipy import stats

from tfdp.entropy import system_words
from tfdp.errors import DataError
from tfdp.sampling.records import as_records
from tfdp.sampling.unit_records import ChunkRecords, OneSlot, Selection, UnitRecords, record_lengths
from tfdp.sampling.units import UnitMap

FALSE_ALARM = 1e-6
IDS = ["a", "b", "a", "c", "a", "b", "a"]
COLUMNS = ({"v": np.arange(10.0, 17.0)}, np.arange(7), np.ones((7, 2), np.float32))


def words():
    return system_words


def slots(most, strategy=None, scores=None, columns=COLUMNS):
    return UnitRecords(as_records(columns), UnitMap.from_ids(IDS), Selection(most, strategy, scores), words)


def test_slots_hold_the_records_of_the_unit_and_the_rest_is_empty():
    source = slots(3, "longest", np.array([1.0, 1, 2, 1, 3, 1, 4]))
    assert len(source) == 3
    assert source.template["x"]["v"].shape == (3,)
    assert source.template["sample_weight"].shape == (3, 2)
    taken = source.take(np.array([0, 1, 2]), rows=4)
    assert taken["y"].tolist() == [[2, 4, 6], [1, 5, 0], [3, 0, 0], [0, 0, 0]]
    assert taken["record_weight"].tolist() == [[1, 1, 1], [1, 1, 0], [1, 0, 0], [0, 0, 0]]
    assert taken["x"]["v"].tolist() == [[12, 14, 16], [11, 15, 0], [13, 0, 0], [0, 0, 0]]
    assert taken["sample_weight"].sum() == 12
    assert source.take(np.array([], np.int64))["record_weight"].shape == (0, 3)


def test_empty_slots_of_token_records_are_padding():
    tokens = [[5, 6, 7]] * 7
    source = UnitRecords(
        as_records(tokens, sequence_length=2, pad_value=9), UnitMap.from_ids(IDS), Selection(4, None), words
    )
    taken = source.take(np.array([2]))
    assert taken["x"]["token_ids"].tolist() == [[[5, 6], [9, 9], [9, 9], [9, 9]]]
    assert taken["sample_weight"].sum() == 2


def test_random_slots_are_chosen_anew_for_every_draw():
    """Unit a has four records: each of its 6 pairs comes up equally often; units with no more than k keep all."""
    source = slots(2, "random")
    pairs = collections.Counter()
    for _ in range(1500):
        taken = source.take(np.array([0, 1, 2]))
        assert taken["y"][1:].tolist() == [[1, 5], [3, 0]]
        pairs[tuple(taken["y"][0].tolist())] += 1
    assert len(pairs) == 6
    assert stats.chisquare(list(pairs.values())).pvalue > FALSE_ALARM


def test_a_single_slot_has_no_axis():
    source = OneSlot(slots(1, "random"))
    assert set(source.template) == {"x", "y", "sample_weight"}
    assert source.template["y"].shape == ()
    seen = {int(source.take(np.array([2, 0]))["y"][1]) for _ in range(200)}
    assert seen == {0, 2, 4, 6}  # misses one of four with a chance of 4e-25


class TestChunks:
    TEXTS = ([1, 2, 3], [50], [4, 5], [60, 61, 62, 63, 64, 65, 66, 67, 68], [6], [], [7, 8, 9, 10])

    def chunks(self, slots=2, length=3, separator=None, texts=TEXTS, most_tokens=None):
        return ChunkRecords(
            texts, UnitMap.from_ids(IDS), slots=slots, length=length, most_tokens=most_tokens, pad_value=0,
            separator=separator, words=words,
        )  # fmt: skip

    def test_a_limit_of_tokens_shortens_the_span(self):
        """Four predicted tokens: five of the text, so that unit a has six starts and unit b is taken whole."""
        source = self.chunks(most_tokens=4)
        starts = set()
        for _ in range(300):
            taken = source.take(np.array([0]))
            start = int(taken["x"]["token_ids"][0, 0, 0])
            starts.add(start)
            assert taken["y"][0].tolist() == [[start + 1, start + 2, start + 3], [start + 4, 0, 0]]
            assert taken["sample_weight"][0].sum() == 4
        assert starts == set(range(1, 7))  # each of six is missed with a chance of 2e-24

    def test_spans_cross_the_borders_of_records_and_every_token_is_predicted_once(self):
        """Unit a: 1..10, spans of 7; unit c: 60..68. Slot 2 begins where slot 1 ended."""
        source = self.chunks()
        for _ in range(100):
            taken = source.take(np.array([0, 2]))
            for unit, (first, last) in enumerate([(1, 10), (60, 68)]):
                ids, y = taken["x"]["token_ids"][unit], taken["y"][unit]
                start = int(ids[0, 0])
                assert first <= start <= last - 6
                assert ids.tolist() == [[start, start + 1, start + 2], [start + 3, start + 4, start + 5]]
                assert y.tolist() == [[start + 1, start + 2, start + 3], [start + 4, start + 5, start + 6]]
        assert taken["record_weight"].tolist() == [[1, 1], [1, 1]]

    def test_a_short_text_is_taken_whole(self):
        source = self.chunks(texts=([1, 2, 3], [50], [4, 5], [60], [], [51], []))
        taken = source.take(np.array([0, 1, 2]), rows=4)
        assert taken["x"]["token_ids"].tolist() == [
            [[1, 2, 3], [4, 5, 0]], [[50, 51, 0], [0, 0, 0]], [[60, 0, 0], [0, 0, 0]], [[0, 0, 0], [0, 0, 0]]
        ]  # fmt: skip
        assert taken["sample_weight"].tolist() == [
            [[1, 1, 1], [1, 0, 0]], [[1, 0, 0], [0, 0, 0]], [[0, 0, 0], [0, 0, 0]], [[0, 0, 0], [0, 0, 0]]
        ]  # fmt: skip
        assert taken["record_weight"].tolist() == [[1, 1], [1, 0], [0, 0], [0, 0]]

    def test_a_separator_stands_between_records_only(self):
        source = self.chunks(slots=1, length=20, separator=99)
        ids = source.take(np.array([0, 1]))["x"]["token_ids"][:, 0]
        assert ids[0].tolist()[:13] == [1, 2, 3, 99, 4, 5, 99, 6, 99, 7, 8, 9, 10]
        assert ids[1].tolist()[:3] == [50, 99, 0]

    def test_every_start_is_equally_likely_and_units_are_independent(self):
        """Unit a has 4 starts of a span of 7, unit c has 3: chi-square of each, and of the two together."""
        source = self.chunks()
        starts = np.array([source.take(np.array([0, 2]))["x"]["token_ids"][:, 0, 0] for _ in range(3000)])
        table = np.zeros((4, 3))
        np.add.at(table, (starts[:, 0] - 1, starts[:, 1] - 60), 1)
        assert stats.chisquare(table.sum(1)).pvalue > FALSE_ALARM
        assert stats.chisquare(table.sum(0)).pvalue > FALSE_ALARM
        assert stats.chi2_contingency(table).pvalue > FALSE_ALARM

    def test_only_of_tokens(self):
        with pytest.raises(DataError, match="record 3 to be a sequence of integer tokens"):
            self.chunks(texts=[*self.TEXTS[:3], [0.5], *self.TEXTS[4:]])


def test_lengths_are_read_off_the_records():
    ragged = [[1, 2, 3], [4], [5, 6]]
    assert record_lengths(as_records(ragged, sequence_length=2), ragged).tolist() == [3, 1, 2]
    array = np.ones((4, 6), int)
    assert record_lengths(as_records(array), array).tolist() == [6] * 4
    weights = np.array([[1, 1, 0], [1, 0, 0]], np.float32)
    columns = (np.zeros((2, 3)), np.zeros((2, 3)), weights)
    assert record_lengths(as_records(columns), columns).tolist() == [2, 1]
    with pytest.raises(DataError, match=r"Pass scores=\.\.\."):
        record_lengths(as_records((np.zeros((2, 3)), np.zeros(2))), (np.zeros((2, 3)), np.zeros(2)))
