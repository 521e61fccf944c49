"""PrivacySpec: what is read, what is refused, and where the message points."""

from __future__ import annotations

import json
import pathlib
import re

import jsonschema
import pytest
from ruamel.yaml import YAML

from tfdp.cli.schema import render
from tfdp.errors import SpecError
from tfdp.findings import Finding, Severity
from tfdp.spec import PrivacySpec, json_schema

ROOT = pathlib.Path(__file__).resolve().parents[1]

TEXT = """\
schema_version: "1.0"
claim:
  epsilon: 8
  delta: 1e-5
  privacy_unit:
    kind: example
    description: one text
  adjacency: add_or_remove_one
  data_accesses: [training]
data:
  num_units: 6000
  size_is_public: true
mechanism:
  clip_norm: 1.0
sampling:
  scheme: poisson
  expected_batch_size: 256
  epochs: 15
"""


def faults(text: str, format: str = "yaml") -> list[Finding]:
    with pytest.raises(SpecError) as caught:
        PrivacySpec.from_text(text, format=format, name="privacy.spec")
    assert caught.value.findings
    for finding in caught.value.findings:
        assert str(finding) in str(caught.value), "the text of the error shows every finding"
        assert finding.severity is Severity.ERROR
    return list(caught.value.findings)


def fault(text: str, format: str = "yaml") -> Finding:
    (finding,) = faults(text, format)
    return finding


def changed(old: str, new: str) -> str:
    assert TEXT.count(old) == 1, old
    return TEXT.replace(old, new)


def as_json(indent: int | str = 2) -> str:
    return json.dumps(PrivacySpec.from_text(TEXT).to_dict(), indent=indent)


class TestReading:
    def test_yaml_values(self):
        spec = PrivacySpec.from_text(TEXT)
        assert spec.claim.epsilon == 8.0
        assert isinstance(spec.claim.epsilon, float)
        assert spec.claim.delta == 1e-5
        assert spec.claim.data_accesses == ("training",)
        assert (spec.claim.trust_model, spec.claim.release) == ("central", "all_checkpoints")
        assert spec.mechanism.noise_multiplier is None
        assert spec.mechanism.rng == "csprng"
        assert spec.accountant.name == "pld"
        assert spec.tuning is None, "that nothing was tuned must be said, not assumed"

    def test_json_yaml_and_dict_give_one_digest(self):
        from_yaml = PrivacySpec.from_text(TEXT)
        from_json = PrivacySpec.from_text(as_json(), format="json")
        from_dict = PrivacySpec.from_dict(from_yaml.to_dict())
        assert from_yaml == from_json == from_dict
        assert from_yaml.digest == from_json.digest == from_dict.digest
        assert len({from_yaml, from_json, from_dict}) == 1
        assert re.fullmatch("[0-9a-f]{64}", from_yaml.digest)

    def test_digest_ignores_notation_and_sees_values(self):
        digest = PrivacySpec.from_text(TEXT).digest
        assert PrivacySpec.from_text(changed("epsilon: 8", "epsilon: 8.0 # eight")).digest == digest
        assert PrivacySpec.from_text(changed("delta: 1e-5", "delta: 0.00001")).digest == digest
        assert PrivacySpec.from_text(TEXT + "accountant: {name: pld}\n").digest == digest
        assert PrivacySpec.from_text(changed("epsilon: 8", "epsilon: 8.000001")).digest != digest
        assert PrivacySpec.from_text(changed("description: one text", "description: one page")).digest != digest

    def test_json_indented_with_tabs(self):
        assert PrivacySpec.from_text(as_json("\t"), format="json") == PrivacySpec.from_text(TEXT)

    def test_byte_order_mark_is_ignored(self):
        assert PrivacySpec.from_text("\ufeff" + TEXT) == PrivacySpec.from_text(TEXT)

    def test_every_section(self):
        text = TEXT + (
            "tuning: {kind: private, trials: 12, accounted: false}\n"
            "evaluation: {group_field: language, metrics: [perplexity], min_group_size: 50,"
            " membership_inference: required}\n"
            "budget: {dataset_id: mails, ledger: budget.jsonl, epsilon_cap: 10, delta_cap: 1e-4}\n"
            "waivers:\n  - {finding: PS023, reason: agreed, owner: me, expires: 2031-02-28}\n"
        )
        spec = PrivacySpec.from_text(text)
        assert spec.tuning.trials == 12
        assert spec.evaluation.metrics == ("perplexity",)
        assert spec.budget.delta_cap == 1e-4
        assert spec.waivers[0].expires.isoformat() == "2031-02-28"
        assert PrivacySpec.from_text(json.dumps(spec.to_dict()), format="json") == spec

    def test_frozen(self):
        spec = PrivacySpec.from_text(TEXT)
        with pytest.raises(ValueError, match="frozen"):
            spec.claim.epsilon = 9.0


