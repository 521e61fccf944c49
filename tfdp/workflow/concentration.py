"""How alike the gradients of units are: whether methods that add noise by their spread could gain anything.

Asi and Liu (2024, "User-level differentially private stochastic convex optimization: efficient algorithms with optimal
rates", arXiv 2311.03797) estimate the mean of concentrated gradients: outliers are removed first, and noise is added in
proportion to tau, within which the gradients of most units lie, instead of the clip norm C. How many are most is a
constant of the test, which we read as 4n/5 of the n units, on average, within tau of a unit. So tau is taken here as
the smallest distance that four fifths of the pairs of clipped unit gradients keep; a unit is not paired with itself,
which only makes tau larger.
Something is gained only where tau is far below C: Chua et al. (2024) look for tau / C below a tenth.

What is measured is an exact statistic of private data, which no epsilon covers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tfdp.entropy import system_generator
from tfdp.errors import DataError
from tfdp.sampling.units import UnitMap
from tfdp.spec import PrivacySpec
from tfdp.workflow.language_models import encode_texts, token_loss
from tfdp.workflow.records import TextRecords

QUANTILE = 0.8
LOW_NOISE = 0.1


@dataclasses.dataclass(frozen=True)
class Concentration:
    """What a batch of units says.

    Attributes:
        tau: the distance that a share `QUANTILE` of the pairs of clipped unit gradients keep.
        clip_norm: C.
        units: how many units were looked at.
    """

    tau: float
    clip_norm: float
    units: int

    @property
    def ratio(self) -> float:
        """Tau over C; between 0 and 2."""
        return self.tau / self.clip_norm

    @property
    def could_hold(self) -> bool:
        """Whether the condition for less noise could hold."""
        return self.ratio < LOW_NOISE

    @property
    def statement(self) -> str:
        """In words, as an access to private data."""
        verdict = (
            "low enough for noise by the spread of units (Asi and Liu 2024) to be worth a look"
            if self.could_hold
            else "too much for the lower noise of Asi and Liu (2024), which wants less than 0.1"
        )
        return (
            f"Data access, not covered by epsilon: the clipped gradients of {self.units} units were compared. Four "
            f"fifths of the pairs lie within tau = {self.tau:.3g}, tau / C = {self.ratio:.3g}: {verdict}."
        )


def concentration_of(gradients: Any, clip_norm: float) -> Concentration:
    """The concentration of some unit gradients.

    Args:
        gradients: [units, weights], clipped to norm C; at least two units.
        clip_norm: C.
    """
    flat = np.asarray(gradients, np.float64)
    if flat.ndim != 2 or len(flat) < 2:
        raise DataError(f"Expected the gradients of at least two units. Received: shape {flat.shape}.")
    products = flat @ flat.T
    squares = np.diag(products)
    distances = np.sqrt(np.maximum(squares[:, None] + squares[None] - 2 * products, 0.0))
    pairs = distances[np.triu_indices(len(flat), 1)]
    return Concentration(float(np.quantile(pairs, QUANTILE, method="inverted_cdf")), float(clip_norm), len(flat))


def measure_concentration(
    model: Any, spec: PrivacySpec, records: TextRecords, *, sequence_length: int, most_units: int = 32
) -> Concentration:
    """The concentration at the weights of `model`, on a uniformly random batch of units.

    Args:
        model: a KerasHub causal language model with its preprocessor.
        spec: gives clip norm and k; the first k records of a unit are averaged.
        records: texts with ids.
        sequence_length: tokens of a text.
        most_units: of the batch; a gradient of each is held.
    """
    from tfdp.gradients import clipped_gradients
    from tfdp.workflow.fitting import detached_preprocessor

    if records.unit_ids is None:
        raise DataError("Expected records with the ids of their units. Received: none. Name the id field.")
    units = UnitMap.from_ids(records.unit_ids)
    generator = system_generator()
    chosen = generator.choice(units.num_units, min(most_units, units.num_units), replace=False)
    most = spec.claim.privacy_unit.max_records_per_unit or 1
    clip_norm = spec.mechanism.total_clip_norm
    if clip_norm is None:
        raise DataError("Expected a spec with a clip norm. Received: none. Write mechanism.clip_norm, such as 1.0.")
    arrays = [
        encode_texts(model, [records.texts[record] for record in units.of(unit)[:most].tolist()], sequence_length)
        for unit in chosen.tolist()
    ]
    gradients = []
    with detached_preprocessor(model):
        model.compile(optimizer="sgd", loss=token_loss())
        for x, y, weight in arrays:
            count = len(y)
            ones = np.ones((1, count), np.float32)
            sums, _, _ = clipped_gradients(model, (x, y, weight), clip_norm, records_per_unit=count, record_weight=ones)
            gradients.append(np.concatenate([np.asarray(each).ravel() for each in sums]))
    return concentration_of(gradients, clip_norm)
