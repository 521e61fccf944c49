from __future__ import annotations

import json
import math

import keras
import numpy as np
import pytest
from scipy import stats

from tfdp.errors import DataError
from tfdp.evaluation import GroupReport, GroupRow, Perplexity, metric_by_group, perplexity_by_group

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")


def accuracy(**options):
    return keras.metrics.BinaryAccuracy(**options)


def area_under_curve(values, labels):
    pairs = values[labels == 1][:, None] - values[labels == 0][None]
    return ((pairs > 0) + 0.5 * (pairs == 0)).mean()


def test_every_value_is_that_of_its_records():
    """Three models, a weight per record, groups that come mixed; against the mean of each group by hand."""
    generator = np.random.default_rng(0)
    y, weight = generator.integers(0, 2, 300), generator.uniform(0.1, 3.0, 300)
    groups = generator.choice(["north", "south", "west"], 300, p=[0.7, 0.2, 0.1])
    predictions = {name: generator.uniform(size=300) for name in ("public", "private", "non_private")}
    report = metric_by_group(
        accuracy(), y, predictions, groups, field="region", min_group_size=5, sample_weight=weight, resamples=20
    )
    right = {name: (values > 0.5) == y for name, values in predictions.items()}
    assert [row.name for row in report.rows] == ["north", "south", "west"]
    for row in (report.whole, *report.rows):
        of = groups == row.name if row is not report.whole else np.full(300, True)
        expected = {name: np.average(each[of], weights=weight[of]) for name, each in right.items()}
        assert row.n == of.sum()
        assert row.value == pytest.approx(expected["private"], rel=1e-5)
        assert row.non_private == pytest.approx(expected["non_private"], rel=1e-5)
        assert row.public == pytest.approx(expected["public"], rel=1e-5)
        assert row.cost == pytest.approx(expected["private"] - expected["non_private"], abs=1e-5)
        assert report.gap(row) == pytest.approx(row.value - report.whole.value)


def test_interval_is_the_bootstrap_of_the_group():
    """Against 6,000 resamples of numpy; the area under the curve is not a mean of anything per record."""
    generator = np.random.default_rng(1)
    y, groups = generator.integers(0, 2, 200), np.repeat(["a", "b"], [150, 50])
    values = stats.norm.cdf(generator.normal(y * 1.0, 1.0))
    metric = keras.metrics.AUC(num_thresholds=500)
    report = metric_by_group(
        metric, y, {"private": values}, groups, field="g", min_group_size=2, resamples=600, confidence=0.9
    )
    for row, of in ((report.rows[1], groups == "b"), (report.whole, groups != "")):
        own, labels = values[of], y[of]
        drawn = [area_under_curve(own[i], labels[i]) for i in generator.integers(0, len(own), (6_000, len(own)))]
        expected = np.nanquantile(drawn, [0.05, 0.95])
        spread = np.nanstd(drawn)
        assert row.value == pytest.approx(area_under_curve(own, labels), abs=2e-3)
        # An end of 600 resamples has a standard error of 0.09 spreads; four of them.
        np.testing.assert_allclose(row.interval, expected, atol=0.36 * spread + 2e-3)


def test_people_are_drawn_again_and_not_their_records():
    """All records of a person are alike: an interval over records would be five times too narrow."""
    generator = np.random.default_rng(2)
    people = np.repeat(np.arange(40), 25)
    generator.shuffle(people)
    rate = generator.uniform(1.0, 3.0, 40)
    losses, tokens = rate[people] * 10.0, np.full(1000, 10.0)
    measured = {"private": Perplexity(losses, tokens)}
    groups = np.where(people < 30, "many", "few")
    options = {"field": "g", "min_group_size": 5, "resamples": 8000}
    report = perplexity_by_group(measured, groups, units=people, **options)
    assert [row.n for row in (report.whole, *report.rows)] == [40, 10, 30]
    for row, of in zip(report.rows, (np.arange(30, 40), np.arange(30)), strict=True):
        drawn = np.exp(rate[generator.choice(of, (40_000, len(of)))].mean(1))
        np.testing.assert_allclose(row.interval, np.quantile(drawn, [0.025, 0.975]), rtol=0.03)
        assert row.value == pytest.approx(math.exp(rate[of].mean()))
    narrow = perplexity_by_group(measured, groups, **options)
    width, wrong = (np.diff(each.whole.interval)[0] for each in (report, narrow))
    assert 3.5 < width / wrong < 7