class TestFiles:
    def test_suffix_chooses_the_format(self, tmp_path):
        for name, text in {"a.yaml": TEXT, "b.YML": TEXT, "c.json": as_json()}.items():
            (tmp_path / name).write_text(text)
            assert PrivacySpec.from_file(tmp_path / name) == PrivacySpec.from_text(TEXT)

    @pytest.mark.parametrize(
        ("name", "content", "says"),
        [
            ("absent.yaml", None, "none is|no file"),
            ("folder.yaml", "directory", "directory"),
            ("spec.toml", b"", "named .yaml"),
            ("empty.yaml", b"", "empty document"),
            ("blank.json", b" \n\t\n", "empty document"),
            ("comment.yaml", b"# nothing yet\n", "only comments"),
            ("latin.yaml", b"a: caf\xe9\n", "byte 0xe9 at offset 6"),
            ("zero.yaml", b"a: \x00\n", "expected YAML"),
            ("list.yaml", b"- 1\n", "received a list"),
            ("word.json", b"null", "received null"),
        ],
    )
    def test_unreadable(self, tmp_path, name, content, says):
        path = tmp_path / name
        if content == "directory":
            path.mkdir()
        elif content is not None:
            path.write_bytes(content)
        with pytest.raises(SpecError, match=says) as caught:
            PrivacySpec.from_file(path)
        (finding,) = caught.value.findings
        assert finding.id == "PS000"
        assert finding.file == str(path)
        assert caught.value.__cause__ is None


class TestSeveralDocuments:
    def test_each_is_a_spec_of_its_own(self):
        specs, findings = PrivacySpec.all_from_text(
            f"# first\n---\n{TEXT}---\n{changed('epsilon: 8', 'epsilon: 4')}...\n"
        )
        assert [spec.claim.epsilon for spec in specs] == [8, 4]
        assert findings == []

    def test_a_fault_in_one_leaves_the_others(self):
        specs, findings = PrivacySpec.all_from_text(
            f"{changed('epsilon: 8', 'epsilon: 0')}---\n- 1\n---\n{TEXT}", name="x"
        )
        assert len(specs) == 1
        lines = len(TEXT.splitlines())
        assert [(f.where, f.file, f.line) for f in findings] == [("claim.epsilon", "x", 3), ("spec", "x", lines + 2)]

    def test_a_fault_of_the_notation_stops_all(self):
        specs, findings = PrivacySpec.all_from_text(f"{TEXT}---\na: [\n")
        assert (specs, [finding.id for finding in findings]) == ([], ["PS000"])

    def test_json_is_one(self):
        assert len(PrivacySpec.all_from_text(as_json(), "json")[0]) == 1
        assert PrivacySpec.all_from_text(as_json() * 2, "json")[1]


