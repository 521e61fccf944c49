"""What pydantic and the reader find wrong, as findings in the project's own words."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from tfdp.findings import Finding, Severity
from tfdp.spec.choices import explained, meant_choice
from tfdp.spec.documents import Document, Path, Position, ReadingError, dotted, finite_number
from tfdp.spec.fields import KINDS, MAX_COUNT, NUMBER_IN_WORDS, WORD
from tfdp.spec.hints import SPACE, without_space
from tfdp.spec.naming import choices_at, closest, plain, section
from tfdp.spec.notation import foreign_space, plain_space, shown_value
from tfdp.spec.numbers import with_article
from tfdp.spec.repairs import date_fix, id_fix, repaired
from tfdp.spec.samples import EXAMPLES, choices_of, fields_of, sample, such_as
from tfdp.spec.unknown import elsewhere, known, remedy, targets

_MOST = 100  # faults of one document that get a remedy of their own: looking for what was meant takes long
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
_CLAIM_WHY = "Epsilon, delta, unit and adjacency are one claim, and each without the others promises nothing."
# Fields that take a number or something else.
_EITHER = frozenset(("clip_norm", "per_layer", "microbatch_size"))
_OWN = "Write your own in its place, without the brackets."
_PLACEHOLDER = re.compile(r"<[^<>]+>")
_NO_NUMBER = re.compile(r"\s*[-+]?\.?(inf|nan|infinity)\s*", re.IGNORECASE)
# Faults of fields that take no free text.
_NO_TEXT = frozenset(
    ("float_type", "int_type", "bool_type", "tuple_type", "model_type", "literal_error", "date_type", "date_parsing")
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
    details: list[ErrorDetails], model: type[BaseModel], file: str | None, document: Document
) -> list[Finding]:
    """One finding per fault, in the order of the file: a field that is misspelt is not missing as well."""
    positions = document.positions
    places = [_path(detail) for detail in details]
    unknown = {
        path: targets(model, path, document) if number < _MOST else []
        for number, (detail, path) in enumerate(zip(details, places, strict=True))
        if detail["type"] == "extra_forbidden" and path
    }
    explained = {meanings[0] for meanings in unknown.values() if len(meanings) == 1}
    document = replace(document, elsewhere=elsewhere(unknown.items(), document))
    around = {path[:length] for path in places for length in range(len(path))}
    findings = []
    for number, (detail, path) in enumerate(zip(details, places, strict=True)):
        if detail["type"] == "missing" and path in explained:
            continue
        if detail["type"] == "too_short" and path in around:
            continue  # the list is not empty: its entries are wrong
        if path in unknown:
            id, message = "PS000", f"expected a known field, received {shown_value(str(path[-1]))}."
            fix = remedy(model, path, unknown[path], document) if number < _MOST else known(model, path)
        elif number < _MOST:
            id, message, fix = _explain(detail, path, model, document)
        else:
            received = "nothing" if detail["type"] == "missing" else shown_value(detail["input"])
            id, message = "PS000", f"expected a valid value, received {received}."
            fix = f"Mend the first {_MOST} faults of the file, then have it checked again."
        line, column = place(positions, path, key=path in unknown)
        where = dotted(path)
        findings.append(
            Finding(
                id=id,
                severity=Severity.ERROR,
                where=where,
                message=document.named(message),
                fix=fix,
                file=file,
                line=line,
                column=column,
            )
        )
    return sorted(findings, key=lambda finding: (finding.line or 0, finding.column or 0))


def placeholders(values: Any, file: str | None, document: Document) -> Iterator[Finding]:
    """A finding for each text that is a placeholder of a message, copied as it stands."""
    for path, value in _texts(values):
        if _PLACEHOLDER.fullmatch(value):
            line, column = place(document.positions, path)
            message = f"expected a value of your own, received the placeholder {shown_value(value)}."
            yield Finding(
                id="PS000",
                severity=Severity.ERROR,
                where=dotted(path),
                message=document.named(message),
                fix=_OWN,
                file=file,
                line=line,
                column=column,
            )


def _texts(value: Any, path: Path = ()) -> Iterator[tuple[Path, str]]:
    """Every text within plain values, and where it stands."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, inside in value.items():
            yield from _texts(inside, (*path, key))
    elif isinstance(value, list | tuple):
        for index, inside in enumerate(value):
            yield from _texts(inside, (*path, index))


