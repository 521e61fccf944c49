"""Sensitivity replay: the same fit on neighbouring data, with the same draws, noise and dropout masks.

Through the whole pipeline (sampler, `fit`, private step, optimizer) and at every step, the update of plain SGD may
differ by at most C / (q * N) where a unit is there or not, twice that where it is replaced, k times that under group
privacy. The unit is loud enough to be clipped, so the bound is also reached: a step with the unit differs by exactly
that, a step without it by nothing.
"""

from __future__ import annotations

import json

import keras
import numpy as np
import pytest

import tfdp
from tfdp import entropy, keras_private
from tfdp.sampling.batches import PoissonSampler

UNITS, FEATURES, STEPS, CLIP, K = 12, 3, 8, 0.05, 3
LAST = UNITS - 1
SAMPLING = {
    "poisson": {"probability": 0.25},
    "truncated_poisson": {"probability": 0.25, "truncated_batch_size": 3},
    "full_batch": {"expected_batch_size": UNITS},
}
ENGINES = {
    "bookkeeping": {"method": "bookkeeping"},
    "vectorized": {"method": "vectorized"},
    "hybrid": {"method": "bookkeeping", "hybrid": True},
}
UNIT_KINDS = ["example", "user_wise_dp_sgd", "group_privacy"]
# Every unit with every scheme by book-keeping, and by one of the other ways, so that these meet every unit and scheme.
# What nobody accounts for is refused (tests/accounting/test_events.py): group privacy with truncated batches.
CASES = [
    (unit, scheme, engine)
    for i, unit in enumerate(UNIT_KINDS)
    for j, scheme in enumerate(SAMPLING)
    for k, engine in enumerate(ENGINES)
    if (k == 0 or k == 1 + (i + (j + 1) // 2) % 2) and (unit, scheme) != ("group_privacy", "truncated_poisson")
]

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


class Bent(keras.layers.Layer):
    """Has no gradient rule: hybrid forms its gradients, the vectorized path needs none."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")

    def call(self, x):
        return keras.ops.tanh(x * self.scale)


def plan_of(unit, scheme="poisson", *, units=UNITS):
    """The spec has a probability, so that a unit more or less leaves it where it was."""
    sampling = {"scheme": scheme, "steps": 4 * STEPS, "microbatch_size": 2, **SAMPLING[scheme]}
    privacy_unit = {"kind": "example", "description": "one record"}
    if unit != "example":
        privacy_unit = {"kind": "user", "description": "one writer", "id_field": "writer", "method": unit}
        privacy_unit["max_records_per_unit"] = K
    if unit == "group_privacy" and scheme == "full_batch":
        sampling["expected_batch_size"] = (UNITS - 1) * K
    # Under group privacy a public number, which no unit more or less changes; else that of the records.
    num_records = (UNITS - 1) * K if unit == "group_privacy" else units * K
    records = {} if unit == "example" else {"num_records": num_records}
    spec = {
        "schema_version": "1.0",
        "claim": {
            "epsilon": 1e9,
            "delta": 1e-3,
            "adjacency": "zero_out",
            "privacy_unit": privacy_unit,
            "data_accesses": ["training"],
        },
        "data": {"num_units": units, "size_is_public": True, "deduplication": "exact", **records},
        "mechanism": {"clip_norm": CLIP, "noise_multiplier": 1.0, "rng": "prng"},
        "sampling": sampling,
        "accountant": {"name": "pld"},
    }
    return tfdp.make_plan(tfdp.PrivacySpec.from_text(json.dumps(spec), format="json"), seed=7)


def records_of(unit, units=UNITS):
    """(x, y, sample_weight), the ids, and the place of the last unit, whose records are alike: their gradients add."""
    size = 1 if unit == "example" else K
    generator = np.random.default_rng(3)
    x = generator.normal(size=(UNITS * size, FEATURES)).astype(np.float32)
    y = generator.integers(0, 2, UNITS * size)
    x[LAST * size :], y[LAST * size :] = [1.0, -2.0, 0.5], 1
    ids = np.repeat([f"u{unit:02d}" for unit in range(UNITS)], size)
    keep = slice(0, units * size)
    return (x[keep], y[keep], np.ones(UNITS * size, np.float32)[keep]), ids[keep], slice(LAST * size, None)


class Replay(keras.callbacks.Callback):
    """Every epoch is the same run again: draws, dropout and, after every step, weights start anew."""

    def __init__(self, monkeypatch, change=lambda epoch: None):
        super().__init__()
        self._monkeypatch, self._change = monkeypatch, change
        self.updates, self.drawn = [], []
        draw = PoissonSampler.draw

        def watched(sampler):
            self.drawn[-1].append(draw(sampler))
            return self.drawn[-1][-1]

        monkeypatch.setattr(PoissonSampler, "draw", watched)

    def on_train_begin(self, logs=None):
        self.start = self.model.get_weights()

    def on_epoch_begin(self, epoch, logs=None):
        self._change(epoch)
        self._monkeypatch.setattr(entropy, "_seeded_draws", {})
        self.updates.append([])
        self.drawn.append([])

    def on_train_batch_begin(self, batch, logs=None):
        self.model.set_weights(self.start)
        for state in keras_private.seed_states(self.model):
            state.assign([11, batch])

    def on_train_batch_end(self, batch, logs=None):
        moved = [np.ravel(a - b) for a, b in zip(self.model.get_weights(), self.start, strict=True)]
        self.updates[-1].append(np.concatenate(moved))


def replay(plan, unit, engine, folder, monkeypatch, *, change=None, epochs=1, units=UNITS):
    """Updates [epochs, STEPS, values], and for every step which of the drawn items belong to the last unit."""
    records, ids, last = records_of(unit, units)
    keras.utils.set_random_seed(1)
    odd = [Bent()] if engine != "bookkeeping" else []
    model = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(4, activation="tanh"),
            *odd,
            # Equal records of a unit would get unequal masks, and their gradients would no longer add up in full.
            *([keras.layers.Dropout(0.3, seed=5)] if unit == "example" else []),
            keras.layers.Dense(2),
        ]
    )
    model.compile(
        tfdp.dp_optimizer("sgd", plan, learning_rate=1.0), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    watch = Replay(monkeypatch, change=lambda epoch: change and change(epoch, *(part[last] for part in records)))
    model.fit(
        tfdp.poisson_batches(records, plan, unit_ids=None if unit == "example" else ids),
        epochs=epochs,
        steps_per_epoch=STEPS,
        callbacks=[tfdp.PrivacyCallback(plan, folder / "ledger.jsonl", **ENGINES[engine]), watch],
        verbose=0,
        shuffle=False,
    )
    first = LAST * (K if unit == "group_privacy" else 1)
    joined = [[int((drawn >= first).sum()) for drawn in epoch] for epoch in watch.drawn]
    assert all(each == joined[0] for each in joined)
    return np.array(watch.updates, np.float64), np.array(joined[0])


def same_noise(noise_is):
    """Noise that is the same in every run of a step, and different for every value."""
    noise_is(lambda shape, step, index: np.sin(np.arange(np.prod(shape, dtype=int)) + 10 * index).reshape(shape))


def moves(one, other, plan):
    """How far the updates of two runs are apart, in units of C / (q * N)."""
    return np.linalg.norm(one - other, axis=1) * plan.expected_batch_size / plan.clip_norm


@pytest.mark.parametrize(("unit", "scheme", "engine"), CASES)
def test_one_unit_moves_an_update_by_the_clip_norm(unit, scheme, engine, noise_is, monkeypatch, tmp_path):
    """Zeroed out: by C for every clipped gradient of its own in the batch. Replaced by its opposite: by twice that."""

    def change(epoch, x, y, weight):
        y[:], weight[:] = (1, 1.0) if epoch == 0 else (1, 0.0) if epoch == 1 else (0, 1.0)

    same_noise(noise_is)
    plan = plan_of(unit, scheme)
    (there, zeroed, replaced), joined = replay(plan, unit, engine, tmp_path, monkeypatch, change=change, epochs=3)
    most = K if unit == "group_privacy" else 1
    assert joined.max() <= most
    assert joined.any()
    assert scheme == "full_batch" or (joined == 0).any()
    np.testing.assert_allclose(moves(there, zeroed, plan), joined, atol=2e-4)
    np.testing.assert_allclose(moves(there, replaced, plan), 2 * joined, atol=4e-4)


@pytest.mark.parametrize("unit", UNIT_KINDS)
def test_a_unit_that_is_not_there_moves_it_as_little(unit, monkeypatch, tmp_path):
    """Really taken out of the data, which leaves q, noise and, as seen from the noisy sum, everything else alone."""
    there, joined = replay(plan_of(unit), unit, "bookkeeping", tmp_path / "there", monkeypatch)
    smaller = plan_of(unit, units=UNITS - 1)
    gone, none = replay(smaller, unit, "bookkeeping", tmp_path / "gone", monkeypatch, units=UNITS - 1)
    plan = plan_of(unit)
    assert (plan.sampling_probability, plan.noise_stddev) == (smaller.sampling_probability, smaller.noise_stddev)
    assert not none.any()
    sums = there[0] * plan.expected_batch_size - gone[0] * smaller.expected_batch_size
    np.testing.assert_allclose(np.linalg.norm(sums, axis=1) / plan.clip_norm, joined, atol=2e-4)
    assert joined.any()
