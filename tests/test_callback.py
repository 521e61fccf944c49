"""PrivacyCallback in `fit`: what it leaves behind, what it reports, where it stops, and what it refuses."""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
import weakref

import keras
import keras_hub
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tfdp.errors import BudgetExhaustedError, LedgerError, LossNotPerUnitError, MisuseError, UnsupportedLayerError
from tfdp.files import sha256_arrays
from tfdp.gradients import exact_products
from tfdp.noise import GaussianNoise
from tfdp.sampling.batches import poisson_batches

# Keras saves with numpy 1's protocol for arrays; numpy 2 warns.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

UNITS, FEATURES = 12, 5


def records(units=UNITS):
    generator = np.random.default_rng(0)
    return generator.normal(size=(units, FEATURES)).astype(np.float32), generator.integers(0, 3, units)


def network(*extra, seed=1):
    keras.utils.set_random_seed(seed)
    hidden = keras.layers.Dense(4, activation="tanh", name="hidden")
    return keras.Sequential([keras.Input((FEATURES,)), hidden, *extra, keras.layers.Dense(3, name="last")])


def compiled(model, plan, **options):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(**{"optimizer": tfdp.dp_optimizer("sgd", plan, learning_rate=0.1), "loss": loss, **options})
    return model


def fit(model, plan, callbacks, *, data=None, **options):
    batches = poisson_batches(records(plan.num_units), plan) if data is None else data
    settings = {"epochs": 1, "steps_per_epoch": 1, "verbose": 0, "shuffle": False, **options}
    return model.fit(batches, callbacks=callbacks, **settings)


def plain_fit(model):
    """A fit without privacy, which has to work as if there had never been a private one."""
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    before = model.get_weights()
    model.fit(*records(), verbose=0)
    assert any((now != then).any() for now, then in zip(model.get_weights(), before, strict=True))


def assert_clean(model):
    """Nothing of a private fit is left on the model."""
    assert "train_step" not in vars(model)
    assert model.train_function is None


@pytest.fixture
def plan(plan_of):
    return plan_of(steps=4)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "ledger.jsonl"


class Interfering(keras.callbacks.Callback):
    """Does something at some point of the fit."""

    def __init__(self, point, action):
        super().__init__()
        setattr(self, point, lambda *args, **kwargs: action(self.model))


def failing(error):
    def act(model):
        raise error

    return act


class TestReports:
    def test_history_and_logs_carry_epsilon_of_the_steps_so_far(self, plan_of, path):
        plan, seen = plan_of(steps=4), []
        callback = tfdp.PrivacyCallback(plan, path)
        watch = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(logs["epsilon"]))
        model = compiled(network(), plan)
        history = fit(model, plan, [callback, watch], epochs=2, steps_per_epoch=2)
        assert seen == [plan.epsilon_bound(step) for step in (1, 2, 3, 4)]
        assert seen == sorted(seen)
        assert seen[0] > 0
        assert history.history["epsilon"] == [seen[1], seen[3]]
        assert callback.steps == 4
        assert callback.epsilon == plan.epsilon(4) == pytest.approx(seen[-1])
        assert callback.epsilon <= plan.target_epsilon

    def test_progress_bar_shows_the_current_value_not_an_average(self, plan, path, capsys):
        fit(compiled(network(), plan), plan, [tfdp.PrivacyCallback(plan, path)], steps_per_epoch=4, verbose=2)
        assert f"epsilon: {plan.epsilon_bound(4):.4f}" in capsys.readouterr().out
        again = path.with_name("other.jsonl")
        fit(compiled(network(), plan), plan, [tfdp.PrivacyCallback(plan, again)], steps_per_epoch=4, verbose=1)
        shown = capsys.readouterr().out.split("epsilon: ")[-1].split()[0]
        assert shown == f"{plan.epsilon_bound(4):.4f}"

    def test_validation_metrics_and_other_callbacks(self, plan_of, path, tmp_path):
        plan = plan_of(steps=6)
        model = compiled(network(), plan, metrics=["accuracy"], weighted_metrics=["sparse_categorical_crossentropy"])
        others = [
            keras.callbacks.EarlyStopping(monitor="val_loss", patience=10, restore_best_weights=True),
            keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.weights.h5", save_weights_only=True),
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2),
            keras.callbacks.CSVLogger(tmp_path / "log.csv"),
        ]
        x, y = records()
        held_out = (x[:8], y[:8])
        history = fit(
            model,
            plan,
            [tfdp.PrivacyCallback(plan, path), *others],
            epochs=3,
            steps_per_epoch=2,
            validation_data=held_out,
            initial_epoch=1,
        )
        names = {"loss", "accuracy", "sparse_categorical_crossentropy"}
        assert set(history.history) == names | {f"val_{name}" for name in names} | {"epsilon", "learning_rate"}
        assert history.epoch == [1, 2]
        expected = keras.losses.sparse_categorical_crossentropy(y[:8], model(x[:8]), from_logits=True).numpy().mean()
        assert min(history.history["val_loss"]) == pytest.approx(expected, rel=1e-5)
        assert sorted(each.name for each in tmp_path.glob("*.h5")) == ["2.weights.h5", "3.weights.h5"]
        assert "epsilon" in (tmp_path / "log.csv").read_text().splitlines()[0]
        assert tfdp.read_ledger(path).steps == 4


