"""The law of the noise.

Each statistical test rejects correct noise with a probability of at most 1e-6, and is two-sided: noise that is too
small or too regular fails as noise that is too large does.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from scipy import stats

from tfdp import noise
from tfdp.errors import MisuseError
from tfdp.noise import GaussianNoise, gaussians

FALSE_ALARM = 1e-6
Z = stats.norm.isf(FALSE_ALARM / 2)


def sample(source, shape, stddev, step=1):
    """One array of noise alone."""
    return source.noisy_means([np.zeros(shape, np.float32)], stddev, 1.0, step=step)[0]


@pytest.fixture(params=["csprng", "prng"])
def source(request):
    return GaussianNoise(request.param, 5 if request.param == "prng" else None)


class TestLaw:
    @pytest.mark.parametrize("stddev", [1.0, 0.37, 250.0])
    def test_kolmogorov_smirnov(self, source, stddev):
        values = sample(source, (200_000,), stddev).astype(np.float64)
        test = stats.kstest(values, stats.norm(scale=stddev).cdf)
        assert test.pvalue > FALSE_ALARM / 2
        # Nor closer to the law than independent values come: the statistic has a lower tail too.
        assert stats.kstwo.cdf(test.statistic, len(values)) > FALSE_ALARM / 2

    def test_moments(self, source):
        count, stddev = 400_000, 3.0
        values = sample(source, (count,), stddev).astype(np.float64) / stddev
        # Variances of the first four sample moments of a standard normal: 1, 2, 15, 96 (over n).
        for power, (mean, variance) in enumerate([(0, 1), (1, 2), (0, 15), (3, 96)], start=1):
            z = ((values**power).mean() - mean) / np.sqrt(variance / count)
            assert abs(z) < Z + 0.3, power  # +0.3: skewness of the sample moments at this size
        assert values.std() == pytest.approx(1.0, abs=0.01)

    def test_tails_have_their_mass(self):
        """To five standard deviations, of which 23 values of 80 million are expected on each side."""
        bounds, pieces, size = (2.0, 3.0, 4.0, 5.0), 16, 5_000_000
        seen = np.zeros((len(bounds), 2), int)
        for _ in range(pieces):
            values = sample(GaussianNoise(), (size,), 1.0)
            large = values[np.abs(values) > bounds[0]]
            seen += [[(large > bound).sum(), (large < -bound).sum()] for bound in bounds]
        for bound, both in zip(bounds, seen, strict=True):
            expected = pieces * size * stats.norm.sf(bound)
            tail = FALSE_ALARM / (2 * seen.size)
            low, high = stats.poisson.ppf([tail, 1 - tail], expected)
            assert 0 < low <= both.min() <= both.max() <= high

    def test_neighbours_are_uncorrelated(self, source):
        values = sample(source, (200_000,), 1.0).astype(np.float64)
        for lag in (1, 2, noise._CHUNK // 2, noise._CHUNK, noise._CHUNK + 1):  # half a piece: the other of a pair
            z = (values[lag:] * values[:-lag]).sum() / np.sqrt(len(values) - lag)
            assert abs(z) < Z + 0.3

    def test_steps_and_variables_are_independent(self, source):
        count = 20_000
        zeros = [np.zeros(count, np.float32)] * 4
        rows = [row for step in range(1, 6) for row in source.noisy_means(zeros, 1.0, 1.0, step=step)]
        correlations = np.corrcoef(np.array(rows, np.float64))[np.triu_indices(len(rows), 1)]
        assert np.abs(correlations).max() < stats.norm.isf(FALSE_ALARM / 2 / len(correlations)) / np.sqrt(count)
        # Together they are as spread as independent ones: the sum over all rows has variance 20.
        total = np.sum(rows, axis=0, dtype=np.float64)
        assert stats.kstest(total / np.sqrt(len(rows)), "norm").pvalue > FALSE_ALARM


class TestTransform:
    """Box and Muller's formula, written down plainly."""

    def expected(self, words):
        u = ((words[0] >> np.uint64(1)).astype(np.longdouble) + 0.5) * np.longdouble(2) ** -63
        angle = words[1].view(np.int64).astype(np.longdouble) * np.longdouble(2) ** -63 * np.longdouble(np.pi)
        radius = np.sqrt(-2 * np.log(u))
        return np.array([radius * np.cos(angle), radius * np.sin(angle)], float)

    def transformed(self, words, stddev=1.0):
        return gaussians(words.copy(), np.empty((4, words.shape[1])), stddev).copy()

    def test_is_the_formula(self):
        words = np.frombuffer(np.random.default_rng(3).bytes(16 * 5000), np.uint64).reshape(2, -1)
        np.testing.assert_allclose(self.transformed(words), self.expected(words), rtol=0, atol=1e-14)
        np.testing.assert_allclose(self.transformed(words, 7.3e11), 7.3e11 * self.expected(words), rtol=0, atol=7.3e-3)

    def test_every_word_gives_a_finite_value(self):
        ends = np.array([0, 1, 2, 2**62, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 2, 2**64 - 1], np.uint64)
        words = np.array(np.meshgrid(ends, ends)).reshape(2, -1)
        values = self.transformed(words)
        assert np.isfinite(values).all()
        # Near u = 1 float64 has steps of 2^-53, which is sqrt(2 * 2^-53) in the radius.
        np.testing.assert_allclose(values, self.expected(words), rtol=1e-14, atol=1.5e-8)
        assert np.abs(values).max() == pytest.approx(np.sqrt(2 * 64 * np.log(2)))  # u = 2^-64: the end of the tails

    def test_all_four_quadrants(self):
        x, y = self.transformed(np.frombuffer(np.random.default_rng(4).bytes(16 * 40_000), np.uint64).reshape(2, -1))
        share = [((np.sign(x) == i) & (np.sign(y) == j)).mean() for i in (1, -1) for j in (1, -1)]
        assert np.abs(np.array(share) - 0.25).max() < 5.3 * np.sqrt(0.25 * 0.75 / 40_000)  # two-sided 1e-7


