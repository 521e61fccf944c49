"""Fits under clip norms that are more than one number, against the loop over single units."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import tfdp
from tfdp.errors import GradientError, PlanError
from tfdp.gradients import per_layer
from tfdp.sampling.poisson import PoissonSampler

UNITS, FEATURES = 12, 5


def records():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(UNITS, FEATURES)) * np.linspace(0.1, 3, UNITS)[:, None]
    return x.astype(np.float32), generator.normal(size=(UNITS, 2)).astype(np.float32)


def network():
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(4, activation="tanh", name="first"), keras.layers.Dense(2, name="last")]
    return keras.Sequential([keras.Input((FEATURES,)), *layers], name="net")


def fit(model, plan, ledger, *, steps=1, data=None, callbacks=(), **options):
    model.compile(tfdp.dp_optimizer("sgd", plan, learning_rate=1.0), loss="mse", metrics=[])
    callback = tfdp.PrivacyCallback(plan, ledger=ledger, **options)
    batches = tfdp.poisson_batches(records() if data is None else data, plan)
    history = model.fit(
        batches, epochs=1, steps_per_epoch=steps, callbacks=[callback, *callbacks], verbose=0, shuffle=False
    )
    return callback, history


@pytest.fixture
def drawn(monkeypatch):
    """What the sampler drew, batch by batch."""
    draws, draw = [], PoissonSampler.draw
    monkeypatch.setattr(PoissonSampler, "draw", lambda self: draws.append(draw(self)) or draws[-1])
    return draws


def unit_gradients(model, x, y):
    """Gradient of each unit, one at a time."""
    import tensorflow as tf

    found = []
    for unit in range(len(x)):
        with tf.GradientTape() as tape:
            loss = keras.losses.MeanSquaredError()(y[unit : unit + 1], model(x[unit : unit + 1]))
        found.append(
            [np.asarray(g, np.float64) for g in tape.gradient(loss, [v.value for v in model.trainable_variables])]
        )
    return found


def norm_of(gradients):
    return float(np.sqrt(sum(np.sum(g**2) for g in gradients)))


class TestPerLayer:
    @pytest.mark.parametrize("clip", ["{per_layer: 2.4}", '{per_layer: {"*first/*": 1.5, "*": 2.0}}'])
    @pytest.mark.parametrize("method", ["bookkeeping", "vectorized"])
    def test_the_update_is_the_noisy_sum_of_what_each_layer_was_clipped_to(
        self, plan_of, noise_is, drawn, tmp_path, clip, method
    ):
        """The noise is sigma * sqrt(sum of C_l^2), the same for every layer."""
        plan = plan_of(clip=clip, noise=1.5)
        calls = noise_is(lambda shape, step, index: np.full(shape, 10.0 * index + step))
        model, (x, y) = network(), records()
        before = [v.numpy() for v in model.trainable_variables]
        units = unit_gradients(model, x, y)
        fit(model, plan, tmp_path / "ledger.jsonl", method=method)
        halves = [(0, 1), (2, 3)]
        bounds = [2.4 / np.sqrt(2)] * 2 if clip == "{per_layer: 2.4}" else [1.5, 2.0]
        total = 2.4 if clip == "{per_layer: 2.4}" else 2.5
        norms = np.array([[norm_of([unit[i] for i in half]) for half in halves] for unit in units])
        assert ((norms > bounds).any(0) & (norms < bounds).any(0)).all()  # both sides of both norms take part
        assert plan.clip_norm == pytest.approx(total)
        assert {stddev for _, _, stddev in calls} == {plan.noise_stddev}
        assert plan.noise_stddev == pytest.approx(1.5 * total)
        for index, (variable, start) in enumerate(zip(model.trainable_variables, before, strict=True)):
            layer = index // 2
            moved = sum(units[u][index] * min(1.0, bounds[layer] / norms[u, layer]) for u in drawn[0])
            wanted = start - (moved + 10.0 * index + 1) / plan.expected_batch_size
            np.testing.assert_allclose(variable.numpy(), wanted, rtol=2e-5, atol=2e-6)

    def test_ledger_and_card_name_the_norms(self, plan_of, tmp_path):
        plan = plan_of(clip="{per_layer: 2.4}")
        model = network()
        fit(model, plan, tmp_path / "ledger.jsonl", steps=2)
        (begun,) = tfdp.read_ledger(tmp_path / "ledger.jsonl").of_kind("fit_begin")
        assert begun["layer_clip_norms"] == pytest.approx({"net/first": 2.4 / np.sqrt(2), "net/last": 2.4 / np.sqrt(2)})
        written = tfdp.export(model, tmp_path)
        assert "2 layers, each to 1.697" in written["markdown"].read_text()
        assert "2 layers, each to 1.697" in written["html"].read_text()
        assert [finding for finding in tfdp.check_card(tmp_path) if finding.id == "PS080"] == []

    def test_a_pattern_that_fits_nothing_ends_the_fit_before_a_step(self, plan_of, tmp_path):
        plan = plan_of(clip='{per_layer: {"*middle/*": 0.3, "*": 0.4}}')
        with pytest.raises(GradientError, match="which fits none of"):
            fit(network(), plan, tmp_path / "ledger.jsonl")
        assert tfdp.read_ledger(tmp_path / "ledger.jsonl").steps == 0

    def test_epsilon_is_that_of_the_flat_norm(self, plan_of):
        """Sensitivity and noise scale together: the same sigma costs the same."""
        layered, flat = plan_of(clip='{per_layer: {"a": 3, "b": 4}}', noise=1.5), plan_of(clip=5.0, noise=1.5)
        assert layered.step_event == flat.step_event
        assert layered.clip_norm == flat.clip_norm == 5.0
        assert per_layer(network(), 5.0).norms == pytest.approx((5 / np.sqrt(2),) * 2)

    def test_two_kinds_at_once_are_refused(self, plan_of):
        for clip in ("{per_layer: 1.0, quantile: 0.5, initial: 1.0}", "{}", "{per_layer: 1.0, initial: 1.0}"):
            with pytest.raises(PlanError, match=r"PS014 error: mechanism\.clip_norm"):
                plan_of(clip=clip)

    def test_a_quantile_is_refused(self, plan_of):
        """Its noise on the count is accounted for, its fits are not tried enough."""
        with pytest.raises(PlanError, match=r"PS014 error: mechanism\.clip_norm\.quantile: .* not built yet"):
            plan_of(clip="{quantile: 0.5, initial: 1.5}")
