"""Fits under clip norms that are more than one number, against the loop over single units."""

from __future__ import annotations

import dataclasses
import json
import re

import keras
import numpy as np
import pytest
from scipy import stats

import tfdp
from tfdp import accounting
from tfdp.card.checks import compared, contract_digest
from tfdp.errors import AccountingError, GradientError, LedgerError, PlanError
from tfdp.gradients import per_layer
from tfdp.ledger import Ledger
from tfdp.noise import GaussianNoise
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


QUANTILE = "{quantile: 0.5, initial: 2.5, learning_rate: 0.7, count_noise: 2.0}"


@pytest.fixture
def counts_are(monkeypatch):
    """Replaces the noise on the count by 0.25 a step; returns the calls (step, count, stddev)."""
    calls = []

    def noisy_count(self, count, stddev, *, step):
        calls.append((step, count, stddev))
        return count + 0.25 * step

    monkeypatch.setattr(GaussianNoise, "noisy_count", noisy_count)
    return calls


class TestQuantile:
    @pytest.mark.parametrize("options", [{}, {"method": "vectorized"}, {"hybrid": True}, {"jit_compile": True}])
    def test_every_step_clips_noises_and_counts_with_its_own_norm(
        self, plan_of, noise_is, counts_are, draws_are, tmp_path, options
    ):
        """All units, none, and a few: sum, noise, count, denominator and ledger, step by step, against a loop."""
        plan = plan_of(clip=QUANTILE, noise=1.5, steps=5)
        calls = noise_is(lambda shape, step, index: np.full(shape, 10.0 * index + step))
        draws = [list(range(UNITS)), [], [1, 4, 7, 9, 11], [0]]
        draws_are(*draws)
        model, (x, y) = network(), records()
        reference = keras.models.clone_model(model)
        reference.set_weights(model.get_weights())
        fit(model, plan, tmp_path / "ledger.jsonl", steps=4, **options)
        clip_norm, used, counted, fractions = 2.5, [], [], []
        for step, draw in enumerate(draws, start=1):
            units = unit_gradients(reference, x[draw], y[draw])
            norms = np.array([norm_of(unit) for unit in units])
            counted.append(sum(0.5 if norm <= clip_norm else -0.5 for norm in norms))
            used.append(clip_norm)
            for index, variable in enumerate(reference.trainable_variables):
                moved = sum(u[index] * min(1.0, clip_norm / n) for u, n in zip(units, norms, strict=True))
                variable.assign(variable - (moved + 10.0 * index + step) / 6)
            fractions.append(0.5 + (counted[-1] + 0.25 * step) / 6)
            clip_norm = float(np.float32(clip_norm * np.exp(-0.7 * (fractions[-1] - 0.5))))
        assert -6 < counted[0] < 6  # some are below, some above
        assert used[1] != used[2] != used[3]
        for one, other in zip(model.get_weights(), reference.get_weights(), strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)
        assert counts_are == [(step, count, 2.0) for step, count in enumerate(counted, start=1)]
        gradients_alone = 1 / np.sqrt(1 / 1.5**2 - 1 / (2 * 2.0) ** 2)
        assert plan.gradient_noise_multiplier == pytest.approx(gradients_alone)
        stddevs = [stddev for _, index, stddev in calls if index == 0]
        np.testing.assert_allclose(stddevs, gradients_alone * np.array(used), rtol=1e-6)
        record = tfdp.read_ledger(tmp_path / "ledger.jsonl")
        np.testing.assert_allclose(record.clip_norms, used, rtol=1e-6)
        found = [entry["noisy_fraction"] for entry in record.entries if "noisy_fraction" in entry]
        np.testing.assert_allclose(found, fractions, rtol=1e-6)

    def test_a_unit_that_is_not_finite_counts_for_nothing(self, plan_of, noise_is, counts_are, draws_are, tmp_path):
        plan = plan_of(clip=QUANTILE)
        noise_is(lambda shape, step, index: np.zeros(shape))
        draws_are([0, 2, 5])
        x, y = records()
        x[2] = np.nan
        y[5] *= 1e3
        fit(network(), plan, tmp_path / "ledger.jsonl", data=(x, y))
        assert counts_are == [(1, 0.5 - 0.5, 2.0)]

    @pytest.mark.parametrize("batch", ["empty", "everybody"])
    def test_noise_is_that_of_the_accounting(self, plan_of, tmp_path, batch):
        """Measured on updates and ledger alone, gradients of zero: two-sided chi-square, false alarms 1e-6 each.

        What both noises amount to together is the noise multiplier that the event was made from.
        """
        sampling = {"batch": 1e-4} if batch == "empty" else {"scheme": "full_batch", "batch": UNITS}
        clip = "{quantile: 0.5, initial: 1.5, learning_rate: 1.0e-6, count_noise: 1.0}"
        steps = 150
        plan = plan_of(clip=clip, noise=1.6, steps=steps, **sampling)
        model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(1, use_bias=False)])
        model.set_weights([np.zeros((FEATURES, 1))])
        trail = [model.get_weights()[0].ravel()]
        watch = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: trail.append(model.get_weights()[0].ravel())
        )
        data = np.zeros((UNITS, FEATURES), np.float32), np.zeros((UNITS, 1), np.float32)
        fit(model, plan, tmp_path / "ledger.jsonl", steps=steps, data=data, callbacks=[watch])
        record = tfdp.read_ledger(tmp_path / "ledger.jsonl")
        norms = np.array(record.clip_norms)[:, None]
        gradients = np.diff(np.array(trail, np.float64), axis=0) * plan.expected_batch_size / norms
        fractions = np.array([entry["noisy_fraction"] for entry in record.entries if "noisy_fraction" in entry])
        counts = (fractions - 0.5) * plan.expected_batch_size  # units without a gradient count for nothing
        assert counts.shape == (steps,)
        assert len(set(counts)) == steps
        wanted = (1 / np.sqrt(1 / 1.6**2 - 1 / 4), 1.0)
        for values, deviation in zip((gradients, counts), wanted, strict=True):
            statistic = stats.chi2.cdf((values**2).sum() / deviation**2, values.size)
            assert 5e-7 < statistic < 1 - 5e-7
        joint = 1 / np.sqrt(1 / (gradients**2).mean() + 1 / (4 * (counts**2).mean()))
        assert joint == pytest.approx(1.6, rel=0.3)
        assert plan.step_event == plan_of(noise=1.6, steps=steps, **sampling).step_event

    def test_a_second_fit_and_a_new_process_go_on_from_the_ledger(self, plan_of, tmp_path):
        """The clip norm comes from the lines so far; a fraction that a crash took moves nothing."""
        plan = plan_of(clip=QUANTILE, steps=8)
        ledger, folder = tmp_path / "ledger.jsonl", tmp_path / "checkpoint"
        model = network()
        fit(model, plan, ledger, steps=2)
        fit(model, plan, ledger, steps=2)
        record = tfdp.read_ledger(ledger)
        rule, norms = plan.adaptive_clipping, record.clip_norms
        found = [entry["noisy_fraction"] for entry in record.entries if "noisy_fraction" in entry]
        assert norms[0] == 2.5
        assert norms[1:] == [rule.following(n, f) for n, f in zip(norms[:3], found[:3], strict=True)]
        assert len(set(norms)) == 4
        with Ledger.create_or_open(ledger, plan.to_dict()) as opened:
            assert opened.clip_norm == rule.following(norms[3], found[3])  # from the line at the end of the fit
            opened.append_step(5)  # a step that a crash took with it
            with pytest.raises(LedgerError, match="one finite noisy fraction"):
                opened.release(float("nan"))
        again, lost = network(), tfdp.read_ledger(ledger).clip_norms[-1]
        fit(again, plan, ledger, steps=2, checkpoint=folder)
        assert tfdp.read_ledger(ledger).clip_norms[5] == lost

    def test_a_torn_line_leaves_the_norm(self, plan_of, tmp_path):
        plan, ledger = plan_of(clip=QUANTILE, steps=8), tmp_path / "ledger.jsonl"
        with Ledger.create_or_open(ledger, plan.to_dict()) as opened:
            opened.append_step(1)
            opened.release(0.9)
            moved = opened.clip_norm
            opened.append_step(2)
            opened.release(0.1)
        whole = ledger.read_bytes()
        ledger.write_bytes(whole + b'{"clip_norm":2.')
        with Ledger.create_or_open(ledger, plan.to_dict()) as opened:
            assert (opened.steps, opened.clip_norm) == (3, moved)
            opened.append_step(4)
        assert tfdp.read_ledger(ledger).clip_norms == [2.5, moved, moved]

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"clip_norm": 0.5}, "expected clip norm"),
            ({"noisy_fraction": 0.4}, "expected clip norm"),
            ({"clip_norm": None}, "expected the clip norm of the step"),
        ],
    )
    def test_a_norm_that_does_not_follow_is_seen(self, plan_of, tmp_path, change, message):
        """In a chain that holds together again."""
        plan, ledger = plan_of(clip=QUANTILE, steps=8), tmp_path / "ledger.jsonl"
        with Ledger.create_or_open(ledger, plan.to_dict()) as opened:
            opened.append_step(1)
            opened.release(0.9)
            opened.append_step(2)
        *lines, last = ledger.read_bytes().splitlines()
        changed = {name: value for name, value in {**json.loads(last), **change}.items() if value is not None}
        line = json.dumps(changed, sort_keys=True, separators=(",", ":")).encode()
        ledger.write_bytes(b"\n".join([*lines, line]) + b"\n")
        with pytest.raises(LedgerError, match=message):
            tfdp.read_ledger(ledger)

    def test_card(self, plan_of, tmp_path):
        plan, ledger = plan_of(clip=QUANTILE, noise=1.5), tmp_path / "ledger.jsonl"
        model = network()
        fit(model, plan, ledger, steps=3)
        written = tfdp.export(model, tmp_path)
        card, norms = json.loads(written["json"].read_text()), tfdp.read_ledger(ledger).clip_norms
        shown = card["accounting"]["adaptive_clipping"]
        assert (shown["first"], shown["last"]) == (norms[0], norms[-1])
        assert (shown["smallest"], shown["largest"]) == (min(norms), max(norms))
        assert [(point["step"], point["clip_norm"]) for point in shown["over_steps"]] == list(enumerate(norms, start=1))
        assert (shown["quantile"], shown["count_noise"]) == (0.5, 2.0)
        assert shown["count_share"] == pytest.approx(1.5**2 / (2 * 2.0) ** 2)
        assert shown["gradient_noise_multiplier"] == pytest.approx(plan.gradient_noise_multiplier)
        assert card["accounting"]["noise_stddev"] == pytest.approx(plan.gradient_noise_multiplier * 2.5)
        assert card["accounting"]["noise_multiplier"] == 1.5
        (row,) = [each for each in card["data_accesses"] if each["name"] == "Choice of the clip norm"]
        assert row["status"] == "covered"
        for page in ("markdown", "html"):
            text = written[page].read_text()
            assert "of gradients and count together" in text
            assert "14.07%" in text  # of the accounting, rounded up
        assert 'aria-label="Clip norm by step"' in text
        assert [finding for finding in tfdp.check_card(tmp_path) if finding.id == "PS080"] == []
        (metrics,) = [each for each in card["data_accesses"] if each["name"] == "Metrics in the progress bar"]
        assert "clip_norm" not in metrics["note"]  # what epsilon covers needs no warning
        for field, value in (("count_noise", 1.0), ("count_share", 0.01), ("last", 9.0), ("over_steps", [])):
            changed = json.loads(written["json"].read_text())
            changed["accounting"]["adaptive_clipping"][field] = value
            (tmp_path / "changed").mkdir(exist_ok=True)
            (tmp_path / "changed" / "MODEL_CARD.json").write_text(json.dumps(changed))
            found = tfdp.check_card(tmp_path / "changed" / "MODEL_CARD.json", ledger=ledger)
            assert any(finding.id == "PS080" and "adaptive_clipping" in finding.where for finding in found), field

    @pytest.mark.parametrize("field", ["gradient_noise_multiplier", "count_noise"])
    def test_less_noise_than_was_accounted_is_refused_by_whoever_reads_the_ledger(self, plan_of, tmp_path, field):
        """A header that was written with one of the noises smaller, under a digest that fits it."""
        plan, ledger = plan_of(clip=QUANTILE, noise=1.5), tmp_path / "ledger.jsonl"
        values = plan.to_dict()
        values["adaptive_clipping"][field] *= 0.9
        values["digest"] = contract_digest(values)
        for _ in range(2):  # the writer that makes it, and everybody who reads it
            with pytest.raises(LedgerError, match=r"noise multiplier 1\.5 together"):
                Ledger.create_or_open(ledger, values)
            with pytest.raises(LedgerError, match=r"noise multiplier 1\.5 together"):
                tfdp.read_ledger(ledger)

    def test_noises_that_were_divided_in_another_way_differ_from_the_spec(self, plan_of, tmp_path):
        """Together they are what was accounted, so the ledger stands; the comparison with the spec names them."""
        plan, ledger = plan_of(clip=QUANTILE, noise=1.5), tmp_path / "ledger.jsonl"
        values = plan.to_dict()
        other = accounting.adaptive_clipping(
            noise_multiplier=1.5, quantile=0.4, expected_batch_size=6, learning_rate=0.1, count_noise=3.0
        )
        values["adaptive_clipping"] = other.to_dict()
        values["digest"] = contract_digest(values)
        with Ledger.create_or_open(ledger, values) as opened:
            opened.append_step(1)
        rows = compared(tfdp.read_ledger(ledger), plan.spec)
        wrong = {name for name, wanted, found in rows if wanted != pytest.approx(found)}
        fields = ("quantile", "learning_rate", "count_noise", "gradient_noise_multiplier")
        assert wrong == {f"adaptive_clipping.{name}" for name in fields}

    @pytest.mark.parametrize("change", [{"gradient_noise_multiplier": 1.5}, {"count_noise": 1.0}])
    def test_a_plan_with_other_noises_is_refused(self, plan_of, change):
        plan = plan_of(clip=QUANTILE, noise=1.5)
        with pytest.raises(PlanError, match="adaptive_clipping to be what the spec"):
            dataclasses.replace(plan, adaptive_clipping=dataclasses.replace(plan.adaptive_clipping, **change))
        with pytest.raises(PlanError, match="adaptive_clipping to be what the spec"):
            dataclasses.replace(plan, adaptive_clipping=None)

    def test_calibration_never_overshoots_with_the_count_included(self):
        """Epsilon from both noises as they run, joined here by the formula for lengths; poisson and full batch."""
        cases = (("poisson", 50, "null"), ("poisson", 200, 0.9), ("full_batch", "null", 30.0))
        for scheme, batch, count_noise in cases:
            sampling = f"{{scheme: {scheme}, expected_batch_size: {batch}, steps: 40}}"
            spec = tfdp.PrivacySpec.from_text(SPEC.format(count_noise=count_noise, sampling=sampling))
            plan = tfdp.make_plan(spec)
            ran = plan.adaptive_clipping
            joint = (ran.gradient_noise_multiplier**-2 + (2 * ran.count_noise) ** -2) ** -0.5
            event = accounting.step_event(
                scheme=scheme, sampling_probability=plan.sampling_probability, noise_multiplier=joint, num_units=1000
            )
            cost = accounting.epsilon(event, 40, delta=1e-5, adjacency="add_or_remove_one")
            assert 0.998 * 6 < cost <= 6 * (1 + 1e-6)
            assert ran.gradient_noise_multiplier > plan.noise_multiplier

    def test_a_count_noise_that_calibration_cannot_afford_is_refused(self):
        text = SPEC.format(count_noise=0.3, sampling="{scheme: full_batch, steps: 40}")
        with pytest.raises(AccountingError, match="count_noise above half the noise multiplier"):
            tfdp.make_plan(tfdp.PrivacySpec.from_text(text))
        stated = text.replace("clip_norm:", "noise_multiplier: 5.0, clip_norm:")
        with pytest.raises(PlanError, match=r"PS014 error: mechanism\.clip_norm\.count_noise"):
            tfdp.make_plan(tfdp.PrivacySpec.from_text(stated))

    @pytest.mark.parametrize("initial", [9e-7, 1.1e12])
    def test_an_initial_norm_that_a_moving_one_never_has_is_refused(self, plan_of, initial):
        with pytest.raises(PlanError, match=r"PS014 error: mechanism\.clip_norm\.initial: .* from 1e-6 to 1e12"):
            plan_of(clip=f"{{quantile: 0.5, initial: {initial}}}")

    def test_the_choice_of_the_norm_may_be_claimed_where_it_is_paid_for(self):
        text = SPEC.format(count_noise="null", sampling="{scheme: full_batch, steps: 40}")
        text = text.replace("[training]", "[training, clip_selection]")
        assert "PS012" not in [finding.id for finding in tfdp.review(tfdp.PrivacySpec.from_text(text))]
        fixed = re.sub(r"clip_norm: \{.*?\}", "clip_norm: 1.0", text)
        assert "PS012" in [finding.id for finding in tfdp.review(tfdp.PrivacySpec.from_text(fixed))]

    def test_a_digest_of_before_stays(self, plan_of):
        """A plan with one clip norm has no word of this in its contract: ledgers of older versions go on."""
        assert "adaptive_clipping" not in plan_of().to_dict()
        assert "adaptive_clipping" in plan_of(clip=QUANTILE).to_dict()


SPEC = """
schema_version: "1.0"
claim:
  epsilon: 6.0
  delta: 1.0e-5
  adjacency: add_or_remove_one
  privacy_unit: {{kind: example, description: one record}}
  data_accesses: [training]
data: {{num_units: 1000, size_is_public: true, deduplication: exact}}
mechanism: {{clip_norm: {{quantile: 0.5, initial: 1.0, count_noise: {count_noise}}}}}
sampling: {sampling}
"""
