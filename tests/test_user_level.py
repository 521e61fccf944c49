"""Training on units of several records against a loop over units, and what a second fit may not change."""

from __future__ import annotations

import dataclasses
import gc
import json
import textwrap

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tfdp.errors import MisuseError, PlanError
from tfdp.sampling.poisson import PoissonSampler
from tfdp.sampling.units import UnitMap

FEATURES, CLASSES, K = 4, 3, 3
SIZES = (5, 1, 3, 2, 1)
IDS = [f"u{unit}" for unit, size in enumerate(SIZES) for _ in range(size)]


def spec_of(method, *, k=K, selection="longest", num_records=12, batch=2, noise=1.0, epsilon=1e6, clip=0.7):
    return tfdp.PrivacySpec.from_text(
        textwrap.dedent(f"""
        schema_version: "1.0"
        claim:
          epsilon: {epsilon}
          delta: 1.0e-2
          adjacency: add_or_remove_one
          privacy_unit:
            {{kind: user, description: one writer, id_field: writer, max_records_per_unit: {k}, method: {method},
             selection: {selection}}}
          data_accesses: [training]
        data: {{num_units: 5, num_records: {num_records}, size_is_public: true}}
        mechanism: {{clip_norm: {clip}, noise_multiplier: {noise}}}
        sampling: {{scheme: poisson, expected_batch_size: {batch}, steps: 3, microbatch_size: 2}}
        """)
    )


def records():
    generator = np.random.default_rng(2)
    scale = np.linspace(0.1, 3, len(IDS))[:, None]
    x = (generator.normal(size=(len(IDS), FEATURES)) * scale).astype(np.float32)
    return x, generator.integers(0, CLASSES, len(IDS)), np.linspace(0.5, 2, len(IDS)).astype(np.float32)


SCORES = np.array([3.0, 9, 1, 7, 5, 1, 2, 1, 3, 4, 4, 1])
KEPT = {"u0": [1, 3, 4], "u1": [5], "u2": [6, 7, 8], "u3": [9, 10], "u4": [11]}


def network():
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [keras.Input((FEATURES,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(CLASSES)]
    )


def cross_entropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def fit(model, plan, folder, *, steps=1, ids=IDS, method="bookkeeping", compiled=None, **options):
    model.compile(
        tfdp.dp_optimizer("sgd", plan, learning_rate=1.0), loss=cross_entropy(), **{"metrics": [], **(compiled or {})}
    )
    batches = tfdp.poisson_batches(records(), plan, unit_ids=ids, scores=SCORES, **options)
    callback = tfdp.PrivacyCallback(plan, ledger=folder / "ledger.jsonl", method=method)
    return model.fit(batches, epochs=1, steps_per_epoch=steps, callbacks=[callback], verbose=0, shuffle=False)


def record_gradient(model, index):
    x, y, weight = (part[index : index + 1] for part in records())
    with tf.GradientTape() as tape:
        loss = cross_entropy()(y, model(x, training=True), sample_weight=weight)
    return [np.asarray(g, np.float64) for g in tape.gradient(loss, [v.value for v in model.trainable_variables])]


def clipped_mean(model, indices, clip_norm):
    """The slow obvious way: one gradient per record, their mean, its norm."""
    gradients = [record_gradient(model, index) for index in indices]
    mean = [sum(column) / len(indices) for column in zip(*gradients, strict=True)]
    norm = np.sqrt(sum((g**2).sum() for g in mean))
    return [g * min(1.0, clip_norm / norm) for g in mean], norm


@pytest.fixture
def known(monkeypatch, noise_is):
    """Draws that are given, and noise that differs for every value."""

    def replace(*draws):
        rest = iter(draws)
        # A pipeline of an earlier test may still be drawing ahead, and must not take them.
        before = {id(each) for each in gc.get_objects() if isinstance(each, PoissonSampler)}
        monkeypatch.setattr(
            PoissonSampler, "draw", lambda self: np.array([] if id(self) in before else next(rest, []), np.int64)
        )
        noise_is(values)

    return replace


def values(shape, step, index):
    """Noise that differs for every value, variable and step."""
    return np.sin(np.arange(np.prod(shape, dtype=int)) + 10 * index + 100 * step).reshape(shape)


@pytest.mark.parametrize("gradients", ["bookkeeping", "vectorized"])
@pytest.mark.parametrize("method", ["user_wise_dp_sgd", "group_privacy"])
def test_updates_are_those_of_a_loop(known, monkeypatch, tmp_path, method, gradients):
    """Three steps, one of them empty; groups of units and of single records, divided by the planned batch size."""
    plan = tfdp.make_plan(spec_of(method, num_records=10, clip=0.7 if method == "user_wise_dp_sgd" else 1.2))
    if method == "user_wise_dp_sgd":
        assert (plan.expected_batch_size, plan.sampling_probability, plan.population) == (2, 2 / 5, 5)
        draws = [[0, 1, 3], [], [0, 2, 3, 4]]
        parts = [[KEPT[f"u{unit}"] for unit in draw] for draw in draws]
    else:
        assert (plan.expected_batch_size, plan.sampling_probability, plan.population) == (2, 2 / 10, 10)
        draws = [[0, 2, 3], [], [1, 4, 9, 8]]
        flat = [record for kept in KEPT.values() for record in kept]
        parts = [[[flat[record]] for record in draw] for draw in draws]
    known(*draws)
    model, reference = network(), network()
    fit(model, plan, tmp_path, steps=3, method=gradients)
    norms = []
    for step, units in enumerate(parts, start=1):
        sums = [np.zeros(v.shape) for v in reference.trainable_variables]
        for indices in units:
            clipped, norm = clipped_mean(reference, indices, plan.clip_norm)
            norms.append(norm)
            sums = [total + g for total, g in zip(sums, clipped, strict=True)]
        for index, (v, total) in enumerate(zip(reference.trainable_variables, sums, strict=True)):
            v.assign(v - (total + values(v.shape, step, index)) / 2)
    assert min(norms) < plan.clip_norm < max(norms)
    for got, wanted in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-6)


