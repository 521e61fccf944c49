"""The plan: the one object that couples sampler, clip norm, noise, denominator, event and steps.

Everything that runs takes its numbers from here, so that what runs is what was accounted. Epsilon at any step is a
property of the plan, not of a progress counter somewhere else.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from typing import Any, Literal

import dp_accounting

from tfdp import accounting
from tfdp.errors import AccountingError, PlanError
from tfdp.files import sha256_text
from tfdp.findings import errors
from tfdp.review import RELATIVE_SLACK, review
from tfdp.spec import PrivacySpec
from tfdp.spec.fields import Clipping, PrivacyUnit
from tfdp.spec.numbers import rounded_up, shown

_CURVE_POINTS = 40


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What one training run is allowed to do; made by `make_plan`, never by hand.

    Attributes:
        num_units: N, the privacy units; they are what is sampled, except under group privacy.
        num_records: under group privacy, the public number of records that q was computed from; else None. How many
            records there really are changes with every unit and enters nothing.
        sampling_probability: q, the chance of each unit (or record, under group privacy) to join each batch.
        expected_batch_size: q * N (or q * num_records), the public constant that every noisy sum is divided by.
        truncated_batch_size: the largest batch, with scheme truncated_poisson only.
        steps: noisy updates in all; `steps_per_epoch` and `epochs` cut them for `fit` (the last epoch may be shorter).
        clip_norm: C; one unit moves the sum of gradients by at most this much, all layers together. With
            `adaptive_clipping` that of the first step.
        noise_multiplier: sigma, which the event is made from. The noise has standard deviation `noise_stddev` = sigma *
            C; with `adaptive_clipping` sigma covers the count as well, and the gradients get more.
        target_epsilon: the claim, which `epsilon(steps)` does not exceed.
        microbatch_size: units per forward pass, None for the caller's choice, "auto" for `tfdp.time_microbatches`; no
            effect on privacy.
        records_per_unit: the most records that are averaged and clipped together as one unit.
        group_size: the most records of one unit that are sampled and clipped on their own (group privacy); the event
            covers all of them at once. At most one of the two is above 1.
        seed: reproducible draws for tests, None for the operating system's entropy.
        step_event: what one step is, in the words of dp-accounting.
        adaptive_clipping: how the clip norm follows a quantile, and the noises of gradients and count; None where it
            stays.

    Raises:
        PlanError: the fields contradict each other.
    """

    spec: PrivacySpec
    spec_digest: str
    num_units: int
    num_records: int | None
    sampling_probability: float
    expected_batch_size: float
    scheme: str
    truncated_batch_size: int | None
    steps: int
    steps_per_epoch: int
    epochs: int
    clip_norm: float
    noise_multiplier: float
    adjacency: str
    accountant: str
    target_epsilon: float
    delta: float
    microbatch_size: int | Literal["auto"] | None
    records_per_unit: int
    group_size: int
    rng: str
    seed: int | None
    step_event: dp_accounting.DpEvent
    adaptive_clipping: accounting.AdaptiveClipping | None = None
    _epsilons: dict[int, float] = dataclasses.field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        described = accounting.step_event(
            scheme=self.scheme,
            sampling_probability=self.sampling_probability,
            noise_multiplier=self.noise_multiplier,
            num_units=self.population,
            truncated_batch_size=self.truncated_batch_size,
            records_per_unit=self.group_size,
        )
        if described != self.step_event:
            raise PlanError(
                f"Expected the step_event that the fields of the plan describe, {described}. "
                f"Received: {self.step_event}. Make a new plan with make_plan instead of changing one."
            )
        if not math.isclose(self.expected_batch_size, self.sampling_probability * self.population, rel_tol=1e-9):
            raise PlanError(
                "Expected expected_batch_size to be sampling_probability * "
                f"{'num_units' if self.num_records is None else 'num_records'} = "
                f"{shown(self.sampling_probability * self.population)}. "
                f"Received: {shown(self.expected_batch_size)}. Make a new plan with make_plan instead of changing one."
            )
        together, apart = _records_of_a_unit(self.spec)
        if (self.records_per_unit, self.group_size) != (together, apart):
            raise PlanError(
                f"Expected records_per_unit={together} and group_size={apart}, as the privacy unit of the spec says. "
                f"Received: {self.records_per_unit} and {self.group_size}. Make a new plan with make_plan."
            )
        if self.adaptive_clipping != _adaptive_clipping(self.spec, self.noise_multiplier, self.expected_batch_size):
            raise PlanError(
                "Expected adaptive_clipping to be what the spec and the noise multiplier give. Received: "
                f"{self.adaptive_clipping}. Make a new plan with make_plan instead of changing one."
            )
        if self.adaptive_clipping is not None and not math.isclose(
            self.adaptive_clipping.joint_noise_multiplier, self.noise_multiplier, rel_tol=1e-9
        ):
            raise PlanError(
                f"Expected the noises of gradients and count to be {shown(self.noise_multiplier)} together, which is "
                f"what is accounted. Received: {shown(self.adaptive_clipping.joint_noise_multiplier)}. Use make_plan."
            )
        if self.spec_digest != self.spec.digest:
            raise PlanError("Expected spec_digest to be the digest of spec. Received another one. Use make_plan.")
        for name, stated in _stated(self.spec).items():
            if getattr(self, name) != stated:
                raise PlanError(
                    f"Expected {name}={stated!r}, as the spec says. Received: {name}={getattr(self, name)!r}. "
                    "Change the spec, have it reviewed, and make a new plan with make_plan."
                )
        _check_seed(self.spec, self.seed)

    @property
    def population(self) -> int:
        """What the sampler draws from: the units, or the records under group privacy."""
        return self.num_units if self.num_records is None else self.num_records

    @property
    def privacy_unit(self) -> PrivacyUnit:
        """The unit of the claim."""
        return self.spec.claim.privacy_unit

    @property
    def per_layer(self) -> float | Mapping[str, float] | None:
        """Where each layer has a clip norm of its own, what `tfdp.gradients.per_layer` makes them from."""
        clipping = self.spec.mechanism.clip_norm
        return clipping.per_layer if isinstance(clipping, Clipping) else None

    @property
    def noise_stddev(self) -> float:
        """Standard deviation of the noise that is added to the sum of clipped gradients (in the first step)."""
        return self.gradient_noise_multiplier * self.clip_norm

    @property
    def gradient_noise_multiplier(self) -> float:
        """Standard deviation of that noise over the clip norm of the step."""
        adaptive = self.adaptive_clipping
        return self.noise_multiplier if adaptive is None else adaptive.gradient_noise_multiplier

    @functools.cached_property
    def digest(self) -> str:
        """Hexadecimal SHA-256 over every field that defines the run; two runs with the same digest did the same."""
        return sha256_text(json.dumps(self._contract(), sort_keys=True, separators=(",", ":"), allow_nan=False))

    def epsilon(self, steps: int) -> float:
        """Certified epsilon after `steps` steps, also beyond the planned ones."""
        if steps not in self._epsilons:
            self._epsilons[steps] = accounting.epsilon(
                self.step_event, steps, delta=self.delta, accountant=self.accountant, adjacency=self.adjacency
            )
        return self._epsilons[steps]

    def epsilon_bound(self, steps: int) -> float:
        """An upper bound on epsilon after `steps` steps that costs nothing to ask at every step.

        It is read from a curve of about 40 points, at the next point that is not below `steps`; at the last planned
        step it is the certified value. The first call computes the curve.
        """
        if steps == 0:
            return 0.0
        points, bounds = self._curve
        if not 0 < steps <= self.steps:
            return self.epsilon(steps)
        return bounds[bisect.bisect_left(points, steps)]

    @functools.cached_property
    def _curve(self) -> tuple[list[int], list[float]]:
        # Epsilon grows like a root of the steps: points lie denser at the beginning.
        fractions = (index / _CURVE_POINTS for index in range(1, _CURVE_POINTS + 1))
        points = sorted({max(1, math.ceil(self.steps * fraction**1.5)) for fraction in fractions} | {self.steps})
        grid = None
        if self.accountant != "rdp":
            grid = accounting.default_grid(self.step_event, self.steps, self.adjacency)
            if self.scheme != "truncated_poisson":  # whose usual grid is coarse already
                grid *= 10
        values = accounting.epsilon_curve(
            self.step_event,
            points[:-1],
            delta=self.delta,
            accountant=self.accountant,
            adjacency=self.adjacency,
            grid=grid,
        )
        # Fewer steps never cost more, so a later bound also holds earlier.
        bounds = [self.epsilon(self.steps)]
        for value in reversed(values):
            bounds.append(min(value, bounds[-1]))
        return points, bounds[::-1]

    def _contract(self) -> dict[str, Any]:
        apart = ("spec", "_epsilons", "step_event", "adaptive_clipping")
        names = [field.name for field in dataclasses.fields(self) if field.name not in apart]
        contract = {name: getattr(self, name) for name in names}
        if self.adaptive_clipping is not None:  # a plan without it keeps the digest that it has always had
            contract["adaptive_clipping"] = self.adaptive_clipping.to_dict()
        return {**contract, "step_event": accounting.event_to_dict(self.step_event)}

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON: every field, the noise's standard deviation, the spec and the digest."""
        return {
            **self._contract(),
            "noise_stddev": self.noise_stddev,
            "digest": self.digest,
            "spec": self.spec.to_dict(),
        }


