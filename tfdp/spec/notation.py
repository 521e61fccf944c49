"""Syntax errors of YAML and JSON in words of ours: the libraries speak of blocks, tokens and delimiters."""

from __future__ import annotations

import json
import re
import unicodedata
from typing import Any

from tfdp.spec.numbers import with_article

_LONGEST = 200  # characters of a value: it can be as long as the file

_INDENT = "Is this line, or the one before it, indented like its neighbours? Quote a text that has a colon in it."
_BRACKET = "Is a bracket not closed, or a comma missing between two entries?"
_DASH = "Write a dash before it, or delete the dash above it: either a list or fields."
_BEHIND = "Quote the whole value, or delete what stands behind it."
_WORD = "Quote the text: anchors (&) and aliases (*) are not read."
_TAG = "Delete the tag (!), or quote the text."
_ESCAPE = "Write a backslash twice, or the text in single quotes."

# What the YAML library calls the ends of things.
_ENDS = {
    "<stream end>": "the end of the file",
    "<document end>": "the end of the document",
    "<document start>": "a new document",
    "<block end>": "the end of the section",
}

# What the YAML library says (a pattern), what that means, and the remedy.
_YAML: tuple[tuple[str, str, str], ...] = (
    (r"expected ',' or '[\]}]', but got '<stream end>'", "a bracket that is not closed", _BRACKET),
    (
        r"expected ',' or '(?P<close>[\]}])', but got '(?P<got>[^<'])'",
        "{got!r} in place of a comma or {close!r}",
        _BRACKET,
    ),
    (r"expected ',' or '(?P<close>[\]}])'", "no comma between two entries, nor a {close!r} after them", _BRACKET),
    (r"found unexpected end of stream", "a quote that is not closed", "Is a quote not closed?"),
    (r"found unexpected document separator", "a quote that is not closed before ---", "Is a quote not closed?"),
    (r"found character '\\t'", "a tab", "Write spaces: YAML takes no tabs there."),
    (
        r"found character '(?P<got>.+)' that cannot",
        "a value that begins with {got!r}",
        "Quote the text that begins with this character, or delete the character.",
    ),
    (r"'<document start>'.*'<block", "a line that is indented less than the first", _INDENT),
    (r"'<document start>'|document end marker", "more behind the end of the spec", "Delete what stands there."),
    (r"<block end>.*'<block|<block end>.*'<document", "a line that is indented like none above it", _INDENT),
    (r"<block end>.*'-'", "an entry of a list (-) where a field is expected", _INDENT),
    (r"<block end>.*'\?'", "a field where an entry of a list (-) is expected", _DASH),
    (r"<block end>", "more behind a value that has ended", _BEHIND),
    (r"mapping values", "a colon where none can stand", _INDENT),
    (r"could not find expected ':'", "a line without a colon", _INDENT),
    (r"expected the node content, but found '(?P<got>.+)'", "{got!r} in place of a value", _BRACKET),
    (
        r"sequence entries",
        "a list (-) on the line of its field",
        "Write the list in brackets, such as [a, b], or begin it on the next line.",
    ),
    (r"mapping keys|'\?'", "a question mark at the beginning of a text", "Quote the text."),
    (
        r"indentation indicator|more indented follow",
        "a long text (| or >) that does not begin on the next line",
        "Begin it on the next line, indented, or write the text in quotes.",
    ),
    (r"a comment or a line break", "more behind | or >", "Begin the text on the next line, or quote it."),
    (r"unknown escape character '(?P<got>.)'", "the escape \\{got}, which does not exist", _ESCAPE),
    (r"hexdecimal", "an escape without its digits", _ESCAPE),
    (r"alphabetic or numeric|undefined alias|undefined anchor", "an anchor or alias", _WORD),
    (r"tag|URI|'!'|'>'|expected ' '", "a tag", _TAG),
)
_JSON: tuple[tuple[str, str], ...] = (
    (r"Expecting value", "something that is no value"),
    (r"property name", "something else than a name in double quotes"),
    (r"',' delimiter", "no comma between two entries"),
    (r"':' delimiter", "no colon after a name"),
    (r"escape", "a backslash that begins no escape"),
    (r"Unterminated string|Invalid control character", "a quote that is not closed"),
    (r"Extra data", "more behind the last bracket"),
)


