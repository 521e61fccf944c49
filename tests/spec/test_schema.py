"""The JSON Schemas agree with the reader, as far as a schema can say it."""

from __future__ import annotations

import copy
import json
import math
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdp.cli.schema import render
from tfdp.errors import SpecError
from tfdp.spec import PrivacySpec, json_schema
from tfdp.spec.reading import read

ROOT = pathlib.Path(__file__).resolve().parents[2]
FILES = {
    "2020-12": ROOT / "schemas" / "privacy-spec-1.0.json",
    "07": ROOT / "schemas" / "privacy-spec-1.0.draft-07.json",
}
SPECS = sorted((ROOT / "examples" / "specs").glob("*.yaml"))
VALIDATORS = {
    "2020-12": jsonschema.Draft202012Validator(json_schema()),
    "07": jsonschema.Draft7Validator(json_schema("07")),
}

FULL: dict[str, Any] = {
    "schema_version": "1.0",
    "claim": {
        "epsilon": 4.5,
        "delta": 1e-6,
        "privacy_unit": {
            "kind": "user",
            "description": "all texts of one person",
            "id_field": "person",
            "max_records_per_unit": 3,
            "max_tokens_per_unit": 500,
            "sequence_length": 64,
            "method": "user_wise_dp_sgd",
            "selection": "random",
        },
        "adjacency": "add_or_remove_one",
        "trust_model": "central",
        "release": "final_model",
        "data_accesses": ["training", "tuning"],
    },
    "data": {"num_units": 1000, "num_records": 2500, "size_is_public": True, "deduplication": "exact"},
    "mechanism": {
        "clip_norm": {
            "per_layer": {"*embedding*": 0.5, "*": 1.5},
            "quantile": 0.5,
            "initial": 1.5,
            "learning_rate": 0.25,
            "count_noise": 2.5,
        },
        "noise_multiplier": 1.5,
        "rng": "csprng",
    },
    "sampling": {
        "scheme": "truncated_poisson",
        "expected_batch_size": 50.5,
        "probability": 0.05,
        "steps": 20,
        "epochs": 2.5,
        "truncated_batch_size": 90,
        "microbatch_size": 8,
    },
    "accountant": {"name": "pld"},
    "tuning": {"kind": "private", "trials": 3, "accounted": True},
    "evaluation": {
        "group_field": "g",
        "metrics": ["perplexity"],
        "min_group_size": 20,
        "membership_inference": "required",
    },
    "budget": {"dataset_id": "d", "ledger": "l.jsonl", "epsilon_cap": 8.5, "delta_cap": 1e-5},
    "waivers": [{"finding": "PS050", "reason": "r", "owner": "o", "expires": "2030-01-31"}],
}
# What stands where something else should: other types, edges of ranges, near misses, other fields' values.
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 2**53, 2**53 + 1, 10**20, 10**400, 0.0, -0.0, 0.5, 1.5, 1e-320, 1e308, -2.5,
    math.inf, -math.inf, "", " ", "\n", "\x1c", "\u0085", "\ufeff", "\u00a0x", "x", "1.0", "4.5", "true", "null",
    "training", "example", "poisson", "private", "PS050", "PS050\n", "PS5", "ps050", "2030-01-31", "2030-01-31\n",
    "2030-1-31", "2030-01-31T00:00:00", "86400", "20300131", [], ["training"], ["x"], [1], [None], [[]], {}, {"x": 1},
    "auto", ["training", "training"], [{}], {"kind": "none"}, {"name": "rdp"}, {"dataset_id": "d"},
    {"per_layer": 1}, {"per_layer": {}}, {"per_layer": {"a": 2.5}}, {"per_layer": {"a": -1}}, {"a": 2.5, " ": 1},
]  # fmt: skip


def paths(values: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place of the document, sections included."""
    if above:
        yield above
    pairs = enumerate(values) if isinstance(values, list) else values.items() if isinstance(values, dict) else ()
    for key, inside in pairs:
        yield from paths(inside, (*above, key))


PATHS = list(paths(FULL))


def changed(values: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy with one place replaced; `...` removes it, and what is not there any more stays as it is."""
    found = copy.deepcopy(values)
    place = found
    for key in path[:-1]:
        try:
            place = place[key]
        except (KeyError, IndexError, TypeError):
            return found
    if not isinstance(place, dict) or value is not ...:
        try:
            place[path[-1]] = value
        except (IndexError, TypeError):
            return found
    else:
        place.pop(path[-1], None)
    return found


def is_read(values: Any) -> bool:
    try:
        PrivacySpec.from_dict(values)
    except SpecError:
        return False
    return True


def disagreement(values: Any) -> str | None:
    read_by_pydantic = is_read(values)
    for draft, validator in VALIDATORS.items():
        if validator.is_valid(values) != read_by_pydantic:
            return f"pydantic {'accepts' if read_by_pydantic else 'refuses'}, draft {draft} does not: {values}"
    return None


WHOLE_NUMBERS = {
    "max_records_per_unit", "max_tokens_per_unit", "sequence_length", "num_units", "num_records", "steps",
    "truncated_batch_size", "microbatch_size", "trials", "min_group_size",
}  # fmt: skip


def expressible(path: tuple[Any, ...], value: Any) -> bool:
    """Not one of the few things that a schema cannot say: a float without a fraction where a whole number belongs."""
    whole = isinstance(value, float) and math.isfinite(value) and value.is_integer()
    return not (whole and path[-1] in WHOLE_NUMBERS)


def test_the_full_document_is_valid():
    assert is_read(FULL)
    assert disagreement(FULL) is None
    assert disagreement(PrivacySpec.from_dict(FULL).to_dict()) is None


def test_every_place_with_every_value():
    """One change at a time: about 3000 documents."""
    wrong = [
        found
        for path in PATHS
        for value in [*VALUES, ...]
        if expressible(path, value) and (found := disagreement(changed(FULL, path, value)))
    ]
    assert wrong == []


def test_the_corpus_holds_valid_and_invalid_documents():
    seen = [is_read(changed(FULL, path, value)) for path in PATHS for value in (*VALUES[:12], ...)]
    assert 0.05 < sum(seen) / len(seen) < 0.6


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(codec="utf-8")),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=5), inside, max_size=3),
    max_leaves=5,
)
changes = st.lists(
    st.tuples(st.sampled_from(PATHS), json_values | st.sampled_from([*VALUES, ...])), min_size=1, max_size=4
)