class TestGrid:
    """Mironov 2012: what the sum adds to the low bits must be something that the noise could have added."""

    def test_sum_and_noise_are_whole_multiples(self):
        """The result is a multiple of 2^-38 of the standard deviation, whatever was below that in the sum."""
        totals = np.full(3_000_000, 1 / 3, np.float32) * np.float32(1e-10)
        values = GaussianNoise().noisy_means([totals], 1.0, 1.0, step=1)[0]
        small = values[np.abs(values) < 2.0**-14].astype(np.float64)  # above, every float32 is a multiple
        assert len(small) > 50  # 146 are expected
        np.testing.assert_array_equal(small * 2.0**38, np.rint(small * 2.0**38))
        assert len(np.unique(np.rint(small * 2.0**38) % 16)) > 5  # and the step is no larger

    def test_the_step_grows_with_the_standard_deviation(self):
        values = GaussianNoise().noisy_means([np.zeros(3_000_000, np.float32)], 6.5, 1.0, step=1)[0]  # step 4 * 2^-38
        small = values[np.abs(values) < 2.0**-12].astype(np.float64)
        assert len(small) > 25
        np.testing.assert_array_equal(small * 2.0**36, np.rint(small * 2.0**36))

    @pytest.mark.parametrize("size", [1, 1000, 2 * noise._CHUNK + 5])
    def test_is_the_noisy_sum_over_the_denominator(self, monkeypatch, size):
        """With all normals 0.75: (sum + 0.75 * stddev) / denominator, to one rounding."""
        monkeypatch.setattr(noise, "gaussians", lambda words, scratch, stddev: np.full(words.shape, 0.75 * stddev))
        totals = [np.random.default_rng(1).normal(size=size).astype(np.float32) * 10.0**i for i in (-6, 0, 6)]
        for total, mean in zip(totals, GaussianNoise().noisy_means(totals, 1.6, 7.0, step=1), strict=True):
            np.testing.assert_allclose(mean, (total.astype(float) + 1.2) / 7, rtol=1e-7, atol=1e-11)
            assert mean.dtype == np.float32

    @pytest.mark.parametrize("offset", [0, 1, 15])
    def test_the_means_lie_apart_in_the_room_that_is_given(self, offset):
        """Each begins where TensorFlow takes memory over without a copy; none reaches into another."""
        shapes = [(3,), (), (4, 5), (16,), (0,), (33,), (32,)]  # the last one has no line to spare
        totals = [np.full(shape, 100.0 * index, np.float32) for index, shape in enumerate(shapes)]
        room = np.full(noise.room_for(totals) + offset, np.nan, np.float32)[offset:]
        means = GaussianNoise("prng", 3).noisy_means(totals, 1.0, 1.0, step=1, room=room)
        for mean, other in zip(means, GaussianNoise("prng", 3).noisy_means(totals, 1.0, 1.0, step=1), strict=True):
            np.testing.assert_array_equal(mean, other)
            assert mean.size == 0 or (np.shares_memory(mean, room) and mean.ctypes.data % 64 == 0)
        assert np.isfinite(room).sum() == sum(total.size for total in totals)

    def test_the_sums_are_left_alone(self):
        total = np.ones(5, np.float32)
        GaussianNoise().noisy_means([total], 1.0, 1.0, step=1)
        np.testing.assert_array_equal(total, np.ones(5))


