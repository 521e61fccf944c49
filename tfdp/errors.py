"""Every error that tfdp raises on purpose.

    TfdpError
    ├── SpecError            (ValueError)    a privacy spec cannot be read or is not valid; carries findings
    ├── PlanError            (ValueError)    a valid spec that cannot be turned into a plan
    │   └── AccountingError                  the accountant does not model this mechanism, or cannot certify it
    ├── DataError            (ValueError)    records that cannot be sampled as the plan says
    ├── GradientError        (ValueError)    per-unit gradients cannot be taken exactly
    │   ├── UnsupportedLayerError            a trainable layer without a rule, or one that mixes units
    │   └── LossNotPerUnitError              a loss that does not decompose over units
    ├── MisuseError          (RuntimeError)  a private part used in a way that would not be private
    │   └── BudgetExhaustedError             the next step would exceed the plan or the claim
    ├── LedgerError          (RuntimeError)  the ledger cannot be written, or what it says does not hold together
    └── CardError            (ValueError)    a card that cannot be written, or that does not match its ledger

Messages follow one pattern: what was expected, what was received, what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tfdp.findings import Finding


class TfdpError(Exception):
    """Base class of every error raised on purpose."""


class SpecError(TfdpError, ValueError):
    """A privacy spec cannot be read or is not valid.

    Attributes:
        findings: one `Finding` per fault, in the order of the file.
    """

    def __init__(self, message: str, findings: Sequence[Finding] = ()):
        super().__init__(message)
        self.findings = tuple(findings)


class PlanError(TfdpError, ValueError):
    """A valid spec cannot be turned into a plan; carries findings like `SpecError`."""

    def __init__(self, message: str, findings: Sequence[Finding] = ()):
        super().__init__(message)
        self.findings = tuple(findings)


class AccountingError(PlanError):
    """The accountant does not model this mechanism, or cannot certify the claim."""


class DataError(TfdpError, ValueError):
    """Records cannot be sampled as the plan says."""


class GradientError(TfdpError, ValueError):
    """Per-unit gradients cannot be taken exactly."""


class UnsupportedLayerError(GradientError):
    """A trainable layer has no gradient rule, or mixes units."""


class LossNotPerUnitError(GradientError):
    """A loss does not decompose over units."""


class MisuseError(TfdpError, RuntimeError):
    """A private part is used in a way that would not be private."""


class BudgetExhaustedError(MisuseError):
    """The next step would exceed the planned steps or the claimed epsilon."""


class LedgerError(TfdpError, RuntimeError):
    """The ledger cannot be written, or what it says does not hold together."""


class CardError(TfdpError, ValueError):
    """A card cannot be written, or does not match its ledger."""
