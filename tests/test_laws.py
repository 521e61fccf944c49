"""One test a law, by the public API alone: each fails when its law is broken, whatever breaks it.

Statistical tests state their false-alarm rate; all others hold for every draw.
"""

from __future__ import annotations

import json
import os

import dp_accounting
import keras
import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

import tfdp

FALSE_ALARM = 1e-6
UNITS, FEATURES = 12, 6
TINY = 1e-3  # a noise multiplier that lets the sum be seen through the noise

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def linear(*extra):
    """A model of one value; its loss is 100 times its output, so that every unit with features is clipped."""
    model = keras.Sequential([keras.Input((FEATURES,)), *extra, keras.layers.Dense(1, use_bias=False)])
    return model


def linear_loss(y_true, y_pred):
    return 100.0 * keras.ops.mean(y_pred, axis=-1)


def updates(plan, x, directory, *, model=None, steps=1, weight=None):
    """Private SGD with rate 1; returns -(q * N) times the change of the weights, [steps, values]: the noisy sums."""
    model = model or linear()
    model.compile(tfdp.dp_optimizer("sgd", plan, learning_rate=1.0), loss=linear_loss)
    trail = [model.get_weights()[0].ravel()]
    watch = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: trail.append(model.get_weights()[0].ravel())
    )
    data = (x, np.zeros((len(x), 1), np.float32), *([] if weight is None else [weight]))
    callback = tfdp.PrivacyCallback(plan, directory / "ledger.jsonl")
    model.fit(
        tfdp.poisson_batches(data, plan), steps_per_epoch=steps, callbacks=[callback, watch], verbose=0, shuffle=False
    )
    return -plan.expected_batch_size * np.diff(np.array(trail, np.float64), axis=0)


def test_law_1_every_unit_joins_every_batch_independently_with_one_probability(plan_of):
    """One draw a batch and never one a microbatch; none twice. Chi-square on pairs, both tails, false alarms 1e-6."""
    plan = plan_of(num_units=8, batch=2, microbatch=1)
    records = (np.arange(8, dtype=np.float32)[:, None], np.zeros(8))
    joined, numbers = np.zeros((4000, 8)), []
    for row, batch in zip(joined, tfdp.poisson_batches(records, plan).take(4000).as_numpy_iterator(), strict=True):
        units = batch["x"][batch["unit_weight"] > 0].astype(int).ravel()
        assert len(set(units)) == len(units)  # a second draw in the same batch could take a unit again
        row[units] = 1
        numbers.append(int(batch["tfdp"]["draw"][0]))
    assert numbers == sorted(set(numbers))
    first, second = np.triu_indices(8, 1)
    together = np.stack([(joined[:, first] + 2 * joined[:, second] == case).sum(0) for case in range(4)])
    expected = 4000 * np.array([0.75**2, 0.25 * 0.75, 0.25 * 0.75, 0.25**2])[:, None]
    statistic = ((together - expected) ** 2 / expected).sum(0)  # chi-square(3) for each of the 28 pairs
    assert stats.chi2.sf(statistic.max(), 3) > FALSE_ALARM / 56
    sizes = joined.sum(1)
    spread = 4000 * sizes.var() / (8 * 0.25 * 0.75)
    assert FALSE_ALARM / 4 < stats.chi2.sf(spread, 3999) < 1 - FALSE_ALARM / 4
    following = np.corrcoef(sizes[:-1], sizes[1:])[0, 1] * np.sqrt(3999)
    assert abs(following) < stats.norm.isf(FALSE_ALARM / 4)


