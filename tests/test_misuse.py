"""Misuse by somebody who knows Keras well: each is an error before an update is made of it."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import threading

import keras
import numpy as np
import pytest

import tfdp
from tfdp import accounting
from tfdp.errors import LedgerError, MisuseError, PlanError, TfdpError
from tfdp.sampling.batches import poisson_batches

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

UNITS, FEATURES = 12, 5
X = np.random.default_rng(0).normal(size=(UNITS, FEATURES)).astype(np.float32)
Y = np.arange(UNITS) % 3


def network(plan, **options):
    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(4, name="hidden"), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(**{"optimizer": tfdp.dp_optimizer("sgd", plan, learning_rate=0.1), "loss": loss, **options})
    return model


def fit(model, plan, path, *callbacks, epochs=1, steps=1):
    private = tfdp.PrivacyCallback(plan, path)
    batches = poisson_batches((X, Y), plan)
    model.fit(batches, epochs=epochs, steps_per_epoch=steps, callbacks=[private, *callbacks], verbose=0, shuffle=False)
    return private


def at(point, action):
    callback = keras.callbacks.Callback()
    setattr(callback, point, lambda *args, **kwargs: action(callback.model))
    return callback


def plain_step(model, data):
    """A train step without privacy, as somebody may put it on a model."""
    model.trainable_variables[0].assign_add(keras.ops.ones_like(model.trainable_variables[0]))
    return {"loss": 0.0}


POINTS = ("on_train_begin", "on_epoch_begin", "on_train_batch_begin")


@pytest.fixture
def plan(plan_of):
    return plan_of(steps=6)


def refused(plan, path, action, *, point, match="Expected", eagerly=False, error=MisuseError):
    model = network(plan, run_eagerly=eagerly)
    before = model.get_weights()
    with pytest.raises(error, match=match):
        fit(model, plan, path, at(point, action))
    for one, other in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)
    return model


class TestInTheMiddleOfAFit:
    """Done by another callback, which runs after the private one."""

    @pytest.mark.parametrize("eagerly", [False, True])
    @pytest.mark.parametrize("point", POINTS)
    def test_another_optimizer(self, plan, tmp_path, point, eagerly):
        def swap(model):
            model.optimizer = keras.optimizers.SGD(0.1)

        refused(plan, tmp_path / "ledger", swap, point=point, eagerly=eagerly)

    @pytest.mark.parametrize("point", POINTS)
    def test_compile(self, plan, tmp_path, point):
        """Also with an optimizer that is as good: what was checked before the fit is not what would run."""
        for optimizer in ("sgd", tfdp.dp_optimizer("sgd", plan)):

            def compiled_again(model, optimizer=optimizer):
                model.compile(optimizer, model.loss)

            error = TypeError if point == "on_train_batch_begin" else MisuseError  # Keras finds no train function
            refused(plan, tmp_path / "ledger", compiled_again, point=point, error=error, match=None)

    @pytest.mark.parametrize("point", [*POINTS, "on_train_batch_end"])
    def test_train_on_batch(self, plan, tmp_path, point):
        model = network(plan)
        weights = []

        def train(model):
            weights.append(model.get_weights())
            model.train_on_batch(X, Y)

        with pytest.raises(MisuseError, match="Expected"):
            fit(model, plan, tmp_path / "ledger", at(point, train))
        for one, other in zip(model.get_weights(), weights[0], strict=True):
            np.testing.assert_array_equal(one, other)

    @pytest.mark.parametrize("eagerly", [False, True])
    @pytest.mark.parametrize("point", POINTS)
    def test_another_train_step_never_runs(self, plan, tmp_path, point, eagerly):
        """The private one was taken when the fit began: what is put there later is not asked for."""
        ran = []

        def replace(model):
            object.__setattr__(model, "train_step", lambda data: ran.append(1) or plain_step(model, data))

        model = network(plan, run_eagerly=eagerly)
        fit(model, plan, tmp_path / "ledger", at(point, replace), steps=2)
        assert not ran
        assert int(model.optimizer.iterations) == tfdp.read_ledger(tmp_path / "ledger").steps == 2

    @pytest.mark.parametrize("by", ["apply_gradients", "apply"])
    def test_gradients_by_hand(self, plan, tmp_path, by):
        def update(model):
            gradients = [keras.ops.ones(v.shape) for v in model.trainable_variables]
            if by == "apply":
                model.optimizer.apply(gradients, model.trainable_variables)
            else:
                model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        refused(plan, tmp_path / "ledger", update, point="on_epoch_begin", match="gradients that are not private")

    @pytest.mark.parametrize("change", ["freeze", "adapters"])
    @pytest.mark.parametrize("epoch", [0, 1])
    def test_what_is_trained(self, plan, tmp_path, change, epoch):
        model, epochs, kept = network(plan), [], []

        def act(model):
            epochs.append(1)
            if len(epochs) == epoch + 1:
                if change == "freeze":
                    model.layers[0].trainable = False
                else:
                    model.layers[0].enable_lora(2)
                kept.append(model.layers[1].get_weights())

        with pytest.raises(MisuseError, match="trainable variables that the private fit began with"):
            fit(model, plan, tmp_path / "ledger", at("on_epoch_begin", act), epochs=3)
        assert int(model.optimizer.iterations) == tfdp.read_ledger(tmp_path / "ledger").steps == epoch
        for one, other in zip(model.layers[1].get_weights(), kept[0], strict=True):
            np.testing.assert_array_equal(one, other)


class TestBetweenPlanAndFit:
    def test_layers_before_the_first_fit_are_free(self, plan, tmp_path):
        """Plan and optimizer say nothing about them: what is trainable when the fit begins is what is clipped."""
        model = network(plan)
        model.layers[0].enable_lora(2)
        model.layers[1].trainable = False
        fit(model, plan, tmp_path / "ledger")
        assert int(model.optimizer.iterations) == 1

    @pytest.mark.parametrize("change", ["unfreeze", "adapters"])
    def test_layers_after_the_optimizer_was_built(self, plan, tmp_path, change):
        model = network(plan)
        model.layers[0].trainable = change == "adapters"
        fit(model, plan, tmp_path / "ledger")
        if change == "adapters":
            model.layers[0].enable_lora(2)
        else:
            model.layers[0].trainable = True
        before = model.get_weights()
        with pytest.raises(MisuseError, match="frozen, unfrozen or given adapters"):
            fit(model, plan, tmp_path / "ledger")
        assert tfdp.read_ledger(tmp_path / "ledger").steps == 1
        for one, other in zip(model.get_weights(), before, strict=True):
            np.testing.assert_array_equal(one, other)

    def test_steps_per_execution_set_on_the_model(self, plan, tmp_path):
        model = network(plan)
        model.steps_per_execution = 4
        with pytest.raises(MisuseError, match="steps_per_execution=1"):
            fit(model, plan, tmp_path / "ledger")

    @pytest.mark.parametrize(
        ("field", "value"), [("noise_multiplier", 0.01), ("clip_norm", 9.0), ("steps", 99), ("delta", 1e-9)]
    )
    def test_a_plan_that_is_edited(self, plan_of, tmp_path, field, value):
        """Frozen; and whoever gets around that changes what batches and optimizer were made for."""
        plan = copy.deepcopy(plan_of(steps=7))
        with pytest.raises(AttributeError):
            setattr(plan, field, value)
        model = network(plan)
        batches = poisson_batches((X, Y), plan)
        object.__setattr__(plan, field, value)
        before = model.get_weights()
        callback = tfdp.PrivacyCallback(plan, tmp_path / "l")
        with pytest.raises((MisuseError, PlanError), match="Expected"):
            model.fit(batches, steps_per_epoch=1, callbacks=[callback], verbose=0, shuffle=False)
        for one, other in zip(model.get_weights(), before, strict=True):
            np.testing.assert_array_equal(one, other)
        assert not (tmp_path / "l").exists()

    def test_a_plan_with_less_noise_than_it_was_calibrated_to(self, plan_of, tmp_path):
        """Noise and event exchanged together contradict neither each other nor a spec that leaves the noise open."""
        spec = plan_of(steps=7).spec.to_dict()
        spec["mechanism"]["noise_multiplier"], spec["claim"]["epsilon"] = None, 3.0
        plan = tfdp.make_plan(tfdp.PrivacySpec.from_text(json.dumps(spec), format="json"))
        event = accounting.step_event(
            scheme="poisson", sampling_probability=0.5, noise_multiplier=0.4, num_units=plan.num_units
        )
        less = dataclasses.replace(plan, noise_multiplier=0.4, step_event=event)
        model = network(less)
        with pytest.raises(
            PlanError, match=r"Expected 7 steps to cost at most epsilon 3\. Received: .* 0\.4, which cost"
        ):
            fit(model, less, tmp_path / "ledger")
        assert not (tmp_path / "ledger").exists()


class TestCopies:
    @pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, pickle.dumps])
    def test_of_the_callback(self, plan, tmp_path, make):
        callback = tfdp.PrivacyCallback(plan, tmp_path / "ledger")
        with pytest.raises(MisuseError, match="both would count the same steps"):
            make(callback)

    def test_of_an_open_ledger(self, plan, tmp_path):
        """A copy has the same file and number, and a length that is wrong as soon as the other has written."""
        with tfdp.Ledger.create_or_open(tmp_path / "ledger", plan.to_dict()) as ledger:
            with pytest.raises(TypeError):
                pickle.dumps(ledger)
            other = copy.copy(ledger)
            ledger.append_step(1)
            with pytest.raises(LedgerError, match="another file or length"):
                other.append_step(1)


@pytest.mark.parametrize("shared", ["ledger", "model", "neither"])
def test_fits_in_threads(plan_of, tmp_path, shared):
    """Whichever of them is refused: every update is on a ledger, and no ledger has a number twice."""
    plan = plan_of(steps=40)
    models = [network(plan)] * 2 if shared == "model" else [network(plan), network(plan)]
    paths = [tmp_path / "ledger"] * 2 if shared == "ledger" else [tmp_path / "a", tmp_path / "b"]
    refusals, barrier = [], threading.Barrier(2)

    def work(model, path):
        barrier.wait()
        try:
            fit(model, plan, path, steps=15)
        except (TfdpError, TypeError) as error:  # TypeError: Keras finds the train function taken away
            refusals.append(error)

    threads = [threading.Thread(target=work, args=each) for each in zip(models, paths, strict=True)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    steps = [tfdp.read_ledger(path).steps if path.exists() else 0 for path in dict.fromkeys(paths)]
    assert sum(int(model.optimizer.iterations) for model in dict.fromkeys(models)) <= sum(steps)
    assert len(refusals) >= (shared != "neither")
    if shared == "neither":
        assert steps == [15, 15]
