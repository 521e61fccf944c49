"""Remembering which records belong together, from one fit to the next, without telling anybody.

A claim about users holds for all fits on a ledger together, so a later fit must not cut the same records into other
units. What is kept for that is a digest of the ids. Whoever knows a digest can test a guess about the data, so it
goes neither into the ledger nor on a card: it lies in a file of its own beside the ledger, keyed with random bits that
are nowhere else. That file is private like the data, and of no use once the plan is spent.
"""

from __future__ import annotations

import hmac
import json
import os
from pathlib import Path

from tfdp.entropy import system_bytes
from tfdp.errors import MisuseError
from tfdp.files import atomic_write_text

_NOTE = "Private, like the data: do not release. Lets later fits check that the ids of the records did not change."


def units_file(ledger: str | os.PathLike[str]) -> Path:
    """Where the units of the fits on a ledger are remembered."""
    return Path(f"{os.fspath(ledger)}.units")


def remember_units(ledger: str | os.PathLike[str], partition: bytes) -> None:
    """Writes the file; `partition` is `UnitMap.digest`."""
    key = system_bytes(32)
    content = {"note": _NOTE, "key": key.hex(), "digest": _keyed(key, partition)}
    atomic_write_text(units_file(ledger), json.dumps(content) + "\n")


def check_remembered_units(ledger: str | os.PathLike[str], partition: bytes) -> None:
    """Compares with what an earlier fit remembered.

    Raises:
        MisuseError: the file is gone or damaged, or the ids are others now.
    """
    path = units_file(ledger)
    try:
        content = json.loads(path.read_text("utf-8"))
        known = hmac.compare_digest(content["digest"], _keyed(bytes.fromhex(content["key"]), partition))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise MisuseError(
            f"Expected {path}, by which a later fit on this ledger sees that the units are the same. Received: "
            f"{type(error).__name__} while reading it. Restore the file; without it, train anew from public weights "
            "with a ledger of its own: both runs then count."
        ) from None
    if not known:
        raise MisuseError(
            f"Expected the ids of the earlier fits on {os.fspath(ledger)}. Received: others, or in another order. The "
            "claim is about the units that the ids made first: pass the same records with the same ids."
        )


def _keyed(key: bytes, partition: bytes) -> str:
    return hmac.new(key, partition, "sha256").hexdigest()
