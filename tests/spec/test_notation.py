"""Syntax errors in our own words, and lines that can be copied to where they belong."""

from __future__ import annotations

import datetime
import io
import json
import re

import pytest
from ruamel.yaml import YAML

from tfdp.review import review
from tfdp.review.catalogue import BASE
from tfdp.review.waivers import apply_waivers
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
    text, id = CASES[case], case.split()[0]
    finding = only(text, "yaml", id)
    spaces, line = re.search(r"Such as, after (\d+) spaces: (.*)$", finding.fix).groups()
    section = finding.where.split(".")[:-1] or [finding.where]
    if finding.where in ("sampling", "sampling.scheme"):
        section = ["sampling"]
    lines = text.splitlines()
    at = next(i for i, each in enumerate(lines) if each.strip() == f"{section[-1]}:")
    lines.insert(at + 1, " " * int(spaces) + re.sub("<.*>", "5", line))
    mended = PrivacySpec.from_text("\n".join(lines))
    assert not [f for f in review(mended) if f.message == finding.message]

    values = YAML(typ="safe", pure=True).load(io.StringIO(text))
    finding = only(json.dumps(values, indent=2), "json", id)
    line = re.search(r"Such as: (.*)$", finding.fix)[1]
    assert json.loads(f"{{{line}}}"), "a field of JSON"


@pytest.mark.parametrize(
    ("path", "value", "id", "line"),
    [
        ("claim.data_accesses", "training", "PS000", ["training"]),
        ("claim.data_accesses", "training, tuning", "PS000", ["training", "tuning"]),
        ("sampling.scheme", "shuffle", "PS010", {"scheme": "poisson"}),
        ("data.deduplication", "none", "PS008", {"deduplication": "exact"}),
        ("mechanism.rng", "prng", "PS042", {"rng": "csprng"}),
        ("sampling.expected_batch_size", 70000, "PS013", {"expected_batch_size": 60000}),
        (
            "waivers",
            [{"finding": "PS050", "reason": "r", "expires": "2999-01-01"}],
            "PS061",
            {"owner": "<who answers for it>"},
        ),
        ("waivers", [{"finding": "PS050", "reason": "r", "expires": "2001-01-01"}], "PS060", {"expires": "2026-02-26"}),
    ],
)
def test_what_to_write_in_a_json_file_is_json(path, value, id, line):
    """In YAML the same remedy is written without quotes."""
    spec = YAML(typ="safe", pure=True).load(io.StringIO(BASE))
    section, _, name = path.rpartition(".")
    (spec[section] if section else spec)[name] = value
    text = io.StringIO()
    YAML().dump(spec, text)
    written = json.dumps(line) if isinstance(line, list) else json.dumps(line)[1:-1]
    assert written in judged(json.dumps(spec), "json", id).fix
    assert written.replace('"', "") in judged(text.getvalue(), "yaml", id).fix


def test_a_whole_waiver_is_written_in_json():
    spec = YAML(typ="safe", pure=True).load(io.StringIO(BASE))
    spec["waivers"] = [{"finding": "PS050", "reason": "r", "expires": "2001-01-01"}]
    fix = judged(json.dumps(spec), "json", "PS060").fix
    waiver = json.loads(fix.split("A waiver is written: ")[1])
    assert (waiver["finding"], list(waiver)) == ("PS050", ["finding", "reason", "owner", "expires"])


def judged(text, format, id):
    specs, faults = PrivacySpec.all_from_text(text, format)
    day = datetime.date(2025, 11, 28)
    found = [*faults, *(f for spec in specs for f in apply_waivers(spec, review(spec), day).findings)]
    return next(finding for finding in found if finding.id == id)


@pytest.mark.parametrize(
    ("text", "says", "fix"),
    [
        ('{"a": ["training" }', "} in place of ]", "Write ] there: what begins with [ ends with ]."),
        ('{"a": [ }', "} in place of ]", "Write ] there"),
        ('{"a": {"b": 1]}', "] in place of }", "Write } there: what begins with { ends with }."),
        ('{"epsilon": 08}', "a leading zero", "Write 8:"),
        ('{"epsilon": -007.5}', "a leading zero", "Write -7.5:"),
        ('{"epsilon": 00.5}', "a leading zero", "Write 0.5:"),
        ('{"a": True}', "the word True", "Write true"),
        ('{"a": None, "b": 1}', "the word None,", "Write null"),
        ('{"epsilon":\u00a08}', "a no-break space (U+00A0)", "Write a plain space in place of the no-break space"),
    ],
)
def test_what_is_wrong_with_a_value_of_json(text, says, fix):
    _, (finding,) = PrivacySpec.all_from_text(text, "json")
    assert says in finding.message
    assert finding.fix.startswith(fix)


