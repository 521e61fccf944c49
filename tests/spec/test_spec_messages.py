"""A message alone is enough to repair a spec: what it says to write, written, takes the fault away."""

from __future__ import annotations

import copy
import datetime
import io
import json
import re

import pytest
from ruamel.yaml import YAML

from tfdp.review.catalogue import BASE
from tfdp.spec import PrivacySpec
from tfdp.spec.choices import _MEANT, CHOICES
from tfdp.spec.naming import meant
from tfdp.spec.numbers import rounded_down, rounded_up, shown

VALUES = PrivacySpec.from_text(BASE).to_dict()
RAW = YAML(typ="safe", pure=True).load(io.StringIO(BASE))


def _yaml(values) -> str:
    written = io.StringIO()
    YAML().dump(values, written)
    return written.getvalue()


def faults(text: str, format: str = "yaml"):
    return PrivacySpec.all_from_text(text, format)[1]


def fault(text: str, format: str = "yaml"):
    (finding,) = faults(text, format)
    return finding


def changed(old: str, new: str) -> str:
    assert BASE.count(old) == 1, old
    return BASE.replace(old, new)


class TestMisspelt:
    @pytest.mark.parametrize(
        ("old", "new", "fix"),
        [
            ("  delta:", "  dleta:", "Did you mean delta?"),
            ("  num_units:", "  n:", "Did you mean num_units?"),
            ("clip_norm:", "max_grad_norm:", "Did you mean clip_norm?"),
            ("  privacy_unit:", "  unit:", "Did you mean privacy_unit?"),
            ("mechanism:", "mechanisms:", "Did you mean mechanism?"),
            ("schema_version:", "Schema-Version:", "Did you mean schema_version?"),
            ("  adjacency: add_or_remove_one\n", "", None),
        ],
    )
    def test_one_typo_is_one_finding(self, old, new, fix):
        finding = fault(changed(old, new))
        assert fix is None or finding.fix == fix

    def test_another_missing_field_is_still_told(self):
        found = faults(changed("  delta: 1.0e-6\n", "").replace("  adjacency:", "  adjacecny:"))
        assert [finding.where for finding in found] == ["claim.delta", "claim.adjacecny"]

    def test_a_field_in_the_wrong_section(self):
        text = changed("  epsilon: 1.2\n", "").replace("clip_norm", "epsilon: 1.2\n  clip_norm")
        assert fault(text).fix == "epsilon stands under mechanism and belongs in claim: move it there."

    @pytest.mark.parametrize(("name", "into"), [("data", "claim"), ("sampling", "mechanism"), ("claim", "sampling")])
    def test_a_section_placed_too_deep(self, name, into):
        values = copy.deepcopy(RAW)
        values[into][name] = values.pop(name)
        stands = f"{name} stands under {into} and belongs at the top level: move it out"
        for text, format, how in (
            (_yaml(values), "yaml", ": no indentation."),
            (json.dumps(values), "json", " of the braces."),
        ):
            (finding,) = faults(text, format)
            assert (finding.where, finding.fix) == (f"{into}.{name}", f"{stands}{how}")

    def test_a_section_that_is_there_twice(self):
        fix = fault(changed("mechanism:\n", "mechanism:\n  data: {num_units: 3}\n")).fix
        assert fix == "data stands under mechanism and belongs at the top level. It is there already: delete it here."

    def test_a_field_without_its_section(self):
        fix = faults(changed("data:\n", "clip_norm: 3.0\ndata:\n").replace("  clip_norm: 1.0\n", ""))[0].fix
        assert fix == "clip_norm stands at the top level and belongs in mechanism: move it there."

    def test_what_is_there_already_is_to_be_deleted(self):
        fix = fault(changed("  epochs: 15", "  epochs: 15\n  batch_size: 256")).fix
        assert fix == "Did you mean expected_batch_size? It is there already: delete batch_size."

    @pytest.mark.parametrize(
        ("path", "name"),
        [
            ("sampling.batch_size", "sampling.expected_batch_size"),
            ("mechanism.noise", "mechanism.noise_multiplier"),
            ("mechanism.sigma", "mechanism.noise_multiplier"),
            ("sampling.sigma", "mechanism.noise_multiplier"),
            ("mechanism.clip", "mechanism.clip_norm"),
            ("mechanism.max_grad_norm", "mechanism.clip_norm"),
            ("mechanism.l2_norm_clip", "mechanism.clip_norm"),
            ("claim.unit", "claim.privacy_unit"),
            ("claim.privacy_unit.unit", "claim.privacy_unit.kind"),
            ("claim.privacy_unit.type", "claim.privacy_unit.kind"),
            ("sampling.q", "sampling.probability"),
            ("sampling.sample_rate", "sampling.probability"),
            ("sampling.num_epochs", "sampling.epochs"),
            ("sampling.num_steps", "sampling.steps"),
            ("data.n", "data.num_units"),
            ("data.num_examples", "data.num_units"),
            ("data.batch_size", "sampling.expected_batch_size"),
            ("accountant.type", "accountant.name"),
            ("claim.privacy_unit.id", "claim.privacy_unit.id_field"),
            ("budget.epsilon", "budget.epsilon_cap"),
            ("waivers.id", "waivers.finding"),
            ("waivers.until", "waivers.expires"),
        ],
    )
    def test_names_of_other_libraries(self, path, name):
        assert meant(PrivacySpec, tuple(path.split("."))) == [tuple(name.split("."))]

    def test_id_of_a_waiver(self):
        text = BASE + "waivers:\n  - {id: PS008, reason: r, owner: o, expires: 2031-02-28}\n"
        assert fault(text).fix == "Did you mean finding?"


