"""Both methods for whole units, for several k, compared before a single step is trained.

Every row keeps the claim of the spec and costs the same: as many record slots per step as the spec's own sampling, in
as many steps. With R slots a step, of N units with n_u records each,

| method           | sampled in a step         | sensitivity            | divides by   |
|------------------|---------------------------|------------------------|--------------|
| group_privacy    | R of sum min(n_u, k)      | 0..k, Binomial(k, q)   | R            |
| user_wise_dp_sgd | R / k of N units          | 1, with probability q  | R / k        |

The noise of an update has standard deviation sigma * C / B in every coordinate. An update is longest where all clipped
gradients have norm C and point the same way, and then it has norm C whatever the method: so noise over signal is at
least sigma * sqrt(d) / B for d trained weights. That is what is compared. What it leaves out: gradients that disagree
make the signal smaller, and the mean over k records of a unit disagrees less than one record does, which speaks for
user_wise_dp_sgd with larger k (Charles et al. 2024 measure both effects); `Candidate.break_even` says how much.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tfdp import accounting
from tfdp.data import save_figure
from tfdp.errors import AccountingError, PlanError
from tfdp.sampling.selection import BY_LENGTH, keep_records
from tfdp.sampling.units import UnitMap
from tfdp.spec import PrivacySpec

METHODS = ("group_privacy", "user_wise_dp_sgd")
# Epsilons of a comparison are bounds on a grid that is ten times as coarse as that of a plan.
_GRID = 1e-3
NOISE_TO_SIGNAL = "noise over signal"


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to train under the claim.

    Attributes:
        method, k: how units are protected.
        batch: expected items of a step: records, or units.
        probability: q of an item.
        steps: noisy updates.
        noise_multiplier: sigma, calibrated to the claim on a coarse grid, so slightly too large; None where nothing
            is modelled, and `reason` says why.
        noise_to_signal: sigma * sqrt(d) / batch, the least that noise over signal can be.
        records_used: share of all records that can take part.
        records_seen: expected records of the whole training.
        tokens_seen: the same in tokens; None where lengths are unknown.
        cost: record slots of one step, empty ones included.
        example, document, user: epsilon at each level; None: none possible.
        reason: why there is no number.
    """

    method: str
    k: int
    batch: float
    probability: float
    steps: int
    noise_multiplier: float | None
    noise_to_signal: float | None
    records_used: float
    records_seen: float
    tokens_seen: float | None
    cost: float
    example: float | None
    document: float | None
    user: float | None
    reason: str | None = None

    def break_even(self, other: Candidate) -> float | None:
        """The cosine between two records of a unit below which averaging makes up for more noise than `other` has.

        The mean of m gradients of norm C with cosine c has norm C sqrt((1 + (m - 1) c) / m), and keeps what they have
        in common: with C lowered to that, noise over signal falls by the same factor. None where nothing is gained.
        """
        mean = self.records_seen / (self.steps * self.batch)
        if self is other or mean <= 1 or self.noise_to_signal is None or other.noise_to_signal is None:
            return None
        cosine = (mean * (other.noise_to_signal / self.noise_to_signal) ** 2 - 1) / (mean - 1)
        return min(1.0, cosine) if cosine > 0 else None


def compare_methods(
    spec: PrivacySpec,
    units: UnitMap,
    *,
    ks: Sequence[int] = (1, 2, 5, 10),
    tokens: Any = None,
    num_weights: int = 1,
) -> list[Candidate]:
    """The rows of the comparison.

    Args:
        spec: a claim about documents or users; its method and k only set what a step may cost.
        units: the map of the data.
        ks: values of k.
        tokens: [records] tokens of every record, or None.
        num_weights: d, trained weights; 1 compares per weight.

    Raises:
        PlanError: a claim about single records, or sampling that is not Poisson.
    """
    unit = spec.claim.privacy_unit
    if unit.kind not in ("document", "user") or spec.sampling.scheme != "poisson":
        raise PlanError(
            f"Expected a claim about a document or a user, sampled by poisson. Received: kind {unit.kind}, scheme "
            f"{spec.sampling.scheme}. Claim the unit that is to be compared."
        )
    schedule = spec.schedule
    together = (unit.max_records_per_unit or 1) if unit.method == "user_wise_dp_sgd" else 1
    slots = schedule.expected_batch_size * together
    lengths = None if tokens is None else np.asarray(tokens, np.float64)
    return [
        _candidate(spec, units, method, k, slots, schedule.steps, lengths, num_weights)
        for method in METHODS
        for k in sorted(set(ks))
    ]


def _candidate(
    spec: PrivacySpec,
    units: UnitMap,
    method: str,
    k: int,
    slots: float,
    steps: int,
    lengths: Any,
    num_weights: int,
) -> Candidate:
    grouped = method == "group_privacy"
    kept = int(np.minimum(units.counts, k).sum())
    population = kept if grouped else units.num_units
    batch = min(slots if grouped else slots / k, float(population))
    probability = batch / population
    seen = steps * probability * kept
    partial: dict[str, Any] = {
        "method": method,
        "k": k,
        "batch": batch,
        "probability": probability,
        "steps": steps,
        "records_used": kept / len(units.records),
        "records_seen": seen,
        "tokens_seen": None if lengths is None else steps * probability * _kept_tokens(spec, units, k, lengths),
        "cost": batch if grouped else batch * k,
    }
    sampler: dict[str, Any] = {
        "scheme": "poisson",
        "sampling_probability": probability,
        "num_units": population,
        "records_per_unit": k if grouped else 1,
    }
    try:
        sigma = _calibrated(spec, sampler, steps)
        levels = _levels(spec, sampler, sigma, steps)
    except AccountingError as error:
        nothing: dict[str, Any] = dict.fromkeys(("noise_multiplier", "noise_to_signal", "example", "document", "user"))
        return Candidate(**partial, **nothing, reason=str(error))
    values: dict[str, Any] = {**partial, **levels}
    return Candidate(**values, noise_multiplier=sigma, noise_to_signal=sigma * math.sqrt(num_weights) / batch)