@pytest.mark.parametrize("method_of", ["one unit", "one of many"])
def test_law_2_one_unit_moves_the_sum_by_at_most_the_clip_norm(plan_of, tmp_path, method_of):
    """Dropout on: norm and sum come from one forward pass. Units that are not finite move nothing at all."""
    plan = plan_of(scheme="full_batch", batch=UNITS, noise=TINY, clip=0.5, steps=8)
    slack = 0.5 * TINY * 10 * np.sqrt(FEATURES)
    x = np.full((UNITS, FEATURES), np.nan, np.float32)
    x[3] = np.linspace(1, 2, FEATURES)
    if method_of == "one unit":
        dropout = linear(keras.layers.Dropout(0.5, seed=1))
        sums = np.linalg.norm(updates(plan, x, tmp_path, model=dropout, steps=8), axis=1)
        assert (sums <= 0.5 + slack).all()
        assert sums.max() >= 0.5 - slack  # and it does move: false alarm 2^-48, all masks empty
    else:
        x = np.random.default_rng(0).normal(size=(UNITS, FEATURES)).astype(np.float32)
        without = x.copy()
        without[3] = np.nan
        change = updates(plan, x, tmp_path / "with") - updates(plan, without, tmp_path / "without")
        assert np.linalg.norm(change) == pytest.approx(0.5, abs=2 * slack)


@pytest.mark.parametrize("batch", ["empty", "twelve microbatches"])
def test_law_3_noise_once_a_step_with_its_standard_deviation(plan_of, tmp_path, batch):
    """Also when nothing was drawn. Two-sided chi-square on 600 values, false alarms 1e-6; no value comes again."""
    sampling = {"batch": 1e-4} if batch == "empty" else {"scheme": "full_batch", "batch": UNITS, "microbatch": 1}
    plan = plan_of(noise=3.0, clip=0.5, steps=100, **sampling)
    x, nothing = np.ones((UNITS, FEATURES), np.float32), np.zeros(UNITS, np.float32)
    start = linear()
    start.set_weights([np.zeros((FEATURES, 1))])
    noise = updates(plan, x, tmp_path, model=start, steps=100, weight=nothing) / (3.0 * 0.5)
    assert FALSE_ALARM / 2 < stats.chi2.cdf((noise**2).sum(), noise.size) < 1 - FALSE_ALARM / 2
    assert len(np.unique(noise[:50].round(4))) > 200  # 300 values; constant or replayed noise has far fewer
    lagged = (noise[1:] * noise[:-1]).sum() / np.sqrt(noise[1:].size)
    assert abs(lagged) < 1.5 * stats.norm.isf(FALSE_ALARM / 2)


def test_law_4_the_denominator_is_public(plan_of, tmp_path):
    """Equal units, each clipped to norm 1: the update times q * N counts the drawn ones, another number every time."""
    plan = plan_of(noise=TINY, steps=30)
    x = np.tile(np.linspace(1, 2, FEATURES, dtype=np.float32), (UNITS, 1))
    direction = x[0] / np.linalg.norm(x[0])
    counts = updates(plan, x, tmp_path, steps=30) @ direction
    assert np.abs(counts - counts.round()).max() < 10 * TINY
    assert counts.round().min() >= 0
    assert counts.round().max() <= UNITS
    assert len(set(counts.round())) > 1  # false alarm below 1e-18
    assert stats.binom.sf(counts.round().sum() - 1, 30 * UNITS, 0.5) > FALSE_ALARM / 2
    assert stats.binom.cdf(counts.round().sum(), 30 * UNITS, 0.5) > FALSE_ALARM / 2


