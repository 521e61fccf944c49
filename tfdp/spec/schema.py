"""JSON Schema of a privacy spec, for editors and for programs that are not Python.

The fields are the source; this adds what a person wants to see while typing: examples, and what each choice means. A
schema cannot say everything that the reader refuses:

- a key that occurs twice, an alias, a tag, a second document: they are gone before a schema sees the values;
- 6000.0 where a whole number belongs: to a schema it is 6000;
- NaN, which is neither above nor below a bound, and a date that no calendar has;
- text with half of a surrogate pair, or that is a placeholder of a message, such as <name of the data set>.

Nor does it hold the rules of `tfdp.review`: fields that exclude or require each other, and whether the claim is earned.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Literal

from tfdp.spec.choices import CHOICES
from tfdp.spec.privacy_spec import PrivacySpec
from tfdp.spec.samples import EXAMPLES

Draft = Literal["2020-12", "07"]

SCHEMA_ID = "urn:tfdp:schema:privacy-spec:1.0"
_DRAFTS: dict[Draft, str] = {
    "2020-12": "https://json-schema.org/draft/2020-12/schema",
    "07": "http://json-schema.org/draft-07/schema#",
}

_LENGTHS = {"Waiver.finding": 5, "Waiver.expires": 10}  # in some dialects $ matches before a last newline
_DATE = "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"


def json_schema(draft: Draft = "2020-12") -> dict[str, Any]:
    """JSON Schema of a privacy spec.

    Args:
        draft: 2020-12, or 07 for editors that know no later one.
    """
    schema = PrivacySpec.model_json_schema()
    for name, section in {"PrivacySpec": schema, **schema["$defs"]}.items():
        section["description"] = " ".join(section["description"].split())
        for field, value in section["properties"].items():
            if "description" not in value:  # pydantic leaves it to the section that is referred to
                value["description"] = schema["$defs"][value["$ref"].rpartition("/")[2]]["description"]
            _describe(value, f"{name}.{field}")
    schema["title"] = "tfdp privacy spec 1.0"
    schema["$comment"] = "A help while typing. The check is: tfdp validate."
    return with_head(schema, draft, SCHEMA_ID)


def with_head(schema: dict[str, Any], draft: Draft, identifier: str) -> dict[str, Any]:
    """A 2020-12 schema with `$schema` and `$id`, translated when an older draft is asked for."""
    if draft == "2020-12":
        return {"$schema": _DRAFTS[draft], "$id": identifier} | schema
    return {"$schema": _DRAFTS[draft], "$id": f"{identifier}:draft-07"} | _draft_07(schema)


def _describe(value: dict[str, Any], name: str) -> None:
    value["title"] = name.partition(".")[2].replace("_", " ").capitalize()
    value["description"] = " ".join(value["description"].split())
    if name in EXAMPLES:
        value["examples"] = EXAMPLES[name]
    for part in _parts(value):
        choices = part.get("enum", [part["const"]] if "const" in part else [])
        if choices and all(isinstance(choice, str) for choice in choices):
            part["enumDescriptions"] = [CHOICES[name][choice] for choice in choices]
        if part.get("type") == "number" and "exclusiveMaximum" not in part:
            part["maximum"] = sys.float_info.max
        if part.get("format") == "date":
            part["pattern"] = _DATE
        if part.get("type") == "string" and name in _LENGTHS:
            part["maxLength"] = _LENGTHS[name]


def _parts(value: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A value, and whatever it may be or hold instead."""
    yield value
    inside = [*value.get("anyOf", ()), *value.get("oneOf", ())]
    inside += [each for key in ("items", "additionalProperties") if isinstance(each := value.get(key), dict)]
    for each in inside:
        yield from _parts(each)


def _draft_07(value: Any) -> Any:
    """Older words for the same: definitions, items as a list, and nothing beside a $ref."""
    if isinstance(value, list):
        return [_draft_07(item) for item in value]
    if not isinstance(value, dict):
        return value
    found = {_OLD_WORDS.get(key, key): _draft_07(inside) for key, inside in value.items()}
    if isinstance(reference := found.get("$ref"), str):
        reference = reference.replace("#/$defs/", "#/definitions/")
        del found["$ref"]
        return {"allOf": [{"$ref": reference}], **found} if found else {"$ref": reference}
    return found


_OLD_WORDS = {"$defs": "definitions", "prefixItems": "items"}
