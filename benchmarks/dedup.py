"""Time and memory of leaving repeated mails out: 500,000 made-up mails of about 300 words each.

    python benchmarks/dedup.py                       # each method and scope, in a process of its own
    python benchmarks/dedup.py --records 50000

Words are drawn by Zipf's law from a vocabulary of 200,000. Of the mails 5% repeat an earlier one word for word, and 15%
quote 40 words of one; quoted mails are of the same sender as often as not. Prints a Markdown table: the time is that of
the deduplication on one core without making the mails, the memory is the peak of the whole process. What was measured
stands in results.md.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np

from tfdp.sampling.dedup import METHODS, SCOPES, kept_flags

_VOCABULARY, _SENDERS, _REMEMBERED = 200_000, 20_000, 2_000


class Mails:
    """Mails one after the other, and how long it took to make them."""

    def __init__(self, count: int):
        self.count = count
        self.seconds = 0.0
        self.senders: list[int] = []

    def __iter__(self) -> Iterator[str]:
        random = np.random.default_rng(0)
        words = np.array([f"word{number:x}" for number in range(_VOCABULARY)])
        earlier: list[tuple[list[str], int]] = []
        for _ in range(self.count):
            start = time.process_time()
            length = int(random.lognormal(np.log(250), 0.6))
            text = words[(random.zipf(1.3, length) - 1) % _VOCABULARY].tolist()
            sender, kind = int(random.integers(_SENDERS)), random.random()
            if earlier and kind < 0.2:
                other, author = earlier[int(random.integers(len(earlier)))]
                sender = author if random.random() < 0.5 else sender
                text = other if kind < 0.05 else [*text, ">", *other[:40]]
            if len(earlier) < _REMEMBERED:
                earlier.append((text, sender))
            else:
                earlier[int(random.integers(_REMEMBERED))] = (text, sender)
            self.senders.append(sender)
            mail = " ".join(text)
            self.seconds += time.process_time() - start
            yield mail


def measure(records: int, method: str, scope: str) -> str:
    """One row of the table, of this process."""
    mails = Mails(records)
    senders = (mails.senders[number] for number in range(records))  # read right after its mail was made
    start = time.process_time()
    kept = sum(kept_flags(mails, senders, method=method, scope=scope))  # type: ignore[arg-type]
    seconds = time.process_time() - start - mails.seconds
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return f"| {method} | {scope} | {records:,} | {records - kept:,} | {seconds:.0f} s | {peak:.2f} GiB |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=500_000)
    parser.add_argument("--only", nargs=2, metavar=("METHOD", "SCOPE"), help="measure one row, in this process")
    chosen = parser.parse_args()
    if chosen.only:
        print(measure(chosen.records, *chosen.only), flush=True)
        return
    print("| method | scope | mails | dropped | time | peak memory |\n|---|---|---:|---:|---:|---:|", flush=True)
    for method in METHODS:
        for scope in SCOPES:
            command = [sys.executable, __file__, "--records", str(chosen.records), "--only", method, scope]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
