"""From the arguments of `tfdp validate` to the texts of specs: files, globs, folders, standard input."""

from __future__ import annotations

import glob
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tfdp.findings import Finding, Severity
from tfdp.spec.documents import Format, ReadingError
from tfdp.spec.faults import reading_finding
from tfdp.spec.files import decode, format_of, read_text

STDIN = "<stdin>"
MAX_FILES = 20_000  # in one folder: beyond, something else than a repository was named
_SKIPPED = frozenset({"node_modules", "__pycache__", "venv", "site-packages"})
_SECTIONS = ("schema_version", "claim", "data", "mechanism", "sampling")
_SECTION = re.compile(r'^[{\s"\']*(schema_version|claim|data|mechanism|sampling)["\']?\s*:', re.MULTILINE)


@dataclass(frozen=True)
class Source:
    """One file: its text, or what keeps it from being read."""

    name: str
    text: str = ""
    format: Format = "yaml"
    fault: Finding | None = None


def collect(arguments: Sequence[str]) -> list[Source]:
    """Every spec that the arguments name, each once, in their order.

    A folder is searched for files that are privacy specs; a file that is named is one, whatever it holds. An argument
    that finds nothing is a fault: a check that looks at nothing must not pass.
    """
    found: dict[str, Source] = {}
    for argument in arguments:
        for source in _expand(argument):
            found.setdefault(source.name, source)
    return list(found.values())


def _expand(argument: str) -> Iterator[Source]:
    if argument == "-":
        yield _standard_input()
    elif os.path.isdir(argument):
        yield from _folder(argument)
    elif os.path.lexists(argument) or not glob.has_magic(argument):
        yield _file(argument)
    else:
        names = sorted(glob.glob(argument, recursive=True))
        for name in names:
            yield from _folder(name) if os.path.isdir(name) else (_file(name),)
        if not names:
            yield _fault(argument, "expected files that match, received none.", "Check the pattern.")


def _file(name: str) -> Source:
    try:
        text = read_text(name)
        format = format_of(name)
        if format is None:
            message = "expected a file named .yaml, .yml or .json, received another name."
            raise ReadingError("PS000", message, "Rename it.")
        return Source(name, text, format)
    except ReadingError as error:
        return Source(name, fault=reading_finding(error, name))


def _standard_input() -> Source:
    try:
        text = decode(sys.stdin.buffer)
    except ReadingError as error:
        return Source(STDIN, fault=reading_finding(error, STDIN))
    return Source(STDIN, text, "json" if text.lstrip("\ufeff \t\r\n").startswith(("{", "[")) else "yaml")


def _folder(folder: str) -> Iterator[Source]:
    found = False
    seen = 0
    for above, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _SKIPPED)
        for name in sorted(names):
            if format_of(name) is None or name.startswith("."):
                continue
            seen += 1
            if seen > MAX_FILES:
                fix = "Name the folder that holds the specs."
                yield _fault(folder, f"expected at most {MAX_FILES} YAML and JSON files, received more.", fix)
                return
            source = _file(os.path.join(above, name))
            if _is_spec(source):
                found = True
                yield source
    if not found:
        fix = "Check the path; files elsewhere can be named one by one."
        yield _fault(folder, "expected a folder with a privacy spec in it, received one without.", fix)


def _is_spec(source: Source) -> bool:
    """Whether a file that nobody named is a privacy spec, as far as its first level tells.

    One that is broken must not slip through: a name that begins with "privacy" is enough, and so are two of the
    sections.
    """
    if os.path.basename(source.name).lower().startswith("privacy"):
        return "privacy-spec" not in source.name or not _is_schema(source.text)
    if source.fault is not None:
        return False
    if source.format == "json":
        try:
            values = json.loads(source.text)
        except (ValueError, RecursionError):
            return len(set(_SECTION.findall(source.text))) > 1
        known = [name for name in _SECTIONS if name in values] if isinstance(values, dict) else []
        return len(known) > 1 and "provenance" not in values and "$schema" not in values  # a model card, a schema
    top = {match[1] for match in _SECTION.finditer(source.text) if not match[0][0].isspace() or match[0][0] == "\n"}
    return len(top) > 1


def _is_schema(text: str) -> bool:
    return '"$schema"' in text and '"$id"' in text


def _fault(name: str, message: str, fix: str) -> Source:
    return Source(
        name,
        fault=Finding(id="PS000", severity=Severity.ERROR, where="spec", message=message, fix=fix, file=name),
    )
