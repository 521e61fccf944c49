"""Our own side of run.py: a variant is "lora" or "full", then ":plain" (Keras on TensorFlow) or ":private"."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from protocol import serve
from step import STEPS, Setting

if __name__ == "__main__":
    serve(lambda variant: STEPS[variant.split(":")[1]](Setting(train=variant.split(":")[0])), sys.argv[1:])
