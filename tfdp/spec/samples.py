"""Values that may stand in a field: for the schema, and for a message that says what a missing line looks like."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel

from tfdp.spec.documents import Document, Format, Path
from tfdp.spec.naming import choices_at, section

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
    "Mechanism.clip_norm": [1.0],
    "Mechanism.noise_multiplier": [None, 1.1],
    "Sampling.expected_batch_size": [256],
    "Sampling.probability": [0.01],
    "Sampling.steps": [1000],
    "Sampling.epochs": [10],
    "Sampling.truncated_batch_size": [320],
    "Sampling.microbatch_size": [32],
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
# Optional fields without which the rules would refuse the section.
_WITH = {"Sampling": ("expected_batch_size", "epochs"), "Mechanism": ("noise_multiplier",), "Waiver": ("owner",)}
_FIELDS = {"Sampling": "scheme, expected_batch_size or probability, and steps or epochs"}


def sample(model: type[BaseModel], path: Path, format: Format = "yaml", given: Any = None) -> str | None:
    """The field as a line that can be copied, a whole section between braces; None where nothing can be said.

    Args:
        given: a value that stands where the section should be; goes into the field of which it is a choice.
    """
    value = _value(model, path)
    if isinstance(value, dict) and isinstance(given, str):
        value |= {key: given for key in value if given in choices_at(model, (*path, key))}
    return None if value is ... else line(str(path[-1]), value, format)


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


def _wanted(inside: type[BaseModel]) -> list[str]:
    also = _WITH.get(inside.__name__, ())
    wanted = [key for key, part in inside.model_fields.items() if part.is_required() or key in also]
    return wanted or list(inside.model_fields)


def _value(model: type[BaseModel], path: Path) -> Any:
    owner = section(model, path[:-1])
    field = owner.model_fields.get(str(path[-1])) if owner and isinstance(path[-1], str) else None
    if owner is None or field is None:
        return ...
    name = f"{owner.__name__}.{path[-1]}"
    if name in EXAMPLES:
        return EXAMPLES[name][0]
    if choices := choices_at(model, path):
        return choices[0]
    inside = section(model, path)
    if inside is None:
        return ...
    values = {key: _value(model, (*path, key)) for key in _wanted(inside)}
    return [values] if path[-1] == "waivers" else values


def _flow(value: Any) -> str:
    """YAML on one line. Numbers as JSON writes them; a text in quotes where YAML could read something else."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_flow(inside)}" for key, inside in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_flow, value)) + "]"
    return value if isinstance(value, str) and value.isidentifier() else json.dumps(value)
