"""What the author wrote elsewhere, dotted names, placeholders: a message that is obeyed to the letter leads on."""

from __future__ import annotations

import json
import re

import pytest

from tfdp.errors import SpecError
from tfdp.review.catalogue import BASE
from tfdp.spec import PrivacySpec

FLAT = """\
epsilon: 3.0
delta: 1e-6
noise_multiplier: 1.1
max_grad_norm: 0.7
sample_rate: 0.004
steps: 900
dataset_size: 120000
"""


def fixes(text: str, format: str = "yaml") -> dict[str, str]:
    return {finding.where: finding.fix for finding in PrivacySpec.all_from_text(text, format)[1]}


def changed(old: str, new: str) -> str:
    assert BASE.count(old) == 1, old
    return BASE.replace(old, new)


class TestDotted:
    @pytest.mark.parametrize(
        ("old", "name", "value", "section", "field"),
        [
            ("  clip_norm: 1.0\n", "mechanism.clip_norm", "0.5", "mechanism", "clip_norm"),
            ("  clip_norm: 1.0\n", "mechanism.max_grad_norm", "0.5", "mechanism", "clip_norm"),
            ("    kind: example\n", "claim.privacy_unit.kind", "document", "claim.privacy_unit", "kind"),
            ("    kind: example\n", "privacy_unit.kind", "document", "claim.privacy_unit", "kind"),
            ("  adjacency: add_or_remove_one\n", "claim.adjacency", "zero_out", "claim", "adjacency"),
            ("  data_accesses: [training]\n", "claim.data_accesses", "[training]", "claim", "data_accesses"),
        ],
    )
    def test_is_written_into_its_section(self, old, name, value, section, field):
        """Obeyed, nothing is left to mend."""
        (fix,) = fixes(changed(old, "") + f"{name}: {value}\n").values()
        assert re.sub(r"^Did you mean \w+\? ", "", fix) == f"In {section}, write: {field}: {value}"
        spaces = old[: len(old) - len(old.lstrip())]
        assert fixes(changed(old, f"{spaces}{fix.partition('write: ')[2]}\n")) == {}

    def test_in_json(self):
        values = PrivacySpec.from_text(BASE).to_dict()
        del values["mechanism"]["clip_norm"]
        (fix,) = fixes(json.dumps(values | {"mechanism.clip_norm": 0.5}), "json").values()
        assert fix == 'In mechanism, write: "clip_norm": 0.5'

    def test_the_same_is_there_already(self):
        (fix,) = fixes(BASE + "mechanism.clip_norm: 1.0\n").values()
        assert fix == "It is there already, in mechanism: delete mechanism.clip_norm."

    def test_another_is_there_already(self):
        (fix,) = fixes(BASE + "claim.adjacency: zero_out\n").values()
        assert fix == "Which is meant, adjacency: add_or_remove_one or adjacency: zero_out? Keep that one in claim."

    def test_a_name_that_is_no_field(self):
        (fix,) = fixes(BASE + "optimizer.momentum_of_it: 0.9\n").values()
        assert fix.startswith("Known here: schema_version, ")


class TestElsewhere:
    def test_examples_hold_what_the_author_wrote(self):
        found = fixes(FLAT)
        assert "claim: {epsilon: 3.0, delta: 1e-06, privacy_unit" in found["claim"]
        assert "data: {num_units: 120000, " in found["data"]
        assert "mechanism: {clip_norm: 0.7, noise_multiplier: 1.1}" in found["mechanism"]
        assert "sampling: {scheme: poisson, probability: 0.004, steps: 900}" in found["sampling"]
        assert found["max_grad_norm"] == "Did you mean clip_norm? In mechanism, write: clip_norm: 0.7"

    def test_obeyed_they_are_a_spec(self):
        """Every section as its message shows it, and the flat fields deleted, because they are there already."""
        sections = [re.search(r"(?:such as|Add the line): (.*)$", fix) for fix in fixes(FLAT).values()]
        text = "\n".join(found[1] for found in sections if found).replace("<one unit in your words>", "one chat")
        spec = PrivacySpec.from_text(text)
        assert (spec.claim.epsilon, spec.data.num_units, spec.sampling.probability) == (3.0, 120000, 0.004)
        assert (spec.mechanism.clip_norm, spec.sampling.steps) == (0.7, 900)
        for name, fix in fixes(f"{text}\n{FLAT}").items():
            assert "It is there already" in fix, name

    def test_two_values_are_both_named(self):
        found = fixes(FLAT + "mechanism.clip_norm: 0.5\n")
        assert "mechanism: {clip_norm: <0.7 or 0.5>, " in found["mechanism"]
        for name, values in (
            ("max_grad_norm", "0.5 or clip_norm: 0.7"),
            ("mechanism.clip_norm", "0.7 or clip_norm: 0.5"),
        ):
            assert f"Which is meant, clip_norm: {values}? Keep that one in mechanism." in found[name]

    def test_what_cannot_be_a_value_is_not_taken(self):
        assert "claim: {epsilon: 2, " in fixes(FLAT.replace("3.0", "-1"))["claim"]

    def test_a_name_of_several_sections(self):
        assert fixes(BASE + "kind: none\n")["kind"] == "Did you mean kind in claim.privacy_unit or kind in tuning?"


