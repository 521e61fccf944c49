"""The table of findings as text for a terminal, and as the page in examples/findings.md."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from typing import Any

from tfdp.review.catalogue import BASE, CATALOGUE, SOURCES, Entry

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
        *(["\n".join(["To waive it:", *(f"    {line}" for line in _waiver(entry))])] if entry.waivable else []),
        "\n".join(["Example:", *(f"    {line}" for line in _example(entry))]),
    ]
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
            f"*Told from:* {sources}. {waiver}\n\n*Example:*\n\n" + "\n".join(_fenced(entry))
        )
    return "\n\n".join(parts) + "\n"


def example_values(entry: Entry, base: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the change of an example."""
    values = copy.deepcopy(dict(base))
    for path, value in entry.example.items():
        *sections, name = path.split(".")
        section = values
        for part in sections:
            section = section[part]
        if value is ...:
            del section[name]
        else:
            section[name] = value
    return values


def _waiver(entry: Entry) -> Iterator[str]:
    yield "waivers:"
    yield f"  - finding: {entry.id}"
    yield "    reason: why it is acceptable here"
    yield "    owner: who answers for it"
    yield "    expires: YYYY-MM-DD      # the last day"


def _fenced(entry: Entry) -> Iterator[str]:
    if not entry.example and not entry.data:
        yield entry.situation
        return
    yield "```yaml"
    yield from _example(entry)
    yield "```"


def _example(entry: Entry) -> Iterator[str]:
    for path, value in entry.example.items():
        yield f"# {path} is not there" if value is ... else f"{path}: {json.dumps(value)}"
    if entry.data:
        yield f"# with --data: {json.dumps(dict(entry.data))}"
    if entry.situation:
        yield entry.situation