def test_unequal_people_weigh_as_their_tokens_do():
    losses, tokens = np.array([2.0, 30.0, 4.0]), np.array([1.0, 10.0, 2.0])
    measured = {"private": Perplexity(losses, tokens), "public": Perplexity(losses * 2, tokens)}
    report = perplexity_by_group(
        measured, ["a", "a", "b"], units=["x", "x", "y"], field="g", min_group_size=1, resamples=50
    )
    assert report.whole.value == pytest.approx(math.exp(36 / 13))
    assert report.rows[0].value == pytest.approx(math.exp(32 / 11))
    assert report.rows[0].public == pytest.approx(math.exp(64 / 11))
    assert report.rows[0].n == 1
    assert report.rows[0].interval is None  # one person


def test_small_groups_are_suppressed_by_their_people():
    """Thirty records of four people are four; the whole still holds them; nothing of them is left to be read."""
    groups = ["common"] * 60 + ["rare"] * 30 + [None] * 10
    units = [*range(60), *(100 + i % 4 for i in range(30)), *range(200, 210)]
    y = np.array([1] * 60 + [0] * 30 + [1] * 10)
    prediction = np.full(100, 0.9)
    report = metric_by_group(
        accuracy(),
        y,
        {"private": prediction, "non_private": 1 - prediction},
        groups,
        field="g",
        min_group_size=5,
        units=units,
        resamples=20,
    )
    common, nobody, rare = report.rows
    assert (common.n, nobody.name, nobody.n) == (60, "not stated", 10)
    assert rare == GroupRow("rare", None, suppressed=True)
    assert report.gap(rare) is rare.cost is None
    assert report.whole.value == pytest.approx(0.7)
    assert report.whole.n == 74
    assert report.evaluation()["groups"][2] == {"name": "rare"}
    line = str(report).splitlines()[-1]
    assert line.split() == ["rare", "<5", "suppressed"]
    at_four = metric_by_group(
        accuracy(),
        y,
        {"private": prediction},
        groups,
        field="g",
        min_group_size=4,
        units=units,
        resamples=20,
    )
    assert at_four.rows[2].n == 4
    assert at_four.rows[2].value == pytest.approx(0.0)


@pytest.mark.parametrize(("better", "worst"), [("higher", "low"), ("lower", "high")])
def test_the_sign_of_a_gap_and_of_a_disadvantage(better, worst):
    rows = (GroupRow("high", 50, 0.9), GroupRow("low", 50, 0.6), GroupRow("unknown", 50, None))
    report = GroupReport("g", "m", better, GroupRow("all", 150, 0.8), rows, 10)
    assert report.gap(rows[0]) == pytest.approx(0.1)
    assert report.gap(rows[1]) == pytest.approx(-0.2)
    assert report.disadvantage(rows[0]) == pytest.approx(-0.1 if better == "higher" else 0.1)
    assert report.disadvantage(rows[1]) == pytest.approx(0.2 if better == "higher" else -0.2)
    assert report.worst.name == worst
    assert report.disadvantage(rows[2]) is None


