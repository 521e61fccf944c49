"""The whole job: records, model, private fit, continuation, card."""

from __future__ import annotations

import csv
import gzip
import importlib.util
import json
import pathlib
import sys

import keras
import numpy as np
import pytest

from tfdp import PrivacySpec, read_ledger
from tfdp.errors import BudgetExhaustedError, DataError, LedgerError, PlanError
from tfdp.resume import read_checkpoint
from tfdp.sampling.records import as_records
from tfdp.workflow import (
    TextRecords,
    build_model,
    encode_texts,
    plan_for,
    private_fit,
    read_text_records,
    split_held_out,
    steps_done,
    train_arrays,
    train_text_model,
)
from tfdp.workflow.progress import duration

# From Keras's own saving of a model.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")

_STORIES = pathlib.Path(__file__).parents[1] / "examples" / "stories260k.py"
_SECRET = "zebra-4711"
_LENGTH = 24


def _spec(num_units, steps=6, batch=8, **unit):
    unit = {"kind": "example", "description": "one text"} | unit
    return PrivacySpec.from_dict(
        {
            "schema_version": "1.0",
            "claim": {
                "epsilon": 9.0,
                "delta": 1e-4,
                "privacy_unit": unit,
                "adjacency": "add_or_remove_one",
                "data_accesses": ["training"],
            },
            "data": {"num_units": num_units, "size_is_public": True},
            "mechanism": {"clip_norm": 1.0, "noise_multiplier": 1.0},
            "sampling": {"scheme": "poisson", "expected_batch_size": float(batch), "steps": steps},
        }
    )


def _texts(count, seed=0):
    generator = np.random.default_rng(seed)
    words = ["the", "cat", "sat", "on", "a", "mat"]
    return tuple(" ".join(generator.choice(words, 5)) for _ in range(count))


# Reading.


def _write(path, content):
    content = content if isinstance(content, bytes) else content.encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def test_json_lines_and_tables_say_the_same(tmp_path):
    rows = [("u1", 'a "quoted" text,\nin two lines'), ("7", "naïve ✓"), ("u1", "   "), ("u3", "x" * 200_000)]
    lines = "".join(json.dumps({"id": i, "text": t, "other": None}) + "\n" for i, t in rows)
    with (tmp_path / "t.csv").open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.writer(file)
        writer.writerows([("text", "other", "id"), *((t, "", i) for i, t in rows)])
    table = (tmp_path / "t.csv").read_bytes()
    files = [
        _write(tmp_path / "a.jsonl", b"\xef\xbb\xbf" + lines.encode() + b"\n"),
        _write(tmp_path / "b.JSONL.gz", lines),
        tmp_path / "t.csv",
        _write(tmp_path / "v1.csv.gz", table),
    ]
    for path in files:
        read = read_text_records(path, id_field="id")
        assert read.texts == (rows[0][1], rows[1][1], rows[3][1]), path
        assert read.unit_ids == ("u1", "7", "u3")
        assert read.num_blank == 1
    assert csv.field_size_limit() == 131072
    number = _write(tmp_path / "n.jsonl", '{"text": "half \\ud83d pair", "id": 7}')
    assert read_text_records(number, id_field="id").unit_ids == ("7",)
    assert read_text_records(number).texts == ("half ? pair",)
    assert _SECRET not in repr(TextRecords((_SECRET,), (_SECRET,)))


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jsonl", '{"text": "ok"}\n{"body": "zebra-4711"}\n', "line 2: expected the field 'text'"),
        ("a.jsonl", '{"text": "ok"}\n\n{"text": "zebra-4711}\n', "line 3: expected one JSON object"),
        (
            "a.jsonl",
            '{"text": "zebra-4711", "text": "b"}\n',
            "line 1: expected one JSON object. Received: a field twice",
        ),
        ("a.jsonl", '["zebra-4711"]\n', "line 1: expected one JSON object. Received: a list"),
        ("a.jsonl", '{"text": {"zebra-4711": 1}}\n', "expected text in 'text'. Received: an object"),
        ("a.jsonl", '{"text": null}\n', "Received: null"),
        ("a.jsonl", b'{"text": "ok"}\n{"text": "zebra-4711 \xff"}\n', "line 2: expected UTF-8"),
        ("a.jsonl", '{"text": " "}\n', "at least one record with text. Received: 1 without"),
        ("a.jsonl", "", "at least one record"),
        ("a.csv", "", "line 1: expected one column 'text' in the header. Received: none among 0"),
        ("a.csv", "zebra-4711,b\n", "Received: none among 2"),
        ("a.csv", "text,id,text\nzebra-4711,b,c\n", "Received: several among 3"),
        ("a.csv", 'text,id\n"two\nlines",1\nzebra-4711\n', "line 4: expected 2 values, as in the header. Received: 1"),
        ("a.csv", 'text,id\n"zebra-4711,1\n', "line 2: expected a row of a table"),
        ("a.csv", b"text,id\nzebra-4711\xff,1\n", "expected UTF-8"),
        ("a.txt", "zebra-4711", "expected a file that ends in .jsonl"),
        ("a", "zebra-4711", "expected a file that ends in .jsonl"),
    ],
)
def test_faults_name_the_line_and_never_what_stands_there(tmp_path, name, content, expected):
    with pytest.raises(DataError) as caught:
        read_text_records(_write(tmp_path / name, content))
    assert expected in str(caught.value)
    assert _SECRET not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("value", ["true", "1.5", '["zebra-4711"]'])
