"""`tfdp diff`: what a change does to privacy, for whoever reviews it."""

from __future__ import annotations

import enum
import json
import os
import pathlib
import subprocess
from typing import TYPE_CHECKING, Annotated

import typer

from tfdp.errors import CardError, SpecError

if TYPE_CHECKING:
    from tfdp.card import PrivacyCard
    from tfdp.comparison import Comparison, FileComparison
    from tfdp.spec import PrivacySpec

    _Read = list[PrivacySpec] | PrivacyCard

_EXAMPLE = """Examples:

```
tfdp diff privacy.yaml proposed.yaml
tfdp diff origin/main:privacy.yaml privacy.yaml --format markdown
tfdp diff HEAD~1:privacy.yaml HEAD:privacy.yaml --fail-on weaker
tfdp diff released/MODEL_CARD.json run/
```
"""
_CARD = "MODEL_CARD.json"
_INVALID = (SpecError, CardError)
_MOST_BYTES = 16 << 20


class DiffFormat(enum.StrEnum):
    """How the comparison is printed."""

    TEXT = "text"
    MARKDOWN = "markdown"
    JSON = "json"


class FailOn(enum.StrEnum):
    """What makes the exit code 1."""

    INCOMPARABLE = "incomparable"
    WEAKER = "weaker"
    NEVER = "never"


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("diff", epilog=_EXAMPLE)(diff)


def diff(
    old: Annotated[str, typer.Argument(metavar="OLD", help="A spec, a card or a run; or REV:PATH from git.")],
    new: Annotated[str, typer.Argument(metavar="NEW", help="The same kind of thing, after the change.")],
    format: Annotated[
        DiffFormat, typer.Option("--format", help="text for people, markdown for a comment, json for programs.")
    ] = DiffFormat.TEXT,
    fail_on: Annotated[
        FailOn,
        typer.Option(
            "--fail-on",
            help="incomparable: unless privacy is known to be as strong. weaker: when any change is weaker. "
            "never: only tell.",
        ),
    ] = FailOn.INCOMPARABLE,
) -> None:
    """Compare two privacy specs, or two model cards: did privacy become weaker, and why?

    The unit, the adjacency and the sampler are compared before delta, and delta before epsilon: a smaller epsilon of
    another unit is not progress. Where the noise is given, what the mechanism costs is computed for both. Exits with 1
    when privacy became weaker or cannot be compared, with 0 when it is at least as strong, with 2 for a wrong call. A
    file that is not valid cannot be compared: 1, whatever --fail-on says.

    Of a YAML file with several specs each is compared with what became of it: equal ones wherever they stand, the
    others in their order. A spec that was removed is weaker, one that was added is incomparable.

    REV:PATH is read from git as `git show` would, without touching the working tree. A file of that name comes first.
    """
    one, other = _read_or_error(old), _read_or_error(new)
    if isinstance(one, _INVALID) or isinstance(other, _INVALID):
        errors = {side: read for side, read in (("old", one), ("new", other)) if isinstance(read, _INVALID)}
        _refuse(old, new, errors, format)
        raise typer.Exit(1)
    comparison = _compare(old, one, new, other)
    failed = fails(comparison, fail_on)
    match format:
        case DiffFormat.JSON:
            report = {**comparison.to_dict(), "failed": failed}
            typer.echo(json.dumps(report, indent=2, allow_nan=False))
        case DiffFormat.MARKDOWN:
            from tfdp.comparison import render_markdown

            typer.echo(render_markdown(comparison), nl=False)
        case DiffFormat.TEXT:
            _print(comparison)
    raise typer.Exit(1 if failed else 0)


def fails(comparison: Comparison | FileComparison, fail_on: FailOn) -> bool:
    """Whether the exit code is 1."""
    from tfdp.comparison import Direction

    if fail_on is FailOn.NEVER:
        return False
    if comparison.having(Direction.WEAKER):
        return True
    return fail_on is FailOn.INCOMPARABLE and comparison.verdict is Direction.INCOMPARABLE


def _read_or_error(name: str) -> _Read | SpecError | CardError:
    try:
        return _read(name)
    except _INVALID as error:
        return error