def filled(line: str, format: str = "yaml") -> str:
    """A line with what only the author knows in place of its placeholders: texts, a day, an id and numbers."""
    quote = '"' * (format == "json")
    known = {"one ": f"{quote}one text{quote}", "id of": "PS050", "YYYY": "2099-01-01", "number": "60000", "most": "5"}

    def own(placeholder):
        return next((value for start, value in known.items() if placeholder[1].startswith(start)), "mine")

    return re.sub(f"{quote}<([^<>]*)>{quote}", own, line)


def places(values, above=()):
    for key, value in values.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from places(value, (*above, key))


def without(path):
    values = copy.deepcopy(VALUES)
    section = values
    for part in path[:-1]:
        section = section[part]
    del section[path[-1]]
    return values, section


REQUIRED = [path for path in places(VALUES) if faults(json.dumps(without(path)[0]), "json")]


@pytest.mark.parametrize("format", ["yaml", "json"])
@pytest.mark.parametrize("path", REQUIRED, ids=".".join)
def test_the_line_that_a_missing_field_asks_for_can_be_copied(path, format):
    values, section = without(path)
    text = json.dumps(values) if format == "json" else "# yaml\n" + json.dumps(values)
    fix = fault(text, format).fix
    found = re.search(r"(?:[Ss]uch as|Add the line): (.*)$", fix)
    assert found, fix
    line = filled(found[1], format)
    if format == "json":
        section.update(json.loads("{" + line + "}"))
    else:
        from tfdp.spec.reading import read

        section.update(read(line, "yaml").value)
    assert faults(json.dumps(values), "json") == []


def test_there_are_required_fields():
    assert len(REQUIRED) == 16