def test_law_5_epsilon_is_that_of_the_steps_that_ran_or_there_is_none(plan_of, tmp_path):
    """Three of nine planned steps, against dp-accounting itself; an accountant that does not fit is refused."""
    plan = plan_of(steps=9, noise=1.5)
    x = np.ones((UNITS, FEATURES), np.float32)
    model = linear()
    updates(plan, x, tmp_path, model=model, steps=3)
    step = dp_accounting.PoissonSampledDpEvent(0.5, dp_accounting.GaussianDpEvent(1.5))
    truth = dp_accounting.rdp.RdpAccountant().compose(step, 3).get_epsilon(1e-3)
    assert tfdp.read_ledger(tmp_path / "ledger.jsonl").epsilon() == pytest.approx(truth, rel=1e-3)
    card = json.loads(tfdp.export(model, tmp_path)["json"].read_text())
    assert card["claim"]["epsilon"]["value"] == pytest.approx(truth, rel=1e-3)
    assert truth < 0.7 * plan.epsilon(9)  # the plan's number would be another
    for section, field, value, at in (
        ("claim", "adjacency", "replace_one", "accountant"),  # rdp counts the clip norm once, replacing moves it twice
        ("sampling", "scheme", "shuffle", "sampling"),
    ):
        text = plan.spec.to_dict()
        text[section][field] = value
        spec = tfdp.PrivacySpec.from_text(json.dumps(text), format="json")
        with pytest.raises(tfdp.errors.PlanError) as refused:
            tfdp.make_plan(spec)
        assert any(at in finding.where for finding in refused.value.findings)


class TestLaw6LedgerFirst:
    def test_no_record_no_update(self, plan_of, tmp_path, monkeypatch):
        """The disk fails at the third flush: two updates, the third has no effect and no refund."""
        plan, model, path = plan_of(steps=9), linear(), tmp_path / "ledger.jsonl"
        updates(plan, np.ones((UNITS, FEATURES), np.float32), tmp_path, model=model, steps=1)
        before = model.get_weights()
        flush, failing = os.fsync, []

        def full(descriptor):
            if failing:
                raise OSError(28, "No space left on device")
            flush(descriptor)

        monkeypatch.setattr(os, "fsync", full)
        fail = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: failing.append(True))
        batches = tfdp.poisson_batches((np.ones((UNITS, FEATURES)), np.zeros((UNITS, 1))), plan)
        with pytest.raises(tfdp.errors.LedgerError, match="No space left"):
            model.fit(
                batches,
                steps_per_epoch=1,
                callbacks=[tfdp.PrivacyCallback(plan, path), fail],
                verbose=0,
                shuffle=False,
            )
        np.testing.assert_array_equal(model.get_weights()[0], before[0])
        assert int(model.optimizer.iterations) == 1
        failing.clear()
        assert tfdp.read_ledger(path).steps == 2  # the line may have reached the disk: it counts as spent

    def test_the_record_is_flushed_before_the_update(self, plan_of, tmp_path, monkeypatch):
        """Watched from inside the step: when the update is applied, its line has been written and flushed."""
        plan, model, path, seen = plan_of(steps=9), linear(), tmp_path / "ledger.jsonl", []
        optimizer = tfdp.dp_optimizer("sgd", plan)
        flushed, flush, apply = [], os.fsync, type(optimizer).apply_private

        def watched_flush(descriptor):
            flush(descriptor)
            flushed.append(os.fstat(descriptor).st_size)

        monkeypatch.setattr(os, "fsync", watched_flush)

        def watched(self, noisy):
            seen.append((int(self.iterations), tfdp.read_ledger(path).steps, flushed[-1] == os.path.getsize(path)))
            return apply(self, noisy)

        monkeypatch.setattr(type(optimizer), "apply_private", watched)
        model.compile(optimizer, loss=linear_loss, run_eagerly=True)
        batches = tfdp.poisson_batches((np.ones((UNITS, FEATURES)), np.zeros((UNITS, 1))), plan)
        model.fit(batches, steps_per_epoch=3, callbacks=[tfdp.PrivacyCallback(plan, path)], verbose=0, shuffle=False)
        assert seen == [(0, 1, True), (1, 2, True), (2, 3, True)]

    def test_a_rolled_back_model_refunds_nothing(self, plan_of, tmp_path):
        plan, model, path = plan_of(steps=4), linear(), tmp_path / "ledger.jsonl"
        x, start = np.ones((UNITS, FEATURES), np.float32), model.get_weights()
        updates(plan, x, tmp_path, model=model, steps=3)
        model.set_weights(start)
        updates(plan, x, tmp_path, model=model, steps=9)  # a new optimizer, counting from 0
        assert int(model.optimizer.iterations) == 1
        assert tfdp.read_ledger(path).steps == 4
        with pytest.raises(tfdp.errors.BudgetExhaustedError):
            updates(plan, x, tmp_path, model=linear())