class TestRemedies:
    """A message alone is enough to repair the file."""

    @pytest.mark.parametrize(
        ("old", "new", "fix"),
        [
            ('schema_version: "1.0"', "schema_version: 1.0", 'Write it in quotes: schema_version: "1.0"'),
            ("num_units: 6000", "num_units: 6,000", "Write 6000: digits without separators."),
            ("size_is_public: true", "size_is_public: yes", "Write true, without quotes."),
            ("size_is_public: true", "size_is_public: 'false'", "Write false, without quotes."),
            ("data_accesses: [training]", "data_accesses: training", "Write it as a list: [training]."),
            ("  clip_norm: 1.0", " clip_norm: 1.0\n  rng: csprng", "indented like its neighbours?"),
            ("  clip_norm: 1.0", "\tclip_norm: 1.0", "spaces"),
            ("epsilon: 8", "epsilon: @8", "Quote the text"),
        ],
    )
    def test_says_what_to_write(self, old, new, fix):
        assert fix in fault(changed(old, new)).fix


class TestMissing:
    @pytest.mark.parametrize(
        ("lines", "where"),
        [
            ("  epsilon: 8\n", "claim.epsilon"),
            ("  delta: 1e-5\n", "claim.delta"),
            ("  privacy_unit:\n    kind: example\n    description: one text\n", "claim.privacy_unit"),
            ("    kind: example\n", "claim.privacy_unit.kind"),
            ("  adjacency: add_or_remove_one\n", "claim.adjacency"),
        ],
    )
    def test_ps001(self, lines, where):
        finding = fault(changed(lines, ""))
        assert (finding.id, finding.where) == ("PS001", where)
        assert finding.line is not None, "points at the section that lacks it"

    def test_ps001_also_when_null(self):
        finding = fault(changed("epsilon: 8", "epsilon: null"))
        assert (finding.id, finding.where, finding.line, finding.column) == ("PS001", "claim.epsilon", 3, 12)

    @pytest.mark.parametrize(
        ("lines", "where"),
        [
            ('schema_version: "1.0"\n', "schema_version"),
            ("  data_accesses: [training]\n", "claim.data_accesses"),
            ("    description: one text\n", "claim.privacy_unit.description"),
            ("  num_units: 6000\n", "data.num_units"),
            ("  size_is_public: true\n", "data.size_is_public"),
            ("  scheme: poisson\n", "sampling.scheme"),
        ],
    )
    def test_ps000(self, lines, where):
        finding = fault(changed(lines, ""))
        assert (finding.id, finding.where) == ("PS000", where)

    def test_all_faults_at_once_in_the_order_of_the_file(self):
        text = changed("epsilon: 8", "epsilon: -1").replace("clip_norm: 1.0", "clip_norm: 0").replace("epochs", "epoch")
        assert [(f.where, f.line) for f in faults(text)] == [
            ("claim.epsilon", 3),
            ("mechanism.clip_norm", 14),
            ("sampling.epoch", 18),
        ]


NUMBERS = {
    "claim.epsilon": "epsilon: 8",
    "claim.delta": "delta: 1e-5",
    "mechanism.clip_norm": "clip_norm: 1.0",
    "data.num_units": "num_units: 6000",
    "sampling.epochs": "epochs: 15",
}