STRANGE = [object(), {1, 2}, "x" * 100_000, ["x"] * 9000, 1 << 60_000, {"a": {}}, [[[object()]]]]


@pytest.mark.parametrize("value", STRANGE, ids=["object", "set", "text", "list", "number", "mapping", "nested"])
@pytest.mark.parametrize("name", ["max_grad_norm", "mechanism.clip_norm", "claim.data_accesses"])
def test_whatever_an_unknown_field_holds_a_message_is_short(name, value):
    """Values of from_dict are any objects, and those of a file as long as the file."""
    with pytest.raises(SpecError) as caught:
        PrivacySpec.from_dict({name: value, "noise_multiplier": value, "sigma": 1.0})
    assert max(len(finding.fix) for finding in caught.value.findings) < 700


class TestPlaceholders:
    @pytest.mark.parametrize(
        ("field", "kind"),
        [("id_field: user_id", "user"), ("id_field: patient", "user"), ("id_field: book", "document")],
    )
    def test_the_kind_of_a_unit_that_a_field_names(self, field, kind):
        assert fixes(changed("kind: example", field))["claim.privacy_unit.kind"].endswith(f": kind: {kind}")

    def test_facts_are_left_to_the_author(self):
        fix = fixes(changed("    description: one text\n", ""))["claim.privacy_unit.description"]
        assert fix.endswith("description: <one example in your words>")
        assert fixes(changed("num_units: 60000", "num_units: many"))["data.num_units"].endswith("<number of examples>")

    @pytest.mark.parametrize("text", ["<one unit in your words>", "<x>"])
    def test_one_that_is_left_is_an_error(self, text):
        with pytest.raises(SpecError, match="value of your own, received the placeholder") as caught:
            PrivacySpec.from_text(changed("one text", f'"{text}"'))
        (finding,) = caught.value.findings
        assert (finding.id, finding.where, finding.line) == ("PS000", "claim.privacy_unit.description", 7)

    @pytest.mark.parametrize(
        ("old", "new", "where"),
        [
            ("60000", "<number of users>", "data.num_units"),
            ("[training]", "<a list>", "claim.data_accesses"),
            ("add_or_remove_one", "<choice>", "claim.adjacency"),
            (
                BASE[-5:],
                f"{BASE[-5:]}waivers: [{{finding: PS050, reason: r, expires: <YYYY-MM-DD>}}]\n",
                "waivers[0].expires",
            ),
        ],
    )
    def test_one_that_is_left_is_not_offered_again(self, old, new, where):
        assert fixes(changed(old, new)) == {where: "Write your own in its place, without the brackets."}

    @pytest.mark.parametrize("text", ["a <b> c", "x < y", "<>", "<a> and <b>"])
    def test_angle_brackets_in_a_text(self, text):
        assert PrivacySpec.from_text(changed("one text", f'"{text}"')).claim.privacy_unit.description == text


def test_averaging_follows_from_the_method():
    (fix,) = fixes(changed("    kind: example", "    reduction: mean\n    kind: example")).values()
    assert "selection" not in fix
    assert fix.startswith("Whether records are averaged before they are clipped follows from method: user_wise_dp_sgd")


class TestNotation:
    def test_no_space_after_the_colon(self):
        (finding,) = PrivacySpec.all_from_text(changed("delta: 1.0e-6", "delta:1e-6"))[1]
        assert finding.message == "expected YAML, received no space after the colon."

    @pytest.mark.parametrize(
        ("old", "new", "fix"),
        [
            (
                "    kind: example\n    desc",
                "\tkind: example\n\tdesc",
                "Write 4 spaces in place of the tab on lines 6 to 7.",
            ),
            ("    description", "\tdescription", "Write 4 spaces in place of the tab on line 7."),
            ("  clip_norm", "\tclip_norm", "Write 2 spaces in place of the tab on line 15."),
            ("  noise", "\tnoise", "Write 2 spaces in place of the tab on line 16."),
        ],
    )
    def test_spaces_for_a_tab(self, old, new, fix):
        text = changed(old, new)
        (finding,) = PrivacySpec.all_from_text(text)[1]
        assert finding.message == "expected YAML, received a tab."
        assert finding.fix == f"Indent with spaces: YAML takes no tabs there. {fix}"
        assert fixes(text.replace("\t", " " * int(re.search(r"Write (\d)", fix)[1]))) == {}
