"""The write-ahead ledger: what ran, one line at a time, and the epsilon of exactly that.

| guarantee | how |
|---|---|
| a step is on the disk before its update is applied | `append_step` returns only after write and fsync |
| a step is never given back | lines are only appended; numbers go up by one; a torn last line is a spent step |
| nothing is changed or removed unseen | every line carries the SHA-256 of the line before it |
| one contract per ledger | the header holds the plan; another plan cannot continue it |
| a card is about the model that was trained | the digest of the weights is recorded as every epoch and fit ends |
| one writer | an exclusive lock, and the length of the file is checked before every append |

The chain catches accidents and edits of single lines. It does not catch whole lines cut off the end, nor somebody who
writes the whole file anew; that is why a card carries the digest of its ledger. Step lines hold no time stamp: how
long a step took tells how many units were drawn.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import os
import platform
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tfdp import __version__, accounting
from tfdp.errors import LedgerError
from tfdp.files import atomic_write_bytes, sha256_bytes

try:
    import fcntl
except ImportError:  # not a POSIX system: the length check still refuses a second writer
    fcntl = None  # type: ignore[assignment]

__all__ = ["Ledger", "LedgerRecord", "read_ledger"]

FORMAT = "1.0"
_FIRST = "0" * 64
_DISTRIBUTIONS = (
    "tensorflow",
    "keras",
    "keras-hub",
    "tensorflow-privacy",
    "dp-accounting",
    "numpy",
)
_PLAN_FIELDS = (
    "digest",
    "spec_digest",
    "num_units",
    "sampling_probability",
    "expected_batch_size",
    "scheme",
    "steps",
    "clip_norm",
    "noise_multiplier",
    "adjacency",
    "accountant",
    "target_epsilon",
    "delta",
    "step_event",
)

Clock = Callable[[], datetime.datetime]


def utc_now() -> datetime.datetime:
    """The clock used where none is given."""
    return datetime.datetime.now(datetime.UTC)


def timestamp(clock: Clock | None = None) -> str:
    """ISO 8601 in UTC, whole seconds."""
    return (clock or utc_now)().astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def installed_versions() -> dict[str, str]:
    """Versions of what can change a result, without importing any of it."""
    versions = {"python": platform.python_version(), "tfdp": __version__}
    for name in _DISTRIBUTIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


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

    def left(self, weights: str) -> bool:
        """Whether an epoch or a fit of this run ended with weights of this digest (`tfdp.files.sha256_arrays`)."""
        return any(entry.get("weights") == weights for entry in self.entries)

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
    return _verify(path, raw)[0]


class Ledger:
    """An open ledger that steps are appended to. Make one with `Ledger.create_or_open`."""

    def __init__(
        self, path: Path, stream: Any, *, identity: str, steps: int, previous: str, size: int, clock: Clock | None
    ):
        self.path = path
        self.identity = identity  # SHA-256 of the header: another ledger of the same plan has another one
        self._stream = stream
        self._steps = steps
        self._previous = previous
        self._size = size
        self._clock = clock
        self._failure: str | None = None

    @classmethod
    def create_or_open(
        cls, path: str | os.PathLike[str], plan: Mapping[str, Any], *, clock: Clock | None = None
    ) -> Self:
        """Creates the ledger, or opens it to continue the same plan.

        A torn last line is completed in place as a spent step.

        Args:
            path: file of JSON lines; missing folders are made.
            plan: `Plan.to_dict()`, the spec under "spec".
            clock: gives the time of the header and of notes; for tests.

        Raises:
            LedgerError: another plan, another writer, a damaged ledger, or a disk that does not take the bytes.
        """
        path = Path(path)
        plan = _plain(plan, "the plan")
        missing = [field for field in (*_PLAN_FIELDS, "spec") if field not in plan]
        if missing:
            raise LedgerError(
                f"Expected a plan with the fields of Plan.to_dict(), received one without {', '.join(missing)}. "
                "Pass plan.to_dict() of a plan from tfdp.make_plan."
            )
        if not path.exists():
            _create(path, plan, clock)
        stream = _open_locked(path)
        try:
            raw = path.read_bytes()
            record, last_line = _verify(path, raw)
            _refuse_other_plan(record, plan)
            ledger = cls(
                path,
                stream,
                identity=sha256_bytes(raw.split(b"\n", 1)[0]),
                steps=record.steps,
                previous=sha256_bytes(last_line),
                size=len(raw),
                clock=clock,
            )
            if record.torn:
                ledger._complete_torn_line(raw, record.steps)
        except OSError as error:
            stream.close()
            raise _disk_error(path, error) from error
        except BaseException:
            stream.close()
            raise
        return ledger

    @property
    def steps(self) -> int:
        """Steps recorded so far; the next one is `steps + 1`."""
        return self._steps

    @property
    def closed(self) -> bool:
        return self._stream.closed

    def append_step(self, step: int) -> None:
        """Records a step that is about to run. Run it only once this has returned.

        Args:
            step: its number, from 1; always `steps + 1`.

        Raises:
            LedgerError: the number does not follow, or the line is not known to be on the disk. The step counts
                as spent when any of it was written; it must not be run either way.
        """
        if isinstance(step, bool) or step != self._steps + 1:
            raise LedgerError(
                f"Expected step {self._steps + 1} to be recorded next in {self.path}, received: step={step!r}. "
                "Take step numbers from the ledger (ledger.steps + 1), never from the optimizer or a checkpoint."
            )
        self._write({"kind": "step", "step": int(step)})
        self._steps += 1

    def append(self, kind: str, **fields: Any) -> None:
        """Records something other than a step, such as "fit_begin" or "fit_end", with the time."""
        if kind in ("header", "step") or not kind:
            raise LedgerError(
                f"Expected a kind other than 'header' and 'step', received: kind={kind!r}. "
                "Record steps with append_step."
            )
        reserved = {"kind", "prev", "step", "time"} & fields.keys()
        if reserved:
            raise LedgerError(
                f"Expected fields of your own, received reserved names: {', '.join(sorted(reserved))}. Rename them."
            )
        self._write({"kind": kind, "time": timestamp(self._clock), **_plain(fields, f"the entry {kind!r}")})

    def close(self) -> None:
        """Closes the file and gives up the lock; closing twice is harmless."""
        self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, entry: dict[str, Any]) -> None:
        if self._failure is not None:
            raise LedgerError(
                f"Expected a ledger whose last write succeeded, received one that failed before ({self._failure}). "
                f"Free the disk or mend {self.path}, then open the ledger again; spent steps stay spent."
            )
        if self.closed:
            raise LedgerError(f"Expected an open ledger, received {self.path} after close(). Open it again.")
        line = _encode({**entry, "prev": self._previous})
        try:
            self._refuse_foreign_change()
            _write_all(self._stream.fileno(), line + b"\n")
            os.fsync(self._stream.fileno())
        except OSError as error:
            self._failure = str(error)
            raise _disk_error(self.path, error) from error
        except BaseException as error:  # an interrupt inside the write: how much was written is unknown
            self._failure = str(error) or type(error).__name__
            raise
        self._previous = sha256_bytes(line)
        self._size += len(line) + 1

    def _refuse_foreign_change(self) -> None:
        ours, there = os.fstat(self._stream.fileno()), os.stat(self.path)
        if (ours.st_dev, ours.st_ino) != (there.st_dev, there.st_ino) or ours.st_size != self._size:
            raise LedgerError(
                f"Expected {self.path} as this process left it ({self._size} bytes), received another file or length "
                f"({there.st_size} bytes). Stop every other writer, restore the ledger, and open it again."
            )

    def _complete_torn_line(self, raw: bytes, step: int) -> None:
        """Overwrites the torn tail with a whole step line that holds it.

        In place and never shorter, so that a crash in here leaves a torn last line again and not a shorter ledger.
        """
        start = raw.rfind(b"\n") + 1
        line = _encode({"kind": "step", "prev": self._previous, "step": step, "torn": raw[start:].hex()})
        with open(self.path, "r+b", buffering=0) as stream:
            stream.seek(start)
            _write_all(stream.fileno(), line + b"\n")
            os.fsync(stream.fileno())
        self._previous = sha256_bytes(line)
        self._size = start + len(line) + 1


def _create(path: Path, plan: dict[str, Any], clock: Clock | None) -> None:
    header = {
        "kind": "header",
        "format": FORMAT,
        "created": timestamp(clock),
        "id": secrets.token_hex(16),
        "versions": installed_versions(),
        "spec": plan["spec"],
        "plan": {key: value for key, value in plan.items() if key != "spec"},
        "prev": _FIRST,
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_bytes(path, _encode(header) + b"\n")
    except OSError as error:
        raise _disk_error(path, error) from error


def _open_locked(path: Path) -> Any:
    try:
        stream = open(path, "ab", buffering=0)  # noqa: SIM115 - stays open as long as the ledger
    except OSError as error:
        raise _disk_error(path, error) from error
    if fcntl is not None:
        try:
            fcntl.flock(stream.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            stream.close()
            raise LedgerError(
                f"Expected to be the only writer of {path}, received: it is open elsewhere, in this process or another "
                f"({error.strerror}). Let the other fit end or close its ledger, or give this run a ledger of its own."
            ) from error
    return stream


def _verify(path: Path, raw: bytes) -> tuple[LedgerRecord, bytes]:
    """The record, and the last complete line (whose hash the next line carries)."""
    *lines, tail = raw.split(b"\n")
    if not lines:
        raise LedgerError(
            f"Expected a ledger in {path}, received {len(raw)} bytes without a complete header. "
            "No step can have run under it: delete the file, or give another path."
        )
    entries = []
    previous = _FIRST
    steps = 0
    for number, line in enumerate(lines, start=1):
        entry = _decode(path, number, line)
        kind = entry.get("kind")
        if entry.get("prev") != previous:
            _refuse(path, number, f"prev to be {previous[:16]}..., the hash of the line before", entry.get("prev"))
        if (kind == "header") != (number == 1) or not isinstance(kind, str) or not kind:
            _refuse(path, number, "one header, on line 1, and a kind on every line", f"kind={kind!r}")
        if kind == "step":
            if type(entry.get("step")) is not int or entry["step"] != steps + 1:
                _refuse(path, number, f"step {steps + 1}", f"step={entry.get('step')!r}")
            steps += 1
        entries.append(entry)
        previous = sha256_bytes(line)
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
    )
    return record, lines[-1]


def _check_header(path: Path, header: dict[str, Any]) -> None:
    if header.get("format") != FORMAT:
        _refuse(path, 1, f"format {FORMAT!r}", f"format={header.get('format')!r}")
    for field, kind in (("spec", dict), ("plan", dict), ("versions", dict), ("created", str)):
        if not isinstance(header.get(field), kind):
            _refuse(path, 1, f"a header with {field!r}", f"{field}={header.get(field)!r}")
    missing = [field for field in _PLAN_FIELDS if field not in header["plan"]]
    if missing:
        _refuse(path, 1, "a whole plan", f"a plan without {', '.join(missing)}")


def _refuse(path: Path, number: int, expected: str, received: object) -> None:
    raise LedgerError(
        f"{path}, line {number}: expected {expected}, received: {received}. "
        "The ledger was changed or damaged: restore it from a copy. Without it nothing can be claimed for this run."
    )


def _refuse_other_plan(record: LedgerRecord, plan: dict[str, Any]) -> None:
    theirs = {**record.plan, "spec": record.spec}
    differing = [
        f"{name}: ledger {_short(old)}, plan {_short(new)}"
        for name, old, new in _differences(theirs, plan)
        if name not in ("digest", "spec_digest")
    ]
    if theirs["digest"] == plan["digest"] and not differing:
        return
    told = "; ".join(differing[:8]) or f"digest: ledger {theirs['digest'][:12]}, plan {plan['digest'][:12]}"
    if len(differing) > 8:
        told += f"; and {len(differing) - 8} more"
    raise LedgerError(
        f"Expected the plan that {record.path} was begun with, received another one ({told}). "
        "Continue with the original spec, or give the new plan a ledger of its own: both runs then count."
    )


def _differences(old: Any, new: Any, name: str = "") -> list[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        found = []
        for key in sorted(old.keys() | new.keys()):
            path = f"{name}.{key}" if name else key
            found += _differences(old.get(key, "absent"), new.get(key, "absent"), path)
        return found
    return [] if old == new else [(name, old, new)]


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _decode(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        entry = json.loads(line, object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant)
    except ValueError as error:  # covers bad UTF-8 too
        _refuse(path, number, "one JSON object", error)
    if not isinstance(entry, dict):
        _refuse(path, number, "one JSON object", type(entry).__name__)
    return entry


def _without_duplicates(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key twice")
    return found


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not a JSON number")


def _plain(value: Mapping[str, Any], what: str) -> dict[str, Any]:
    """What reading the ledger back will give."""
    try:
        return json.loads(json.dumps(dict(value), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise LedgerError(
            f"Expected {what} to be plain JSON with finite numbers, received: {error}. "
            "Convert arrays and objects to lists, numbers and strings first."
        ) from error


def _encode(entry: Mapping[str, Any]) -> bytes:
    return json.dumps(entry, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _disk_error(path: Path, error: OSError) -> LedgerError:
    return LedgerError(
        f"Expected the ledger {path} to take a line and keep it, received: {error.strerror or error}. "
        "No step may run without its line: free space or fix the permissions, then run again."
    )