def test_the_direction_is_known_or_asked_for():
    y, p, groups = np.array([0, 1]), np.array([0.2, 0.9]), ["a", "b"]
    options = {"field": "g", "min_group_size": 1, "resamples": 5}
    loss = metric_by_group(keras.metrics.BinaryCrossentropy(), y, {"private": p}, groups, **options)
    assert (loss.metric, loss.better, loss.worst.name) == ("binary_crossentropy", "lower", "a")
    assert [row.value for row in loss.rows] == pytest.approx([-math.log(0.8), -math.log(0.9)], rel=1e-5)
    assert metric_by_group(accuracy(), y, {"private": p}, groups, **options).better == "higher"
    odd = accuracy(name="share_of_hits")
    with pytest.raises(DataError, match='Pass better="higher" or better="lower"'):
        metric_by_group(odd, y, {"private": p}, groups, **options)
    assert metric_by_group(odd, y, {"private": p}, groups, better="higher", **options).better == "higher"


def test_auc_of_one_class_is_not_defined_and_not_the_worst():
    y = np.array([0, 1] * 20 + [0] * 20)
    p = np.linspace(0.1, 0.9, 60)
    report = metric_by_group(
        keras.metrics.AUC(), y, {"private": p}, ["both"] * 40 + ["one"] * 20, field="g", min_group_size=5, resamples=50
    )
    assert report.rows[1].value is report.rows[1].interval is report.gap(report.rows[1]) is None
    assert report.worst.name == "both"
    assert report.rows[1].n == 20


class _MacroRecall(keras.metrics.Metric):
    """Mean over three classes of the share that was found: not defined where a class is absent."""

    def __init__(self):
        super().__init__(name="macro_recall")
        self.hits = self.add_weight(shape=(3,), initializer="zeros", name="hits")
        self.counts = self.add_weight(shape=(3,), initializer="zeros", name="counts")

    def update_state(self, y_true, y_pred, sample_weight=None):
        labels = keras.ops.one_hot(keras.ops.cast(y_true[:, 0], "int32"), 3)
        found = keras.ops.cast(y_true == y_pred, "float32")
        self.hits.assign_add(keras.ops.sum(labels * found, 0))
        self.counts.assign_add(keras.ops.sum(labels, 0))

    def result(self):
        return keras.ops.mean(self.hits / self.counts)


def test_resamples_where_a_metric_is_not_defined():
    """All three of forty are missing from 1 resample of 22, which is left out; one of two singles from 6 of 10."""
    y = np.array([1] * 3 + [0] * 37)
    p = {"private": np.linspace(0.9, 0.1, 40)}
    options = {"field": "g", "min_group_size": 5, "resamples": 200}
    report = metric_by_group(keras.metrics.AUC(), y, p, ["a"] * 40, **options)
    assert report.rows[0].interval is not None
    assert 0.8 < report.rows[0].interval[0] <= report.rows[0].interval[1] <= 1
    classes = np.array([0] * 28 + [1, 2] + [0, 1, 2] * 10)
    names = ["rare"] * 30 + ["even"] * 30
    wrong = np.arange(60) % 4 == 2
    predictions = {"private": np.where(wrong, (classes + 1) % 3, classes)}
    even, rare = metric_by_group(_MacroRecall(), classes, predictions, names, **options).rows
    assert rare.value == pytest.approx((21 / 28 + 2) / 3)
    assert rare.interval is None
    assert even.interval[0] < even.value < even.interval[1]


def test_one_more_group_leaves_the_intervals_of_the_others():
    generator = np.random.default_rng(8)
    losses, tokens = generator.uniform(1.0, 9.0, 60), np.full(60, 3.0)
    names = np.repeat(["early", "middle", "late"], 20)
    options = {"field": "g", "min_group_size": 5, "resamples": 30}
    every = perplexity_by_group({"private": Perplexity(losses, tokens)}, names, **options)
    fewer = perplexity_by_group({"private": Perplexity(losses[20:], tokens[20:])}, names[20:], **options)
    assert [row.name for row in every.rows] == ["early", "late", "middle"]
    assert every.rows[1:] == fewer.rows


