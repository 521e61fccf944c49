"""Which records of a unit stay, unit by unit; statistical tests state their false-alarm rate."""

from __future__ import annotations

import collections
import itertools

import numpy as np
import pytest
from scipy import stats

from tfdp.entropy import system_words
from tfdp.errors import DataError
from tfdp.sampling.selection import checked_scores, keep_records, uniform_below
from tfdp.sampling.units import UnitMap

FALSE_ALARM = 1e-6
IDS = ["a", "b", "a", "c", "a", "b", "a", "c", "a", "d"]
SCORES = np.array([3.0, 1.0, 9.0, 2.0, 3.0, 7.0, 5.0, 2.0, 1.0, 4.0])


def kept(units, *args, **kwargs):
    found = keep_records(units, *args, **kwargs)
    return [found.of(unit).tolist() for unit in range(found.num_units)]


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("longest", [[2, 6], [1, 5], [3, 7], [9]]),
        ("highest_perplexity", [[2, 6], [1, 5], [3, 7], [9]]),
        ("shortest", [[0, 8], [1, 5], [3, 7], [9]]),  # of the two records of length 3 the earlier one
        ("lowest_perplexity", [[0, 8], [1, 5], [3, 7], [9]]),
    ],
)
def test_the_k_that_rank_first_stay_in_the_order_of_the_data(strategy, expected):
    assert kept(UnitMap.from_ids(IDS), 2, strategy, scores=SCORES) == expected


@pytest.mark.parametrize("strategy", ["longest", "shortest", "highest_perplexity", "lowest_perplexity"])
@pytest.mark.parametrize("most", [1, 3, 50])
def test_against_a_loop(strategy, most):
    generator = np.random.default_rng(most)
    ids = generator.integers(0, 40, 600)
    scores = generator.integers(0, 12, 600).astype(float)  # with many ties
    units = UnitMap.from_ids(ids)
    sign = -1 if strategy in ("longest", "highest_perplexity") else 1
    expected = []
    for unit in range(units.num_units):
        own = units.of(unit).tolist()
        expected.append(sorted(sorted(own, key=lambda record: (sign * scores[record], record))[:most]))
    assert kept(units, most, strategy, scores=scores) == expected


@pytest.mark.parametrize("strategy", ["longest", "shortest", "highest_perplexity", "lowest_perplexity", "random"])
def test_one_unit_never_changes_what_another_keeps(strategy):
    """Unit a gets other scores, loses its records, and goes: the others keep what they kept."""
    others = [index for index, owner in enumerate(IDS) if owner != "a"]
    bits = np.random.default_rng(5).integers(0, 2**63, len(IDS)).astype(np.uint64)

    def of_others(ids, scores, bits=bits):
        units = UnitMap.from_ids(ids)
        found = keep_records(units, 1, strategy, scores=scores, words=lambda count: bits[units.records])
        return [record for record in sorted(found.records.tolist()) if record in others]

    before = of_others(IDS, SCORES)
    assert len(before) == 3
    mine = [0, 2, 4, 6, 8]
    scores, other_bits = SCORES.copy(), bits.copy()
    scores[mine], other_bits[mine] = [100.0, -100.0, 0.0, 1e9, 5.0], [0, 2**64 - 1, 7, 2**60, 9]
    assert of_others(IDS, scores, other_bits) == before
    moved = [("e" if owner == "a" and index > 2 else owner) for index, owner in enumerate(IDS)]
    assert of_others(moved, SCORES) == before


def test_random_takes_every_subset_equally_often():
    """Chi-square over the 10 subsets of two of five records, two units at once; independent of each other."""
    units = UnitMap.from_ids(["a"] * 5 + ["b"] * 5)
    draws = [tuple(map(tuple, kept(units, 2, "random", words=system_words))) for _ in range(4000)]
    subsets = list(itertools.combinations(range(5), 2))
    joint = collections.Counter(draws)
    table = np.array([[joint[(a, tuple(5 + i for i in b))] for b in subsets] for a in subsets])
    assert table.sum() == 4000
    assert stats.chisquare(table.sum(0)).pvalue > FALSE_ALARM
    assert stats.chisquare(table.sum(1)).pvalue > FALSE_ALARM
    assert stats.chi2_contingency(table).pvalue > FALSE_ALARM


def test_equal_random_keys_are_drawn_again():
    units = UnitMap.from_ids(["a", "a", "a"])
    answers = iter([[5, 5, 1], [3, 2, 1]])
    assert kept(units, 2, "random", words=lambda count: np.array(next(answers), np.uint64)) == [[1, 2]]
    assert next(answers, None) is None


def test_records_are_taken_as_long_as_their_tokens_fit():
    """The longest first: 9 + 5 = 14 fit into 15, 9 + 5 + 3 do not; a record that is too long alone still comes."""
    units = UnitMap.from_ids(IDS)
    assert kept(units, 4, "longest", scores=SCORES, tokens=(SCORES, 15)) == [[2, 6], [1, 5], [3, 7], [9]]
    assert kept(units, 4, "longest", scores=SCORES, tokens=(SCORES, 17)) == [[0, 2, 6], [1, 5], [3, 7], [9]]
    assert kept(units, 4, "longest", scores=SCORES, tokens=(SCORES, 1)) == [[2], [5], [3], [9]]
    assert kept(units, 2, "shortest", scores=SCORES, tokens=(SCORES, 100)) == [[0, 8], [1, 5], [3, 7], [9]]


def test_without_a_strategy_nothing_may_be_left_out():
    units = UnitMap.from_ids(IDS)
    assert kept(units, 5, None) == [[0, 2, 4, 6, 8], [1, 5], [3, 7], [9]]
    with pytest.raises(DataError, match="Received: 1 of 4 units with more, at most 5"):
        kept(units, 4, None)


def test_what_is_missing_is_named():
    units = UnitMap.from_ids(IDS)
    with pytest.raises(DataError, match=r"highest_perplexity.*perplexities under the public model"):
        kept(units, 1, "highest_perplexity")
    with pytest.raises(DataError, match="random bits"):
        kept(units, 1, "random")
    with pytest.raises(DataError, match=r"one score per record, 10\. Received: shape \(9,\)"):
        checked_scores(np.ones(9), 10)
    with pytest.raises(DataError, match="1 that are no numbers"):
        checked_scores([1.0, float("nan")], 2)


class TestUniformBelow:
    def test_is_uniform(self):
        """Chi-square over all values of limits that do not divide a power of two."""
        for limit in (1, 2, 3, 7, 100):
            drawn = uniform_below(np.full(20_000, limit), system_words)
            counts = np.bincount(drawn, minlength=limit)
            assert len(counts) == limit
            assert limit == 1 or stats.chisquare(counts).pvalue > FALSE_ALARM

    @pytest.mark.parametrize("limit", [1, 2, 3, 5, 10**6, 2**62, 2**62 + 1, 2**63 - 1])
    def test_every_value_has_the_same_number_of_words(self, limit):
        """The last word that is taken ends a whole multiple of the limit; the next one is drawn again."""
        last = 2**64 - 1 - 2**64 % limit
        asked = []

        def words(count):
            asked.append(count)
            return np.array([last if len(asked) == 1 else 0] * count, np.uint64)

        assert uniform_below(np.array([limit]), words).tolist() == [limit - 1]
        assert len(asked) == 1
        if last < 2**64 - 1:
            answers = iter([[last + 1], [limit - 1]])
            again = uniform_below(np.array([limit]), lambda count: np.array(next(answers), np.uint64))
            assert again.tolist() == [limit - 1]
            assert next(answers, None) is None
