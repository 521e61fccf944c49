"""Packing and cutting: every token once and in order, the unit of each piece, masks and weights."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdp.errors import DataError
from tfdp.sampling.packing import pack_sequences, split_documents
from tfdp.sampling.records import as_records

PAD, END = 0, 1
DOCUMENTS = st.lists(st.lists(st.integers(0, 9), max_size=12), max_size=6)  # the padding token occurs as a token, too


def real_tokens(pieces):
    return [row[mask].tolist() for row, mask in zip(pieces.tokens, pieces.real, strict=True)]


@settings(derandomize=True, deadline=None)
@given(documents=DOCUMENTS, length=st.integers(2, 7), separator=st.sampled_from([None, END]))
def test_packing_loses_and_repeats_no_token(documents, length, separator):
    stream = []
    for document in documents:
        stream += [*document, *([] if separator is None or not document else [separator])]
    packed = pack_sequences(documents, length, separator=separator, pad_value=PAD)
    rows = real_tokens(packed)
    assert list(itertools.chain(*rows)) == stream
    assert all(len(row) == length for row in rows[:-1])
    assert packed.tokens.shape == packed.real.shape == (-(-len(stream) // length), length)
    assert packed.unit_ids.tolist() == list(range(len(rows)))
    assert packed.unit_kind == "sequence"
    whole = pack_sequences(documents, length, separator=separator, drop_remainder=True)
    assert whole.real.all()
    assert whole.tokens.ravel().tolist() == stream[: len(stream) // length * length]


@settings(derandomize=True, deadline=None)
@given(documents=DOCUMENTS, length=st.integers(2, 7))
def test_splitting_keeps_documents_apart(documents, length):
    names = [f"d{number // 2}" for number in range(len(documents))]  # two documents of one name are one unit
    pieces = split_documents(documents, length, document_ids=names)
    assert pieces.unit_kind == "document"
    by_unit = {}
    for unit, row in zip(pieces.unit_ids.tolist(), real_tokens(pieces), strict=True):
        assert row
        by_unit.setdefault(unit, []).extend(row)
    expected = {}
    for name, document in zip(names, documents, strict=True):
        if document:
            expected.setdefault(name, []).extend(document)
    assert by_unit == expected
    assert len(pieces) == sum(-(-len(document) // length) for document in documents)


def test_a_document_of_another_length_moves_sequences_and_no_pieces():
    """Why the unit of packed data is not the document: one token more in the first shifts all that follow."""
    short, long = [[2, 3], [4, 5, 6], [7, 8, 9]], [[2, 3, 3], [4, 5, 6], [7, 8, 9]]
    packed = [pack_sequences(documents, 3).tokens.tolist() for documents in (short, long)]
    assert packed == [[[2, 3, 4], [5, 6, 7], [8, 9, 0]], [[2, 3, 3], [4, 5, 6], [7, 8, 9]]]
    cut = [split_documents(documents, 3).tokens.tolist() for documents in (short, long)]
    assert cut[0][1:] == cut[1][1:] == [[4, 5, 6], [7, 8, 9]]


def test_masks_and_weights_mark_what_is_there():
    pieces = split_documents([[5, 6, 7, 8, 9], [4, 0]], 4, document_ids=["a", "b"], pad_value=3)
    assert pieces.unit_ids.tolist() == ["a", "a", "b"]
    x, y, weight = pieces.records()
    assert x["token_ids"].tolist() == [[5, 6, 7], [9, 3, 3], [4, 0, 3]]
    assert x["padding_mask"].tolist() == [[True] * 3, [True, False, False], [True, True, False]]
    assert y.tolist() == [[6, 7, 8], [3, 3, 3], [0, 3, 3]]
    assert weight.tolist() == [[1, 1, 1], [0, 0, 0], [1, 0, 0]]
    assert weight.dtype == np.float32


def test_records_are_those_of_the_bare_tokens():
    """`as_records` makes the same inputs, targets and weights of the pieces without their padding."""
    pieces = split_documents([[5, 6, 7, 8, 9], [4, 2]], 4, pad_value=3)
    bare = as_records(real_tokens(pieces), sequence_length=3, pad_value=3).take(np.arange(3))
    x, y, weight = pieces.records()
    taken = as_records((x, y, weight)).take(np.arange(3))
    for part in ("y", "sample_weight"):
        np.testing.assert_array_equal(bare[part], taken[part])
    for part in ("token_ids", "padding_mask"):
        np.testing.assert_array_equal(bare["x"][part], taken["x"][part])


@pytest.mark.parametrize(
    "call",
    [
        lambda: pack_sequences([[1, 2]], 1),
        lambda: split_documents([[1, 2]], 0),
        lambda: pack_sequences([[1, 2], [0.5]], 4),
        lambda: pack_sequences([[[1], [2]]], 4),
        lambda: split_documents([[1, -2]], 4),
        lambda: split_documents([[2**31]], 4),
        lambda: split_documents(["text"], 4),
        lambda: pack_sequences([[1]], 4, separator=-1),
        lambda: pack_sequences([[1]], 4, pad_value=2**31),
        lambda: split_documents([[1]], 4, document_ids=[1, 2]),
    ],
)
def test_wrong_calls(call):
    with pytest.raises(DataError, match=r"Expected .* Received: "):
        call()


def test_nothing_gives_nothing():
    assert pack_sequences([[], []], 4, separator=END).tokens.shape == (0, 4)
    assert split_documents([], 4).tokens.shape == (0, 4)
