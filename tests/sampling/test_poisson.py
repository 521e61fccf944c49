"""The law of the sampler.

Each statistical test is two-sided where too good is a fault too, and rejects a correct sampler with a probability of at
most 1e-6 (normal and chi-square approximations, at cell counts of 25 or more).
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from tfdp.entropy import system_words
from tfdp.errors import DataError, PlanError
from tfdp.sampling import poisson
from tfdp.sampling.poisson import PoissonSampler

FALSE_ALARM = 1e-6


def assert_chi_square(statistic: float, degrees: int) -> None:
    assert stats.chi2.sf(statistic, degrees) > FALSE_ALARM / 2, "further from the law than chance allows"
    assert stats.chi2.cdf(statistic, degrees) > FALSE_ALARM / 2, "closer to the law than chance allows"


def indicators(sampler, num_draws: int) -> np.ndarray:
    """Which unit was in which draw, [draws, units]."""
    joined = np.zeros((num_draws, sampler.num_units))
    for row in joined:
        row[sampler.draw()] = 1
    return joined


def size_law_statistic(sizes: np.ndarray, num_units: int, q: float) -> tuple[float, int]:
    """Chi-square of batch sizes against Binomial(N, q), cells of an expected count of 25 or more."""
    cumulative = stats.binom(num_units, q).cdf(np.arange(min(num_units, 200) + 1))
    edges, below = [-1], [0.0]
    for size, value in enumerate(cumulative):
        if len(sizes) * (value - below[-1]) >= 25 and len(sizes) * (1.0 - value) >= 25:
            edges.append(size)
            below.append(value)
    expected = len(sizes) * np.diff([*below, 1.0])
    counts = np.diff([*((sizes <= edge).sum() for edge in edges), len(sizes)])
    return float(((counts - expected) ** 2 / expected).sum()), len(counts) - 1


class TestGaps:
    """floor(ln U / ln(1-q)), decided exactly."""

    @pytest.mark.parametrize("q", [0.7, 0.25, 0.01, 0.001])
    def test_each_word_gets_the_gap_of_its_whole_interval(self, q):
        words = np.concatenate([system_words(200), np.array([1, 2, 2**63, 2**64 - 1], np.uint64)])
        gaps = poisson._gaps(words, 2**40, q, system_words)
        stay = 1 - Fraction(q)
        for word, gap in zip(words.tolist(), gaps.tolist(), strict=True):
            # (1-q)^(gap+1) < U <= (1-q)^gap for the U that were possible: the interval touches that range.
            assert Fraction(word, 2**64) <= stay**gap
            assert Fraction(word + 1, 2**64) >= stay ** (gap + 1)

    @pytest.mark.parametrize(("q", "gap"), [(0.3, 3), (0.3, 50), (0.01, 7), (1e-3, 2000)])
    def test_a_boundary_inside_an_interval_is_decided_by_further_bits(self, q, gap):
        boundary = int((1 - Fraction(q)) ** gap * 2**64)  # U below (1-q)^gap means at least `gap` steps

        def low(count):
            return np.zeros(count, np.uint64)

        def high(count):
            return np.full(count, 2**64 - 1, np.uint64)

        word = np.array([boundary], np.uint64)
        assert poisson._gaps(word, 2**40, q, low) == [gap]
        assert poisson._gaps(word, 2**40, q, high) == [gap - 1]

    def test_the_smallest_word_is_not_an_end(self):
        drawn = []

        def further(count):
            drawn.append(count)
            return np.full(count, 2**63, np.uint64)

        # U in 2^-65 + [2^-129, 2^-128): log2 U lies between -65 and -64.
        assert poisson._gaps(np.zeros(1, np.uint64), 2**40, 0.5, further) == [64]
        assert drawn == [1, 1]

    @pytest.mark.parametrize("q", [1e-9, 1e-18, 1e-300, 5e-324])
    def test_tiny_probabilities_agree_with_exact_arithmetic(self, q):
        # U in the highest interval [1 - 2^-64, 1): the gap is below 2^-64 / q and must not be lost to rounding.
        word = np.array([2**64 - 1], np.uint64)
        gap = poisson._gaps(word, 2**40, q, lambda count: np.zeros(count, np.uint64))[0]
        exact = min(2.0**40, 2.0**-64 / q)
        assert gap == int(exact) or abs(gap / exact - 1) < 1e-12

    def test_clipped_to_the_limit(self):
        gaps = poisson._gaps(system_words(100), 10, 1e-12, system_words)
        assert (gaps == 10).all()

    def test_chunks_of_gaps_continue_where_the_last_ended(self, monkeypatch):
        monkeypatch.setattr(poisson, "_MAX_GAPS", 3)
        joined = indicators(PoissonSampler(40, 0.3), 4000)
        deviations = (joined.sum(0) - 4000 * 0.3) ** 2 / (4000 * 0.3 * 0.7)
        assert_chi_square(deviations.sum(), 40)


class TestLaw:
    def test_a_draw_is_increasing_in_range_and_without_repetition(self):
        sampler = PoissonSampler(1000, 0.1)
        for _ in range(200):
            chosen = sampler.draw()
            assert chosen.dtype == np.int64
            assert (np.diff(chosen) > 0).all()
            assert len(chosen) == 0 or (chosen[0] >= 0 and chosen[-1] < 1000)

    @pytest.mark.parametrize("q", [0.02, 0.13, 0.6])
    def test_every_unit_is_included_with_probability_q(self, q):
        count = 20_000 if q > 0.1 else 30_000
        joined = indicators(PoissonSampler(50, q), count)
        assert_chi_square(((joined.sum(0) - count * q) ** 2 / (count * q * (1 - q))).sum(), 50)

    @pytest.mark.parametrize("q", [0.25, 0.5, 0.7])
    def test_joint_law_of_all_subsets(self, q):
        """Every one of the 2^5 subsets has probability q^|S| (1-q)^(5-|S|): independence of all orders."""
        count = 40_000
        joined = indicators(PoissonSampler(5, q), count)
        observed = np.bincount((joined @ (1 << np.arange(5))).astype(int), minlength=32)
        sizes = np.array([bin(subset).count("1") for subset in range(32)])
        expected = count * q**sizes * (1 - q) ** (5 - sizes)
        assert expected.min() >= 25
        assert_chi_square(((observed - expected) ** 2 / expected).sum(), 31)

    def test_pairs_are_independent_near_and_far(self):
        count, units, q = 20_000, 60, 0.1
        joined = indicators(PoissonSampler(units, q), count)
        together = joined.T @ joined
        pairs = together[np.triu_indices(units, 1)]
        z = (pairs - count * q**2) / np.sqrt(count * q**2 * (1 - q**2))
        assert np.abs(z).max() < stats.norm.isf(FALSE_ALARM / 2 / len(z)) + 0.5  # +0.5: skewness of a count of 200

    def test_successive_draws_are_independent(self):
        count, units, q = 20_000, 60, 0.1
        joined = indicators(PoissonSampler(units, q), count)
        repeated = (joined[1:] * joined[:-1]).sum()
        trials = (count - 1) * units
        z = (repeated - trials * q**2) / np.sqrt(trials * q**2 * (1 - q**2) * 1.25)  # 1.25 >= the factor for overlap
        assert abs(z) < stats.norm.isf(FALSE_ALARM / 2)

    @pytest.mark.parametrize(("units", "q"), [(1000, 0.004), (64, 0.25), (100_000, 3e-4)])
    def test_batch_sizes_are_binomial(self, units, q):
        sampler = PoissonSampler(units, q)
        sizes = np.array([len(sampler.draw()) for _ in range(15_000)])
        assert_chi_square(*size_law_statistic(sizes, units, q))

    def test_the_size_test_sees_a_fixed_size_and_a_draw_per_microbatch(self):
        """The test above has power: batches of a fixed size, or of several draws, are not Binomial(N, q)."""
        rng = np.random.default_rng(1)
        fixed = np.full(15_000, 16)
        statistic, degrees = size_law_statistic(fixed, 64, 0.25)
        assert stats.chi2.sf(statistic, degrees) < FALSE_ALARM / 2
        four_draws_of_whole_microbatches = 4 * rng.binomial(64, 0.0625, 15_000)
        statistic, degrees = size_law_statistic(four_draws_of_whole_microbatches, 64, 0.25)
        assert stats.chi2.sf(statistic, degrees) < FALSE_ALARM / 2

    def test_far_units_of_a_large_population_are_reached(self):
        """N = 10^8, q = 1e-5: positions of the sampled units are uniform (Kolmogorov-Smirnov)."""
        sampler = PoissonSampler(10**8, 1e-5)
        positions = np.concatenate([sampler.draw() for _ in range(20)])
        assert stats.kstest(positions / 10**8, "uniform").pvalue > FALSE_ALARM

    def test_draws_can_be_empty(self):
        sampler = PoissonSampler(10, 0.05)
        assert min(len(sampler.draw()) for _ in range(200)) == 0  # fails with probability (1 - 0.95^10)^200 < 1e-79

    @pytest.mark.parametrize("units", [1, 7])
    def test_full_batch(self, units):
        sampler = PoissonSampler(units, 1.0)
        for _ in range(3):
            assert sampler.draw().tolist() == list(range(units))

    def test_one_unit(self):
        joined = indicators(PoissonSampler(1, 0.3), 5000)
        z = (joined.sum() - 1500) / np.sqrt(5000 * 0.3 * 0.7)
        assert abs(z) < stats.norm.isf(FALSE_ALARM / 2)

    @pytest.mark.parametrize("q", [1e-30, 1e-300, 5e-324])
    def test_nearly_never(self, q):
        assert len(PoissonSampler(2**40, q).draw()) == 0  # fails with probability 1e-18

    def test_nearly_always(self):
        assert len(PoissonSampler(1000, 1 - 2**-53).draw()) == 1000  # fails with probability 1e-13


class TestTruncation:
    def test_every_subset_is_equally_likely(self):
        """Full batch of 5 cut to 2: each of the 10 subsets has probability 1/10."""
        sampler = PoissonSampler(5, 1.0, truncated_batch_size=2)
        counts = dict.fromkeys(itertools.combinations(range(5), 2), 0)
        for _ in range(10_000):
            counts[tuple(sampler.draw().tolist())] += 1
        assert_chi_square(sum((count - 1000) ** 2 / 1000 for count in counts.values()), 9)

    def test_sizes_are_binomial_up_to_the_cut_and_units_are_equal(self):
        units, q, cut, count = 30, 0.3, 9, 15_000
        joined = indicators(PoissonSampler(units, q, truncated_batch_size=cut), count)
        sizes = joined.sum(1)
        assert sizes.max() == cut
        law = stats.binom(units, q)
        expected = count * np.array([law.cdf(5), *(law.pmf(k) for k in (6, 7, 8)), law.sf(8)])
        observed = np.array([(sizes <= 5).sum(), *((sizes == k).sum() for k in (6, 7, 8)), (sizes == 9).sum()])
        assert_chi_square(((observed - expected) ** 2 / expected).sum(), 4)
        # A unit's inclusion, given the sizes, is exchangeable: equal frequencies, variance below the independent one.
        rate = sizes.mean() / units
        statistic = ((joined.sum(0) - count * rate) ** 2).sum() / (count * rate * (1 - rate))
        assert stats.chi2.sf(statistic, units - 1) > FALSE_ALARM

    def test_small_draws_are_left_alone(self):
        sampler = PoissonSampler(20, 1.0, truncated_batch_size=20)
        assert sampler.draw().tolist() == list(range(20))

    def test_equal_keys_at_the_cut_are_drawn_again(self):
        answers = iter([np.array([5, 5, 5, 5], np.uint64), np.array([4, 1, 1, 9], np.uint64)])
        kept = poisson._random_subset(np.array([10, 20, 30, 40]), 2, lambda count: next(answers))
        assert kept.tolist() == [20, 30]
        assert next(answers, None) is None


class TestEntropy:
    CODE = (
        "from tfdp.sampling.poisson import PoissonSampler as P\n"
        "s = P(10**6, 1e-4{}); print([s.draw().tolist() for _ in range(3)])"
    )

    def processes(self, arguments: str) -> list[str]:
        code = self.CODE.format(arguments)
        return [
            subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
            for _ in range(2)
        ]

    def test_another_process_draws_something_else(self):
        first, second = self.processes("")
        draws = {str(draw) for line in (first, second) for draw in json.loads(line)}
        assert len(draws) == 6  # two equal draws of about 100 out of 10^6 units: probability below 1e-300

    def test_a_seed_repeats_in_another_process_only(self):
        first, second = self.processes(", seed=7")
        assert first == second
        assert len({str(draw) for draw in json.loads(first)}) == 3

    def test_a_seed_never_repeats_within_a_process(self):
        draws = [PoissonSampler(10**5, 1e-3, seed=11).draw().tobytes() for _ in range(20)]
        same = PoissonSampler(10**5, 1e-3, seed=11)
        draws += [same.draw().tobytes() for _ in range(20)]
        assert len(set(draws)) == 40

    def test_random_numbers_of_numpy_and_python_do_not_matter(self):
        sampler = PoissonSampler(10**5, 1e-3)
        draws = []
        for _ in range(2):
            np.random.seed(3)
            draws.append(sampler.draw().tobytes())
        assert draws[0] != draws[1]

    def test_forked_processes_differ(self):
        code = (
            "import os; from tfdp.sampling.poisson import PoissonSampler as P\n"
            "s = P(10**6, 1e-4); s.draw(); pid = os.fork()\n"
            "pid and os.wait()\n"  # in turn, so that the lines do not mix
            "print(s.draw().tolist(), flush=True)"
        )
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        assert len(out.splitlines()) == len(set(out.splitlines())) == 2


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"num_units": 0, "probability": 0.1}, DataError),
        ({"num_units": 2**40 + 1, "probability": 0.1}, DataError),
        ({"num_units": 5, "probability": 0.0}, PlanError),
        ({"num_units": 5, "probability": -0.1}, PlanError),
        ({"num_units": 5, "probability": 1.0000001}, PlanError),
        ({"num_units": 5, "probability": float("nan")}, PlanError),
        ({"num_units": 5, "probability": 0.5, "truncated_batch_size": 0}, PlanError),
        ({"num_units": 5, "probability": 0.5, "seed": -1}, PlanError),
    ],
)
def test_arguments_out_of_range(arguments, error):
    with pytest.raises(error, match=r"Expected .* Received: "):
        PoissonSampler(**arguments)
