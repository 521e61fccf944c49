from __future__ import annotations

import collections
import email.message
import inspect
import json
import subprocess
import sys

import pytest

from tfdp.demo import corpus
from tfdp.errors import DataError

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def docstrings():
    return corpus.private_docstrings()


def test_the_library_has_the_docstrings_it_is_known_for(docstrings):
    by_name = {docstring.unit_id.split("@")[0]: docstring.text for docstring in docstrings}
    expected = inspect.getdoc(email.message.Message.get_payload)
    assert by_name["email.message:Message.get_payload"] == expected
    assert json.__doc__.strip().splitlines()[0] in by_name["json:"]
    assert 6000 < len(docstrings) < 9000
    assert 1_200_000 < sum(len(docstring.text.encode()) for docstring in docstrings) < 1_900_000
    modules = {docstring.unit_id.split(":")[0].split(".")[0] for docstring in docstrings}
    assert len(modules) > 140
    assert not modules & {"test", "idlelib", "pydoc_data", "numpy", "tensorflow", "pip", "site-packages"}


def test_units_are_named_once_and_no_text_occurs_twice(docstrings):
    assert len({docstring.unit_id for docstring in docstrings}) == len(docstrings)
    repeated = [key for key, count in collections.Counter(d.key for d in docstrings).items() if count > 1]
    assert repeated == []


def test_split_is_disjoint_and_complete_and_does_not_depend_on_the_order(docstrings):
    split = corpus.split(docstrings)
    assert len(split.train) + len(split.held_out) == len(docstrings)
    assert not {d.key for d in split.train} & {d.key for d in split.held_out}
    # A share of 0.1 of n independent texts: 5 standard deviations, false alarm below 1e-6.
    count = len(docstrings)
    assert abs(len(split.held_out) - 0.1 * count) < 5 * (count * 0.1 * 0.9) ** 0.5
    reversed_split = corpus.split(docstrings[::-1])
    assert set(reversed_split.held_out) == set(split.held_out)


def test_duplicates_are_told_by_letters_and_digits(tmp_path):
    (tmp_path / "one.py").write_text(
        '"""Return the  number of items."""\nclass A:\n    """Something else altogether."""\n'
    )
    (tmp_path / "two.py").write_text('def f():\n    """return the number\n    of ITEMS!"""\n')
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "three.py").write_text('"""A docstring of a test module."""\n')
    found = corpus.private_docstrings(tmp_path)
    assert [(d.unit_id, d.text) for d in found] == [
        ("one:@1", "Return the  number of items."),
        ("one:A@2", "Something else altogether."),
    ]


def test_a_python_without_sources_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "standard_library", lambda: tmp_path)
    with pytest.raises(DataError, match="Received: 0"):
        corpus.private_docstrings()


def test_public_part_is_the_help_topics():
    topics = corpus.public_topics()
    assert 70 < len(topics) < 100
    assert "yield" in topics
    assert 400_000 < sum(len(text.encode()) for text in topics.values()) < 700_000


def test_no_private_sentence_stands_in_the_public_part(docstrings):
    public = corpus.Docstring("topics", "\n".join(corpus.public_topics().values())).key
    # Shorter texts ("the filename", "a new class") are phrases that anyone would write.
    assert [d.unit_id for d in docstrings if len(d.key) > 40 and d.key in public] == []


def test_reading_the_corpus_needs_no_tensorflow():
    code = "import sys; from tfdp.demo import corpus; print({'tensorflow', 'keras'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
