"""Goes through what differs and asks the rule of each field."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from tfdp.comparison import orders
from tfdp.comparison.changes import Change, Direction, Rank, leaves
from tfdp.comparison.orders import Rule

# They say whether a claim holds, not what it is about.
_ABOUT_THE_PROOF = frozenset({"review", "review.findings", "claim.status"})
_ANOTHER = "It bounds another thing than before, so a smaller number says nothing."


def judged(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    rules: Mapping[str, Rule | None],
    whole: frozenset[str],
    special: Mapping[str, Rule],
) -> list[Change]:
    """Every difference with what its rule says; a rule of None keeps silent, no rule at all is incomparable."""
    found = []
    for where, one, other in leaves(old, new, whole):
        rule = special[where] if where in special else _nearest(where, rules)
        if rule is not None:
            direction, why = rule(one, other)
            found.append(Change(where, one, other, direction, why))
    return found


def _nearest(where: str, rules: Mapping[str, Rule | None]) -> Rule | None:
    """The rule of the field, or of the nearest section above it that has one."""
    for name in _upwards(where):
        if name in rules:
            return rules[name]
    return orders.unknown


def _upwards(where: str) -> Iterator[str]:
    while where:
        yield where
        where = where.rpartition(".")[0]


def ranked(
    changes: list[Change], rules: Mapping[str, Rule | None], promise: frozenset[str], amounts: frozenset[str]
) -> tuple[Change, ...]:
    """The changes in the order of the rules, each with its rank; those without a rule first.

    Where what is promised is less, or another thing, epsilon and delta lose their meaning as a comparison: else a claim
    could shrink to a smaller unit, and its smaller epsilon would count as progress.
    """
    lost = (Direction.WEAKER, Direction.INCOMPARABLE)
    about = promise - _ABOUT_THE_PROOF
    meaningless = any(change.where in about and change.direction in lost for change in changes)
    order = list(rules)
    found = []
    for change in changes:
        rank = Rank.AMOUNT if change.where in amounts else Rank.REST
        if change.where in promise or change.where not in order:
            rank = Rank.PROMISE
        if meaningless and rank is Rank.AMOUNT:
            change = replace(change, direction=Direction.INCOMPARABLE, why=_ANOTHER)
        found.append(replace(change, rank=rank))
    return tuple(sorted(found, key=lambda change: order.index(change.where) if change.where in order else -1))
