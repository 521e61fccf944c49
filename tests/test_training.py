"""The private train step against the slow obvious way: one unit at a time, from the draws that the sampler made.

Statistical tests state their false-alarm rate; all others hold for every draw.
"""

from __future__ import annotations

import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

import tfdp
from tfdp import keras_private, training
from tfdp.errors import MisuseError
from tfdp.sampling import batches as draws_of_this_process
from tfdp.sampling.poisson import PoissonSampler

FALSE_ALARM = 1e-6
UNITS, FEATURES, CLASSES = 12, 5, 3


def records(units=UNITS, seed=0):
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(units, FEATURES)).astype(np.float32) * np.linspace(0.1, 3, units)[:, None]
    return x.astype(np.float32), generator.integers(0, CLASSES, units)


def network(*, seed=1, **dense):
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [keras.Input((FEATURES,)), keras.layers.Dense(4, activation="tanh", **dense), keras.layers.Dense(CLASSES)]
    )


def cross_entropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def fit(model, plan, data, ledger, *, optimizer="sgd", steps=1, callbacks=(), compiled=None, batches=None, **options):
    """A private fit of some steps with learning rate 1; returns the callback and the history."""
    method = {name: options.pop(name) for name in ("method", "jit_compile") if name in options}
    rate = {"learning_rate": 1.0} if isinstance(optimizer, str) else {}
    model.compile(
        tfdp.dp_optimizer(optimizer, plan, **rate), loss=cross_entropy(), **{"metrics": [], **(compiled or {})}
    )
    callback = tfdp.PrivacyCallback(plan, ledger=ledger / "ledger.jsonl", **method)
    batches = tfdp.poisson_batches(data, plan) if batches is None else batches
    history = model.fit(
        batches, epochs=1, steps_per_epoch=steps, callbacks=[callback, *callbacks], verbose=0, shuffle=False, **options
    )
    return callback, history


def clipped(model, x, y, clip_norm, sample_weight=None):
    """Clipped gradient of one unit, by a plain tape, and its loss."""
    weight = None if sample_weight is None else tf.constant(sample_weight[None])
    with tf.GradientTape() as tape:
        loss = cross_entropy()(y[None], model(x[None], training=True), sample_weight=weight)
    gradients = [np.asarray(g, np.float64) for g in tape.gradient(loss, [v.value for v in model.trainable_variables])]
    norm = np.sqrt(sum((g**2).sum() for g in gradients))
    return [g * clip_norm / max(norm, clip_norm) for g in gradients], float(loss), norm


def expected_weights(model, plan, data, draws, noise):
    """SGD with rate 1 over `draws`: for each, minus (sum of clipped gradients + noise) / (q * N)."""
    reference = keras.models.clone_model(model)
    reference.set_weights(model.get_weights())
    for step, draw in enumerate(draws, start=1):
        sums = [np.zeros(v.shape) for v in reference.trainable_variables]
        for unit in draw:
            gradients, _, _ = clipped(reference, data[0][unit], data[1][unit], plan.clip_norm)
            sums = [total + g for total, g in zip(sums, gradients, strict=True)]
        for index, (v, total) in enumerate(zip(reference.trainable_variables, sums, strict=True)):
            v.assign(v - (total + noise(v.shape, step, index)) / (plan.num_units * plan.sampling_probability))
    return reference.get_weights()


def silent(shape, step, index):
    return np.zeros(shape)


def telling(shape, step, index):
    """Noise that differs for every value, variable and step."""
    return np.sin(np.arange(np.prod(shape, dtype=int)) + 10 * index + 100 * step).reshape(shape)


def assert_close(model, weights, **tolerance):
    for one, other in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_allclose(one, other, **{"rtol": 2e-5, "atol": 2e-6, **tolerance})