def _refuse(old: str, new: str, errors: dict[str, SpecError | CardError], format: DiffFormat) -> None:
    """Says that a file is not valid in the format that was asked for; in text, on stderr as for any other error."""
    from tfdp.comparison import Direction, render_invalid

    if format is DiffFormat.TEXT:
        raise next(iter(errors.values()))
    found = {side: [line.strip() for line in str(error).splitlines()] for side, error in errors.items()}
    if format is DiffFormat.MARKDOWN:
        typer.echo(render_invalid(old, new, found), nl=False)
        return
    kind = "card" if any(isinstance(error, CardError) for error in errors.values()) else "spec"
    report = {"kind": kind, "old": old, "new": new, "verdict": Direction.INCOMPARABLE.value, "changes": []}
    typer.echo(json.dumps({**report, "invalid": found, "failed": True}, indent=2))


def _compare(old: str, one: _Read, new: str, other: _Read) -> Comparison | FileComparison:
    if isinstance(one, list) and isinstance(other, list):
        from tfdp.comparison import compare_files

        return compare_files(one, other, old_name=old, new_name=new)
    if not isinstance(one, list) and not isinstance(other, list):
        from tfdp.comparison.cards import compare_cards

        return compare_cards(one, other, old_name=old, new_name=new)
    kinds = ["a spec" if isinstance(side, list) else "a card" for side in (one, other)]
    raise typer.BadParameter(f"Expected two specs or two cards. Received: {kinds[0]} and {kinds[1]}.")


def _read(name: str) -> _Read:
    """The specs of a file, or a card."""
    path = pathlib.Path(name)
    if path.is_dir():
        path = path / _CARD
        if not path.is_file():
            raise typer.BadParameter(f"Expected a run with a {_CARD}, or a file. Received the directory {name}.")
    if not path.exists() and ":" in name:
        return _parsed(_from_git(name), name)
    if not path.exists():
        raise typer.BadParameter(f"Expected a file, or REV:PATH such as main:privacy.yaml. Received: {name!r}, absent.")
    if _is_card_name(path.name):
        from tfdp.card import load_card

        return load_card(path)
    from tfdp.spec import PrivacySpec

    return PrivacySpec.all_from_file(path)


def _is_card_name(name: str) -> bool:
    """By its name: what a file says must not decide how strictly it is read."""
    return name.endswith((_CARD, ".card.json"))


def _parsed(content: bytes, name: str) -> _Read:
    """Reads what git holds from a file of that name, so that it is read like any other."""
    import tempfile

    base = name.rpartition(":")[2].rpartition("/")[2] or "spec"
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / base
        path.write_bytes(content)
        try:
            return _read(str(path))
        except _INVALID as error:
            raise type(error)(str(error).replace(str(path), name)) from None


def _from_git(name: str) -> bytes:
    """The content of REV:PATH."""
    revision = name.partition(":")[0]
    if not revision or revision.startswith("-"):
        raise typer.BadParameter(f"Expected a file, or REV:PATH such as main:privacy.yaml. Received: {name!r}.")
    size = _git("cat-file", "-s", name, of=name)
    if int(size) > _MOST_BYTES:
        raise typer.BadParameter(f"Expected a file of at most {_MOST_BYTES} bytes. Received: {name!r}, {int(size)}.")
    return _git("cat-file", "blob", name, of=name)


def _git(*arguments: str, of: str) -> bytes:
    environment = {**os.environ, "LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0"}
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, check=False, env=environment)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"Expected git, to read {of!r}. Received: {error}.") from None
    if done.returncode != 0:
        from tfdp.findings import printable

        said = printable(done.stderr.decode(errors="replace").strip())
        raise typer.BadParameter(f"Expected a file, or REV:PATH that git knows. Received: {of!r}: {said}")
    return done.stdout


def _print(comparison: Comparison | FileComparison) -> None:
    from rich.console import Console
    from rich.text import Text

    from tfdp.comparison import Direction, render_text

    colours = {
        Direction.WEAKER: "bold red",
        Direction.INCOMPARABLE: "bold yellow",
        Direction.STRONGER: "bold green",
        Direction.UNCHANGED: "dim",
    }
    console = Console(soft_wrap=True, highlight=False)
    *lines, verdict = render_text(comparison).splitlines()
    for line in lines:
        label = line.partition(":")[0]
        text = Text(line, style="" if not line.startswith("    ") else "dim")
        if label in set(Direction):
            text.stylize(colours[Direction(label)], 0, len(label))
        console.print(text)
    console.print(Text(verdict, style=colours[comparison.verdict]))
