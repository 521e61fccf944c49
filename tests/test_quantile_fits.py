"""Fits whose clip norm follows a quantile: where it goes, what one unit moves, and what comes after a crash.

Statistical tests state their false-alarm rate; all others hold for every draw.
"""

from __future__ import annotations

import math
import shutil

import keras
import numpy as np
import pytest
from scipy import stats

import tfdp
from tfdp.gradients import uses
from tfdp.noise import GaussianNoise
from tfdp.resume import run as resumable

FEATURES = 4


def linear(plan, *, learning_rate=1e-12, **options):
    """The gradient of a unit is its record: the loss is w . x, at weights that hardly move."""
    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(1, use_bias=False)])
    model.set_weights([np.zeros((FEATURES, 1))])
    optimizer = tfdp.dp_optimizer("sgd", plan, learning_rate=learning_rate)
    model.compile(optimizer, loss=lambda y, y_pred: y_pred[:, 0], metrics=[], **options)
    return model


def records_with(norms, *, direction=None):
    generator = np.random.default_rng(3)
    x = generator.normal(size=(len(norms), FEATURES)) if direction is None else np.tile(direction, (len(norms), 1))
    x *= np.asarray(norms)[:, None] / np.linalg.norm(x, axis=1, keepdims=True)
    return x.astype(np.float32), np.zeros((len(norms), 1), np.float32)


def fit(model, plan, data, folder, *, steps, callbacks=(), batching=None, **options):
    batches = tfdp.poisson_batches(data, plan, **(batching or {}))
    private = tfdp.PrivacyCallback(plan, folder / "ledger.jsonl", **options)
    model.fit(batches, epochs=1, steps_per_epoch=steps, callbacks=[private, *callbacks], verbose=0, shuffle=False)
    return tfdp.read_ledger(folder / "ledger.jsonl")


@pytest.fixture
def counted(monkeypatch):
    """The counts that got noise, as (step, count), in the order in which that happened."""
    calls, real = [], GaussianNoise.noisy_count

    def noisy_count(self, count, stddev, *, step):
        calls.append((step, count))
        return real(self, count, stddev, step=step)

    monkeypatch.setattr(GaussianNoise, "noisy_count", noisy_count)
    return calls


class TestWhereItGoes:
    @pytest.mark.parametrize("start", [0.02, 60.0])
    def test_to_the_quantile_of_the_norms(self, plan_of, tmp_path, start):
        """400 log-normal norms, batches of about 100, noise of 2 on the count: 70% of them are below it in the end.

        In the stationary state its logarithm has standard deviation 0.05, that of the share below it is then 0.016: a
        mean over 40 steps that is off by 0.08 is a false alarm with a probability below 1e-6.
        """
        norms = np.exp(np.random.default_rng(4).normal(size=400))
        clip = f"{{quantile: 0.7, initial: {start}, learning_rate: 0.5, count_noise: 2.0}}"
        plan = plan_of(num_units=400, batch=100, steps=160, noise=1.0, clip=clip, microbatch=128)
        record = fit(linear(plan), plan, records_with(norms), tmp_path, steps=160)
        assert record.clip_norms[0] == np.float32(start)
        shares = [np.mean(norms <= norm) for norm in record.clip_norms[-40:]]
        assert abs(np.mean(shares) - 0.7) < 0.08

    def test_exactly_there_without_noise(self, plan_of, tmp_path, monkeypatch):
        """Full batches and no noise on the count: the last norms lie between the two norms at the quantile."""
        norms = np.array([0.3, 0.6, 1.1, 2.0, 3.5, 5.0, 7.0, 9.0, 20.0, 50.0])
        monkeypatch.setattr(GaussianNoise, "noisy_count", lambda self, count, stddev, *, step: count)
        clip = "{quantile: 0.75, initial: 1.0, learning_rate: 0.3, count_noise: 2.0}"
        plan = plan_of(num_units=10, batch=10, steps=150, clip=clip, scheme="full_batch", microbatch=5)
        record = fit(linear(plan), plan, records_with(norms), tmp_path, steps=150)
        assert all(7.0 * math.exp(-0.1) < norm < 9.0 * math.exp(0.1) for norm in record.clip_norms[-30:])
        assert min(record.clip_norms[-30:]) < 9.0 <= max(record.clip_norms[-30:])  # it steps over the norm at 8 of 10

    def test_the_share_is_of_the_public_batch_size(self, plan_of, draws_are, counted, tmp_path):
        """Whatever was drawn: 1 of 6 expected units, all 12, and nobody."""
        clip = "{quantile: 0.5, initial: 1.0, learning_rate: 0.2, count_noise: 2.0e-3}"
        plan = plan_of(noise=1e-3, clip=clip)
        draws_are([3], range(12), [])
        record = fit(linear(plan), plan, records_with([0.5] * 12), tmp_path, steps=3)
        found = [entry["noisy_fraction"] for entry in record.entries if "noisy_fraction" in entry]
        np.testing.assert_allclose(found, [0.5 + 0.5 / 6, 0.5 + 6 / 6, 0.5], atol=10 * 2e-3 / 6)
        assert [count for _, count in counted] == [0.5, 6.0, 0.0]

    @pytest.mark.parametrize("method", ["bookkeeping", "vectorized"])
    def test_units_without_a_gradient_count_for_nothing(self, plan_of, draws_are, counted, tmp_path, method):
        plan = plan_of(clip="{quantile: 0.5, initial: 1.0, count_noise: 2.0}")
        draws_are(range(5))
        x, y = records_with([0.5] * 12)
        x[0], x[1], x[2] = 0.0, np.nan, 1e30  # whose square float32 does not hold
        fit(linear(plan), plan, (x, y), tmp_path, steps=1, method=method)
        assert counted == [(1, 2 * 0.5)]


