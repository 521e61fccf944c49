"""One change, all changes, and the verdict over them."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


class Direction(enum.StrEnum):
    """What a change does to privacy, seen from the old version."""

    WEAKER = "weaker"
    INCOMPARABLE = "incomparable"
    STRONGER = "stronger"
    UNCHANGED = "unchanged"


class Rank(enum.IntEnum):
    """What counts first."""

    PROMISE = 0
    """What is protected against what, and whether it is earned."""
    AMOUNT = 1
    """Delta, epsilon, what the mechanism costs."""
    REST = 2


@dataclass(frozen=True)
class Change:
    """One field with two values.

    Attributes:
        where: dotted path of the field, or the name of a quantity that was computed from several.
        old, new: plain JSON values; None where there is none.
        direction: what it does to privacy.
        why: one sentence, or two; holds no text from the compared files.
        rank: how much it counts in the verdict.
        details: one line each, such as the message of a finding; they may quote the compared files.
    """

    where: str
    old: Any
    new: Any
    direction: Direction
    why: str
    rank: Rank = Rank.REST
    details: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "where": self.where,
            "old": self.old,
            "new": self.new,
            "direction": self.direction.value,
            "why": self.why,
            "details": list(self.details),
        }


@dataclass(frozen=True)
class Comparison:
    """Every change, the most important first."""

    kind: str
    old_name: str
    new_name: str
    changes: tuple[Change, ...]

    @property
    def verdict(self) -> Direction:
        """Rank by rank: the promise, the amounts, the rest.

        Within a rank, weaker and stronger together are incomparable, and so is what nobody can order, unless something
        is weaker and nothing stronger. A lower rank can take a "stronger" back, never make up for a "weaker".
        """
        verdict = Direction.UNCHANGED
        for rank in Rank:
            here = together({change.direction for change in self.changes if change.rank is rank})
            if verdict is Direction.UNCHANGED:
                verdict = here
            elif verdict is Direction.STRONGER and here in (Direction.WEAKER, Direction.INCOMPARABLE):
                verdict = Direction.INCOMPARABLE
        return verdict

    def having(self, direction: Direction) -> tuple[Change, ...]:
        """The changes of one direction."""
        return tuple(change for change in self.changes if change.direction is direction)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "kind": self.kind,
            "old": self.old_name,
            "new": self.new_name,
            "verdict": self.verdict.value,
            "changes": [change.to_dict() for change in self.changes],
        }


def together(seen: set[Direction]) -> Direction:
    """The direction of several at once: weaker and stronger do not make up for each other."""
    if Direction.WEAKER in seen:
        return Direction.INCOMPARABLE if Direction.STRONGER in seen else Direction.WEAKER
    if Direction.INCOMPARABLE in seen:
        return Direction.INCOMPARABLE
    return Direction.STRONGER if Direction.STRONGER in seen else Direction.UNCHANGED


def leaves(old: Any, new: Any, whole: frozenset[str], path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Dotted path and both values of everything that differs.

    Mappings are descended into, except at the paths in `whole`; a mapping that only one side has is compared with an
    empty one. A list is one value.
    """
    inside = [side for side in (old, new) if isinstance(side, Mapping)]
    if path not in whole and inside and all(isinstance(side, Mapping) or side is None for side in (old, new)):
        one, other = old or {}, new or {}
        for key in [*one, *(key for key in other if key not in one)]:
            yield from leaves(one.get(key), other.get(key), whole, f"{path}.{key}" if path else str(key))
    elif type(old) is not type(new) or old != new:
        yield path, old, new