def test_the_table_that_it_is_for():
    """AUC 0.81 to 0.78 overall and 0.74 to 0.66 in the small group: normal scores whose areas are known."""
    generator = np.random.default_rng(5)
    y, small = generator.integers(0, 2, 20_000), np.arange(20_000) < 2000
    areas = {"non_private": (0.818, 0.74), "private": (0.793, 0.66)}
    predictions = {
        name: stats.norm.cdf(
            generator.normal(y * math.sqrt(2) * stats.norm.ppf(np.where(small, of_small, of_large)), 1.0)
        )
        for name, (of_large, of_small) in areas.items()
    }
    report = metric_by_group(
        keras.metrics.AUC(name="auc"),
        y,
        predictions,
        np.where(small, "small", "large"),
        field="group",
        min_group_size=20,
        resamples=10,
    )
    # The standard error of an area over 1,000 pairs of classes is 0.012; four of them.
    assert report.worst.name == "small"
    assert report.worst.non_private == pytest.approx(0.74, abs=0.05)
    assert report.worst.value == pytest.approx(0.66, abs=0.05)
    assert report.whole.non_private == pytest.approx(0.81, abs=0.012)
    assert report.whole.value == pytest.approx(0.78, abs=0.012)
    assert report.worst.cost < report.whole.cost < 0


def test_what_does_not_fit_is_refused():
    y, p = np.array([0, 1, 1]), {"private": np.array([0.1, 0.2, 0.3])}
    options = {"field": "g", "min_group_size": 1, "resamples": 5}
    with pytest.raises(DataError, match=r"3\. Received: 2 in groups"):
        metric_by_group(accuracy(), y, p, ["a", "b"], **options)
    with pytest.raises(DataError, match=r"3\. Received: 2 in units"):
        metric_by_group(accuracy(), y, p, ["a", "b", "a"], units=[1, 2], **options)
    with pytest.raises(DataError, match=r"3\. Received: 2 in public"):
        metric_by_group(accuracy(), y, {**p, "public": np.zeros(2)}, ["a", "b", "a"], **options)
    with pytest.raises(DataError, match="a unit with records in 2 groups"):
        metric_by_group(accuracy(), y, p, ["a", "b", "a"], units=["u", "u", "v"], **options)
    with pytest.raises(DataError, match="instance of a Keras metric"):
        metric_by_group("accuracy", y, p, ["a", "b", "a"], **options)
    with pytest.raises(DataError, match=r"\['dp', 'private'\]"):
        metric_by_group(accuracy(), y, {**p, "dp": p["private"]}, ["a", "b", "a"], **options)
    many = keras.metrics.F1Score()
    with pytest.raises(DataError, match=r"values of shape \(2,\)"):
        metric_by_group(many, np.eye(2), {"private": np.eye(2)}, ["a", "b"], **options)
    with pytest.raises(DataError, match="min_group_size"):
        metric_by_group(accuracy(), y, p, ["a", "b", "a"], field="g", min_group_size=0)
    with pytest.raises(DataError, match=r"between 0 and 1\. Received: 95"):
        metric_by_group(accuracy(), y, p, ["a", "b", "a"], confidence=95, **options)
    short = Perplexity(np.ones(2), np.ones(2))
    with pytest.raises(DataError, match=r"3\. Received: 2 in public"):
        perplexity_by_group(
            {"private": Perplexity(np.ones(3), np.ones(3)), "public": short}, ["a", "b", "a"], **options
        )


def test_a_report_is_plain_data_for_a_card():
    y, groups = np.arange(60) % 2, ["a"] * 30 + ["b"] * 30
    p = {"private": np.linspace(0, 1, 60), "public": np.full(60, 0.7)}
    report = metric_by_group(accuracy(), y, p, groups, field="g", min_group_size=5, resamples=30, split="held-out")
    told = report.evaluation()
    assert json.loads(json.dumps(told))["groups"][1]["interval"] == list(report.rows[1].interval)
    assert told["metrics"][0]["private"] == report.whole.value
    assert told["metrics"][0]["split"] == "held-out"
    assert "non_private" not in told["metrics"][0]
    assert (told["group_field"], told["group_metric"]) == ("g", "binary_accuracy")
    assert told["groups"][1]["before"] == report.rows[1].public