class TestOneUnit:
    """Sum and count in units of their noise, through `fit`: what one unit moves is at most, and at worst, 1/z."""

    @pytest.fixture
    def released(self, plan_of, noise_is, draws_are, counted, tmp_path):
        plan = plan_of(noise=1.3, clip="{quantile: 0.5, initial: 0.25, count_noise: 0.8}")
        fits = iter(range(100))

        def release(data, draw, **options):
            noise_is(lambda shape, step, index: np.zeros(shape))
            draws_are(draw)
            counted.clear()
            model = linear(plan, learning_rate=1.0)
            folder = tmp_path / str(next(fits))
            fit(model, plan, data, folder, steps=1, **options)
            adaptive = plan.adaptive_clipping
            total = -model.get_weights()[0].ravel() * plan.expected_batch_size
            stddev = adaptive.gradient_noise_multiplier * 0.25
            return np.append(total / stddev, counted[0][1] / adaptive.count_noise)

        return release

    @pytest.mark.parametrize("options", [{}, {"method": "vectorized"}, {"jit_compile": True}])
    @pytest.mark.parametrize("norm", [0.25, 40.0])
    def test_there_or_not(self, released, norm, options):
        data = records_with([*[0.1, 0.3] * 5, 1.0, norm])
        moved = np.linalg.norm(released(data, range(12), **options) - released(data, range(11), **options))
        assert 1 / 1.3 * (1 - 1e-4) < moved < 1 / 1.3 * (1 + 1e-5)

    def test_replaced_by_one_that_contributes_nothing(self, released):
        """A null record in its place, which is drawn like it: as far as one that is not there, not further."""
        x, y = records_with([0.1] * 11 + [40.0])
        null = x.copy()
        null[11] = 0.0
        moved = np.linalg.norm(released((x, y), range(12)) - released((null, y), range(12)))
        assert 1 / 1.3 * (1 - 1e-4) < moved < 1 / 1.3 * (1 + 1e-5)

    def test_replaced_by_the_opposite(self, released):
        """At the clip norm in one direction, far above it in the other: both sums move by twice a contribution."""
        x, y = records_with([0.1] * 11 + [0.25], direction=np.eye(FEATURES)[0])
        other = x.copy()
        other[11] *= -160
        moved = np.linalg.norm(released((x, y), range(12)) - released((other, y), range(12)))
        assert 2 / 1.3 * (1 - 1e-4) < moved < 2 / 1.3 * (1 + 1e-5)


UNITS_OF_SEVERAL = """
schema_version: "1.0"
claim:
  epsilon: 1.0e+6
  delta: 1.0e-2
  adjacency: add_or_remove_one
  privacy_unit: {{kind: user, description: one writer, id_field: writer, max_records_per_unit: 2, method: {method},
    selection: longest}}
  data_accesses: [training]
data: {{num_units: 4, num_records: 8, size_is_public: true}}
mechanism: {{noise_multiplier: 1.0, clip_norm: {{quantile: 0.5, initial: 1.0, count_noise: 2.0}}}}
sampling: {{scheme: poisson, expected_batch_size: 2, steps: 3, microbatch_size: 2}}
"""


