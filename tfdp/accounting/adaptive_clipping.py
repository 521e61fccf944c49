"""A clip norm that follows a quantile of the gradient norms, by a noisy count of units (Andrew et al. 2021).

In every step t the sum of gradients clipped to C_t gets noise of standard deviation z_g * C_t, and the count of units
whose norm is at most C_t gets noise sigma_b. A unit counts +1/2 where its norm is at most C_t and -1/2 where it is
larger (half of the expected batch size is added afterwards: a constant), so that it moves the count by at most 1/2. One
that adds nothing to the gradients counts 0. In units of their noise one unit then moves gradients and count together by
at most

    sqrt(1 / z_g^2 + 1 / (2 sigma_b)^2) = 1 / z:

both are one Gaussian mechanism with noise multiplier z, and that is what is accounted. Given z, the gradients get

    z_g = (z^-2 - (2 sigma_b)^-2)^(-1/2)                                           (Theorem 1 of the paper)

That is a bound on the length of what a unit adds, as it is for gradients alone, so every event of a Gaussian mechanism
holds with z, and for each adjacency: a unit that is there or not, or is replaced by one that contributes nothing, moves
the two by its own contribution; one that is replaced by another, by the difference of two.

What follows from the count, the next clip norm C_(t+1) = C_t * exp(-learning_rate * (noisy fraction - quantile)), is
processing of what was released; a step is clipped, noised and counted with the norm from before its batch.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from tfdp.errors import AccountingError
from tfdp.spec.fields import MOVING_CLIP_NORMS

LEARNING_RATE = 0.2  # of the paper
_MOST_AT_ONCE = 10.0  # of the exponent: a wild count moves the norm by a factor of 22,000


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptiveClipping:
    """How a clip norm moves, and with which noise.

    Attributes:
        quantile: share of the units that is to stay below the clip norm.
        learning_rate: of the geometric update.
        count_noise: sigma_b, standard deviation of the noise on the count.
        gradient_noise_multiplier: z_g, standard deviation of the noise on the sum of gradients over the clip norm of
            the step.
    """

    quantile: float
    learning_rate: float
    count_noise: float
    gradient_noise_multiplier: float

    @property
    def joint_noise_multiplier(self) -> float:
        """z, of the one Gaussian mechanism that gradients and count together are."""
        return 1 / math.hypot(1 / self.gradient_noise_multiplier, 1 / (2 * self.count_noise))

    @property
    def count_share(self) -> float:
        """The part of 1 / z^2 that is the count's: (z / (2 sigma_b))^2."""
        return (self.joint_noise_multiplier / (2 * self.count_noise)) ** 2

    def following(self, clip_norm: float, noisy_fraction: float) -> float:
        """The clip norm of the next step, a number that float32 holds exactly.

        Args:
            clip_norm: of the step that was counted.
            noisy_fraction: noisy count of the units at or below it, over the expected batch size.
        """
        exponent = -self.learning_rate * (noisy_fraction - self.quantile)
        return held(clip_norm * math.exp(min(max(exponent, -_MOST_AT_ONCE), _MOST_AT_ONCE)))

    def to_dict(self) -> dict[str, float]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Any) -> AdaptiveClipping:
        """The inverse of `to_dict`.

        Raises:
            AccountingError: other fields, or values that are no positive numbers.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        good = isinstance(values, dict) and sorted(values) == sorted(names)
        if not good or not all(_is_positive(values[name]) for name in names):
            raise AccountingError(f"Expected positive numbers {', '.join(names)}. Received: {values!r}.")
        return cls(**{name: float(values[name]) for name in names})


def adaptive_clipping(
    *,
    noise_multiplier: float,
    quantile: float,
    expected_batch_size: float,
    learning_rate: float | None = None,
    count_noise: float | None = None,
) -> AdaptiveClipping:
    """Divides the noise multiplier of a step between its gradients and its count.

    Args:
        noise_multiplier: z, of both together.
        quantile: above 0 and below 1.
        expected_batch_size: q * N.
        learning_rate: None for 0.2.
        count_noise: sigma_b; None for a twentieth of the expected batch size, but at least z.

    Raises:
        AccountingError: the count alone would take more than z allows.
    """
    if count_noise is None:
        count_noise = max(expected_batch_size / 20, noise_multiplier)
    if not 2 * count_noise > noise_multiplier > 0:
        raise AccountingError(
            f"Expected count_noise above half the noise multiplier {noise_multiplier:g}, because the count is a part "
            f"of what it covers. Received: count_noise={count_noise:g}. Raise it, or leave it out."
        )
    share = (noise_multiplier / (2 * count_noise)) ** 2
    return AdaptiveClipping(
        quantile=float(quantile),
        learning_rate=LEARNING_RATE if learning_rate is None else float(learning_rate),
        count_noise=float(count_noise),
        gradient_noise_multiplier=noise_multiplier / math.sqrt(1 - share),
    )


def held(clip_norm: float) -> float:
    """The clip norm as float32 holds it, which is what clips: noise and ledger go by the same number."""
    smallest, largest = MOVING_CLIP_NORMS
    return float(np.float32(min(max(clip_norm, smallest), largest)))


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