def test_a_record_without_a_unit_is_refused(tmp_path, value):
    path = _write(tmp_path / "a.jsonl", f'{{"text": "ok", "id": {value}}}\n')
    with pytest.raises(DataError, match="line 1: expected an id in 'id'") as caught:
        read_text_records(path, id_field="id")
    assert _SECRET not in str(caught.value)


def test_records_without_an_id_are_counted_or_left_out(tmp_path):
    lines = ['{"text": "a", "id": 7}', '{"text": "b"}', '{"text": "c", "id": null}', '{"text": "d", "id": " "}']
    path = _write(tmp_path / "a.jsonl", "\n".join(lines))
    with pytest.raises(DataError, match=r"line 2: expected an id in 'id' of every record. Received: 3 records without"):
        read_text_records(path, id_field="id")
    records = read_text_records(path, id_field="id", drop_missing=True)
    assert (records.texts, records.unit_ids, records.num_missing) == (("a",), ("7",), 3)
    with pytest.raises(DataError, match="one column 'id' in the header"):
        read_text_records(_write(tmp_path / "a.csv", "text,name\na,b\n"), id_field="id", drop_missing=True)


def test_unreadable_files_are_data_errors(tmp_path):
    with pytest.raises(DataError, match="No such file"):
        read_text_records(tmp_path / "none.jsonl")
    broken = tmp_path / "a.jsonl.gz"
    broken.write_bytes(gzip.compress(b'{"text": "ok"}\n' * 1000)[:-20])
    with pytest.raises(DataError, match="read to its end"):
        read_text_records(broken)
    broken.write_bytes(b"not gzip")
    with pytest.raises(DataError, match="read to its end"):
        read_text_records(broken)


# Units.


def test_held_out_units_are_chosen_one_by_one():
    records = TextRecords(_texts(2000), tuple(f"u{index}" for index in range(2000)))
    train, held_out = split_held_out(records, 0.2)
    assert not set(train.unit_ids) & set(held_out.unit_ids)
    assert len(train) + len(held_out) == 2000
    # Binomial(2000, 0.2) has standard deviation 18; six of them, false alarm below 1e-8.
    assert abs(len(held_out) - 400) < 107
    fewer, _ = split_held_out(records.take(range(0, 2000, 3)), 0.2)
    assert set(fewer.unit_ids) <= set(train.unit_ids)
    assert len(split_held_out(records, 0.0)[1]) == 0
    nested = set(split_held_out(records, 0.1)[1].unit_ids)
    assert nested < set(held_out.unit_ids)
    same = TextRecords(("a text",) * 5)
    assert {len(part) for part in split_held_out(same, 0.0)} == {0, 5}
    for share in (1.0, -0.1, float("nan")):
        with pytest.raises(DataError, match="held-out share"):
            split_held_out(records, share)


