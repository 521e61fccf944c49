"""What a private fit does on the replicas of a `MirroredStrategy`; run by `test_replicas.py` in a process of its own.

TensorFlow takes a second logical device only before its first operation, so nothing else runs in that process.

Statistical tests state their false-alarm rate; all others hold for every draw.
"""

from __future__ import annotations

import keras
import keras_hub
import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

import tfdp
from tfdp.errors import BudgetExhaustedError, MisuseError, UnsupportedLayerError
from tfdp.files import sha256_arrays
from tfdp.noise import GaussianNoise
from tfdp.sampling.poisson import PoissonSampler

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
STRATEGY = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

FALSE_ALARM = 1e-6
UNITS, FEATURES, CLASSES = 12, 5, 3
# With microbatches of two: three of them, none, one, six; an odd unit in the last, and a whole batch.
DRAWS = [[0, 1, 2, 3, 7], [], [8], range(UNITS)]


def records(seed=0):
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(UNITS, FEATURES)) * np.linspace(0.1, 3, UNITS)[:, None]
    return x.astype(np.float32), generator.integers(0, CLASSES, UNITS), np.linspace(0.5, 2, UNITS, dtype=np.float32)


def network(*inside):
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(4, activation="tanh", kernel_regularizer="l2"),
            *inside,
            keras.layers.Dense(CLASSES),
        ]
    )


def cross_entropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def compiled(model, plan, optimizer="sgd", **options):
    options = {"loss": cross_entropy(), "weighted_metrics": [], **options}
    model.compile(tfdp.dp_optimizer(optimizer, plan), **options)
    return model


def fit(model, plan, batches, folder, *, steps=1, callbacks=(), epochs=1, **options):
    callback = tfdp.PrivacyCallback(plan, folder / "ledger.jsonl", **options)
    callbacks = [callback, *callbacks]
    return model.fit(batches, steps_per_epoch=steps, epochs=epochs, callbacks=callbacks, verbose=0, shuffle=False)


def on_replicas(variable):
    return [each.numpy() for each in STRATEGY.experimental_local_results(variable.value)]


def assert_alike(model):
    """Bit by bit, on both replicas."""
    for variable in [*model.trainable_variables, *model.optimizer.variables]:
        one, other = on_replicas(variable)
        assert one.tobytes() == other.tobytes(), variable.path


def telling(shape, step, index):
    """Noise that differs for every value, variable and step."""
    return np.sin(np.arange(np.prod(shape, dtype=int)) + 10 * index + 100 * step).reshape(shape)


@pytest.fixture
def draws_are(monkeypatch):
    """Every sampler draws the given units one after the other, then none (the pipeline draws ahead)."""

    def replace(*draws):
        rest = {}

        def draw(self):
            _, mine = rest.setdefault(id(self), (self, iter(draws)))  # kept, so that no other gets its id
            return np.array(next(mine, []), np.int64)

        monkeypatch.setattr(PoissonSampler, "draw", draw)

    return replace


CASES = {
    "bookkeeping": {},
    "momentum, eager": {"optimizer": keras.optimizers.SGD(0.5, momentum=0.9, clipnorm=0.3), "run_eagerly": True},
    "adamw, compiled": {
        "optimizer": keras.optimizers.AdamW(0.1, weight_decay=0.1, use_ema=True),
        "jit_compile": True,
    },
    "vectorized": {"method": "vectorized"},
    "hybrid": {"hybrid": True},
}


