"""Appending to a ledger: a step is on the disk before it may run."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from tfdp import __version__
from tfdp.entropy import system_bytes
from tfdp.errors import AccountingError, LedgerError
from tfdp.files import create_atomically, sha256_bytes
from tfdp.ledger.lines import FIRST, FORMAT, PLAN_FIELDS, encode, plain
from tfdp.ledger.locking import FileLock
from tfdp.ledger.reading import LedgerHead, LedgerRecord, verify

_DISTRIBUTIONS = (
    "tensorflow",
    "keras",
    "keras-hub",
    "tensorflow-privacy",
    "dp-accounting",
    "numpy",
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


class Ledger:
    """An open ledger that steps are appended to. Make one with `Ledger.create_or_open`.

    Attributes:
        identity: SHA-256 of the header: another ledger of the same plan has another one.
    """

    def __init__(self, path: Path, stream: Any, lock: FileLock, record: LedgerRecord, size: int, clock: Clock | None):
        self.path = path
        self.identity = record.identity
        self._stream = stream
        self._lock = lock
        self._steps = record.steps
        self._lines = record.head.lines
        self._previous = record.head.digest
        self._size = size
        self._clock = clock
        self._clip_norms = record.clip_norm_trail()
        self._failure: str | None = None
        self._process = os.getpid()
        self._one_at_a_time = threading.RLock()

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
        plan = plain(plan, "the plan")
        missing = [field for field in (*PLAN_FIELDS, "spec") if field not in plan]
        if missing:
            raise LedgerError(
                f"Expected a plan with the fields of Plan.to_dict(), received one without {', '.join(missing)}. "
                "Pass plan.to_dict() of a plan from tfdp.make_plan."
            )
        if not path.exists():
            _create(path, plan, clock)
        try:
            stream = open(path, "ab", buffering=0)  # noqa: SIM115 - stays open as long as the ledger
        except OSError as error:
            raise _disk_error(path, error) from error
        try:
            lock = FileLock(stream.fileno(), path)
        except BaseException:
            stream.close()
            raise
        try:
            raw = path.read_bytes()
            record = verify(path, raw)
            _refuse_other_plan(record, plan)
            ledger = cls(path, stream, lock, record, len(raw), clock)
            ledger._settle_last_line(raw, record)
        except BaseException as error:
            lock.forget()
            stream.close()
            if isinstance(error, OSError):
                raise _disk_error(path, error) from error
            raise
        return ledger

    @property
    def steps(self) -> int:
        """Steps recorded so far; the next one is `steps + 1`."""
        return self._steps

    @property
    def head(self) -> LedgerHead:
        """Of what is on the disk."""
        return LedgerHead(self._lines, self._previous)

    @property
    def clip_norm(self) -> float:
        """C of the next step: of the plan, or where it follows a count, of the lines so far."""
        return self._clip_norms.current

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
        with self._one_at_a_time:
            if isinstance(step, bool) or step != self._steps + 1:
                raise LedgerError(
                    f"Expected step {self._steps + 1} to be recorded next in {self.path}, received: step={step!r}. "
                    "Take step numbers from the ledger (ledger.steps + 1), never from the optimizer or a checkpoint."
                )
            self._write({"kind": "step", "step": int(step), **self._clip_norms.fields("step")})
            self._clip_norms.written()
            self._steps += 1

    def release(self, noisy_fraction: float) -> None:
        """Takes the noisy count of the last step, as a fraction; the next line holds it, and `clip_norm` follows it.

        Raises:
            LedgerError: this plan's clip norm does not move, or a fraction is waiting already.
        """
        with self._one_at_a_time:
            try:
                self._clip_norms.release(noisy_fraction)
            except AccountingError as error:
                raise LedgerError(str(error)) from error

    def append(self, kind: str, **fields: Any) -> None:
        """Records something other than a step, such as "fit_begin" or "fit_end", with the time."""
        if kind in ("header", "step") or not kind:
            raise LedgerError(
                f"Expected a kind other than 'header' and 'step', received: kind={kind!r}. "
                "Record steps with append_step."
            )
        reserved = {"kind", "prev", "step", "time", "clip_norm", "noisy_fraction"} & fields.keys()
        if reserved:
            raise LedgerError(
                f"Expected fields of your own, received reserved names: {', '.join(sorted(reserved))}. Rename them."
            )
        entry = {"kind": kind, "time": timestamp(self._clock), **plain(fields, f"the entry {kind!r}")}
        with self._one_at_a_time:
            self._write({**entry, **self._clip_norms.fields(kind)})
            self._clip_norms.written()

    def close(self) -> None:
        """Closes the file and gives up the lock; closing twice is harmless."""
        with self._one_at_a_time:
            if not self.closed and self._process == os.getpid():
                self._lock.forget()
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
        if self._process != os.getpid():
            raise LedgerError(
                f"Expected the process that opened {self.path}, received a copy of it made by fork: both would count "
                "the same steps. Begin the fit in one process only."
            )
        line = encode({**entry, "prev": self._previous})
        try:
            self._refuse_foreign_change()
            self._put(self._stream.fileno(), line)
        except OSError as error:
            self._failure = str(error)
            raise _disk_error(self.path, error) from error
        except BaseException as error:  # an interrupt inside the write: how much was written is unknown
            self._failure = str(error) or type(error).__name__
            raise
        self._previous = sha256_bytes(line)
        self._lines += 1

    def _put(self, descriptor: int, line: bytes) -> None:
        """Writes a whole line, flushed to the disk."""
        _write_all(descriptor, line + b"\n")
        os.fsync(descriptor)
        self._size += len(line) + 1

    def _refuse_foreign_change(self) -> None:
        ours, there = os.fstat(self._stream.fileno()), os.stat(self.path)
        if (ours.st_dev, ours.st_ino) != (there.st_dev, there.st_ino) or ours.st_size != self._size:
            raise LedgerError(
                f"Expected {self.path} as this process left it ({self._size} bytes), received another file or length "
                f"({there.st_size} bytes). Stop every other writer, restore the ledger, and open it again."
            )

    def _settle_last_line(self, raw: bytes, record: LedgerRecord) -> None:
        """Writes the last line once more: completed as a spent step where it is torn, else as it is.

        Always: after an fsync that failed, the system may hold a line that never reached the disk for one that did. In
        place and never shorter, so that a crash in here leaves a torn last line again and not a shorter ledger.
        """
        *lines, torn = raw.split(b"\n")
        line = lines[-1]
        if record.torn:
            line = encode({"kind": "step", "prev": self._previous, "step": record.steps, "torn": torn.hex()})
            self._previous = sha256_bytes(line)
            self._lines += 1
        self._size -= len(torn) if record.torn else len(line) + 1
        with open(self.path, "r+b", buffering=0) as stream:
            stream.seek(self._size)
            self._put(stream.fileno(), line)


def _create(path: Path, plan: dict[str, Any], clock: Clock | None) -> None:
    header = {
        "kind": "header",
        "format": FORMAT,
        "created": timestamp(clock),
        "id": system_bytes(16).hex(),
        "versions": installed_versions(),
        "spec": plan["spec"],
        "plan": {key: value for key, value in plan.items() if key != "spec"},
        "prev": FIRST,
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        create_atomically(path, encode(header) + b"\n")
    except FileExistsError:  # another process was faster: there is one ledger, and the lock says whose turn it is
        pass
    except OSError as error:
        raise _disk_error(path, error) from error


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


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _disk_error(path: Path, error: OSError) -> LedgerError:
    return LedgerError(
        f"Expected the ledger {path} to take a line and keep it, received: {error.strerror or error}. "
        "No step may run without its line: free space or fix the permissions, then run again."
    )