def test_nothing_left_to_train_on():
    many = TextRecords(("a",) * 100, tuple(f"k{index}" for index in range(100)))
    out = split_held_out(many, 0.5)[1]
    with pytest.raises(DataError, match=f"all {len(out)} held out"):
        split_held_out(out, 0.5)


def test_a_wrong_size_names_the_number_to_write():
    with pytest.raises(PlanError, match=r"Received: 50 in the spec, 47 in the data.*write num_units: 47"):
        plan_for(_spec(50), 47)
    private = PrivacySpec.from_dict(
        _spec(50).to_dict() | {"data": {"num_units": 50, "size_is_public": False, "deduplication": "none"}}
    )
    with pytest.raises(PlanError, match="decide whether it may be known"):
        plan_for(private, 47)
    assert plan_for(_spec(50), 50).num_units == 50


# Models.


@pytest.fixture(scope="module")
def tiny():
    return build_model("gpt2:tiny")


def test_tiny_gpt2_is_the_same_every_time_and_reads_every_byte(tiny):
    again = build_model("gpt2:tiny", lora_rank=2)
    frozen = [weight for weight in again.backbone.weights if "lora" not in weight.path]
    for one, other in zip(tiny.backbone.weights, frozen, strict=True):
        np.testing.assert_array_equal(one, other)
    tokenizer = tiny.preprocessor.tokenizer
    for text in ("the other\n\n tale", bytes(range(1, 256)).decode("latin-1"), "✓ 日本"):
        assert tokenizer.detokenize(tokenizer(text)) == text
    kinds = {
        variable.path.split("/")[-2] + "/" + variable.path.split("/")[-1] for variable in again.trainable_variables
    }
    assert kinds == {
        f"{layer}/{name}" for layer in ("query", "value") for name in ("bias", "lora_kernel_a", "lora_kernel_b")
    }


def test_texts_become_the_arrays_of_the_preprocessor(tiny):
    texts = ["the cat", "x" * 100, ""]
    x, y, weight = encode_texts(tiny, texts, _LENGTH)
    expected = tiny.preprocessor(texts, sequence_length=_LENGTH)
    np.testing.assert_array_equal(x["token_ids"], expected[0]["token_ids"])
    np.testing.assert_array_equal(y, expected[1])
    assert x["padding_mask"].shape == y.shape == weight.shape == (3, _LENGTH)
    assert weight.dtype == np.float32
    tokens = len(np.asarray(tiny.preprocessor.tokenizer("the cat")))
    assert weight.sum(axis=1).tolist() == [tokens + 1, _LENGTH, 1]
    with pytest.raises(DataError, match="at most 512"):
        encode_texts(tiny, texts, 513)
    with pytest.raises(DataError, match="at least 2"):
        encode_texts(tiny, texts, 1)
    with pytest.raises(DataError, match="none"):
        encode_texts(tiny, [], _LENGTH)


def test_a_preset_directory_is_loaded(tiny, tmp_path):
    tiny.save_to_preset(str(tmp_path / "preset"))
    loaded = build_model(tmp_path / "preset", lora_rank=1)
    assert sum("lora" in variable.path for variable in loaded.trainable_variables) == 8
    np.testing.assert_array_equal(loaded.backbone.token_embedding.embeddings, tiny.backbone.token_embedding.embeddings)
    assert encode_texts(loaded, ["the cat"], _LENGTH)[1].shape == (1, _LENGTH)


def test_what_is_no_preset_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    for name in (tmp_path / "empty", "no_such_preset"):
        with pytest.raises(DataError, match="save_to_preset") as caught:
            build_model(name)
        assert str(name) in str(caught.value)
    with pytest.raises(DataError, match="rank of at least 1"):
        build_model("gpt2:tiny", lora_rank=0)


# The job.


@pytest.fixture(scope="module")
def plan():
    return plan_for(_spec(40), 40)