def _path(detail: ErrorDetails) -> Path:
    """Where a fault is, without the kinds that pydantic names on the way."""
    loc = detail["loc"]
    kinds = [bool(at) and loc[at - 1] in _EITHER and part in KINDS for at, part in enumerate(loc)]
    return tuple(part for part, kind in zip(loc, kinds, strict=True) if not kind)


def _explain(detail: ErrorDetails, path: Path, model: type[BaseModel], document: Document) -> tuple[str, str, str]:
    """Id, message and fix of one pydantic error."""
    kind, value = detail["type"], detail["input"]
    position = document.positions.get(path)
    in_section = bool(path) and isinstance(path[-1], str)
    empty = value is None and in_section and position is not None and position.is_empty
    received = f"received {'nothing' if empty else shown_value(value)}."
    if isinstance(value, str) and kind in _NO_TEXT and (found := foreign_space(value[:_LONGEST])) is not None:
        return "PS000", f"expected a value without {with_article(found[1])}, {received}", plain_space(value, *found)
    if isinstance(value, str) and _PLACEHOLDER.fullmatch(value[:_LONGEST]):
        return "PS000", f"expected a value of your own, received the placeholder {shown_value(value)}.", _OWN
    if kind == "missing" or empty or (path in _CLAIM_FIELDS and value is None):
        what = "null" if kind != "missing" and not empty else "nothing"
        fix = _absent(model, path, document)
        if path in _CLAIM_FIELDS:
            return "PS001", f"expected {path[-1]}, received {what}.", f"{_CLAIM_WHY} {fix}"
        return "PS000", f"expected this field, received {what}.", fix
    if kind == "finite_number" or (isinstance(value, float) and not math.isfinite(value)):
        return "PS002", f"expected a finite number, {received}", finite_number(path)
    if kind in ("float_type", "int_type"):
        expected = f"expected {' or '.join((_KINDS[kind], *choices_at(model, path)))}, {received}"
        if isinstance(value, bool):
            return "PS002", expected, "Write the number: true and false are not 1 and 0 here."
        if isinstance(value, str) and len(value) <= _LONGEST and _NO_NUMBER.fullmatch(value):
            return "PS002", f"expected a finite number, received {value.strip()}.", finite_number(path)
        if isinstance(value, str) and len(value) <= _LONGEST and NUMBER_IN_WORDS.fullmatch(value):
            return "PS002", expected, f"Write {value.strip()} without quotes."
        if isinstance(value, int):
            return (
                "PS000",
                f"expected a number, received one of {value.bit_length()} bits.",
                "Write a number in the usual range.",
            )
        return "PS000", expected, repaired(kind, value, document.format) or _help(model, path, document)
    if kind in ("model_type", "dict_type") and path:
        expected = f"expected {_KINDS[kind]}, {received}"
        if isinstance(value, str) and (glued := without_space(value)) and document.format == "yaml":
            return "PS000", expected, f"{SPACE}{glued[0]}: {glued[1]}"
        line = sample(model, path, document, value)
        if line is not None:
            return "PS000", expected, f"Write the fields of the section; such as: {line}"
    return "PS000", *_explain_value(detail, path, model, document)


