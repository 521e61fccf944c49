"""The demo end to end, on a few docstrings."""

from __future__ import annotations

import json

import pytest

import tfdp
from tfdp.demo.run import SPEC_FILE, demo_plan, fresh_directory, run_demo


@pytest.mark.quick
def test_small_demo(tmp_path, monkeypatch):
    import tfdp.demo.run as module

    monkeypatch.setattr(module, "_SPEC", module._SPEC.replace("batch_size: 256", "batch_size: 16"))
    told: list[str] = []
    result = run_demo(tmp_path, steps=4, max_units=64, say=told.append, verbose=0)
    assert result.training.steps == 4
    assert 0 < result.training.epsilon <= 8.0 * (1 + 1e-6)
    # Four steps move the model, and nothing was mixed up between the three.
    losses = [result.public.loss, result.private.loss, result.non_private.loss]
    assert len({round(loss, 6) for loss in losses}) == 3
    card = json.loads((tmp_path / "MODEL_CARD.json").read_text())
    (metric,) = card["utility"]["metrics"]
    assert metric["private"] == pytest.approx(result.private.perplexity)
    assert metric["public"] == pytest.approx(result.public.perplexity)
    assert metric["non_private"] == pytest.approx(result.non_private.perplexity)
    assert {"fit", "fit without privacy"} <= set(card["provenance"]["timings"])
    assert not [finding for finding in tfdp.check_card(tmp_path) if finding.severity == "error"]
    assert tfdp.PrivacySpec.from_file(tmp_path / SPEC_FILE).data.num_units == 64
    assert any("perplexity" in line for line in told)


def test_plan_is_the_one_of_the_written_spec(tmp_path):
    plan = demo_plan(6445, 48, tmp_path)
    assert plan.expected_batch_size == pytest.approx(256)
    assert plan.digest == tfdp.make_plan(tfdp.PrivacySpec.from_file(tmp_path / SPEC_FILE)).digest


def test_a_run_is_not_overwritten(tmp_path):
    first = tmp_path / "demo-run"
    assert fresh_directory(first) == first
    first.mkdir()
    assert fresh_directory(first) == first  # empty: nothing to lose
    (first / "ledger.jsonl").write_text("x")
    (tmp_path / "demo-run-2").mkdir()
    (tmp_path / "demo-run-2" / "ledger.jsonl").write_text("x")
    assert fresh_directory(first) == tmp_path / "demo-run-3"
