"""JSON Schema of a privacy spec, for editors and for programs that are not Python.

The fields are the source; this adds what a person wants to see while typing: examples, and what each choice means. A
schema cannot say everything that the reader refuses:

- a key that occurs twice, an alias, a tag, a second document: they are gone before a schema sees the values;
- 6000.0 where a whole number belongs: to a schema it is 6000;
- NaN, which is neither above nor below a bound, and a date that no calendar has;
- text with half of a surrogate pair.

Nor does it hold the rules of `tfdp.review`: fields that exclude or require each other, and whether the claim is earned.
"""

from __future__ import annotations

import sys
from typing import Any, Literal

from tfdp.spec.privacy_spec import PrivacySpec
from tfdp.spec.samples import EXAMPLES

Draft = Literal["2020-12", "07"]

SCHEMA_ID = "urn:tfdp:schema:privacy-spec:1.0"
_DRAFTS: dict[Draft, str] = {
    "2020-12": "https://json-schema.org/draft/2020-12/schema",
    "07": "http://json-schema.org/draft-07/schema#",
}

# What each choice means; in the order of nothing, they are matched by value.
_CHOICES: dict[str, dict[str, str]] = {
    "PrivacySpec.schema_version": {"1.0": "The only version so far."},
    "PrivacyUnit.kind": {
        "example": "One record of the data.",
        "sequence": "One record of sequence_length tokens.",
        "document": "All records of one document, named by id_field.",
        "user": "All records of one person or account, named by id_field.",
    },
    "PrivacyUnit.method": {
        "native": "A unit is one record.",
        "group_privacy": "Records are sampled; the accounting covers all records of a unit at once.",
        "user_wise_dp_sgd": "Units are sampled, and all records of a unit are clipped together.",
    },
    "PrivacyUnit.selection": {
        "random": "A random choice of records stays.",
        "longest": "The longest records stay.",
        "shortest": "The shortest records stay.",
        "highest_perplexity": "The records that a public model finds hardest stay.",
        "lowest_perplexity": "The records that a public model finds easiest stay.",
        "random_chunk": "A random run of consecutive records stays.",
    },
    "Claim.adjacency": {
        "add_or_remove_one": "One unit is in the data, or is not.",
        "replace_one": "One unit is replaced by any other; costs about twice as much.",
        "zero_out": "One unit contributes nothing; the number of units is public.",
    },
    "Claim.trust_model": {
        "central": "Whoever trains sees the raw data.",
        "local": "Each person adds noise before anything leaves; never passes review here.",
        "distributed": "Noise is added together, without one place that sees raw data; never passes review here.",
    },
    "Claim.release": {
        "all_checkpoints": "Every checkpoint of the training may be published.",
        "final_model": "Only the last model is published.",
        "predictions": "Only what the model answers is published.",
    },
    "Claim.data_accesses": {
        "training": "The noisy updates, which is what epsilon counts.",
        "tuning": "The choice of hyperparameters.",
        "clip_selection": "The choice of the clip norm.",
        "evaluation": "Metrics on private data.",
    },
    "Data.deduplication": {
        "none": "Nothing was removed.",
        "exact": "Identical texts were removed.",
        "near": "Similar texts were removed too.",
    },
    "Mechanism.rng": {
        "csprng": "The operating system's source, which nobody can replay.",
        "prng": "A seeded generator, for tests.",
    },
    "Sampling.scheme": {
        "poisson": "Each unit joins each batch independently.",
        "truncated_poisson": "The same, with an upper limit on the batch.",
        "full_batch": "Every unit is in every batch.",
        "shuffle": "Fixed batches of a shuffled order; never passes review.",
    },
    "Accountant.name": {
        "pld": "Privacy loss distributions, the tightest.",
        "rdp": "Renyi differential privacy, faster and looser.",
        "prv": "Answered by pld, of the same numerical family.",
    },
    "Tuning.kind": {
        "none": "Nothing was tuned.",
        "public": "On public data.",
        "private": "On the private data.",
    },
    "Evaluation.membership_inference": {
        "required": "The card must hold an attack.",
        "not_required": "It may go without.",
    },
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
    for part in (value, *value.get("anyOf", ()), value.get("items", {})):
        choices = part.get("enum", [part["const"]] if "const" in part else [])
        if choices and all(isinstance(choice, str) for choice in choices):
            part["enumDescriptions"] = [_CHOICES[name][choice] for choice in choices]
        if part.get("type") == "number" and "exclusiveMaximum" not in part:
            part["maximum"] = sys.float_info.max
        if part.get("format") == "date":
            part["pattern"] = _DATE
        if part.get("type") == "string" and name in _LENGTHS:
            part["maxLength"] = _LENGTHS[name]


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
