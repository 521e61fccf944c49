"""The file of a data set's ledger: lines of which each carries the hash of the one before, and one writer at a time."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

from tfdp.errors import LedgerError, MisuseError
from tfdp.files import create_atomically
from tfdp.ledger import LedgerHead, timestamp
from tfdp.ledger.lines import FIRST, chain, encode, refuse
from tfdp.ledger.locking import FileLock
from tfdp.plan import Plan
from tfdp.spec import PrivacySpec

Lines: TypeAlias = list[dict[str, Any]]

FORMAT = "dataset-1.0"
_PATIENCE = 10.0  # seconds for another run to register


def ledger_of(plan: Plan) -> Path | None:
    budget = plan.spec.budget
    return None if budget is None or budget.ledger is None else Path(budget.ledger)


def currency_of(spec: PrivacySpec) -> dict[str, Any]:
    """What an epsilon is about: epsilons add up only where all of this is the same."""
    unit = spec.claim.privacy_unit
    return {
        "unit": unit.kind,
        "id_field": unit.id_field,
        "max_records_per_unit": unit.max_records_per_unit,
        "adjacency": spec.claim.adjacency,
    }


def create(path: Path, plan: Plan) -> None:
    if path.exists():
        return
    assert plan.spec.budget is not None
    header = {
        "kind": "header",
        "format": FORMAT,
        "created": timestamp(),
        "dataset_id": plan.spec.budget.dataset_id,
        "currency": currency_of(plan.spec),
        "prev": FIRST,
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        create_atomically(path, encode(header) + b"\n")
    except FileExistsError:
        pass
    except OSError as error:
        raise _disk_error(path, error) from error


def append_line(path: Path, plan: Plan, make: Callable[[Lines], dict[str, Any] | None]) -> None:
    """Adds the line that `make` gives for those that are there; the ledger is locked from reading to writing.

    The last line is written once more: after an fsync that failed it may be in memory only, and nobody can tell. A torn
    line after it is overwritten: it was never followed by a step, since the run that wrote it stopped before it began.
    """
    with _locked(path) as stream:
        try:
            raw = path.read_bytes()
            entries, tail, previous = read_lines(path, raw)
            _refuse_other(path, entries[0], plan)
            entry = make(entries)
            whole = raw[: len(raw) - len(tail)]
            last = whole.rfind(b"\n", 0, -1) + 1
            stream.seek(last)
            stream.write(whole[last:] + (b"" if entry is None else encode({**entry, "prev": previous}) + b"\n"))
            stream.truncate()
            stream.flush()
            os.fsync(stream.fileno())
        except OSError as error:
            raise _disk_error(path, error) from error


def read_lines(path: Path, raw: bytes) -> tuple[Lines, bytes, str]:
    """The lines, what a torn last one left, and the hash that the next one carries."""
    lines: dict[str, int] = {}  # of the ledger of a run, when it was last heard of

    def check(number: int, entry: dict[str, Any]) -> None:
        kind = entry.get("kind")
        if number == 1 and (kind, entry.get("format")) != ("header", FORMAT):
            refuse(path, number, f"the header of a data set's ledger, format {FORMAT!r}", f"kind={kind!r}")
        if number > 1 and kind not in ("run", "head", "trials"):
            refuse(path, number, "a run, its head or trials", f"kind={kind!r}")
        if kind in ("run", "head"):
            try:
                identity, count = entry["identity"], LedgerHead(**entry["head"]).lines
            except (KeyError, TypeError) as error:
                refuse(path, number, "a run and its head", f"{type(error).__name__}: {error}")
            if (identity in lines) == (kind == "run"):
                refuse(path, number, "a run once, and heads of runs after it", f"kind={kind!r}, identity={identity!r}")
            if count < lines.get(identity, 0):
                refuse(path, number, f"at least {lines[identity]} lines of that run", f"lines={count}")
            lines[identity] = count

    entries, previous, tail = chain(path, raw, check)
    if not entries:
        refuse(path, 1, "the header of a data set's ledger", f"{len(raw)} bytes without one")
    return entries, tail, previous


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[Any]:
    until = time.monotonic() + _PATIENCE
    try:
        stream = open(path, "r+b")  # noqa: SIM115 - closed below
    except OSError as error:
        raise _disk_error(path, error) from error
    with stream:
        while True:
            try:
                lock = FileLock(stream.fileno(), path)
                break
            except LedgerError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)
        try:
            yield stream
        finally:
            lock.forget()


def _refuse_other(path: Path, header: dict[str, Any], plan: Plan) -> None:
    assert plan.spec.budget is not None
    dataset_id, currency = plan.spec.budget.dataset_id, currency_of(plan.spec)
    if header["dataset_id"] != dataset_id:
        raise MisuseError(
            f"Expected {path} to be the ledger of {dataset_id!r}. Received: that of {header['dataset_id']!r}. Name "
            "one ledger for one data set in budget.ledger."
        )
    if header["currency"] != currency:
        raise MisuseError(
            f"PS034: expected runs of one unit and adjacency in {path}, {_words(header['currency'])}. Received: "
            f"{_words(currency)}. Such epsilons do not add up: keep a ledger for each."
        )


def _words(currency: dict[str, Any]) -> str:
    records = currency["max_records_per_unit"]
    named = f" by {currency['id_field']!r}" if currency["id_field"] else ""
    return f"{currency['unit']}{named}{f' of {records} records' if records else ''} under {currency['adjacency']}"


def _disk_error(path: Path, error: OSError) -> LedgerError:
    return LedgerError(
        f"Expected the data set's ledger {path} to take a line and keep it, received: {error.strerror or error}. No "
        "run may begin without its line: free space or fix the permissions, then run again."
    )
