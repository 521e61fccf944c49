"""Runs that were stopped and go on: what is kept, what is lost, what is never given back, and where they end."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import zipfile

import keras
import numpy as np
import pytest

import tfdp
from tfdp.errors import BudgetExhaustedError, DataError, LedgerError, MisuseError
from tfdp.files import sha256_arrays
from tfdp.ledger import read_ledger
from tfdp.resume import read_checkpoint
from tfdp.resume import run as resumable
from tfdp.sampling.batches import poisson_batches

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

UNITS, FEATURES = 12, 5


class Killed(BaseException):
    """What a killed process does: nobody catches it, and nothing is tidied up by hand."""


class Kill(keras.callbacks.Callback):
    """Ends the fit after some steps of this process."""

    def __init__(self, after):
        super().__init__()
        self.left = after

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if self.left == 0:
            raise Killed


@pytest.fixture
def new_process(monkeypatch):
    """Forgets what a process knows of its fits, as one that begins does."""

    def forget():
        monkeypatch.setattr(resumable, "_ended_fits", {})
        monkeypatch.setattr(resumable, "_positions", {})

    forget()
    return forget


def network(plan, *, dropout=False, seed=1, rate=0.1, hidden=4):
    keras.utils.set_random_seed(seed)
    more = [keras.layers.Dropout(0.5)] if dropout else []
    frozen = keras.layers.Dense(FEATURES, name="frozen", trainable=False)
    layers = [keras.Input((FEATURES,)), frozen, keras.layers.Dense(hidden, activation="tanh"), *more]
    model = keras.Sequential([*layers, keras.layers.Dense(3)])
    optimizer = tfdp.dp_optimizer("adam", plan, learning_rate=rate)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def train(plan, folder, *, epochs=4, steps=3, callbacks=(), before=(), model=None, options=None, **callback):
    """The same command, whenever it is given."""
    model = network(plan) if model is None else model
    generator = np.random.default_rng(0)
    records = (generator.normal(size=(UNITS, FEATURES)).astype(np.float32), generator.integers(0, 3, UNITS))
    private = tfdp.PrivacyCallback(plan, folder / "ledger.jsonl", checkpoint=folder / "checkpoint", **callback)
    model.fit(
        poisson_batches(records, plan),
        epochs=epochs,
        steps_per_epoch=steps,
        callbacks=[*before, private, *callbacks],
        shuffle=False,
        **{"verbose": 0, **(options or {})},
    )
    return model, private


def killed(plan, folder, after, **options):
    model = options.pop("model", None) or network(plan)
    with pytest.raises(Killed):
        train(plan, folder, model=model, callbacks=[*options.pop("callbacks", ()), Kill(after)], **options)
    return model


def updates(model):
    return int(model.optimizer.iterations)


class TestGoingOn:
    def test_lost_steps_are_spent_and_the_budget_comes_first(self, plan_of, tmp_path, new_process, capsys):
        """Twelve steps: killed after seven, of which the checkpoint has six; five are left, so the model gets 11."""
        plan = plan_of(steps=12)
        killed(plan, tmp_path, 7)
        found = read_checkpoint(tmp_path / "checkpoint")
        assert (found.steps, found.updates) == (6, 6)
        new_process()
        seen = []
        look = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: seen.append((epoch, updates(look.model)))
        )
        model, private = train(plan, tmp_path, callbacks=[look], options={"verbose": 2})
        assert seen[0] == (2, 6)
        assert updates(model) == 11
        assert read_ledger(tmp_path / "ledger.jsonl").steps == private.steps == 12
        assert private.ended == "budget"
        assert read_ledger(tmp_path / "ledger.jsonl").of_kind("fit_end")[-1]["ended"] == "budget"
        told = capsys.readouterr().out
        assert "6 updates are in the model, 7 of 12 steps are spent" in told
        assert "The private run ended: budget. 11 updates are in the model, 12 of 12 steps are spent." in told

    def test_a_run_that_asks_for_less_than_the_plan_ends_as_planned(self, plan_of, tmp_path, new_process):
        """Six updates of a plan of twelve steps; one is lost on the way and taken again, at its cost.

        The checkpoint lies within an epoch, where Keras cannot begin: the run ends within one.
        """
        plan = plan_of(steps=12)
        killed(plan, tmp_path, 5, epochs=2, save_freq=2)
        new_process()
        model, private = train(plan, tmp_path, epochs=2, save_freq=2)
        assert private.ended == "planned steps"
        assert updates(model) == 6
        assert read_ledger(tmp_path / "ledger.jsonl").steps == 7

    def test_nothing_lost_and_the_whole_plan(self, plan_of, tmp_path, new_process):
        plan = plan_of(steps=12)
        killed(plan, tmp_path, 7, save_freq=1)
        new_process()
        model, private = train(plan, tmp_path, save_freq=1)
        assert (updates(model), private.steps, private.ended) == (12, 12, "planned steps")

    def test_a_fit_that_nobody_stops_ends_as_planned(self, plan_of, tmp_path, new_process):
        """Also where the last epoch is cut by the plan: 4 epochs of 3 steps under a plan of 10."""
        plan = plan_of(steps=10)
        model, private = train(plan, tmp_path)
        assert (updates(model), private.steps, private.ended) == (10, 10, "planned steps")

    def test_killed_before_the_first_checkpoint(self, plan_of, tmp_path, new_process):
        plan = plan_of(steps=12)
        killed(plan, tmp_path, 2)
        assert read_checkpoint(tmp_path / "checkpoint") is None
        new_process()
        model, private = train(plan, tmp_path)
        assert (updates(model), private.steps, private.ended) == (10, 12, "budget")

    def test_weights_and_optimizer_are_those_of_the_checkpoint(self, plan_of, tmp_path, new_process):
        plan = plan_of(steps=12)
        kept = []
        keep = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: kept.append(state(keep.model)))
        killed(plan, tmp_path, 7, callbacks=[keep])
        new_process()
        found = []
        look = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: found.append(state(look.model)))
        train(plan, tmp_path, callbacks=[look])
        assert len(found[0]) == 15  # 6 weights, and of Adam: iterations and 2 moments of the 4 that are trained
        for one, other in zip(found[0], kept[1], strict=True):
            np.testing.assert_array_equal(one, other)
        assert any(np.any(a != b) for a, b in zip(kept[0], kept[1], strict=True))

    def test_the_learning_rate_is_the_callers(self, plan_of, tmp_path, new_process):
        plan = plan_of(steps=12)
        killed(plan, tmp_path, 7)
        new_process()
        model, _ = train(plan, tmp_path, model=network(plan, rate=0.003))
        assert float(model.optimizer.learning_rate) == pytest.approx(0.003)

    def test_a_finished_run_is_restored_and_spends_nothing(self, plan_of, tmp_path, new_process):
        """Killed after the fit and before the export: the same command has the model again."""
        plan = plan_of(steps=12)
        model, _ = train(plan, tmp_path, epochs=2)
        new_process()
        again, private = train(plan, tmp_path, epochs=2)
        assert sha256_arrays(again.get_weights()) == sha256_arrays(model.get_weights())
        assert (updates(again), private.steps, private.ended) == (6, 6, "planned steps")
        new_process()
        further, private = train(plan, tmp_path, epochs=3)  # more is asked for: the rest is trained
        assert (updates(further), private.steps) == (9, 9)

    def test_a_spent_budget_is_restored_too_but_not_trained_on(self, plan_of, tmp_path, new_process):
        plan = plan_of(steps=6)
        killed(plan, tmp_path, 5, epochs=2)
        killed(plan, tmp_path, 1, epochs=2)
        new_process()
        model, private = train(plan, tmp_path, epochs=2)
        assert (updates(model), private.steps, private.ended) == (3, 6, "budget")
        shutil.rmtree(tmp_path / "checkpoint")
        new_process()
        with pytest.raises(BudgetExhaustedError, match="6 of 6 steps"):
            train(plan, tmp_path, epochs=2)

    def test_early_stopping_stays_stopped(self, plan_of, tmp_path, new_process):
        plan = plan_of(steps=12)

        def stop(epoch, logs):
            watch.model.stop_training = epoch == 1

        watch = keras.callbacks.LambdaCallback(on_epoch_end=stop)
        _, private = train(plan, tmp_path, callbacks=[watch])
        assert private.ended == "stopped"
        new_process()
        again, private = train(plan, tmp_path)
        assert (updates(again), private.steps, private.ended) == (6, 6, "stopped")

    def test_a_script_with_two_fits_goes_on_in_the_second(self, plan_of, tmp_path, new_process):
        """The first is over and is not repeated, the second takes up where it was."""
        plan = plan_of(steps=20)
        model, _ = train(plan, tmp_path, epochs=2)
        with pytest.raises(Killed):
            train(plan, tmp_path, epochs=2, model=model, callbacks=[Kill(5)])
        assert updates(model) == 11
        new_process()
        model, _ = train(plan, tmp_path, epochs=2)
        assert (updates(model), read_ledger(tmp_path / "ledger.jsonl").steps) == (9, 11)
        train(plan, tmp_path, epochs=2, model=model)
        assert (updates(model), read_ledger(tmp_path / "ledger.jsonl").steps) == (12, 14)
        train(plan, tmp_path, epochs=2, model=model)  # a third one is new
        assert (updates(model), read_ledger(tmp_path / "ledger.jsonl").steps) == (18, 20)

    def test_low_rank_adapters(self, plan_of, tmp_path, new_process):
        """`save_weights` would fold them into the kernel."""
        plan = plan_of(steps=12)

        def adapted():
            model = network(plan)
            model.layers[0].trainable = True
            model.layers[0].enable_lora(2)
            model.layers[0].bias.trainable = False
            model.compile(tfdp.dp_optimizer("adam", plan), model.loss)
            return model

        first = killed(plan, tmp_path, 3, model=adapted(), save_freq=3)
        new_process()
        seen = []
        look = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: seen.extend(look.model.get_weights()))
        train(plan, tmp_path, model=adapted(), callbacks=[look])
        for one, other in zip(seen, first.get_weights(), strict=True):
            np.testing.assert_array_equal(one, other)


def state(model):
    variables = [*model.trainable_variables, *model.non_trainable_variables, *model.optimizer.variables]
    return [np.array(v) for v in variables if v.name != "learning_rate"]


class TestNothingIsRefunded:
    def test_an_older_checkpoint_put_back_by_hand(self, plan_of, tmp_path, new_process):
        plan = plan_of(steps=12)
        killed(plan, tmp_path, 4)
        shutil.copytree(tmp_path / "checkpoint", tmp_path / "old")
        new_process()
        killed(plan, tmp_path, 6)
        shutil.rmtree(tmp_path / "checkpoint")
        shutil.copytree(tmp_path / "old", tmp_path / "checkpoint")
        new_process()
        model, private = train(plan, tmp_path)
        assert updates(model) == 3 + 2
        assert (private.steps, private.ended) == (12, "budget")
        assert private.epsilon == plan.epsilon(12)

    def test_a_ledger_that_was_cut_or_exchanged(self, plan_of, tmp_path, new_process):
        plan = plan_of(steps=12)
        killed(plan, tmp_path, 7)
        path = tmp_path / "ledger.jsonl"
        whole = path.read_bytes()
        for keep in (-6, 3, 1):
            path.write_bytes(b"".join(whole.splitlines(keepends=True)[:keep]))
            new_process()
            with pytest.raises((LedgerError, MisuseError), match="cut off or changed"):
                train(plan, tmp_path)
        path.unlink()
        new_process()
        with pytest.raises(LedgerError, match="a checkpoint of another ledger"):
            train(plan, tmp_path)
        path.write_bytes(whole)
        train(plan, tmp_path)

    def test_a_state_that_another_callback_brings(self, plan_of, tmp_path, new_process):
        """It runs after the private one, and loads a model with more updates than the ledger has steps."""
        plan = plan_of(steps=12)
        trained, _ = train(plan, tmp_path / "one", epochs=2)
        trained.save_weights(tmp_path / "six.weights.h5")
        other = keras.callbacks.LambdaCallback(
            on_train_begin=lambda logs: other.model.load_weights(tmp_path / "six.weights.h5")
        )
        model = network(plan)
        with pytest.raises(MisuseError, match="6 steps in the optimizer, 0 on"):
            train(plan, tmp_path / "two", model=model, callbacks=[other])
        assert updates(model) == 6
        assert read_ledger(tmp_path / "two" / "ledger.jsonl").steps == 0

    @pytest.mark.parametrize("part", ["weight", "optimizer"])
    def test_a_checkpoint_that_was_changed(self, plan_of, tmp_path, new_process, part):
        """Trained weights are recorded: others get no place under this ledger. The optimizer's moments are derived."""
        plan = plan_of(steps=12)
        killed(plan, tmp_path, 4)
        path = tmp_path / "checkpoint" / "checkpoint.npz"
        with zipfile.ZipFile(path) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        stream = io.BytesIO()
        np.lib.format.write_array(stream, np.load(io.BytesIO(members[f"{part}:1.npy"])) + 1)
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in {**members, f"{part}:1.npy": stream.getvalue()}.items():
                archive.writestr(name, content)
        new_process()
        model = network(plan)
        if part == "optimizer":
            train(plan, tmp_path, model=model)
            return
        before = model.get_weights()
        with pytest.raises(LedgerError, match=r"weights that .* recorded. Received: others"):
            train(plan, tmp_path, model=model)
        for one, other in zip(model.get_weights(), before, strict=True):
            np.testing.assert_array_equal(one, other)

    def test_other_frozen_weights(self, plan_of, tmp_path, new_process):
        plan = plan_of(steps=12)
        killed(plan, tmp_path, 4)
        new_process()
        with pytest.raises(LedgerError, match="weights that are not trained differ"):
            train(plan, tmp_path, model=network(plan, seed=2))

    def test_another_model_plan_or_a_damaged_file(self, plan_of, tmp_path, new_process):
        plan = plan_of(steps=12)
        killed(plan, tmp_path, 4)
        new_process()
        with pytest.raises(DataError, match="weights of this model"):
            train(plan, tmp_path, model=network(plan, hidden=5))
        other = plan_of(steps=13)
        (tmp_path / "other").mkdir()
        shutil.copytree(tmp_path / "checkpoint", tmp_path / "other" / "checkpoint")
        with pytest.raises(LedgerError, match="Expected a checkpoint of plan"):
            train(other, tmp_path / "other")
        path = tmp_path / "checkpoint" / "checkpoint.npz"
        content = path.read_bytes()
        for damaged in (b"", content[: len(content) // 2], content[:300] + b"\xff" * 9 + content[309:]):
            path.write_bytes(damaged)
            with pytest.raises(LedgerError, match=r"Expected a checkpoint in .*Delete it"):
                train(plan, tmp_path)


class TestWriting:
    @pytest.mark.parametrize("fails", ["replace", "fsync", "write"])
    def test_the_one_before_stays_until_the_new_one_is_whole(self, plan_of, tmp_path, new_process, monkeypatch, fails):
        plan = plan_of(steps=12)
        path, real = tmp_path / "checkpoint" / "checkpoint.npz", {"fsync": os.fsync, "replace": os.replace}

        def failing_replace(source, target):
            if path.exists():
                raise OSError(28, "No space left on device")
            real["replace"](source, target)

        def failing_fsync(descriptor):
            if path.exists() and ".checkpoint.npz." in os.readlink(f"/proc/self/fd/{descriptor}"):
                raise OSError(28, "No space left on device")
            real["fsync"](descriptor)

        def failing_write(file, *args, **kwargs):
            if path.exists():
                raise OSError(28, "No space left on device")
            write(file, *args, **kwargs)

        write = np.lib.format.write_array
        if fails == "write":
            monkeypatch.setattr(np.lib.format, "write_array", failing_write)
        else:
            monkeypatch.setattr(os, fails, {"replace": failing_replace, "fsync": failing_fsync}[fails])
        with pytest.raises(LedgerError, match=r"take a checkpoint. Received: No space left.*checkpoint before"):
            train(plan, tmp_path)
        monkeypatch.undo()
        assert read_checkpoint(tmp_path / "checkpoint").updates == 3
        assert [each.name for each in path.parent.iterdir()] == ["checkpoint.npz"]
        model, private = train(plan, tmp_path)
        assert (updates(model), private.steps) == (9, 12)

    def test_what_a_killed_process_left_half_written_is_cleared_away(self, plan_of, tmp_path, new_process, monkeypatch):
        plan = plan_of(steps=12)

        def killed_here(source, target):
            raise Killed

        monkeypatch.setattr(os, "replace", killed_here)
        monkeypatch.setattr(os, "unlink", lambda path: None)  # nor does a killed process tidy up
        with pytest.raises(Killed):
            train(plan, tmp_path)
        monkeypatch.undo()
        (left,) = (tmp_path / "checkpoint").iterdir()
        assert left.name.startswith(".checkpoint.npz.")
        new_process()
        train(plan, tmp_path)
        assert [each.name for each in (tmp_path / "checkpoint").iterdir()] == ["checkpoint.npz"]

    def test_how_often(self, plan_of, tmp_path, new_process):
        plan = plan_of(steps=12)
        killed(plan, tmp_path, 7, save_freq=2)
        assert [each["steps"] for each in read_ledger(tmp_path / "ledger.jsonl").of_kind("checkpoint")] == [2, 4, 6]
        for wrong in (0, -1, True, 1.5, "batch"):
            with pytest.raises(MisuseError, match="save_freq"):
                tfdp.PrivacyCallback(plan, tmp_path / "ledger", checkpoint=tmp_path, save_freq=wrong)

    def test_no_seed_and_no_state_of_a_generator(self, plan_of, tmp_path, new_process, monkeypatch, capfd, caplog):
        """Nothing that the operating system gave, and no seed of the model, is in a checkpoint, ledger, log or output.

        But for the public number that tells one ledger from another.
        """
        plan, given, real = plan_of(steps=12), [], os.urandom
        caplog.set_level("DEBUG")

        def remembered(count):
            given.append(real(count))
            return given[-1]

        monkeypatch.setattr(os, "urandom", remembered)
        model = network(plan, dropout=True)
        train(plan, tmp_path, epochs=1, model=model, options={"verbose": 2})
        seeds = [np.array(v) for v in model.non_trainable_variables if "seed_generator" in v.path]
        assert seeds
        public = bytes.fromhex(json.loads((tmp_path / "ledger.jsonl").read_text().splitlines()[0])["id"])
        assert public in given
        words = {part for word in given if len(word) >= 8 and word != public for part in (word[:8], word[-8:])}
        assert len(words) > 6
        with zipfile.ZipFile(tmp_path / "checkpoint" / "checkpoint.npz") as archive:
            members = [archive.read(name) for name in archive.namelist()]
        out = "".join(capfd.readouterr()).encode()
        texts = [(tmp_path / "ledger.jsonl").read_bytes(), out, caplog.text.encode(), *members]
        numbers = [str(part).encode() for seed in seeds for part in seed.tolist() if part >= 10**6]
        assert numbers  # of 31 bits each
        for text in texts:
            assert not [number for number in numbers if number in text]
            for word in [*words, *(seed.tobytes() for seed in seeds)]:
                assert word not in text
                assert word.hex().encode() not in text
                assert str(int.from_bytes(word, "little")).encode() not in text
        assert not any(np.array_equal(np.load(io.BytesIO(m)), s) for m in members[1:] for s in seeds)

    def test_what_follows_a_restore_is_drawn_anew(self, plan_of, tmp_path, new_process):
        plan = plan_of(steps=12)
        killed(plan, tmp_path / "a", 4)
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        found = []
        for name in ("a", "b"):
            new_process()
            found.append(train(plan, tmp_path / name, epochs=2)[0].get_weights())
        assert not any(np.array_equal(one, other) for one, other in zip(found[0][2:], found[1][2:], strict=True))


@pytest.mark.usefixtures("control_c")
class TestInterrupt:
    def test_control_c_finishes_the_step_and_leaves_all_of_it(self, plan_of, tmp_path, new_process):
        """A real signal while steps run: checkpoint and ledger have every update, and the rest is trained later."""
        plan = plan_of(steps=5000)
        model, taken = network(plan), []

        class InTheThird:
            def __init__(self, function):
                self.function = function

            def __call__(self, iterator):
                taken.append(1)
                if len(taken) == 3:
                    signal.raise_signal(signal.SIGINT)
                return self.function(iterator)

        before = keras.callbacks.LambdaCallback()
        before.on_train_begin = lambda logs=None: setattr(model, "train_function", InTheThird(model.train_function))
        with pytest.raises(KeyboardInterrupt):
            train(plan, tmp_path, model=model, epochs=1, steps=5000, before=[before])
        assert len(taken) == updates(model) == 3
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        record = read_ledger(tmp_path / "ledger.jsonl")
        found = read_checkpoint(tmp_path / "checkpoint")
        assert not record.torn
        assert record.entries[-1]["kind"] == "fit_interrupted"
        assert found is not None
        assert found.updates == updates(model) <= record.steps <= updates(model) + 1
        assert record.left(sha256_arrays(model.get_weights()))
        assert not (tmp_path / "ledger.jsonl.lock").exists()
        spent = record.steps
        new_process()
        again, private = train(plan, tmp_path, epochs=1, steps=spent + 3)
        assert (updates(again), private.ended) == (spent + 3, "planned steps")

    def test_a_second_one_does_not_wait(self, plan_of, tmp_path, new_process):
        """Both arrive inside the step; the model may be half updated, so it is not saved."""
        plan = plan_of(steps=12)
        model, taken = network(plan), []

        class Twice:
            def __init__(self, function):
                self.function = function

            def __call__(self, iterator):
                logs = self.function(iterator)
                taken.append(1)
                if len(taken) == 2:
                    signal.raise_signal(signal.SIGINT)
                    taken.append("still here")
                    signal.raise_signal(signal.SIGINT)
                    taken.append("never")
                return logs

        before = keras.callbacks.LambdaCallback()
        before.on_train_begin = lambda logs=None: setattr(model, "train_function", Twice(model.train_function))
        with pytest.raises(KeyboardInterrupt):
            train(plan, tmp_path, model=model, before=[before])
        assert taken == [1, 1, "still here"]
        assert read_checkpoint(tmp_path / "checkpoint") is None
        assert read_ledger(tmp_path / "ledger.jsonl").steps == 2


class TestBesideKeras:
    @pytest.mark.parametrize("order", ["before", "after"])
    @pytest.mark.parametrize("save_freq", ["epoch", 2])
    def test_backup_and_restore(self, plan_of, tmp_path, new_process, order, save_freq):
        """Both restore; whichever comes last, updates are counted in the model and steps on the ledger."""
        plan = plan_of(steps=30)

        def backup():
            return keras.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=save_freq)

        def place(*more):
            return {"before": [backup()]} if order == "before" else {"callbacks": [backup(), *more]}

        beside = place(Kill(8)) if order == "after" else {"before": [backup()], "callbacks": [Kill(8)]}
        with pytest.raises(Killed):
            train(plan, tmp_path, **beside)
        new_process()
        model, private = train(plan, tmp_path, **place())
        assert updates(model) == 12
        assert private.ended == "planned steps"
        restored = 8 if save_freq == 2 else 6  # the newer of the two, or the one that comes last
        assert private.steps == 8 + 12 - restored
        assert not (tmp_path / "backup").exists()

    def test_backup_and_restore_alone(self, plan_of, tmp_path, new_process):
        plan = plan_of(steps=30)
        data = (np.ones((UNITS, FEATURES), np.float32), np.zeros(UNITS, int))

        def run(*more):
            model = network(plan)
            backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
            private = tfdp.PrivacyCallback(plan, tmp_path / "ledger.jsonl")
            model.fit(
                poisson_batches(data, plan),
                epochs=4,
                steps_per_epoch=3,
                callbacks=[private, backup, *more],
                verbose=0,
                shuffle=False,
            )
            return model

        with pytest.raises(Killed):
            run(Kill(8))
        new_process()
        assert updates(run()) == 12
        assert read_ledger(tmp_path / "ledger.jsonl").steps == 14

    def test_model_checkpoint(self, plan_of, tmp_path, new_process):
        plan = plan_of(steps=30)

        def beside():
            return keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.keras")

        killed(plan, tmp_path, 8, callbacks=[beside()])
        new_process()
        model, _ = train(plan, tmp_path, callbacks=[beside()])
        assert sorted(each.name for each in tmp_path.glob("*.keras")) == [f"{epoch}.keras" for epoch in (1, 2, 3, 4)]
        last = keras.saving.load_model(tmp_path / "4.keras")
        assert int(last.optimizer.iterations) == updates(model) == 12
        record = read_ledger(tmp_path / "ledger.jsonl")
        for epoch in (1, 2, 3, 4):  # every file is one that a card can be about
            kept = keras.saving.load_model(tmp_path / f"{epoch}.keras")
            assert record.left(sha256_arrays(kept.get_weights()))
        shutil.copy(tmp_path / "ledger.jsonl", tmp_path / "copy.jsonl")
        tfdp.export(model, tmp_path)
        assert json.loads((tmp_path / "MODEL_CARD.json").read_text())["accounting"]["steps_executed"] == record.steps
