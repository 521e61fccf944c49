"""Times a step against the peers' and writes peers.md beside ../results.md; `make bench-peers` calls it.

Each peer runs in a virtual environment and a process of its own, made the first time (torch alone is some gigabytes).
The processes take turns, one step each, so that what else the machine does falls on all of them alike.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

from rich.progress import track

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
GOAL = 0.85

# Name: (requirements, or None for our own environment; script; variants)
SIDES: dict[str, tuple[list[str] | None, str, list[str]]] = {
    "tfdp": (None, "with_tfdp.py", ["plain", "private", "private:xla"]),
    "jax_privacy": (
        ["jax_privacy==2.0.0", "keras", "keras-hub", "tensorflow-cpu"],
        "with_jax_privacy.py",
        ["plain", "16", "4", "1"],
    ),
    "Opacus": (["opacus==1.6.*"], "with_opacus.py", ["plain", "hooks", "ghost"]),
}


class Side:
    """A process that runs one step whenever it is told to.

    Args:
        name: of SIDES.
        environments: where the peers' virtual environments are, or will be.
        train: lora or full.
    """

    def __init__(self, name: str, environments: Path, train: str):
        requirements, script, variants = SIDES[name]
        python = sys.executable
        if requirements is not None:
            environment = environments / name
            if not (environment / "bin/python").exists():
                install = ["sh", str(REPOSITORY / ".ci/install"), str(environment), sys.executable, *requirements]
                subprocess.run(install, check=True)
            python = str(environment / "bin/python")
        self.variants = [f"{train}:{variant}" for variant in variants]
        self._process = subprocess.Popen(
            [python, str(HERE / script), *self.variants],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.first = {variant: self._answer() for variant in self.variants}

    def step(self, variant: str) -> float:
        """Seconds of one step."""
        assert self._process.stdin is not None
        print(variant, file=self._process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        self._process.communicate()

    def _answer(self) -> float:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{' '.join(map(str, self._process.args))} ended early; run it by hand to see why.")
        return float(line)


def table(train: str, environments: Path, rounds: int) -> list[str]:
    sides = {name: Side(name, environments, train) for name in SIDES}
    steps = [(name, variant) for name, side in sides.items() for variant in side.variants]
    times: dict[tuple[str, str], list[float]] = {step: [] for step in steps}
    for _ in track(range(rounds), f"{train}, in turns"):
        for name, variant in steps:
            times[name, variant].append(sides[name].step(variant))
    for side in sides.values():
        side.close()
    ours = ("tfdp", f"{train}:private")
    lines = [
        f"## {train}",
        "",
        "| | first call | median | our private step over it (quartiles) |",
        "|---|---|---|---|",
    ]
    for name, variant in steps:
        ratios = [one / other for one, other in zip(times[ours], times[name, variant], strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        lines.append(
            f"| {name}, {_kind(name, variant)} | {sides[name].first[variant]:.1f} s "
            f"| {statistics.median(times[name, variant]):.3f} s "
            f"| {statistics.median(ratios):.2f} ({low:.2f} to {high:.2f}) |"
        )

    def best(side: str) -> float:
        return min(
            statistics.median(times[step]) for step in steps if step[0] == side and not step[1].endswith("plain")
        )

    ratio = best("tfdp") / best("jax_privacy")
    verdict = "reached" if ratio <= GOAL else "**missed**"
    lines += ["", f"Our best against the best of jax_privacy: {ratio:.2f}; goal {GOAL}: {verdict}.", ""]
    return lines


def _kind(name: str, variant: str) -> str:
    kind = variant.partition(":")[2].replace(":xla", " under XLA")
    if kind == "plain":
        return "no privacy"
    return f"microbatch {kind}" if name == "jax_privacy" else kind


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--environments", type=Path, default=REPOSITORY / ".venv-peers")
    parser.add_argument("--out", type=Path, default=HERE.parent / "peers.md")
    arguments = parser.parse_args()
    lines = [
        "# A step beside the peers' steps",
        "",
        (
            f"Written by `make bench-peers`. {os.cpu_count()} cores, Python {platform.python_version()}; "
            f"{', '.join(each for needed, _, _ in SIDES.values() for each in needed or [])}. The GPT-2 of results.md, "
            "16 sequences of 128 tokens, Adam; each in a process of its own, taking turns, medians of "
            f"{arguments.rounds} rounds. Ours is the whole step of a fit, with its sampler and ledger and with noise "
            "from the operating system's entropy; theirs is a bare step. Opacus' ghost clipping refuses tied weights: "
            "its output projection has weights of its own."
        ),
        "",
    ]
    for train in ("full", "lora"):
        lines += table(train, arguments.environments, arguments.rounds)
    arguments.out.write_text("\n".join(lines))
    print(arguments.out.read_text())


if __name__ == "__main__":
    main()
