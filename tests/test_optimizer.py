"""DP optimizers: every one that Keras ships, exact updates, saving, and no way in for raw gradients."""

from __future__ import annotations

import inspect
import subprocess
import sys
import textwrap

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tfdp.errors import MisuseError
from tfdp.optimizer import NoisyGradients, PrivateUpdates

# Keras saves with numpy 1's protocol for arrays; numpy 2 warns.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

NAMES = sorted(
    name
    for name, each in inspect.getmembers(keras.optimizers, inspect.isclass)
    if issubclass(each, keras.optimizers.Optimizer)
    and name not in ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")
)
GRADIENTS = [[[0.5, -2.0], [1.0, 0.1], [0.0, 3.0]], [-0.25, 1e-3]]


def variables():
    return [
        keras.Variable(np.arange(6, dtype=np.float32).reshape(3, 2) / 7, name="kernel"),
        keras.Variable([0.3, -0.4], name="bias"),
    ]


def noisy(plan, weights, scale=1.0):
    gradients = [tf.constant(each) * scale for each in GRADIENTS]
    return NoisyGradients(gradients, weights, plan.digest)


def dense_model(optimizer):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dense(1)])
    model.compile(optimizer, loss="mse")
    return model


def updated(model, plan, times=2):
    """`model` after some private updates by its optimizer."""
    for _ in range(times):
        gradients = [tf.ones(v.shape) for v in model.trainable_variables]
        model.optimizer.apply_private(NoisyGradients(gradients, model.trainable_variables, plan.digest))
    return model


@pytest.fixture
def plan(plan_of):
    return plan_of()


class TestEveryOptimizer:
    def test_the_list_is_that_of_keras(self):
        assert {"SGD", "Adam", "AdamW", "Adafactor", "Lion", "Muon", "Nadam", "RMSprop"} <= set(NAMES)

    @pytest.mark.parametrize("name", NAMES)
    def test_by_name_class_and_instance(self, plan, name):
        base = getattr(keras.optimizers, name)
        for made in (
            tfdp.dp_optimizer(name.lower(), plan, learning_rate=0.25),
            tfdp.dp_optimizer(name, plan, learning_rate=0.25),
            tfdp.dp_optimizer(base, plan, learning_rate=0.25),
            tfdp.dp_optimizer(base(learning_rate=0.25), plan),
        ):
            assert isinstance(made, base)
            assert isinstance(made, PrivateUpdates)
            assert type(made).__name__ == f"DP{name}"
            assert float(made.learning_rate) == 0.25
            assert made.plan_digest == plan.digest

    @pytest.mark.parametrize("name", NAMES)
    def test_is_of_the_class_that_tensorflow_privacy_makes(self, plan, name):
        made = tfdp.dp_optimizer(name, plan)
        factories = [each for each in type(made).__mro__ if each.__module__.startswith("tensorflow_privacy.")]
        assert [each.__name__ for each in factories] == ["DPOptimizerClass"]

    @pytest.mark.parametrize("name", NAMES)
    def test_update_is_that_of_the_keras_optimizer(self, plan, name):
        """Three updates with changing gradients, weight decay and a schedule where there is one."""
        options = {"learning_rate": keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5), "weight_decay": 0.01}
        private, plain = tfdp.dp_optimizer(name, plan, **options), getattr(keras.optimizers, name)(**options)
        ours, theirs = variables(), variables()
        for step in range(3):
            private.apply_private(noisy(plan, ours, 1.0 + step))
            plain.apply([tf.constant(each) * (1.0 + step) for each in GRADIENTS], theirs)
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(one.numpy(), other.numpy())
        assert not np.allclose(ours[0], variables()[0])
        assert int(private.iterations) == 3

    @pytest.mark.parametrize("clipping", [{"clipnorm": 0.1}, {"global_clipnorm": 0.2}, {"clipvalue": 0.01}])
    def test_clipping_of_the_noisy_gradient_is_passed_on(self, plan, clipping):
        private = tfdp.dp_optimizer("sgd", plan, learning_rate=1.0, **clipping)
        plain = keras.optimizers.SGD(1.0, **clipping)
        ours, theirs = variables(), variables()
        private.apply_private(noisy(plan, ours))
        plain.apply([tf.constant(each) for each in GRADIENTS], theirs)
        np.testing.assert_array_equal(ours[0].numpy(), theirs[0].numpy())
        assert np.abs(ours[0].numpy() - variables()[0].numpy()).max() <= 0.2

    def test_several_optimizers_for_parts_of_a_model(self, plan):
        """MultiOptimizer hands each variable to another optimizer; the DP class around it lets in the same only."""
        inner = keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.5), {"kernel": keras.optimizers.SGD(2.0)})
        made = tfdp.dp_optimizer(keras.optimizers.MultiOptimizer, plan, optimizer_map=inner)
        weights = variables()
        made.apply_private(noisy(plan, weights))
        np.testing.assert_allclose(weights[0], variables()[0] - 2.0 * np.array(GRADIENTS[0]), rtol=1e-6)
        np.testing.assert_allclose(weights[1], variables()[1] - 0.5 * np.array(GRADIENTS[1]), rtol=1e-6)
        with pytest.raises(MisuseError, match="not private"):
            made.apply([tf.constant(each) for each in GRADIENTS], weights)


