"""Reading a ledger back: nothing that does not follow from the line before it is believed."""

from __future__ import annotations

import hashlib
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfdp import accounting
from tfdp.errors import AccountingError, LedgerError
from tfdp.files import sha256_bytes
from tfdp.ledger.clip_norms import ClipNormTrail
from tfdp.ledger.lines import FORMAT, PLAN_FIELDS, chain, refuse


@dataclass(frozen=True)
class LedgerHead:
    """Where a ledger had come to: every later state of the same ledger contains it.

    Attributes:
        lines: complete lines, the header among them.
        digest: SHA-256 of the last one.
    """

    lines: int
    digest: str


@dataclass(frozen=True)
class LedgerRecord:
    """What a ledger says, read and verified.

    Attributes:
        path: the file it was read from.
        spec: the privacy spec as it was when the ledger was created.
        plan: the plan, as `Plan.to_dict` gives it, without the spec.
        versions: package versions at creation.
        created: when the header was written.
        steps: executed steps; a torn last line counts as one.
        entries: every complete line after the header.
        torn: whether the last line is incomplete.
        digest: SHA-256 of the file.
        identity: SHA-256 of the header: another ledger of the same plan has another one.
        head: the last complete line.
    """

    path: Path
    spec: dict[str, Any]
    plan: dict[str, Any]
    versions: dict[str, str]
    created: str
    steps: int
    entries: tuple[dict[str, Any], ...]
    torn: bool
    digest: str
    identity: str
    head: LedgerHead

    @property
    def event(self) -> Any:
        """The `DpEvent` of one step."""
        return accounting.event_from_dict(self.plan["step_event"])

    def epsilon(self, delta: float | None = None) -> float:
        """Epsilon of the recorded steps, an upper bound; `math.inf` for steps without noise."""
        if self.steps == 0:
            return 0.0
        if self.plan["noise_multiplier"] == 0:
            return math.inf
        return accounting.epsilon(
            self.event,
            self.steps,
            delta=self.plan["delta"] if delta is None else delta,
            accountant=self.plan["accountant"],
            adjacency=self.plan["adjacency"],
        )

    def clip_norm_trail(self) -> ClipNormTrail:
        """The clip norm as the lines have moved it.

        Raises:
            LedgerError: a line that does not follow.
        """
        try:
            trail = ClipNormTrail(self.plan)
        except (AccountingError, TypeError, ValueError) as error:
            refuse(self.path, 1, "a plan with a clip norm", error)
        for number, entry in enumerate(self.entries, start=2):
            trail.follow(self.path, number, entry)
        return trail

    @property
    def clip_norms(self) -> list[float]:
        """Where the clip norm follows a count: those that the steps used, in order."""
        return [entry["clip_norm"] for entry in self.of_kind("step") if "clip_norm" in entry]

    def left(self, weights: str) -> bool:
        """Whether an epoch or a fit of this run ended with weights of this digest (`tfdp.files.sha256_arrays`)."""
        return any(entry.get("weights") == weights for entry in self.entries)

    def contains(self, head: LedgerHead) -> bool:
        """Whether this ledger once ended with `head`: it is the same one, and nothing before that was cut off."""
        if not 1 <= head.lines <= self.head.lines:
            return False
        following = [entry["prev"] for entry in self.entries] + [self.head.digest]
        return following[head.lines - 1] == head.digest

    def once_was(self, digest: str) -> bool:
        """Whether the file, at some point of its growth, had this SHA-256."""
        so_far = hashlib.sha256()
        for line in self.path.read_bytes().splitlines(keepends=True):
            so_far.update(line)
            if so_far.hexdigest() == digest:
                return True
        return False

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """The entries of one kind, in order."""
        return [entry for entry in self.entries if entry["kind"] == kind]


def read_ledger(path: str | os.PathLike[str]) -> LedgerRecord:
    """Reads and verifies a ledger.

    Raises:
        LedgerError: no ledger there, or a line that does not follow from the one before it (with its number).
            Only the last line may be incomplete, as a crash in the middle of a write leaves it.
    """
    path = Path(path)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise LedgerError(
            f"Expected a ledger at {path}, received: {error.strerror or error}. "
            "Train with tfdp.PrivacyCallback(plan, ledger=...) first, or give the path of its ledger."
        ) from error
    return verify(path, raw)


def verify(path: Path, raw: bytes) -> LedgerRecord:
    """`read_ledger` for the bytes of a file."""
    steps = 0

    def check(number: int, entry: dict[str, Any]) -> None:
        nonlocal steps
        kind = entry.get("kind")
        if (kind == "header") != (number == 1) or not isinstance(kind, str) or not kind:
            refuse(path, number, "one header, on line 1, and a kind on every line", f"kind={kind!r}")
        if kind == "step":
            if type(entry.get("step")) is not int or entry["step"] != steps + 1:
                refuse(path, number, f"step {steps + 1}", f"step={entry.get('step')!r}")
            steps += 1

    entries, previous, tail = chain(path, raw, check)
    if not entries:
        raise LedgerError(
            f"Expected a ledger in {path}, received {len(raw)} bytes without a complete header. "
            "No step can have run under it: delete the file, or give another path."
        )
    header = entries[0]
    _check_header(path, header)
    record = LedgerRecord(
        path=path,
        spec=header["spec"],
        plan=header["plan"],
        versions=header["versions"],
        created=header["created"],
        steps=steps + bool(tail),
        entries=tuple(entries[1:]),
        torn=bool(tail),
        digest=sha256_bytes(raw),
        identity=sha256_bytes(raw.split(b"\n", 1)[0]),
        head=LedgerHead(len(entries), previous),
    )
    record.clip_norm_trail()
    return record


def _check_header(path: Path, header: dict[str, Any]) -> None:
    if header.get("format") != FORMAT:
        refuse(path, 1, f"format {FORMAT!r}", f"format={header.get('format')!r}")
    for field, kind in (("spec", dict), ("plan", dict), ("versions", dict), ("created", str)):
        if not isinstance(header.get(field), kind):
            refuse(path, 1, f"a header with {field!r}", f"{field}={header.get(field)!r}")
    missing = [field for field in PLAN_FIELDS if field not in header["plan"]]
    if missing:
        refuse(path, 1, "a whole plan", f"a plan without {', '.join(missing)}")
