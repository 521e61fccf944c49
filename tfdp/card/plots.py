"""Small charts as SVG text: no fonts, scripts or links to load, the same bytes for the same card.

Written by hand rather than by a plotting library, whose output changes between its releases; a card is checked by
rendering it again. Colours come from the style sheet of the page, line styles differ too for print without colour.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from markupsafe import Markup, escape

_WIDTH, _HEIGHT = 780, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 18, 34, 46


@dataclass(frozen=True)
class Series:
    """One line. A point whose y is None leaves a gap.

    Attributes:
        label: in the legend.
        points: (x, y) in order of x.
        style: class of the style sheet: "line-a", "line-b" or "line-c".
    """

    label: str
    points: Sequence[tuple[float, float | None]]
    style: str = "line-a"


@dataclass(frozen=True)
class Level:
    """A horizontal line with a name."""

    label: str
    value: float


@dataclass(frozen=True)
class Axis:
    label: str
    log: bool = False
    whole: bool = False
    zero: bool = False


@dataclass(frozen=True)
class _Scale:
    axis: Axis
    low: float
    high: float
    start: float
    stop: float
    ticks: list[float] = field(default_factory=list)

    @classmethod
    def over(cls, axis: Axis, values: Sequence[float], start: float, stop: float, *, pad: bool) -> _Scale:
        low, high = min(values), max(values)
        if axis.log:
            ticks = _log_ticks(low, high)
            return cls(axis, low, high if high > low else low * 10, start, stop, ticks)
        if axis.zero:
            low = min(0.0, low)
        if high == low:
            high, low = high + (abs(high) or 1.0) * 0.5, low - (0.0 if axis.zero else (abs(low) or 1.0) * 0.5)
        step = _nice_step(high - low, whole=axis.whole)
        if pad:
            low, high = math.floor(low / step) * step, math.ceil(high / step - 1e-9) * step
        first = math.ceil(low / step - 1e-9)
        ticks = [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]
        return cls(axis, low, high, start, stop, ticks)

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.axis.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return self.start + (value - low) / (high - low) * (self.stop - self.start)


def line_chart(
    series: Sequence[Series], *, x: Axis, y: Axis, title: str, levels: Sequence[Level] = ()
) -> Markup | None:
    """Lines over a common x, or None where there are not two points to join."""
    points = [(px, py) for one in series for px, py in one.points if py is not None]
    if len(points) < 2:
        return None
    y_values = [py for _, py in points] + [level.value for level in levels]
    scale_x = _Scale.over(x, [px for px, _ in points], _LEFT, _WIDTH - _RIGHT, pad=False)
    scale_y = _Scale.over(y, y_values, _HEIGHT - _BOTTOM, _TOP, pad=True)
    parts = [_open(title, _WIDTH, _HEIGHT), *_grid(scale_x, scale_y)]
    for level in levels:
        at = scale_y(level.value)
        parts.append(f'<line class="level" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="level-label" x="{_LEFT + 6}" y="{at - 6:.1f}">{escape(level.label)}</text>')
    for one in series:
        parts += _line(one, scale_x, scale_y)
    parts += _legend(series) if len(series) > 1 else []
    return Markup("".join([*parts, "</svg>"]))


def bar_chart(bars: Sequence[tuple[str, float, str, str]], *, title: str, interval: Sequence[float] = ()) -> Markup:
    """Horizontal bars.

    Args:
        bars: (label, value, value as text, class of the style sheet).
        title: for readers that do not see the picture.
        interval: (low, high) drawn on the bar whose class is "bar-a".
    """
    left, right, row = 180, 90, 30
    values = [value for _, value, _, _ in bars]
    low, high = min([0.0, *values, *interval]), max([0.0, *values, *interval])
    span = (high - low) or 1.0
    height = row * len(bars) + 6

    def place(value: float) -> float:
        return left + (value - low) / span * (_WIDTH - left - right)

    parts = [_open(title, _WIDTH, height)]
    for index, (label, value, text, style) in enumerate(bars):
        top = 4 + index * row
        begin, end = sorted((place(0.0), place(value)))
        edge = end
        parts.append(f'<text class="bar-label" x="{left - 10}" y="{top + 15}">{escape(label)}</text>')
        parts.append(
            f'<rect class="{style}" x="{begin:.1f}" y="{top}" width="{max(end - begin, 1):.1f}" height="21" rx="2"/>'
        )
        if style == "bar-a" and interval:
            lower, upper = place(interval[0]), place(interval[1])
            edge, middle = max(edge, upper), top + 10.5
            parts.append(
                f'<path class="whisker" d="M{lower:.1f} {middle}H{upper:.1f}M{lower:.1f} {middle - 5}v10'
                f'M{upper:.1f} {middle - 5}v10"/>'
            )
        parts.append(f'<text class="bar-value" x="{edge + 8:.1f}" y="{top + 15}">{escape(text)}</text>')
    zero = place(0.0)
    parts.append(f'<line class="axis" x1="{zero:.1f}" x2="{zero:.1f}" y1="0" y2="{height}"/>')
    return Markup("".join([*parts, "</svg>"]))


def dot_chart(
    rows: Sequence[tuple[str, Sequence[tuple[float | None, str]], Sequence[float]]],
    *,
    legend: Sequence[tuple[str, str]],
    line: float | None,
    title: str,
) -> Markup | None:
    """Values side by side, one row for each name; None where there is no row.

    Args:
        rows: (label, [(value, class of the style sheet), ...], (low, high) or nothing).
        legend: (label, class); a class that no row has is left out.
        line: a value that all are compared with.
        title: for readers that do not see the picture.
    """
    if not rows:
        return None
    left, right, top, step = 230, 24, 34, 30
    base = top + step * len(rows)
    values = [v for _, dots, interval in rows for v in (*(dot for dot, _ in dots), *interval, line) if v is not None]
    scale = _Scale.over(Axis(""), values, left, _WIDTH - right, pad=True)
    present = {style for _, dots, _ in rows for value, style in dots if value is not None}
    parts = [_open(title, _WIDTH, base + 26)]
    place = left
    for label, style in legend:
        if style in present:
            parts.append(f'<circle class="{style}" cx="{place + 5}" cy="11" r="5"/>')
            parts.append(f'<text class="legend" x="{place + 16}" y="15">{escape(label)}</text>')
            place += 7 * len(label) + 44
    for tick in scale.ticks:
        at = scale(tick)
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{top - 8}" y2="{base}"/>')
        parts.append(f'<text class="tick-x" x="{at:.1f}" y="{base + 18}">{_tick(tick)}</text>')
    if line is not None:
        at = scale(line)
        parts.append(f'<line class="level" x1="{at:.1f}" x2="{at:.1f}" y1="{top - 8}" y2="{base}"/>')
    for index, (label, dots, interval) in enumerate(rows):
        middle = top + step * index + step / 2 - 4
        parts.append(f'<text class="bar-label" x="{left - 14}" y="{middle + 4}">{escape(label)}</text>')
        if interval:
            low, high = scale(interval[0]), scale(interval[1])
            parts.append(
                f'<path class="whisker" d="M{low:.1f} {middle}H{high:.1f}M{low:.1f} {middle - 5}v10'
                f'M{high:.1f} {middle - 5}v10"/>'
            )
        parts += [
            f'<circle class="{style}" cx="{scale(value):.1f}" cy="{middle}" r="5"/>'
            for value, style in dots
            if value is not None
        ]
    return Markup("".join([*parts, "</svg>"]))


def _open(title: str, width: int, height: int) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}" '
        'xmlns="http://www.w3.org/2000/svg">'
    )


def _grid(scale_x: _Scale, scale_y: _Scale) -> list[str]:
    left, right, base = _LEFT, _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    parts = []
    for tick in scale_y.ticks:
        at = scale_y(tick)
        parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="tick-y" x="{left - 8}" y="{at + 4:.1f}">{_tick(tick)}</text>')
    for tick in scale_x.ticks:
        at = scale_x(tick)
        parts.append(f'<line class="axis" x1="{at:.1f}" x2="{at:.1f}" y1="{base}" y2="{base + 5}"/>')
        parts.append(f'<text class="tick-x" x="{at:.1f}" y="{base + 19}">{_tick(tick)}</text>')
    parts.append(f'<line class="axis" x1="{left}" x2="{right}" y1="{base}" y2="{base}"/>')
    parts.append(f'<text class="axis-label" x="{right}" y="{_HEIGHT - 6}">{escape(scale_x.axis.label)}</text>')
    parts.append(f'<text class="axis-name" x="{left - 44}" y="15">{escape(scale_y.axis.label)}</text>')
    return parts


def _line(series: Series, scale_x: _Scale, scale_y: _Scale) -> list[str]:
    pieces: list[list[str]] = [[]]
    for px, py in series.points:
        if py is None:
            pieces.append([])
        else:
            pieces[-1].append(f"{scale_x(px):.1f} {scale_y(py):.1f}")
    drawn = [f'<path class="{series.style}" d="M{"L".join(piece)}"/>' for piece in pieces if len(piece) > 1]
    marked = [point for piece in pieces for point in piece]
    if len(marked) <= 12:
        dots = (point.split() for point in marked)
        drawn += [f'<circle class="{series.style}-dot" cx="{cx}" cy="{cy}" r="3"/>' for cx, cy in dots]
    elif marked:
        cx, cy = marked[-1].split()
        drawn.append(f'<circle class="{series.style}-dot" cx="{cx}" cy="{cy}" r="4"/>')
    return drawn


def _legend(series: Sequence[Series]) -> list[str]:
    parts = []
    right = _WIDTH - _RIGHT
    for one in reversed(series):
        start = right - 7 * len(one.label) - 30
        parts.append(f'<line class="{one.style}" x1="{start}" x2="{start + 22}" y1="11" y2="11"/>')
        parts.append(f'<text class="legend" x="{start + 28}" y="15">{escape(one.label)}</text>')
        right = start - 16
    return parts


def _nice_step(span: float, *, whole: bool) -> float:
    raw = span / 5
    size = 10 ** math.floor(math.log10(raw))
    step = next(factor * size for factor in (1, 2, 2.5, 5, 10) if factor * size >= raw * 0.999)
    return max(1.0, float(math.ceil(step))) if whole else step


def _log_ticks(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    every = max(1, round((last - first) / 6))
    decades = [10.0**exponent for exponent in range(first, last + 1, every)]
    if last - first <= 2:
        decades = sorted(factor * 10.0**exponent for exponent in range(first, last + 1) for factor in (1, 2, 5))
    return [tick for tick in decades if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]


def _tick(value: float) -> str:
    if value != 0 and abs(value) < 1e-3:
        return f"{value:.0e}".replace("e-0", "e-")
    return f"{value:,.6g}" if abs(value) < 1e6 else f"{value:.3g}".replace("e+0", "e")