def test_metrics_see_the_records_in_use_and_no_empty_slot(known, tmp_path):
    """Accuracy of the records of the units drawn, weighted as they are; the loss is the mean over units."""
    plan = tfdp.make_plan(spec_of("user_wise_dp_sgd"))
    known([0, 1, 3])
    model = network()
    x, y, weight = records()
    used = KEPT["u0"] + KEPT["u1"] + KEPT["u3"]
    right = (np.asarray(model(x)).argmax(1) == y).astype(float)
    loss = keras.losses.sparse_categorical_crossentropy(y, model(x), from_logits=True).numpy() * weight
    history = fit(model, plan, tmp_path, compiled={"metrics": ["accuracy"], "weighted_metrics": ["accuracy"]}).history
    assert history["accuracy"][0] == pytest.approx(right[used].mean())
    assert history["weighted_accuracy"][0] == pytest.approx((right * weight)[used].sum() / weight[used].sum())
    assert history["loss"][0] == pytest.approx(np.mean([loss[KEPT[u]].mean() for u in ("u0", "u1", "u3")]), rel=1e-5)


def test_a_unit_whose_gradient_is_not_finite_counts_as_zero(known, noise_is, monkeypatch, tmp_path):
    plan = tfdp.make_plan(spec_of("user_wise_dp_sgd"))
    known([0, 2])
    noise_is(lambda shape, step, index: np.zeros(shape))
    x, y, weight = records()
    x[7, 0] = np.nan  # one of three records of u2
    monkeypatch.setitem(globals(), "records", lambda: (x, y, weight))
    model, reference = network(), network()
    fit(model, plan, tmp_path)
    clipped, _ = clipped_mean(reference, KEPT["u0"], plan.clip_norm)
    for got, start, g in zip(model.get_weights(), reference.get_weights(), clipped, strict=True):
        np.testing.assert_allclose(got, start - g / 2, rtol=2e-5, atol=2e-6)


