"""What a step pays for its line in the ledger: write, flush to the disk, and the checks before.

    python benchmarks/ledger.py --folder /where/runs/lie --step-seconds 0.21

Prints one line of JSON. The folder matters: a network file system may take a hundred times as long as a local disk.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from step import benchmark_plan

from tfdp.ledger import Ledger, read_ledger

GOAL = 0.01


def measure(folder: Path, steps: int) -> list[float]:
    """Seconds of each of `steps` appends."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        path = Path(place) / "ledger.jsonl"
        times = []
        with Ledger.create_or_open(path, benchmark_plan().to_dict()) as ledger:
            for step in range(1, steps + 1):
                began = time.perf_counter()
                ledger.append_step(step)
                times.append(time.perf_counter() - began)
        assert read_ledger(path).steps == steps
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk in question")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--step-seconds", type=float, default=0.2, help="of a private training step")
    arguments = parser.parse_args()
    times = sorted(measure(arguments.folder, arguments.steps))
    median = statistics.median(times)
    report = {
        "median_us": round(1e6 * median),
        "slowest_of_100_us": round(1e6 * times[int(0.99 * len(times))]),
        "share": median / arguments.step_seconds,
        "reached": median <= GOAL * arguments.step_seconds,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
