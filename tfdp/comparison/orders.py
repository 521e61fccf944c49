"""Rules for one field: two values that differ, to a direction and the reason for it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfdp.comparison.changes import Direction

Judgement = tuple[Direction, str]
Rule = Callable[[Any, Any], Judgement]

WEAKER, STRONGER = Direction.WEAKER, Direction.STRONGER
INCOMPARABLE, UNCHANGED = Direction.INCOMPARABLE, Direction.UNCHANGED


def always(direction: Direction, why: str) -> Rule:
    """The same answer for every change."""
    return lambda _old, _new: (direction, why)


def unknown(_old: Any, _new: Any) -> Judgement:
    """For a field without a rule: nobody has said what it means."""
    return INCOMPARABLE, "No rule says what this field means for privacy: a person has to judge it."


def ordered(strongest_first: Sequence[Any], why: str) -> Rule:
    """Values on a scale; one that is not on it cannot be compared."""

    def judge(old: Any, new: Any) -> Judgement:
        if old not in strongest_first or new not in strongest_first:
            return unknown(old, new)
        worse = strongest_first.index(new) > strongest_first.index(old)
        return (WEAKER if worse else STRONGER), why

    return judge


def lower_is_stronger(more: str, less: str) -> Rule:
    """A bound; None is no bound at all."""

    def judge(old: Any, new: Any) -> Judgement:
        one, other = (math.inf if value is None else value for value in (old, new))
        return (WEAKER, more) if not other <= one else (STRONGER, less)

    return judge


def higher_is_stronger(less: str, more: str) -> Rule:
    """A requirement; None requires nothing."""

    def judge(old: Any, new: Any) -> Judgement:
        one, other = (-math.inf if value is None else value for value in (old, new))
        return (WEAKER, less) if not other >= one else (STRONGER, more)

    return judge


def stated(added: str, removed: str, changed: str) -> Rule:
    """A text that somebody relies on: more of it is stronger, another one is incomparable."""

    def judge(old: Any, new: Any) -> Judgement:
        if old is None:
            return STRONGER, added
        return (WEAKER, removed) if new is None else (INCOMPARABLE, changed)

    return judge


def covered(old: Any, new: Any) -> Judgement:
    """A set of things that the claim covers."""
    lost, gained = sorted(set(old or ()) - set(new or ())), sorted(set(new or ()) - set(old or ()))
    if lost and gained:
        return INCOMPARABLE, f"No longer covered: {', '.join(lost)}; now covered: {', '.join(gained)}."
    if lost:
        return WEAKER, f"No longer covered: {', '.join(lost)}."
    if gained:
        return STRONGER, f"Now covered as well: {', '.join(gained)}."
    return UNCHANGED, "The same accesses in another order."


def membership_inference(old: Any, new: Any) -> Judgement:
    """Whether a release has to stand an attack."""
    required = [value == "required" for value in (old, new)]
    if required[0] == required[1]:
        return UNCHANGED, "Not required, as before."
    return (WEAKER, "No attack has to be shown any more.") if required[0] else (STRONGER, "An attack has to be shown.")


def unseeded(old: Any, new: Any) -> Judgement:
    """The seed of the randomness, if it had one."""
    if old is not None and new is not None:
        return UNCHANGED, "Another seed."
    why = "Randomness with a known seed hides nothing."
    return (WEAKER if old is None else STRONGER), why


def description(old: Any, new: Any) -> Judgement:
    """The definition of the unit in words."""
    if " ".join(str(old).split()).casefold() == " ".join(str(new).split()).casefold():
        return UNCHANGED, "The same words."
    return INCOMPARABLE, "The privacy unit is defined in other words: a person has to judge whether it is the same one."


def records_per_unit(old: Any, new: Any) -> Judgement:
    """k, under a claim that is stated for the whole unit."""
    one, other = old or 1, new or 1
    if other < one:
        return INCOMPARABLE, (
            f"Fewer records of a unit are covered, at most {other} instead of {one}: as strong only if the rest is "
            "really left out."
        )
    if other > one:
        return UNCHANGED, f"Up to {other} records of a unit are covered, instead of {one}; epsilon is for all of them."
    return UNCHANGED, "One record, said in another way."


def release(old: Any, new: Any) -> Judgement:
    """What leaves, which is also what the claim covers."""
    scale = ("predictions", "final_model", "all_checkpoints")
    if old not in scale or new not in scale:
        return unknown(old, new)
    if scale.index(new) < scale.index(old):
        return WEAKER, "The claim covers less of what the training produces."
    return INCOMPARABLE, "More leaves the trust boundary; the claim covers it, and whether it should is for a person."


def access_states(old: Any, new: Any) -> Judgement:
    """The list of data accesses on a card, each with its state."""
    held = ("covered", "no access")
    one, other = ({str(entry["name"]): entry["status"] for entry in side or ()} for side in (old, new))
    names = {*one, *other}
    lost = sorted(name for name in names if one.get(name) in held and other.get(name) not in held)
    gained = sorted(name for name in names if other.get(name) in held and one.get(name) not in held)
    if lost and gained:
        return INCOMPARABLE, "Some accesses to private data are no longer covered or excluded, and others now are."
    if lost:
        return WEAKER, "An access to private data is no longer covered or excluded."
    if gained:
        return STRONGER, "One more access to private data is covered or excluded."
    return UNCHANGED, "The same accesses are covered."


def error_findings(old: Any, new: Any) -> Judgement:
    """Errors among the findings of a review."""
    one, other = ({_id(entry["id"]) for entry in side or () if entry["severity"] == "error"} for side in (old, new))
    if other - one:
        return WEAKER, f"New errors: {', '.join(sorted(other - one))}."
    if other:
        return INCOMPARABLE, f"Errors stand as before: {', '.join(sorted(other))}. Such a claim is not earned."
    if one:
        return STRONGER, f"No error is left of {', '.join(sorted(one))}."
    return UNCHANGED, "No errors."


def waivers(old: Any, new: Any) -> Judgement:
    """Findings that somebody accepts: a new or longer waiver hides more."""
    one, other = _by_finding(old), _by_finding(new)
    hidden = sorted(set(other) - set(one))
    longer = sorted(id for id in set(one) & set(other) if _expiry(other[id]) > _expiry(one[id]))
    unowned = sorted(id for id in set(one) & set(other) if one[id].get("owner") and not other[id].get("owner"))
    said = [f"newly waived: {', '.join(hidden)}"] if hidden else []
    said += [f"waived for longer: {', '.join(longer)}"] if longer else []
    said += [f"without an owner now: {', '.join(unowned)}"] if unowned else []
    if said:
        text = "; ".join(said)
        return WEAKER, f"{text[0].upper()}{text[1:]}."
    if set(one) - set(other) or any(_expiry(other[id]) < _expiry(one[id]) for id in set(one) & set(other)):
        return STRONGER, "Less is waived, or for a shorter time."
    return UNCHANGED, "The same findings are waived for the same time."


def _by_finding(entries: Any) -> dict[str, Mapping[str, Any]]:
    latest: dict[str, Mapping[str, Any]] = {}
    for entry in entries or ():
        id = _id(entry["finding"])
        if id not in latest or _expiry(entry) > _expiry(latest[id]):
            latest[id] = entry
    return latest


def _id(value: Any) -> str:
    """An id as it may stand in a sentence: nothing else of a compared file does."""
    return str(value) if re.fullmatch(r"PS[0-9]{3}", str(value)) else "an unknown id"


def _expiry(entry: Mapping[str, Any]) -> str:
    return str(entry["expires"])


def tuning(old: Any, new: Any) -> Judgement:
    """How hyperparameters were chosen: private data looked at once more, or nothing said about it, is weaker."""
    one, other = _tuning_rank(old), _tuning_rank(new)
    if one == other:
        return UNCHANGED, "Tuning looks at as much private data as before."
    why = "From the best: on no or public data; private and accounted; private; not stated. Fewer trials are better."
    return (WEAKER if other > one else STRONGER), why


def _tuning_rank(section: Any) -> tuple[int, float]:
    if section is None:
        return 3, 0.0
    if section.get("kind") in ("none", "public"):
        return 0, 0.0
    trials = section.get("trials")
    return (1 if section.get("accounted") else 2), (math.inf if trials is None else float(trials))


def two_steps(epsilon: float, delta: float) -> tuple[float, float]:
    """What (epsilon, delta) promises about data sets that are two neighbours apart.

    Group privacy for two: 2 epsilon and (1 + e^epsilon) delta.
    """
    return 2 * epsilon, delta * (1 + math.exp(min(epsilon, 700.0)))


_LARGER = {"example": 0, "sequence": 0, "document": 1, "user": 2}
_ADJACENCIES = frozenset({"zero_out", "add_or_remove_one", "replace_one"})


def unit_kind(old: str, new: str, *, contained: bool) -> Judgement:
    """Kinds of units by what they hold.

    Args:
        old, new: the kinds.
        contained: whether the new claim also holds for a part of its unit, see `holds_for_parts`.
    """
    if old not in _LARGER or new not in _LARGER:
        return unknown(old, new)
    if _LARGER[new] < _LARGER[old]:
        return WEAKER, f"One {new} is only a part of what {_one(old)} has: less is hidden, whatever epsilon says."
    if _LARGER[new] == _LARGER[old]:
        return INCOMPARABLE, "Neither unit holds the other, so their epsilons say nothing about each other."
    if contained:
        return STRONGER, f"A {new} holds everything that one {old} did, and the new claim holds for a part of it too."
    return INCOMPARABLE, (
        f"A {new} is more than {_one(old)}, but two data sets that differ in a part of a {new} are two steps apart, "
        "and for two steps the new claim promises less than the old one did."
    )


def _one(kind: str) -> str:
    return f"an {kind}" if kind == "example" else f"a {kind}"


def unit_method(_old: Any, _new: Any, *, same_unit: bool) -> Judgement:
    """How the unit is protected."""
    if same_unit:
        return UNCHANGED, "The unit is the same; what its protection costs is judged by epsilon and by the review."
    return UNCHANGED, "It goes with the unit, which is another one now: what that means is judged there."


def size_is_public(old: bool, new: bool, *, hidden: bool) -> Judgement:
    """Whether the number of units is public.

    Args:
        old, new: the statements.
        hidden: whether the old claim hid the number: under add_or_remove_one alone do neighbours differ in it.
    """
    if hidden and new:
        return WEAKER, "How many units there are was hidden by the claim, and is stated to be public now."
    if new:
        return UNCHANGED, "The old claim did not hide how many units there are."
    return UNCHANGED, "What was public stays known; to say otherwise promises nothing."


def adjacency(old: str, new: str, *, two_steps_suffice: bool, size_is_public: bool) -> Judgement:
    """Neighbouring data sets: replacing is removing and adding, so it takes two steps of the others.

    Replacing keeps the number of units: it hides no number, and reaches the null record of zero_out only where that is
    a record like any other, which nothing states.

    Args:
        old, new: the adjacencies.
        two_steps_suffice: whether two steps of the new claim are within the old one, see `two_steps`.
        size_is_public: whether the number of units is public before and after.
    """
    if old not in _ADJACENCIES or new not in _ADJACENCIES:
        return unknown(old, new)
    if new == "replace_one" and old == "zero_out":
        return INCOMPARABLE, (
            "The claim now covers replacing a unit by any other, but a unit that is blanked out only where a blank one "
            "is an allowed unit, which nobody has stated."
        )
    if new == "replace_one" and not size_is_public:
        return INCOMPARABLE, (
            "The claim now covers replacing a unit by any other, but no longer hides how many units there are, and "
            "that number is not stated to be public before and after."
        )
    if new == "replace_one":
        return STRONGER, "The claim now also covers replacing one unit by any other; how many there are is public."
    if old == "zero_out":
        return STRONGER, "The claim now also covers adding a unit, and so how many there are."
    if old == "replace_one" and two_steps_suffice:
        return STRONGER, "A replacement takes two steps now, and even for two steps the new claim promises no less."
    if old == "replace_one" and new == "add_or_remove_one" and not size_is_public:
        return INCOMPARABLE, (
            "The claim now hides how many units there are, but a replacement takes two steps: about it, the new claim "
            "promises twice its epsilon and more than twice its delta."
        )
    if old == "replace_one":
        return WEAKER, (
            "A replacement takes two steps now: about it, the new claim promises twice its epsilon and more than twice "
            "its delta."
        )
    return WEAKER, "How many units there are is no longer hidden."
