"""What pydantic and the reader find wrong, as findings in the project's own words."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from tfdp.findings import Finding, Severity, printable
from tfdp.spec.fields import MAX_COUNT
from tfdp.spec.reading import Path, Position, ReadingError

_MOST = 100  # faults that are told of one document
_LONGEST = 200  # characters of a path or of a number: both can be as long as the file

# Without these there is no claim at all.
_CLAIM_FIELDS: tuple[Path, ...] = (
    ("claim",),
    ("claim", "epsilon"),
    ("claim", "delta"),
    ("claim", "privacy_unit"),
    ("claim", "privacy_unit", "kind"),
    ("claim", "adjacency"),
)
_CLAIM_FIX = (
    "Add it: epsilon, delta, privacy_unit and adjacency are one claim, and each without the others promises nothing."
)
_NUMBER = re.compile(
    r"\s*[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?\s*|\s*[-+]?\.?(inf|nan|infinity)\s*", re.IGNORECASE
)
_KINDS = {
    "float_type": "a number",
    "int_type": "a whole number",
    "bool_type": "true or false",
    "string_type": "a text",
    "tuple_type": "a list",
    "model_type": "a mapping of fields",
    "dict_type": "a mapping of fields",
    "date_type": "a date such as 2026-12-31",
}


def dotted(path: Path) -> str:
    """("waivers", 0, "owner") as "waivers[0].owner"; the empty path as "spec"."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return printable(text.removeprefix("."))[:_LONGEST] or "spec"


def place(positions: Mapping[Path, Position], path: Path, *, key: bool = False) -> tuple[int | None, int | None]:
    """Line and column of a value (or its key); of the nearest enclosing key where the path is not in the file."""
    found = path
    while found and found not in positions:
        found = found[:-1]
    position = positions.get(found)
    if position is None:
        return None, None
    if key or found != path:
        return position.key_line, position.key_column
    return position.line, position.column


def reading_finding(error: ReadingError, file: str | None) -> Finding:
    """The finding for a fault of the notation."""
    return Finding(
        id=error.id,
        severity=Severity.ERROR,
        where=dotted(error.path),
        message=error.message,
        fix=error.fix,
        file=file,
        line=error.line,
        column=error.column,
    )


def field_findings(
    details: list[ErrorDetails], model: type[BaseModel], file: str | None, positions: Mapping[Path, Position]
) -> list[Finding]:
    """One finding per pydantic error, in the order of the file."""
    findings = []
    for detail in details[:_MOST]:
        path = tuple(detail["loc"])
        id, message, fix = _explain(detail, path, model)
        line, column = place(positions, path, key=detail["type"] == "extra_forbidden")
        where = dotted(path)
        findings.append(
            Finding(
                id=id,
                severity=Severity.ERROR,
                where=where,
                message=message,
                fix=fix,
                file=file,
                line=line,
                column=column,
            )
        )
    return sorted(findings, key=lambda finding: (finding.line or 0, finding.column or 0))


def _explain(detail: ErrorDetails, path: Path, model: type[BaseModel]) -> tuple[str, str, str]:
    """Id, message and fix of one pydantic error."""
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    received = f"received {_shown(value)}."
    if path in _CLAIM_FIELDS and (kind == "missing" or value is None):
        what = "nothing" if kind == "missing" else "null"
        return "PS001", f"expected {path[-1]}, received {what}.", _CLAIM_FIX
    if kind == "missing":
        return "PS000", "expected this field, received nothing.", _help(model, path).replace("Correct it; ", "Add ", 1)
    if kind == "extra_forbidden":
        return "PS000", f"expected a known field, received {_shown(str(path[-1]))}.", _suggestion(model, path)
    if kind == "finite_number" or (isinstance(value, float) and not math.isfinite(value)):
        return "PS002", f"expected a finite number, {received}", "Write a finite number."
    if kind in ("float_type", "int_type"):
        expected = f"expected {_KINDS[kind]}, {received}"
        if isinstance(value, bool):
            return "PS002", expected, "Write the number: true and false are not 1 and 0 here."
        if isinstance(value, str) and len(value) <= _LONGEST and _NUMBER.fullmatch(value):
            return "PS002", expected, f"Write {value.strip()} without quotes."
        if isinstance(value, int):
            return (
                "PS000",
                f"expected a number, received one of {value.bit_length()} bits.",
                "Write a number in the usual range.",
            )
        return "PS000", expected, _repaired(kind, value) or _help(model, path)
    return "PS000", *_explain_value(kind, value, context, path, model)


