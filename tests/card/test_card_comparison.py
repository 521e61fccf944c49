"""Two cards compared: epsilon is what ran, and what is derived or about utility keeps silent."""

from __future__ import annotations

import json

import pytest

from tfdp.card import load_card
from tfdp.cli import main
from tfdp.comparison import Direction
from tfdp.comparison.cards import compare_cards
from tfdp.comparison.engine import judged
from tfdp.comparison.rules import CARD_RULES, CARD_WHOLE


@pytest.fixture
def card(run):
    run.train().export()
    return load_card(run.directory / "MODEL_CARD.json")


def changed(card, **changes):
    """The card with dotted paths (dots as two underscores) set."""
    values = card.model_dump(mode="json")
    for name, value in changes.items():
        *path, last = name.split("__")
        place = values
        for part in path:
            place = place[part]
        assert last in place, name
        place[last] = value
    return type(card).model_validate_json(json.dumps(values))


CASES = [
    ({"claim__epsilon": {"value": 0.1, "unbounded": False}}, "stronger"),
    ({"claim__epsilon": {"value": 90.0, "unbounded": False}}, "weaker"),
    ({"claim__epsilon": {"value": None, "unbounded": True}}, "weaker"),
    ({"claim__delta": 1e-4}, "weaker"),
    ({"claim__status": "not claimed"}, "weaker"),
    ({"claim__adjacency": "zero_out"}, "weaker"),
    ({"claim__adjacency": "something"}, "incomparable"),
    ({"claim__adjacency": "replace_one"}, "stronger"),
    ({"claim__adjacency": "replace_one", "data__size_is_public": False}, "incomparable"),
    ({"guarantee__unit_kind": "user"}, "incomparable"),
    ({"guarantee__unit_definition": "one word"}, "incomparable"),
    ({"provenance__seed": 7}, "weaker"),
    ({"provenance__rng": "prng"}, "weaker"),
    ({"data_accesses": []}, "weaker"),
    ({"groups__minimum_size": 3}, "weaker"),
    ({"title": "Other", "accounting__steps_executed": 21, "utility__metrics": [], "attacks": []}, "unchanged"),
]


def test_verdicts(card):
    for changes, verdict in CASES:
        assert compare_cards(card, changed(card, **changes)).verdict == verdict, changes


@pytest.mark.parametrize(("adjacency", "verdict"), [("add_or_remove_one", "weaker"), ("replace_one", "unchanged")])
def test_a_size_is_published(card, adjacency, verdict):
    old = changed(card, data__size_is_public=False, claim__adjacency=adjacency)
    assert compare_cards(old, changed(old, data__size_is_public=True)).verdict == verdict
    assert compare_cards(changed(old, data__size_is_public=True), old).verdict == "unchanged"


def test_the_same_card(card):
    assert compare_cards(card, card).changes == ()


def test_every_section_of_a_card_has_a_rule(card):
    """Each value replaced by one that no rule has seen: none is reported for want of a rule."""

    def replaced(value):
        if isinstance(value, dict):
            return {key: replaced(inside) for key, inside in value.items()}
        return None

    values = card.model_dump(mode="json")
    values["claim"]["epsilon"] = 1.0
    special = dict.fromkeys(
        ("claim.adjacency", "guarantee.unit_kind", "schema_version"), lambda _old, _new: (Direction.WEAKER, "")
    )
    assert {"claim.adjacency", "guarantee.unit_kind"} < set(CARD_RULES)
    changes = judged(values, replaced(values), CARD_RULES, CARD_WHOLE, special)
    assert not [change.where for change in changes if "No rule says" in change.why and change.where not in CARD_RULES]


def test_on_the_command_line(run, card, tmp_path, capsys):
    other = tmp_path / "MODEL_CARD.json"
    other.write_text(changed(card, claim__delta=1e-4).model_dump_json())
    with pytest.raises(SystemExit) as caught:
        main(["diff", str(run.directory), str(other), "--format", "json"])
    assert caught.value.code == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["kind"], report["verdict"]) == ("card", "weaker")
    with pytest.raises(SystemExit) as caught:
        main(["diff", "examples/specs/poisson.yaml", str(other)])
    assert caught.value.code == 2
