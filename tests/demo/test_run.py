"""The demo end to end, on a few docstrings."""

from __future__ import annotations

import json

import numpy as np
import pytest

import tfdp
import tfdp.demo.run as module
from tfdp.cli import main
from tfdp.cli.audit import _trained as trained
from tfdp.demo.corpus import private_docstrings, split
from tfdp.demo.public_model import SEQUENCE_LENGTH, load_public_model
from tfdp.demo.run import SPEC_FILE, demo_plan, demo_records, fresh_directory, run_demo
from tfdp.errors import DataError
from tfdp.evaluation import perplexity
from tfdp.workflow import encode_texts


@pytest.fixture(scope="module")
def small_demo(tmp_path_factory):
    """Its result, the folder of the run, that of the twin, and what was told."""
    folder = tmp_path_factory.mktemp("demo")
    run, twin, told = folder / "run", folder / "twin", []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_SPEC", module._SPEC.replace("batch_size: 256", "batch_size: 16"))
        result = run_demo(run, steps=4, twin=twin, max_units=64, say=told.append, verbose=0)
    return result, run, twin, told


@pytest.mark.quick
def test_small_demo(small_demo):
    result, run, _, told = small_demo
    assert result.training.steps == 4
    assert 0 < result.training.epsilon <= 8.0 * (1 + 1e-6)
    # Four steps move the model, and nothing was mixed up between the three.
    losses = [result.public.loss, result.private.loss, result.non_private.loss]
    assert len({round(loss, 6) for loss in losses}) == 3
    card = json.loads((run / "MODEL_CARD.json").read_text())
    (metric,) = card["utility"]["metrics"]
    assert metric["private"] == pytest.approx(result.private.perplexity)
    assert metric["public"] == pytest.approx(result.public.perplexity)
    assert metric["non_private"] == pytest.approx(result.non_private.perplexity)
    assert {"fit", "fit without privacy"} <= set(card["provenance"]["timings"])
    assert not [finding for finding in tfdp.check_card(run) if finding.severity == "error"]
    assert tfdp.PrivacySpec.from_file(run / SPEC_FILE).data.num_units == 64
    assert any("perplexity" in line for line in told)


def test_the_demo_is_attacked_beside_its_twin(small_demo):
    """Members and others are those of the run, and each model is the one that it is called."""
    result, run, twin, _ = small_demo
    with pytest.raises(SystemExit) as done:
        main([*map(str, ("audit", run, "--against", twin, "--prompts", 2))])
    assert not done.value.code
    audit = json.loads((run / "audit.json").read_text())
    rows = {(attack["name"], attack["model"]): attack for attack in audit["attacks"]}
    kinds, models = ("loss ratio", "loss threshold"), ("private", "non_private")
    assert set(rows) == {(kind, model) for kind in kinds for model in models}
    assert {(row["members"], row["non_members"]) for row in rows.values()} == {(64, 64)}
    assert [part["part"] for part in audit["skipped"]] == ["canaries"]
    members, others = demo_records(64)
    train, held_out = split(private_docstrings()).train[:64], split(private_docstrings()).held_out[:64]
    assert [members.texts, others.texts] == [tuple(each.text for each in side) for side in (train, held_out)]
    unseen = encode_texts(load_public_model(compile=False), others.texts, SEQUENCE_LENGTH)
    for folder, expected in ((run, result.private), (twin, result.non_private)):
        saved = trained(folder / "model.keras")
        np.testing.assert_allclose(perplexity(saved, unseen).losses, expected.losses, rtol=1e-4)
    with pytest.raises(DataError, match="new directory for the twin"):
        run_demo(run.with_name("other"), steps=1, twin=twin)
    assert not run.with_name("other").exists()


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
