"""Fields that the spec does not have: which one was meant, where it belongs, and what stands there already."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import BaseModel

from tfdp.findings import printable
from tfdp.spec.documents import Document, Path, dotted, held, holds
from tfdp.spec.hints import SPACE, without_space
from tfdp.spec.naming import all_fields, meant, plain, section
from tfdp.spec.notation import foreign_space, plain_space, snippet
from tfdp.spec.samples import line

_LONGEST = 200  # characters of a name or of a value, and bits of a number: they can be as long as the file
_MOST = 10  # entries of a list that is written out in a remedy
# What other libraries set in a field of its own, and here follows from another one.
_FOLLOWS = {
    "reduction": "Whether records are averaged before they are clipped follows from method: user_wise_dp_sgd averages "
    "them, group_privacy clips each. Delete it.",
}


def targets(model: type[BaseModel], path: Path, document: Document) -> list[Path]:
    """The fields that an unknown one may stand for."""
    name = str(path[-1])[:_LONGEST]
    if (glued := _glued(model, path)) is not None:
        return [(*path[:-1], glued[0])]
    if (found := foreign_space(name)) is not None:
        return meant(model, (*path[:-1], "".join(name[: found[0]] + name[found[0] + 1 :]).strip()))
    if plain(name) in _FOLLOWS:
        return []
    return _of_dotted(model, path, tuple(name.split("."))) if "." in name else meant(model, path)


def elsewhere(unknown: Iterable[tuple[Path, list[Path]]], document: Document) -> dict[Path, list[Any]]:
    """What the author has written of fields in another place or by another name: the field, and its values."""
    found: dict[Path, list[Any]] = {}
    for path, meanings in unknown:
        value = held(document.value, path)
        if len(meanings) == 1 and value is not None and _writable(value):
            values = found.setdefault(meanings[0], [])
            if value not in values:
                values.append(value)
    return found


def remedy(model: type[BaseModel], path: Path, meanings: list[Path], document: Document) -> str:
    """What to do about an unknown field that stands for one of `meanings`."""
    name = str(path[-1])[:_LONGEST]
    if (glued := _glued(model, path)) is not None:
        if document.format == "json":
            return f"Write {snippet(*glued, document.format)}"
        return f"{SPACE}{glued[0]}: {glued[1]}"
    if (found := foreign_space(name)) is not None:
        return plain_space(name, *found)
    if plain(name) in _FOLLOWS:
        return _FOLLOWS[plain(name)]
    if not meanings:
        return known(model, path)
    if len(meanings) > 1:
        return f"Did you mean {' or '.join(f'{each[-1]} {_place(each[:-1])}' for each in meanings)}?"
    (target,) = meanings
    same_name, same_section = target[-1] == name, target[:-1] == path[:-1]
    guess = "" if "." in name and str(target[-1]) == name.rpartition(".")[2] else f"Did you mean {target[-1]}?"
    if same_name and not same_section:
        guess = f"{name} stands {_place(path[:-1], 'under')} and belongs {_place(target[:-1])}"
    here = held(document.value, path)
    if _writable(here) and (others := list(_others(target, here, document))):
        values = " or ".join(printable(line(str(target[-1]), value, document.format)) for value in (*others, here))
        return f"{_sentence(guess)}Which is meant, {values}? Keep that one {_place(target[:-1])}.".lstrip()
    if holds(document.value, target):
        if same_name:
            return f"{guess}. It is there already: delete it here."
        there = "" if same_section else f", {_place(target[:-1])}"
        return f"{guess} It is there already{there}: delete {printable(name)}.".lstrip()
    if same_name:
        return f"{guess}: move it {_how(target[:-1], document)}."
    if same_section:
        return guess
    return f"{guess} {_write(target, here, document)}".lstrip()


def known(model: type[BaseModel], path: Path) -> str:
    """The fields that could stand where an unknown one does."""
    here = section(model, path[:-1])
    return f"Known here: {', '.join(here.model_fields)}." if here else "Delete it."


def _glued(model: type[BaseModel], path: Path) -> tuple[str, str] | None:
    """Key and value of a name such as "delta:1e-6"."""
    here, glued = section(model, path[:-1]), without_space(str(path[-1])[:_LONGEST])
    return glued if here is not None and glued is not None and glued[0] in here.model_fields else None


def _of_dotted(model: type[BaseModel], path: Path, parts: Path) -> list[Path]:
    """The fields of a name such as claim.epsilon, which messages and other tools write for the field of a section."""
    if ends := [field for field in all_fields(model) if field[-len(parts) :] == parts]:
        return ends
    for whole in ((*path[:-1], *parts), parts):
        if section(model, whole[:-1]) is not None:
            return meant(model, whole)
    return meant(model, (*path[:-1], parts[-1]))


def _others(target: Path, here: Any, document: Document) -> Iterator[Any]:
    """Values of the same field that stand in its own place, or elsewhere, and differ."""
    there = [held(document.value, target)] if holds(document.value, target) else []
    for value in (*there, *document.elsewhere.get(target, ())):
        if value != here and _writable(value):
            yield value


def _write(target: Path, value: Any, document: Document) -> str:
    """The field as it is written in its own section."""
    where = f"In {dotted(target[:-1])}" if target[:-1] else "At the top level"
    if not _writable(value):
        return f"Move it {_how(target[:-1], document)}, as {target[-1]}."
    return f"{where}, write: {line(str(target[-1]), value, document.format)}"


def _writable(value: Any) -> bool:
    """Whether a value can be written out in a message: short, and of a kind that a text can hold."""
    if isinstance(value, list | tuple):
        return len(value) <= _MOST and all(map(_writable, value))
    if isinstance(value, int):
        return value.bit_length() <= _LONGEST
    return value is None or isinstance(value, float) or (isinstance(value, str) and len(value) <= _LONGEST)


def _how(section: Path, document: Document) -> str:
    if document.format == "json":
        return f"into the braces of {dotted(section)}" if section else "out of the braces"
    return "there" if section else "out: no indentation"


def _place(section: Path, word: str = "in") -> str:
    return f"{word} {dotted(section)}" if section else "at the top level"


def _sentence(text: str) -> str:
    return text and f"{text} " if text.endswith("?") or not text else f"{text}. "
