"""Our own side of run.py. A variant is "lora" or "full", then ":plain" (no privacy), ":private" or ":private:xla"."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from protocol import serve
from step import STEPS, Setting

if __name__ == "__main__":

    def step(variant: str) -> Callable[[], Any]:
        train, kind, *compiled = variant.split(":")
        return STEPS[kind](Setting(train=train, xla=bool(compiled)))

    serve(step, sys.argv[1:])