@pytest.fixture(scope="module")
def finished(plan, tmp_path_factory):
    out = tmp_path_factory.mktemp("job") / "run"
    model = build_model("gpt2:tiny")
    result = train_text_model(
        plan,
        model,
        TextRecords(_texts(40)),
        out,
        held_out=TextRecords(_texts(12, seed=1)),
        sequence_length=_LENGTH,
        verbose=0,
        details={"title": "A test"},
    )
    return out, model, result


def test_a_job_ends_with_a_card_of_what_ran(finished, plan):
    out, model, result = finished
    assert result.steps == plan.steps == read_ledger(out / "ledger.jsonl").steps == 6
    assert result.epsilon == pytest.approx(plan.epsilon(6))
    card = json.loads((out / "MODEL_CARD.json").read_text())
    assert card["title"] == "A test"
    (metric,) = card["utility"]["metrics"]
    assert metric["private"] == pytest.approx(result.after.perplexity)
    assert metric["public"] == pytest.approx(result.before.perplexity)
    assert metric["n"] == 12
    assert metric["interval"][0] < metric["private"] < metric["interval"][1]
    assert "not trained on" in card["use"]["limits"]
    assert result.after.perplexity < result.before.perplexity
    assert 200 < result.before.perplexity < 320  # random weights: about one in 266 tokens
    assert result.history["loss"][0] == pytest.approx(np.log(result.before.perplexity), abs=0.5)
    assert not (out / "checkpoint").exists()
    assert model.preprocessor is not None


@pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer:UserWarning")
def test_the_released_model_can_be_loaded_and_goes_on_writing(finished):
    out, model, _ = finished
    loaded = keras.saving.load_model(out / "model.keras", compile=False)
    np.testing.assert_array_equal(loaded.backbone.token_embedding.embeddings, model.backbone.token_embedding.embeddings)
    loaded.compile(sampler="greedy")
    assert loaded.generate("the cat", max_length=12).startswith("the cat")


def test_a_finished_run_is_neither_repeated_nor_overwritten(finished, plan, tmp_path):
    out, model, _ = finished
    before = (out / "ledger.jsonl").read_bytes()
    with pytest.raises(BudgetExhaustedError, match="all 6 steps spent"):
        train_text_model(plan, model, TextRecords(_texts(40)), out, sequence_length=_LENGTH)
    with pytest.raises(LedgerError, match="a run under another one"):
        steps_done(out, plan_for(_spec(40, steps=7), 40))
    assert (out / "ledger.jsonl").read_bytes() == before
    (tmp_path / "model.keras").write_text("")
    with pytest.raises(LedgerError, match="no ledger"):
        steps_done(tmp_path, plan)


class _Stop(keras.callbacks.Callback):
    def __init__(self, after):
        super().__init__()
        self.left = after

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def _stopped(plan, out, after):
    model = build_model("gpt2:tiny", lora_rank=2)
    arrays = encode_texts(model, _texts(40), _LENGTH)
    files = {"ledger": out / "ledger.jsonl", "checkpoint": out / "checkpoint"}
    with pytest.raises(KeyboardInterrupt):
        private_fit(model, plan, arrays, **files, callbacks=[_Stop(after)], verbose=0)
    assert model.preprocessor is not None
    return model


