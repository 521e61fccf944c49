"""Utility on records that were not trained on: perplexity, and any metric for groups of people.

Everything here is an exact value on whatever data it is measured on: no noise is added, and no epsilon covers it. On
private data it is a data access, which the card lists.
"""

from tfdp.evaluation.groups import GroupReport, GroupRow, better_direction, metric_by_group, perplexity_by_group
from tfdp.evaluation.perplexity import Perplexity, perplexity, perplexity_metric, token_bytes

__all__ = [
    "GroupReport",
    "GroupRow",
    "Perplexity",
    "better_direction",
    "metric_by_group",
    "perplexity",
    "perplexity_by_group",
    "perplexity_metric",
    "token_bytes",
]
