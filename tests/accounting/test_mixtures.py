"""Mixtures of Gaussians: the library's distribution to the last bit."""

from __future__ import annotations

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld
from scipy.stats import binom

from tfdp.accounting import mixtures


def of_records(records: int, probability: float) -> tuple[list[float], list[float]]:
    """How many of a unit's records join a batch, and how likely that is."""
    counts = np.arange(records + 1)
    chances = binom.pmf(counts, records, probability)
    return counts[chances > 0].astype(float).tolist(), chances[chances > 0].tolist()


@pytest.mark.parametrize(
    ("records", "probability", "sigma", "grid"),
    [(2, 0.01, 1.0, 1e-2), (4, 0.003, 0.8, 1e-2), (7, 0.2, 2.5, 1e-2), (3, 1.0, 2.0, 1e-2), (2, 0.5, 30.0, 1e-3)],
)
def test_every_probability_is_the_librarys(records, probability, sigma, grid):
    counts, chances = of_records(records, probability)
    ours = mixtures.from_mixture_gaussian_mechanism(sigma, counts, chances, grid)
    theirs = pld.from_mixture_gaussian_mechanism(sigma, counts, chances, value_discretization_interval=grid)
    for one, other in ((ours._pmf_remove, theirs._pmf_remove), (ours._pmf_add, theirs._pmf_add)):
        assert type(one) is type(other)
        one, other = one.to_dense_pmf(), other.to_dense_pmf()
        np.testing.assert_array_equal(one._probs, other._probs)
        assert (one._lower_loss, one._infinity_mass) == (other._lower_loss, other._infinity_mass)
        assert one._discretization == other._discretization
        assert one._pessimistic_estimate is other._pessimistic_estimate is True
    assert ours.get_epsilon_for_delta(1e-6) == theirs.get_epsilon_for_delta(1e-6)


def test_the_library_still_asks_at_many_points_at_once(monkeypatch):
    """Else nothing would be wrong, but group privacy as slow as before."""
    asked, single = [], []
    losses, loss = mixtures._Mixture._losses, mixtures._Mixture.privacy_loss
    monkeypatch.setattr(mixtures._Mixture, "_losses", lambda self, x: asked.append(len(x)) or losses(self, x))
    monkeypatch.setattr(mixtures._Mixture, "privacy_loss", lambda self, x: single.append(x) or loss(self, x))
    mixtures.from_mixture_gaussian_mechanism(1.0, *of_records(2, 0.1), 1e-2)
    assert max(asked) > 100
    assert len(asked) + len(single) < 100
