"""`tfdp train`."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tfdp import read_ledger
from tfdp.cli import main

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_SPEC = """
schema_version: "1.0"
claim:
  epsilon: 9
  delta: 1e-4
  privacy_unit: {{kind: user, description: one writer, id_field: writer, max_records_per_unit: 1{selection}}}
  adjacency: add_or_remove_one
  data_accesses: [training]
data: {{num_units: {units}, size_is_public: true}}
mechanism: {{clip_norm: 1.0, noise_multiplier: {noise}}}
sampling: {{scheme: poisson, expected_batch_size: 8, steps: 4}}
"""
_UNITS = 37  # of 40 writers, by the digests of their names


@pytest.fixture
def files(tmp_path):
    """Writes spec and data; gives the arguments that name them."""
    texts = ["the cat sat on the mat", "a dog ran home", "on the mat sat a cat"]
    rows = [{"body": f"{texts[i % 3]} {i % 7}", "writer": f"w{i}"} for i in range(40)]

    def write(*, units=_UNITS, noise=1.0, selection="", extra=()):
        (tmp_path / "spec.yaml").write_text(_SPEC.format(units=units, noise=noise, selection=selection))
        lines = [json.dumps(row) + "\n" for row in [*rows, *extra]]
        (tmp_path / "mails.jsonl").write_text("".join(lines))
        options = {"--spec": "spec.yaml", "--data": "mails.jsonl", "--out": "run"}
        named = [part for name, file in options.items() for part in (name, str(tmp_path / file))]
        return [*named, "--text-field", "body", "--sequence-length", "24"]

    return write


@pytest.fixture
def run(capsys, monkeypatch):
    """Runs `tfdp train`; gives exit code, stdout, stderr."""
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setenv("TERM", "dumb")

    def call(*arguments):
        with pytest.raises(SystemExit) as caught:
            main(["train", *map(str, arguments)])
        out, err = capsys.readouterr()
        return caught.value.code or 0, out, err

    return call


def test_a_run_from_one_command_to_its_card(files, tmp_path):
    arguments = [*files(), "--model", "gpt2:tiny"]
    environment = {**os.environ, "COLUMNS": "140", "TERM": "dumb", "PYTHONPATH": str(_ROOT)}
    environment.pop("TF_CPP_MIN_LOG_LEVEL", None)
    code = "from tfdp.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "train", *arguments], capture_output=True, text=True, env=environment, check=False
    )
    assert done.stderr == ""  # nothing of TensorFlow's start
    assert done.returncode == 0
    for part in (
        "37 to train on, 3 held out",
        "4 in 1 epochs of 4",
        "noise multiplier",
        "epsilon: ",
        "perplexity after",
    ):
        assert part in done.stdout
    assert read_ledger(tmp_path / "run" / "ledger.jsonl").steps == 4
    card = json.loads((tmp_path / "run" / "MODEL_CARD.json").read_text())
    assert card["provenance"]["model"]["name"] == "gpt2:tiny"
    assert card["data"]["source"] == "mails.jsonl, field body"
    assert card["utility"]["metrics"][0]["n"] == 3
    assert "w1" not in done.stdout.replace(str(tmp_path), "")  # a folder of tests may be called so
    assert (tmp_path / "run" / "MODEL_CARD.html").exists()


def test_the_public_model_takes_adapters_and_a_second_call_is_refused(run, files, tmp_path):
    arguments = [*files(), "--model", "gpt2:demo", "--lora-rank", "2", "--holdout", "0", "--optimizer", "sgd"]
    arguments[arguments.index("--spec") + 1] = str(tmp_path / "forty.yaml")
    (tmp_path / "forty.yaml").write_text(_SPEC.format(units=40, noise=1.0, selection=""))
    code, out, err = run(*arguments)
    assert (code, err) == (0, "")
    assert "perplexity" not in out
    card = json.loads((tmp_path / "run" / "MODEL_CARD.json").read_text())
    assert card["utility"]["metrics"] == []
    assert card["provenance"]["model"]["trainable_parameters"] < 20_000
    ledger = (tmp_path / "run" / "ledger.jsonl").read_bytes()
    code, _, err = run(*arguments)
    assert code == 1
    assert "all 4 steps spent" in err
    (tmp_path / "forty.yaml").write_text(_SPEC.format(units=40, noise=1.1, selection=""))
    code, _, err = run(*arguments)
    assert code == 1
    assert "under another one" in err
    assert (tmp_path / "run" / "ledger.jsonl").read_bytes() == ledger


def _killed_in_the_third_step(monkeypatch, moment, arguments):
    """`tfdp train`, killed after what the callback does at this moment of its third step."""
    from tfdp.callback import PrivacyCallback

    class Killed(BaseException):
        pass

    real, taken = getattr(PrivacyCallback, moment), []

    def kill(self, batch, logs=None):
        real(self, batch, logs)
        taken.append(batch)
        if len(taken) == 3:
            raise Killed

    monkeypatch.setattr(PrivacyCallback, moment, kill)
    with pytest.raises(Killed):
        main(["train", *map(str, arguments)])
    monkeypatch.undo()
    monkeypatch.setenv("COLUMNS", "140")


def test_the_same_call_goes_on_where_an_interrupted_one_was_saved(run, files, tmp_path, monkeypatch):
    """Three of four steps, a checkpoint after the second: one update is lost, and its step stays spent."""
    arguments = [*files(), "--model", "gpt2:tiny", "--lora-rank", "2", "--holdout", "0.1", "--save-every", "2"]
    _killed_in_the_third_step(monkeypatch, "on_train_batch_end", arguments)
    assert read_ledger(tmp_path / "run" / "ledger.jsonl").steps == 3
    code, out, err = run(*arguments)
    assert (code, err) == (0, "")
    assert "3 steps, epsilon" in out
    assert "2 updates are in the model, 3 of 4 steps are spent" in out
    assert "The private run ended: budget. 3 updates are in the model, 4 of 4 steps are spent." in out
    card = json.loads((tmp_path / "run" / "MODEL_CARD.json").read_text())
    assert card["accounting"]["steps_executed"] == 4
    assert card["claim"]["status"] == "claimed"
    assert not (tmp_path / "run" / "checkpoint").exists()


def test_a_clip_norm_that_follows_a_quantile_goes_on_after_an_interruption(run, files, tmp_path, monkeypatch):
    """Three of four steps, killed while the third is written down; the fourth begins where the lines had come to."""
    arguments = [*files(), "--model", "gpt2:tiny", "--lora-rank", "2", "--holdout", "0.1", "--save-every", "2"]
    spec = tmp_path / "spec.yaml"
    moving = "clip_norm: {quantile: 0.5, initial: 1.0, learning_rate: 0.5, count_noise: 2.0}"
    spec.write_text(spec.read_text().replace("clip_norm: 1.0", moving))
    _killed_in_the_third_step(monkeypatch, "on_train_batch_begin", arguments)
    before = read_ledger(tmp_path / "run" / "ledger.jsonl").clip_norms
    assert len(set(before)) == 3
    code, out, err = run(*arguments)
    assert (code, err) == (0, "")
    assert "towards quantile 0.5" in out
    record = read_ledger(tmp_path / "run" / "ledger.jsonl")
    assert record.steps == 4
    assert record.clip_norms == [*before, before[-1]]  # no line has the count of the third step, nobody draws it anew
    card = json.loads((tmp_path / "run" / "MODEL_CARD.json").read_text())
    assert [point["clip_norm"] for point in card["accounting"]["adaptive_clipping"]["over_steps"]] == record.clip_norms
    assert card["accounting"]["epsilon_with_amplification"]["value"] == record.epsilon()
    assert card["accounting"]["steps_executed"] == 4
    assert card["claim"]["status"] == "claimed"
    assert not (tmp_path / "run" / "checkpoint").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"units": 40}, "write num_units: 37"),
        ({"extra": [{"body": "again", "writer": "w1"}]}, "1 of 37 units with more, at most 2"),
        ({"extra": [{"body": 7, "writer": "w99"}]}, "line 41: expected text in 'body'"),
        ({"extra": [{"body": "a"}, {"body": "b", "writer": " "}]}, "an id in 'writer' of every record. Received: 2"),
    ],
)
def test_data_that_do_not_fit_the_spec_are_refused(run, files, tmp_path, changes, message):
    code, _, err = run(*files(**changes), "--model", "gpt2:tiny")
    assert code == 1
    assert message in err
    assert not (tmp_path / "run").exists()


def test_a_selection_in_the_spec_keeps_one_record(run, files, tmp_path):
    extra = [{"body": "a much longer text than the first one", "writer": "w1"}]
    code, _, err = run(*files(selection=", selection: longest", extra=extra, units=35), "--model", "gpt2:tiny")
    assert code == 1
    assert "write num_units: 37" in err  # one of w1, and no complaint about it


def test_records_without_an_id_can_be_left_out(run, files, tmp_path):
    extra = [{"body": "a"}, {"body": "b", "writer": ""}]
    code, _, err = run(*files(extra=extra, units=35), "--model", "gpt2:tiny", "--drop-missing")
    assert code == 1
    assert "write num_units: 37" in err


@pytest.mark.parametrize(
    ("method", "selection", "k"), [("group_privacy", "highest_perplexity", 2), ("user_wise_dp_sgd", "random_chunk", 2)]
)
def test_mails_are_trained_on_by_sender(run, files, tmp_path, method, selection, k):
    """Twelve senders with 1 to 4 mails; the card states unit, k and strategy, and stands up to its check."""
    arguments = [*files(), "--model", "gpt2:tiny", "--lora-rank", "2", "--holdout", "0"]
    text = _SPEC.format(units=12, noise=1.5 if method == "user_wise_dp_sgd" else 3.0, selection="")
    unit = f"max_records_per_unit: {k}, method: {method}, selection: {selection}"
    text = text.replace("max_records_per_unit: 1", unit).replace("num_units: 12", "num_units: 12, num_records: 21")
    text = text.replace("expected_batch_size: 8", "expected_batch_size: 4").replace("delta: 1e-4", "delta: 1e-2")
    (tmp_path / "spec.yaml").write_text(text)
    rows = [{"body": f"mail {mail} of {writer}, and more", "writer": f"w{writer}"} for writer in range(12)
            for mail in range(1 + writer % 4)]  # fmt: skip
    (tmp_path / "mails.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, err = run(*arguments)
    assert (code, err) == (0, "")
    assert f"at most {k} of a user ({selection})" in out
    record = read_ledger(tmp_path / "run" / "ledger.jsonl")
    assert record.steps == 4
    assert (record.plan["records_per_unit"], record.plan["group_size"]) == ((k, 1) if "wise" in method else (1, k))
    assert not (tmp_path / "run" / "ledger.jsonl.units").exists()  # no later fit can need it
    card = json.loads((tmp_path / "run" / "MODEL_CARD.json").read_text())
    assert card["claim"]["status"] == "claimed"
    assert card["guarantee"]["selection"] == selection
    assert card["guarantee"]["max_records_per_unit"] == k
    assert card["guarantee"]["user_level"]["epsilon"]["value"] == pytest.approx(record.epsilon())
    account = card["accounting"]
    if method == "group_privacy":
        assert account["num_records"] == 21
        one, whole = account["epsilon_of_one_record"]["value"], account["epsilon_with_amplification"]["value"]
        assert one < whole < account["generic_group_epsilon"]["value"]
    else:
        assert account["generic_group_epsilon"] is None
    with pytest.raises(SystemExit) as caught:
        main(["card", "check", str(tmp_path / "run")])
    assert not caught.value.code


def test_random_chunks_need_a_method_that_samples_whole_units(run, files, tmp_path):
    code, out, _ = run(*files(selection=", selection: random_chunk"), "--model", "gpt2:tiny")
    assert code == 1
    assert "PS009" in out


def test_the_card_says_how_duplicates_were_removed(run, files, tmp_path):
    arguments = [*files(), "--model", "gpt2:tiny"]
    path, out = tmp_path / "mails.jsonl", tmp_path / "unique.jsonl"
    fields = ["--text-field", "body", "--id-field", "writer"]
    with pytest.raises(SystemExit):
        main(["data", "dedup", str(path), "-o", str(out), *fields])
    arguments[arguments.index("--data") + 1] = str(out)
    assert run(*arguments)[0] == 0
    assert json.loads((tmp_path / "run" / "MODEL_CARD.json").read_text())["data"]["deduplication_scope"] == "unit"
    out.write_bytes(out.read_bytes() + b"\n")
    code, _, err = run(*arguments)
    assert code == 1
    assert "changed since" in err


def test_a_spec_that_does_not_pass_review_trains_nothing(run, files, tmp_path):
    code, out, _ = run(*files(noise=0.3), "--model", "gpt2:tiny")
    assert code == 1
    assert "PS020" in out
    assert not (tmp_path / "run").exists()


def test_review_comes_before_tensorflow(files):
    arguments = [*files(noise=0.3), "--model", "gpt2:tiny"]
    code = (
        "import sys\nfrom tfdp.cli import main\ntry:\n    main()\nexcept SystemExit as end:\n"
        "    print(end.code, sorted({'tensorflow', 'keras'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code, "train", *arguments], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout.splitlines()[-1] == "1 []"


def test_wrong_calls(run, files):
    for extra in (
        ["--id-field", "body"],
        ["--lora-rank", "0"],
        ["--holdout", "1"],
        ["--learning-rate", "0"],
        ["--learning-rate", "nan"],
        ["--epochs", "3"],
    ):
        code, _, err = run(*files(), "--model", "gpt2:tiny", *extra)
        assert code == 2, extra
        assert err
    code, _, err = run("--model", "gpt2:tiny")
    assert code == 2
    assert "--spec" in err


def test_what_is_no_model_is_refused(run, files, tmp_path):
    code, _, err = run(*files(), "--model", tmp_path)
    assert code == 1
    assert "save_to_preset" in err