@settings(derandomize=True, max_examples=300, deadline=None)
@given(changes=changes, name=st.sampled_from(["epsilon", "kind", "delta", "x"]), extra=st.booleans())
def test_several_changes(changes, name, extra):
    values: Any = FULL
    for path, value in changes:
        if expressible(path, value):
            values = changed(values, path, value)
    if extra:
        values = changed(values, (*changes[0][0][:-1], name), 1)
    found = disagreement(values)
    assert found is None, found


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("data", "num_units"), 1000.0),
        (("claim", "epsilon"), math.nan),
        (("waivers", 0, "expires"), "2030-02-30"),
        (("claim", "privacy_unit", "description"), "\ud800"),
    ],
)
def test_what_a_schema_cannot_say_is_refused_by_the_reader(path, value):
    """The list in the docstring of tfdp/spec/schema.py; were one of them valid for both, the list would be wrong."""
    values = changed(FULL, path, value)
    assert not is_read(values)
    assert VALIDATORS["2020-12"].is_valid(values)
    assert VALIDATORS["07"].is_valid(values)


@pytest.mark.parametrize("draft", FILES)
def test_drift(draft):
    path = FILES[draft]
    assert path.read_text() == render("privacy-spec", draft), f"run: tfdp schema --draft {draft} --output {path}"


@pytest.mark.parametrize("name", ["privacy-spec", "model-card"])
def test_both_drafts_are_schemas(name):
    new, old = json.loads(render(name)), json.loads(render(name, "07"))
    jsonschema.Draft202012Validator.check_schema(new)
    jsonschema.Draft7Validator.check_schema(old)
    assert new["$id"] == f"urn:tfdp:schema:{name}:1.0"
    assert old["$id"] == f"urn:tfdp:schema:{name}:1.0:draft-07"
    assert not [word for word in ('"$defs"', '"prefixItems"', "#/$defs/") if word in json.dumps(old)]


def sections(schema: dict[str, Any], definitions: str) -> list[dict[str, Any]]:
    return [schema, *schema[definitions].values()]


@pytest.mark.parametrize(("draft", "definitions"), [("2020-12", "$defs"), ("07", "definitions")])
def test_everything_is_explained(draft, definitions):
    schema = json_schema(draft)
    for section in sections(schema, definitions):
        assert section["title"]
        assert section["description"]
        for name, field in section["properties"].items():
            assert field["title"], name
            assert field["description"].endswith("."), name
            parts = [field, *field.get("anyOf", ()), field.get("items", {})]
            choices = [part for part in parts if "enum" in part or "const" in part]
            for part in choices:
                assert len(part["enumDescriptions"]) == len(part.get("enum", [0]))
            nested = any("$ref" in part or "allOf" in part for part in parts)
            assert choices or nested or field["examples"], name


def test_examples_are_valid_where_they_stand():
    """Each example put into its field: a remedy that is copied must not be the next mistake."""
    count = 0
    for name, section in json_schema()["$defs"].items():
        for field, value in section["properties"].items():
            for example in value.get("examples", ()):
                part = {"$defs": json_schema()["$defs"], **value}
                jsonschema.Draft202012Validator(part).validate(example)
                count += 1
                (path,) = [path for path in PATHS if path[-1] == field and _section(path) == name]
                assert is_read(changed(FULL, path, example)), (name, field)
    assert count > 25


def _section(path: tuple[Any, ...]) -> str:
    owner = [part for part in path[:-1] if isinstance(part, str)][-1]
    return {"waivers": "Waiver", "clip_norm": "Clipping"}.get(
        owner, "".join(word.capitalize() for word in owner.split("_"))
    )


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_example_specs(path):
    values = read(path.read_text(encoding="utf-8"), "yaml").value
    for validator in VALIDATORS.values():
        validator.validate(values)


@pytest.mark.parametrize("draft", FILES)
def test_example_specs_with_check_jsonschema(draft, tmp_path):
    """Another reader of YAML, and another dialect of regular expressions."""
    pytest.importorskip("check_jsonschema")
    command = [sys.executable, "-m", "check_jsonschema", "--schemafile", str(FILES[draft])]
    done = subprocess.run([*command, *map(str, SPECS)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(SPECS[0].read_text().replace("adjacency: ", "adjacency: x"))
    done = subprocess.run([*command, str(wrong)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "adjacency" in done.stdout
