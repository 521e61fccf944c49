"""What was probably meant where a text is not even YAML or JSON, read off its lines."""

from __future__ import annotations

import json
import re

from tfdp.spec.notation import foreign_space, leading_zero, word_for, wrong_bracket

SPACE = "Write a space after the colon: "
_SEPARATOR = re.compile(r"---(?:\s|$)")
_OPENING = re.compile(r"(?:^|[:-]\s|[\[{,])\s*([\"'])")
_QUOTED = {'"': re.compile(r'"(?:[^"\\]|\\.)*"'), "'": re.compile(r"'(?:[^']|'')*'")}
_COMMENT = re.compile(r"(?:^|\s)#")
_BREAK = re.compile("\r\n|[\n\r\x85\u2028\u2029]")  # what ends a line in YAML
_BEFORE_VALUE = re.compile(r"[\s\w-]*:?\s*")
_MOST = 2000  # characters of a line that are looked at, and lines before the fault


def without_space(text: str) -> tuple[str, str] | None:
    """Key and value of "delta:1e-6", which YAML reads as a single word."""
    found = re.match(r"\s*([A-Za-z_][A-Za-z0-9_]{0,60}):(?!//)([^\s:].*?)(?=\s+#|\s+\w+:|\s*$)", text[:200])
    return (found[1], found[2]) if found else None


def yaml_fix(text: str, general: str, unclosed: bool, line: int | None) -> tuple[str, int | None]:
    """The remedy for a syntax error of YAML, and the line that it is about when that is another.

    Args:
        general: the remedy where the lines do not tell more.
        unclosed: a quote is open until the end.
        line: where the error was found, from 1.
    """
    every = _BREAK.split(text)
    lines = every[: line or None]
    if line is not None and "\t" in _margin(lines[-1]):
        return _without_tabs(every, line), None
    first = max(0, len(lines) - _MOST)
    ends = [found[0] for found in _BREAK.finditer(text)][: len(lines)]
    for number, end in list(enumerate(ends, 1))[-3:]:
        if (found := foreign_space(end)) is not None:
            return f"Delete the {found[1]} at the end of line {number}: YAML begins a new line there.", None
    for number in range(len(lines), max(first, len(lines) - 3), -1):
        written = _without_comment(lines[number - 1][:_MOST])
        if (found := foreign_space(written)) is not None and _BEFORE_VALUE.fullmatch(written, 0, found[0]):
            return f"Write a plain space in place of the {found[1]} on line {number}, column {found[0] + 1}.", number
        if glued := without_space(lines[number - 1]):
            return f"{SPACE}{glued[0]}: {glued[1]}", number
    for number in range(first + 1, len(lines) + 1):
        if comment := re.match(r"\s*(//|/\*)", lines[number - 1][:_MOST]):
            return f"Is line {number} a comment? In YAML it begins with #: write # in place of {comment[1]}.", number
    for number in range(first + 1, len(lines) + 1):
        if _is_open(lines[number - 1]):
            at = number if unclosed else None  # nothing closes it: then that is the place
            return f"Is a quote not closed, perhaps on line {number}?", at
    for number in range(first + 1, len(lines) + 1):
        if number > 1 and _SEPARATOR.match(lines[number - 1]) and any(map(_has_content, lines[: number - 1])):
            return f"{general} A second document begins at line {number} with ---: is that line meant?", None
    for number in range(len(lines), max(first, len(lines) - 3), -1):
        if word := re.fullmatch(r"\s*([a-z_]{3,60})(?:\s+[\w.+-]+)?\s*(?:#.*)?", lines[number - 1][:_MOST]):
            return f"Is a colon missing after {word[1]}, on line {number}?", None
    return general, None


