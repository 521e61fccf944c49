"""Attacks on a trained model, to set evidence beside the promise: an epsilon is a bound, an attack is what was found.

    scores      losses of units, and what an attacker makes of them
    membership  who was in the training data: AUC, advantage, true positives at few false positives
    canaries    secrets made for the audit: how exposed they are
    one_run     a lower bound of epsilon from canaries that coin flips let in, with one training
    extraction  does the model complete training documents word for word?

Everything here takes scores and callables and knows no deep-learning library. An attack that finds little proves
little: the next one may be better, and only the guarantee holds against all. An attack on private data is an access to
them, which no epsilon covers.
"""

from tfdp.auditing.canaries import Canaries, exposure, exposure_by_chance
from tfdp.auditing.extraction import Extraction, edit_distance, extract
from tfdp.auditing.intervals import auc_interval, clopper_pearson
from tfdp.auditing.membership import Membership, Rate, attack, attack_groups
from tfdp.auditing.one_run import OneRunAudit, audit_in_one_run, epsilon_lower_bound, p_value
from tfdp.auditing.scores import ratio_scores, threshold_scores, unit_losses

__all__ = [
    "Canaries",
    "Extraction",
    "Membership",
    "OneRunAudit",
    "Rate",
    "attack",
    "attack_groups",
    "auc_interval",
    "audit_in_one_run",
    "clopper_pearson",
    "edit_distance",
    "epsilon_lower_bound",
    "exposure",
    "exposure_by_chance",
    "extract",
    "p_value",
    "ratio_scores",
    "threshold_scores",
    "unit_losses",
]