class TestUpdate:
    @pytest.mark.parametrize("microbatch", [1, 3, 16])
    @pytest.mark.parametrize("method", ["bookkeeping", "vectorized"])
    def test_is_the_noisy_sum_over_what_was_drawn(self, plan_of, noise_is, monkeypatch, tmp_path, microbatch, method):
        """Three steps with real draws; the microbatch size changes nothing."""
        plan = plan_of(microbatch=microbatch, clip=1.3, noise=1.5)
        draws, draw = [], PoissonSampler.draw
        monkeypatch.setattr(PoissonSampler, "draw", lambda self: draws.append(draw(self)) or draws[-1])
        calls = noise_is(telling)
        model, data = network(), records()
        start = keras.models.clone_model(model)
        start.set_weights(model.get_weights())
        callback, _ = fit(model, plan, data, tmp_path, steps=3, method=method)
        norms = [clipped(start, x, y, 1.0)[2] for x, y in zip(*data, strict=True)]
        assert min(norms) < plan.clip_norm < max(norms)  # both sides of the clipping take part
        assert_close(model, expected_weights(start, plan, data, draws[:3], telling))
        assert calls == [(step, index, 1.5 * 1.3) for step in (1, 2, 3) for index in range(4)]
        assert callback.traces == 1

    def test_denominator_is_the_expected_batch_size_whatever_was_drawn(self, plan_of, noise_is, draws_are, tmp_path):
        """A batch of one, of all, and none: a third, twice and zero times the expected 6, always divided by 6."""
        plan = plan_of(batch=6)
        noise_is(silent)
        draws = [[4], list(range(UNITS)), []]
        draws_are(*draws)
        model, data = network(), records()
        start = keras.models.clone_model(model)
        start.set_weights(model.get_weights())
        fit(model, plan, data, tmp_path, steps=3)
        assert_close(model, expected_weights(start, plan, data, draws, silent))

    def test_full_batch_takes_everybody(self, plan_of, noise_is, tmp_path):
        plan = plan_of(scheme="full_batch", batch=UNITS, microbatch=5)
        noise_is(silent)
        model, data = network(), records()
        start = keras.models.clone_model(model)
        start.set_weights(model.get_weights())
        fit(model, plan, data, tmp_path, steps=2)
        assert_close(model, expected_weights(start, plan, data, [range(UNITS)] * 2, silent))

    def test_truncated_batches_keep_the_denominator(self, plan_of, noise_is, monkeypatch, tmp_path):
        plan = plan_of(scheme="truncated_poisson", truncated_batch_size=2, batch=6)
        noise_is(silent)
        draws, draw = [], PoissonSampler.draw
        monkeypatch.setattr(PoissonSampler, "draw", lambda self: draws.append(draw(self)) or draws[-1])
        model, data = network(), records()
        start = keras.models.clone_model(model)
        start.set_weights(model.get_weights())
        fit(model, plan, data, tmp_path, steps=3)
        assert max(len(each) for each in draws[:3]) <= 2
        assert_close(model, expected_weights(start, plan, data, draws[:3], silent))

    def test_a_unit_without_a_finite_gradient_adds_nothing(self, plan_of, noise_is, draws_are, tmp_path):
        noise_is(silent)
        draws_are([1, 2, 3, 7])
        plan, (x, y) = plan_of(microbatch=3), records()
        broken = x.copy()
        broken[2] = np.nan
        broken[7] = np.inf
        model = network()
        start = keras.models.clone_model(model)
        start.set_weights(model.get_weights())
        fit(model, plan, (broken, y), tmp_path)
        assert_close(model, expected_weights(start, plan, (x, y), [[1, 3]], silent))

    def test_weights_of_records_are_those_of_keras(self, plan_of, noise_is, draws_are, tmp_path):
        """A sample weight scales the unit's loss before it is clipped; it is not the weight of padding."""
        noise_is(silent)
        draws_are([0, 1, 5])
        plan, (x, y) = plan_of(clip=0.5), records()
        weight = np.linspace(0, 2, UNITS).astype(np.float32)
        model = network()
        before = model.get_weights()
        sums = [np.zeros(w.shape) for w in before]
        for unit in (0, 1, 5):
            gradients, _, _ = clipped(model, x[unit], y[unit], 0.5, weight[unit])
            sums = [s + g for s, g in zip(sums, gradients, strict=True)]
        fit(model, plan, (x, y, weight), tmp_path)
        assert_close(model, [w - s / 6 for w, s in zip(before, sums, strict=True)])

    def test_regularisers_of_weights_join_after_noise_and_clipping(self, plan_of, noise_is, draws_are, tmp_path):
        noise_is(telling)
        draws_are([0, 11], [])
        plan, data = plan_of(), records()
        plain, regularised = network(), network(kernel_regularizer=keras.regularizers.L2(0.05))
        before = plain.get_weights()
        _, without = fit(plain, plan, data, tmp_path / "plain")
        draws_are([0, 11], [])
        _, with_penalty = fit(regularised, plan, data, tmp_path / "regularised")
        expected = plain.get_weights()
        expected[0] = expected[0] - 2 * 0.05 * before[0]
        assert_close(regularised, expected)
        penalty = 0.05 * (before[0] ** 2).sum()
        assert with_penalty.history["loss"][0] == pytest.approx(without.history["loss"][0] + penalty, rel=1e-5)

    def test_weight_decay_and_momentum_are_those_of_keras(self, plan_of, noise_is, draws_are, tmp_path):
        """The same noisy gradients through a plain optimizer."""
        noise_is(telling)
        draws_are()
        plan, model = plan_of(), network()
        options = {"learning_rate": 0.5, "momentum": 0.9, "weight_decay": 0.1}
        plain, weights = keras.optimizers.SGD(**options), [keras.Variable(w) for w in model.get_weights()]
        for step in (1, 2):
            plain.apply(
                [tf.constant(telling(v.shape, step, i) / 6, tf.float32) for i, v in enumerate(weights)], weights
            )
        fit(model, plan, records(), tmp_path, steps=2, optimizer=keras.optimizers.SGD(**options))
        assert_close(model, [v.numpy() for v in weights])

    def test_compiled_and_plain_microbatches_agree(self, plan_of, noise_is, draws_are, monkeypatch, tmp_path):
        """XLA for the microbatch only, with metrics and dropout state around it; built once, however many there are."""
        sums_function, built = training.sums_function, []

        def recorded(*options):
            sums = sums_function(*options)
            return lambda *arguments: built.append(keras_private.is_compiled_by_xla()) or sums(*arguments)

        monkeypatch.setattr(training, "sums_function", recorded)
        noise_is(telling)
        plan, data, found = plan_of(), records(), []
        for name, jit in (("plain", False), ("compiled", True)):
            draws_are([0, 2, 4, 6, 8, 10], [1])
            model = network()
            _, history = fit(
                model, plan, data, tmp_path / name, steps=2, jit_compile=jit, compiled={"metrics": ["accuracy"]}
            )
            found.append((model.get_weights(), history.history))
        assert built == [False, True]
        for one, other in zip(found[0][0], found[1][0], strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
        for name, values in found[0][1].items():
            assert values == pytest.approx(found[1][1][name], rel=1e-5)

    def test_run_eagerly_gives_the_same(self, plan_of, noise_is, draws_are, tmp_path):
        noise_is(telling)
        plan, data, found = plan_of(), records(), []
        for eagerly in (False, True):
            draws_are([0, 2, 4, 6, 8, 10], [], [1])
            model = network()
            compiled = {"run_eagerly": eagerly, "metrics": ["accuracy"]}
            _, history = fit(model, plan, data, tmp_path / str(eagerly), steps=3, compiled=compiled)
            found.append((model.get_weights(), history.history))
        for one, other in zip(found[0][0], found[1][0], strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
        for name, values in found[0][1].items():
            assert values == pytest.approx(found[1][1][name], rel=1e-5)

    @pytest.mark.filterwarnings("ignore:You are using a softmax:UserWarning")
    def test_mixed_bfloat16_keeps_sums_and_noise_in_float32(self, plan_of, noise_is, draws_are, tmp_path):
        """Close to float32, and the noise exact: in bfloat16 it would be off by up to 4 in 1000."""
        noise_is(telling)
        draws_are([], [0, 3, 6, 9])
        plan, data = plan_of(noise=5.0), records()
        keras.config.set_dtype_policy("mixed_bfloat16")
        try:
            model = network()
            before = model.get_weights()
            fit(model, plan, data, tmp_path, steps=1)
            after_noise = model.get_weights()
            second = network()  # a model stays with its ledger
        finally:
            keras.config.set_dtype_policy("float32")
        assert {v.dtype for v in model.trainable_variables} == {"float32"}
        expected = [w - telling(w.shape, 1, i) / 6 for i, w in enumerate(before)]
        assert_close(model, expected, rtol=1e-6, atol=1e-7)
        reference = network()
        for other in (reference, second):
            other.set_weights(after_noise)
        draws_are([0, 3, 6, 9])
        noise_is(silent)
        fit(second, plan_of(), data, tmp_path / "second")
        weights = expected_weights(reference, plan, data, [[0, 3, 6, 9]], silent)
        assert_close(second, weights, rtol=0, atol=0.02)


class TestNoise:
    """Laws 3 and 4: standard deviation sigma * C / (q * N) of the update, once a step, whatever was drawn."""

    def updates(self, plan, tmp_path, steps):
        """Changes of all weights, [steps, values], of a model whose gradients are all zero."""
        model = network()
        trail = [np.concatenate([w.ravel() for w in model.get_weights()])]
        keep = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: trail.append(
                np.concatenate([w.ravel() for w in model.get_weights()])
            )
        )
        data = (np.zeros((plan.num_units, FEATURES), np.float32), np.zeros(plan.num_units, int))
        weight = np.zeros(plan.num_units, np.float32)
        fit(model, plan, (*data, weight), tmp_path, steps=steps, callbacks=[keep])
        return np.diff(np.array(trail, np.float64), axis=0)

    @pytest.mark.parametrize(("draws", "microbatch"), [("empty", 4), ("all", 4), ("all", 1)])
    def test_standard_deviation(self, plan_of, draws_are, tmp_path, draws, microbatch):
        """Two-sided chi-square on 400 steps of 39 values: 2 per cent more or less would be seen. False alarms 1e-6."""
        plan = plan_of(noise=2.0, clip=0.5, steps=400, microbatch=microbatch)
        draws_are(*([range(UNITS)] * 400 if draws == "all" else []))
        changes = self.updates(plan, tmp_path, 400) / (2.0 * 0.5 / 6)
        assert changes.shape == (400, 39)
        statistic = (changes**2).sum()
        assert FALSE_ALARM / 2 < stats.chi2.cdf(statistic, changes.size) < 1 - FALSE_ALARM / 2
        assert stats.kstest(changes.ravel(), "norm").pvalue > FALSE_ALARM

    def test_independent_between_steps_values_and_fits(self, plan_of, draws_are, tmp_path):
        """No pair of rows or columns correlates; false alarms 1e-6 by a Bonferroni bound over all pairs."""
        plan = plan_of(noise=2.0, steps=400)
        draws_are()
        first, second = (self.updates(plan, tmp_path / name, 200) for name in ("first", "second"))
        changes = np.concatenate([first, second]) / (2.0 / 6)
        for rows in (changes, changes.T):
            products = (rows @ rows.T)[np.triu_indices(len(rows), 1)] / np.sqrt(rows.shape[1])
            # Sums of products of normals have heavier tails; by a Chernoff bound the factor 1.5 covers them.
            bound = 1.5 * stats.norm.isf(FALSE_ALARM / len(products))
            assert np.abs(products).max() < bound
        assert len(np.unique(changes)) > 0.99 * changes.size  # float32 weights; a replay would halve it


class TestMetrics:
    def test_values_are_those_of_the_drawn_units_alone(self, plan_of, noise_is, draws_are, tmp_path):
        """Padding counts nowhere; loss, metrics and weighted metrics over two steps, the model standing still."""
        draws = [[0, 1, 2, 3, 7], [8], []]
        noise_is(silent)
        draws_are(*draws)
        plan, (x, y) = plan_of(microbatch=4), records()
        weight = np.linspace(0.5, 2, UNITS).astype(np.float32)
        model = network()
        compiled = {
            "metrics": ["accuracy", keras.metrics.SparseCategoricalCrossentropy(from_logits=True, name="entropy")],
            "weighted_metrics": [keras.metrics.SparseCategoricalCrossentropy(from_logits=True, name="weighted")],
        }
        still = keras.optimizers.SGD(0.0)
        seen = [unit for draw in draws for unit in draw]
        logits = model(x[seen])
        losses = keras.losses.sparse_categorical_crossentropy(y[seen], logits, from_logits=True).numpy()
        _, history = fit(model, plan, (x, y, weight), tmp_path, steps=3, optimizer=still, compiled=compiled)
        expected = {
            "loss": (losses * weight[seen]).mean(),
            "accuracy": (np.argmax(logits, 1) == y[seen]).mean(),
            "entropy": losses.mean(),
            "weighted": np.average(losses, weights=weight[seen]),
        }
        for name, value in expected.items():
            assert history.history[name] == [pytest.approx(value, rel=1e-5)], name

    def test_no_metric_but_the_loss(self, plan_of, noise_is, draws_are, tmp_path):
        noise_is(silent)
        draws_are([0, 5])
        plan, (x, y) = plan_of(), records()
        model = network()
        losses = [clipped(model, x[unit], y[unit], 1.0)[1] for unit in (0, 5)]
        _, history = fit(model, plan, (x, y), tmp_path)
        assert history.history["loss"] == [pytest.approx(np.mean(losses), rel=1e-5)]
        assert set(history.history) == {"loss", "epsilon"}

    @pytest.mark.parametrize("with_metrics", [False, True])
    def test_nothing_is_traced_twice(self, plan_of, draws_are, tmp_path, with_metrics):
        """Batches of 0 to 12 units; metrics whose variables are not there yet when the fit begins."""
        draws_are([], [1], range(12), [1, 2, 3, 4, 5], [])
        plan, (x, y) = plan_of(steps=8), records()
        top = keras.metrics.SparseTopKCategoricalAccuracy(2)
        compiled = {"metrics": ["accuracy"], "weighted_metrics": [top]} if with_metrics else {}
        callback, _ = fit(network(), plan, (x, y), tmp_path, steps=6, compiled=compiled)
        assert callback.traces == 1


class TestOwnRandomness:
    def model(self):
        keras.utils.set_random_seed(3)
        return keras.Sequential(
            [keras.Input((FEATURES,)), keras.layers.Dropout(0.5, seed=11), keras.layers.Dense(CLASSES, use_bias=False)]
        )

    def first_update(self, plan, tmp_path):
        model = self.model()
        before = model.get_weights()[0]
        fit(model, plan, (np.ones((UNITS, FEATURES), np.float32), np.zeros(UNITS, int)), tmp_path)
        return model.get_weights()[0] - before

    def test_dropout_masks_cannot_be_foreseen(self, plan_of, noise_is, draws_are, tmp_path):
        """A known seed would let one unit more shift the masks of all others: it is replaced at the fit's begin."""
        noise_is(silent)
        found = []
        for name in ("a", "b", "c"):
            draws_are(range(UNITS))
            found.append(self.first_update(plan_of(), tmp_path / name))
        assert not np.allclose(found[0], found[1]) or not np.allclose(found[0], found[2])

    def test_a_seeded_plan_keeps_the_seed_of_the_model(self, plan_of, noise_is, draws_are, tmp_path):
        noise_is(silent)
        plan, found = plan_of(rng="prng", seed=5), []
        for name in ("a", "b"):
            draws_are(range(UNITS))
            found.append(self.first_update(plan, tmp_path / name))
        np.testing.assert_array_equal(*found)

    def test_every_microbatch_has_masks_of_its_own(self, plan_of, noise_is, draws_are, tmp_path):
        """Microbatches of one unit: with one mask for all, whole rows of the update would be zero half the time."""
        noise_is(silent)
        plan = plan_of(num_units=64, batch=32, microbatch=1)
        draws_are(range(64))
        model = self.model()
        before = model.get_weights()[0]
        fit(model, plan, (np.ones((64, FEATURES), np.float32), np.zeros(64, int)), tmp_path)
        moved = np.abs(model.get_weights()[0] - before).sum(1)
        assert (moved > 0).all()  # false alarm 5 * 2^-64
        assert len(np.unique(moved.round(6))) > 1  # and they differ


def repeated(*keys, axis=0):
    return lambda e: type(e)({**e, **{k: tf.concat([e[k]] * 10, axis) for k in keys}})


def weighted(change):
    return lambda e: type(e)({**e, "unit_weight": change(e["unit_weight"])})


class TestBatchesThatWereTamperedWith:
    """The methods of the dataset refuse; those of its class, called on it, do not. No update may come of it."""

    def refused(self, plan, tmp_path, batches, match):
        model = network()
        before = model.get_weights()
        with pytest.raises(MisuseError, match=match):
            fit(model, plan, records(), tmp_path, batches=batches, optimizer="adamw", steps=2)
        assert_close(model, before, rtol=0, atol=0)
        assert int(model.optimizer.iterations) == 0

    @pytest.mark.parametrize(
        "change",
        [
            repeated("x", "y", "unit_weight"),
            repeated("x", "y", "unit_weight", axis=1),
            repeated("x", "y", axis=1),  # with microbatches of one unit its weight would be broadcast
            repeated("x", "y"),
            weighted(lambda w: w * 10),
            weighted(lambda w: w * [[1.0], [2.0], [0.0], [1.0]]),  # the same sum
            weighted(lambda w: w * np.nan),
            weighted(lambda w: w[:2]),
        ],
    )
    def test_units_are_not_those_of_the_draw(self, plan_of, noise_is, draws_are, tmp_path, change):
        noise_is(silent)
        draws_are([0, 3, 4, 9])
        plan = plan_of(microbatch=1)
        batches = tf.data.Dataset.map(tfdp.poisson_batches(records(), plan), change)
        self.refused(plan, tmp_path, batches, "Expected a batch as it was drawn.*repeated.*as it is")

    def test_nothing_runs_before_the_batch_is_accepted(self, plan_of, draws_are, monkeypatch, tmp_path):
        """However long that takes: the loss of a refused batch is never added up."""
        draws_are([0, 3, 4, 9])
        plan, model, redeem = plan_of(), network(), training.PrivateTrainStep._redeem
        monkeypatch.setattr(
            training.PrivateTrainStep, "_redeem", lambda self, *ticket: time.sleep(0.3) or redeem(self, *ticket)
        )
        batches = tf.data.Dataset.map(tfdp.poisson_batches(records(), plan), weighted(lambda w: w * 10))
        with pytest.raises(MisuseError, match="as it was drawn"):
            fit(model, plan, records(), tmp_path, batches=batches)
        assert [float(state) for metric in model.metrics for state in metric.variables] == [0.0, 0.0]

    def test_an_unchanged_batch_is_accepted_through_map(self, plan_of, noise_is, draws_are, tmp_path):
        noise_is(silent)
        draws_are([0, 3, 4, 9])
        plan, model = plan_of(microbatch=3), network()
        before = model.get_weights()
        batches = tf.data.Dataset.map(tfdp.poisson_batches(records(), plan), lambda e: e)
        fit(model, plan, records(), tmp_path, batches=batches)
        assert not np.array_equal(model.get_weights()[0], before[0])

    def test_draws_that_another_process_kept(self, plan_of, tmp_path, monkeypatch):
        plan = plan_of()
        kept = tf.data.Dataset.cache(tfdp.poisson_batches(records(), plan).take(3), str(tmp_path / "kept"))
        assert len(list(kept)) == 3
        monkeypatch.setattr(draws_of_this_process, "_issued", {})  # as another process has it
        self.refused(plan, tmp_path, kept, "Expected a fresh draw.*another process.*as it is")

    def test_a_batch_that_names_another_plan(self, plan_of, tmp_path):
        plan, other = plan_of(), plan_of(batch=3)
        token = tf.constant([draws_of_this_process.plan_token(plan)], tf.int64)
        batches = tf.data.Dataset.map(
            tfdp.poisson_batches(records(), other), lambda e: type(e)({**e, "tfdp": {**e["tfdp"], "plan": token}})
        )
        self.refused(plan, tmp_path, batches, "batches of another plan")
