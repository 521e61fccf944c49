"""Numbers in messages. One that a message prescribes has to pass when it is copied, so it is never rounded past it."""

from __future__ import annotations

import decimal
import math


def shown(value: float) -> str:
    """The shortest text that reads back as the same number; whole numbers without a point."""
    if not math.isfinite(value):
        return str(value)
    if float(value).is_integer() and abs(value) < 1e15:
        return str(int(value))
    return repr(float(value))


def rounded_down(value: float, digits: int = 2) -> str:
    """At most `value`, to so many significant digits."""
    return _rounded(value, digits, decimal.ROUND_FLOOR)


def rounded_up(value: float, digits: int = 6) -> str:
    """At least `value`, to so many significant digits."""
    return _rounded(value, digits, decimal.ROUND_CEILING)


def counted(number: int, noun: str) -> str:
    """The number with its noun in singular or plural."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def with_article(noun: str) -> str:
    """The noun with "a" or "an" before it."""
    return f"{'an' if noun[:1] in 'aeio' else 'a'} {noun}"


def _rounded(value: float, digits: int, rounding: str) -> str:
    if not math.isfinite(value):
        return str(value)
    # The digits that it is written with: 0.1 is a little more than a tenth, but not to a reader.
    written = decimal.Decimal(repr(float(value)))
    found = float(decimal.Context(prec=digits, rounding=rounding).plus(written))
    # As a float the decimal number may lie on the other side by the last bit.
    if (rounding == decimal.ROUND_FLOOR and found > value) or (rounding == decimal.ROUND_CEILING and found < value):
        return shown(value)
    return shown(found)
