"""Ctrl-C, by real signals: whenever it comes, what is on the disk can be gone on from, and no handler stays behind."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import threading

import keras
import numpy as np
import pytest

import tfdp
from tfdp.ledger import read_ledger
from tfdp.resume import FitInterrupts, read_checkpoint
from tfdp.sampling.batches import poisson_batches

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.usefixtures("control_c"),
]

X = np.ones((12, 4), np.float32)
Y = np.arange(12) % 2


@pytest.fixture
def plan(plan_of):
    return plan_of(steps=5000)


def network(plan):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tfdp.dp_optimizer("sgd", plan), loss, run_eagerly=True)
    return model


def fit(plan, folder, *callbacks, epochs=1, steps=3, model=None, **options):
    private = tfdp.PrivacyCallback(plan, folder / "ledger.jsonl", checkpoint=folder / "checkpoint")
    model = model or network(plan)
    model.fit(
        poisson_batches((X, Y), plan),
        epochs=epochs,
        steps_per_epoch=steps,
        callbacks=[private, *callbacks],
        verbose=0,
        shuffle=False,
        **options,
    )
    return model


def at(point, *actions):
    """A callback that does one thing after another, one each time that a point is reached."""
    callback, left = keras.callbacks.Callback(), list(actions)

    def act(*args, **kwargs):
        if left:
            left.pop(0)()

    setattr(callback, point, act)
    return callback


def press():
    signal.raise_signal(signal.SIGINT)


def nothing():
    pass


def raises(error):
    def act():
        raise error

    return act


def ends(folder):
    return [entry["kind"] for entry in read_ledger(folder / "ledger.jsonl").entries if entry["kind"].startswith("fit_")]


MOMENTS = """
import json, os, pathlib, random, signal, sys, tempfile, threading, time
import keras, numpy as np, tfdp
from tfdp.ledger import read_ledger
from tfdp.resume import read_checkpoint

signal.signal(signal.SIGINT, signal.default_int_handler)
plan = tfdp.make_plan(tfdp.PrivacySpec.from_text(open(sys.argv[1]).read(), format="json"))
plan.epsilon_bound(1)
data = np.ones((12, 4), np.float32), np.arange(12) % 2
generator = random.Random(0)
begun = keras.callbacks.Callback()

for _ in range(int(sys.argv[2])):
    folder = pathlib.Path(tempfile.mkdtemp())
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tfdp.dp_optimizer("sgd", plan, learning_rate=0.1), loss)
    stepped, delay = threading.Event(), generator.uniform(0, 0.05)
    begun.on_train_batch_end = lambda batch, logs=None: stepped.set()

    def press(stepped=stepped, delay=delay):
        stepped.wait()
        time.sleep(delay)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    private = tfdp.PrivacyCallback(plan, folder / "ledger.jsonl", checkpoint=folder / "checkpoint")
    heard = False
    try:
        model.fit(tfdp.poisson_batches(data, plan), epochs=900, steps_per_epoch=5, callbacks=[private, begun],
                  verbose=0, shuffle=False)
    except KeyboardInterrupt:
        heard = True
    thread.join()
    record, found = read_ledger(folder / "ledger.jsonl"), read_checkpoint(folder / "checkpoint")
    print(json.dumps({
        "heard": heard,
        "last": record.entries[-1]["kind"],
        "steps": record.steps,
        "updates": int(model.optimizer.iterations),
        "saved": found and found.updates,
        "given back": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "unlocked": not (folder / "ledger.jsonl.lock").exists(),
    }))
