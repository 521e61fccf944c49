"""Runs every benchmark and writes benchmarks/results.md; `make bench` calls it. About forty minutes on two cores."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
GOALS = {"lora": 1.05, "full": 1.12}
MEMORY_GOAL, SPEEDUP_GOAL, NOISE_GOAL = 1.10, 5.0, 0.05
DEDUP_GOAL = 4.0  # GiB

NAMES = {
    "plain": "plain",
    "private": "private",
    "gram": "Gram form everywhere",
    "materialised": "materialised form everywhere",
    "users": "4 users of 4 records",
    "gradients": "clipped gradients of 16 microbatches alone",
    "logical": "a step of 16 microbatches",
}
# What is measured, kinds of steps, options, and the most that the second kind may take of the time of the first (or the
# least that the others may, where the first chooses between them).
COMPARISONS: list[tuple[str, list[str], list[str], float | None]] = [
    ("BERT classifier, full", ["plain", "private"], ["--model", "bert"], 1.20),
    ("BERT classifier, LoRA", ["plain", "private"], ["--model", "bert", "--train", "lora"], 1.10),
    ("Llama, grouped queries, full", ["plain", "private"], ["--model", "llama"], 1.20),
    ("Llama, grouped queries, LoRA", ["plain", "private"], ["--model", "llama", "--train", "lora"], 1.10),
    ("GPT-2, 512 tokens, full", ["private", "gram", "materialised"], ["--tokens", "512"], 1 / 1.10),
    ("GPT-2, full", ["private", "users"], [], 1.05),
    ("GPT-2, full", ["gradients", "logical"], [], 1.05),
    ("GPT-2 under XLA, full", ["plain", "private"], ["--xla"], None),
    ("GPT-2 under XLA, LoRA", ["plain", "private"], ["--xla", "--train", "lora"], None),
]


def run(script: str, *arguments: str) -> Any:
    """Runs one benchmark in a process of its own and returns what it printed last, read as JSON."""
    print("running", script, *arguments, flush=True)
    done = subprocess.run(
        [sys.executable, str(HERE / script), *arguments], check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(done.stdout.strip().splitlines()[-1])


def told(table: list[str]) -> list[str]:
    """Prints a table as soon as it is there: a later part may fail."""
    print("\n".join(table), flush=True)
    return table


def verdict(reached: bool) -> str:
    return "reached" if reached else "**missed**"


def step_table(rounds: int) -> list[str]:
    lines = [
        "| training | plain | private | ratio (quartiles) | goal | TF Privacy | faster by | goal | noise share |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for train, goal in GOALS.items():
        found = run("step.py", "--train", train, "--rounds", str(rounds))
        median = found["median"]
        speedup = median["vectorized"] / median["private"]
        lines.append(
            f"| {train} | {median['plain']:.3f} s | {median['private']:.3f} s "
            f"| {ratio(found, 'private')} | {goal:.2f}: {verdict(found['ratio']['private'] <= goal)} "
            f"| {median['vectorized']:.2f} s | {speedup:.1f}x "
            f"| {SPEEDUP_GOAL:.0f}x: {verdict(speedup >= SPEEDUP_GOAL)} | {100 * found['noise_share']:.1f}% |"
        )
    return lines


def ratio(found: Any, kind: str) -> str:
    low, high = found["quartiles"][kind]
    return f"{found['ratio'][kind]:.3f} ({low:.3f} to {high:.3f})"


def comparison_table(rounds: int) -> list[str]:
    lines = ["| what | over | ratio (quartiles) | goal | first calls |", "|---|---|---|---|---|"]
    for what, kinds, options, goal in COMPARISONS:
        found = run("step.py", "--rounds", str(rounds), "--kinds", *kinds, *options)
        base, *others = kinds
        for kind in others:
            aim = ""
            if goal is not None:
                least = goal < 1
                reached = found["ratio"][kind] >= goal if least else found["ratio"][kind] <= goal
                aim = f"{'at least ' if least else ''}{goal:.2f}: {verdict(reached)}"
            lines.append(
                f"| {what}, {NAMES[kind]} | {NAMES[base]} | {ratio(found, kind)} | {aim} "
                f"| {found['first'][kind]:.1f} s, {found['first'][base]:.1f} s |"
            )
    return lines


def memory_table(processes: int) -> list[str]:
    lines = ["| training | plain | private | ratio | goal | TF Privacy |", "|---|---|---|---|---|---|"]
    for train in GOALS:
        peak = {
            kind: statistics.median(
                run("step.py", "--train", train, "--memory", kind)["peak_mib"]
                for _ in range(1 if kind == "vectorized" else processes)
            )
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
    parser.add_argument("--mails", type=int, default=500_000, help="of the deduplication")
    parser.add_argument("--out", type=Path, default=HERE / "results.md")
    arguments = parser.parse_args()
    sampler = subprocess.run(
        [sys.executable, str(HERE / "sampler.py")], check=True, stdout=subprocess.PIPE, text=True
    ).stdout.strip()
    traces = run("step.py", "--traces")
    ledger = run("ledger.py", "--folder", str(HERE))
    steps = told(step_table(arguments.rounds))
    memory = told(memory_table(arguments.processes))
    comparisons = told(comparison_table(arguments.rounds))
    repeated = subprocess.run(
        [sys.executable, str(HERE / "dedup.py"), "--records", str(arguments.mails)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout.splitlines()
    most = max(float(line.split("|")[-2].removesuffix("GiB ")) for line in repeated[2:])
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
                "## Other models, lengths, units, and XLA",
                "",
                "Ratios of medians of steps that take turns in one process, as above.",
                "",
                *comparisons,
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
                "## Leaving repeated mails out",
                "",
                (
                    f"{arguments.mails:,} made-up mails of about 300 words; memory is the peak of the whole process. "
                    f"Most: {most:.2f} GiB; goal for 500,000 mails {DEDUP_GOAL:.0f} GiB: {verdict(most <= DEDUP_GOAL)}."
                ),
                "",
                *repeated,
                "",
            ]
        )
    )
    print(arguments.out.read_text())


if __name__ == "__main__":
    main()
