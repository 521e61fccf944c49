"""Poisson sampling of privacy units, from records to batches for `model.fit`."""

from tfdp.sampling.batches import plan_token, poisson_batches
from tfdp.sampling.poisson import PoissonSampler
from tfdp.sampling.records import as_records

__all__ = ["PoissonSampler", "as_records", "plan_token", "poisson_batches"]