class TestLedger:
    def test_a_second_fit_continues_and_nothing_is_repeated(self, plan, path, monkeypatch):
        """Steps, noise numbers and draws go on, with the same callback and with another one."""
        noisy_means, noise_steps = GaussianNoise.noisy_means, []

        def recorded(self, sums, stddev, denominator, *, step, **room):
            noise_steps.append(step)
            return noisy_means(self, sums, stddev, denominator, step=step, **room)

        monkeypatch.setattr(GaussianNoise, "noisy_means", recorded)
        model, callback = compiled(network(), plan), tfdp.PrivacyCallback(plan, path)
        fit(model, plan, [callback])
        assert callback.steps == 1
        fit(model, plan, [callback])
        second = tfdp.PrivacyCallback(plan, path)
        assert second.steps == 0
        history = fit(model, plan, [second], steps_per_epoch=2)
        assert second.steps == 4
        assert history.history["epsilon"] == [plan.epsilon_bound(4)]
        assert noise_steps == [1, 2, 3, 4]
        record = tfdp.read_ledger(path)
        assert [each["steps_before"] for each in record.of_kind("fit_begin")] == [0, 1, 2]
        assert [each["steps"] for each in record.of_kind("fit_end")] == [1, 2, 4]

    def test_stops_exactly_at_the_plan_and_then_refuses(self, plan, path):
        model, callback = compiled(network(), plan), tfdp.PrivacyCallback(plan, path)
        history = fit(model, plan, [callback], epochs=10, steps_per_epoch=3)
        assert callback.steps == tfdp.read_ledger(path).steps == 4
        assert int(model.optimizer.iterations) == 4
        assert history.epoch == [0, 1]
        before = model.get_weights()
        with pytest.raises(BudgetExhaustedError, match="4 of 4 steps"):
            fit(model, plan, [callback])
        with pytest.raises(BudgetExhaustedError, match="new, reviewed spec"):
            fit(compiled(network(), plan), plan, [tfdp.PrivacyCallback(plan, path)])
        assert_same(model, before)
        assert_clean(model)
        assert tfdp.read_ledger(path).steps == 4

    def test_without_steps_per_epoch_the_budget_ends_the_fit(self, plan, path):
        model, callback = compiled(network(), plan), tfdp.PrivacyCallback(plan, path)
        fit(model, plan, [callback], steps_per_epoch=None)
        assert callback.steps == int(model.optimizer.iterations) == 4

    def test_another_callback_cannot_lift_the_stop(self, plan, path):
        """It resets stop_training: the next step is refused before it runs, and the model is as after the last one."""
        lift = Interfering("on_train_batch_end", lambda model: setattr(model, "stop_training", False))
        model, callback = compiled(network(), plan), tfdp.PrivacyCallback(plan, path)
        with pytest.raises(BudgetExhaustedError):
            fit(model, plan, [callback, lift], steps_per_epoch=9)
        assert callback.steps == int(model.optimizer.iterations) == 4
        assert_clean(model)

    def test_data_that_ends_early_spends_a_step_but_does_not_end_the_ledger(self, plan, path):
        """A dataset of unknown length: Keras asks for a batch that is not there after the step was recorded."""
        batches = poisson_batches(records(), plan)
        kept = list(batches.take(1).as_numpy_iterator())
        short = tf.data.Dataset.from_generator(lambda: iter(kept), output_signature=batches.element_spec)
        model, callback = compiled(network(), plan), tfdp.PrivacyCallback(plan, path)
        with pytest.warns(UserWarning, match="ran out of data"):
            fit(model, plan, [callback], data=short, epochs=1, steps_per_epoch=3)
        assert int(model.optimizer.iterations) == 1
        assert tfdp.read_ledger(path).steps == 2
        assert_clean(model)
        fit(model, plan, [callback])
        assert tfdp.read_ledger(path).steps == 3

    def test_a_loaded_model_goes_on_under_its_plan_only(self, plan, plan_of, path, tmp_path):
        model = compiled(network(), plan)
        fit(model, plan, [tfdp.PrivacyCallback(plan, path)])
        model.save(tmp_path / "model.keras")
        loaded = keras.saving.load_model(tmp_path / "model.keras")
        fit(loaded, plan, [tfdp.PrivacyCallback(plan, path)], steps_per_epoch=2)
        assert int(loaded.optimizer.iterations) == tfdp.read_ledger(path).steps == 3
        other = plan_of(steps=5)
        with pytest.raises(MisuseError, match="Expected one plan for optimizer and callback"):
            fit(loaded, other, [tfdp.PrivacyCallback(other, tmp_path / "other.jsonl")])
        with pytest.raises(MisuseError, match="not private"):
            loaded.train_on_batch(*records())


