"""`tfdp validate`: reviews privacy specs, as a compiler does with source files."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tfdp.cli.checking.report import Report
    from tfdp.findings import Finding
    from tfdp.review.contributions import Contributions
    from tfdp.review.waivers import Waived
    from tfdp.spec import PrivacySpec, Waiver

_EXAMPLE = """Examples:

```
tfdp validate privacy.yaml
tfdp validate specs/ 'more/**/privacy*.yaml' --fail-on warning
git show HEAD:privacy.yaml | tfdp validate -
tfdp validate privacy.yaml --run run/ --data contributions.json
tfdp validate specs/ --format sarif > findings.sarif
```
"""


class OutputFormat(enum.StrEnum):
    """How findings are printed."""

    TEXT = "text"
    JSON = "json"
    GITHUB = "github"
    SARIF = "sarif"
    JUNIT = "junit"


class FailOn(enum.StrEnum):
    """The mildest finding that fails."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("validate", epilog=_EXAMPLE)(validate)


def validate(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH",
            help="Privacy specs (.yaml, .yml, .json), patterns, folders that are searched for specs, or - for standard "
            "input.",
        ),
    ],
    format: Annotated[
        OutputFormat,
        typer.Option("--format", help="text for people; json, sarif, junit for programs; github for annotations."),
    ] = OutputFormat.TEXT,
    fail_on: Annotated[FailOn, typer.Option("--fail-on", help="The mildest finding that fails.")] = FailOn.ERROR,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="FILE",
            help="Counts of the data, JSON with any of num_units, num_records, max_records_per_unit, has_user_id, "
            "duplicates, clip_norm_source.",
        ),
    ] = None,
    run: Annotated[
        list[str] | None,
        typer.Option("--run", metavar="DIR", help="Folder or ledger of a run of this spec; several share a budget."),
    ] = None,
    cache: Annotated[
        bool, typer.Option("--cache/--no-cache", help="Keep computed epsilons between calls, in XDG_CACHE_HOME.")
    ] = True,
) -> None:
    """Review privacy specs: is the claim complete, consistent and earned?

    Prints one finding per fault, with file, line and column, what was expected and what to do; `tfdp explain` says why
    it matters. Epsilon is recomputed when the noise multiplier is given. Nothing is trained and TensorFlow is not
    loaded. A YAML file may hold several specs, one a document. Exits with 1 when a finding is at least as severe as
    --fail-on.
    """
    import sys

    report = _report(paths, fail_on, data, run or [], cache=cache)
    text = _render(report, format, colour=_wants_colour(sys.stdout))
    sys.stdout.flush()
    sys.stdout.buffer.write(text.encode("utf-8"))
    sys.stdout.flush()
    raise typer.Exit(1 if report.failed else 0)


def _report(paths: Sequence[str], fail_on: str, data: str | None, runs: Sequence[str], *, cache: bool) -> Report:
    import datetime

    from tfdp.cli.checking.answers import KeptAnswers
    from tfdp.cli.checking.report import Report
    from tfdp.cli.checking.sources import collect
    from tfdp.findings import Severity
    from tfdp.review import costs
    from tfdp.review.waivers import apply_waivers, titled
    from tfdp.spec import PrivacySpec

    contributions, findings = _contributions(data)
    sources = collect(paths)
    specs: list[PrivacySpec] = []
    waived: list[Waived] = []
    idle: list[Waiver] = []
    today = datetime.datetime.now(datetime.UTC).date()
    with costs.kept_in(KeptAnswers.of_the_user() if cache else None):
        read: list[tuple[list[PrivacySpec], list[Finding]]] = []
        for source in sources:
            if source.fault is not None:
                read.append(([], [source.fault]))
                continue
            found, faults = PrivacySpec.all_from_text(source.text, source.format, source.name)
            specs += found
            read.append((found, faults))
        if runs and len(specs) != 1:
            raise typer.BadParameter(f"expected one spec with --run, received {len(specs)}.", param_hint="--run")
        for found, faults in read:
            here = [titled(fault) for fault in faults]
            for spec in found:
                judged = apply_waivers(spec, _findings(spec, contributions, runs), today)
                here += judged.findings
                waived += judged.waived
                idle += judged.idle
            findings += sorted(here, key=lambda finding: (finding.line or 0, finding.column or 0))
    count = sum(len(found) + bool(faults) for found, faults in read)
    return Report(sources, count, findings, waived, Severity(fail_on), idle)


def _findings(spec: PrivacySpec, contributions: Contributions | None, runs: Sequence[str]) -> list[Finding]:
    from tfdp.review import REVIEWERS_RULES, review

    findings = review(spec, rules=REVIEWERS_RULES)
    if contributions is not None:
        from tfdp.review.contributions import compare

        findings += compare(spec, contributions)
    if runs:
        from tfdp.card.runs import compare_runs

        findings += compare_runs(spec, runs)
    return sorted(findings, key=lambda finding: (finding.line or 0, finding.column or 0))


def _contributions(path: str | None) -> tuple[Contributions | None, list[Finding]]:
    """Counts of the data, or what is wrong with their file."""
    if path is None:
        return None, []
    from pydantic import ValidationError

    from tfdp.review.contributions import Contributions
    from tfdp.spec.documents import ReadingError
    from tfdp.spec.faults import field_findings, reading_finding
    from tfdp.spec.files import read_text
    from tfdp.spec.reading import read

    try:
        document = read(read_text(path), "json")
    except ReadingError as error:
        return None, [reading_finding(error, path)]
    try:
        return Contributions.model_validate(document.value), []
    except ValidationError as error:
        return None, field_findings(error.errors(include_url=False), Contributions, path, document)


def _render(report: Report, format: OutputFormat, *, colour: bool) -> str:
    if format is OutputFormat.TEXT:
        from tfdp.cli.checking import text

        return text.render(report, colour=colour)
    from tfdp.cli.checking import machines

    renderers = {
        OutputFormat.JSON: machines.to_json,
        OutputFormat.GITHUB: machines.to_github,
        OutputFormat.SARIF: machines.to_sarif,
        OutputFormat.JUNIT: machines.to_junit,
    }
    return renderers[format](report)


def _wants_colour(stream: object) -> bool:
    """On a terminal that has colours, unless the person who sits there has said no (no-color.org)."""
    import os

    isatty = getattr(stream, "isatty", lambda: False)
    return isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