class TestValues:
    @pytest.mark.parametrize(
        ("old", "new", "fix"),
        [
            ('"1.0"', "1.0", 'Write it in quotes: schema_version: "1.0"'),
            ('"1.0"', '"2"', 'Write it: schema_version: "1.0"'),
            ("noise_multiplier: 1.16", "noise_multiplier: NaN", "or null: then it is calibrated"),
            ("noise_multiplier: 1.16", "noise_multiplier: .nan", "or null: then it is calibrated"),
            ("clip_norm: 1.0", "clip_norm: inf", "Write a finite number."),
            ("epsilon: 1.2", "epsilon: 1,6", "Write 1.6: a decimal point, no comma."),
            ("epsilon: 1.2", "epsilon: 1,600", "Write 1600, without a separator, or 1.600, with a decimal point."),
            ("name: pld", "name: PLD", "Did you mean pld?"),
            ("add_or_remove_one", "Add-or-remove one", "Did you mean add_or_remove_one?"),
            ("accountant:\n  name: pld", "accountant: rdp", "such as: accountant: {name: rdp}"),
            ("[training]", "[Training]", "Did you mean training?"),
            ("  clip_norm: 1.0\n  noise_multiplier: 1.16", "  clip_norm:1.0", "space after the colon: clip_norm: 1.0"),
            ("accountant:\n  name: pld", "accountant: {name:pld}", "space after the colon: name: pld"),
        ],
    )
    def test_says_what_to_write(self, old, new, fix):
        assert fix in fault(changed(old, new)).fix

    def test_not_a_number_has_no_quotes_to_take_away(self):
        finding = fault(changed("noise_multiplier: 1.16", "noise_multiplier: NaN"))
        assert finding.id == "PS002"
        assert "quotes" not in finding.fix
        assert finding.message == "expected a finite number, received NaN."

    def test_a_missing_section_names_its_fields(self):
        text = BASE[: BASE.index("sampling:")]
        fix = fault(text).fix
        assert "with scheme, expected_batch_size or probability, and steps or epochs (scheme: poisson, " in fix
        assert "full_batch or shuffle); such as: " in fix
        assert (
            "with clip_norm, and optionally noise_multiplier" in fault(re.sub(r"mechanism:\n(  .*\n)+", "", BASE)).fix
        )
        fix = fault(re.sub(r"claim:\n(  .*\n)+", "", BASE)).fix
        assert (
            "(kind: example, sequence, document or user; adjacency: add_or_remove_one, replace_one or zero_out; " in fix
        )
        assert "data_accesses: training, tuning, clip_selection or evaluation)" in fix
        assert (
            "Delete the line, or add the section, with finding, reason, owner and expires"
            in fault(BASE + "waivers:\n").fix
        )

    def test_choices_are_listed(self):
        fix = fault(changed("  adjacency: add_or_remove_one\n", "")).fix
        assert "Choices: add_or_remove_one (one unit is in the data, or is not); replace_one (" in fix
        assert "zero_out (one unit contributes nothing; the number of units is public)" in fix

    def test_nothing_after_the_colon(self):
        finding = fault(changed("  epsilon: 1.2", "  epsilon:"))
        assert (finding.id, finding.line, finding.column) == ("PS001", 3, 3)
        assert "received nothing" in finding.message

    @pytest.mark.parametrize("text", ["", "# nothing yet\n"])
    def test_an_empty_file(self, text):
        assert "tfdp init" in fault(text).fix


@pytest.mark.parametrize("value", [1 / 6000, 0.1 / 3, 1.0, 123456789.0, 1e-300, 0.1, 2.0000000000000004])
@pytest.mark.parametrize("digits", [1, 2, 3, 6])
def test_rounding_never_passes_the_bound(value, digits):
    assert float(rounded_down(value, digits)) <= value <= float(rounded_up(value, digits))

    assert float(rounded_down(value, digits)) > value * (1 - 10 ** (1 - digits))
    assert float(shown(value)) == value


@pytest.mark.parametrize("text", ["0.1", "1e-06", "8", "1.1e-05", "0.3", "1.2345"])
def test_rounding_leaves_few_digits_as_they_are(text):
    """0.1 is stored as a little more than a tenth, 0.3 as a little less."""
    assert rounded_down(float(text), 5) == rounded_up(float(text), 5) == text


class TestSeveralDocuments:
    @pytest.mark.parametrize("section", ["claim", "data", "mechanism", "sampling"])
    def test_a_separator_within_a_spec_is_one_finding(self, section):
        text = changed(f"\n{section}:", f"\n---\n{section}:")
        finding = fault(text)
        line = text[: text.index("---")].count("\n") + 1
        assert (finding.line, finding.column) == (line, 1)
        assert f"document 2 begins at line {line}" in finding.message
        assert "Is this line meant?" in finding.fix
        assert faults(text.replace("---\n", "")) == []

    def test_two_separators_within_a_spec(self):
        found = faults(changed("\ndata:", "\n---\ndata:").replace("\nsampling:", "\n---\nsampling:"))
        assert [finding.line for finding in found] == [10, 18]

    def test_a_separator_within_a_section(self):
        (finding,) = faults(changed("  delta:", "---\n  delta:"))
        assert "begins at line 4 with ---" in finding.fix

    def test_in_a_text_of_one_spec(self):
        from tfdp.errors import SpecError

        with pytest.raises(SpecError, match="Document 2 begins at line 10 with ---: is that line meant"):
            PrivacySpec.from_text(changed("\ndata:", "\n---\ndata:"))

    def test_findings_name_their_document(self):
        text = f"{BASE}---\n{changed('epsilon: 1.2', 'epsilon: 0')}---\n- 1\n---\na: &a 1\nb: *a\n"
        assert [re.search(r"\(Document (.*)\.\)$", finding.message)[1] for finding in faults(text)] == [
            "2 of 4",
            "3 of 4",
            "4 of 4",
        ]
        assert "Document" not in fault(changed("epsilon: 1.2", "epsilon: 0")).message

    def test_so_do_those_of_the_review(self):
        from tfdp.review import review

        first, second = PrivacySpec.all_from_text(f"{BASE}---\n{changed('exact', 'none')}")[0]
        assert review(first) == []
        assert [finding.message.endswith("(Document 2 of 2.)") for finding in review(second)] == [True]

    def test_two_wrong_specs_are_not_one_cut_in_two(self):
        found = faults(f"{changed('sampling:', 'samplin:')}---\n{changed('mechanism:', 'mechanims:')}")
        assert [finding.fix for finding in found] == ["Did you mean sampling?", "Did you mean mechanism?"]


