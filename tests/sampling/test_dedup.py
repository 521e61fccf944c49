"""Deduplication against sets of tuples, and what one unit may decide about another."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdp.errors import DataError
from tfdp.sampling import dedup
from tfdp.sampling.dedup import RUN_LENGTH, deduplicate, kept_flags, words_of


def oracle(records, units, method, scope):
    """One set for everything that was kept, compared element for element."""
    kept, flags = {}, []
    for record, unit in zip(records, units, strict=True):
        words = tuple(words_of(record) if isinstance(record, str) else record)
        if method == "exact":
            grams = {record if isinstance(record, str) else words}
        elif len(words) < RUN_LENGTH:
            grams = {words} - {()}
        else:
            grams = {words[start : start + RUN_LENGTH] for start in range(len(words) - RUN_LENGTH + 1)}
        earlier = kept.setdefault(unit if scope == "unit" else None, set())
        flags.append(not grams & earlier)
        if flags[-1]:
            earlier |= grams
    return flags


# Pieces of few passages: runs recur within a record, across records, at odd places, and records lie around 20 words.
PASSAGES = st.sampled_from([[f"{letter}{number % 7}" for number in range(26)] for letter in "abc"])
PIECES = st.tuples(PASSAGES, st.integers(0, 6), st.integers(0, 26)).map(lambda t: t[0][t[1] : t[2]])
WORDS = st.lists(PIECES, max_size=3).map(lambda pieces: list(itertools.chain(*pieces)))
UNITS = st.integers(0, 2)


@pytest.mark.parametrize("scope", dedup.SCOPES)
@pytest.mark.parametrize("method", dedup.METHODS)
@settings(derandomize=True, max_examples=150, deadline=None)
@given(data=st.lists(st.tuples(WORDS, UNITS), max_size=12))
def test_agrees_with_sets_of_tuples(method, scope, data):
    units = [unit for _, unit in data]
    texts = [" ".join(words) for words, _ in data]
    tokens = [[hash_free(word) for word in words] for words, _ in data]
    for records in (texts, tokens):
        assert deduplicate(records, units, method=method, scope=scope).kept.tolist() == oracle(
            records, units, method, scope
        )


def hash_free(word: str) -> int:
    return ord(word[0]) * 10 + int(word[1])


def test_many_batches_agree_with_sets_of_tuples(monkeypatch):
    monkeypatch.setattr(dedup, "_BATCH_RECORDS", 7)
    random = np.random.default_rng(5)
    sources = [random.integers(0, 50, 60).tolist() for _ in range(12)]
    records, units = [], []
    for _ in range(400):
        source = sources[random.integers(12)]
        start, length = int(random.integers(40)), int(random.integers(5, 60))
        records.append([*random.integers(50, 10**6, 5).tolist(), *source[start : start + length]])
        units.append(int(random.integers(5)))
    for method, scope in itertools.product(dedup.METHODS, dedup.SCOPES):
        kept = deduplicate(records, units, method=method, scope=scope).kept
        assert kept.tolist() == oracle(records, units, method, scope)
        assert method == "exact" or 20 < kept.sum() < 350


def test_a_run_of_twenty_words_is_enough_and_nineteen_are_not():
    words = [f"w{number}" for number in range(40)]
    first = " ".join(words)
    for length, kept in ((19, True), (20, False)):
        other = " ".join(["x", *words[7 : 7 + length], "y", "z"])
        assert deduplicate([first, other], method="20gram", scope="all").kept.tolist() == [True, kept]


def test_a_dropped_record_drops_no_other():
    a, b, c = ([f"{letter}{n}" for n in range(20)] for letter in "abc")
    records = [" ".join(part) for part in (a, a + b, b + c)]
    assert deduplicate(records, method="20gram", scope="all").kept.tolist() == [True, False, True]


def test_a_record_that_repeats_itself_stays():
    assert deduplicate(["one two " * 40], [0], method="20gram").kept.tolist() == [True]


def test_punctuation_and_case_do_not_hide_a_run_and_exact_is_verbatim():
    text = " ".join(f"word{number}" for number in range(25))
    changed = "> " + text.replace(" ", ",\n> ").upper()
    assert deduplicate([text, changed], [0, 0], method="20gram").kept.tolist() == [True, False]
    assert deduplicate([text, changed], [0, 0], method="exact").kept.tolist() == [True, True]
    assert deduplicate([text, changed], [0, 0], method="exact", normalise=True).kept.tolist() == [True, False]
    assert deduplicate(["", "", "?!", "..."], [0] * 4, method="20gram").kept.all()


@pytest.mark.parametrize("method", dedup.METHODS)
@settings(derandomize=True, max_examples=60, deadline=None)
@given(data=st.lists(st.tuples(WORDS, UNITS), max_size=12), other=WORDS)
def test_within_units_no_other_unit_decides(method, data, other):
    """Whatever unit 0 holds, and also where it is not there, the flags of the others are the same."""
    texts, units = [" ".join(words) for words, _ in data], [unit for _, unit in data]
    changed = [" ".join(other) if unit == 0 else text for text, unit in zip(texts, units, strict=True)]
    rest = [text for text, unit in zip(texts, units, strict=True) if unit]

    def flags(records, ids):
        return [kept for kept, unit in zip(kept_flags(records, ids, method=method), ids, strict=True) if unit]

    assert flags(texts, units) == flags(changed, units) == flags(rest, [unit for unit in units if unit])


def test_across_units_another_unit_decides():
    assert deduplicate(["a", "a"], [0, 1], scope="all").kept.tolist() == [True, False]
    assert deduplicate(["b", "a"], [0, 1], scope="all").kept.tolist() == [True, True]


def test_within_units_a_collision_of_hashes_does_not_either(monkeypatch):
    """With a hash that gives everything the same number, only records of one unit fall together."""
    monkeypatch.setattr(dedup, "_mixed", lambda values: np.zeros(len(values), np.uint64))
    records = [f"{number} text" for number in range(4)]
    assert deduplicate(records, [0, 1, 0, 2], method="20gram").kept.tolist() == [True, True, False, True]
    assert deduplicate(records, method="20gram", scope="all").kept.tolist() == [True, False, False, False]


def test_a_stream_is_read_in_pieces(monkeypatch):
    monkeypatch.setattr(dedup, "_BATCH_RECORDS", 10)
    read = []

    def endless():
        for number in itertools.count():
            read.append(number)
            yield f"mail number {number}"

    for method in dedup.METHODS:
        read.clear()
        assert all(itertools.islice(kept_flags(endless(), method=method, scope="all"), 25))
        assert len(read) <= 30


def test_the_same_in_another_process():
    """Python's own hashes change with the process; these must not."""
    code = (
        "from tfdp.sampling.dedup import _RunHasher\n"
        "print([h.tolist() for h in _RunHasher().runs(['one two three', 'w ' * 30, list(range(25))])])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


def test_hashes_of_different_runs_differ():
    """10^5 runs of a few words, where a sum that ignored their places would collide at once."""
    random = np.random.default_rng(1)
    records = random.integers(0, 3, (2000, 69)).tolist()
    words = {tuple(record[start : start + 20]) for record in records for start in range(50)}
    hashes = np.unique(np.concatenate(list(dedup._RunHasher().runs(records))))
    assert len(hashes) == len(words) > 90_000


def test_what_is_kept_is_told():
    done = deduplicate(iter(["a", "b", "a"]), iter("xyx"))
    assert done.indices.tolist() == [0, 1]
    assert done.num_dropped == 1
    assert done.details() == {"deduplication_scope": "unit"}
    assert deduplicate([], []).kept.tolist() == []


def test_wrong_calls():
    with pytest.raises(DataError, match="Expected a method"):
        deduplicate(["a"], [0], method="fuzzy")
    with pytest.raises(DataError, match="unit_ids=None"):
        deduplicate(["a"])
    for ids in ([0], [0, 1, 2]):
        with pytest.raises(DataError, match="one unit id for each record"):
            deduplicate(["a", "b"], ids)
