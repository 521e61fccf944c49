"""PrivacySpec: the reviewed statement of a privacy claim, and of the mechanism that is to earn it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, ValidationError

from tfdp.errors import SpecError
from tfdp.files import sha256_text
from tfdp.findings import Finding, Severity
from tfdp.spec import faults
from tfdp.spec.cuts import find_cuts
from tfdp.spec.documents import Document, Format, Path, ReadingError, dotted, holds
from tfdp.spec.fields import (
    Accountant,
    Budget,
    Claim,
    Data,
    Evaluation,
    Mechanism,
    Sampling,
    Section,
    Tuning,
    Waiver,
)
from tfdp.spec.files import format_of, read_text
from tfdp.spec.notation import snippet
from tfdp.spec.reading import read, read_all
from tfdp.spec.samples import line, sample, such_as
from tfdp.spec.schedule import Schedule, schedule

_MOST_TOLD = 30  # faults in the text of an error, which holds all of them


class PrivacySpec(Section):
    """A differential privacy claim, and the training that is to earn it.

    Read it with `from_file`, `from_text` or `from_dict`; each raises `SpecError` with one finding per fault. A spec
    that can be read is well formed, no more: `tfdp.review` says whether the claim is earned.
    """

    schema_version: Literal["1.0"]
    """Version of this format."""
    claim: Claim
    """What is promised."""
    data: Data
    """Public facts about the private data."""
    mechanism: Mechanism
    """Clipping and noise."""
    sampling: Sampling
    """How batches are drawn, and how many."""
    accountant: Accountant = Accountant()
    """Who computes epsilon."""
    tuning: Tuning | None = None
    """How hyperparameters were chosen. Absent: not stated."""
    evaluation: Evaluation | None = None
    """What the model card has to show."""
    budget: Budget | None = None
    """What all releases from one data set may spend together."""
    waivers: Annotated[tuple[Waiver, ...], Field(strict=False)] = ()
    """Findings that somebody accepts."""

    _file: str | None = PrivateAttr(default=None)
    _document: Document = PrivateAttr(default_factory=lambda: Document({}))

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> PrivacySpec:
        """Reads a .yaml, .yml or .json file.

        Raises:
            SpecError: the file cannot be read, or is not a valid spec.
        """
        text, format, name = _text_of(path)
        return cls.from_text(text, format=format, name=name)

    @classmethod
    def all_from_file(cls, path: str | os.PathLike[str]) -> list[PrivacySpec]:
        """Reads every spec of a file, of which each YAML document is one.

        Raises:
            SpecError: the file cannot be read, or one of them is not a valid spec.
        """
        text, format, name = _text_of(path)
        specs, findings = cls.all_from_text(text, format, name)
        if findings:
            raise _invalid(name, findings)
        return specs

    @classmethod
    def all_from_text(
        cls, text: str, format: Format = "yaml", name: str = "<text>"
    ) -> tuple[list[PrivacySpec], list[Finding]]:
        """Every spec of a text of one or more YAML documents, and the faults of those that are not valid."""
        specs: list[PrivacySpec] = []
        findings: list[Finding] = []
        try:
            documents = read_all(text, format)
        except ReadingError as error:
            return [], [faults.reading_finding(error, name)]
        cuts = find_cuts(documents, [key for key, field in cls.model_fields.items() if field.is_required()])
        findings += [cut.finding(name) for cut in cuts]
        for document in documents:
            if isinstance(document, ReadingError):
                findings.append(faults.reading_finding(document, name))
                continue
            try:
                specs.append(cls._validated(document, name))
            except SpecError as error:
                findings += [
                    finding for finding in error.findings if not any(cut.explains(document, finding) for cut in cuts)
                ]
        return specs, findings

    @classmethod
    def from_text(cls, text: str, format: Format = "yaml", name: str = "<text>") -> PrivacySpec:
        """Reads YAML or JSON; `name` stands in messages where a file name would.

        Raises:
            SpecError: the text is not a valid spec.
        """
        try:
            document = read(text, format)
        except ReadingError as error:
            raise _invalid(name, [faults.reading_finding(error, name)]) from None
        return cls._validated(document, name)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], name: str | None = None) -> PrivacySpec:
        """Takes plain values, such as those that `to_dict` gives.

        Raises:
            SpecError: the values are not a valid spec.
        """
        return cls._validated(Document(values), name)

    @classmethod
    def _validated(cls, document: Document, name: str | None) -> PrivacySpec:
        try:
            spec = cls.model_validate(document.value)
        except ValidationError as error:
            details = error.errors(include_url=False)
            raise _invalid(name, faults.field_findings(details, cls, name, document)) from None
        if findings := list(faults.placeholders(document.value, name, document)):
            raise _invalid(name, findings)
        spec._file, spec._document = name, document
        return spec

    @property
    def digest(self) -> str:
        """Hexadecimal SHA-256 of the canonical JSON: the same for every way of writing the same spec."""
        return sha256_text(json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"), allow_nan=False))

    @property
    def schedule(self) -> Schedule:
        """The sampling section in numbers.

        Raises:
            ValueError: the sampling section says too little or too much (PS014 or PS005 of `tfdp.review`).
        """
        return schedule(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values of every field, defaults included."""
        return self.model_dump(mode="json")

    def such_as(self, path: Path, value: Any = ...) -> str:
        """A field as a line that can be copied into the file; without a value with one of the examples."""
        document = self._document
        text = sample(type(self), path, document) if value is ... else line(str(path[-1]), value, document.format)
        return such_as(document, path[:-1], text or str(path[-1]))

    def snippet(self, name: str, value: str) -> str:
        """A field and its value in the notation of the file, for a remedy."""
        return snippet(name, value, self._document.format)

    def change(self, path: Path, value: str) -> str:
        """A field of a section and its new value, for a remedy: "in claim, write adjacency: zero_out"."""
        return f"in {dotted(path[:-1])}, write {self.snippet(str(path[-1]), value)}"

    def states(self, path: Path) -> bool:
        """Whether the file itself has a field, or a default stands in for it."""
        return holds(self._document.value, path)

    def finding(self, id: str, severity: Severity, path: Path, message: str, fix: str) -> Finding:
        """A finding at a field of this spec, with its place in the file."""
        at, column = faults.place(self._document.positions, path)
        return Finding(
            id=id,
            severity=severity,
            where=dotted(path),
            message=self._document.named(message),
            fix=fix,
            file=self._file,
            line=at,
            column=column,
        )

    def __eq__(self, other: object) -> bool:
        """Equal when every field is: where a spec was read from does not matter."""
        return self.to_dict() == other.to_dict() if isinstance(other, PrivacySpec) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)


def _text_of(path: str | os.PathLike[str]) -> tuple[str, Format, str]:
    name = os.fspath(path)
    try:
        text, format = read_text(name), format_of(name)
        if format is None:
            message = "expected a file named .yaml, .yml or .json, received another name."
            raise ReadingError("PS000", message, "Rename it.")
    except ReadingError as error:
        raise _invalid(name, [faults.reading_finding(error, name)]) from None
    return text, format, name


def _invalid(name: str | None, findings: list[Finding]) -> SpecError:
    count = "1 fault" if len(findings) == 1 else f"{len(findings)} faults"
    lines = [f"expected a valid privacy spec, received {count} in {name or 'the values given'}:"]
    lines += map(str, findings[:_MOST_TOLD])
    if left := findings[_MOST_TOLD:]:
        lines.append(f"and {len(left)} more")
    return SpecError("\n  ".join(lines), findings)
