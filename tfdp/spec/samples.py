"""Values that may stand in a field: for the schema, and for a message that says what a missing line looks like."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel, ValidationError

from tfdp.spec.choices import meant_choice
from tfdp.spec.documents import Document, Format, Path, held
from tfdp.spec.naming import choices_at, plain, section

# Section and field -> values that may stand there.
EXAMPLES: dict[str, list[Any]] = {
    "PrivacyUnit.description": ["all e-mails sent from one address", "one answer of one respondent"],
    "PrivacyUnit.id_field": ["user_id"],
    "PrivacyUnit.max_records_per_unit": [8],
    "PrivacyUnit.max_tokens_per_unit": [2048],
    "PrivacyUnit.sequence_length": [128],
    "Claim.epsilon": [2, 8],
    "Claim.delta": [1e-6],
    "Claim.data_accesses": [["training"]],
    "Data.num_units": [60000],
    "Data.num_records": [240173],
    "Data.size_is_public": [True],
    "Mechanism.clip_norm": [1.0, {"per_layer": 1.0}, {"quantile": 0.5, "initial": 1.0}],
    "Clipping.per_layer": [1.0, {"*embedding*": 0.5, "*": 1.0}],
    "Clipping.quantile": [0.5],
    "Clipping.initial": [1.0],
    "Clipping.learning_rate": [0.2],
    "Clipping.count_noise": [None, 5.0],
    "Mechanism.noise_multiplier": [None, 1.1],
    "Sampling.expected_batch_size": [256],
    "Sampling.probability": [0.01],
    "Sampling.steps": [1000],
    "Sampling.epochs": [10],
    "Sampling.truncated_batch_size": [320],
    "Sampling.microbatch_size": [32, "auto"],
    "Tuning.trials": [20],
    "Tuning.accounted": [False],
    "Evaluation.group_field": ["language"],
    "Evaluation.metrics": [["perplexity"]],
    "Evaluation.min_group_size": [50],
    "Budget.dataset_id": ["mail-archive"],
    "Budget.ledger": ["budgets/mail-archive.jsonl"],
    "Budget.epsilon_cap": [12],
    "Budget.delta_cap": [1e-5],
    "Waiver.finding": ["PS050"],
    "Waiver.reason": ["The data hold no attribute to group by."],
    "Waiver.owner": ["privacy-team@example.org"],
    "Waiver.expires": ["2027-12-31"],
}
# What only the author knows. An invented value would be copied and believed; {unit} is the kind of the privacy unit.
_FACTS: dict[str, str] = {
    "PrivacyUnit.description": "<one {unit} in your words>",
    "PrivacyUnit.id_field": "<field of a record that names its {unit}>",
    "PrivacyUnit.max_records_per_unit": "<most records of one {unit}>",
    "PrivacyUnit.sequence_length": "<tokens of a sequence>",
    "Data.num_units": "<number of {unit}s>",
    "Data.num_records": "<number of records>",
    "Evaluation.group_field": "<field of a record that names its group>",
    "Budget.dataset_id": "<name of the data set>",
    "Budget.ledger": "<file of the ledger>",
    "Waiver.finding": "<id of the finding>",
    "Waiver.reason": "<why it is acceptable here>",
    "Waiver.owner": "<who answers for it>",
    "Waiver.expires": "<YYYY-MM-DD>",
}
# Optional fields without which the rules would refuse the section.
_WITH = {"Sampling": ("expected_batch_size", "epochs"), "Mechanism": ("noise_multiplier",), "Waiver": ("owner",)}
# The fields of a section in words, where some may be left out.
_FIELDS = {
    "Sampling": "scheme, expected_batch_size or probability, and steps or epochs",
    "Mechanism": "clip_norm, and optionally noise_multiplier",
}
# Of two fields the one that gives way where the author has written the other.
_INSTEAD = {"expected_batch_size": "probability", "epochs": "steps"}


def sample(model: type[BaseModel], path: Path, document: Document, given: Any = None) -> str | None:
    """The field as a line that can be copied, a whole section between braces; None where nothing can be said.

    What the author has written of it elsewhere in the file stands in it, and a placeholder for what only he knows.

    Args:
        given: a value that stands where the section should be; goes into the field of which it is a choice.
    """
    value = _value(model, path, document)
    if isinstance(value, dict) and isinstance(given, str):
        value |= {key: given for key in value if given in choices_at(model, (*path, key))}
    return None if value is ... else line(str(path[-1]), value, document.format)


def line(name: str, value: Any, format: Format = "yaml") -> str:
    """A field as it is written."""
    return f"{json.dumps(name)}: {json.dumps(value)}" if format == "json" else f"{name}: {_flow(value)}"


def such_as(document: Document, section: Path, text: str) -> str:
    """A line that can be copied into a section, and how far to the right it belongs there."""
    spaces = document.indentation(section)
    return f"Such as{f', after {spaces} spaces' if spaces else ''}: {text}"


def fields_of(inside: type[BaseModel]) -> str:
    """The fields that a section needs, in words."""
    wanted = _wanted(inside)
    return _FIELDS.get(inside.__name__) or " and ".join([", ".join(wanted[:-1])] * (len(wanted) > 1) + wanted[-1:])


def choices_of(inside: type[BaseModel]) -> str:
    """What may stand in those fields of a section that take one of several words."""
    told = []
    for key in _wanted(inside):
        within = section(inside, (key,))
        choices = choices_at(inside, (key,))
        if within is not None:
            told += [choices_of(within)]
        elif len(choices) > 1:
            told.append(f"{key}: {', '.join(choices[:-1])} or {choices[-1]}")
    return "; ".join(filter(None, told))


def _wanted(inside: type[BaseModel]) -> list[str]:
    also = _WITH.get(inside.__name__, ())
    wanted = [key for key, part in inside.model_fields.items() if part.is_required() or key in also]
    return wanted or list(inside.model_fields)


def _value(model: type[BaseModel], path: Path, document: Document) -> Any:
    owner = section(model, path[:-1])
    field = owner.model_fields.get(str(path[-1])) if owner and isinstance(path[-1], str) else None
    if owner is None or field is None:
        return ...
    name = f"{owner.__name__}.{path[-1]}"
    own = [value for value in document.elsewhere.get(path, ()) if _fits(owner, str(path[-1]), value)]
    if own:
        return own[0] if len(own) == 1 else f"<{' or '.join(map(_flow, own))}>"
    if name in _FACTS:
        return _FACTS[name].format(unit=_kind(path, document))
    if name in EXAMPLES:
        return EXAMPLES[name][0]
    if name == "PrivacyUnit.kind" and (kind := _kind_of_field(path, document)):
        return kind
    if choices := choices_at(model, path):
        return choices[0]
    inside = section(model, path)
    if inside is None:
        return ...
    written = {each[-1] for each in document.elsewhere if each[:-1] == path}
    keys = [_INSTEAD[key] if _INSTEAD.get(key) in written and key not in written else key for key in _wanted(inside)]
    keys += [key for key in inside.model_fields if key in written and key not in (*keys, *_INSTEAD.values())]
    values = {key: _value(model, (*path, key), document) for key in keys}
    return [values] if path[-1] == "waivers" else values


def _fits(owner: type[BaseModel], name: str, value: Any) -> bool:
    """Whether a field takes a value at all."""
    try:
        owner.model_validate({name: value})
    except ValidationError as error:
        return all(detail["loc"][:1] != (name,) for detail in error.errors(include_url=False))
    return True


def _kind(path: Path, document: Document) -> str:
    """The kind of the privacy unit, where it stands in the file; else a word for all of them."""
    at = ("claim", "privacy_unit", "kind")
    for kind in (held(document.value, at), *document.elsewhere.get(at, ())):
        if kind in ("example", "sequence", "document", "user"):
            return str(kind)
    return "unit"


def _kind_of_field(path: Path, document: Document) -> str | None:
    """The kind that a unit of several records has: its name is that of a person, or it is a document."""
    field = held(document.value, (*path[:-1], "id_field"))
    if field is None and (held(document.value, (*path[:-1], "max_records_per_unit")) or 1) == 1:
        return None
    words = plain(str(field)).split("_")
    people = any("user" in (word, meant_choice("PrivacyUnit.kind", word)) for word in words)
    return "user" if people else "document"


def _flow(value: Any) -> str:
    """YAML on one line. Numbers as JSON writes them; a text in quotes where YAML could read something else."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_flow(inside)}" for key, inside in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_flow, value)) + "]"
    plain_text = isinstance(value, str) and (value.isidentifier() or value.startswith("<"))
    return str(value) if plain_text else json.dumps(value)
