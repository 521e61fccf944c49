"""What every side of run.py shares; imports nothing that one of their environments lacks.

A side makes its steps, tells how long the first call of each took, then runs the one whose name it reads from stdin and
writes the seconds, line by line, until stdin ends.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

VOCABULARY, LAYERS, HEADS, WIDTH, TOKENS, BATCH, RANK = 8000, 4, 4, 256, 128, 16, 8


def batch_of_sequences() -> tuple[Any, Any]:
    """Inputs and targets, each [BATCH, TOKENS], of random tokens."""
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (BATCH, TOKENS + 1))
    return tokens[:, :-1], tokens[:, 1:]


def serve(make: Callable[[str], Callable[[], Any]], variants: Sequence[str]) -> None:
    """Answers on the real stdout; what libraries print goes to stderr."""
    answers, sys.stdout = sys.stdout, sys.stderr
    steps = {}
    for variant in variants:
        steps[variant] = make(variant)
        first = _seconds(steps[variant])
        for _ in range(2):
            steps[variant]()
        print(f"{first:.6f}", file=answers, flush=True)
    for line in sys.stdin:
        print(f"{_seconds(steps[line.strip()]):.6f}", file=answers, flush=True)


def _seconds(step: Callable[[], Any]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start