class TestNumbers:
    @pytest.mark.parametrize("where", NUMBERS)
    @pytest.mark.parametrize("value", ["'8'", '"1e-5"', "true", ".nan", ".inf", "-.inf", "1e999", "!!str 8"])
    def test_ps002(self, where, value):
        line = NUMBERS[where]
        finding = fault(changed(line, f"{line.split(':')[0]}: {value}"))
        assert finding.where == where
        assert finding.id == "PS002"

    @pytest.mark.parametrize("value", ["1e-5", "1E-5", "+1.0e-05", "0.00001", "1.e-5"])
    def test_every_way_to_write_a_float(self, value):
        assert PrivacySpec.from_text(changed("delta: 1e-5", f"delta: {value}")).claim.delta == 1e-5

    @pytest.mark.parametrize(
        ("line", "value", "where"),
        [
            ("epsilon: 8", "0", "claim.epsilon"),
            ("epsilon: 8", "-1", "claim.epsilon"),
            ("epsilon: 8", "eight", "claim.epsilon"),
            ("epsilon: 8", "[8]", "claim.epsilon"),
            ("epsilon: 8", "1" + "0" * 400, "claim.epsilon"),
            ("epsilon: 8", "1" + "0" * 5000, "claim.epsilon"),
            ("delta: 1e-5", "0", "claim.delta"),
            ("delta: 1e-5", "1", "claim.delta"),
            ("num_units: 6000", "0", "data.num_units"),
            ("num_units: 6000", "6000.0", "data.num_units"),
            ("num_units: 6000", "9007199254740993", "data.num_units"),
            ("clip_norm: 1.0", "0.0", "mechanism.clip_norm"),
        ],
    )
    def test_ps000(self, line, value, where):
        finding = fault(changed(line, f"{line.split(':')[0]}: {value}"))
        assert (finding.id, finding.where) == ("PS000", where)
        assert len(finding.message) < 200

    @pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", '"8"', "true"])
    def test_ps002_in_json(self, value):
        text = as_json().replace('"epsilon": 8.0', f'"epsilon": {value}')
        finding = fault(text, "json")
        assert (finding.id, finding.where, finding.line, finding.column) == ("PS002", "claim.epsilon", 4, 16)

    def test_true_is_refused_and_a_flag_takes_no_number(self):
        assert fault(changed("size_is_public: true", "size_is_public: 1")).where == "data.size_is_public"
        assert fault(changed("size_is_public: true", "size_is_public: yes")).where == "data.size_is_public"


class TestNotation:
    def test_duplicate_key_in_yaml(self):
        finding = fault(changed("  epsilon: 8\n", "  epsilon: 8\n  epsilon: 1\n"))
        assert (finding.id, finding.where, finding.line, finding.column) == ("PS002", "claim.epsilon", 4, 3)
        assert "line 3" in finding.message

    def test_duplicate_key_in_json(self):
        finding = fault('{\n "claim": {"epsilon": 8,\n  "epsilon": 1}}', "json")
        assert (finding.id, finding.where, finding.line, finding.column) == ("PS002", "claim.epsilon", 3, 3)

    def test_duplicate_written_differently(self):
        assert fault(changed("  epsilon: 8\n", '  epsilon: 8\n  "epsilon": 1\n')).id == "PS002"
        assert fault('{"a": 1, "\\u0061": 2}', "json").id == "PS002"

    @pytest.mark.parametrize(
        ("old", "new", "says"),
        [
            ("kind: example", "kind: &k example\n    selection: *k", "alias"),
            ("epsilon: 8", "epsilon: !secret 8", "tag !secret"),
            ("epsilon: 8", 'epsilon: !!float "8"', "quoted text tagged as float"),
            ("epsilon: 8", "epsilon: !!binary OA==", "tag"),
            ("claim:\n", "claim: !unit\n", "tag !unit"),
            ("data:\n", "data:\n  <<: {num_units: 1}\n", "key that is not a"),
            ("data:\n", "data:\n  1: 2\n", "key that is not a"),
            ("data:\n", "data:\n  ? [1]\n  : 2\n", "key that is not a"),
            ('schema_version: "1.0"\n', '%YAML 1.1\n---\nschema_version: "1.0"\n', "directive"),
            ("data:\n", "---\ndata:\n", "single document|another document"),
            ("data:\n", "\tdata:\n", "a tab"),
            ("data:\n", "data: [\n", "in place of a comma"),
        ],
    )
    def test_yaml_that_a_reviewer_cannot_read_off_the_page(self, old, new, says):
        finding = fault(changed(old, new))
        assert finding.id == "PS000"
        assert re.search(says, finding.message)
        assert finding.line is not None

    @pytest.mark.parametrize(
        ("text", "line", "column"),
        [
            ('{"a": 1,}', 1, 8),
            ('{"a": 1} x', 1, 10),
            ("{\n'a': 1}", 2, 1),
            ('{"a" 1}', 1, 6),
            ('{"a": 1 "b": 2}', 1, 9),
            ("[1,", 1, 4),
            ("[1 2]", 1, 4),
            ("{", 1, 2),
            ('{"a": 01}', 1, 8),
            ('{"a": "x\n"}', 1, 9),
        ],
    )
    def test_json_syntax(self, text, line, column):
        with pytest.raises(json.JSONDecodeError):
            json.loads(text)
        finding = fault(text, "json")
        assert (finding.id, finding.line, finding.column) == ("PS000", line, column)

    @pytest.mark.parametrize("text", ["[]", "{}", '{"a": [], "b": {}}', ' {"a": [1, {"b": [null, true, "\\n"]}]} '])
    def test_json_walks_like_the_json_module(self, text):
        from tfdp.spec.reading import read

        assert read(text, "json").value == json.loads(text)

    @pytest.mark.parametrize("format", ["yaml", "json"])
    @pytest.mark.parametrize("text", ["[" * 100 + "]" * 100, "[" * 100_000, '{"a":' * 5000])
    def test_depth(self, text, format):
        assert "levels" in fault(text, format).message

    def test_length(self):
        assert "characters" in fault("#" * (1 << 21)).message

    def test_quoted_numbers_stay_text(self):
        assert PrivacySpec.from_text(changed("one text", "'1e-5'")).claim.privacy_unit.description == "1e-5"


