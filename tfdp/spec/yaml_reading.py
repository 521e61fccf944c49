"""YAML to plain values with their places, from the node tree of ruamel.yaml."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NoReturn

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import AliasEvent, CollectionEndEvent, CollectionStartEvent, DocumentStartEvent, NodeEvent
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from tfdp.spec import hints
from tfdp.spec.documents import (
    MAX_DEPTH,
    MAX_DOCUMENTS,
    MAX_VALUES,
    START,
    Document,
    Path,
    Position,
    ReadingError,
    duplicate,
    numbered,
    too_deep,
    too_many,
)
from tfdp.spec.notation import yaml_problem


def read_yaml(text: str) -> list[Document | ReadingError]:
    """Every document of a text; a fault within one stands in its place.

    Raises:
        ReadingError: the text cannot be cut into documents.
    """
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
        if fix.startswith(hints.SPACE):
            problem = "no space after the colon"
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
        raise ReadingError("PS000", "expected a privacy spec, received only comments.", START)
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
            if len(separators) > MAX_DOCUMENTS:
                too_many("documents", MAX_DOCUMENTS, event.start_mark.line + 1, event.start_mark.column + 1)
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
            too_deep(event.start_mark.line + 1, event.start_mark.column + 1)
        if values > MAX_VALUES:
            too_many("values", MAX_VALUES, event.start_mark.line + 1, event.start_mark.column + 1)
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
            too_deep(*_mark(node))
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
                duplicate(key, inside, *_mark(key_node), first=self._positions[inside].key_line)
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


def _mark(node: Node) -> tuple[int, int]:
    return node.start_mark.line + 1, node.start_mark.column + 1