class TestRefusals:
    def test_raw_gradients_by_every_door(self, plan):
        made, weights = tfdp.dp_optimizer("adam", plan), variables()
        made.build(weights)
        raw = [tf.constant(each) for each in GRADIENTS]
        doors = [
            lambda: made.apply(raw, weights),
            lambda: made.apply(raw),
            lambda: made.apply_gradients(zip(raw, weights, strict=True)),
            lambda: made.stateless_apply([v.value for v in made.variables], raw, [v.value for v in weights]),
            lambda: made.get_gradients(raw, weights),
            lambda: made._compute_gradients(lambda: tf.reduce_sum(weights[0].value), weights),
        ]
        for _ in range(2):  # also after a private update: no flag stays up
            before = [v.numpy() for v in weights]
            for door in doors:
                with pytest.raises(MisuseError, match=r"PrivacyCallback\(plan, ledger=\.\.\.\)"):
                    door()
            for v, old in zip(weights, before, strict=True):
                np.testing.assert_array_equal(v.numpy(), old)
            made.apply_private(noisy(plan, weights))

    def test_raw_gradients_in_keras_loops(self, plan):
        model = dense_model(tfdp.dp_optimizer("adam", plan))
        before = model.get_weights()
        x, y = np.ones((4, 3), np.float32), np.ones((4, 1), np.float32)
        for train in (lambda: model.train_on_batch(x, y), lambda: model.fit(x, y, verbose=0)):
            with pytest.raises(MisuseError, match="Received: a call of DPAdam"):
                train()
        for now, then in zip(model.get_weights(), before, strict=True):
            np.testing.assert_array_equal(now, then)

    def test_gradients_of_another_plan(self, plan, plan_of):
        made, weights = tfdp.dp_optimizer("sgd", plan), variables()
        with pytest.raises(MisuseError, match="Use one plan"):
            made.apply_private(noisy(plan_of(noise=2.0), weights))
        with pytest.raises(MisuseError, match="Received: list"):
            made.apply_private([tf.constant(each) for each in GRADIENTS])
        np.testing.assert_array_equal(weights[0].numpy(), variables()[0].numpy())

    @pytest.mark.parametrize("option", [{"gradient_accumulation_steps": 2}, {"loss_scale_factor": 128.0}])
    def test_accumulation_and_loss_scaling(self, plan, option):
        with pytest.raises(MisuseError, match=f"Expected no {next(iter(option))}"):
            tfdp.dp_optimizer("sgd", plan, **option)
        with pytest.raises(MisuseError, match=f"Expected no {next(iter(option))}"):
            tfdp.dp_optimizer(keras.optimizers.SGD(**option), plan)

    @pytest.mark.parametrize("option", ["num_microbatches", "l2_norm_clip", "noise_multiplier", "plan_digest"])
    def test_what_the_plan_decides(self, plan, option):
        """TensorFlow Privacy's arguments: one of them would be dropped without a word."""
        with pytest.raises(MisuseError, match=f"Received: {option}"):
            tfdp.dp_optimizer("sgd", plan, **{option: 3})

    def test_foreign_optimizers(self, plan):
        class Mine(keras.optimizers.SGD):
            pass

        for foreign in (Mine, Mine(), keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), dict, 3, None):
            with pytest.raises(MisuseError, match="Expected an optimizer that Keras ships"):
                tfdp.dp_optimizer(foreign, plan)
        with pytest.raises(MisuseError, match=r"LossScaleOptimizer.*pass the optimizer inside it"):
            tfdp.dp_optimizer(keras.optimizers.LossScaleOptimizer, plan)
        with pytest.raises(MisuseError, match="Received: DPSGD"):
            tfdp.dp_optimizer(tfdp.dp_optimizer("sgd", plan), plan)
        with pytest.raises(MisuseError, match=r"Expected one of .*'adam'.*optimizer='adma'"):
            tfdp.dp_optimizer("adma", plan)

    def test_not_a_plan(self, plan):
        with pytest.raises(MisuseError, match=r"Expected a plan from tfdp.make_plan. Received: dict"):
            tfdp.dp_optimizer("sgd", plan.to_dict())

    def test_another_backend(self, plan, monkeypatch):
        """Keras fails in fit on these batches before it asks a callback, with words that lead nowhere."""
        monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
        with pytest.raises(MisuseError, match=r"TensorFlow backend. Received: jax. Set KERAS_BACKEND=tensorflow"):
            tfdp.dp_optimizer("sgd", plan)

    def test_an_instance_with_options_or_a_past(self, plan):
        with pytest.raises(MisuseError, match=r"Received: \['learning_rate'\]"):
            tfdp.dp_optimizer(keras.optimizers.SGD(), plan, learning_rate=1.0)
        used = keras.optimizers.SGD()
        used.apply([tf.constant(each) for each in GRADIENTS], variables())
        with pytest.raises(MisuseError, match="has taken 1 steps"):
            tfdp.dp_optimizer(used, plan)

    def test_unknown_options_are_those_of_keras(self, plan):
        with pytest.raises((TypeError, ValueError), match="momentun"):
            tfdp.dp_optimizer("sgd", plan, momentun=0.9)


