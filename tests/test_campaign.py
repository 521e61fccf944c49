"""The quick form of the campaign: real processes, killed and starved, never claim less than they did."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]


def test_no_kill_and_no_full_disk_makes_a_claim_wrong_or_loses_the_model():
    """A few of its cases; `python tests/campaign.py` runs a hundred random moments and every named point."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "campaign.py"), "--quick"],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    table = [[cell.strip() for cell in row.split("|")[1:-1]] for row in done.stdout.splitlines() if row.startswith("|")]
    assert table[0] == ["fault", "cases", "kills", "errors", "wrong claims", "lost models"]
    name, cases, kills, errors, wrong, lost = table[-1]
    assert (name, cases, errors, wrong, lost) == ("all", "7", "1", "0", "0")
    assert int(kills) >= 5  # the process that is killed at a random moment may have ended