@pytest.mark.parametrize("text", ['{"a": 100 8}', '{"a": 0.0 1}', '{"a": [10, 20 30]}'])
def test_a_zero_that_leads_nothing(text):
    _, (finding,) = PrivacySpec.all_from_text(text, "json")
    assert "no comma between" in finding.message


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("num_units: 60000", "num_units: =", "received =, which YAML keeps for itself"),
        ("num_units: 60000", "num_units: <<", "received <<, which YAML keeps for itself"),
        ("num_units: 60000", "num_units: !!binary MQ==", "received the tag !!binary"),
    ],
)
def test_what_yaml_keeps_for_itself(old, new, says):
    assert BASE.count(old) == 1
    _, (finding,) = PrivacySpec.all_from_text(BASE.replace(old, new))
    assert says in finding.message
    assert finding.where == "data.num_units"


@pytest.mark.parametrize("text", ["claim: [", "claim: {", "claim: [a,"])
def test_a_bracket_that_nothing_follows(text):
    _, (finding,) = PrivacySpec.all_from_text(text)
    assert "the end of the file in place of a value" in finding.message
    assert "Is a bracket not closed" in finding.fix


@pytest.mark.parametrize(
    ("new", "fix"),
    [
        ("epsilon: \u00a01.2", "Delete the no-break space (U+00A0) before '1.2'"),
        ("epsilon: 1.2\u00a0", "Delete the no-break space (U+00A0) behind '1.2'"),
        ("epsilon: 1\u202f200", "Delete the narrow no-break space (U+202F) behind '1'"),
        ("epsilon:\u00a01.2", "Write a plain space in place of the no-break space (U+00A0) on line 3, column 11."),
        ("\u00a0epsilon: 1.2", "Delete the no-break space (U+00A0) before 'epsilon'"),
        ("epsilon\u200b: 1.2", "Delete the zero width space (U+200B) behind 'epsilon'"),
    ],
)
def test_a_character_that_looks_like_a_space(new, fix):
    assert BASE.splitlines()[2] == "  epsilon: 1.2"
    _, (finding,) = PrivacySpec.all_from_text(BASE.replace("epsilon: 1.2", new))
    assert finding.fix.startswith(fix)
    assert finding.line == 3


def test_a_free_text_may_have_any_space():
    text = BASE.replace("description: ", "description: a\u00a0b, ", 1)
    assert text != BASE
    assert not PrivacySpec.all_from_text(text)[1]


@pytest.mark.parametrize("comment", ["# c\u2028x\n  num_units: 60000", "num_units: 60000 # c\u2028x"])
def test_a_line_separator_in_a_comment(comment):
    _, (finding,) = PrivacySpec.all_from_text(BASE.replace("num_units: 60000", comment))
    assert finding.fix == "Delete the line separator (U+2028) at the end of line 11: YAML begins a new line there."


@pytest.mark.parametrize("text", ["a: [\n...\n", "- [\n..."])
def test_a_document_that_ends_in_a_bracket(text):
    _, (finding,) = PrivacySpec.all_from_text(text)
    assert "the end of the document in place of a value" in finding.message


def test_a_name_and_its_value_in_one_text_of_json():
    text = json.dumps(YAML(typ="safe", pure=True).load(io.StringIO(BASE)))
    assert '"delta": 1e-06' in text
    _, (finding,) = PrivacySpec.all_from_text(text.replace('"delta": 1e-06', '"delta:1e-6": null'), "json")
    assert finding.fix == 'Write "delta": 1e-6'


@pytest.mark.parametrize("value", ["training, tuning", "[training, tuning]"])
def test_a_list_within_quotes(value):
    _, (finding,) = PrivacySpec.all_from_text(BASE.replace("[training]", f'"{value}"'))
    assert finding.fix == "Write it as a list: [training, tuning]."