class TestWhatTheCardIsAbout:
    """The ledger says which weights it left, and no other ledger may take them over."""

    def test_weights_are_recorded_as_epochs_and_fits_end(self, plan_of, path):
        plan = plan_of(steps=4)
        model = compiled(network(), plan)
        fit(model, plan, [tfdp.PrivacyCallback(plan, path)], epochs=2, steps_per_epoch=2)
        record = tfdp.read_ledger(path)
        assert [entry["kind"] for entry in record.entries if "weights" in entry] == ["epoch_end"] * 2 + ["fit_end"]
        assert record.left(sha256_arrays(model.get_weights()))
        first, second, last = (entry["weights"] for entry in record.entries if "weights" in entry)
        assert first != second == last

    def test_an_interrupted_fit_records_them_too(self, plan, path):
        model = compiled(network(), plan)
        with pytest.raises(ArithmeticError):
            fit(
                model,
                plan,
                [tfdp.PrivacyCallback(plan, path), Interfering("on_train_batch_end", failing(ArithmeticError()))],
            )
        fit(model, plan, [tfdp.PrivacyCallback(plan, path)])
        assert "fit_interrupted" in [entry["kind"] for entry in tfdp.read_ledger(path).entries]

    @pytest.mark.parametrize("cheat", ["plain fit afterwards", "another model", "a weight changed by hand"])
    def test_other_weights_get_no_claim(self, plan, path, cheat):
        model = compiled(network(), plan)
        fit(model, plan, [tfdp.PrivacyCallback(plan, path)])
        if cheat == "plain fit afterwards":
            plain_fit(model)
        elif cheat == "another model":
            model = network(seed=2)
        else:
            model.trainable_variables[0].assign_add(keras.ops.full(model.trainable_variables[0].shape, 1e-7))
        tfdp.export(model, path.parent)
        card = json.loads((path.parent / "MODEL_CARD.json").read_text())
        assert card["claim"]["status"] == "not claimed"
        assert any("PS083" in reason for reason in card["claim"]["reasons"])

    def test_a_refused_fit_vouches_for_no_weights(self, plan_of, path):
        plan = plan_of(steps=1)
        fit(compiled(network(), plan), plan, [tfdp.PrivacyCallback(plan, path)])
        other = compiled(network(seed=2), plan)
        with pytest.raises(BudgetExhaustedError):
            fit(other, plan, [tfdp.PrivacyCallback(plan, path)])
        assert not tfdp.read_ledger(path).left(sha256_arrays(other.get_weights()))

    def test_a_second_ledger_is_refused(self, plan_of, path):
        plan = plan_of(steps=4)
        model = compiled(network(), plan)
        fit(model, plan, [tfdp.PrivacyCallback(plan, path)])
        weights = model.get_weights()
        other = path.with_name("other.jsonl")
        with pytest.raises(MisuseError, match="1 steps in the optimizer, 0 on"):
            fit(model, plan, [tfdp.PrivacyCallback(plan, other)])
        compiled(model, plan)  # a new optimizer has forgotten its steps; the process has not
        with pytest.raises(MisuseError, match="trained under another ledger"):
            fit(model, plan, [tfdp.PrivacyCallback(plan, other)])
        path.unlink()
        with pytest.raises(MisuseError, match="trained under another ledger"):
            fit(model, plan, [tfdp.PrivacyCallback(plan, path)])
        assert_same(model, weights)


