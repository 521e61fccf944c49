"""`tfdp init`: a first spec, from questions or from flags."""

from __future__ import annotations

import enum
import pathlib
import sys
from typing import Annotated, Any, Literal

import typer

from tfdp.cli.accounted_run import Accountant, Adjacency, Scheme

_EXAMPLE = """Examples:

```
tfdp init
tfdp init specs/privacy.yaml --unit example --description "one support ticket" --num-units 60000 --epsilon 8
tfdp init - --unit user --description "all mails of one sender" --id-field from --num-units 5000 --epsilon 4 --steps 500
```
"""
_NEXT = "Next: tfdp validate {path}, then tfdp account {path} to see how much noise it takes."


class Unit(enum.StrEnum):
    """What is protected."""

    EXAMPLE = "example"
    SEQUENCE = "sequence"
    DOCUMENT = "document"
    USER = "user"


class Method(enum.StrEnum):
    """How a unit of several records is protected."""

    NATIVE = "native"
    GROUP_PRIVACY = "group_privacy"
    USER_WISE = "user_wise_dp_sgd"


class Selection(enum.StrEnum):
    """Which records of a unit stay."""

    NONE = "none"
    RANDOM = "random"
    LONGEST = "longest"
    SHORTEST = "shortest"
    HIGHEST_PERPLEXITY = "highest_perplexity"
    LOWEST_PERPLEXITY = "lowest_perplexity"
    RANDOM_CHUNK = "random_chunk"


class Deduplication(enum.StrEnum):
    """Duplicates that were removed."""

    NONE = "none"
    EXACT = "exact"
    NEAR = "near"


class TuningKind(enum.StrEnum):
    """What the settings were chosen on."""

    NONE = "none"
    PUBLIC = "public"
    PRIVATE = "private"


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("init", epilog=_EXAMPLE)(init)


def _flag(help: str, **options: Any) -> Any:
    return typer.Option(help=help, show_default=False, **options)