class TestUnknownFields:
    @pytest.mark.parametrize(
        ("old", "new", "suggestion"),
        [
            ("epochs: 15", "epoch: 15", "Did you mean epochs?"),
            ("clip_norm: 1.0", "clip_norm: 1.0\n  nois_multiplier: 1", "Did you mean noise_multiplier?"),
            (
                "clip_norm: 1.0",
                "clip_norm: 1.0\n  steps: 1",
                "steps stands under mechanism and belongs in sampling: move it there.",
            ),
            (
                "clip_norm: 1.0",
                "clip_norm: 1.0\n  dleta: 1",
                "Did you mean delta? Which is meant, delta: 1e-05 or delta: 1? Keep that one in claim.",
            ),
            ("clip_norm: 1.0", "clip_norm: 1.0\n  zzz: 1", "Known here: clip_norm, noise_multiplier, rng."),
            (
                "data:",
                "privacy_unit: {}\ndata:",
                "privacy_unit stands at the top level and belongs in claim. It is there already: delete it here.",
            ),
        ],
    )
    def test_nearest_name(self, old, new, suggestion):
        finding = fault(changed(old, new))
        assert finding.id == "PS000"
        assert finding.fix == suggestion

    def test_points_at_the_key(self):
        finding = fault(changed("epochs: 15", "epochs: 15\n  epoch:   3"))
        assert (finding.line, finding.column) == (19, 3)

    def test_in_a_list(self):
        finding = fault(TEXT + "waivers:\n  - {finding: PS023, reason: r, expires: 2031-02-28, ownr: me}\n")
        assert (finding.where, finding.fix) == ("waivers[0].ownr", "Did you mean owner?")


class TestChoices:
    def test_nearest_choice(self):
        finding = fault(changed("kind: example", "kind: exampel"))
        assert "example or sequence or document or user" in finding.message
        assert finding.fix == "Did you mean example?"

    def test_in_a_list(self):
        finding = fault(changed("[training]", "[training, tunning]"))
        assert (finding.where, finding.column) == ("claim.data_accesses[1]", 29)
        assert finding.fix == "Did you mean tuning?"

    @pytest.mark.parametrize(
        ("old", "new", "where"),
        [
            ('"1.0"', '"1.1"', "schema_version"),
            ('"1.0"', "1.0", "schema_version"),
            ("[training]", "[]", "claim.data_accesses"),
            ("[training]", "training", "claim.data_accesses"),
            ("one text", "' '", "claim.privacy_unit.description"),
            (
                "epochs: 15",
                "epochs: 15\nwaivers: [{finding: ps1, reason: r, expires: 2031-02-28}]",
                "waivers[0].finding",
            ),
            (
                "epochs: 15",
                "epochs: 15\nwaivers: [{finding: PS023, reason: r, expires: 2031-02-30}]",
                "waivers[0].expires",
            ),
            ("epochs: 15", "epochs: 15\nwaivers: [{finding: PS023, reason: r, expires: 7}]", "waivers[0].expires"),
            ("epochs: 15", "epochs: 15\nwaivers: {}", "waivers"),
        ],
    )
    def test_refused(self, old, new, where):
        finding = fault(changed(old, new))
        assert (finding.id, finding.where) == ("PS000", where)


