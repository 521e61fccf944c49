"""Extraction from models that know their documents by construction, and from ones that do not."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from tfdp.auditing import edit_distance, extract
from tfdp.errors import DataError


def _documents(lengths, seed=0):
    generator = np.random.default_rng(seed)
    return [generator.integers(1, 1000, length) for length in lengths]


class _Memory:
    """Continues what it has seen; anything else with a token of its own. Wrong on purpose at some positions."""

    def __init__(self, documents, wrong=()):
        self._known = {tuple(document[:8].tolist()): document for document in documents}
        self._wrong = set(wrong)
        self.shapes = set()

    def __call__(self, tokens, position):
        self.shapes.add(tokens.shape)
        assert not tokens[:, position:].any(), "looked ahead"
        return [self._next(row, position) for row in tokens]

    def _next(self, row, position):
        document = self._known.get(tuple(row[:8].tolist()))
        if document is None or position >= len(document):
            return 1
        return int(document[position]) + (position in self._wrong)


def test_a_model_that_memorised_gives_all_back_and_nothing_else():
    documents, control = _documents([100, 90, 60, 200]), _documents([100, 100], seed=1)
    model = _Memory(documents)
    found = extract(documents, model, batch_size=3)
    assert (found.prompts, found.exact, found.approximate) == (4, 4, 4)
    assert model.shapes == {(3, 100)}
    other = extract(control, model)
    assert (other.prompts, other.exact, other.approximate) == (2, 0, 0)
    assert found.interval()[0] > 0.39
    assert other.interval()[0] == 0.0


def test_short_documents_are_not_tried():
    documents = _documents([59, 60, 50, 10])
    assert extract(documents, _Memory(documents)).prompts == 1
    nothing = extract(documents[2:], _Memory(documents))
    assert (nothing.prompts, nothing.interval()) == (0, None)


@pytest.mark.parametrize(("mistakes", "approximate"), [(0, 1), (1, 1), (5, 1), (6, 0)])
def test_approximate_is_up_to_a_tenth(mistakes, approximate):
    documents = _documents([100])
    found = extract(documents, _Memory(documents, wrong=range(50, 50 + 8 * mistakes, 8)))
    assert (found.exact, found.approximate) == (int(mistakes == 0), approximate)


def _by_definition(one, other):
    @functools.cache
    def distance(i, j):
        if i == 0 or j == 0:
            return i + j
        return min(
            distance(i - 1, j) + 1, distance(i, j - 1) + 1, distance(i - 1, j - 1) + (one[i - 1] != other[j - 1])
        )

    return distance(len(one), len(other))


def test_edit_distance_is_that_of_the_recursion():
    generator = np.random.default_rng(4)
    for _ in range(200):
        one, other = (generator.integers(0, 3, generator.integers(0, 9)).tolist() for _ in range(2))
        assert edit_distance(one, other) == _by_definition(tuple(one), tuple(other))
    assert edit_distance("kitten", "sitting") == 3


def test_settings_that_compare_nothing_are_refused():
    with pytest.raises(DataError, match="shortest <= continuation"):
        extract([], _Memory([]), continuation=5)
