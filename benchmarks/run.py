"""Runs every benchmark and writes benchmarks/results.md; `make bench` calls it. About ten minutes on two cores."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
GOALS = {"lora": 1.10, "full": 1.20}
MEMORY_GOAL, SPEEDUP_GOAL, NOISE_GOAL = 1.25, 5.0, 0.05


def run(script: str, *arguments: str) -> Any:
    """Runs one benchmark in a process of its own and returns what it printed last, read as JSON."""
    print("running", script, *arguments, flush=True)
    done = subprocess.run(
        [sys.executable, str(HERE / script), *arguments], check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(done.stdout.strip().splitlines()[-1])


def verdict(reached: bool) -> str:
    return "reached" if reached else "**missed**"


def step_table(rounds: int) -> list[str]:
    lines = [
        "| training | plain | private | ratio (quartiles) | goal | TF Privacy | faster by | goal | noise share |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for train, goal in GOALS.items():
        found = run("step.py", "--train", train, "--rounds", str(rounds))
        median, (low, high) = found["median"], found["ratio_quartiles"]
        lines.append(
            f"| {train} | {median['plain']:.3f} s | {median['private']:.3f} s "
            f"| {found['ratio']:.3f} ({low:.3f} to {high:.3f}) | {goal:.2f}: {verdict(found['ratio'] <= goal)} "
            f"| {median['vectorized']:.2f} s | {found['speedup_over_vectorized']:.1f}x "
            f"| {SPEEDUP_GOAL:.0f}x: {verdict(found['speedup_over_vectorized'] >= SPEEDUP_GOAL)} "
            f"| {100 * found['noise_share']:.1f}% |"
        )
    return lines


def memory_table(processes: int) -> list[str]:
    lines = ["| training | plain | private | ratio | goal | TF Privacy |", "|---|---|---|---|---|---|"]
    for train in GOALS:
        peak = {
            kind: run("step.py", "--train", train, "--memory", kind)["peak_mib"]
            for kind in ("plain", "private", "vectorized")
        }
        ratio = peak["private"] / peak["plain"]
        lines.append(
            f"| {train} | {peak['plain']:.0f} MiB | {peak['private']:.0f} MiB | {ratio:.2f} "
            f"| {MEMORY_GOAL:.2f}: {verdict(ratio <= MEMORY_GOAL)} | {peak['vectorized']:.0f} MiB |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="of the interleaved steps; at least 9 for a result")
    parser.add_argument("--processes", type=int, default=5, help="of each kind whose peak memory is measured")
    parser.add_argument("--out", type=Path, default=HERE / "results.md")
    arguments = parser.parse_args()
    steps, memory = step_table(arguments.rounds), memory_table(arguments.processes)
    traces = run("step.py", "--traces")
    ledger = run("ledger.py", "--folder", str(HERE))
    sampler = subprocess.run(
        [sys.executable, str(HERE / "sampler.py")], check=True, stdout=subprocess.PIPE, text=True
    ).stdout.strip()
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("tensorflow", "keras", "keras-hub"))
    arguments.out.write_text(
        "\n".join(
            [
                "# Benchmark results",
                "",
                f"Written by `make bench`. {os.cpu_count()} cores, Python {platform.python_version()}, {versions}.",
                "",
                "## One step",
                "",
                (
                    "GPT-2 with a vocabulary of 8000, 4 layers, 4 heads, width 256, 128 tokens, 16 sequences in a "
                    "microbatch, Adam, no XLA. LoRA has rank 8 on query and value. Private is the whole step of a fit: "
                    "sampler, ledger, clipping, noise, update. Interleaved in one process, medians of "
                    f"{arguments.rounds} rounds."
                ),
                "",
                *steps,
                "",
                (
                    "Noise share: the time to draw the noise of one step, over that of the private step; "
                    f"the goal for LoRA is {100 * NOISE_GOAL:.0f}%."
                ),
                "",
                f"## Peak memory above start, medians of {arguments.processes} processes (TensorFlow Privacy: one)",
                "",
                *memory,
                "",
                "## Tracing",
                "",
                (
                    f"A fit of {traces['steps']} steps, with 0 to many microbatches in a step, traced its step "
                    f"{traces['traces']} time(s)."
                ),
                "",
                "## A line in the ledger",
                "",
                (
                    f"Written and flushed to this disk in {ledger['median_us']} us (slowest of a hundred: "
                    f"{ledger['slowest_of_100_us']} us), {100 * ledger['share']:.2f}% of a step of 0.2 s; goal 1%: "
                    f"{verdict(ledger['reached'])}."
                ),
                "",
                "## Drawing a batch",
                "",
                "```",
                sampler,
                "```",
                "",
            ]
        )
    )
    print(arguments.out.read_text())


if __name__ == "__main__":
    main()
