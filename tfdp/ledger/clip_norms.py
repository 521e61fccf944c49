"""The clip norm of every step, where it follows a noisy count.

A step line holds the clip norm that the step uses. The first line after a step, whatever its kind, holds the noisy
fraction that the step released and the clip norm that follows from it. A fraction that a crash kept from being written
is lost, and the clip norm stays: nothing is estimated again. Both are outputs of the mechanism that is accounted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfdp.accounting import AdaptiveClipping, held
from tfdp.errors import AccountingError
from tfdp.ledger.lines import refuse

CLIP_NORM, FRACTION = "clip_norm", "noisy_fraction"
# exp and float32 may round differently on another machine.
_TOLERANCE = 1e-6


class ClipNormTrail:
    """Follows the clip norm along the lines of a ledger.

    Args:
        plan: as the header of the ledger holds it.

    Attributes:
        moves: whether the clip norm of this plan follows a count.
        current: of the next step.

    Raises:
        AccountingError: the plan describes no such clip norm that can be, or one whose two noises are not together the
            noise multiplier that epsilon is computed from.
    """

    def __init__(self, plan: Mapping[str, Any]):
        described = plan.get("adaptive_clipping")
        self._rule = None if described is None else AdaptiveClipping.from_dict(described)
        self.current = float(plan["clip_norm"]) if self._rule is None else held(float(plan["clip_norm"]))
        self._released: float | None = None
        if self._rule is not None:
            joint, accounted = self._rule.joint_noise_multiplier, plan["noise_multiplier"]
            if not math.isclose(joint, accounted, rel_tol=1e-9):
                raise AccountingError(
                    f"Expected noises of gradients and count that are noise multiplier {accounted!r} together. "
                    f"Received: {joint!r}."
                )

    @property
    def moves(self) -> bool:
        return self._rule is not None

    def release(self, noisy_fraction: float) -> None:
        """Takes what the last step released; the next line has to hold it."""
        if self._rule is None or self._released is not None or not math.isfinite(noisy_fraction):
            raise AccountingError(
                f"Expected one finite noisy fraction a step of a clip norm that moves. Received: {noisy_fraction!r}."
            )
        self.current = self._rule.following(self.current, noisy_fraction)
        self._released = noisy_fraction

    def fields(self, kind: str) -> dict[str, float]:
        """What the next line has to hold beside its own fields."""
        if self._rule is None or (kind != "step" and self._released is None):
            return {}
        released = {} if self._released is None else {FRACTION: self._released}
        return {CLIP_NORM: self.current, **released}

    def written(self) -> None:
        """The line is on the disk."""
        self._released = None

    def follow(self, path: Path, number: int, entry: Mapping[str, Any]) -> None:
        """Reads a line.

        Raises:
            LedgerError: its clip norm is not the one that follows from the lines before.
        """
        if self._rule is None or "torn" in entry:
            return
        norm, fraction = entry.get(CLIP_NORM), entry.get(FRACTION)
        if norm is None and fraction is None and entry["kind"] != "step":
            return
        if not isinstance(norm, float) or not (fraction is None or isinstance(fraction, float)):
            refuse(path, number, "the clip norm of the step", f"{CLIP_NORM}={norm!r}, {FRACTION}={fraction!r}")
        expected = self.current if fraction is None else self._rule.following(self.current, fraction)
        if not math.isclose(norm, expected, rel_tol=_TOLERANCE):
            refuse(path, number, f"clip norm {expected!r}, as the lines before say", repr(norm))
        self.current = norm