class TestUpdate:
    @pytest.mark.parametrize("case", CASES)
    def test_is_that_of_one_device(self, plan_of, noise_is, draws_are, tmp_path, case):
        """The same draws and noise; weights, optimizer, loss and metrics after four steps in two epochs."""
        draws_are(*DRAWS)
        calls = noise_is(telling)
        plan = plan_of(microbatch=2, noise=1.5)
        options = {"optimizer": keras.optimizers.SGD(1.0), **CASES[case]}
        optimizer = options.pop("optimizer")
        eagerly = {"run_eagerly": options.pop("run_eagerly", False), "metrics": ["accuracy"]}

        def trained(folder):
            up = [keras.layers.Reshape((4, 1)), keras.layers.Conv1DTranspose(2, 1), keras.layers.Flatten()]
            model = network(*(up if "hybrid" in options else ()))
            compiled(model, plan, optimizer, **eagerly, weighted_metrics=[cross_entropy_metric()])
            history = fit(model, plan, tfdp.poisson_batches(records(), plan), folder, steps=2, epochs=2, **options)
            return model, history.history

        single, told = trained(tmp_path / "single")
        before, steps = single.get_weights(), list(calls)
        calls.clear()
        with STRATEGY.scope():
            model, history = trained(tmp_path / "replicas")
        assert calls == steps  # noise once a step for each variable, with one standard deviation
        assert {call[2] for call in calls} == {plan.noise_stddev}
        assert_alike(model)
        values = [np.asarray(v.numpy()) for v in (*model.variables, *model.optimizer.variables)]
        expected = [np.asarray(v.numpy()) for v in (*single.variables, *single.optimizer.variables)]
        assert len(before) == len(model.get_weights())
        for value, wanted in zip(values, expected, strict=True):
            np.testing.assert_allclose(value, wanted, rtol=2e-5, atol=2e-6)
        assert history.keys() == told.keys()
        for name, value in told.items():
            np.testing.assert_allclose(history[name], value, rtol=1e-5, err_msg=name)
        record = tfdp.read_ledger(tmp_path / "replicas" / "ledger.jsonl")
        assert record.steps == 4
        assert len(record.of_kind("step")) == 4
        assert [each["replicas"] for each in record.of_kind("fit_begin")] == [2]

    def test_of_a_task_of_kerashub_with_lora(self, plan_of, noise_is, draws_are, tmp_path):
        draws_are(*DRAWS)
        noise_is(telling)
        plan = plan_of(microbatch=2)
        tokens = np.random.default_rng(0).integers(0, 20, (UNITS, 7))
        data = {"token_ids": tokens[:, :-1], "padding_mask": np.ones((UNITS, 6), bool)}, tokens[:, 1:]

        def trained(folder):
            keras.utils.set_random_seed(2)
            backbone = keras_hub.models.GPT2Backbone(
                20, num_layers=1, num_heads=2, hidden_dim=8, intermediate_dim=8, dropout=0.0, max_sequence_length=6
            )
            backbone.enable_lora(2)
            model = compiled(keras_hub.models.GPT2CausalLM(backbone), plan, keras.optimizers.SGD(1.0))
            fit(model, plan, tfdp.poisson_batches(data, plan), folder, steps=4)
            return model

        single = trained(tmp_path / "single")
        with STRATEGY.scope():
            model = trained(tmp_path / "replicas")
        assert_alike(model)
        assert len(model.trainable_variables) < len(model.variables)
        for value, wanted in zip(model.variables, single.variables, strict=True):
            np.testing.assert_allclose(value.numpy(), wanted.numpy(), rtol=2e-5, atol=2e-6)


def cross_entropy_metric():
    return keras.metrics.SparseCategoricalCrossentropy(from_logits=True, name="entropy")