@pytest.mark.parametrize(
    ("method", "draw", "wanted"),
    [
        # Means of two records each: 0.6, 1.05, 0.3, 2.0.
        ("user_wise_dp_sgd", [0, 1, 2], 0.5 - 0.5 + 0.5),
        # Records one by one: 0.3, 0.9, 0.1, 2.0 and so on.
        ("group_privacy", [0, 1, 2, 3, 7], 0.5 + 0.5 + 0.5 - 0.5 - 0.5),
    ],
)
def test_what_is_clipped_is_what_is_counted(draws_are, counted, tmp_path, method, draw, wanted):
    """Whole users where their records are averaged, single records where each is clipped on its own."""
    plan = tfdp.make_plan(tfdp.PrivacySpec.from_text(UNITS_OF_SEVERAL.format(method=method)))
    data = records_with([0.3, 0.9, 0.1, 2.0, 0.2, 0.4, 1.5, 2.5], direction=np.eye(FEATURES)[0])
    ids = ["a", "a", "b", "b", "c", "c", "d", "d"]
    draws_are(draw)
    record = fit(
        linear(plan), plan, data, tmp_path, steps=1, batching={"unit_ids": ids, "scores": np.arange(8.0, 0.0, -1.0)}
    )
    assert counted == [(1, wanted)]
    assert record.epsilon() == plan.epsilon(1)


@pytest.mark.parametrize("scheme", [{"scheme": "truncated_poisson", "truncated_batch_size": 7}, {"batch": 1e-3}])
@pytest.mark.parametrize("compiling", [{}, {"run_eagerly": True}])
def test_other_batches_and_eager_steps(plan_of, counted, tmp_path, scheme, compiling):
    plan = plan_of(clip="{quantile: 0.5, initial: 1.0, learning_rate: 1.0e-3, count_noise: 2.0}", **scheme)
    record = fit(linear(plan, **compiling), plan, records_with(np.linspace(0.1, 2, 12)), tmp_path, steps=4)
    assert [step for step, _ in counted] == [1, 2, 3, 4]
    assert len(set(record.clip_norms)) == 4
    assert record.epsilon() == plan.epsilon(4)