def _explain_value(
    kind: str, value: Any, context: Mapping[str, Any], path: Path, model: type[BaseModel]
) -> tuple[str, str]:
    received = f"received {_shown(value)}."
    match kind:
        case "literal_error":
            choices = _choices(model, path)
            if not isinstance(value, str) and str(value) in choices:
                return f'expected the text "{value}", received the number {value}.', f'Write it in quotes: "{value}".'
            close = difflib.get_close_matches(str(value)[:_LONGEST], choices, 1)
            fix = (
                f"Did you mean {close[0]}?" if close else f"Write {'one of them' if len(choices) > 1 else choices[0]}."
            )
            return f"expected {' or '.join(choices)}, {received}", fix
        case "greater_than":
            return f"expected a number above {context['gt']:g}, {received}", _help(model, path)
        case "less_than":
            return f"expected a number below {context['lt']:g}, {received}", _help(model, path)
        case "greater_than_equal":
            return f"expected a whole number of at least {context['ge']}, {received}", _help(model, path)
        case "less_than_equal":
            return f"expected a whole number of at most {MAX_COUNT}, {received}", "Write a number in the usual range."
        case "too_short":
            return f"expected at least {context['min_length']} entry, received an empty list.", _help(model, path)
        case "string_pattern_mismatch":
            expected = "an id such as PS008" if path[-1] == "finding" else "a text that is not blank"
            return f"expected {expected}, {received}", _help(model, path)
        case _ if kind.startswith("date"):
            return f"expected a date such as 2026-12-31, {received}", _help(model, path)
        case _ if kind in _KINDS:
            return f"expected {_KINDS[kind]}, {received}", _repaired(kind, value) or _help(model, path)
    return f"expected a valid value, {received}", _help(model, path)


def _repaired(kind: str, value: Any) -> str | None:
    """How to write what was evidently meant, where that is evident."""
    if not isinstance(value, str) or len(value) > _LONGEST:
        return None
    word = value.strip().lower()
    if kind == "bool_type" and word in ("yes", "on", "no", "off", "true", "false"):
        return f"Write {'true' if word in ('yes', 'on', 'true') else 'false'}, without quotes."
    if kind == "tuple_type" and value.strip():
        return f"Write it as a list: [{value.strip()}]."
    if kind in ("int_type", "float_type") and re.fullmatch(r"\d{1,3}([ ,'_]\d{3})+", value.strip()):
        digits = re.sub(r"\D", "", value)
        return f"Write {digits}: digits without separators."
    return None


def _shown(value: Any) -> str:
    """A value as it would be written in the spec, shortened."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case dict():
            return "a mapping"
        case list() | tuple():
            return "a list"
        case int() if value.bit_length() > 200:
            return f"a number of {value.bit_length()} bits"
    text = repr(value[:_LONGEST] if isinstance(value, str) else value)
    return text if len(text) <= 80 else f"{text[:76]}...{text[-1]}"


def _suggestion(model: type[BaseModel], path: Path) -> str:
    """The nearest known name beside an unknown one, or the place where the same name is known."""
    name = str(path[-1])[:_LONGEST]
    siblings = _section(model, path[:-1])
    names = list(siblings.model_fields) if siblings else []
    if close := difflib.get_close_matches(name, names, 1, cutoff=0.6):
        return f"Did you mean {close[0]}?"
    if homes := [dotted(home) for home in _all_fields(model) if home[-1] == name]:
        return f"Did you mean {' or '.join(homes)}?"
    everywhere = {str(home[-1]): home for home in _all_fields(model)}
    if close := difflib.get_close_matches(name, list(everywhere), 1, cutoff=0.75):
        return f"Did you mean {dotted(everywhere[close[0]])}?"
    return f"Known here: {', '.join(names)}." if names else "Delete it."


def _help(model: type[BaseModel], path: Path) -> str:
    """What the field is for, as a remedy."""
    if not path:
        return f"Start with these fields: {', '.join(model.model_fields)}."
    while isinstance(path[-1], int):
        path = path[:-1]
    section = _section(model, path[:-1])
    field = section.model_fields.get(str(path[-1])) if section else None
    if field is None or field.description is None:
        return "Correct it."
    return f"Correct it; {path[-1]}: {' '.join(field.description.split())}"


def _choices(model: type[BaseModel], path: Path) -> list[str]:
    """The values of the Literal at a path."""
    while path and isinstance(path[-1], int):
        path = path[:-1]
    section = _section(model, path[:-1])
    field = section.model_fields.get(str(path[-1])) if section else None
    return [str(choice) for choice in _literals(field.annotation)] if field else []


def _literals(annotation: Any) -> Iterator[Any]:
    for argument in get_args(annotation):
        if isinstance(argument, str):
            yield argument
        else:
            yield from _literals(argument)


def _section(model: type[BaseModel], path: Path) -> type[BaseModel] | None:
    """The model class at a path, or None where there is none."""
    for part in path:
        if isinstance(part, int):
            continue
        field = model.model_fields.get(part)
        inside = next(_models(field.annotation), None) if field else None
        if inside is None:
            return None
        model = inside
    return model


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models(argument)


def _all_fields(model: type[BaseModel], above: Path = ()) -> Iterator[Path]:
    for name, field in model.model_fields.items():
        yield (*above, name)
        for inside in _models(field.annotation):
            yield from _all_fields(inside, (*above, name))