class TestNotation:
    @pytest.mark.parametrize(
        ("old", "new", "line", "fix"),
        [
            ("  delta: 1.0e-6", "  delta:1e-6", 4, "Write a space after the colon: delta: 1e-6"),
            ("  epsilon: 1.2", "  epsilon:1.2", 3, "Write a space after the colon: epsilon: 1.2"),
            (
                "description: one text",
                "description:one text",
                7,
                "Write a space after the colon: description: one text",
            ),
            ("claim:\n", "claim\n", None, "Is a colon missing after claim, on line 2?"),
            ("  epochs: 15", "  epochs:15", 20, "Write a space after the colon: epochs: 15"),
            ('"1.0"', '"1.0', None, "a quote not closed, perhaps on line 1?"),
            ("description: one text", 'description: "one text', 7, "a quote not closed, perhaps on line 7?"),
            ("description: one text", "description: 'one text", None, "a quote not closed, perhaps on line 7?"),
            ("[training]", "[training", None, "bracket not closed"),
            ("accountant:\n  name: pld", "budget: {dataset_id: d, epsilon_cap: 1,6}", 21, "decimal point"),
        ],
    )
    def test_yaml(self, old, new, line, fix):
        finding = fault(changed(old, new))
        assert fix in finding.fix
        assert line is None or finding.line == line

    @pytest.mark.parametrize("line", ["url: it's", 'a: "b" # it\'s', "a: x 'y", "'a': [\"b\", 'c''d']", '# "x'])
    def test_quotes_that_are_closed_or_no_quotes(self, line):
        from tfdp.spec.hints import _is_open

        assert not _is_open(line)

    def test_json_comma_too_many_is_the_place(self):
        finding = fault('{"a": {\n  "b": 1,\n  },\n "c": 2}', "json")
        assert (finding.line, finding.column) == (2, 9)

    @pytest.mark.parametrize(
        ("text", "fix"),
        [
            ('{"a": 1,}', "Delete the comma before }"),
            ('{"a": [1,\n]}', "Delete the comma before ]"),
            ('{"a": "x,\n "b": 1}', "a quote not closed, perhaps on line 1?"),
            ('{"a": "x', "a quote not closed, perhaps on line 1?"),
            ('{"a": 1,6}', "decimal point"),
            ("{'a': 1}", "double quotes"),
            ('{"a": pld}', "double quotes"),
            ('{"a": 1 "b": 2}', "comma missing"),
            ('{"a" 1}', "colon"),
            ('{"a": {"b": 1}', "bracket not closed"),
            ('{"a": 1},', "behind the last bracket"),
        ],
    )
    def test_json(self, text, fix):
        finding = fault(text, "json")
        assert fix in finding.fix
        assert " at." not in finding.message


@pytest.mark.parametrize(
    ("old", "new", "fix"),
    [
        ("1.0e-6", "0.0001%", "Write 1e-06: a number alone, without anything around it."),
        ("1.2", "<= 8", "Write 8: a number alone, without anything around it."),
        ("epochs: 15", "epochs: 10 epochs", "Write 10: a number alone, without anything around it."),
        ("60000", "60k", "Write 60000: a number alone, without anything around it."),
        ("60000", "about 60000", "Write 60000: a number alone, without anything around it."),
        (
            "60000",
            "2.5 or so",
            "Correct it; num_units: Number of privacy units (N). Such as: num_units: <number of examples>",
        ),
        ("clip_norm: 1.0", "clip_norm: adaptive", "Such as: clip_norm: 1.0"),
        ("1.2", "between 1 and 2", "Such as: epsilon: 2"),
        ("1.2", "1e999999k", "Such as: epsilon: 2"),
    ],
)
def test_a_number_with_something_around_it(old, new, fix):
    assert BASE.count(old) == 1
    _, (finding,) = PrivacySpec.all_from_text(BASE.replace(old, new))
    assert finding.fix.endswith(fix)