class TestSaving:
    @pytest.mark.parametrize("name", NAMES)
    def test_round_trip_keeps_class_options_and_state(self, plan, name, tmp_path):
        schedule = keras.optimizers.schedules.CosineDecay(0.1, 10)
        model = updated(dense_model(tfdp.dp_optimizer(name, plan, learning_rate=schedule, weight_decay=0.01)), plan)
        model.save(tmp_path / "model.keras")
        loaded = keras.saving.load_model(tmp_path / "model.keras")
        assert type(loaded.optimizer) is type(model.optimizer)
        assert loaded.optimizer.get_config() == model.optimizer.get_config()
        assert loaded.optimizer.plan_digest == plan.digest
        assert int(loaded.optimizer.iterations) == 2
        for one, other in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
            np.testing.assert_array_equal(one.numpy(), other.numpy())
        updated(loaded, plan, 1)
        updated(model, plan, 1)
        for one, other in zip(loaded.get_weights(), model.get_weights(), strict=True):
            np.testing.assert_array_equal(one, other)
        with pytest.raises(MisuseError):
            loaded.optimizer.apply([tf.ones(v.shape) for v in loaded.trainable_variables], loaded.trainable_variables)

    def test_round_trip_of_several_optimizers(self, plan, tmp_path):
        inner = keras.optimizers.OptimizerMap(keras.optimizers.Adam(0.5), {".*kernel": keras.optimizers.Lion(2.0)})
        model = updated(dense_model(tfdp.dp_optimizer(keras.optimizers.MultiOptimizer(inner), plan)), plan)
        model.save(tmp_path / "model.keras")
        loaded = keras.saving.load_model(tmp_path / "model.keras")
        assert type(loaded.optimizer) is type(model.optimizer)
        assert loaded.optimizer.plan_digest == plan.digest
        for one, other in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
            np.testing.assert_array_equal(one.numpy(), other.numpy())

    def test_config_says_what_the_noise_was(self, plan_of):
        config = tfdp.dp_optimizer("sgd", plan_of(noise=2.0, clip=0.5)).get_config()
        assert (config["l2_norm_clip"], config["noise_multiplier"]) == (0.5, 2.0)

    def test_in_a_new_process(self, plan, tmp_path):
        """Neither a silent plain optimizer, nor one that takes raw gradients."""
        model = updated(dense_model(tfdp.dp_optimizer("adam", plan, learning_rate=0.125)), plan)
        model.save(tmp_path / "model.keras")
        script = f"""
            from tfdp import dp_optimizer
            import keras, numpy as np
            model = keras.saving.load_model({str(tmp_path / "model.keras")!r})
            print(type(model.optimizer).__name__, model.optimizer.plan_digest, int(model.optimizer.iterations))
            print(float(model.optimizer.learning_rate), float(np.asarray(model.optimizer.variables[2]).sum()))
            try:
                model.train_on_batch(np.ones((4, 3)), np.ones((4, 1)))
            except Exception as error:
                print(type(error).__name__)
        """
        ran = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True, timeout=120
        )
        moment = float(np.asarray(model.optimizer.variables[2]).sum())
        lines = ran.stdout.splitlines()
        assert lines[0] == f"DPAdam {plan.digest} 2"
        assert [float(each) for each in lines[1].split()] == pytest.approx([0.125, moment])
        assert lines[2] == "MisuseError"