class TestLeavesNothingBehind:
    def test_after_a_fit(self, plan, path):
        model = compiled(network(), plan, jit_compile=True)
        fit(model, plan, [tfdp.PrivacyCallback(plan, path, jit_compile=False)])
        assert_clean(model)
        assert model.jit_compile is True
        with pytest.raises(MisuseError, match="not private"):
            model.train_on_batch(*records())
        plain_fit(model)

    @pytest.mark.parametrize(
        "point", ["on_train_begin", "on_epoch_begin", "on_train_batch_begin", "on_train_batch_end"]
    )
    def test_after_an_exception_in_another_callback(self, plan, path, point):
        """Keras tells no callback: the next fit takes over the ledger, on the same model and on a new one."""
        model = compiled(network(), plan)
        failed = tfdp.PrivacyCallback(plan, path)
        with pytest.raises(KeyError, match="mine"):
            fit(model, plan, [failed, Interfering(point, failing(KeyError("mine")))])
        spent = tfdp.read_ledger(path).steps
        assert spent == (point.startswith("on_train_batch"))
        other = compiled(network(), plan)
        fit(other, plan, [tfdp.PrivacyCallback(plan, path)])
        fit(model, plan, [tfdp.PrivacyCallback(plan, path)])
        assert tfdp.read_ledger(path).steps == spent + 2
        assert failed.steps == spent
        plain_fit(model)

    @pytest.mark.parametrize("before", [True, False])
    def test_matrix_products_are_exact_in_every_step(self, plan, path, before):
        """TensorFloat-32, on by default on GPUs, would take norms and sums to 1e-3 only. Nothing is left to restore."""
        enabled, enable = (
            tf.config.experimental.tensor_float_32_execution_enabled,
            tf.config.experimental.enable_tensor_float_32_execution,
        )
        assert enabled()
        enable(before)
        try:
            seen, model = {}, compiled(network(), plan, run_eagerly=True)

            def look(model):
                seen["between"] = enabled()
                raise ArithmeticError

            apply = model.optimizer.apply_private
            model.optimizer.apply_private = lambda noisy: (seen.update(inside=enabled()), apply(noisy))
            with pytest.raises(ArithmeticError):
                fit(model, plan, [tfdp.PrivacyCallback(plan, path), Interfering("on_train_batch_end", look)])
            assert seen == {"inside": False, "between": before}
            assert enabled() == before
        finally:
            enable(True)

    def test_exact_products_of_several_threads(self):
        """Whichever ends first: the setting comes back when the last one has ended, and to what the first one found."""
        enabled = tf.config.experimental.tensor_float_32_execution_enabled
        first, second = exact_products(), exact_products()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert not enabled()
        second.__exit__(None, None, None)
        assert enabled()

    def test_plain_training_right_after_an_exception(self, plan, path):
        model = compiled(network(), plan)
        with pytest.raises(KeyError):
            fit(model, plan, [tfdp.PrivacyCallback(plan, path), Interfering("on_epoch_begin", failing(KeyError()))])
        assert "train_step" not in vars(model)
        with pytest.raises(MisuseError):  # the train function of the dead fit
            model.fit(*records(), verbose=0)
        plain_fit(model)

    def test_a_forgotten_fit_frees_model_and_ledger(self, plan, path):
        """Nothing global keeps a model alive, and no open file is left."""
        model = compiled(network(), plan)
        with pytest.raises(KeyError):
            fit(model, plan, [tfdp.PrivacyCallback(plan, path), Interfering("on_epoch_begin", failing(KeyError()))])
        alive = weakref.ref(model)
        del model
        gc.collect()
        assert alive() is None
        tfdp.Ledger.create_or_open(path, plan.to_dict()).close()  # the lock is free

    def test_an_interrupt_between_recording_and_running(self, plan, path):
        """Ctrl-C after the step was recorded: it stays spent, and cannot be run later."""
        model, callback = compiled(network(), plan), tfdp.PrivacyCallback(plan, path)
        before = model.get_weights()
        stop = Interfering("on_train_batch_begin", failing(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            fit(model, plan, [callback, stop])
        assert_same(model, before)
        assert tfdp.read_ledger(path).steps == 1
        fit(model, plan, [callback])
        assert tfdp.read_ledger(path).steps == 2
        assert int(model.optimizer.iterations) == 1

    def test_an_interrupt_in_the_middle_of_a_fit(self, plan_of, path, control_c):
        """A real signal while steps run: every executed step is on the ledger, and the next fit goes on."""
        plan = plan_of(steps=5000)
        model = compiled(network(), plan)
        count = Interfering("on_train_batch_end", lambda model: None)
        steps = []

        def interrupt(model):
            steps.append(1)
            if len(steps) == 3:
                threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()

        count.on_train_batch_end = lambda *args, **kwargs: interrupt(model)
        with pytest.raises(KeyboardInterrupt):
            fit(model, plan, [tfdp.PrivacyCallback(plan, path), count], steps_per_epoch=5000)
        record = tfdp.read_ledger(path)
        assert not record.torn
        assert int(model.optimizer.iterations) <= record.steps <= int(model.optimizer.iterations) + 1
        fit(model, plan, [tfdp.PrivacyCallback(plan, path)])
        assert tfdp.read_ledger(path).steps == record.steps + 1

    @pytest.mark.parametrize("use", ["evaluate", "predict"])
    def test_evaluate_and_predict_leave_the_model_alone(self, plan, path, use):
        model = compiled(network(), plan)
        data = records() if use == "evaluate" else records()[:1]
        expected = getattr(model, use)(*data, verbose=0)
        found = getattr(model, use)(*data, verbose=0, callbacks=[tfdp.PrivacyCallback(plan, path)])
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        assert_clean(model)
        assert not path.exists()
        assert not model.optimizer.built
        plain_fit(model)

    def test_a_fit_in_a_thread(self, plan, path):
        model, errors = compiled(network(), plan), []

        def work():
            try:
                fit(model, plan, [tfdp.PrivacyCallback(plan, path)], steps_per_epoch=2)
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(60)
        assert not errors
        assert tfdp.read_ledger(path).steps == 2

    def test_a_train_step_put_on_the_model_by_somebody_else(self, plan, path):
        model = compiled(network(), plan)
        object.__setattr__(model, "train_step", model.train_step)
        with pytest.raises(MisuseError, match="Take it off"):
            fit(model, plan, [tfdp.PrivacyCallback(plan, path)])
        assert "train_step" in vars(model)
        assert not path.exists()


def assert_same(model, weights):
    for now, then in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(now, then)


class Centred(keras.layers.Layer):
    """Mixes units, without weights that a rule could refuse; `only_training`: not when asked in inference mode."""

    def __init__(self, only_training=False):
        super().__init__()
        self.only_training = only_training

    def call(self, x, training=False):
        return x - keras.ops.mean(x, 0, keepdims=True) if training or not self.only_training else x


class Remembering(keras.layers.Layer):
    """Keeps a moving average of what it sees: private data in a variable that no noise reaches."""

    def build(self, shape):
        self.average = self.add_weight(shape=shape[1:], trainable=False, initializer="zeros")

    def call(self, x):
        self.average.assign(0.9 * self.average + 0.1 * keras.ops.mean(x, 0))
        return x


class Shaking(keras.layers.Layer):
    """Random without a seed generator: nobody can tell what its output depends on."""

    def call(self, x):
        return x + tf.random.normal(tf.shape(x))


class Penalising(keras.layers.Layer):
    def call(self, x):
        self.add_loss(keras.ops.mean(x**2))
        return x


class Broadcasting(keras.layers.Layer):
    """A trainable layer whose input has no batch axis: its gradient is a sum over units already."""

    def __init__(self):
        super().__init__()
        self.inner = keras.layers.Dense(4)

    def build(self, shape):
        self.inner.build((1, 2))

    def call(self, x):
        return x + self.inner(keras.ops.ones((1, 2)))


class Scaling(keras.layers.Layer):
    """Trainable, and no rule knows it."""

    def build(self, shape):
        self.scale = self.add_weight(shape=shape[1:], initializer="ones")

    def call(self, x):
        return x * self.scale


class TestLaw7:
    """Every misuse is an error before the first update: weights stay bit-identical, and the model is clean after it."""

    def refused(self, error, match, model, plan, callbacks, *, data=None, **options):
        model_weights = [v.numpy() for v in model.variables]
        with pytest.raises(error, match=match) as caught:
            fit(model, plan, callbacks, data=data, **options)
        for v, old in zip(model.variables, model_weights, strict=True):
            np.testing.assert_array_equal(v.numpy(), old)
        if model.optimizer is not None:
            assert int(model.optimizer.iterations) == 0
        assert "train_step" not in vars(model)
        return caught.value

    # Parts that are missing or foreign.

    @pytest.mark.parametrize("weight_decay", [None, 0.1])
    def test_dp_optimizer_without_callback_on_ordinary_batches(self, plan, weight_decay):
        made = tfdp.dp_optimizer("adam", plan, weight_decay=weight_decay)
        model = compiled(network(), plan, optimizer=made)
        data = tf.data.Dataset.from_tensor_slices(records()).batch(4)
        self.refused(MisuseError, "PrivacyCallback", model, plan, [], data=data)

    @pytest.mark.parametrize("kind", ["sequential", "functional", "functional_dict", "subclass"])
    @pytest.mark.parametrize("eagerly", [False, True])
    def test_dp_optimizer_without_callback_on_private_batches(self, plan, kind, eagerly):
        x, y = records()
        if kind == "sequential":
            model = network()
        elif kind == "functional":
            inputs = keras.Input((FEATURES,))
            model = keras.Model(inputs, keras.layers.Dense(3)(inputs))
        elif kind == "functional_dict":
            inputs = {"a": keras.Input((FEATURES,), name="a"), "b": keras.Input((FEATURES,), name="b")}
            model = keras.Model(inputs, keras.layers.Dense(3)(inputs["a"] + inputs["b"]))
            x = {"a": x, "b": x}
        else:

            class Subclass(keras.Model):
                def __init__(self):
                    super().__init__()
                    self.last = keras.layers.Dense(3)

                def call(self, x):
                    return self.last(x["x"] if isinstance(x, dict) else x)

            model = Subclass()
            model(x)
        compiled(model, plan, run_eagerly=eagerly)
        batches = poisson_batches((x, y), plan)
        self.refused(MisuseError, r"callbacks=\[tfdp.PrivacyCallback", model, plan, [], data=batches)
        for use in (model.evaluate, model.predict):
            with pytest.raises(MisuseError, match="evaluate and predict on ordinary batches"):
                use(batches, steps=1, verbose=0)

    def test_callback_without_dp_optimizer(self, plan, path):
        model = compiled(network(), plan, optimizer="sgd")
        self.refused(MisuseError, "Received: optimizer SGD", model, plan, [tfdp.PrivacyCallback(plan, path)])
        assert not path.exists()
        plain_fit(model)

    def test_ordinary_batches(self, plan, path):
        model = compiled(network(), plan)
        for data in (
            tf.data.Dataset.from_tensor_slices(records()).batch(4),
            tf.data.Dataset.from_tensors({"tfdp": {"draw": 1, "plan": 1}, "x": records()[0], "unit_weight": [1.0]}),
        ):
            self.refused(MisuseError, "sample them with", model, plan, [tfdp.PrivacyCallback(plan, path)], data=data)
        plain_fit(model)

    def test_batches_of_another_plan(self, plan, plan_of, path):
        model = compiled(network(), plan)
        data = poisson_batches(records(), plan_of(steps=5))
        callback = tfdp.PrivacyCallback(plan, path)
        self.refused(MisuseError, "batches of another plan", model, plan, [callback], data=data)
        fit(model, plan, [callback])

    def test_another_plan_in_the_optimizer(self, plan, plan_of, path):
        model = compiled(network(), plan_of(noise=3.0))
        match = "Expected one plan for optimizer and callback"
        self.refused(MisuseError, match, model, plan, [tfdp.PrivacyCallback(plan, path)])

    def test_another_plan_in_the_ledger(self, plan, plan_of, path):
        tfdp.Ledger.create_or_open(path, plan_of(noise=3.0).to_dict()).close()
        model = compiled(network(), plan)
        self.refused(LedgerError, "noise_multiplier", model, plan, [tfdp.PrivacyCallback(plan, path)])

    def test_a_replayed_batch(self, plan, path):
        """A batch kept and offered again: in the same fit, the next, on another model. Weight decay waits as well."""
        kept = next(iter(poisson_batches(records(), plan)))
        forged = tf.data.Dataset.from_tensors(kept).repeat()
        decay = tfdp.dp_optimizer("adamw", plan, weight_decay=0.5, learning_rate=0.1)
        model, weights = compiled(network(), plan, optimizer=decay), []
        remember = Interfering("on_train_batch_end", lambda model: weights.append(model.get_weights()))
        with pytest.raises(MisuseError, match="Expected a fresh draw"):
            fit(model, plan, [tfdp.PrivacyCallback(plan, path), remember], data=forged, steps_per_epoch=3)
        assert len(weights) == 1  # the first use of a real draw is a step like any other
        assert int(model.optimizer.iterations) == 1
        for _ in range(2):
            with pytest.raises(MisuseError, match="Expected a fresh draw"):
                fit(model, plan, [tfdp.PrivacyCallback(plan, path)], data=forged)
            assert_same(model, weights[0])
        self.refused(
            MisuseError,
            "Expected a fresh draw",
            compiled(network(), plan),
            plan,
            [tfdp.PrivacyCallback(plan, path.with_name("other.jsonl"))],
            data=forged,
        )

    def test_a_replay_through_numpy(self, plan, path):
        batches = poisson_batches(records(), plan)
        kept = list(batches.take(2).as_numpy_iterator())
        forged = tf.data.Dataset.from_generator(lambda: iter(kept * 9), output_signature=batches.element_spec)
        model = compiled(network(), plan)
        with pytest.raises(MisuseError, match="Expected a fresh draw"):
            fit(model, plan, [tfdp.PrivacyCallback(plan, path)], data=forged, steps_per_epoch=4)
        assert int(model.optimizer.iterations) == 2

    # Models whose units cannot be kept apart.

    @pytest.mark.parametrize(
        ("layer", "error", "match"),
        [
            (keras.layers.BatchNormalization, UnsupportedLayerError, "PS043.*batch normalisation"),
            (
                lambda: keras.layers.Lambda(lambda x: x - keras.ops.mean(x, 0, keepdims=True)),
                UnsupportedLayerError,
                "output for one unit changes with another unit",
            ),
            (Centred, UnsupportedLayerError, "output for one unit changes with another unit"),
            (lambda: Centred(only_training=True), UnsupportedLayerError, "output for one unit changes with another"),
            (Remembering, UnsupportedLayerError, "moving average"),
            (Shaking, UnsupportedLayerError, "SeedGenerator"),
            (Penalising, UnsupportedLayerError, r"PS045.*penalising \(.*add_loss"),
            (lambda: keras.layers.Activation("relu", activity_regularizer="l2"), UnsupportedLayerError, "PS045"),
            (Scaling, UnsupportedLayerError, r"PS044.*scaling"),
            (Broadcasting, UnsupportedLayerError, "keep the batch as its leading axis"),
        ],
    )
    @pytest.mark.parametrize("method", ["bookkeeping"])
    def test_layers(self, plan, path, layer, error, match, method):
        keras.utils.clear_session(free_memory=False)
        model = compiled(network(layer()), plan)
        raised = self.refused(error, match, model, plan, [tfdp.PrivacyCallback(plan, path, method=method)])
        assert "Expected" in str(raised)
        assert_clean(model)

    @pytest.mark.parametrize("layer", [Centred, Remembering, Penalising, lambda: Centred(only_training=True)])
    def test_layers_by_the_vectorized_path(self, plan, path, layer):
        """It needs no gradient rules; units have to be kept apart all the same."""
        model = compiled(network(layer()), plan)
        callback = tfdp.PrivacyCallback(plan, path, method="vectorized")
        self.refused((UnsupportedLayerError, LossNotPerUnitError), "Expected", model, plan, [callback])

    def test_a_frozen_batch_normalisation_is_fine(self, plan, path):
        norm = keras.layers.BatchNormalization()
        norm.trainable = False
        model = compiled(network(norm), plan)
        fit(model, plan, [tfdp.PrivacyCallback(plan, path)])
        assert int(model.optimizer.iterations) == 1

    @pytest.mark.parametrize(
        "loss",
        [
            keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None),
            lambda y, p: tf.ensure_shape(tf.py_function(tf.reduce_mean, [p], tf.float32), []),
        ],
    )
    def test_a_loss_that_is_not_per_unit(self, plan, path, loss):
        model = compiled(network(), plan, loss=loss)
        self.refused(LossNotPerUnitError, "Expected a loss that", model, plan, [tfdp.PrivacyCallback(plan, path)])
        assert_clean(model)

    def test_a_model_with_a_train_step_of_its_own(self, plan, path):
        class Own(keras.Sequential):
            def train_step(self, data):
                return {"loss": 0.0}

        model = compiled(Own([keras.Input((FEATURES,)), keras.layers.Dense(3)]), plan)
        self.refused(LossNotPerUnitError, "overrides", model, plan, [tfdp.PrivacyCallback(plan, path)])

    def test_unbuilt_and_frozen_models(self, plan, path):
        callback = tfdp.PrivacyCallback(plan, path)
        unbuilt = compiled(keras.Sequential([keras.layers.Dense(3)]), plan)
        self.refused(UnsupportedLayerError, "PS046.*without weights", unbuilt, plan, [callback])
        frozen = network()
        frozen.trainable = False
        self.refused(UnsupportedLayerError, "PS046.*no trainable", compiled(frozen, plan), plan, [callback])
        assert not path.exists()

    def test_float16(self, plan, path):
        keras.config.set_dtype_policy("mixed_float16")
        try:
            model = compiled(network(), plan)
        finally:
            keras.config.set_dtype_policy("float32")
        callback = tfdp.PrivacyCallback(plan, path)
        self.refused(MisuseError, "LossScaleOptimizer.*mixed_bfloat16", model, plan, [callback])
        compiled(model, plan, auto_scale_loss=False)
        self.refused(UnsupportedLayerError, "PS046.*float16", model, plan, [callback])

    def test_a_preprocessor_that_is_attached(self, plan, path):
        model = tiny_gpt2(preprocessor=keras_hub.models.Preprocessor())
        compiled(model, plan)
        data = poisson_batches([[1, 2, 3, 4]] * UNITS, plan)
        callback = tfdp.PrivacyCallback(plan, path)
        self.refused(MisuseError, r"model\.preprocessor = None", model, plan, [callback], data=data)
        # A dataset whose map is not refused gets as far as the callback.
        bare = tf.data.Dataset.from_tensors(next(iter(data)))
        model.preprocess_samples = lambda x, y=None, sample_weight=None: x
        self.refused(MisuseError, r"set model\.preprocessor = None", model, plan, [callback], data=bare)

    # Ways to run that are not recorded step by step.

    def test_several_steps_an_execution(self, plan, path):
        model = compiled(network(), plan, steps_per_execution=2)
        self.refused(MisuseError, "steps_per_execution=1", model, plan, [tfdp.PrivacyCallback(plan, path)])

    def test_two_callbacks(self, plan, path):
        """Two ledgers, one, or the same callback twice: whichever would be believed, the other is wrong."""
        for second in (path.with_name("other.jsonl"), path):
            callbacks = [tfdp.PrivacyCallback(plan, path), tfdp.PrivacyCallback(plan, second)]
            model = compiled(network(), plan)
            self.refused(MisuseError, "Expected one PrivacyCallback", model, plan, callbacks)
            assert_clean(model)
        twice = tfdp.PrivacyCallback(plan, path)
        self.refused(MisuseError, "Expected one PrivacyCallback", compiled(network(), plan), plan, [twice, twice])
        assert not path.exists() or tfdp.read_ledger(path).steps == 0

    def test_a_step_that_no_fit_recorded(self, plan, path):
        """The installed step, used before the fit began or after it ended, runs nothing."""
        model, callback = compiled(network(), plan), tfdp.PrivacyCallback(plan, path)
        keras.callbacks.CallbackList([callback], model=model)  # installs the step, begins no fit
        with pytest.raises(MisuseError, match="outside of a private fit"):
            fit(model, plan, [])
        callback.on_predict_begin()
        kept = []
        fit(model, plan, [callback, Interfering("on_train_batch_end", lambda m: kept.append(m.train_function))])
        before = model.get_weights()
        with pytest.raises(MisuseError, match="outside of a private fit"):
            kept[0](iter(poisson_batches(records(), plan)))
        assert_same(model, before)
        assert tfdp.read_ledger(path).steps == 1

    def test_a_train_function_replaced_in_the_fit(self, plan, path):
        """By compile, by make_train_function, or at the last moment before the step."""
        for point, act in (
            ("on_epoch_begin", lambda model: compiled(model, plan, optimizer="sgd")),
            ("on_epoch_begin", lambda model: model.make_train_function(force=True)),
            ("on_epoch_begin", lambda model: setattr(model, "optimizer", keras.optimizers.SGD())),
        ):
            model, other = compiled(network(), plan), Interfering(point, act)
            self.refused(MisuseError, "Expected the", model, plan, [tfdp.PrivacyCallback(plan, path), other])
            assert_clean(model)
        silent = Interfering("on_train_batch_begin", lambda model: setattr(model, "train_function", lambda it: {}))
        model = compiled(network(), plan)
        self.refused(MisuseError, "Expected the recorded step", model, plan, [tfdp.PrivacyCallback(plan, path), silent])

    def test_layers_unfrozen_after_the_optimizer_was_built(self, plan, path):
        """The optimizer knows the variables that it was built for; another set is an error, not a silent part."""
        model = network()
        model.layers[0].trainable = False
        compiled(model, plan)
        fit(model, plan, [tfdp.PrivacyCallback(plan, path)])
        model.layers[0].trainable = True
        before = model.get_weights()
        with pytest.raises(MisuseError, match="frozen, unfrozen or given adapters"):
            fit(model, plan, [tfdp.PrivacyCallback(plan, path)])
        assert_same(model, before)
        compiled(model, plan)
        fit(model, plan, [tfdp.PrivacyCallback(plan, path)])
        assert any((a != b).any() for a, b in zip(model.layers[0].get_weights(), before[:2], strict=True))

    @pytest.mark.parametrize("inside", ["optimizer", "model", "fit"])
    def test_a_distribution_strategy(self, plan, path, inside):
        """One that is not supported; for MirroredStrategy see `test_replicas.py`."""
        strategy = tf.distribute.OneDeviceStrategy("CPU:0")
        if inside == "optimizer":
            with strategy.scope(), pytest.raises(MisuseError, match="Received: OneDeviceStrategy"):
                tfdp.dp_optimizer("sgd", plan)
            return
        callback = tfdp.PrivacyCallback(plan, path)
        if inside == "fit":
            model = compiled(network(), plan)
            with strategy.scope():
                self.refused(MisuseError, "strategy", model, plan, [callback])
            return
        with strategy.scope():
            model = network()
        self.refused(MisuseError, "within one tf.distribute scope", compiled(model, plan), plan, [callback])

    def test_layers_without_a_rule_have_to_be_allowed(self, plan, path):
        up = [keras.layers.Reshape((4, 1)), keras.layers.Conv1DTranspose(2, 1, name="up"), keras.layers.Flatten()]
        model = compiled(network(*up), plan)
        self.refused(UnsupportedLayerError, "'up'.*hybrid=True", model, plan, [tfdp.PrivacyCallback(plan, path)])
        before = model.get_weights()
        fit(model, plan, [tfdp.PrivacyCallback(plan, path, hybrid=True)])
        assert all((now != then).any() for now, then in zip(model.get_weights(), before, strict=True))
        fit(model, plan, [tfdp.PrivacyCallback(plan, path, method="vectorized")])
        begun = tfdp.read_ledger(path).of_kind("fit_begin")[-2:]
        assert [each["gradients"] for each in begun] == ["hybrid", "vectorized"]
        assert begun[0]["layers_without_rule"] == ["up (Conv1DTranspose)"]
        with pytest.raises(ValueError, match="needs no gradient rules"):
            tfdp.PrivacyCallback(plan, path, method="vectorized", hybrid=True)

    def test_arguments(self, plan, path):
        with pytest.raises(MisuseError, match=r"tfdp.make_plan. Received: dict"):
            tfdp.PrivacyCallback(plan.to_dict(), path)
        with pytest.raises(ValueError, match=r"\['bookkeeping', 'vectorized'\]"):
            tfdp.PrivacyCallback(plan, path, method="ghost")
        with pytest.raises(MisuseError, match="jit_compile"):
            tfdp.PrivacyCallback(plan, path, jit_compile="yes")


def tiny_gpt2(preprocessor=None, rank=0):
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=20, num_layers=1, num_heads=2, hidden_dim=8, intermediate_dim=16, max_sequence_length=8
    )
    model = keras_hub.models.GPT2CausalLM(backbone=backbone, preprocessor=preprocessor)
    if rank:
        backbone.enable_lora(rank)
    return model


