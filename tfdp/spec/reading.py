"""YAML and JSON to plain values, each with the line and column it came from.

Only what a reviewer can read off the page is accepted: no key twice, no aliases, no tags, no merge keys. A file may
hold several YAML documents (`read_all`), each a spec of its own. Numbers are checked later, by the fields.

A text is untrusted: length, depth and the number of values are bounded, so that time and memory are.
"""

from __future__ import annotations

import bisect
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NoReturn

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import AliasEvent, CollectionEndEvent, CollectionStartEvent, DocumentStartEvent, NodeEvent
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from tfdp.spec import hints
from tfdp.spec.notation import json_problem, yaml_problem

Format = Literal["yaml", "json"]
Path = tuple[str | int, ...]

MAX_CHARACTERS = 1 << 17
MAX_VALUES = 10_000
MAX_DEPTH = 32
_START = "Write a first one with tfdp init, which asks a few questions."


@dataclass(frozen=True)
class Position:
    """1-based place of a value, and of the key that it belongs to."""

    line: int
    column: int
    key_line: int
    key_column: int

    @property
    def is_empty(self) -> bool:
        """Whether nothing stands after the key, which is then the place of the value too."""
        return (self.line, self.column) == (self.key_line, self.key_column)


@dataclass(frozen=True)
class Document:
    """Plain values (dict, list, str, int, float, bool, None) and where they stand.

    Attributes:
        number, count: which of the documents of its file it is, and of how many.
        separator: line of the `---` before it, when there is one.
    """

    value: Any
    positions: dict[Path, Position] = field(default_factory=dict)
    format: Format = "yaml"
    number: int = 1
    count: int = 1
    separator: int | None = None

    def indentation(self, section: Path) -> int:
        """Spaces before the fields of a section that has a line for each; 0 where a line cannot simply be added."""
        inside = [place for path, place in self.positions.items() if path[:-1] == section and path]
        lines = {place.key_line for place in inside}
        own = self.positions[section].key_line if section in self.positions else 0
        apart = self.format == "yaml" and len(lines) == len(inside) and own not in lines
        return min((place.key_column for place in inside), default=1) - 1 if apart else 0

    def named(self, message: str) -> str:
        """A message, with the number of the document when there are several in the file."""
        return numbered(message, self.number, self.count)


def numbered(message: str, number: int, count: int) -> str:
    """A message, with the number of the document when there are several in the file."""
    return message if count == 1 else f"{message} (Document {number} of {count}.)"


def finite_number(path: Path) -> str:
    """What to write in place of NaN and infinity."""
    return "Write a finite number" + (
        ", or null: then it is calibrated to the claim." if path and path[-1] == "noise_multiplier" else "."
    )


class ReadingError(Exception):
    """The text is not a document that can be checked field by field."""

    def __init__(
        self, id: str, message: str, fix: str, *, line: int | None = None, column: int | None = None, path: Path = ()
    ):
        super().__init__(message)
        self.id, self.message, self.fix = id, message, fix
        self.line, self.column, self.path = line, column, path


def read(text: str, format: Format) -> Document:
    """Reads a text that holds one document.

    Raises:
        ReadingError: at the first fault of the notation itself.
    """
    documents = read_all(text, format)
    for document in documents[1:]:
        place = document if isinstance(document, ReadingError) else document.positions[()]
        raise ReadingError(
            "PS000",
            "expected a single document, received another document.",
            f"Keep one of them, or give each a file of its own.{_is_meant(document)}",
            line=place.line,
            column=place.column,
        )
    if isinstance(documents[0], ReadingError):
        raise documents[0]
    return documents[0]


def _is_meant(document: Document | ReadingError) -> str:
    if isinstance(document, ReadingError) or document.separator is None:
        return ""
    return f" Document {document.number} begins at line {document.separator} with ---: is that line meant?"


def read_all(text: str, format: Format) -> list[Document | ReadingError]:
    """Reads every document of a text, at least one; JSON holds one only.

    A fault within one document stands in its place, so that the others can be reviewed all the same.

    Raises:
        ReadingError: the text cannot be cut into documents.
    """
    text = text.removeprefix("\ufeff")
    if len(text) > MAX_CHARACTERS:
        raise ReadingError(
            "PS000",
            f"expected at most {MAX_CHARACTERS} characters, received {len(text)}.",
            "Is this the right file? A spec is about a page long.",
        )
    if not text.strip():
        raise ReadingError("PS000", "expected a privacy spec, received an empty document.", _START)
    try:
        return [_read_json(text)] if format == "json" else _read_yaml(text)
    except RecursionError:
        _too_deep()