class TestNoise:
    @pytest.mark.parametrize("draw", ["nobody", "everybody"])
    def test_standard_deviation(self, plan_of, draws_are, tmp_path, draw):
        """Two-sided chi-square on 400 steps of 39 values: 4 per cent more or less would be seen. False alarms 1e-6."""
        draws_are(*([range(UNITS)] * 400 if draw == "everybody" else []))
        plan = plan_of(noise=2.0, clip=0.5, steps=400, microbatch=2)
        trail = []

        def keep(batch, logs):
            ones = [on_replicas(variable) for variable in model.trainable_variables]
            assert all(one.tobytes() == other.tobytes() for one, other in ones)
            trail.append(np.concatenate([one.ravel() for one, _ in ones]))

        x, y, weight = records()
        with STRATEGY.scope():
            model = keras.Sequential(
                [keras.Input((FEATURES,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(CLASSES)]
            )
            compiled(model, plan, keras.optimizers.SGD(1.0))
            # Their weight is 0, and with it the sum; the noise on nothing and on everybody is the same.
            batches = tfdp.poisson_batches((x, y, np.zeros_like(weight)), plan)
        trail.append(np.concatenate([np.ravel(each) for each in model.get_weights()]))
        fit(
            model,
            plan,
            batches,
            tmp_path,
            steps=400,
            callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=keep)],
        )
        changes = np.diff(np.array(trail, np.float64), axis=0) / (2.0 * 0.5 / 6)
        assert changes.shape == (400, 39)
        assert FALSE_ALARM / 2 < stats.chi2.cdf((changes**2).sum(), changes.size) < 1 - FALSE_ALARM / 2
        assert stats.kstest(changes.ravel(), "norm").pvalue > FALSE_ALARM
        assert len(tfdp.read_ledger(tmp_path / "ledger.jsonl").of_kind("step")) == 400


def test_dropout_masks_of_two_replicas_have_nothing_to_do_with_each_other(plan_of, noise_is, draws_are, tmp_path):
    """Two like units, one on each replica. Of 64 values some are dropped for one of them alone (else: 2^-64)."""
    draws_are([0, 1])
    noise_is(lambda shape, step, index: np.zeros(shape))
    plan = plan_of(microbatch=1, clip=1e3)
    with STRATEGY.scope():
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dropout(0.5), keras.layers.Dense(1, use_bias=False)])
        compiled(model, plan, keras.optimizers.SGD(1.0), loss=lambda y, y_pred: y_pred[:, 0])
        batches = tfdp.poisson_batches((np.ones((UNITS, 64), np.float32), np.zeros((UNITS, 1))), plan)
    before = model.get_weights()[0]
    between = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: model(np.ones((1, 64)), training=True)
    )
    fit(model, plan, batches, tmp_path, callbacks=[between])
    kept = (before - model.get_weights()[0]).ravel() * 6 / 2  # each unit brings 2 where it was kept
    np.testing.assert_allclose(kept, np.rint(kept), atol=1e-4)
    assert set(np.rint(kept)) == {0, 1, 2}


def test_units_of_several_records(noise_is, draws_are, tmp_path, user_plan):
    draws_are([0, 2, 3], [], [1])
    noise_is(telling)
    ids = [index % 5 for index in range(UNITS)]

    def trained(folder):
        model = compiled(network(), user_plan, keras.optimizers.SGD(1.0))
        batches = tfdp.poisson_batches(records(), user_plan, unit_ids=ids, scores=np.arange(UNITS))
        fit(model, user_plan, batches, folder, steps=3)
        return model.get_weights()

    single = trained(tmp_path / "single")
    with STRATEGY.scope():
        weights = trained(tmp_path / "replicas")
    for value, wanted in zip(weights, single, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=2e-5, atol=2e-6)


@pytest.fixture
def user_plan():
    text = """
        schema_version: "1.0"
        claim:
          epsilon: 1.0e+9
          delta: 1.0e-3
          adjacency: add_or_remove_one
          privacy_unit:
            {kind: user, description: one writer, id_field: writer, max_records_per_unit: 3, method: user_wise_dp_sgd,
             selection: longest}
          data_accesses: [training]
        data: {num_units: 5, size_is_public: true, deduplication: exact}
        mechanism: {clip_norm: 0.7, noise_multiplier: 1.0}
        sampling: {expected_batch_size: 2, steps: 5, scheme: poisson, microbatch_size: 1}
        accountant: {name: rdp}
    """
    return tfdp.make_plan(tfdp.PrivacySpec.from_text(text))