def test_kernels_that_are_formed_in_turn(plan_of, noise_is, draws_are, monkeypatch, tmp_path):
    """Large ones, with several tokens, are clipped unit by unit in a loop of their own: to the same norm that moves."""
    plan = plan_of(clip="{quantile: 0.5, initial: 0.3, learning_rate: 2.0, count_noise: 2.0}")
    generator = np.random.default_rng(5)
    x = (generator.normal(size=(12, 3, FEATURES)) * np.linspace(0.1, 3, 12)[:, None, None]).astype(np.float32)
    y = generator.normal(size=(12, 3, 2)).astype(np.float32)
    monkeypatch.setattr(GaussianNoise, "noisy_count", lambda self, count, stddev, *, step: count + 0.1)

    def trained(name):
        draws_are(range(12), [], [1, 5, 9])
        noise_is(lambda shape, step, index: np.full(shape, 0.1 * index))
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((3, FEATURES)), keras.layers.Dense(4), keras.layers.Dense(2)])
        model.compile(tfdp.dp_optimizer("sgd", plan, learning_rate=1.0), loss="mse", metrics=[])
        return model, fit(model, plan, (x, y), tmp_path / name, steps=3)

    at_once, wanted = trained("at once")
    monkeypatch.setattr(uses.Outer, "is_formed_in_turn", property(lambda use: use.rows.shape[1] > 1))
    in_turn, found = trained("in turn")
    assert len(set(wanted.clip_norms)) == 3
    np.testing.assert_allclose(found.clip_norms, wanted.clip_norms, rtol=1e-6)
    for one, other in zip(in_turn.get_weights(), at_once.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


class Killed(BaseException):
    """What a killed process does: nobody catches it."""


class TestAfterACrash:
    """The ledger and the checkpoint as a crash leaves them; what was released is never released again."""

    @pytest.fixture
    def left(self, plan_of, tmp_path, monkeypatch):
        """Trains 4 of 8 steps with a checkpoint after the second, and kills; keeps what was on the disk at each."""
        plan = plan_of(clip="{quantile: 0.5, initial: 1.0, learning_rate: 0.7, count_noise: 2.0}", steps=8)
        data = records_with(np.linspace(0.1, 2, 12))

        def copy(name):
            folder = tmp_path / name
            folder.mkdir()
            shutil.copy(tmp_path / "first" / "ledger.jsonl", folder)
            if (tmp_path / "first" / "checkpoint").exists():
                shutil.copytree(tmp_path / "first" / "checkpoint", folder / "checkpoint")

        def end(batch, logs):
            copy(f"after {batch + 1}")
            if batch == 3:
                raise Killed

        begin = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: copy(f"in {batch + 1}"))
        with pytest.raises(Killed):
            fit(
                linear(plan),
                plan,
                data,
                tmp_path / "first",
                steps=8,
                callbacks=[begin, keras.callbacks.LambdaCallback(on_train_batch_end=end)],
                checkpoint=tmp_path / "first" / "checkpoint",
                save_freq=2,
            )

        def go_on(name, *, steps=8):
            for known in ("_ended_fits", "_positions"):  # as in a new process
                monkeypatch.setattr(resumable, known, {})
            folder = tmp_path / name
            return fit(linear(plan), plan, data, folder, steps=steps, checkpoint=folder / "checkpoint", save_freq=2)

        return plan, go_on, tfdp.read_ledger(tmp_path / "first" / "ledger.jsonl")

    def test_after_a_checkpoint_it_is_the_norm_that_would_have_come(self, left, counted):
        """Bit by bit that of the run that was not stopped, and no count of before gets noise again."""
        plan, go_on, first = left
        counted.clear()
        record = go_on("after 2")
        assert record.clip_norms[:2] == first.clip_norms[:2]
        assert record.clip_norms[2] == first.clip_norms[2]
        assert record.clip_norms[2] == plan.adaptive_clipping.following(first.clip_norms[1], fractions(first)[1])
        assert [step for step, _ in counted] == [3, 4, 5, 6, 7, 8]
        assert record.steps == 8

    def test_steps_after_the_checkpoint_have_moved_it_too(self, left, counted):
        """Killed in the fourth step: the weights are those of the second, the norm is that of the lines so far."""
        _, go_on, first = left
        counted.clear()
        record = go_on("in 4")
        assert record.clip_norms[:4] == first.clip_norms[:4]
        # What the fourth step would have released is not known, and is not made up: the norm stays.
        assert record.clip_norms[4] == first.clip_norms[3]
        assert [step for step, _ in counted] == [5, 6, 7, 8]
        assert len(fractions(record)) == 7
        assert record.steps == 8

    def test_a_count_that_no_line_holds_is_lost_and_not_drawn_anew(self, left, counted):
        """The third step has run and no line came after it."""
        plan, go_on, first = left
        counted.clear()
        record = go_on("after 3")
        assert record.clip_norms[3] == first.clip_norms[2]
        assert [step for step, _ in counted] == [4, 5, 6, 7, 8]
        assert record.epsilon() == plan.epsilon(8)


def fractions(record):
    return [entry["noisy_fraction"] for entry in record.entries if "noisy_fraction" in entry]


def test_counts_get_normal_noise_of_their_own():
    """10,000 counts, against the normal distribution; false alarms 1e-6 each.

    Independent of the noise on the sums of the same step, and of the count before.
    """
    noise = GaussianNoise()
    zero = [np.zeros(1, np.float32)]
    pairs = np.array(
        [
            (noise.noisy_count(3.5, 2.0, step=1) - 3.5, noise.noisy_means(zero, 1.0, 1.0, step=1)[0][0])
            for _ in range(10_000)
        ]
    )
    values = pairs[:, 0] / 2.0
    assert len(set(values)) == len(values)
    assert stats.kstest(values, "norm").pvalue > 1e-6
    assert 5e-7 < stats.chi2.cdf((values**2).sum(), values.size) < 1 - 5e-7
    for other in (pairs[:, 1], np.roll(values, 1)):
        assert stats.pearsonr(values, other).pvalue > 1e-6


def test_counts_of_tests_come_again_and_are_not_those_of_the_sums():
    """Under a seed; a step that comes again is refused, as for sums."""
    from tfdp.errors import MisuseError

    noises = [GaussianNoise("prng", 7) for _ in range(2)]
    one, other = ([noise.noisy_count(0.0, 1.0, step=step) for step in (1, 2)] for noise in noises)
    assert one == other
    assert one[0] != one[1]
    assert one[0] != float(noises[0].noisy_means([np.zeros(1, np.float32)], 1.0, 1.0, step=1)[0][0])
    with pytest.raises(MisuseError):
        noises[0].noisy_count(0.0, 1.0, step=2)