def make_plan(spec: PrivacySpec, num_units: int | None = None, *, seed: int | None = None) -> Plan:
    """Turns a reviewed spec into a plan: q, steps, noise and the certificate that they keep the claim.

    Args:
        spec: the reviewed claim and mechanism.
        num_units: the number of units at hand, which must be the one that the spec states.
        seed: for tests only: the same batches and the same noise in every run. Needs `mechanism.rng: prng`.

    Raises:
        PlanError: review finds an error (`.findings`), the sizes disagree, or the claim needs what is not built.
        AccountingError: no noise multiplier keeps the claim.
    """
    if not isinstance(spec, PrivacySpec):
        raise PlanError(
            f"Expected a PrivacySpec. Received: {type(spec).__name__}. Read one with tfdp.PrivacySpec.from_file."
        )
    _check_size(spec, num_units)
    _check_seed(spec, seed)
    blocking = errors(review(spec))
    if blocking:
        count = "1 error" if len(blocking) == 1 else f"{len(blocking)} errors"
        lines = "\n  ".join(str(finding) for finding in blocking)
        raise PlanError(f"Expected a spec that passes review. Received one with {count}:\n  {lines}", blocking)
    schedule, claim, mechanism = spec.schedule, spec.claim, spec.mechanism
    records_per_unit, group_size = _records_of_a_unit(spec)
    sampled: dict[str, Any] = {
        "scheme": spec.sampling.scheme,
        "sampling_probability": schedule.sampling_probability,
        "truncated_batch_size": spec.sampling.truncated_batch_size,
        "num_units": schedule.population,
        "records_per_unit": group_size,
    }
    sigma = mechanism.noise_multiplier
    if sigma is None:
        sigma = accounting.calibrate_noise_multiplier(
            **sampled,
            target_epsilon=claim.epsilon,
            delta=claim.delta,
            steps=schedule.steps,
            adjacency=claim.adjacency,
            accountant=spec.accountant.name,
        ).noise_multiplier
    steps_per_epoch = min(schedule.steps, max(1, round(1 / schedule.sampling_probability)))
    plan = Plan(
        **{"noise_multiplier": sigma, **_stated(spec)},
        num_records=spec.data.num_records if group_size > 1 else None,
        spec=spec,
        spec_digest=spec.digest,
        expected_batch_size=schedule.expected_batch_size,
        steps_per_epoch=steps_per_epoch,
        epochs=math.ceil(schedule.steps / steps_per_epoch),
        microbatch_size=spec.sampling.microbatch_size,
        records_per_unit=records_per_unit,
        group_size=group_size,
        seed=seed,
        step_event=accounting.step_event(**sampled, noise_multiplier=sigma),
        adaptive_clipping=_adaptive_clipping(spec, sigma, schedule.expected_batch_size),
    )
    certified = plan.epsilon(plan.steps)
    if not certified <= claim.epsilon * (1 + RELATIVE_SLACK):
        raise AccountingError(
            f"Expected {plan.steps} steps to cost at most the claimed epsilon {shown(claim.epsilon)} "
            f"at delta {shown(claim.delta)}. Received: {rounded_up(certified)} with noise multiplier {shown(sigma)}. "
            "Raise the noise multiplier (null calibrates it), lower the steps, or claim what it costs."
        )
    return plan


