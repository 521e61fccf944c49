"""Fixtures that every test may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of reference tables and data sets, beside the repository or named by TFDP_SHARED.

    Without it the test is skipped; with TFDP_REQUIRE_SHARED=1 it fails, so that a run that is meant to use the tables
    cannot pass by not finding them.
    """
    folder = Path(os.environ.get("TFDP_SHARED") or ROOT.parent / "shared")
    if not folder.is_dir():
        reason = f"no folder of reference data at {folder}; TFDP_SHARED can name one"
        if os.environ.get("TFDP_REQUIRE_SHARED") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return folder