MISUSES = ["no callback", "raw gradients", "plain optimizer", "foreign batches", "another plan", "mixing layer"]


@pytest.mark.parametrize("misuse", MISUSES)
def test_law_7_fails_closed(plan_of, tmp_path, misuse):
    """Before the first update, with every weight bit-identical. All misuses: tests/test_callback.py."""
    plan = plan_of(steps=9)
    mixing = keras.layers.Lambda(lambda x: x - keras.ops.mean(x, 0, keepdims=True))
    model = linear(*([mixing] if misuse == "mixing layer" else []))
    model.compile("sgd" if misuse == "plain optimizer" else tfdp.dp_optimizer("sgd", plan), loss=linear_loss)
    data = (np.ones((UNITS, FEATURES), np.float32), np.zeros((UNITS, 1), np.float32))
    foreign = misuse in ("foreign batches", "raw gradients")
    batches = tfdp.poisson_batches(data, plan_of(steps=8) if misuse == "another plan" else plan)
    without = misuse in ("no callback", "raw gradients")
    callbacks = [] if without else [tfdp.PrivacyCallback(plan, tmp_path / "ledger.jsonl")]
    before = model.get_weights()
    options = {"steps_per_epoch": 1, "callbacks": callbacks, "verbose": 0, "shuffle": False}
    with pytest.raises((tfdp.errors.MisuseError, tfdp.errors.GradientError), match="Expected"):
        model.fit(*(data if foreign else (batches,)), **options)
    np.testing.assert_array_equal(model.get_weights()[0], before[0])


def test_law_7_a_draw_is_used_once(plan_of, tmp_path):
    """Not even when the batch itself was kept: neither in a second fit nor on another ledger."""
    plan, model = plan_of(steps=9), linear()
    batches = tfdp.poisson_batches((np.ones((UNITS, FEATURES), np.float32), np.zeros((UNITS, 1), np.float32)), plan)
    kept = tf.data.Dataset.from_tensors(next(iter(batches)))
    model.compile(tfdp.dp_optimizer("sgd", plan), loss=linear_loss)
    options = {"steps_per_epoch": 1, "verbose": 0, "shuffle": False}
    model.fit(kept, callbacks=[tfdp.PrivacyCallback(plan, tmp_path / "a.jsonl")], **options)
    other = linear()
    other.compile(tfdp.dp_optimizer("sgd", plan), loss=linear_loss)
    for trained, name in ((model, "a.jsonl"), (other, "b.jsonl")):
        before = trained.get_weights()
        with pytest.raises(tfdp.errors.MisuseError, match="fresh draw"):
            trained.fit(kept, callbacks=[tfdp.PrivacyCallback(plan, tmp_path / name)], **options)
        np.testing.assert_array_equal(trained.get_weights()[0], before[0])


def test_law_8_the_card_says_what_is_not_covered(plan_of, tmp_path):
    plan, model = plan_of(steps=9), linear()
    updates(plan, np.ones((UNITS, FEATURES), np.float32), tmp_path, model=model, steps=2)
    paths = tfdp.export(model, tmp_path)
    accesses = {each["name"]: each for each in json.loads(paths["json"].read_text())["data_accesses"]}
    assert accesses["Training"]["status"] == "covered"
    assert accesses["Metrics in the progress bar"]["status"] == "not covered"
    assert "loss" in accesses["Metrics in the progress bar"]["note"]
    others = {each["status"] for name, each in accesses.items() if name != "Training"}
    assert others <= {"not covered", "not stated"}
    assert "Metrics in the progress bar" in paths["markdown"].read_text()