def _read_yaml(text: str) -> list[Document | ReadingError]:
    if directive := re.search(r"^%.*", text, flags=re.MULTILINE):
        # "%YAML 1.1" would change what 010 or yes mean.
        line = text.count("\n", 0, directive.start()) + 1
        raise ReadingError(
            "PS000", f"expected no directive, received {directive[0][:80]!r}.", "Delete the line.", line=line, column=1
        )
    yaml = YAML(typ="safe", pure=True)
    try:
        separators = _check_size(text)
        roots = [
            (root, separator)
            for root, separator in zip(yaml.compose_all(text), separators, strict=True)
            if not _is_blank(root)
        ]
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        said = " ".join((error.problem or error.context or "").split())
        problem, general = yaml_problem(said)
        at = mark.line + 1 if mark else None
        column = mark.column + 1 if mark else None
        fix, other = hints.yaml_fix(text, general, "end of stream" in said, at)
        if other is not None:
            written = re.split("\r\n|[\n\r\x85\u2028\u2029]", text)[other - 1]
            at, column = other, len(written) - len(written.lstrip()) + 1
        raise ReadingError("PS000", f"expected YAML, received {problem}.", fix, line=at, column=column) from None
    except ReaderError as error:
        before = text[: error.position]
        raise ReadingError(
            "PS000",
            f"expected YAML, received the control character {hex(error.character)}.",
            "Delete the character.",
            line=before.count("\n") + 1,
            column=len(before) - before.rfind("\n"),
        ) from None
    except YAMLError as error:
        raise ReadingError(
            "PS000", f"expected YAML, received: {str(error).splitlines()[0]}.", "Is this the right file?"
        ) from None
    except (ValueError, IndexError, OverflowError) as error:  # such as the escape of a character that does not exist
        raise ReadingError("PS000", f"expected YAML, received: {error}.", "Correct the notation.") from None
    if not roots:
        raise ReadingError("PS000", "expected a privacy spec, received only comments.", _START)
    documents: list[Document | ReadingError] = []
    for number, (root, separator) in enumerate(roots, 1):
        try:
            found = _YamlDocument(yaml).read(root)
            documents.append(replace(found, number=number, count=len(roots), separator=separator))
        except ReadingError as error:
            error.message = numbered(error.message, number, len(roots))
            documents.append(error)
    return documents


def _is_blank(root: Node | None) -> bool:
    """Whether there is nothing between two `---`."""
    return root is None or (isinstance(root, ScalarNode) and not root.value and root.style is None)


def _check_size(text: str) -> list[int | None]:
    """Stops at the first bracket or value too many: composing a long row of them would take long.

    Returns:
        For each document the line of the `---` before it, or None.
    """
    separators: list[int | None] = []
    depth = values = 0
    anchors: set[str] = set()
    for event in YAML(typ="safe", pure=True).parse(text):
        if isinstance(event, DocumentStartEvent):
            separators.append(event.start_mark.line + 1 if event.explicit else None)
        depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
        values += isinstance(event, NodeEvent)
        anchor = None if isinstance(event, AliasEvent) else getattr(event, "anchor", None)
        if anchor in anchors:  # the library would warn, and go on
            line, column = event.start_mark.line + 1, event.start_mark.column + 1
            message = f"expected each anchor (&) once, received {anchor[:80]!r} again."
            raise ReadingError("PS000", message, "Delete the anchors: aliases are not read.", line=line, column=column)
        if anchor is not None:
            anchors.add(anchor)
        if depth > MAX_DEPTH:
            _too_deep(event.start_mark.line + 1, event.start_mark.column + 1)
        if values > MAX_VALUES:
            _too_many(event.start_mark.line + 1, event.start_mark.column + 1)
    return separators


