"""Two files of several specs each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tfdp.comparison.changes import Change, Comparison, Direction, Rank, leaves, together
from tfdp.comparison.specs import compare_specs
from tfdp.spec import PrivacySpec

_SPEC = "spec"
_WHOSE = ("claim.privacy_unit.", "data.", "budget.dataset_id")


@dataclass(frozen=True)
class FileComparison:
    """What became of each spec, in the order of the new file; those that are removed come last.

    Attributes:
        documents: for each part the number of its document in the old and in the new file, or None where there is none.
    """

    old_name: str
    new_name: str
    parts: tuple[Comparison, ...]
    documents: tuple[tuple[int | None, int | None], ...]
    kind: str = field(default=_SPEC, init=False)

    @property
    def verdict(self) -> Direction:
        """No spec makes up for another: weaker and stronger ones together are incomparable."""
        return together({part.verdict for part in self.parts})

    @property
    def changes(self) -> tuple[Change, ...]:
        """Those of all parts."""
        return tuple(change for part in self.parts for change in part.changes)

    def having(self, direction: Direction) -> tuple[Change, ...]:
        """The changes of one direction."""
        return tuple(change for change in self.changes if change.direction is direction)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values: those of one comparison, each change with the documents that it is between."""
        changes = [
            {**change.to_dict(), "old_document": old, "new_document": new}
            for part, (old, new) in zip(self.parts, self.documents, strict=True)
            for change in part.changes
        ]
        return {
            "kind": self.kind,
            "old": self.old_name,
            "new": self.new_name,
            "verdict": self.verdict.value,
            "changes": changes,
        }


def compare_files(
    old: Sequence[PrivacySpec], new: Sequence[PrivacySpec], *, old_name: str = "old", new_name: str = "new"
) -> Comparison | FileComparison:
    """Compares each spec of a file with what became of it.

    Specs have no names. Equal ones belong together wherever they stand; of the others the first with the first, where
    there are as many as before, else each with the one that differs least from it. What is left was removed, which is
    weaker, or added. An added one is incomparable: it is one more release, maybe of the same data, and next to specs
    that changed it may be what one of them became.
    """
    if len(old) == len(new) == 1:
        return compare_specs(old[0], new[0], old_name=old_name, new_name=new_name)
    pairs = _pairs(old, new)
    changed = any(old[one].digest != new[other].digest for one, other in pairs)
    partner = {other: one for one, other in pairs}
    found: list[tuple[int | None, int | None]] = [(partner.get(other), other) for other in range(len(new))]
    found += [(one, None) for one in range(len(old)) if one not in partner.values()]
    parts = []
    for one, other in found:
        names = (_named(old_name, one, len(old)), _named(new_name, other, len(new)))
        if one is not None and other is not None:
            parts.append(compare_specs(old[one], new[other], old_name=names[0], new_name=names[1]))
        else:
            parts.append(Comparison(_SPEC, *names, (_removed() if other is None else _added(changed),)))
    numbers = tuple((_number(one), _number(other)) for one, other in found)
    return FileComparison(old_name, new_name, tuple(parts), numbers)


def _number(index: int | None) -> int | None:
    return None if index is None else index + 1


def _pairs(old: Sequence[PrivacySpec], new: Sequence[PrivacySpec]) -> list[tuple[int, int]]:
    """Which old spec became which new one."""
    ours, theirs = list(range(len(old))), list(range(len(new)))
    pairs = []
    for other in list(theirs):
        equal = next((one for one in ours if old[one].digest == new[other].digest), None)
        if equal is not None:
            pairs.append((equal, other))
            ours.remove(equal)
            theirs.remove(other)
    if len(ours) == len(theirs):
        return pairs + list(zip(ours, theirs, strict=True))
    distances = sorted((_distance(old[one], new[other]), one, other) for one in ours for other in theirs)
    for _, one, other in distances:
        if one in ours and other in theirs:
            pairs.append((one, other))
            ours.remove(one)
            theirs.remove(other)
    return pairs


def _distance(one: PrivacySpec, other: PrivacySpec) -> tuple[int, int]:
    """How many fields differ: first of those that say whose data it is about, then of all."""
    differing = [where for where, *_ in leaves(one.to_dict(), other.to_dict(), frozenset())]
    return sum(where.startswith(_WHOSE) for where in differing), len(differing)


def _removed() -> Change:
    return Change(_SPEC, "present", None, Direction.WEAKER, "It is removed, and its claim with it.", Rank.PROMISE)


def _added(changed: bool) -> Change:
    why = (
        "It is one more release: where it is of the same data, all releases together reveal more than before. Review "
        "all of it."
    )
    if changed:
        why = f"It is new, unless it is what one of the changed specs became: compare them by hand. If new: {why}"
    return Change(_SPEC, None, "present", Direction.INCOMPARABLE, why, Rank.PROMISE)


def _named(name: str, index: int | None, count: int) -> str:
    return name if index is None or count == 1 else f"{name} (document {index + 1} of {count})"