class TestPlan:
    def test_group_privacy_is_accounted_at_the_unit(self):
        plan = tfdp.make_plan(spec_of("group_privacy", num_records=10))
        assert (plan.num_units, plan.num_records, plan.group_size, plan.records_per_unit) == (5, 10, 3, 1)
        assert plan.step_event.sensitivities == (0.0, 1.0, 2.0, 3.0)
        np.testing.assert_allclose(plan.step_event.sampling_probs, [0.512, 0.384, 0.096, 0.008])
        user_wise = tfdp.make_plan(spec_of("user_wise_dp_sgd"))
        assert (user_wise.num_records, user_wise.group_size, user_wise.records_per_unit) == (None, 1, 3)
        assert user_wise.step_event.event.noise_multiplier == 1.0

    def test_reference_table(self, shared):
        """Epsilon of the plan is that of the mixture of Gaussians of the table, to a thousandth."""
        cases = json.loads((shared / "reference" / "accounting.json").read_text())["cases"]
        cases = [case for case in cases if case["kind"] == "group_privacy"]
        assert len(cases) == 3
        for case in cases:
            values = spec_of("group_privacy", k=case["records_per_unit"]).to_dict()
            values["claim"] |= {"delta": case["delta"], "epsilon": case["epsilon"] * 1.01}
            values["data"] |= {
                "num_records": case["num_records"],
                "num_units": -(-case["num_records"] // case["records_per_unit"]),
            }
            values["mechanism"]["noise_multiplier"] = case["noise_multiplier"]
            values["sampling"] |= {"expected_batch_size": case["expected_batch_size"], "steps": case["steps"]}
            plan = tfdp.make_plan(tfdp.PrivacySpec.from_dict(values))
            assert plan.epsilon(plan.steps) == pytest.approx(case["epsilon"], rel=1e-3)

    def test_calibration_never_overshoots_the_claim_on_a_user(self):
        values = spec_of("group_privacy", num_records=10).to_dict()
        values["claim"]["epsilon"], values["mechanism"]["noise_multiplier"] = 2.0, None
        plan = tfdp.make_plan(tfdp.PrivacySpec.from_dict(values))
        assert 2.0 * 0.99 < plan.epsilon(plan.steps) <= 2.0

    @pytest.mark.parametrize("changes", [{"records_per_unit": 1}, {"group_size": 2}, {"num_records": 9}])
    def test_cannot_be_turned_into_one_for_single_records(self, changes):
        for method in ("user_wise_dp_sgd", "group_privacy"):
            plan = tfdp.make_plan(spec_of(method, num_records=10))
            if any(getattr(plan, name) != value for name, value in changes.items()):
                with pytest.raises(PlanError, match="Make a new plan"):
                    dataclasses.replace(plan, **changes)


class TestLaterFits:
    def test_the_same_ids_go_on_and_others_are_refused(self, tmp_path):
        plan = tfdp.make_plan(spec_of("user_wise_dp_sgd", selection="random"))
        model = network()
        fit(model, plan, tmp_path)
        units = tmp_path / "ledger.jsonl.units"
        assert units.exists()
        fit(model, plan, tmp_path)
        before = model.get_weights()
        others = [*IDS[:11], "u0"]  # the last record changes hands, and a unit is missing:
        others[0] = "u4"
        with pytest.raises(MisuseError, match="the ids of the earlier fits"):
            fit(model, plan, tmp_path, ids=others)
        for one, other in zip(before, model.get_weights(), strict=True):
            np.testing.assert_array_equal(one, other)

    @pytest.mark.parametrize("content", [None, "", "{}", '{"key": "zz", "digest": "0"}'])
    def test_without_what_was_remembered_nothing_goes_on(self, tmp_path, content):
        plan = tfdp.make_plan(spec_of("user_wise_dp_sgd"))
        model = network()
        fit(model, plan, tmp_path)
        units = tmp_path / "ledger.jsonl.units"
        if content is None:
            units.unlink()
        else:
            units.write_text(content)
        with pytest.raises(MisuseError, match=r"ledger\.jsonl\.units, by which a later fit"):
            fit(model, plan, tmp_path)

    def test_what_is_released_does_not_tell_the_ids(self, tmp_path):
        """The digest of the ids is in no released file: a guess about the data could be tested by it."""
        plan = tfdp.make_plan(spec_of("user_wise_dp_sgd"))
        fit(network(), plan, tmp_path, steps=2)
        text = (tmp_path / "ledger.jsonl").read_text()
        content = json.loads((tmp_path / "ledger.jsonl.units").read_text())
        assert text.count('"kind":"units"') == 1
        for secret in (UnitMap.from_ids(IDS).digest.hex(), content["digest"], content["key"]):
            assert secret not in text
        assert UnitMap.from_ids(IDS).digest.hex() not in json.dumps(content)
