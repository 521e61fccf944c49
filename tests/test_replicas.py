"""Private fits under `tf.distribute` strategies; the tests that need two devices are in `two_devices.py`."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

TWO_DEVICES = pathlib.Path(__file__).parent / "two_devices.py"


def test_two_devices():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(TWO_DEVICES)]
    environment = {**os.environ, "PYTHONPATH": str(TWO_DEVICES.parents[1])}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, check=False, cwd=TWO_DEVICES.parents[1]
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