class TestSchedule:
    def test_reference_run(self):
        schedule = PrivacySpec.from_text(changed("num_units: 6000", "num_units: 60000")).schedule
        assert schedule.steps == 3515, "15 epochs of 60000/256 = 234.375 steps, rounded down"
        assert schedule.sampling_probability == 256 / 60000
        assert schedule.expected_batch_size == 256.0
        assert (schedule.population, schedule.records_per_unit) == (60000, 1)

    def test_probability_that_is_no_float(self):
        text = changed("expected_batch_size: 256", "probability: 0.1").replace("epochs: 15", "epochs: 3")
        schedule = PrivacySpec.from_text(text).schedule
        assert schedule.steps == 30, "0.1 as a float is above 1/10: a plain floor would lose a step"
        assert schedule.expected_batch_size == pytest.approx(600, rel=1e-12)

    def test_full_batch(self):
        text = changed("  expected_batch_size: 256\n  epochs: 15", "  steps: 7").replace("poisson", "full_batch")
        schedule = PrivacySpec.from_text(text).schedule
        assert (schedule.sampling_probability, schedule.expected_batch_size, schedule.steps) == (1.0, 6000.0, 7)

    def test_group_privacy_samples_records(self):
        text = changed(
            "kind: example", "kind: user\n    id_field: name\n    max_records_per_unit: 5\n    method: group_privacy"
        ).replace("num_units: 6000", "num_units: 6000\n  num_records: 25600")
        schedule = PrivacySpec.from_text(text).schedule
        assert (schedule.population, schedule.records_per_unit) == (25600, 5)
        assert schedule.sampling_probability == 0.01
        user_wise = PrivacySpec.from_text(text.replace("group_privacy", "user_wise_dp_sgd")).schedule
        assert (user_wise.population, user_wise.records_per_unit) == (6000, 1)

    @pytest.mark.parametrize("line", ["  expected_batch_size: 256\n", "  epochs: 15\n"])
    def test_open(self, line):
        with pytest.raises(ValueError, match="expected either"):
            _ = PrivacySpec.from_text(changed(line, "")).schedule


class TestSchema:
    def test_drift(self):
        path = ROOT / "schemas" / "privacy-spec-1.0.json"
        assert path.read_text() == render("privacy-spec"), f"run: tfdp schema privacy-spec --output {path}"

    def test_head(self):
        schema = json_schema()
        assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
        assert schema["$id"].endswith("1.0")
        jsonschema.Draft202012Validator.check_schema(schema)

    def test_every_field_is_described(self):
        schema = json_schema()
        for section in (schema, *schema["$defs"].values()):
            assert section["additionalProperties"] is False
            for name, field in section["properties"].items():
                assert field.get("description") or "$ref" in field, name

    def test_agrees_with_the_reader(self):
        validator = jsonschema.Draft202012Validator(json_schema())
        assert validator.is_valid(PrivacySpec.from_text(TEXT).to_dict())
        for old, new in [("epsilon: 8", "epsilon: 0"), ("  delta: 1e-5\n", ""), ("epochs", "epoch"), ("8", "'8'")]:
            assert not validator.is_valid(YAML(typ="safe").load(TEXT.replace(old, new, 1)))
