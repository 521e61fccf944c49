"""The table of findings: complete, and the page is what the table prints."""

from __future__ import annotations

import pathlib
import re

import pytest
from ruamel.yaml import YAML

from tfdp.review.catalogue import CATALOGUE, SOURCES
from tfdp.review.pages import entry_text, list_text, page
from tfdp.spec import PrivacySpec

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_ids_are_unique_sorted_and_told_from_somewhere():
    ids = list(CATALOGUE)
    assert ids == sorted(set(ids))
    for entry in CATALOGUE.values():
        assert re.fullmatch("PS[0-9]{3}", entry.id)
        assert set(entry.sources) <= set(SOURCES)
        assert all(text.endswith(".") for text in (entry.title, entry.why, entry.fix))


def test_every_id_in_the_sources_is_in_the_table_and_the_other_way_round():
    sources = [
        path for path in (ROOT / "tfdp").rglob("*.py") if path.name not in ("catalogue.py", "examples.py", "pages.py")
    ]
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
    assert 'told from the spec:\n    sampling:\n      scheme: "shuffle"\n\nMended:\n    sampling:\n' in text
    assert "Waiver: not possible." in text
    assert len(list_text().splitlines()) == len(CATALOGUE)


def test_what_is_shown_as_python_is_python():
    blocks = re.findall("```python\n(.*?)```", page(), re.DOTALL)
    assert blocks
    for block in blocks:
        compile(block, "findings.md", "exec")


def test_what_is_shown_as_yaml_can_be_copied_into_a_spec():
    """No dotted names: copied as they stand they would be unknown fields."""
    blocks = re.findall("```yaml\n(.*?)```", page(), re.DOTALL)
    assert len(blocks) > 50
    for block in blocks:
        values = YAML(typ="safe", pure=True).load(block)
        assert set(values) <= set(PrivacySpec.model_fields)
        inside = [name for value in values.values() if isinstance(value, dict) for name in value]
        assert not [name for name in inside if "." in name]


def test_no_error_can_be_waived():
    for entry in CATALOGUE.values():
        assert entry.waivable == (entry.severities[0] != "error" and not entry.id.startswith("PS06")), entry.id
    assert CATALOGUE["PS008"].waivable
    assert not CATALOGUE["PS020"].waivable
    assert not CATALOGUE["PS061"].waivable
