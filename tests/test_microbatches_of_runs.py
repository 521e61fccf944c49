"""`microbatch_size: auto` in a run: timed before the first draw, remembered, kept by a run that goes on, and told."""

from __future__ import annotations

import json
import shutil

import keras
import numpy as np
import pytest

import tfdp
from tfdp import microbatches
from tfdp.callback import PrivacyCallback
from tfdp.cli import main
from tfdp.errors import DataError
from tfdp.workflow import private_fit

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")

_RECORDS = np.ones((40, 5), np.float32), np.zeros(40, np.int32)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tfdp" / "microbatches.json"


@pytest.fixture
def timed(monkeypatch):
    """Makes microbatches of so many units the fastest; returns the sizes that were timed."""
    sizes, fastest = [], [4]
    made_up = microbatches._made_up

    def note(spec, size):
        sizes.append(size)
        return made_up(spec, size)

    def seconds(microbatch):
        microbatch()
        return 1.0 * sizes[-1] if sizes[-1] == fastest[0] else 3.0 * sizes[-1]  # a batch: 20 / size + 1/2 of them

    monkeypatch.setattr(microbatches, "_made_up", note)
    monkeypatch.setattr(microbatches, "_seconds", seconds)
    return sizes, fastest


def _model():
    return keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])


def _fit(plan, ledger, model=None, **options):
    return private_fit(model or _model(), plan, _RECORDS, ledger=ledger, optimizer="sgd", **options)


def _noted(ledger):
    return [entry["units"] for entry in tfdp.read_ledger(ledger).of_kind("microbatches")]


def test_the_fastest_size_runs_and_is_told(plan_of, tmp_path, timed, capsys):
    sizes, _ = timed
    plan = plan_of(num_units=40, batch=20, steps=2, microbatch="auto")
    ledger = tmp_path / "ledger.jsonl"
    _fit(plan, ledger, verbose=2)
    assert sizes == [16, 8, 4, 2]
    assert _noted(ledger) == [4]
    assert tfdp.read_ledger(ledger).plan["microbatch_size"] == "auto"
    told = capsys.readouterr().out.splitlines()[0]
    assert told.startswith("Microbatches of 4 units: 22 s a batch, timed on made-up data (2: 63 s, 8: 72 s, 16: 84 s)")
    assert ". A first call, with tracing and compilation, took " in told


def test_a_second_run_times_nothing_and_other_sizes_do_not_change_the_plan(plan_of, tmp_path, timed, capsys):
    sizes, fastest = timed
    plan = plan_of(num_units=40, batch=20, steps=1, microbatch="auto")
    _fit(plan, tmp_path / "a.jsonl", verbose=0)
    assert capsys.readouterr().out == ""
    sizes.clear()
    _fit(plan, tmp_path / "b.jsonl", verbose=2)
    assert (sizes, _noted(tmp_path / "b.jsonl")) == ([], [4])
    told = "Microbatches of 4 units: 22 s a batch, timed earlier on this machine (2: 63 s, 8: 72 s, 16: 84 s)"
    assert capsys.readouterr().out.startswith(told)
    fastest[0] = 8
    (tmp_path / "cache" / "tfdp" / "microbatches.json").unlink()
    _fit(plan, tmp_path / "c.jsonl", verbose=0)
    assert _noted(tmp_path / "c.jsonl") == [8]
    assert len({tfdp.read_ledger(tmp_path / f"{name}.jsonl").plan["digest"] for name in "abc"}) == 1


def test_a_run_that_goes_on_keeps_its_size(plan_of, tmp_path, timed, cache, capsys):
    sizes, fastest = timed
    plan = plan_of(num_units=40, batch=20, steps=2, microbatch="auto")
    ledger, model = tmp_path / "ledger.jsonl", _model()

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = True

    _fit(plan, ledger, model, callbacks=[Stop()], verbose=0)
    assert (tfdp.read_ledger(ledger).steps, _noted(ledger)) == (1, [4])
    fastest[0] = 8
    cache.unlink()
    sizes.clear()
    weights = model.get_weights()
    resumed = _model()
    resumed.set_weights(weights)
    _fit(plan, ledger, resumed, verbose=2)
    assert (sizes, tfdp.read_ledger(ledger).steps, _noted(ledger)) == ([], 2, [4, 4])
    assert capsys.readouterr().out.startswith("Microbatches of 4 units, as in this run before.\n")


