"""The search for the fastest microbatch: against trying every size, and without a look at the records."""

from __future__ import annotations

import json
import random

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tfdp import microbatches
from tfdp.errors import MisuseError
from tfdp.microbatches import Timing, _search


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "tfdp" / "microbatches.json"


def model():
    network = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])
    network.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return network


class Records:
    """Counts how often a record is read."""

    def __init__(self, count):
        self._count = count
        self.read = 0

    def __len__(self):
        return self._count

    def __getitem__(self, index):
        self.read += 1
        return np.full(5, np.nan, np.float32), np.int32(0)


@pytest.mark.parametrize("fixed", [0.0, 1.0, 40.0])  # the cost of a call beside that of its units
@pytest.mark.parametrize("cache_ends", [2, 16, 100])  # from here a unit costs three times as much
@pytest.mark.parametrize("largest", [1, 7, 16, 300])
def test_search_finds_what_trying_all_finds(fixed, cache_ends, largest):
    def timing(size):
        seconds = fixed + size * (1 if size <= cache_ends else 3)
        return Timing(size, 0.0, seconds, seconds * (256 / size + (size > 1) / 2))

    found = min(_search(timing, largest), key=lambda each: each.batch)
    tried = [timing(min(16, largest) * 2**power) for power in range(-4, 7) if power >= 0] + [
        timing(min(16, largest) // 2**power) for power in range(1, 5) if min(16, largest) // 2**power
    ]
    best = min(each.batch for each in tried if each.size <= largest)
    assert found.batch <= best / microbatches._FASTER
    assert found.size <= largest


@pytest.mark.parametrize("fits", [0, 1, 5, 40])
def test_search_where_memory_ends(fits):
    found = _search(lambda size: Timing(size, 0.0, 1.0, 256 - size) if size <= fits else None, 256)
    sizes = [each.size for each in found]
    assert sizes == {0: [], 1: [1], 5: [1, 2, 4], 40: [1, 2, 4, 8, 16, 32]}[fits]


def test_nothing_but_shapes_is_read(plan_of):
    records = Records(40)
    times = tfdp.time_microbatches(model(), records, plan_of(num_units=40, batch=20))
    assert records.read <= 1  # its template
    assert {each.size for each in times.timings} & {16, 8}
    assert all(each.seconds > 0 and each.first > 0 for each in times.timings)
    assert times.fastest in {each.size for each in times.timings}
    assert str(times).count("\n") == 1 + len(times.timings)


def test_what_was_found_is_remembered_for_the_same_question(plan_of, monkeypatch, cache):
    plan, records = plan_of(num_units=40, batch=20), Records(40)
    network = model()
    first = tfdp.time_microbatches(network, records, plan)
    assert not first.remembered
    calls = []
    monkeypatch.setattr(microbatches, "_seconds", lambda microbatch: calls.append(1) or 1.0)
    again = tfdp.time_microbatches(network, records, plan)
    assert (again.timings, again.remembered, calls) == (first.timings, True, [])
    assert not tfdp.time_microbatches(network, records, plan, method="vectorized").remembered
    assert not tfdp.time_microbatches(network, records, plan_of(num_units=40, batch=30)).remembered
    assert tfdp.time_microbatches(network, records, plan, method="vectorized").remembered
    cache.write_text("{")
    assert not tfdp.time_microbatches(network, records, plan).remembered
    assert tfdp.time_microbatches(network, records, plan).remembered


def test_a_question_is_the_same_for_the_same_model_built_again(plan_of):
    """Keras numbers layers as they are made, and a loss that is printed says where in memory it lies."""

    def built(units=3, **options):
        def loss(y, y_pred):
            return keras.ops.mean(y_pred, -1) + keras.ops.cast(y, "float32")

        network = keras.Sequential([keras.Input((5,)), keras.layers.Dense(units, **options)])
        network.compile(loss=loss)
        return network

    plan, records = plan_of(num_units=40, batch=20), Records(40)
    first, again = built(), built()
    assert str(first.loss) != str(again.loss)
    assert first.variables[0].path != again.variables[0].path
    assert not tfdp.time_microbatches(first, records, plan).remembered
    assert tfdp.time_microbatches(again, records, plan).remembered
    assert not tfdp.time_microbatches(built(units=4), records, plan).remembered
    assert not tfdp.time_microbatches(built(use_bias=False), records, plan).remembered
    again.compile(loss="sparse_categorical_crossentropy")
    assert not tfdp.time_microbatches(again, records, plan).remembered


def _timings(monkeypatch, seconds=0.01):
    """Lets the clock of the search stand still between calls, each of which takes so long; returns the calls."""
    calls, clock = [], [0.0]

    def timed(microbatch):
        calls.append(1)
        clock[0] += seconds
        return seconds

    monkeypatch.setattr(microbatches, "_seconds", timed)
    monkeypatch.setattr(microbatches.time, "monotonic", lambda: clock[0])
    return calls


def test_the_search_ends_when_its_time_is_up(plan_of, monkeypatch):
    plan, records, network = plan_of(num_units=400, batch=256), Records(400), model()
    calls = _timings(monkeypatch, seconds=10.0)  # four calls a size
    short = tfdp.time_microbatches(network, records, plan)
    assert ([each.size for each in short.timings], short.cut_short, len(calls)) == ([16], True, 4)
    assert short.told.endswith(" s. The search was cut short.")
    again = tfdp.time_microbatches(network, records, plan)
    assert (again.timings, again.remembered, again.cut_short) == (short.timings, True, True)
    more = tfdp.time_microbatches(network, records, plan, seconds=100)
    assert ([each.size for each in more.timings], more.cut_short) == ([8, 16, 32], True)
    whole = tfdp.time_microbatches(network, records, plan, seconds=1e9)
    assert ([each.size for each in whole.timings], whole.cut_short) == ([8, 16, 32, 64, 128, 256], False)
    assert whole.told.startswith("Microbatches of 256 units: ")
    assert "cut short" not in whole.told
    assert tfdp.time_microbatches(network, records, plan, seconds=1e10).remembered


def test_a_size_that_does_not_fit_is_not_the_last_one_where_time_is_up():
    found = _search(lambda size: Timing(size, 0.0, 1.0, 1.0) if size <= 4 else None, 256, lambda: True)
    assert [each.size for each in found] == [4]


@pytest.mark.parametrize(
    "kept",
    [
        [[16, 1.0, 1.0, 1.0]],
        {"timings": [], "cut_after": None},
        {"timings": [[16, 1.0, 1.0, 1.0]]},
        {"timings": [[16, 1.0, 1.0]], "cut_after": None},
        {"timings": [[0, 1.0, 1.0, 1.0]], "cut_after": None},
        {"timings": [[21, 1.0, 1.0, 1.0]], "cut_after": None},  # more than a batch holds
        {"timings": [[True, 1.0, 1.0, 1.0]], "cut_after": None},
        {"timings": [[1.5, 1.0, 1.0, 1.0]], "cut_after": None},
        {"timings": [[16, 1.0, 1.0, float("nan")]], "cut_after": None},
        {"timings": [[16, 1.0, -1.0, 1.0]], "cut_after": None},
        {"timings": [[16, 1.0, 1.0, 1.0]], "cut_after": "x"},
    ],
)
def test_what_no_search_has_left_is_not_believed(plan_of, cache, kept, monkeypatch):
    plan, records, network = plan_of(num_units=40, batch=20), Records(40), model()
    _timings(monkeypatch)
    tfdp.time_microbatches(network, records, plan)
    (key,) = json.loads(cache.read_text())
    cache.write_text(json.dumps({key: {"timings": [[16, 1.0, 2.0, 3.0]], "cut_after": None}}))
    assert tfdp.time_microbatches(network, records, plan).timings == (Timing(16, 1.0, 2.0, 3.0),)
    cache.write_text(json.dumps({key: kept}))
    found = tfdp.time_microbatches(network, records, plan)
    assert not found.remembered
    assert {each.seconds for each in found.timings} == {0.01}
    assert tfdp.time_microbatches(network, records, plan).remembered, "it was replaced"


def test_a_cache_that_cannot_be_written_is_told(plan_of, tmp_path, monkeypatch):
    plan, records, network = plan_of(num_units=40, batch=20), Records(40), model()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    times = tfdp.time_microbatches(network, records, plan)
    told = f"It is not remembered: {tmp_path}/file/tfdp/microbatches.json cannot be written (Not a directory)."
    assert times.told.endswith(f" s. {told}")
    assert not tfdp.time_microbatches(network, records, plan).remembered
    monkeypatch.setattr(microbatches, "user_folder", lambda *names: None)
    assert "there is no home folder" in tfdp.time_microbatches(network, records, plan).told
    assert tfdp.time_microbatches(network, records, plan, remember=False).not_saved is None


def test_users_of_several_records():
    spec = {
        "x": tf.TensorSpec([None, 1, 3, 5]),
        "y": tf.TensorSpec([None, 1, 3], tf.int32),
        "unit_weight": tf.TensorSpec([None, 1]),
        "record_weight": tf.TensorSpec([None, 1, 3]),
    }
    shapes = {name: tuple(leaf.shape) for name, leaf in microbatches._made_up(spec, 4).items()}
    assert shapes == {"x": (12, 5), "y": (12,), "unit_weight": (4,), "record_weight": (4, 3)}


def test_the_model_is_left_as_it_was(plan_of):
    network = keras.Sequential([keras.Input((5,)), keras.layers.Dropout(0.5, seed=1), keras.layers.Dense(3)])
    network.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    before = [variable.numpy() for variable in network.variables]
    tfdp.time_microbatches(network, Records(40), plan_of(num_units=40, batch=20))
    for variable, value in zip(network.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


def test_neither_optimizer_nor_metrics_nor_generators_move(plan_of):
    def drawn():
        return [float(tf.random.normal([])), float(keras.random.normal([])), np.random.random(), random.random()]

    plan = plan_of(num_units=40, batch=20)
    network = model()
    network.compile(
        optimizer=tfdp.dp_optimizer("adamw", plan),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=["accuracy"],
    )
    network.optimizer.build(network.trainable_variables)
    variables = [*network.variables, *network.optimizer.variables, *network.metrics_variables]
    before = [variable.numpy() for variable in variables]
    keras.utils.set_random_seed(3)
    tf.random.set_seed(3)
    expected = drawn()
    keras.utils.set_random_seed(3)
    tf.random.set_seed(3)
    tfdp.time_microbatches(network, Records(40), plan)
    assert drawn() == expected
    for variable, value in zip(variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


def test_a_model_without_a_loss_is_refused(plan_of):
    network = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])
    with pytest.raises(MisuseError, match=r"Expected a compiled model.*Call model\.compile first"):
        tfdp.time_microbatches(network, Records(40), plan_of(num_units=40, batch=20))
