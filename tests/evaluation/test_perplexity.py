from __future__ import annotations

import math

import numpy as np
import pytest
import tensorflow as tf

from tfdp.errors import DataError
from tfdp.evaluation import Perplexity, perplexity, perplexity_metric, token_bytes

_GENERATOR = np.random.default_rng(3)
_TABLE = _GENERATOR.normal(0.0, 2.0, (7, 7))
_RECORDS = [np.array(tokens) for tokens in ([0, 3, 5, 5, 1], [2, 2], [6, 1, 0], [4, 0, 0, 0])]


class _Bigram:
    """Logits of the next token by a table; refuses to be called as in training."""

    def __init__(self):
        self.traces = 0

    def __call__(self, inputs, training):
        assert training is False
        self.traces += 1
        return tf.gather(tf.constant(_TABLE, tf.float32), inputs["token_ids"])


class _Bytes:
    merges = ()
    special_tokens = ("<end>",)

    def vocabulary_size(self):
        return 7

    def get_vocabulary(self):
        return ["<end>", "a", "bc", "d", "efg", "h", "ij"]

    def token_to_id(self, token):
        return self.get_vocabulary().index(token)


def _log_likelihoods(record):
    rows = _TABLE[record[:-1]]
    return rows[np.arange(len(record) - 1), record[1:]] - np.log(np.exp(rows).sum(-1))


@pytest.mark.parametrize("batch_size", [1, 3, 4, 50])
def test_perplexity_is_that_of_a_loop_over_records(batch_size):
    model = _Bigram()
    found = perplexity(model, _RECORDS, batch_size=batch_size)
    losses = [-_log_likelihoods(record).sum() for record in _RECORDS]
    np.testing.assert_allclose(found.losses, losses, rtol=1e-5)
    assert found.tokens.tolist() == [4, 1, 2, 3]
    assert found.perplexity == pytest.approx(math.exp(sum(losses) / 10), rel=1e-5)
    assert found.num_records == 4
    assert model.traces == 1


def test_arrays_of_a_preprocessor_give_the_same_and_weights_count():
    x = np.zeros((4, 5), np.int32)
    y, weight = np.zeros((4, 5), np.int32), np.zeros((4, 5), bool)
    for row, record in enumerate(_RECORDS):
        x[row, : len(record)], y[row, : len(record) - 1] = record, record[1:]
        weight[row, : len(record) - 1] = True
    arrays = ({"token_ids": x, "padding_mask": np.ones_like(x)}, y, weight)
    found, expected = perplexity(_Bigram(), arrays), perplexity(_Bigram(), _RECORDS)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-6)
    assert found.perplexity == pytest.approx(expected.perplexity)
    weight[0, 1:] = False  # only the first token of record 0 counts
    partly = perplexity(_Bigram(), arrays)
    assert partly.losses[0] == pytest.approx(-_log_likelihoods(_RECORDS[0])[0], rel=1e-5)
    assert partly.tokens[0] == 1


def test_bits_per_byte_count_the_text_and_not_the_special_tokens():
    assert token_bytes(_Bytes()).tolist() == [0, 1, 2, 1, 3, 1, 2]
    found = perplexity(_Bigram(), _RECORDS, tokenizer=_Bytes())
    assert found.num_bytes.tolist() == [1 + 1 + 1 + 1, 2, 1, 0]
    assert found.bits_per_byte == pytest.approx(found.losses.sum() / math.log(2) / 7)
    assert token_bytes(object()) is None
    with pytest.raises(DataError, match="tokenizer"):
        _ = perplexity(_Bigram(), _RECORDS, tokenizer=object()).bits_per_byte


@pytest.mark.parametrize("records", [[], [np.array([1])], [np.array([1, 2]), np.array([], int)]])
def test_records_without_anything_to_predict_are_refused(records):
    with pytest.raises(DataError, match="at least two tokens"):
        perplexity(_Bigram(), records)


def test_interval_is_the_bootstrap_of_whole_records():
    tokens = np.array([1.0, 10.0, 3.0, 50.0, 7.0])
    losses = np.array([4.0, 21.0, 9.0, 90.0, 16.0])
    generator = np.random.default_rng(9)
    drawn = []
    for _ in range(20000):
        rows = generator.integers(0, 5, 5)
        drawn.append(math.exp(losses[rows].sum() / tokens[rows].sum()))
    expected = np.quantile(drawn, [0.05, 0.95])
    found = Perplexity(losses, tokens).interval(0.9, resamples=20000)
    np.testing.assert_allclose(found, expected, rtol=0.01)
    assert found == Perplexity(losses, tokens).interval(0.9, resamples=20000)


def test_interval_holds_the_truth_about_as_often_as_it_says():
    generator = np.random.default_rng(0)
    inside = 0
    for _ in range(400):
        tokens = generator.integers(5, 60, 200)
        losses = tokens * 2.0 + generator.normal(0.0, np.sqrt(tokens)) * 3.0
        low, high = Perplexity(losses, tokens).interval(resamples=300)
        inside += low <= math.exp(2.0) <= high
    # A percentile bootstrap of 200 records holds it 0.93 to 0.95 of the time; the bounds are five standard deviations
    # (4.8 of 400) away from that, so a false alarm has a probability below 1e-6.
    assert 348 <= inside <= 400 * 0.95 + 5 * 4.4


def test_interval_of_one_record_does_not_exist():
    assert Perplexity(np.array([3.0]), np.array([2.0])).interval() is None
    low, high = Perplexity(np.array([3.0, 3.0]), np.array([2.0, 2.0])).interval()
    assert low == high == pytest.approx(math.exp(1.5))


def test_a_model_that_has_fallen_apart_is_infinitely_surprised():
    broken = Perplexity(np.array([2000.0, 3000.0]), np.array([1.0, 1.0]))
    assert broken.perplexity == math.inf
    row = perplexity_metric(broken)
    assert row["private"] == math.inf
    assert row["interval"] is None


def test_metric_row_has_the_columns_of_the_card():
    private = Perplexity(np.array([3.0, 4.0]), np.array([2.0, 2.0]))
    public = Perplexity(np.array([5.0, 4.0]), np.array([2.0, 2.0]))
    row = perplexity_metric(private, public=public)
    assert row["private"] == pytest.approx(math.exp(7 / 4))
    assert row["public"] == pytest.approx(math.exp(9 / 4))
    assert (row["name"], row["split"], row["n"]) == ("perplexity", "held-out", 2)
    assert "non_private" not in row
    assert row["interval"] == private.interval()