def test_a_stopped_run_goes_on_from_its_checkpoint_and_refunds_nothing(tmp_path):
    plan = plan_for(_spec(40, steps=8, batch=10), 40)  # epochs of 4
    _stopped(plan, tmp_path, after=6)
    assert steps_done(tmp_path, plan) == 6
    kept = read_checkpoint(tmp_path / "checkpoint")
    assert (kept.steps, kept.updates) == (4, 4)
    model = build_model("gpt2:tiny", lora_rank=2)
    seen = []

    class Look(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            seen.extend(np.asarray(variable) for variable in self.model.trainable_variables)

    arrays = encode_texts(model, _texts(40), _LENGTH)
    files = {"ledger": tmp_path / "ledger.jsonl", "checkpoint": tmp_path / "checkpoint"}
    private_fit(model, plan, arrays, **files, callbacks=[Look()], verbose=0)
    for index, value in enumerate(seen):
        np.testing.assert_array_equal(value, kept.arrays[f"weight:{index}"])
    assert any(np.any(value) for name, value in kept.arrays.items() if name.startswith("weight"))
    assert read_ledger(tmp_path / "ledger.jsonl").steps == 8
    assert int(model.optimizer.iterations) == 4 + 2
    # All steps are spent and there is no card yet: what is left to do is the card.
    finished = train_text_model(
        plan,
        build_model("gpt2:tiny", lora_rank=2),
        TextRecords(_texts(40)),
        tmp_path,
        sequence_length=_LENGTH,
        verbose=0,
    )
    assert finished.steps == 8
    assert finished.before is finished.after is None
    assert finished.paths["json"].exists()
    with pytest.raises(BudgetExhaustedError):
        steps_done(tmp_path, plan)


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    plan = plan_for(_spec(40, steps=8, batch=10), 40)
    _stopped(plan, tmp_path, after=5)
    texts, options = TextRecords(_texts(40)), {"sequence_length": _LENGTH, "verbose": 0}
    with pytest.raises(DataError, match="weights of this model"):
        train_text_model(plan, build_model("gpt2:tiny", lora_rank=1), texts, tmp_path, **options)
    (tmp_path / "checkpoint" / "checkpoint.npz").write_bytes(b"PK")
    with pytest.raises(LedgerError, match="Expected a checkpoint"):
        train_text_model(plan, build_model("gpt2:tiny", lora_rank=2), texts, tmp_path, **options)
    assert read_ledger(tmp_path / "ledger.jsonl").steps == 5


def test_a_sequence_unit_has_the_length_that_was_claimed(tmp_path, tiny):
    plan = plan_for(_spec(40, kind="sequence", sequence_length=16), 40)
    with pytest.raises(DataError, match="length of the privacy unit, 16"):
        train_text_model(plan, tiny, TextRecords(_texts(40)), tmp_path / "run", sequence_length=_LENGTH)
    assert not (tmp_path / "run").exists()


def test_the_time_that_is_left_is_printed_between_epochs(tmp_path, capsys, plan):
    model = build_model("gpt2:tiny", lora_rank=1)
    arrays = encode_texts(model, _texts(40), _LENGTH)
    plan = plan_for(_spec(40, steps=5, batch=20), 40)  # epochs of 2, 2 and 1
    private_fit(model, plan, arrays, ledger=tmp_path / "ledger.jsonl", verbose=2)
    lines = [line for line in capsys.readouterr().out.splitlines() if "to go." in line]
    assert [line.split(" steps, epsilon")[0] for line in lines] == ["2 of 5", "4 of 5"]
    assert [duration(seconds) for seconds in (12, 89.6, 600, 7300)] == ["12 s", "90 s", "10 min", "2 h 2 min"]


@pytest.mark.parametrize("rank", [2, None])
def test_stories260k_trains_privately(shared, tmp_path, rank):
    specification = importlib.util.spec_from_file_location("stories260k", _STORIES)
    stories = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = stories  # dataclasses look their module up
    try:
        specification.loader.exec_module(stories)
        folder = shared / "data" / "models" / "stories260K"
        model, tokenizer = stories.load(folder / "stories260K.bin", folder / "tok512.bin")
    finally:
        del sys.modules[specification.name]
    if rank is not None:
        model.backbone.enable_lora(rank)
    texts = ["Return the number of items.", "Raise an error if it is empty.", "Return the name of the file."] * 12
    tokens = [np.array(tokenizer.encode(text)) for text in texts]
    taken = as_records(tokens, sequence_length=_LENGTH).take(np.arange(len(tokens)))
    arrays = (taken["x"], taken["y"], taken["sample_weight"])
    plan = plan_for(_spec(36, steps=4, batch=18), 36)
    result = train_arrays(plan, model, arrays, tmp_path, held_out=arrays, learning_rate=1e-2, verbose=0)
    assert result.steps == 4
    assert result.before.perplexity > 20  # it knows stories
    assert result.after.perplexity < 0.9 * result.before.perplexity
    assert json.loads((tmp_path / "MODEL_CARD.json").read_text())["accounting"]["steps_executed"] == 4
