"""How to write what was evidently meant by a value of the wrong kind: a number in words, a date in another order."""

from __future__ import annotations

import datetime
import decimal
import json
import re
from typing import Any

from tfdp.spec.documents import Format
from tfdp.spec.numbers import shown

LONGEST = 200  # characters of a value that are looked at: it can be as long as the file
_SCALES = {"%": decimal.Decimal("0.01"), "k": decimal.Decimal(1000)}


def day_meant(value: Any) -> str | None:
    """A date in another order or notation, where it can only be one day."""
    if not isinstance(value, str) or len(value) > LONGEST:
        return None
    if found := re.match(r"\s*(\d{4})[-/.](\d{1,2})[-/.](\d{1,2})(?!\d)", value, re.ASCII):
        year, month, day = map(int, found.groups())
    elif found := re.fullmatch(r"\s*(\d{1,2})([-/.])(\d{1,2})\2(\d{4})\s*", value, re.ASCII):
        first, second, year = int(found[1]), int(found[3]), int(found[4])
        if found[2] != "." and first <= 12 and second <= 12 and first != second:
            return None  # the day comes first in some countries, the month in others
        day, month = (first, second) if first > 12 or found[2] == "." else (second, first)
    else:
        return None
    try:
        return datetime.date(year, month, day).isoformat()
    except ValueError:
        return None


def date_fix(value: Any) -> str | None:
    """How to write a date, and whether it is past already: it is the last day of a waiver."""
    day = day_meant(value)
    if day is None:
        return None
    past = datetime.date.fromisoformat(day) < datetime.datetime.now(datetime.UTC).date()
    return f"Write {day}: the year, the month, the day.{' That day is past: a waiver takes a later one.' * past}"


def id_fix(value: Any) -> str:
    """The ids that a shorter one may stand for: PS04 for PS004 and PS040."""
    found = re.fullmatch(r"\s*ps[\s_-]*(\d{1,3})\s*", value[:LONGEST], re.IGNORECASE | re.ASCII)
    if found is None:
        return "Write PS and three digits, in quotes or not; `tfdp explain` lists every id."
    digits = found[1]
    while len(digits) < 2:
        digits = f"0{digits}"
    meant = [digits] if len(digits) == 3 else sorted({f"{digits[:at]}0{digits[at:]}" for at in range(3)})
    return f"Did you mean {' or '.join(f'PS{each}' for each in meant)}? `tfdp explain` lists every id."


def repaired(kind: str, value: Any, format: Format) -> str | None:
    """How to write what was evidently meant, where that is evident."""
    if not isinstance(value, str) or len(value) > LONGEST:
        return None
    word = value.strip().lower()
    if kind == "bool_type" and word in ("yes", "on", "no", "off", "true", "false"):
        return f"Write {'true' if word in ('yes', 'on', 'true') else 'false'}, without quotes."
    if kind == "tuple_type" and value.strip():
        inside = value.strip("[] ")
        parts = [part.strip() for part in inside.split(",")]
        return f"Write it as a list: {json.dumps(parts) if format == 'json' else f'[{inside}]'}."
    number = value.strip()
    if kind in ("int_type", "float_type") and re.fullmatch(r"\d{1,3}([ ,'_]\d{3})+", number):
        digits = re.sub(r"\D", "", value)
        if kind == "float_type" and re.fullmatch(r"\d{1,3},\d{3}", number):
            return f"Write {digits}, without a separator, or {number.replace(',', '.')}, with a decimal point."
        return f"Write {digits}: digits without separators."
    if kind == "float_type" and re.fullmatch(r"[-+]?\d+,\d+([eE][-+]?\d+)?", number):
        return f"Write {number.replace(',', '.')}: a decimal point, no comma."
    return _number_alone(kind, number) if kind in ("int_type", "float_type") else None


def _number_alone(kind: str, text: str) -> str | None:
    """The only number in a text: "10 epochs", "60k", "0.001%"."""
    found = list(re.finditer(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?", text))
    if len(found) != 1 or re.search(r"\d", text[found[0].end() :]):
        return None
    value = decimal.Decimal(found[0][0])
    if abs(value.adjusted()) > 15:
        return None
    scale = _SCALES.get(text[found[0].end() :].strip().lower(), decimal.Decimal(1))
    value *= scale
    if kind == "int_type" and value != value.to_integral_value():
        return None
    return f"Write {shown(float(value)) if scale != 1 else found[0][0]}: a number alone, without anything around it."
