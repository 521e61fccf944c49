"""The table of findings as text for a terminal, and as the page in examples/findings.md."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from tfdp.review.catalogue import BASE, CATALOGUE, SOURCES, Entry
from tfdp.review.examples import EXAMPLES, Case, Example

Block = tuple[str, str, list[str]]
_WIDTH = 100

_HEAD = """\
# Findings

Every finding that tfdp can give. `tfdp explain PS010` prints one of them; `tfdp explain --page` has written this page.

A warning or a note can be waived, in the spec itself and for a time:

```yaml
waivers:
  - finding: PS008
    reason: each row of the census is another person, equal answers or not
    owner: Ada Lovelace
    expires: 2027-06-30      # the last day
```

No error can be waived. Most of them say that the claim is not true, which no signature changes; the cap of a budget
and the attack that a spec requires are fields of the spec, and changing the field is the reviewed way. An expired
waiver is an error, one without an owner excuses nothing.

`--data contributions.json` compares a spec with counts of the data, made by whoever may see them. All is optional:

```json
{
  "num_units": 60000,
  "num_records": 240173,
  "max_records_per_unit": 311,
  "has_user_id": true,
  "duplicates": 0,
  "clip_norm_source": "default"
}
```

max_records_per_unit is that of the largest unit, or user, before anything is left out; duplicates are records equal to
an earlier one; clip_norm_source is default, public or private. The counts are facts about private data: keep the file
where the data are.

The examples change this spec, which has no finding:

```yaml
"""


def entry_text(entry: Entry) -> str:
    """One entry for a terminal."""
    parts = [
        f"{entry.id} ({' or '.join(entry.severities)}): {entry.title}",
        f"Why it matters: {entry.why}",
        f"What to do: {entry.fix}",
        f"Told from: {', '.join(SOURCES[source] for source in entry.sources)}.",
        f"Waiver: {'possible' if entry.waivable else 'not possible'}.",
    ]
    if entry.waivable:
        parts.append("\n".join(["To waive it:", *(f"    {line}" for line in _waiver(entry))]))
    for case in EXAMPLES[entry.id]:
        for title, blocks in _both(case):
            lines = [line for label, _, code in blocks for line in (label, *code) if line]
            parts.append("\n".join([f"{title}:", *(f"    {line}" for line in lines)]))
    return "\n\n".join(parts) + "\n"


def list_text() -> str:
    """One line an entry."""
    return "".join(f"{entry.id}  {entry.severities[0]:<7}  {entry.title}\n" for entry in CATALOGUE.values())


def page() -> str:
    """The Markdown page of all findings."""
    parts = [f"{_HEAD}{BASE}```\n", "| id | severity | what is wrong |\n|---|---|---|"]
    for entry in CATALOGUE.values():
        anchor = f"[{entry.id}](#{entry.id.lower()})"
        parts[-1] += f"\n| {anchor} | {', '.join(entry.severities)} | {entry.title} |"
    for entry in CATALOGUE.values():
        sources = ", ".join(SOURCES[source] for source in entry.sources)
        waiver = "Can be waived." if entry.waivable else "Cannot be waived."
        parts.append(
            f"## {entry.id}\n\n**{entry.title}** {entry.why}\n\n*What to do:* {entry.fix}\n\n"
            f"*Told from:* {sources}. {waiver}"
        )
        for case in EXAMPLES[entry.id]:
            for title, blocks in _both(case):
                parts.append(f"*{title}:*")
                for label, language, code in blocks:
                    parts += [label] if label else []
                    parts += ["\n".join([f"```{language}", *code, "```"])] if code else []
    return "\n\n".join(parts) + "\n"