class _YamlDocument:
    """Builds plain values from ruamel's node tree, which keeps the position of every node."""

    def __init__(self, yaml: YAML):
        self._construct = yaml.constructor.construct_object
        self._positions: dict[Path, Position] = {}
        self._seen: set[int] = set()

    def read(self, root: Node) -> Document:
        self._positions[()] = Position(*_mark(root), *_mark(root))
        return Document(self._value(root, ()), self._positions)

    def _value(self, node: Node, path: Path) -> Any:
        if len(path) > MAX_DEPTH:
            _too_deep(*_mark(node))
        if id(node) in self._seen:
            self._refuse(
                node, path, "an alias (*)", "Write the value out, so that a reviewer sees it where it is used."
            )
        self._seen.add(id(node))
        if isinstance(node, MappingNode) and node.tag == "tag:yaml.org,2002:map":
            return {key: self._value(child, (*path, key)) for key, child in self._entries(node, path)}
        if isinstance(node, SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
            items = []
            for index, child in enumerate(node.value):
                self._positions[(*path, index)] = Position(*_mark(child), *_mark(child))
                items.append(self._value(child, (*path, index)))
            return items
        if isinstance(node, ScalarNode):
            return self._scalar(node, path)
        self._refuse_tag(node, path)

    def _entries(self, node: MappingNode, path: Path) -> Iterator[tuple[str, Node]]:
        for key_node, child in node.value:
            if not isinstance(key_node, ScalarNode) or key_node.tag != "tag:yaml.org,2002:str":
                fix = "Write a field name followed by a colon."
                if str(key_node.tag).endswith((":int", ":float")) and path:
                    fix += " In a number, write a decimal point, no comma, and no separators."
                self._refuse(key_node, path, "a key that is not a plain word", fix)
            key = str(key_node.value)
            inside = (*path, key)
            if inside in self._positions:
                _duplicate(key, inside, *_mark(key_node), first=self._positions[inside].key_line)
            # What is not there has a place in the library's eyes too: that of whatever comes next.
            empty = isinstance(child, ScalarNode) and not child.value and child.style is None
            self._positions[inside] = Position(*_mark(key_node if empty else child), *_mark(key_node))
            yield key, child

    def _scalar(self, node: ScalarNode, path: Path) -> Any:
        kind = str(node.tag).removeprefix("tag:yaml.org,2002:")
        if kind in ("str", "timestamp"):
            return str(node.value)
        if kind not in ("null", "bool", "int", "float"):
            self._refuse_tag(node, path)
        if node.style in ("'", '"', "|", ">"):
            self._refuse(node, path, f"a quoted text tagged as {kind}", "Write the value without quotes and tag.")
        try:
            return self._construct(node)
        except (ValueError, LookupError, ArithmeticError, AttributeError, TypeError):
            # More than 4300 digits, a sign without a number, "!!bool maybe": the library fails in its own ways.
            shown = str(node.value)[:80]
            self._refuse(node, path, f"{shown!r}, which is too long or no {kind}", "Write a number in the usual range.")

    def _refuse_tag(self, node: Node, path: Path) -> NoReturn:
        if isinstance(node, ScalarNode) and node.value in ("=", "<<") and node.style is None:
            fix = "Write the value that is meant, or the text in quotes."
            self._refuse(node, path, f"{node.value}, which YAML keeps for itself", fix)
        tag = str(node.tag)[:80].replace("tag:yaml.org,2002:", "!!", 1)
        self._refuse(node, path, f"the tag {tag}", "Delete the tag.")

    def _refuse(self, node: Node, path: Path, received: str, fix: str) -> NoReturn:
        line, column = _mark(node)
        raise ReadingError(
            "PS000", f"expected a plain value, received {received}.", fix, line=line, column=column, path=path
        )


def _read_json(text: str) -> Document:
    document = _JsonDocument(text)
    try:
        return document.read()
    except json.JSONDecodeError as error:
        line, column = hints.json_place(text, error)
        raise ReadingError(
            "PS000",
            f"expected JSON, received {json_problem(text, error)}.",
            hints.json_fix(text, error),
            line=line,
            column=column,
        ) from None


class _JsonDocument:
    """Walks objects and arrays itself, to know where things stand; scalars are read by the json module."""

    def __init__(self, text: str):
        self._text = text
        self._line_starts = [0, *(match.end() for match in re.finditer("\n", text))]
        self._positions: dict[Path, Position] = {}
        self._scalars = json.JSONDecoder(parse_constant=self._constant)
        self._path: Path = ()
        self._at = 0
        self._values = 0

    def read(self) -> Document:
        start = self._skip(0)
        self._positions[()] = Position(*self._place(start), *self._place(start))
        value, end = self._value(start, ())
        end = self._skip(end)
        if end != len(self._text):
            raise json.JSONDecodeError("Extra data", self._text, end)
        return Document(value, self._positions, "json")

    def _value(self, at: int, path: Path) -> tuple[Any, int]:
        if len(path) > MAX_DEPTH:
            _too_deep(*self._place(at))
        self._values += 1
        if self._values > MAX_VALUES:
            _too_many(*self._place(at))
        opening = self._text[at : at + 1]
        if opening == "{":
            return self._object(at, path)
        if opening == "[":
            return self._array(at, path)
        self._path, self._at = path, at
        try:
            value, end = self._scalars.raw_decode(self._text, at)
        except json.JSONDecodeError:
            raise
        except ValueError:  # Python refuses to read a whole number of more than 4300 digits.
            self._refuse("a number that is too long", "Write a number in the usual range.")
        return value, end

    def _object(self, at: int, path: Path) -> tuple[dict[str, Any], int]:
        values: dict[str, Any] = {}
        at = self._skip(at + 1)
        if self._text[at : at + 1] == "}":
            return values, at + 1
        while True:
            if self._text[at : at + 1] != '"':
                raise json.JSONDecodeError("Expecting property name enclosed in double quotes", self._text, at)
            key_place = self._place(at)
            key, end = self._scalars.raw_decode(self._text, at)
            inside = (*path, key)
            if key in values:
                _duplicate(key, inside, *key_place, first=self._positions[inside].key_line)
            at = self._skip(self._expect(":", self._skip(end)))
            self._positions[inside] = Position(*self._place(at), *key_place)
            values[key], end = self._value(at, inside)
            at = self._skip(end)
            if self._text[at : at + 1] == "}":
                return values, at + 1
            at = self._skip(self._expect(",", at))

    def _array(self, at: int, path: Path) -> tuple[list[Any], int]:
        values: list[Any] = []
        at = self._skip(at + 1)
        if self._text[at : at + 1] == "]":
            return values, at + 1
        while True:
            inside = (*path, len(values))
            self._positions[inside] = Position(*self._place(at), *self._place(at))
            value, end = self._value(at, inside)
            values.append(value)
            at = self._skip(end)
            if self._text[at : at + 1] == "]":
                return values, at + 1
            at = self._skip(self._expect(",", at))

    def _constant(self, name: str) -> NoReturn:
        self._refuse(name, finite_number(self._path), id="PS002", expected="a finite number")

    def _refuse(self, received: str, fix: str, *, id: str = "PS000", expected: str = "a plain value") -> NoReturn:
        line, column = self._place(self._at)
        raise ReadingError(
            id, f"expected {expected}, received {received}.", fix, line=line, column=column, path=self._path
        )

    def _expect(self, character: str, at: int) -> int:
        if self._text[at : at + 1] != character:
            raise json.JSONDecodeError(f"Expecting '{character}' delimiter", self._text, at)
        return at + 1

    def _skip(self, at: int) -> int:
        while at < len(self._text) and self._text[at] in " \t\r\n":
            at += 1
        return at

    def _place(self, at: int) -> tuple[int, int]:
        line = bisect.bisect_right(self._line_starts, at)
        return line, at - self._line_starts[line - 1] + 1


def _duplicate(key: str, path: Path, line: int, column: int, *, first: int) -> NoReturn:
    raise ReadingError(
        "PS002",
        f"expected each field once, received {key[:80]!r} a second time (first on line {first}).",
        "Keep one of the two: which one counts would depend on the reader.",
        line=line,
        column=column,
        path=path,
    )


def _too_deep(line: int | None = None, column: int | None = None) -> NoReturn:
    raise ReadingError(
        "PS000",
        f"expected at most {MAX_DEPTH} levels, received more.",
        "Is this the right file?",
        line=line,
        column=column,
    )


def _too_many(line: int, column: int) -> NoReturn:
    raise ReadingError(
        "PS000",
        f"expected at most {MAX_VALUES} values, received more.",
        "Is this the right file? A spec is about a page long.",
        line=line,
        column=column,
    )


def _mark(node: Node) -> tuple[int, int]:
    return node.start_mark.line + 1, node.start_mark.column + 1