def _explain_value(detail: ErrorDetails, path: Path, model: type[BaseModel], document: Document) -> tuple[str, str]:
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    received = f"received {shown_value(value)}."
    match kind:
        case "literal_error":
            choices = choices_at(model, path)
            if detail["loc"][-1] == WORD:
                close = closest(str(value), choices)
                meant = f"Did you mean {close}?" if close else repaired("int_type", value, document.format)
                expected = f"expected {' or '.join((_KINDS['int_type'], *choices))}, {received}"
                return expected, meant or _help(model, path, document)
            if len(choices) == 1 and isinstance(path[-1], str):
                quoted = "" if isinstance(value, str) else " in quotes"
                what = f'the text "{value}", received the number {value}.' if str(value) in choices else None
                return (
                    f"expected {what or f'{choices[0]}, {received}'}",
                    f"Write it{quoted}: {sample(model, path, document)}",
                )
            if not isinstance(value, str) and str(value) in choices:
                return f'expected the text "{value}", received the number {value}.', f'Write it in quotes: "{value}".'
            return f"expected {' or '.join(choices)}, {received}", _choice(model, path, choices, value)
        case "greater_than":
            return f"expected a number above {context['gt']:g}, {received}", _help(model, path, document)
        case "less_than":
            return f"expected a number below {context['lt']:g}, {received}", _help(model, path, document)
        case "greater_than_equal":
            return f"expected a whole number of at least {context['ge']}, {received}", _help(model, path, document)
        case "less_than_equal":
            return f"expected a whole number of at most {MAX_COUNT}, {received}", "Write a number in the usual range."
        case "too_short":
            what = "mapping" if isinstance(value, dict) else "list"
            return f"expected at least {context['min_length']} entry, received an empty {what}.", _help(
                model, path, document
            )
        case "string_pattern_mismatch" if path[-1] == "finding":
            return f"expected an id such as PS008, {received}", id_fix(value)
        case "string_pattern_mismatch":
            return f"expected a text that is not blank, {received}", _help(model, path, document)
        case _ if kind.startswith("date"):
            return f"expected a date such as 2026-12-31, {received}", date_fix(value) or _help(model, path, document)
        case _ if kind in _KINDS:
            fix = repaired(kind, value, document.format) or _help(model, path, document)
            return f"expected {_KINDS[kind]}, {received}", fix
    return f"expected a valid value, {received}", _help(model, path, document)


def _choice(model: type[BaseModel], path: Path, choices: list[str], value: Any) -> str:
    """Which of the choices was meant, or else what each of them means."""
    name = _field_name(model, path)
    word = shown_value(value) if isinstance(value, bool) else str(value)
    close = meant_choice(name, plain(word)) or closest(word, choices)
    return f"Did you mean {close}?" if close else f"Write one of them: {explained(name, choices)}."


def _field_name(model: type[BaseModel], path: Path) -> str:
    """A field by its section's class and its name, such as "Claim.adjacency"."""
    while path and isinstance(path[-1], int):
        path = path[:-1]
    owner = section(model, path[:-1])
    return f"{owner.__name__}.{path[-1]}" if owner and path else ""


def _absent(model: type[BaseModel], path: Path, document: Document) -> str:
    """What to add where a field is missing or empty."""
    if not path or not isinstance(path[-1], str):
        return _help(model, path, document)
    owner = section(model, path[:-1])
    field = owner.model_fields.get(path[-1]) if owner else None
    line = sample(model, path, document)
    if owner is None or field is None or line is None:
        return _help(model, path, document).replace("Correct it; ", "Add ", 1)
    inside = section(model, path)
    add = "Add" if field.is_required() else "Delete the line, or add"
    if inside is not None and f"{owner.__name__}.{path[-1]}" not in EXAMPLES:
        choices = choices_of(inside)
        return f"{add} the section, with {fields_of(inside)}{choices and f' ({choices})'}; such as: {line}"
    values = choices_at(model, path)
    if len(values) == 1:
        return f"{add} the line: {line}"
    choices = f" Choices: {explained(_field_name(model, path), values)}." if values else ""
    return (
        f"{add} {path[-1]}. {' '.join((field.description or '').split())}{choices} {such_as(document, path[:-1], line)}"
    )


def _help(model: type[BaseModel], path: Path, document: Document) -> str:
    """What the field is for, as a remedy."""
    if not path:
        return f"Start with these fields: {', '.join(model.model_fields)}."
    while isinstance(path[-1], int):
        path = path[:-1]
    owner = section(model, path[:-1])
    field = owner.model_fields.get(str(path[-1])) if owner else None
    if field is None or field.description is None:
        return "Correct it."
    line = sample(model, path, document)
    example = f" Such as: {line}" if line else ""
    return f"Correct it; {path[-1]}: {' '.join(field.description.split())}{example}"