def with_changes(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of nested values with dotted fields replaced; `...` deletes one."""
    changed = copy.deepcopy(dict(values))
    for path, value in changes.items():
        *sections, name = path.split(".")
        section = changed
        for part in sections:
            section = section.setdefault(part, {})
        if value is ...:
            del section[name]
        else:
            section[name] = value
    return changed


def nested(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted fields as sections within sections."""
    return with_changes({}, fields)


def _waiver(entry: Entry) -> Iterator[str]:
    yield "waivers:"
    yield f"  - finding: {entry.id}"
    yield "    reason: why it is acceptable here"
    yield "    owner: who answers for it"
    yield "    expires: YYYY-MM-DD      # the last day"


def _both(case: Case) -> Iterator[tuple[str, list[Block]]]:
    """The example, and of the mended one what is different in it."""
    article = "an" if case.severity == "error" else "a"
    triggers, mended = list(_blocks(case.triggers)), list(_blocks(case.mended))
    yield f"Example, {article} {case.severity} told from {SOURCES[case.source]}", triggers
    yield "Mended", [block for block in mended if block not in triggers] or mended


def _blocks(example: Example) -> Iterator[Block]:
    """What an example consists of: a sentence before it, the language of its code, and the lines."""
    if example.spec:
        yield "", "yaml", list(_yaml(example.spec))
    if example.data:
        yield "The file that `--data` names:", "json", [json.dumps(dict(example.data))]
    for ran in example.runs:
        steps = "One step has run" if ran.steps == 1 else f"{ran.steps} steps have run"
        steps += f", with seed={ran.seed}" if ran.seed is not None else ""
        if ran.public_look is not None:
            steps += f"; before, tfdp.suggest_clip_norm was called with public={ran.public_look}"
        if ran.spec:
            yield f"{steps}; the ledger was begun under a spec with:", "yaml", list(_yaml(ran.spec))
        elif ran.header:
            yield f"{steps}; in the first line of the ledger stands:", "json", [json.dumps(nested(ran.header))]
        else:
            yield f"{steps}, under this spec.", "", []
    for name, values in example.export.items():
        yield "", "python", [*_assigned(name, values), f'tfdp.export(model, "run/", {name}={name})']
    if example.card:
        yield "In MODEL_CARD.json stands:", "json", [json.dumps(nested(example.card))]
    for name in example.absent:
        yield f"run/{name} is not there.", "", []
    if example.code:
        yield "", "python", example.code.splitlines()
    if example == Example():
        yield "What the training and the export left, unchanged.", "", []


def _yaml(fields: Mapping[str, Any]) -> Iterator[str]:
    """Fields in their sections, as they are copied into a spec."""
    first = {path: at for at, path in reversed(list(enumerate(path.partition(".")[0] for path in fields)))}
    above: list[str] = []
    for path in sorted(fields, key=lambda path: first[path.partition(".")[0]]):
        *sections, name = path.split(".")
        same = 0
        while same < min(len(sections), len(above)) and sections[same] == above[same]:
            same += 1
        for depth in range(same, len(sections)):
            yield f"{'  ' * depth}{sections[depth]}:"
        above, indent, value = sections, "  " * len(sections), fields[path]
        yield f"{indent}# {name} is not there" if value is ... else f"{indent}{name}: {json.dumps(value)}"


def _assigned(name: str, values: Mapping[str, Any]) -> list[str]:
    """Python that gives a dict a name, a key a line."""
    if not values:
        return [f"{name} = {{}}"]
    inside = [line for key, value in values.items() for line in _entry(f"{_literal(key)}: ", value, "    ")]
    return [f"{name} = {{", *inside, "}"]


def _entry(before: str, value: Any, indent: str) -> Iterator[str]:
    """One line, or one for each value inside where it would be too long."""
    if len(text := f"{indent}{before}{_literal(value)},") <= _WIDTH or not isinstance(value, dict | list):
        yield text
        return
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    inside = [(f"{_literal(key)}: ", value[key]) for key in value] if opening == "{" else [("", each) for each in value]
    yield f"{indent}{before}{opening}"
    for each in inside:
        yield from _entry(*each, f"{indent}    ")
    yield f"{indent}{closing},"


def _literal(value: Any) -> str:
    """A value as Python writes it, texts in double quotes."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(key)}: {_literal(inside)}" for key, inside in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return json.dumps(value) if isinstance(value, str) else repr(value)
