"""JSON to plain values with their places."""

from __future__ import annotations

import bisect
import json
import re
from typing import Any, NoReturn

from tfdp.spec import hints
from tfdp.spec.documents import (
    MAX_DEPTH,
    MAX_VALUES,
    Document,
    Path,
    Position,
    ReadingError,
    duplicate,
    finite_number,
    too_deep,
    too_many,
)
from tfdp.spec.notation import json_problem


def read_json(text: str) -> Document:
    """The one document of a text.

    Raises:
        ReadingError: at the first fault.
    """
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
            too_deep(*self._place(at))
        self._values += 1
        if self._values > MAX_VALUES:
            too_many("values", MAX_VALUES, *self._place(at))
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
                duplicate(key, inside, *key_place, first=self._positions[inside].key_line)
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