def test_no_record_is_read_and_no_step_is_spent_before_a_size_is_found(plan_of, tmp_path, monkeypatch):
    """The search fails: the ledger is not there, and of the records one was read, for their shape."""

    class Records:
        read = 0

        def __len__(self):
            return 40

        def __getitem__(self, index):
            Records.read += 1
            return np.ones(5, np.float32), np.int32(0)

    def fail(microbatch):
        raise RuntimeError("the search")

    monkeypatch.setattr(microbatches, "_seconds", fail)
    plan = plan_of(num_units=40, batch=20, steps=1, microbatch="auto")
    with pytest.raises(RuntimeError, match="the search"):
        private_fit(_model(), plan, Records(), ledger=tmp_path / "ledger.jsonl", verbose=0)
    assert Records.read <= 1
    assert not (tmp_path / "ledger.jsonl").exists()


@pytest.mark.parametrize(("stated", "given", "ran"), [(3, None, 3), (3, 5, 5), ("auto", 5, 5)])
def test_a_size_that_somebody_chose_is_not_timed(plan_of, tmp_path, timed, stated, given, ran):
    plan = plan_of(num_units=40, batch=20, steps=1, microbatch=stated)
    options = {} if given is None else {"batch_options": {"microbatch_size": given}}
    _fit(plan, tmp_path / "ledger.jsonl", verbose=0, **options)
    assert (timed[0], _noted(tmp_path / "ledger.jsonl")) == ([], [ran])


def test_model_fit_is_told_what_to_do(plan_of, tmp_path):
    """The remedy of the message, followed."""
    plan, model = plan_of(num_units=40, batch=20, steps=1, microbatch="auto"), _model()
    with pytest.raises(DataError, match=r"Compile the model, then: times = tfdp\.time_microbatches"):
        tfdp.poisson_batches(_RECORDS, plan)
    model.compile(
        optimizer=tfdp.dp_optimizer("sgd", plan), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    times = tfdp.time_microbatches(model, _RECORDS, plan)
    batches = tfdp.poisson_batches(_RECORDS, plan, microbatch_size=times.fastest)
    ledger = tmp_path / "ledger.jsonl"
    callback = tfdp.PrivacyCallback(plan, ledger=ledger)
    model.fit(batches, steps_per_epoch=1, callbacks=[callback], shuffle=False, verbose=0)
    assert _noted(ledger) == [times.fastest]


def test_tfdp_train_from_an_interruption_to_its_card(tmp_path, monkeypatch, capsys):
    (tmp_path / "spec.yaml").write_text("""
schema_version: "1.0"
claim:
  epsilon: 9
  delta: 1e-4
  privacy_unit: {kind: example, description: one text}
  adjacency: add_or_remove_one
  data_accesses: [training]
data: {num_units: 12, size_is_public: true}
mechanism: {clip_norm: 1.0, noise_multiplier: 1.0}
sampling: {scheme: poisson, expected_batch_size: 1, steps: 3, microbatch_size: auto}
""")
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": f"the cat sat {i}"}) + "\n" for i in range(12)))
    arguments = ["train", "--model", "gpt2:tiny", "--sequence-length", "8", "--holdout", "0", "--save-every", "1"]
    for name, file in {"--spec": "spec.yaml", "--data": "texts.jsonl", "--out": "run"}.items():
        arguments += [name, str(tmp_path / file)]

    class Killed(BaseException):
        pass

    real = PrivacyCallback.on_train_batch_end

    def kill(self, batch, logs=None):
        real(self, batch, logs)
        raise Killed

    monkeypatch.setattr(PrivacyCallback, "on_train_batch_end", kill)
    with pytest.raises(Killed):
        main(arguments)
    monkeypatch.setattr(PrivacyCallback, "on_train_batch_end", real)
    out = capsys.readouterr().out
    ledger = tmp_path / "run" / "ledger.jsonl"
    (units,) = _noted(ledger)
    assert f"Microbatches of {units} units: " in out
    assert tfdp.read_ledger(ledger).steps == 1

    monkeypatch.setattr(microbatches, "_search", None)
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    out, err = capsys.readouterr()
    assert (ended.value.code or 0, err) == (0, "")
    assert f"Microbatches of {units} units, as in this run before." in out
    assert _noted(ledger) == [units, units]
    card = json.loads((tmp_path / "run" / "MODEL_CARD.json").read_text())
    told = f"book-keeping, in microbatches of {units} (the spec says auto)"
    assert card["provenance"]["gradients"] == told
    assert told in (tmp_path / "run" / "MODEL_CARD.md").read_text()
    assert tfdp.check_card(tmp_path / "run") == []
