"""Numbers as people read them. A bound is only ever rounded up."""

from __future__ import annotations

import decimal
import math
from collections.abc import Mapping

from tfdp.card.fields import Bound

NOT_MEASURED = "not measured"
NOT_STATED = "not stated"
NOT_FINITE = "not finite"
UNBOUNDED_TEXT = "unbounded"


def bound(value: Bound | float | None) -> str:
    """An upper bound with four significant digits, rounded up: 1.13371 is 1.134, never 1.133."""
    if value is None:
        return NOT_MEASURED
    if isinstance(value, Bound):
        if value.value is None:
            return UNBOUNDED_TEXT
        value = value.value
    if math.isinf(value):
        return UNBOUNDED_TEXT
    return _significant(value, 4, decimal.ROUND_CEILING)


def lower_bound(value: float | None) -> str:
    """A lower bound, rounded down."""
    return NOT_MEASURED if value is None else _significant(value, 4, decimal.ROUND_FLOOR)


def number(value: float | None) -> str:
    """A measured value with four significant digits; a count with all of them."""
    if value is None:
        return NOT_MEASURED
    if isinstance(value, int):
        return f"{value:,}"
    return _significant(value, 4, decimal.ROUND_HALF_EVEN)


def deviation(value: float | None) -> str:
    """A small relative error: only its size matters."""
    return NOT_MEASURED if value is None else f"{value:.1e}"


def signed(value: float | None) -> str:
    """A difference: with its sign, to four significant digits."""
    text = number(value)
    return f"+{text}" if value is not None and value > 0 else text


def exact(value: float | None) -> str:
    """A parameter: every digit that it has."""
    if value is None:
        return NOT_STATED
    return f"{value:,}" if isinstance(value, int) else _plain(repr(float(value)))


def percent(value: float | None) -> str:
    """A rate in percent, rounded up, because it is a bound."""
    return NOT_MEASURED if value is None else f"{_significant(value * 100, 4, decimal.ROUND_CEILING)}%"


def interval(value: tuple[float, float] | None) -> str:
    """A confidence interval."""
    return NOT_MEASURED if value is None else f"{number(value[0])} to {number(value[1])}"


def seconds(value: float) -> str:
    """A duration."""
    if value < 120:
        return f"{_significant(value, 3, decimal.ROUND_HALF_EVEN)} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def words(name: str | None) -> str:
    """An identifier in words: `add_or_remove_one` is "add or remove one"."""
    return NOT_STATED if name is None else name.replace("_", " ")


def layer_norms(norms: Mapping[str, float]) -> str:
    """Clip norms by layer: one number where all have the same."""
    if len(norms) > 1 and len(set(norms.values())) == 1:
        return f"{len(norms):,} layers, each to {number(next(iter(norms.values())))}"
    return ", ".join(f"{name}: {number(norm)}" for name, norm in norms.items())


def _significant(value: float, digits: int, rounding: str) -> str:
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else NOT_FINITE
    exact_value = decimal.Decimal(repr(float(value)))
    quantum = decimal.Decimal(1).scaleb(exact_value.adjusted() - digits + 1)
    rounded = exact_value.quantize(min(quantum, decimal.Decimal(1)), rounding=rounding)
    if 1e-4 <= abs(value) < 1e7:
        text = f"{rounded:,f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    return _plain(repr(float(rounded)))


def _plain(text: str) -> str:
    """1e-06 is 1e-6."""
    mantissa, mark, exponent = text.partition("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}" if mark else text.removesuffix(".0")
