"""`tfdp card render` and `tfdp card check`: exit codes and messages."""

from __future__ import annotations

import datetime
import json
import pathlib

import numpy as np
import pytest
from typer.testing import CliRunner

from tfdp.card import export
from tfdp.cli import app
from tfdp.files import sha256_arrays
from tfdp.ledger import Ledger
from tfdp.plan import make_plan
from tfdp.spec import PrivacySpec

SPEC = {
    "schema_version": "1.0",
    "claim": {
        "epsilon": 8.0,
        "delta": 1e-5,
        "privacy_unit": {"kind": "example", "description": "one sentence"},
        "adjacency": "add_or_remove_one",
        "data_accesses": ["training"],
    },
    "data": {"num_units": 1000, "size_is_public": True},
    "mechanism": {"clip_norm": 1.0, "noise_multiplier": 1.0},
    "sampling": {"scheme": "poisson", "expected_batch_size": 50, "steps": 10},
}


class Model:
    name = "model"

    def get_weights(self):
        return [np.ones(3)]

    def save(self, path):
        pathlib.Path(path).write_bytes(b"weights")


@pytest.fixture
def run(tmp_path):
    with Ledger.create_or_open(tmp_path / "ledger.jsonl", make_plan(PrivacySpec.from_dict(SPEC)).to_dict()) as ledger:
        ledger.append_step(1)
        ledger.append("fit_end", weights=sha256_arrays(Model().get_weights()))
    export(Model(), tmp_path, clock=lambda: datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC))
    return tmp_path


def call(*arguments):
    return CliRunner().invoke(app, ["card", *map(str, arguments)])


def test_a_card_that_holds(run):
    result = call("check", run)
    assert result.exit_code == 0, result.output
    assert "agrees with its ledger" in result.output
    assert call("check", run / "MODEL_CARD.json", "--ledger", run / "ledger.jsonl").exit_code == 0


def test_a_changed_epsilon(run):
    path = run / "MODEL_CARD.json"
    card = json.loads(path.read_text(encoding="utf-8"))
    card["claim"]["epsilon"]["value"] = 0.5
    path.write_text(json.dumps(card), encoding="utf-8")
    result = call("check", run, "--json")
    assert result.exit_code == 1
    report = json.loads(result.output)
    assert report["errors"] >= 1
    assert "claim.epsilon.value" in {finding["where"] for finding in report["findings"]}
    text = call("check", run)
    assert text.exit_code == 1
    assert "PS080 error: claim.epsilon.value: expected" in text.output


def test_a_changed_ledger(run):
    path = run / "ledger.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"step":1', b'"step":2'))
    result = call("check", run)
    assert result.exit_code == 1
    assert "line 2: expected step 1" in str(result.exception)


def test_render_writes_the_pages_again(run):
    before = {name: (run / name).read_bytes() for name in ("MODEL_CARD.md", "MODEL_CARD.html")}
    for name in before:
        (run / name).unlink()
    result = call("render", run)
    assert result.exit_code == 0
    assert "MODEL_CARD.html" in result.output
    assert {name: (run / name).read_bytes() for name in before} == before


@pytest.mark.parametrize(
    "arguments", [["check"], ["render", "nowhere"], ["check", ".", "--ledger", "nowhere"], ["polish"]]
)
def test_wrong_calls(arguments):
    assert call(*arguments).exit_code == 2


def test_help_teaches():
    assert "Exits with 1" in call("check", "--help").output
