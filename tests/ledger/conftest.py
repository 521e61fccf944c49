"""A ledger of five steps under a small plan."""

from __future__ import annotations

import pytest

from tfdp.ledger import Ledger


@pytest.fixture(scope="module")
def plan(plan_of):
    return plan_of(num_units=100, batch=50, steps=30).to_dict()


@pytest.fixture
def five_steps(tmp_path, plan):
    path = tmp_path / "run" / "ledger.jsonl"
    with Ledger.create_or_open(path, plan) as ledger:
        for step in range(1, 6):
            ledger.append_step(step)
    return path