def test_a_run_goes_on_from_its_checkpoint_and_stops_at_the_budget(plan_of, tmp_path, monkeypatch):
    from tfdp.resume import run

    plan = plan_of(steps=4, microbatch=2)

    def begun():
        with STRATEGY.scope():
            return compiled(network(), plan, "adam"), tfdp.poisson_batches(records(), plan)

    model, batches = begun()
    stop = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: 1 / (batch - 2))
    with pytest.raises(ZeroDivisionError):
        fit(model, plan, batches, tmp_path, steps=4, checkpoint=tmp_path, save_freq=2, callbacks=[stop])
    left = tfdp.read_ledger(tmp_path / "ledger.jsonl")
    assert left.steps == 3
    for name in ("_positions", "_ended_fits"):  # as in a new process
        monkeypatch.setattr(run, name, {})
    again, batches = begun()
    trail = []
    watch = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: trail.append(int(again.optimizer.iterations.numpy()))
    )
    fit(again, plan, batches, tmp_path, steps=4, checkpoint=tmp_path, save_freq=2, callbacks=[watch])
    assert trail == [2]  # the third step is spent; the fourth is the last
    assert_alike(again)
    assert tfdp.read_ledger(tmp_path / "ledger.jsonl").steps == 4
    with pytest.raises(BudgetExhaustedError):
        fit(again, plan, batches, tmp_path)
    again.save(tmp_path / "model.keras")
    saved = keras.saving.load_model(tmp_path / "model.keras")
    assert tfdp.read_ledger(tmp_path / "ledger.jsonl").left(sha256_arrays(saved.get_weights()))


@pytest.mark.parametrize("options", [{}, {"method": "vectorized"}, {"run_eagerly": True}])
def test_a_clip_norm_that_follows_a_quantile(plan_of, noise_is, draws_are, tmp_path, monkeypatch, options):
    """Counts are added up over the replicas, and get their noise once a step: updates and ledger of a single device."""
    plan = plan_of(clip="{quantile: 0.5, initial: 0.8, learning_rate: 2.0, count_noise: 2.0}", noise=1.5, microbatch=2)
    options, counted = dict(options), []
    compiling = {"run_eagerly": True} if options.pop("run_eagerly", False) else {}

    def noisy_count(self, count, stddev, *, step):
        counted.append((step, count, stddev))
        return count + 0.25 * step

    monkeypatch.setattr(GaussianNoise, "noisy_count", noisy_count)

    def trained(folder):
        draws_are(*DRAWS)
        noise_is(lambda shape, step, index: telling(shape, step, index))
        model = compiled(network(), plan, keras.optimizers.SGD(1.0), **compiling)
        fit(model, plan, tfdp.poisson_batches(records(), plan), folder, steps=4, **options)
        return model

    single = trained(tmp_path / "single").get_weights()
    alone = counted.copy()
    assert [step for step, _, _ in alone] == [1, 2, 3, 4]
    assert -6 < alone[3][1] < 6  # some above, some below
    counted.clear()
    with STRATEGY.scope():
        model = trained(tmp_path / "replicas")
    assert_alike(model)
    assert counted == alone
    for value, wanted in zip(model.get_weights(), single, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=2e-5, atol=2e-6)
    one, other = (tfdp.read_ledger(tmp_path / name / "ledger.jsonl") for name in ("single", "replicas"))
    assert len(set(other.clip_norms)) > 2
    np.testing.assert_allclose(other.clip_norms, one.clip_norms, rtol=1e-6)