def init(
    output: Annotated[str, typer.Argument(metavar="FILE", help="What to write; - prints it.")] = "privacy.yaml",
    unit: Annotated[
        Unit | None, _flag("What is hidden as a whole: example, sequence, document or user.", metavar="UNIT")
    ] = None,
    description: Annotated[str | None, _flag("The unit in the words of your data.")] = None,
    num_units: Annotated[int | None, _flag("How many units are trained on (N).", min=1, metavar="N")] = None,
    epsilon: Annotated[float | None, _flag("The claim.")] = None,
    delta: Annotated[float | None, _flag("Default: the power of ten at or below 1/(10 N).")] = None,
    adjacency: Annotated[
        Adjacency,
        typer.Option(metavar="NAME", help="How neighbours differ: add_or_remove_one, replace_one or zero_out."),
    ] = Adjacency.ADD_OR_REMOVE_ONE,
    id_field: Annotated[str | None, _flag("Field that names the unit of a record (document, user).")] = None,
    max_records_per_unit: Annotated[
        int | None, _flag("Most records of one unit, k (document, user). Default: 1.", min=1, metavar="N")
    ] = None,
    method: Annotated[
        Method | None,
        _flag("For k above 1: user_wise_dp_sgd, the default, or group_privacy; native for k = 1.", metavar="NAME"),
    ] = None,
    selection: Annotated[
        Selection | None,
        _flag(
            "Which k records stay: random, the default for k above 1, longest, ...; none refuses more.", metavar="NAME"
        ),
    ] = None,
    max_tokens_per_unit: Annotated[
        int | None,
        _flag("Most tokens of one unit in a step (user_wise_dp_sgd). Default: no limit.", min=1, metavar="N"),
    ] = None,
    num_records: Annotated[int | None, _flag("How many records there are (group_privacy).", min=1, metavar="N")] = None,
    sequence_length: Annotated[int | None, _flag("Tokens of a unit (sequence).", min=1, metavar="N")] = None,
    deduplication: Annotated[
        Deduplication | None, _flag("Duplicates that were removed: none, the default, exact or near.", metavar="KIND")
    ] = None,
    scheme: Annotated[
        Scheme, typer.Option(metavar="NAME", help="How batches are drawn: poisson, truncated_poisson or full_batch.")
    ] = Scheme.POISSON,
    batch_size: Annotated[float | None, _flag("Expected batch size. Default: N/10, at most 256.")] = None,
    truncated_batch_size: Annotated[int | None, _flag("Largest batch (truncated_poisson).", min=1, metavar="N")] = None,
    steps: Annotated[int | None, _flag("Noisy updates; or --epochs.", min=1, metavar="N")] = None,
    epochs: Annotated[float | None, _flag("Expected uses of a unit. Default: 10.")] = None,
    microbatch_size: Annotated[
        str | None, _flag("Units per forward pass, for memory; or auto: the fastest.", metavar="N")
    ] = None,
    clip_norm: Annotated[float, typer.Option(help="C.")] = 1.0,
    noise_multiplier: Annotated[float | None, _flag("sigma. Default: calibrated when training begins.")] = None,
    accountant: Annotated[
        Accountant, typer.Option(metavar="NAME", help="Who computes epsilon: pld, rdp or prv.")
    ] = Accountant.PLD,
    tuning: Annotated[
        TuningKind | None,
        _flag("What the settings were chosen on: none, public or private data. Default: not stated.", metavar="KIND"),
    ] = None,
    ask: Annotated[
        bool | None, typer.Option("--ask/--no-ask", help="Ask for what no flag gives. Default: on a terminal.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Write a commented spec to start from, after a few questions.

    What flags give is not asked. The claim itself has no default: the unit, its description, their number and epsilon
    are yours to say. The file is written only if it passes `tfdp validate` without an error.
    """
    from tfdp.spec.starting import Answers, commented_spec

    if output != "-" and pathlib.Path(output).exists() and not force:
        raise typer.BadParameter(f"Expected a new file. Received {output}, which exists: --force replaces it.")
    if steps is not None and epochs is not None:
        raise typer.BadParameter("Expected --steps or --epochs. Received both.")
    given = {
        "unit": unit, "description": description, "num_units": num_units, "epsilon": epsilon, "delta": delta,
        "id_field": id_field, "max_records_per_unit": max_records_per_unit, "method": method,
        "selection": selection, "max_tokens_per_unit": max_tokens_per_unit,
        "num_records": num_records, "sequence_length": sequence_length, "expected_batch_size": batch_size,
        "truncated_batch_size": truncated_batch_size, "steps": steps, "epochs": epochs, "tuning": tuning,
        "deduplication": deduplication,
    }  # fmt: skip
    asked = _Questions(sys.stdin.isatty() if ask is None else ask)
    answers = _answers(given, scheme.value, asked)
    text = commented_spec(
        Answers(
            **answers,
            adjacency=adjacency.value,
            clip_norm=clip_norm,
            noise_multiplier=noise_multiplier,
            microbatch_size=_microbatch_size(microbatch_size),
            scheme=scheme.value,
            accountant=accountant.value,
        )
    )
    _check(text, output)
    _write(text, output)


def _microbatch_size(given: str | None) -> int | Literal["auto"] | None:
    if given is None:
        return None
    if given == "auto":
        return "auto"
    if not given.isdecimal() or int(given) < 1:
        raise typer.BadParameter(f"Expected --microbatch-size of at least 1, or auto. Received: {given}.")
    return int(given)


class _Questions:
    """Asks, or takes the default, or collects what is missing."""

    def __init__(self, ask: bool):
        self.asks = ask
        self.missing: list[str] = []

    def about(self, name: str, given: Any, question: str, type: Any = str, default: Any = None) -> Any:
        if given is not None:
            return given.value if isinstance(given, enum.Enum) else given
        if self.asks:
            answer = typer.prompt(question, type=type, default=default, prompt_suffix=" ", err=True)
            return answer.value if isinstance(answer, enum.Enum) else answer
        if default is None:
            self.missing.append(f"--{name.replace('_', '-')}")
        return default


def _answers(given: dict[str, Any], scheme: str, ask: _Questions) -> dict[str, Any]:
    """Every answer that the flags or the user give, in the order in which they depend on each other."""
    from tfdp.spec import starting

    found: dict[str, Any] = dict.fromkeys(given)

    def about(name: str, question: str, type: Any = str, default: Any = None) -> None:
        found[name] = ask.about(name, given[name], question, type, default)

    about("unit", "What is one privacy unit?", Unit)
    about("description", "In the words of your data, a unit is:")
    about("num_units", "How many units are trained on?", int)
    about("epsilon", "Which epsilon do you claim? (8 is weak, 1 is strong)", float)
    if found["unit"] in ("document", "user") or given["id_field"] or given["max_records_per_unit"]:
        about("id_field", f"Which field of a record names its {found['unit']}?")
        about("max_records_per_unit", "How many records may one unit have? (1: join them first)", int, 1)
    k = found["max_records_per_unit"] or 1
    if k > 1 or given["method"]:
        about("method", "How is a unit protected?", Method, Method.USER_WISE.value)
    if k > 1 or given["selection"]:
        about("selection", "Which records stay of a unit that has more?", Selection, Selection.RANDOM.value)
        found["selection"] = None if found["selection"] == "none" else found["selection"]
    if found["method"] == "user_wise_dp_sgd" or given["max_tokens_per_unit"]:
        about("max_tokens_per_unit", "How many tokens may a unit give to a step? (0: no limit)", int, 0)
        found["max_tokens_per_unit"] = found["max_tokens_per_unit"] or None
    if found["method"] == "group_privacy" or given["num_records"]:
        about("num_records", "How many records may be sampled?", int)
    if found["unit"] == "sequence" or given["sequence_length"]:
        about("sequence_length", "How many tokens has a sequence?", int)
    if ask.missing:
        raise typer.BadParameter(
            f"Expected answers, and there is nobody to ask. Missing: {', '.join(ask.missing)}. Give them as flags."
        )
    units = found["num_units"]
    about("delta", "Delta?", float, starting.suggested_delta(units))
    sampled = found["num_records"] if found["method"] == "group_privacy" else units
    if scheme != "full_batch" or given["expected_batch_size"]:
        about("expected_batch_size", "Expected batch size?", float, float(starting.suggested_batch_size(sampled)))
    if scheme == "truncated_poisson" or given["truncated_batch_size"]:
        most = starting.suggested_truncation(found["expected_batch_size"], sampled)
        about("truncated_batch_size", "Largest batch?", int, most)
    found["steps"] = given["steps"]
    if given["steps"] is None:
        about("epochs", "How often is a unit used, in epochs?", float, 10.0)
    about("deduplication", "Which duplicates were removed?", Deduplication, "none")
    if ask.asks or given["tuning"]:
        about("tuning", "What were the settings chosen on, if anything?", TuningKind, "none")
    return found


def _check(text: str, output: str) -> None:
    """Stops before a spec is written that would not pass.

    Raises:
        PlanError: the answers make no valid spec.
    """
    from tfdp.errors import PlanError, SpecError
    from tfdp.findings import errors, printable
    from tfdp.review import review
    from tfdp.spec import PrivacySpec

    try:
        found = review(PrivacySpec.from_text(text, name=output))
        blocking = errors(found)
    except SpecError as error:
        blocking = list(error.findings)
    if blocking:  # their places are those of a file that is not written
        placeless = [finding.model_copy(update={"file": None, "line": None, "column": None}) for finding in blocking]
        lines = "\n  ".join(map(str, placeless))
        raise PlanError(
            f"Expected answers that make a valid spec; nothing was written. Received:\n  {lines}", placeless
        )
    for finding in found if output != "-" else ():
        typer.echo(printable(str(finding)), err=True)


def _write(text: str, output: str) -> None:
    from tfdp.files import atomic_write_text

    if output == "-":
        typer.echo(text, nl=False)
        return
    try:
        atomic_write_text(output, text)
    except OSError as error:
        typer.echo(f"tfdp: cannot write {output}: {error.strerror}.", err=True)
        raise typer.Exit(1) from None
    typer.echo(f"Wrote {output}. {_NEXT.format(path=output)}")
