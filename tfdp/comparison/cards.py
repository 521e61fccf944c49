"""Two model cards."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from tfdp.comparison import orders
from tfdp.comparison.changes import Comparison
from tfdp.comparison.engine import judged, ranked
from tfdp.comparison.orders import Rule
from tfdp.comparison.rules import CARD_RULES, CARD_WHOLE

if TYPE_CHECKING:
    from tfdp.card import PrivacyCard

_PROMISE = frozenset(
    {
        "claim.status",
        "review.findings",
        *(f"guarantee.{name}" for name in ("unit_kind", "unit_definition", "unit_id_field", "sequence_length")),
        "claim.adjacency",
    }
)
_AMOUNTS = frozenset({"claim.epsilon", "claim.delta", "guarantee.target_epsilon"})


def compare_cards(old: PrivacyCard, new: PrivacyCard, *, old_name: str = "old", new_name: str = "new") -> Comparison:
    """What changed from one released model to the next, whether privacy became weaker or stronger, and why.

    Epsilon is what really ran, on both sides. Utility is not compared.
    """
    one, other = _plain(old), _plain(new)
    two_steps = _two_steps_suffice(one, other)
    contained = (
        two_steps
        or other["guarantee"]["unit_method"] == "group_privacy"
        or other["claim"]["adjacency"] == "replace_one"
    )
    special: dict[str, Rule] = {
        "guarantee.unit_kind": partial(orders.unit_kind, contained=contained),
        "claim.adjacency": partial(
            orders.adjacency,
            two_steps_suffice=two_steps,
            size_is_public=one["data"]["size_is_public"] and other["data"]["size_is_public"],
        ),
        "data.size_is_public": partial(orders.size_is_public, hidden=one["claim"]["adjacency"] == "add_or_remove_one"),
        "guarantee.unit_method": partial(
            orders.unit_method, same_unit=one["guarantee"]["unit_kind"] == other["guarantee"]["unit_kind"]
        ),
    }
    changes = judged(one, other, CARD_RULES, CARD_WHOLE, special)
    return Comparison("card", old_name, new_name, ranked(changes, CARD_RULES, _PROMISE, _AMOUNTS))


def _plain(card: PrivacyCard) -> dict[str, Any]:
    values = card.model_dump(mode="json")
    values["claim"]["epsilon"] = card.claim.epsilon.value  # None where it is unbounded
    return values


def _two_steps_suffice(old: dict[str, Any], new: dict[str, Any]) -> bool:
    if new["claim"]["epsilon"] is None or new["claim"]["status"] != "claimed":
        return False
    epsilon, delta = orders.two_steps(new["claim"]["epsilon"], new["claim"]["delta"])
    bound = old["claim"]["epsilon"]
    return (bound is None or epsilon <= bound) and delta <= old["claim"]["delta"]