class TestRefusals:
    """Each before the first update, whatever was made where."""

    def refused(self, model, plan, batches, folder, match, error=MisuseError):
        before = model.get_weights()
        with pytest.raises(error, match=match):
            fit(model, plan, batches, folder)
        assert all((one == other).all() for one, other in zip(before, model.get_weights(), strict=True))

    def test_something_made_outside_of_the_scope(self, plan_of, tmp_path):
        plan = plan_of(microbatch=2)
        with STRATEGY.scope():
            inside, optimizer = compiled(network(), plan), tfdp.dp_optimizer("sgd", plan)
            batches = tfdp.poisson_batches(records(), plan)
        outside, whole = compiled(network(), plan), tfdp.poisson_batches(records(), plan)
        self.refused(inside, plan, whole, tmp_path, "within strategy.scope")
        self.refused(outside, plan, batches, tmp_path, "batches made within a scope and a model made outside")
        with STRATEGY.scope():
            self.refused(outside, plan, whole, tmp_path, "within strategy.scope")
            self.refused(outside, plan, batches, tmp_path, "Expected the model to be made within")
        by_hand = STRATEGY.distribute_datasets_from_function(lambda context: whole)
        self.refused(inside, plan, by_hand, tmp_path, "batches of poisson_batches|made within the scope")
        inside.compile(optimizer, cross_entropy(), metrics=["accuracy"])
        self.refused(inside, plan, batches, tmp_path, "Expected the metrics to be made within")
        optimizer = tfdp.dp_optimizer("sgd", plan)
        with STRATEGY.scope():
            inside.compile(optimizer, cross_entropy())
        self.refused(inside, plan, batches, tmp_path, "Expected DPSGD to be made within")
        with STRATEGY.scope():
            compiled(inside, plan)
        inside.layers[0].enable_lora(2)
        self.refused(inside, plan, batches, tmp_path, "Expected the model to be made within")
        assert tfdp.read_ledger(tmp_path / "ledger.jsonl").steps <= 2  # recorded, and then not run

    def test_batches_that_are_not_private_or_not_for_training(self, plan_of, tmp_path):
        plan = plan_of(microbatch=2)
        with STRATEGY.scope():
            model, batches = compiled(network(), plan), tfdp.poisson_batches(records(), plan)
        data = tf.data.Dataset.from_tensor_slices(records()).batch(4).repeat()
        self.refused(model, plan, data, tmp_path, "did not come from it")
        fitting = {"steps_per_epoch": 1, "shuffle": False}
        for use, options in ((model.fit, fitting), (model.evaluate, {"steps": 1}), (model.predict, {"steps": 1})):
            with pytest.raises(MisuseError, match="as the input of a model"):
                use(batches, verbose=0, **options)
        with pytest.raises(MisuseError, match="as they are"):
            batches.shuffle(2)

    @pytest.mark.parametrize(
        "other",
        [
            lambda: tf.distribute.OneDeviceStrategy("CPU:0"),
            lambda: tf.distribute.MultiWorkerMirroredStrategy(),
            lambda: tf.distribute.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"]),
        ],
    )
    def test_other_strategies(self, plan_of, tmp_path, other):
        plan, strategy = plan_of(microbatch=2), other()
        with strategy.scope():
            for make in (lambda: tfdp.dp_optimizer("sgd", plan), lambda: tfdp.poisson_batches(records(), plan)):
                with pytest.raises(MisuseError, match=r"or a MirroredStrategy\. Received: .* Only with all replicas"):
                    make()
            model = network()
        with pytest.raises(MisuseError):
            fit(compiled(model, plan), plan, tfdp.poisson_batches(records(), plan), tmp_path)
        with STRATEGY.scope():
            batches = tfdp.poisson_batches(records(), plan)
        with pytest.raises(MisuseError):
            fit(compiled(model, plan), plan, batches, tmp_path)

    def test_random_numbers_that_keras_would_draw_alike_on_all_replicas(self, plan_of, tmp_path):
        plan = plan_of(microbatch=2)

        class Unseeded(keras.layers.Layer):
            def call(self, inputs):
                return inputs + keras.random.normal(keras.ops.shape(inputs))

        with STRATEGY.scope():
            model, batches = compiled(network(Unseeded()), plan), tfdp.poisson_batches(records(), plan)
        self.refused(model, plan, batches, tmp_path, "SeedGenerator of its own", UnsupportedLayerError)