class TestNeverTwice:
    def test_fresh_from_the_system(self):
        first, second = GaussianNoise(), GaussianNoise()
        arrays = [sample(g, (1000,), 1.0) for g in (first, first, second)]
        values = np.concatenate(arrays)
        assert len(np.unique(values)) > 2990  # float32 values may coincide, about 0.2 pairs are expected

    def test_a_key_serves_one_piece_only(self, monkeypatch):
        """Large arrays are cut, small ones share a piece; no two pieces share a key."""
        read = []
        system = os.urandom
        monkeypatch.setattr(os, "urandom", lambda count: read.append(system(count)) or read[-1])
        sizes = [3 * noise._CHUNK + 1, 5, 0, 7, noise._CHUNK]
        means = GaussianNoise().noisy_means([np.zeros(size, np.float32) for size in sizes], 1.0, 1.0, step=1)
        keys = [value for value in read if len(value) == 32]
        assert len(keys) == len(set(keys)) == 4
        values = np.concatenate(means)
        assert (values == 0).sum() == 0  # every value of every array was written
        assert len(np.unique(values)) > 0.95 * len(values)  # float32 has no more; a shared piece would halve them

    def test_threads_do_not_share(self):
        source, arrays = GaussianNoise(), []
        threads = [
            threading.Thread(target=lambda: arrays.append(sample(source, (2 * noise._CHUNK,), 1.0))) for _ in range(4)
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
            "import os; import numpy as np; from tfdp.noise import GaussianNoise as G\n"
            "draw = lambda: G().noisy_means([np.zeros(4, np.float32)], 1.0, 1.0, step=1)[0].tolist()\n"
            "draw(); pid = os.fork()\n"
            "pid and os.wait()\n"  # in turn, so that the lines do not mix
            "print(draw(), flush=True)"
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
            draws.append(sample(GaussianNoise(), (4,), 1.0).tolist())
        assert draws[0] != draws[1]

    def test_a_seed_gives_other_noise_for_each_step_and_variable(self):
        zeros = [np.zeros(8, np.float32)] * 5
        source = GaussianNoise("prng", 3)
        rows = {row.tobytes() for s in (1, 2, 3) for row in source.noisy_means(zeros, 1.0, 1.0, step=s)}
        assert len(rows) == 15
        assert GaussianNoise("prng", 3).noisy_means(zeros, 1.0, 1.0, step=2)[4].tobytes() in rows
        assert GaussianNoise("prng", 4).noisy_means(zeros, 1.0, 1.0, step=2)[4].tobytes() not in rows

    def test_a_seed_never_replays_a_step(self):
        source = GaussianNoise("prng", 3)
        sample(source, (2,), 1.0, step=7)
        for step in (7, 6):
            with pytest.raises(MisuseError, match=r"Expected a step above 7. Received: step="):
                sample(source, (2,), 1.0, step=step)


class TestTensors:
    SHAPES = ((3, 4), (), (2,), (0, 5))

    @staticmethod
    def drawn(source, shapes, stddev, step):
        import tensorflow as tf

        return source.tensors([tf.zeros(shape) for shape in shapes], stddev, 1.0, step)

    def test_shapes_and_types_are_static(self):
        import tensorflow as tf

        source = GaussianNoise()

        @tf.function
        def step(number):
            tensors = self.drawn(source, self.SHAPES, 1.0, number)
            assert [tuple(t.shape) for t in tensors] == list(self.SHAPES)
            assert all(t.dtype == tf.float32 for t in tensors)
            return tensors

        values = step(tf.constant(1, tf.int64))
        assert [tuple(v.shape) for v in values] == list(self.SHAPES)
        assert self.drawn(source, [], 1.0, 1) == []
        assert len(self.drawn(source, [(2,)], 1.0, 1)) == 1

    def test_one_operation_for_all_variables(self):
        import tensorflow as tf

        function = tf.function(lambda step: self.drawn(GaussianNoise(), self.SHAPES, 1.0, step))
        graph = function.get_concrete_function(tf.TensorSpec([], tf.int32)).graph
        operations = [op for op in graph.get_operations() if "PyFunc" in op.type]
        assert len(operations) == 1
        assert operations[0].op_def.is_stateful

    def test_what_a_graph_makes_later_does_not_overwrite_the_means(self):
        """They lie in memory that is TensorFlow's, and have to keep it for as long as they are needed."""
        import tensorflow as tf

        shape, source = (300_000,), GaussianNoise("prng", 5)

        @tf.function
        def step(total, number):
            (mean,) = source.tensors([total], 1.0, 1.0, number)
            with tf.control_dependencies([mean]):
                later = [tf.fill(shape, value) + total for value in tf.unstack(tf.range(8.0))]
            with tf.control_dependencies(later):
                return tf.identity(mean), tf.add_n(later)

        total = tf.random.normal(shape)
        means = [step(total, tf.constant(number))[0] for number in (1, 2)]  # what a step returned outlives the next one
        plain = GaussianNoise("prng", 5)
        for number, mean in enumerate(means, start=1):
            (expected,) = plain.noisy_means([total.numpy()], 1.0, 1.0, step=number)
            np.testing.assert_array_equal(mean, expected)

    def test_the_room_is_not_taken_before_the_sums_are_there(self):
        """It would lie there for the whole backward pass."""
        import tensorflow as tf

        function = tf.function(lambda x: GaussianNoise().tensors([tf.square(x, name="total")], 1.0, 1.0, 1))
        graph = function.get_concrete_function(tf.TensorSpec([3])).graph
        (room,) = [op for op in graph.get_operations() if op.type == "Empty"]
        assert "total" in {op.name for each in (room, room.inputs[0].op) for op in each.control_inputs}

    def test_replays_of_a_graph_draw_anew(self):
        import tensorflow as tf

        source = GaussianNoise()
        step = tf.function(lambda number: self.drawn(source, [(500,), (500,)], 2.0, number))
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
            return self.drawn(source, [(50,)], 1.0, number)[0], self.drawn(source, [(50,)], 1.0, number)[0]

        first, second = both(tf.constant(1))
        assert not np.isin(first.numpy(), second.numpy()).any()

    def test_a_loop_in_a_graph_draws_at_every_turn(self):
        import tensorflow as tf

        source = GaussianNoise()

        @tf.function
        def total(turns):
            body = lambda i, s: (i + 1, s + self.drawn(source, [(2000,)], 1.0, 1)[0])  # noqa: E731
            return tf.while_loop(lambda i, s: i < turns, body, (0, tf.zeros(2000)))[1]

        values = total(tf.constant(16)).numpy().astype(np.float64)  # variance 16; 256 if one draw were used 16 times
        assert abs(values.var() / 16 - 1) < Z * np.sqrt(2 / 2000) * 1.2

    def test_the_step_keys_seeded_noise(self):
        import tensorflow as tf

        source = GaussianNoise("prng", 9)
        step = tf.function(lambda number: self.drawn(source, [(3,), (3,)], 2.0, number))
        values = [[t.numpy() for t in step(tf.constant(n, tf.int64))] for n in (1, 2)]
        plain, zeros = GaussianNoise("prng", 9), [np.zeros(3, np.float32)] * 2
        plain = {number: plain.noisy_means(zeros, 2.0, 1.0, step=number) for number in (1, 2)}
        for number, pair in zip((1, 2), values, strict=True):
            for index, value in enumerate(pair):
                np.testing.assert_array_equal(value, plain[number][index])
        with pytest.raises(tf.errors.OpError, match="Expected a step above 2"):
            step(tf.constant(2, tf.int64))


@pytest.mark.parametrize("stddev", [0.0, -1.0, float("nan"), float("inf"), 1e-46, 1e38])
def test_a_standard_deviation_that_is_no_noise_is_refused(stddev):
    source = GaussianNoise()
    with pytest.raises(MisuseError, match=r"Expected a standard deviation .* Received: stddev="):
        sample(source, (2,), stddev)
    with pytest.raises(MisuseError, match="Received: stddev="):
        TestTensors.drawn(source, [(2,)], stddev, 1)


@pytest.mark.parametrize(
    "arguments", [("csprng", 3), ("prng", None), ("mersenne", None), ("prng", -1), ("prng", 2**64)]
)
def test_arguments_that_are_not_private_or_not_reproducible(arguments):
    with pytest.raises(MisuseError, match=r"Expected .* Received: "):
        GaussianNoise(*arguments)


def test_shapes():
    source = GaussianNoise()
    for shape in [(), (0,), (3, 0, 2), (1, 2, 3), (noise._CHUNK + 1,), (2 * noise._CHUNK + 3,)]:
        values = sample(source, shape, 1.0)
        assert values.shape == shape
        assert values.dtype == np.float32
        assert np.isfinite(values).all()