def snippet(name: str, value: str, format: str) -> str:
    """A field as it is written in a notation; the value is a word, or a number as it is shown."""
    if format != "json":
        return f"{name}: {value}"
    try:
        json.loads(value)
    except ValueError:
        value = json.dumps(value)
    return f"{json.dumps(name)}: {value}"


def foreign_space(text: str) -> tuple[int, str] | None:
    """Where a text has its first space or invisible character that only looks like nothing or a space, and its name."""
    for at, character in enumerate(text):
        if character != " " and unicodedata.category(character) in ("Zs", "Zl", "Zp", "Cf"):
            name = unicodedata.name(character, "invisible character").lower()
            return at, f"{name} (U+{ord(character):04X})"
    return None


def shown_value(value: Any) -> str:
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


def plain_space(text: str, at: int, name: str) -> str:
    """The remedy for a character that looks like a space or like nothing."""
    rest = text.strip()
    where = f"before {shown_value(rest)}" if not text[:at].strip() else f"behind {shown_value(text[:at].strip())}"
    return f"Delete the {name} {where}, or write a plain space in its place."


def leading_zero(text: str, error: json.JSONDecodeError) -> str | None:
    """The number without its leading zeros, where a zero before a digit is the fault."""
    zero = re.search(r"(-?)0$", text[max(0, error.pos - 2) : error.pos])  # the reader takes the other digits together
    rest = re.match(r"[0-9][0-9.eE+-]*", text[error.pos : error.pos + 80])
    if zero is None or rest is None:
        return None
    digits = rest[0].lstrip("0")
    return zero[1] + (digits if digits[:1].isdigit() else f"0{digits}")


def wrong_bracket(text: str, error: json.JSONDecodeError) -> tuple[str, str] | None:
    """The closing bracket that stands there and the one that belongs there."""
    got, before = text[error.pos : error.pos + 1], text[: error.pos].rstrip()
    if got not in ("}", "]") or not got or before.endswith(","):
        return None
    if "','" in error.msg or before.endswith({"}": "[", "]": "{"}[got]):
        return got, {"}": "]", "]": "}"}[got]
    return None


def word_for(after: str) -> str | None:
    """The word of JSON that a word of another language, or in capitals, stands for."""
    word = re.match(r"\w+", after[:10])
    return {"true": "true", "false": "false", "null": "null", "none": "null"}.get(word[0].lower()) if word else None


def yaml_problem(said: str) -> tuple[str, str]:
    """What the YAML library found, in words that need no knowledge of it, and the remedy."""
    for pattern, words, fix in _YAML:
        if found := re.search(pattern, said):
            got = found.groupdict().get("got")
            if got in _ENDS:
                return f"{_ENDS[got]} in place of a value", fix
            return words.format(**found.groupdict()), fix
    return "a syntax error", "Correct the notation at this place."


def json_problem(text: str, error: json.JSONDecodeError) -> str:
    """The same for JSON."""
    before, after = text[: error.pos].rstrip(), text[error.pos :].lstrip()
    if after.startswith(("//", "/*", "#")):
        return "a comment"
    if before.endswith(",") and after[:1] in ("}", "]") and after:
        return f"a comma before {after[0]}"
    if leading_zero(text, error):
        return "a number with a leading zero"
    if brackets := wrong_bracket(text, error):
        return f"{brackets[0]} in place of {brackets[1]}"
    if (found := foreign_space(text[error.pos : error.pos + 1])) is not None:
        return with_article(found[1])
    if word_for(after):
        return f"the word {after[:10].split(maxsplit=1)[0].rstrip(',]}')}, which is not one of JSON"
    return next((words for pattern, words in _JSON if re.search(pattern, error.msg)), "a syntax error")
