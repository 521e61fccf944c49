"""Differentially private training of Keras language models, under a reviewed spec, with a model card at the end.

Names are imported when they are first used: reading and reviewing a spec needs no TensorFlow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from tfdp import data, errors
    from tfdp.callback import PrivacyCallback
    from tfdp.card import check_card, export
    from tfdp.gradients import clipped_gradients
    from tfdp.inspection import explain, suggest_clip_norm, verify
    from tfdp.ledger import Ledger, read_ledger
    from tfdp.microbatches import time_microbatches
    from tfdp.models import check_model
    from tfdp.optimizer import dp_optimizer
    from tfdp.plan import Plan, make_plan
    from tfdp.review import review
    from tfdp.sampling.batches import poisson_batches
    from tfdp.spec import PrivacySpec

# Public name -> module that defines it; None: the name is itself a module.
_HOMES: dict[str, str | None] = {
    "PrivacySpec": "tfdp.spec",
    "review": "tfdp.review",
    "Plan": "tfdp.plan",
    "make_plan": "tfdp.plan",
    "poisson_batches": "tfdp.sampling.batches",
    "time_microbatches": "tfdp.microbatches",
    "dp_optimizer": "tfdp.optimizer",
    "PrivacyCallback": "tfdp.callback",
    "clipped_gradients": "tfdp.gradients",
    "check_model": "tfdp.models",
    "explain": "tfdp.inspection",
    "verify": "tfdp.inspection",
    "suggest_clip_norm": "tfdp.inspection",
    "export": "tfdp.card",
    "check_card": "tfdp.card",
    "Ledger": "tfdp.ledger",
    "read_ledger": "tfdp.ledger",
    "data": None,
    "errors": None,
}

__all__ = [
    "PrivacySpec",
    "review",
    "Plan",
    "make_plan",
    "poisson_batches",
    "time_microbatches",
    "dp_optimizer",
    "PrivacyCallback",
    "clipped_gradients",
    "check_model",
    "explain",
    "verify",
    "suggest_clip_norm",
    "export",
    "check_card",
    "Ledger",
    "read_ledger",
    "data",
    "errors",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tfdp' has no attribute {name!r}")
    home = _HOMES[name]
    value = getattr(importlib.import_module(home), name) if home else importlib.import_module(f"tfdp.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