def _without_tabs(lines: list[str], number: int) -> str:
    """How many spaces belong in place of a tab before a line, and before those that follow it with the same one."""
    margin, last = _margin(lines[number - 1]), number
    while last < len(lines) and _margin(lines[last]) == margin:
        last += 1
    above = [text for text in lines[: number - 1] if _has_content(text) and "\t" not in _margin(text)]
    depths = [len(_margin(text)) for text in above]
    spaces = depths[-1] if depths else 0
    if above and _without_comment(above[-1]).rstrip().endswith(":"):
        spaces += min((depth for depth in depths if depth), default=2)
    where = f"line {number}" if last == number else f"lines {number} to {last}"
    return f"Indent with spaces: YAML takes no tabs there. Write {spaces} spaces in place of the tab on {where}."


def _margin(line: str) -> str:
    return line[: len(line) - len(line.lstrip(" \t"))]


def json_place(text: str, error: json.JSONDecodeError) -> tuple[int, int]:
    """Line and column of the fault, from 1: of the comma itself where one stands too many."""
    before, after = text[: error.pos].rstrip(), text[error.pos :].lstrip()
    if before.endswith(",") and after[:1] in ("}", "]") and after:
        at = len(before) - 1
        return text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at)
    return error.lineno, error.colno


def json_fix(text: str, error: json.JSONDecodeError) -> str:
    """The remedy for a syntax error of JSON."""
    before, after = text[: error.pos].rstrip(), text[error.pos :].lstrip()
    if error.msg.startswith(("Unterminated string", "Invalid control character")):
        start = _string_start(text, error.pos) if error.msg.startswith("Invalid") else error.pos
        line = text.count("\n", 0, start) + 1
        return f"Is a quote not closed, perhaps on line {line}? A text has a quote at its beginning and at its end."
    if not after:
        return "The file ends too early: is a bracket not closed?"
    if after.startswith(("//", "/*", "#")):
        return "Delete it: JSON has no comments, but YAML has (# in a file named .yaml)."
    if before.endswith(",") and after[:1] in ("}", "]"):
        return f"Delete the comma before {after[0]}"
    if (number := leading_zero(text, error)) is not None:
        return f"Write {number}: a number has no leading zero."
    if (brackets := wrong_bracket(text, error)) is not None:
        got, wanted = brackets
        opened = {"]": "[", "}": "{"}[wanted]
        return (
            f"Write {wanted} there: what begins with {opened} ends with {wanted}. Or is {wanted} missing before {got}?"
        )
    if (found := foreign_space(text[error.pos : error.pos + 1])) is not None:
        return f"Write a plain space in place of the {found[1]}."
    if error.msg == "Extra data":
        return "Delete what stands behind the last bracket; one file holds one spec."
    if re.search(r"\d,$", before) and re.match(r"\d", after):
        return "Write a decimal point, no comma; digits are written without separators."
    if after[:1] == "'":
        return 'Write texts and names in double quotes (").'
    if "','" in error.msg:
        return "Is a comma missing between two entries, or a quote not closed?"
    if "':'" in error.msg:
        return "Write a colon between the name and the value."
    if "escape" in error.msg:
        return "Write a backslash twice."
    if (word := word_for(after)) is not None:
        return f"Write {word}"
    if re.match(r"[A-Za-z_.]", after):
        return 'Write a text or a name in double quotes ("); the words without quotes are true, false and null.'
    return "Correct the notation at this place."


def _has_content(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith(("#", "---", "%"))


def _without_comment(line: str) -> str:
    comment = _COMMENT.search(line)
    return line[: comment.start()] if comment else line


def _is_open(line: str) -> bool:
    """Whether a quoted text begins in a line and does not end there."""
    line, at = line[:_MOST], 0
    while opening := _OPENING.search(line, at):
        if _COMMENT.search(line, at, opening.end()):
            return False
        closed = _QUOTED[opening[1]].match(line, opening.end() - 1)
        if closed is None:
            return True
        at = closed.end()
    return False


def _string_start(text: str, position: int) -> int:
    """Where the string that holds a position begins."""
    at = text.rfind('"', 0, position)
    return at if at >= 0 else position
