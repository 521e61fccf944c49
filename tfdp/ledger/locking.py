"""One writer at a time, across processes and within one.

The lock itself is the operating system's and ends with the process that holds it, however that ends. Beside it lies a
note of who holds it, so that whoever is refused learns by whom, and whoever comes after a crash learns of it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import socket
import time
from pathlib import Path

from tfdp.errors import LedgerError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_ATTEMPTS = 5
_HELD = {errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES}


class FileLock:
    """An exclusive lock on an open file.

    Args:
        descriptor: of the file; closing it gives up the lock.
        path: of the file; the note is `path` + ".lock".

    Raises:
        LedgerError: somebody else holds it, or this system or file system has no locks.
    """

    def __init__(self, descriptor: int, path: Path):
        self._note = Path(f"{path}.lock")
        if fcntl is None:
            raise LedgerError(
                f"Expected a system with file locks (fcntl), received one without ({os.name}). Without a lock two runs "
                f"could count the same steps in {path}: train on Linux or macOS, or under WSL."
            )
        try:
            _lock(descriptor)
        except OSError as error:
            if error.errno not in _HELD:
                raise LedgerError(
                    f"Expected a file system that can lock {path}, received: {error.strerror}. Two runs could count "
                    "the same steps: put the ledger on a local disk."
                ) from error
            raise LedgerError(
                f"Expected to be the only writer of {path}, received: it is open elsewhere, in {self._holder()}. "
                "Let the other fit end or close its ledger, or give this run a ledger of its own."
            ) from error
        self.stale = self._holder() if self._note.exists() else None
        if self.stale is not None:
            logging.getLogger("tfdp").warning(
                "%s was held by %s, which ended without closing it. The lock is taken over; every recorded step stays "
                "spent.",
                path,
                self.stale,
            )
        with contextlib.suppress(OSError):  # the note is for people; the lock holds without it
            self._note.write_text(json.dumps({"host": socket.gethostname(), "pid": os.getpid()}))

    def forget(self) -> None:
        """Takes the note away, before the file is closed."""
        with contextlib.suppress(OSError):
            self._note.unlink()

    def _holder(self) -> str:
        try:
            note = json.loads(self._note.read_text())
            own = note["pid"] == os.getpid() and note["host"] == socket.gethostname()
            return "this process" if own else f"process {int(note['pid'])} on {str(note['host'])[:60]}"
        except (OSError, ValueError, KeyError, TypeError):
            return "another process"


def _lock(descriptor: int) -> None:
    for attempt in range(_ATTEMPTS):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _HELD or attempt == _ATTEMPTS - 1:
                raise
            time.sleep(0.01)  # `is_locked` of another process holds it for a moment
        else:
            return


def is_locked(path: Path) -> bool:
    """Whether somebody has the file open for writing; true where that cannot be told."""
    try:
        with open(path, "rb") as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (OSError, AttributeError):
        return True
    return False
