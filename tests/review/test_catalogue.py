"""The table of findings: complete, each example triggers its finding, and the page is what the table prints."""

from __future__ import annotations

import datetime
import pathlib
import re

import pytest

from tfdp.errors import SpecError
from tfdp.review import REVIEWERS_RULES, review
from tfdp.review.catalogue import BASE, CATALOGUE, SOURCES
from tfdp.review.contributions import Contributions, compare
from tfdp.review.pages import entry_text, example_values, list_text, page
from tfdp.review.waivers import apply_waivers
from tfdp.spec import PrivacySpec

ROOT = pathlib.Path(__file__).resolve().parents[2]
TODAY = datetime.date(2026, 12, 1)
SHOWN = [entry for entry in CATALOGUE.values() if entry.example or entry.data]


def findings_of(values, data=None):
    try:
        spec = PrivacySpec.from_dict(values)
    except SpecError as error:
        return list(error.findings)
    found = review(spec, rules=REVIEWERS_RULES)
    if data is not None:
        found += compare(spec, Contributions(**data))
    return list(apply_waivers(spec, found, TODAY).findings)


@pytest.fixture(scope="module")
def base():
    return PrivacySpec.from_text(BASE).to_dict()


def test_the_base_of_the_examples_has_no_finding(base):
    assert findings_of(base, {}) == []


@pytest.mark.parametrize("entry", SHOWN, ids=lambda entry: entry.id)
def test_an_example_triggers_its_finding(entry, base):
    found = [finding for finding in findings_of(example_values(entry, base), entry.data) if finding.id == entry.id]
    assert found
    assert {finding.severity.value for finding in found} <= set(entry.severities)
    assert found[0].severity.value == entry.severities[0]


def test_ids_are_unique_sorted_and_told_from_somewhere():
    ids = list(CATALOGUE)
    assert ids == sorted(set(ids))
    for entry in CATALOGUE.values():
        assert re.fullmatch("PS[0-9]{3}", entry.id)
        assert set(entry.sources) <= set(SOURCES)
        assert bool(entry.example or entry.data) != bool(entry.situation), "an example or a situation, not both"
        assert all(text.endswith(".") for text in (entry.title, entry.why, entry.fix))


def test_every_id_in_the_sources_is_in_the_table_and_the_other_way_round():
    sources = [path for path in (ROOT / "tfdp").rglob("*.py") if path.name not in ("catalogue.py", "pages.py")]
    if not sources:
        pytest.skip("the sources are not beside the tests")
    named = {id for path in sources for id in re.findall(r"\"(PS\d{3})\"", path.read_text(encoding="utf-8"))}
    assert named == set(CATALOGUE)


def test_the_page_is_what_the_table_prints():
    text = (ROOT / "examples" / "findings.md").read_text(encoding="utf-8")
    assert text == page(), "write it again: tfdp explain --page > examples/findings.md"
    for id in CATALOGUE:
        assert f"## {id}\n" in text
        assert f"(#{id.lower()})" in text


def test_text_for_a_terminal():
    text = entry_text(CATALOGUE["PS010"])
    assert text.startswith("PS010 (error): ")
    assert 'sampling.scheme: "shuffle"' in text
    assert "Waiver: not possible." in text
    assert len(list_text().splitlines()) == len(CATALOGUE)


def test_no_error_can_be_waived():
    for entry in CATALOGUE.values():
        assert entry.waivable == (entry.severities[0] != "error" and not entry.id.startswith("PS06")), entry.id
    assert CATALOGUE["PS008"].waivable
    assert not CATALOGUE["PS020"].waivable
    assert not CATALOGUE["PS061"].waivable
