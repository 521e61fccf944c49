"""The law of the noise.

Each statistical test rejects correct noise with a probability of at most 1e-6, and is two-sided: noise that is too
small or too regular fails as noise that is too large does.
"""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import pytest
from scipy import special, stats

from tfdp import noise
from tfdp.errors import MisuseError
from tfdp.noise import GaussianNoise, standard_normal_from_words

FALSE_ALARM = 1e-6
Z = stats.norm.isf(FALSE_ALARM / 2)


@pytest.fixture(params=["csprng", "prng"])
def source(request):
    return GaussianNoise(request.param, 5 if request.param == "prng" else None)


class TestLaw:
    @pytest.mark.parametrize("stddev", [1.0, 0.37, 250.0])
    def test_kolmogorov_smirnov(self, source, stddev):
        values = source.sample((200_000,), stddev, step=1, index=0).astype(np.float64)
        test = stats.kstest(values, stats.norm(scale=stddev).cdf)
        assert test.pvalue > FALSE_ALARM / 2
        # Nor closer to the law than independent values come: the statistic has a lower tail too.
        assert stats.kstwo.cdf(test.statistic, len(values)) > FALSE_ALARM / 2

    def test_moments(self, source):
        count, stddev = 400_000, 3.0
        values = source.sample((count,), stddev, step=1, index=0).astype(np.float64) / stddev
        # Variances of the first four sample moments of a standard normal: 1, 2, 15, 96 (over n).
        for power, (mean, variance) in enumerate([(0, 1), (1, 2), (0, 15), (3, 96)], start=1):
            z = ((values**power).mean() - mean) / np.sqrt(variance / count)
            assert abs(z) < Z + 0.3, power  # +0.3: skewness of the sample moments at this size
        assert values.std() == pytest.approx(1.0, abs=0.01)

    def test_tails_have_their_mass(self):
        values = GaussianNoise().sample((1_000_000,), 1.0, step=1, index=0)
        for bound in (2.0, 3.0, 4.0):
            for tail in (values > bound, values < -bound):
                expected = len(values) * stats.norm.sf(bound)
                low, high = stats.poisson.ppf([FALSE_ALARM / 12, 1 - FALSE_ALARM / 12], expected)
                assert low <= tail.sum() <= high

    def test_neighbours_are_uncorrelated(self, source):
        values = source.sample((200_000,), 1.0, step=1, index=0).astype(np.float64)
        for lag in (1, 2, noise._CHUNK, noise._CHUNK + 1):
            z = (values[lag:] * values[:-lag]).sum() / np.sqrt(len(values) - lag)
            assert abs(z) < Z + 0.3

    def test_steps_and_variables_are_independent(self, source):
        count = 20_000
        rows = [source.sample((count,), 1.0, step=step, index=index) for step in range(1, 6) for index in range(4)]
        correlations = np.corrcoef(np.array(rows, np.float64))[np.triu_indices(len(rows), 1)]
        assert np.abs(correlations).max() < stats.norm.isf(FALSE_ALARM / 2 / len(correlations)) / np.sqrt(count)
        # Together they are as spread as independent ones: the sum over all rows has variance 20.
        total = np.sum(rows, axis=0, dtype=np.float64)
        assert stats.kstest(total / np.sqrt(len(rows)), "norm").pvalue > FALSE_ALARM


class TestTransform:
    def test_every_word_gives_a_finite_value(self):
        words = np.array([0, 1, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 1], np.uint64)
        values = standard_normal_from_words(words)
        assert np.isfinite(values).all()
        assert values[0] == -values[3] == pytest.approx(stats.norm.isf(2.0**-65))
        assert values[2] == values[5] == 0.0

    def test_is_the_quantile_of_the_word(self):
        words = np.array([2**60, 2**62, 3 * 2**61, 2**63 + 2**62], np.uint64)
        expected = special.ndtri(1 - np.array([2.0**-4, 2.0**-2, 3 * 2.0**-3, 1 - 2.0**-2]))
        np.testing.assert_allclose(standard_normal_from_words(words), expected)


