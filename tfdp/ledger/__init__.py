"""The write-ahead ledger: what ran, one line at a time, and the epsilon of exactly that.

| guarantee | how |
|---|---|
| a step is on the disk before its update is applied | `append_step` returns only after write and fsync |
| a step is never given back | lines are only appended; numbers go up by one; a torn last line is a spent step |
| edits, reordering and lines of another ledger are seen | every line carries the SHA-256 of the line before it |
| a tail that was cut off is seen | where a checkpoint or a card holds the `LedgerHead` of a longer ledger |
| one contract per ledger | the header holds the plan; another plan cannot continue it |
| a card is about the model that was trained | the digest of the weights is recorded as every epoch and fit ends |
| one writer | an exclusive lock, and file and length are checked before every append |

What it does not see: lines cut off the end where nothing else remembers them, and somebody who writes the whole file
anew together with everything that refers to it. No chain does; keep a copy of the digest where the trainer cannot
write. Step lines hold no time stamp: how long a step took tells how many units were drawn.
"""

from __future__ import annotations

from tfdp.ledger.accesses import note_access, record_accesses
from tfdp.ledger.reading import LedgerHead, LedgerRecord, read_ledger
from tfdp.ledger.writing import Clock, Ledger, installed_versions, timestamp, utc_now

__all__ = [
    "Clock",
    "Ledger",
    "LedgerHead",
    "LedgerRecord",
    "installed_versions",
    "note_access",
    "read_ledger",
    "record_accesses",
    "timestamp",
    "utc_now",
]