"""


def test_random_moments(plan, tmp_path):
    """Sixteen, of which a quarter lie in Keras's loop between two callbacks: one of those at least, but for 1%."""
    (tmp_path / "spec.json").write_text(json.dumps(plan.spec.to_dict()))
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[2])}
    command = [sys.executable, "-c", MOMENTS, str(tmp_path / "spec.json"), "16"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == 16
    for each in found:
        assert each["heard"]
        assert each["last"] == "fit_interrupted"
        assert each["saved"] == each["updates"] == each["steps"] >= 1  # not even a spent step is lost
        assert each["given back"]
        assert each["unlocked"]


@pytest.mark.parametrize("point", ["on_epoch_begin", "on_train_batch_begin", "on_train_batch_end", "on_epoch_end"])
def test_in_another_callback(plan, tmp_path, point):
    """The step that was recorded is taken, and all is saved."""
    with pytest.raises(KeyboardInterrupt):
        fit(plan, tmp_path, at(point, nothing, press), epochs=3, steps=2)
    record, found = read_ledger(tmp_path / "ledger.jsonl"), read_checkpoint(tmp_path / "checkpoint")
    assert record.entries[-1]["kind"] == "fit_interrupted"
    assert found.updates == record.steps == {"on_epoch_begin": 2, "on_epoch_end": 4}.get(point, 2)


def test_before_the_first_step_nothing_is_vouched_for(plan, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fit(plan, tmp_path, at("on_epoch_begin", press))
    record = read_ledger(tmp_path / "ledger.jsonl")
    assert record.steps <= 1
    assert len([each for each in record.entries if "weights" in each]) == 2 * record.steps
    assert (read_checkpoint(tmp_path / "checkpoint") is None) == (record.steps == 0)


def test_after_the_last_step_the_fit_is_complete(plan, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fit(plan, tmp_path, at("on_epoch_end", press))
    assert ends(tmp_path) == ["fit_begin", "fit_end"]
    assert read_checkpoint(tmp_path / "checkpoint").position.ended == "planned steps"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_validation_does_not_have_to_end_first(plan, tmp_path):
    batches = []
    count = at("on_test_batch_end", press, *[lambda: batches.append(1)] * 40)
    with pytest.raises(KeyboardInterrupt):
        fit(plan, tmp_path, count, validation_data=(X, Y), validation_batch_size=1)
    assert not batches
    assert ends(tmp_path) == ["fit_begin", "fit_interrupted"]


def test_a_second_one_takes_effect_at_once(plan, tmp_path):
    after, model = [], network(plan)

    def twice():
        press()
        after.append("one")
        press()
        after.append("two")

    with pytest.raises(KeyboardInterrupt):
        fit(plan, tmp_path, at("on_train_batch_begin", nothing, twice), model=model)
    assert after == ["one"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert read_ledger(tmp_path / "ledger.jsonl").steps == 2
    fit(plan, tmp_path, model=model)
    assert read_ledger(tmp_path / "ledger.jsonl").steps == 5


class TestWhatAFitLeaves:
    @pytest.mark.parametrize("afterwards", ["nothing", "a plain fit", "evaluate"])
    def test_that_died_in_another_callback(self, plan, tmp_path, afterwards):
        """No hook of it is called any more: its handler finds that out by itself."""
        model, later = network(plan), []
        with pytest.raises(ArithmeticError):
            fit(plan, tmp_path, at("on_train_batch_end", raises(ArithmeticError())), model=model)
        other = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        other.compile("sgd", "sparse_categorical_crossentropy", run_eagerly=True)
        then = (press, lambda: later.append(1))
        act = {
            "nothing": press,
            "a plain fit": lambda: other.fit(X, Y, 4, verbose=0, callbacks=[at("on_train_batch_end", *then)]),
            "evaluate": lambda: model.evaluate(X, Y, 4, verbose=0, callbacks=[at("on_test_batch_end", *then)]),
        }[afterwards]
        with pytest.raises(KeyboardInterrupt):
            act()
        assert not later
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def test_that_died_and_was_begun_again(self, plan, tmp_path):
        with pytest.raises(ArithmeticError):
            fit(plan, tmp_path / "a", at("on_train_batch_end", raises(ArithmeticError())))
        with pytest.raises(KeyboardInterrupt):
            fit(plan, tmp_path / "b", at("on_train_batch_end", press))
        assert ends(tmp_path / "b") == ["fit_begin", "fit_interrupted"]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    @pytest.mark.parametrize("inside", [False, True])
    def test_that_ended_well(self, plan, tmp_path, inside):
        """Also one that ran inside another: there the outer one hears the signal."""
        seen = []

        def look():
            seen.append(signal.getsignal(signal.SIGINT))
            if inside:
                fit(plan, tmp_path / "inner", at("on_train_batch_begin", press), steps=2)
                seen.append(signal.getsignal(signal.SIGINT))

        if inside:
            with pytest.raises(KeyboardInterrupt):
                fit(plan, tmp_path, at("on_train_batch_begin", nothing, look))
            assert seen[0] == seen[1]
            assert ends(tmp_path / "inner") == ["fit_begin", "fit_end"]
            assert ends(tmp_path) == ["fit_begin", "fit_interrupted"]
        else:
            fit(plan, tmp_path, at("on_train_batch_begin", look))
        assert isinstance(seen[0].__self__, FitInterrupts)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def test_that_was_refused(self, plan, tmp_path):
        model = network(plan)
        taken = at("on_epoch_begin", lambda: setattr(model, "train_function", None))
        with pytest.raises(tfdp.errors.MisuseError):
            fit(plan, tmp_path, taken, model=model)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def test_in_a_thread(self, plan, tmp_path):
        """Python hands signals to the main thread: what it does with them is its own."""
        seen = []
        look = at("on_train_batch_begin", lambda: seen.append(signal.getsignal(signal.SIGINT)))
        thread = threading.Thread(target=fit, args=(plan, tmp_path, look))
        thread.start()
        thread.join()
        assert seen == [signal.default_int_handler]

    def test_that_another_thread_ended(self, plan, tmp_path):
        """The handler of a fit that died can only be taken off in the main thread; it gives way there."""
        with pytest.raises(ArithmeticError):
            fit(plan, tmp_path, at("on_train_batch_end", raises(ArithmeticError())))
        thread = threading.Thread(target=fit, args=(plan, tmp_path))
        thread.start()
        thread.join()
        assert ends(tmp_path)[:2] == ["fit_begin", "fit_interrupted"]
        with pytest.raises(KeyboardInterrupt):
            press()


def test_a_handler_of_somebody_else_stays(plan, tmp_path):
    heard = []
    signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    handler = signal.getsignal(signal.SIGINT)
    fit(plan, tmp_path, at("on_train_batch_begin", press, press))
    assert heard == [signal.SIGINT] * 2
    assert signal.getsignal(signal.SIGINT) is handler
    assert ends(tmp_path) == ["fit_begin", "fit_end"]