def test_kerashub_gpt2_with_lora_from_bare_tokens(plan_of, path):
    """The main job in small: what should move moves, the rest is bit-identical, dropout and masks on."""
    plan = plan_of(steps=4, microbatch=4)
    keras.utils.set_random_seed(2)
    model = tiny_gpt2(rank=2)
    tokens = [list(np.random.default_rng(i).integers(1, 20, 3 + i % 6)) for i in range(UNITS)]
    model.compile(
        optimizer=tfdp.dp_optimizer("adamw", plan, learning_rate=0.01),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[],
        weighted_metrics=[keras.metrics.SparseCategoricalAccuracy()],
    )
    before = {v.path: v.numpy() for v in model.trainable_variables + model.non_trainable_variables}
    callback = tfdp.PrivacyCallback(plan, path)
    history = fit(
        model, plan, [callback], data=poisson_batches(tokens, plan, sequence_length=8), epochs=2, steps_per_epoch=2
    )
    assert callback.traces == 1
    assert set(history.history) == {"loss", "sparse_categorical_accuracy", "epsilon"}
    moved = {v.path for v in model.trainable_variables if (v.numpy() != before[v.path]).any()}
    assert moved == {v.path for v in model.trainable_variables}
    assert sum("lora" in name for name in moved) == 4
    for v in model.non_trainable_variables:
        if "seed_generator" not in v.path:
            np.testing.assert_array_equal(v.numpy(), before[v.path])
