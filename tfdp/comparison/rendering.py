"""A comparison for a terminal, and for a comment on a pull request."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tfdp.comparison.changes import Change, Comparison, Direction
from tfdp.comparison.files import FileComparison
from tfdp.findings import printable

HEADLINES = {
    Direction.WEAKER: "Privacy becomes weaker",
    Direction.INCOMPARABLE: "Nobody can say that privacy stays as strong",
    Direction.STRONGER: "Privacy becomes stronger",
    Direction.UNCHANGED: "Privacy stays as strong",
}
_GUIDANCE = {
    Direction.WEAKER: "Somebody who answers for the data has to agree.",
    Direction.INCOMPARABLE: "Some of it is weaker, or cannot be ordered: read each line, then decide.",
}
_NOTHING = "nothing"
_LONGEST = 160


def render_text(comparison: Comparison | FileComparison) -> str:
    """Lines for a terminal: one block per change, the verdict last. No control characters."""
    lines = []
    if isinstance(comparison, FileComparison):
        lines += [line for part in comparison.parts for line in render_text(part).splitlines()]
    else:
        for change in comparison.changes:
            before, after = _values(change)
            where = f"{change.direction.value}: {printable(change.where)}"
            lines += [f"{where}: {before} -> {after}", f"    {change.why}"]
            lines += [f"    {printable(detail)}" for detail in change.details]
    names = f"{printable(comparison.old_name)} -> {printable(comparison.new_name)}"
    return "\n".join([*lines, f"{names}: {headline(comparison)}."]) + "\n"


def render_markdown(comparison: Comparison | FileComparison, *, heading: str = "###") -> str:
    """GitHub-flavoured Markdown.

    What the compared files say stands in code spans, where nothing is markup, a link or a mention.
    """
    lines = [
        f"{heading} {headline(comparison)}",
        "",
        f"{code(comparison.old_name)} compared with {code(comparison.new_name)}",
    ]
    if guidance := _GUIDANCE.get(comparison.verdict):
        lines += ["", guidance]
    if isinstance(comparison, FileComparison):
        parts = [render_markdown(part, heading=f"{heading}#") for part in comparison.parts if part.changes]
        return "\n".join(lines) + "\n" + "".join(f"\n{part}" for part in parts)
    told = [change for change in comparison.changes if change.direction is not Direction.UNCHANGED]
    others = comparison.having(Direction.UNCHANGED)
    if told:
        lines += ["", "| privacy | field | before | after | why |", "|---|---|---|---|---|", *map(_row, told)]
    if others:
        count = "1 other change" if len(others) == 1 else f"{len(others)} other changes"
        lines += ["", f"<details><summary>{count} without effect on the guarantee</summary>", ""]
        lines += ["| | field | before | after | why |", "|---|---|---|---|---|", *map(_row, others), "", "</details>"]
    return "\n".join(lines) + "\n"


def render_invalid(old_name: str, new_name: str, invalid: Mapping[str, Sequence[str]]) -> str:
    """Markdown for a pair of which the old or the new file, or both, is not valid: what is wrong, line by line."""
    sides = " and the ".join(invalid)
    noun = "file is" if len(invalid) == 1 else "files are"
    lines = [
        f"### {HEADLINES[Direction.INCOMPARABLE]}",
        "",
        f"{code(old_name)} compared with {code(new_name)}",
        "",
        f"The {sides} {noun} not valid, hence not comparable.",
        "",
        *(f"- {code(line)}" for side in invalid.values() for line in side),
    ]
    return "\n".join(lines) + "\n"


def headline(comparison: Comparison | FileComparison) -> str:
    """The verdict as a phrase."""
    return HEADLINES[comparison.verdict] if comparison.changes else "Nothing changed"


def shown(value: Any) -> str:
    """A value as it would be written, on one line, shortened, and without characters that steer a terminal."""
    match value:
        case None:
            return _NOTHING
        case bool():
            return "true" if value else "false"
        case float():
            return f"{value:.6g}"
        case str() | int():
            text = str(value)
        case list() if all(isinstance(item, str) for item in value):
            text = ", ".join(value) or _NOTHING
        case _:
            text = json.dumps(value, ensure_ascii=False)
    text = printable(text)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _values(change: Change) -> tuple[str, str]:
    """Both values; with every digit where they would look alike."""
    one, other = shown(change.old), shown(change.new)
    if one == other and change.old != change.new:
        one, other = (printable(json.dumps(value, ensure_ascii=False)) for value in (change.old, change.new))
    return one, other


def code(text: str) -> str:
    """A code span that holds any text, also inside a table; a pipe becomes a broken bar, for tables cannot quote it."""
    text = printable(text).replace("|", "\N{BROKEN BAR}").strip() or " "
    longest = max((len(run) for run in _runs_of_backticks(text)), default=0)
    fence = "`" * (longest + 1)
    padding = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{padding}{text}{padding}{fence}"


def _runs_of_backticks(text: str) -> list[str]:
    return [run for run in "".join(c if c == "`" else " " for c in text).split(" ") if run]


def _row(change: Change) -> str:
    label = "" if change.direction is Direction.UNCHANGED else f"**{change.direction.value}**"
    before, after = _values(change)
    cells = [label, code(change.where), code(before), code(after), " ".join([change.why, *map(code, change.details)])]
    return f"| {' | '.join(cells)} |"