def test_a_mapping_of_waivers_is_shown_what_a_list_of_them_looks_like():
    _, (finding,) = PrivacySpec.all_from_text(BASE + "waivers:\n  PS008: known\n")
    line = finding.fix.partition("Such as: ")[2]
    PrivacySpec.from_text(BASE + filled(line))


@pytest.mark.parametrize("comment", ["// x", "/* x */", "# x"])
def test_json_has_no_comments(comment):
    _, (finding,) = PrivacySpec.all_from_text(f"{{{comment}\n}}", "json")
    assert "a comment" in finding.message
    assert "JSON has no comments" in finding.fix


class TestChoices:
    @pytest.mark.parametrize(
        ("old", "new", "choice"),
        [
            ("kind: example", "kind: Patient", "user"),
            ("kind: example", "kind: record", "example"),
            ("adjacency: add_or_remove_one", "adjacency: add-remove", "add_or_remove_one"),
            ("adjacency: add_or_remove_one", "adjacency: substitution", "replace_one"),
            ("scheme: poisson", "scheme: Poison", "poisson"),
            ("deduplication: exact", "deduplication: false", "none"),
        ],
    )
    def test_the_one_that_was_meant(self, old, new, choice):
        assert fault(changed(old, new)).fix == f"Did you mean {choice}?"

    def test_what_each_means_where_none_is_near(self):
        fix = fault(changed("scheme: poisson", "scheme: uniform")).fix
        assert fix.startswith("Write one of them: poisson (each unit joins each batch independently); truncated_")
        assert "shuffle (fixed batches of a shuffled order; never passes review)" in fix

    def test_other_words_lead_to_choices(self):
        for name, words in _MEANT.items():
            choices = CHOICES[name]
            assert set(words.values()) <= set(choices)
            assert not set(words) & set(choices)


@pytest.mark.parametrize(
    ("written", "day"),
    [
        ("31.12.2025", "2025-12-31"),
        ("3.4.2027", "2027-04-03"),
        ("2027/4/3", "2027-04-03"),
        ("2027-4-3", "2027-04-03"),
        ("2027-04-03T10:00:00Z", "2027-04-03"),
        ("12/31/2025", "2025-12-31"),
        ("31/12/2025", "2025-12-31"),
        ("05/05/2027", "2027-05-05"),
        ("03/04/2027", None),  # the third of April, or the fourth of March
        ("2027-02-30", None),
        ("31.02.2027", None),
        ("next year", None),
        ("1" * 300, None),
    ],
)
def test_a_date_in_another_order(written, day):
    text = f"{BASE}waivers:\n  - {{finding: PS050, reason: r, owner: o, expires: '{written}'}}\n"
    fix = fault(text).fix
    assert fix.startswith(f"Write {day}: " if day else "Correct it; expires: ")
    today = str(datetime.datetime.now(datetime.UTC).date())
    assert ("That day is past" in fix) == (day is not None and day < today)
    if day:
        assert faults(text.replace(f"'{written}'", day)) == []


@pytest.mark.parametrize(
    ("written", "fix", "told"),
    [
        (
            "PS04",
            "Did you mean PS004 or PS040? ",
            "PS004 (delta is above 1/(10 num_units)) or PS040 (Tuning on private ",
        ),
        ("ps-8", "Did you mean PS008 or PS080? ", "PS008 (Duplicates stay in the data) or PS080 (The card differs "),
        ("ps 008", "Did you mean PS008? ", "Did you mean PS008 (Duplicates stay in the data)?"),
        ("PS95", "Did you mean PS095 or PS905 or PS950? ", "No finding has such an id"),
        ("tuning", "Write PS and three digits", "Write PS and three digits"),
    ],
)
def test_an_id_that_is_none(written, fix, told):
    from tfdp.review.waivers import titled

    finding = fault(f"{BASE}waivers:\n  - {{finding: '{written}', reason: r, owner: o, expires: 2099-01-01}}\n")
    assert f"received '{written}'" in finding.message
    assert finding.fix.startswith(fix)
    assert told in titled(finding).fix


def test_a_comment_of_another_language():
    finding = fault('{\n  // agreed in March\n  "schema_version": "1.0"\n}\n')
    assert (finding.line, finding.fix) == (
        2,
        "Is line 2 a comment? In YAML it begins with #: write # in place of //.",
    )
