"""Privacy accounting: what a step is, what it costs, and how much noise a claim needs.

No TensorFlow. The numbers come from dp-accounting; this package decides which of its accountants may be asked, on which
grid, and refuses the combinations that would give a number without a guarantee behind it.
"""

from tfdp.accounting.accountants import (
    ACCOUNTANTS,
    ADJACENCIES,
    best_renyi_order,
    default_grid,
    delta,
    delta_curve,
    describe_accountant,
    epsilon,
    epsilon_curve,
    library_version,
    supports,
    unamplified_epsilon,
    unsupported_reason,
)
from tfdp.accounting.adaptive_clipping import AdaptiveClipping, adaptive_clipping, held
from tfdp.accounting.calibration import Calibration, calibrate_noise_multiplier
from tfdp.accounting.composition import Run, Selection, composed_epsilon, selected_epsilon
from tfdp.accounting.events import SCHEMES, event_from_dict, event_to_dict, step_event
from tfdp.accounting.groups import generic_group_epsilon
from tfdp.accounting.tradeoff import max_membership_advantage, max_true_positive_rate

__all__ = [
    "ACCOUNTANTS",
    "ADJACENCIES",
    "SCHEMES",
    "AdaptiveClipping",
    "Calibration",
    "Run",
    "Selection",
    "adaptive_clipping",
    "best_renyi_order",
    "calibrate_noise_multiplier",
    "default_grid",
    "composed_epsilon",
    "delta",
    "delta_curve",
    "describe_accountant",
    "epsilon",
    "epsilon_curve",
    "event_from_dict",
    "event_to_dict",
    "generic_group_epsilon",
    "held",
    "library_version",
    "max_membership_advantage",
    "max_true_positive_rate",
    "selected_epsilon",
    "step_event",
    "supports",
    "unamplified_epsilon",
    "unsupported_reason",
]
