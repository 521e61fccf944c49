"""Gradient rules: one small class a layer kind.

A rule says which uses of which variables one call of a layer makes, given its inputs and the gradient of its output
(before the activation). Rules are found by the `call` function that the layer really runs, so a subclass that
overrides `call`, or anything that its `call` builds on, never falls under the rule of its parent.
"""

from tfdp.gradients.rules.base import (
    Rule,
    UsesOf,
    all_rules,
    flattened_by,
    hides_calls,
    is_quantized,
    rule_for,
    without_rule,
)
from tfdp.gradients.rules.refused import mixes_units

__all__ = [
    "Rule",
    "UsesOf",
    "all_rules",
    "flattened_by",
    "hides_calls",
    "is_quantized",
    "mixes_units",
    "rule_for",
    "without_rule",
]