def _calibrated(spec: PrivacySpec, sampler: dict[str, Any], steps: int) -> float:
    """Sigma on a coarse grid, and so on the safe side; the usual grid of mixtures is coarse already."""
    mixture = sampler["records_per_unit"] > 1
    return accounting.calibrate_noise_multiplier(
        **sampler,
        target_epsilon=spec.claim.epsilon,
        delta=spec.claim.delta,
        steps=steps,
        adjacency=spec.claim.adjacency,
        accountant=spec.accountant.name,
        grid=None if mixture or spec.accountant.name == "rdp" else _GRID,
    ).noise_multiplier


def _levels(spec: PrivacySpec, sampler: dict[str, Any], sigma: float, steps: int) -> dict[str, Any]:
    """Epsilon of one record, of a document and of a user.

    Changing one record replaces what is clipped: a record by another one (by the selection, if not by anybody), or the
    mean gradient of its unit. Both are accounted as the replacement of one sampled item.
    """
    kind, claim = spec.claim.privacy_unit.kind, spec.claim
    event = accounting.step_event(**{**sampler, "records_per_unit": 1}, noise_multiplier=sigma)
    one = accounting.epsilon(event, steps, delta=claim.delta, adjacency="replace_one", grid=_GRID)
    whole = claim.epsilon
    one = min(one, whole) if claim.adjacency == "replace_one" else one
    return {"example": one, "document": whole if kind == "document" else one, "user": whole if kind == "user" else None}


def _kept_tokens(spec: PrivacySpec, units: UnitMap, k: int, lengths: Any) -> float:
    """Tokens of the records that stay; of a selection that is not by length, what is expected of a random one."""
    selection = spec.claim.privacy_unit.selection
    if selection in BY_LENGTH:
        return float(lengths[keep_records(units, k, selection, scores=lengths).records].sum())
    per_unit = np.add.reduceat(lengths[units.records], units.starts[:-1])
    return float((per_unit * np.minimum(1.0, k / units.counts)).sum())


def best(candidates: Sequence[Candidate]) -> Candidate | None:
    """The one with the least noise over signal; of equals the one that uses more of the data."""
    modelled = [each for each in candidates if each.noise_to_signal is not None]
    return min(modelled, key=lambda each: (each.noise_to_signal or 0.0, -each.records_used), default=None)


def recommendation(candidates: Sequence[Candidate]) -> str:
    """What the comparison says, and how far that goes."""
    first = best(candidates)
    if first is None:
        return "No method can be accounted under this claim: change the adjacency or the accountant."
    least = (
        f"{first.method} with k = {first.k} has the least {NOISE_TO_SIGNAL} at this cost "
        f"({first.noise_to_signal:.3g}, sigma {first.noise_multiplier:.4g}), and uses {first.records_used:.0%} of the "
        "records."
    )
    words = [least]
    for method in METHODS:
        other = best([each for each in candidates if each.method == method])
        if other is not None and method != first.method:
            ratio = (other.noise_to_signal or 0.0) / (first.noise_to_signal or 1.0)
            words.append(f"{method} does best with k = {other.k}, at {ratio:.3g} times that.")
    user_wise = [each for each in candidates if each.method == "user_wise_dp_sgd" and each.k > 1]
    widest = max(user_wise, key=lambda each: each.k, default=first)
    cosine = widest.break_even(first)
    if cosine is not None:
        words.append(
            f"What that leaves out: user_wise_dp_sgd averages before it clips. With k = {widest.k} and a clip norm "
            f"lowered to match, it does better where the gradients of two records of a unit have a cosine below "
            f"{cosine:.2g}, and it uses {widest.records_used:.0%} of the records."
        )
    words.append("k was looked at on private data: the card has to say so.")
    return " ".join(words)


def plot_comparison(candidates: Sequence[Candidate], path: str | os.PathLike[str]) -> Path:
    """Noise over signal and the share of records used against k, as PNG or SVG by the ending of `path`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 3.6), layout="constrained")
    axes = figure.subplots(1, 2)
    for method, style in zip(METHODS, ("o-", "s--"), strict=True):
        rows = [each for each in candidates if each.method == method and each.noise_to_signal is not None]
        axes[0].plot([each.k for each in rows], [each.noise_to_signal for each in rows], style, label=method)
        axes[1].plot([each.k for each in rows], [each.records_used for each in rows], style, label=method)
    axes[0].set(xlabel="k, records of a unit", ylabel=NOISE_TO_SIGNAL, yscale="log", title="At the same cost")
    axes[1].set(xlabel="k, records of a unit", ylabel="share of the records", ylim=(0, 1.05), title="Records used")
    axes[0].legend()
    return save_figure(figure, path)
