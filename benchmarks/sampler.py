"""Time and memory of one Poisson draw: the cost follows q*N, the expected batch size, and not N.

    python benchmarks/sampler.py

Prints a Markdown table: N = 10^8 against N = 10^6 at the same q*N, and what one coin per unit would cost.
"""

from __future__ import annotations

import argparse
import statistics
import time
import tracemalloc
from collections.abc import Callable

import numpy as np

from tfdp.entropy import system_words
from tfdp.sampling.poisson import PoissonSampler


def coin_per_unit(num_units: int, probability: float) -> np.ndarray:
    """The slow obvious way: 64 random bits for every unit."""
    return np.flatnonzero(system_words(num_units) < np.uint64(probability * 2.0**64))


def measure(draw: Callable[[], np.ndarray], repeats: int) -> tuple[float, float, float]:
    """Median seconds, peak bytes of one draw, mean size."""
    draw()
    times, sizes = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        chosen = draw()
        times.append(time.perf_counter() - start)
        sizes.append(len(chosen))
    tracemalloc.start()
    draw()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return statistics.median(times), peak, statistics.mean(sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=501, help="draws per row")
    repeats = parser.parse_args().repeats
    rows: list[tuple[str, int, float, Callable[[], np.ndarray], int]] = []
    for num_units, probability in ((10**8, 1e-5), (10**6, 1e-3), (10**10, 1e-7), (10**8, 1e-3)):
        rows.append(("skip", num_units, probability, PoissonSampler(num_units, probability).draw, repeats))
    rows.append(("coin per unit", 10**6, 1e-3, lambda: coin_per_unit(10**6, 1e-3), max(1, repeats // 20)))
    print("| sampling | N | q | mean size | median time per draw | peak memory of a draw |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, num_units, probability, draw, count in rows:
        seconds, peak, size = measure(draw, count)
        print(
            f"| {name} | {num_units:.0e} | {probability:.0e} | {size:.1f} "
            f"| {seconds * 1e6:.0f} us | {peak / 1024:.0f} KiB |"
        )


if __name__ == "__main__":
    main()