class TestNeverTwice:
    def test_fresh_from_the_system(self):
        first, second = GaussianNoise(), GaussianNoise()
        arrays = [g.sample((1000,), 1.0, step=1, index=0) for g in (first, first, second)]
        values = np.concatenate(arrays)
        assert len(np.unique(values)) > 2990  # float32 values may coincide, about 0.2 pairs are expected

    def test_a_key_serves_one_piece_only(self, monkeypatch):
        read = []
        system = noise.os.urandom
        monkeypatch.setattr(noise.os, "urandom", lambda count: read.append(system(count)) or read[-1])
        GaussianNoise().sample((3 * noise._CHUNK + 1,), 1.0, step=1, index=0)
        keys = [value for value in read if len(value) == 32]
        assert len(keys) == len(set(keys)) == 4

    def test_threads_do_not_share(self):
        source, arrays = GaussianNoise(), []
        threads = [
            threading.Thread(target=lambda: arrays.append(source.sample((noise._THREADS_FROM,), 1.0, step=1, index=0)))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        matrix = np.array(arrays, np.float64).reshape(-1, noise._CHUNK)  # also the pieces within one array
        correlations = np.corrcoef(matrix)[np.triu_indices(len(matrix), 1)]
        assert np.abs(correlations).max() < stats.norm.isf(FALSE_ALARM / 2 / len(correlations)) / np.sqrt(noise._CHUNK)

    def test_processes_do_not_share(self):
        code = (
            "import os; from tfdp.noise import GaussianNoise as G\n"
            "g = G(); g.sample((3,), 1.0, step=1, index=0); pid = os.fork()\n"
            "pid and os.wait()\n"  # in turn, so that the lines do not mix
            "print(g.sample((4,), 1.0, step=1, index=0).tolist(), flush=True)"
        )
        runs = [
            subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(2)
        ]
        lines = [line for run in runs for line in run.stdout.splitlines()]
        assert len(lines) == len(set(lines)) == 4

    def test_global_seeds_do_not_matter(self):
        draws = []
        for _ in range(2):
            np.random.seed(0)
            draws.append(GaussianNoise().sample((4,), 1.0, step=1, index=0).tolist())
        assert draws[0] != draws[1]

    def test_a_seed_gives_other_noise_for_each_step_and_variable(self):
        source = GaussianNoise("prng", 3)
        rows = {source.sample((8,), 1.0, step=s, index=i).tobytes() for s in (1, 2, 3) for i in range(5)}
        assert len(rows) == 15
        again = GaussianNoise("prng", 3).sample((8,), 1.0, step=2, index=4).tobytes()
        assert again in rows
        assert GaussianNoise("prng", 4).sample((8,), 1.0, step=2, index=4).tobytes() not in rows

    def test_a_seed_never_replays_a_step(self):
        source = GaussianNoise("prng", 3)
        source.sample((2,), 1.0, step=7, index=0)
        source.sample((2,), 1.0, step=7, index=1)
        for step in (7, 6):
            with pytest.raises(MisuseError, match=r"Expected a step above 7 .* Received: step="):
                source.sample((2,), 1.0, step=step, index=0)


class TestTensors:
    SHAPES = ((3, 4), (), (2,), (0, 5))

    def test_shapes_and_types_are_static(self):
        import tensorflow as tf

        source = GaussianNoise()

        @tf.function
        def step(number):
            tensors = source.tensors(self.SHAPES, 1.0, number)
            assert [tuple(t.shape) for t in tensors] == list(self.SHAPES)
            assert all(t.dtype == tf.float32 for t in tensors)
            return tensors

        values = step(tf.constant(1, tf.int64))
        assert [tuple(v.shape) for v in values] == list(self.SHAPES)
        assert source.tensors([], 1.0, 1) == []
        assert len(source.tensors([(2,)], 1.0, 1)) == 1

    def test_one_operation_for_all_variables(self):
        import tensorflow as tf

        function = tf.function(lambda step: GaussianNoise().tensors(self.SHAPES, 1.0, step))
        graph = function.get_concrete_function(tf.TensorSpec([], tf.int32)).graph
        operations = [op for op in graph.get_operations() if "PyFunc" in op.type]
        assert len(operations) == 1
        assert operations[0].op_def.is_stateful

    def test_replays_of_a_graph_draw_anew(self):
        import tensorflow as tf

        source = GaussianNoise()
        step = tf.function(lambda number: source.tensors([(500,), (500,)], 2.0, number))
        number = tf.constant(1)
        values = np.array([[t.numpy() for t in step(number)] for _ in range(20)])
        assert step.experimental_get_tracing_count() == 1
        assert len(np.unique(values)) > 19_900  # float32 coincidences: about 25 of 20,000
        z = (values.astype(np.float64).var() / 4 - 1) / np.sqrt(2 / values.size)
        assert abs(z) < Z + 0.3

    def test_two_calls_in_one_graph_are_not_merged(self):
        import tensorflow as tf

        source = GaussianNoise()

        @tf.function
        def both(number):
            return source.tensors([(50,)], 1.0, number)[0], source.tensors([(50,)], 1.0, number)[0]

        first, second = both(tf.constant(1))
        assert not np.isin(first.numpy(), second.numpy()).any()

    def test_a_loop_in_a_graph_draws_at_every_turn(self):
        import tensorflow as tf

        source = GaussianNoise()

        @tf.function
        def total(turns):
            body = lambda i, s: (i + 1, s + source.tensors([(2000,)], 1.0, 1)[0])  # noqa: E731
            return tf.while_loop(lambda i, s: i < turns, body, (0, tf.zeros(2000)))[1]

        values = total(tf.constant(16)).numpy().astype(np.float64)  # variance 16; 256 if one draw were used 16 times
        assert abs(values.var() / 16 - 1) < Z * np.sqrt(2 / 2000) * 1.2

    def test_the_step_keys_seeded_noise(self):
        import tensorflow as tf

        source = GaussianNoise("prng", 9)
        step = tf.function(lambda number: source.tensors([(3,), (3,)], 2.0, number))
        values = [[t.numpy() for t in step(tf.constant(n, tf.int64))] for n in (1, 2)]
        plain = GaussianNoise("prng", 9)
        for number, pair in zip((1, 2), values, strict=True):
            for index, value in enumerate(pair):
                np.testing.assert_array_equal(value, plain.sample((3,), 2.0, step=number, index=index))
        with pytest.raises(tf.errors.OpError, match="Expected a step above 2"):
            step(tf.constant(2, tf.int64))


@pytest.mark.parametrize("stddev", [0.0, -1.0, float("nan"), float("inf"), 1e-46, 1e38])
def test_a_standard_deviation_that_is_no_noise_is_refused(stddev):
    source = GaussianNoise()
    with pytest.raises(MisuseError, match=r"Expected a standard deviation .* Received: stddev="):
        source.sample((2,), stddev, step=1, index=0)
    with pytest.raises(MisuseError, match="Received: stddev="):
        source.tensors([(2,)], stddev, 1)


@pytest.mark.parametrize(
    "arguments", [("csprng", 3), ("prng", None), ("mersenne", None), ("prng", -1), ("prng", 2**64)]
)
def test_arguments_that_are_not_private_or_not_reproducible(arguments):
    with pytest.raises(MisuseError, match=r"Expected .* Received: "):
        GaussianNoise(*arguments)


def test_shapes():
    source = GaussianNoise()
    for shape in [(), (0,), (3, 0, 2), (1, 2, 3), (noise._CHUNK + 1,), (noise._THREADS_FROM + 3,)]:
        values = source.sample(shape, 1.0, step=1, index=0)
        assert values.shape == shape
        assert values.dtype == np.float32
        assert np.isfinite(values).all()