def _stated(spec: PrivacySpec) -> dict[str, Any]:
    """The fields of a plan that the spec states."""
    noise = spec.mechanism.noise_multiplier
    return {
        "num_units": spec.data.num_units,
        "sampling_probability": spec.schedule.sampling_probability,
        "scheme": spec.sampling.scheme,
        "truncated_batch_size": spec.sampling.truncated_batch_size,
        "steps": spec.schedule.steps,
        "clip_norm": spec.mechanism.total_clip_norm,
        "adjacency": spec.claim.adjacency,
        "accountant": spec.accountant.name,
        "target_epsilon": spec.claim.epsilon,
        "delta": spec.claim.delta,
        "rng": spec.mechanism.rng,
        **({} if noise is None else {"noise_multiplier": noise}),
    }


def _adaptive_clipping(
    spec: PrivacySpec, noise_multiplier: float, expected_batch_size: float
) -> accounting.AdaptiveClipping | None:
    clipping = spec.mechanism.clip_norm
    if not isinstance(clipping, Clipping) or clipping.quantile is None:
        return None
    return accounting.adaptive_clipping(
        noise_multiplier=noise_multiplier,
        quantile=clipping.quantile,
        expected_batch_size=expected_batch_size,
        learning_rate=clipping.learning_rate,
        count_noise=clipping.count_noise,
    )


def _check_size(spec: PrivacySpec, num_units: int | None) -> None:
    if num_units is not None and num_units != spec.data.num_units:
        raise PlanError(
            f"Expected data.num_units of the spec to be the number of units at hand. "
            f"Received: {spec.data.num_units} in the spec, num_units={num_units}. "
            "Sampling probability, denominator and epsilon depend on it: correct the spec and have it reviewed again."
        )


def _check_seed(spec: PrivacySpec, seed: int | None) -> None:
    if seed is None:
        return
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise PlanError(f"Expected seed to be an integer of at least 0, or None. Received: seed={seed!r}.")
    if spec.mechanism.rng != "prng":
        raise PlanError(
            f"Expected no seed with mechanism.rng: {spec.mechanism.rng}, whose randomness nobody may know. "
            f"Received: seed={seed}. Leave it out, or write rng: prng in a spec that is for tests only."
        )


def _records_of_a_unit(spec: PrivacySpec) -> tuple[int, int]:
    """Records of a unit that are clipped together, and that are clipped on their own."""
    unit = spec.claim.privacy_unit
    most = unit.max_records_per_unit or 1
    return (most, 1) if unit.method == "user_wise_dp_sgd" else (1, most) if unit.method == "group_privacy" else (1, 1)
