"""Syntax errors in our own words, and lines that can be copied to where they belong."""

from __future__ import annotations

import json
import re

import pytest

from tfdp.review import review
from tfdp.review.catalogue import BASE
from tfdp.spec import PrivacySpec

# Words of the libraries, which say nothing to somebody who writes a spec.
JARGON = re.compile(
    r"block|mapping|scalar|token|stream|<|delimiter|property name|Expecting|simple key|flow|indicator|anchor'|scanning"
)
BROKEN = {
    "a: b: c": "a colon where none can stand",
    "a: 1\n b: 2\n": "a colon where none can stand",
    "a:\n  - b\n c: d": "indented like none above it",
    "a:\n    b: 1\n  c: 2": "indented like none above it",
    "  a: 1\nb: 2": "indented less than the first",
    "a: [1, 2": "a bracket that is not closed",
    "a: {b: 1": "a bracket that is not closed",
    "key: [a, b}\n": "'}' in place of a comma or ']'",
    "a: {b: c d: e}": "':' in place of a comma or '}'",
    "a: ]": "']' in place of a value",
    "a: , b": "',' in place of a value",
    "{a: b}}": "more behind the end",
    "a: 'x": "a quote that is not closed",
    'a: "x\n---\nb: 1': "a quote that is not closed before ---",
    "a: 'x' y": "more behind a value that has ended",
    "a: [1,2]x": "more behind a value that has ended",
    "\ta: b": "a tab",
    "a:\n\tb: 1": "a tab",
    "a: @x": "begins with '@'",
    "a: |x\n  b": "a long text",
    "a: |99\n b": "a long text",
    "a: &\n": "an anchor or alias",
    "a: *x": "an anchor or alias",
    "a: !<x\n": "a tag",
    "a: !foo!bar x": "a tag",
    'a: "\\q"': "the escape \\q",
    'a: "\\x1"': "an escape without its digits",
    "- a\nb: c": "a field where an entry of a list",
    "a: b\n- c": "an entry of a list (-) where a field",
    "a: - b": "a list (-) on the line of its field",
    "a: ? b": "a question mark",
    "a: |\n x\ny": "a line without a colon",
    "a: \x01": "the control character 0x1",
}
BROKEN_JSON = {
    '{"a": }': "no value",
    "{a: 1}": "a name in double quotes",
    '{"a" 1}': "no colon after a name",
    '{"a": 1 "b": 2}': "no comma between two entries",
    '{"a": "\\q"}': "a backslash that begins no escape",
    '{"a": "x}': "a quote that is not closed",
    '{"a": 1}}': "more behind the last bracket",
    '{"a": 1,}': "a comma before }",
    "": "an empty document",
}


@pytest.mark.parametrize(
    ("text", "says", "format"),
    [*((text, says, "yaml") for text, says in BROKEN.items()), *((t, s, "json") for t, s in BROKEN_JSON.items())],
)
def test_a_syntax_error(text, says, format):
    _, (finding, *_) = PrivacySpec.all_from_text(text, format)
    assert says in finding.message
    assert not JARGON.search(f"{finding.message} {finding.fix}".replace("(| or >)", ""))
    assert finding.line is not None or not text


def test_the_place_of_a_control_character():
    _, (finding,) = PrivacySpec.all_from_text("a: 1\nbc: \x07")
    assert (finding.line, finding.column) == (2, 5)


def test_a_colon_is_missing_between_a_name_and_its_value():
    _, (finding,) = PrivacySpec.all_from_text("claim:\n  epsilon 8\n  delta: 1.0e-6\n")
    assert finding.fix == "Is a colon missing after epsilon, on line 2?"


USER = BASE.replace("kind: example", "kind: user\n    id_field: account")
CASES = {
    "PS005": USER,
    "PS014": BASE.replace("  expected_batch_size: 256\n", ""),
    "PS014 length": BASE.replace("  epochs: 15\n", ""),
    "PS014 truncation": BASE.replace("scheme: poisson", "scheme: truncated_poisson"),
    "PS000": BASE.replace("  clip_norm: 1.0\n", ""),
    "PS001": BASE.replace("  adjacency: add_or_remove_one\n", ""),
}


def only(text, format, id):
    specs, faults = PrivacySpec.all_from_text(text, format)
    return next(f for f in [*faults, *(f for spec in specs for f in review(spec))] if f.id == id)


@pytest.mark.parametrize("case", CASES)
def test_a_line_to_copy_is_in_the_notation_of_the_file(case):
    """Copied to where the remedy says, it mends a spec in either notation."""
    import io

    from ruamel.yaml import YAML

    text, id = CASES[case], case.split()[0]
    finding = only(text, "yaml", id)
    spaces, line = re.search(r"Such as, after (\d+) spaces: (.*)$", finding.fix).groups()
    section = finding.where.split(".")[:-1] or [finding.where]
    if finding.where in ("sampling", "sampling.scheme"):
        section = ["sampling"]
    lines = text.splitlines()
    at = next(i for i, each in enumerate(lines) if each.strip() == f"{section[-1]}:")
    lines.insert(at + 1, " " * int(spaces) + line)
    mended = PrivacySpec.from_text("\n".join(lines))
    assert not [f for f in review(mended) if f.message == finding.message]

    values = YAML(typ="safe", pure=True).load(io.StringIO(text))
    finding = only(json.dumps(values, indent=2), "json", id)
    line = re.search(r"Such as: (.*)$", finding.fix)[1]
    assert json.loads(f"{{{line}}}"), "a field of JSON"
