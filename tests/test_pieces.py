"""Sequences and documents as privacy units, from texts to the batches and the card."""

from __future__ import annotations

import collections
import json

import numpy as np
import pytest

import tfdp
from tfdp.cli import main
from tfdp.errors import DataError
from tfdp.spec import PrivacySpec
from tfdp.workflow import TextRecords, build_model, encode_texts, plan_for, records_for, train_text_model

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")

_LENGTH = 6  # tokens that are read; a piece holds one more
_TEXTS = (
    "the cat sat on the mat, and the dog ran home",
    "no",
    "what a day it was",
    "on the mat sat a cat",
    "ab cd ef g",
)
_OWNERS = ("one", "two", "one", "three", "four")


def _spec(unit, num_units, *, num_records=None, scheme="full_batch", noise=3.0):
    sampling = {"scheme": "full_batch"} if scheme == "full_batch" else {"scheme": scheme, "expected_batch_size": 2.0}
    return PrivacySpec.from_dict(
        {
            "schema_version": "1.0",
            "claim": {
                "epsilon": 9.0,
                "delta": 1e-3,
                "adjacency": "add_or_remove_one",
                "privacy_unit": {"description": "one of them", **unit},
                "data_accesses": ["training"],
            },
            "data": {"num_units": num_units, "num_records": num_records, "size_is_public": True},
            "mechanism": {"clip_norm": 1.0, "noise_multiplier": noise},
            "sampling": {**sampling, "steps": 2},
        }
    )


_SEQUENCE = {"kind": "sequence", "sequence_length": _LENGTH}


def _document(method, k, selection="longest"):
    return {
        "kind": "document",
        "id_field": "title",
        "max_records_per_unit": k,
        "method": method,
        "selection": selection,
    }


@pytest.fixture(scope="module")
def model():
    return build_model("gpt2:tiny", lora_rank=1)


def _tokens(model):
    return [np.asarray(model.preprocessor.tokenizer(text)).tolist() for text in _TEXTS]


def _pieces(model):
    """The slow obvious way: document -> its pieces, in order; a token that stays alone predicts nothing."""
    found = collections.defaultdict(list)
    for owner, tokens in zip(_OWNERS, _tokens(model), strict=True):
        cut = [tokens[at : at + _LENGTH + 1] for at in range(0, len(tokens), _LENGTH + 1)]
        found[owner] += [piece for piece in cut if len(piece) > 1]
    return found


def _read(x, y, weight):
    """The tokens of a record, as far as there are any."""
    used = int(np.sum(weight))
    assert np.array_equal(weight, np.arange(_LENGTH) < used)
    assert np.array_equal(x[1:], y[:-1])
    return [int(x[0]), *map(int, y[:used])]


def test_a_sequence_is_a_piece_of_all_texts(model):
    end = model.preprocessor.tokenizer.end_token_id
    stream = [token for tokens in _tokens(model) for token in [*tokens, end]]
    expected = [stream[at : at + _LENGTH + 1] for at in range(0, len(stream), _LENGTH + 1)]
    plan = tfdp.make_plan(_spec(_SEQUENCE, len(expected)))
    (x, y, weight), options = records_for(plan, model, TextRecords(_TEXTS), _LENGTH)
    assert options == {}
    assert [_read(*row) for row in zip(x["token_ids"], y, weight, strict=True)] == expected
    assert len(expected) > len(_TEXTS)


@pytest.mark.parametrize("selection", ["longest", "shortest", "highest_perplexity"])
def test_pieces_of_a_document_are_clipped_together(model, selection):
    """Every document is drawn, and gives its own pieces alone, k at most."""
    k, pieces = 2, _pieces(model)
    plan = tfdp.make_plan(_spec(_document("user_wise_dp_sgd", k, selection), 4))
    records, options = records_for(plan, model, TextRecords(_TEXTS, _OWNERS), _LENGTH)
    batch = next(iter(tfdp.poisson_batches(records, plan, **options).as_numpy_iterator()))
    units = batch["unit_weight"] == 1
    assert units.sum() == 4
    got = []
    for ids, y, weight, slots in zip(
        batch["x"]["token_ids"][units], batch["y"][units], batch["sample_weight"][units],
        batch["record_weight"][units], strict=True,
    ):  # fmt: skip
        got.append([_read(*row) for row, slot in zip(zip(ids, y, weight, strict=True), slots, strict=True) if slot])
    assert len(pieces["one"]) > k
    for found, (owner, own) in zip(got, pieces.items(), strict=True):
        assert len(found) == min(k, len(own)), owner
        assert all(piece in own for piece in found), owner
    if selection == "longest":
        assert got[0] == sorted(pieces["one"], key=len, reverse=True)[:k]
    if selection == "shortest":
        assert sorted(map(len, got[0])) == sorted(map(len, pieces["one"]))[:k]


def test_pieces_of_a_document_are_sampled_singly_under_group_privacy(model):
    k, pieces = 2, _pieces(model)
    most = sum(min(k, len(own)) for own in pieces.values())
    plan = tfdp.make_plan(_spec(_document("group_privacy", k), 4, num_records=most, noise=6.0))
    records, options = records_for(plan, model, TextRecords(_TEXTS, _OWNERS), _LENGTH)
    batch = next(iter(tfdp.poisson_batches(records, plan, **options).as_numpy_iterator()))
    units = batch["unit_weight"] == 1
    rows = zip(batch["x"]["token_ids"][units], batch["y"][units], batch["sample_weight"][units], strict=True)
    got = [_read(*row) for row in rows]
    assert len(got) == most
    for own in pieces.values():
        assert sum(piece in own for piece in got) == min(k, len(own))

    # The number of texts is not the number of pieces.
    few = tfdp.make_plan(_spec(_document("group_privacy", k), 4, num_records=5, noise=6.0))
    with pytest.raises(DataError, match=f"write num_records: {most}"):
        tfdp.poisson_batches(records, few, **options)


def test_no_document_vanishes(model):
    """One of a single token has nothing to predict, and stays a unit: how many there are must not depend on that."""
    texts, owners = (*_TEXTS, "x"), (*_OWNERS, "five")
    plan = tfdp.make_plan(_spec(_document("user_wise_dp_sgd", 2), 5))
    _, options = records_for(plan, model, TextRecords(texts, owners), _LENGTH)
    assert set(options["unit_ids"]) == set(owners)


def test_a_text_of_an_example_or_a_user_is_not_cut_into_pieces(model):
    user = _document("user_wise_dp_sgd", 2) | {"kind": "user"}
    for unit in (user, _document("native", 1), {"kind": "example"}):
        num_units = len(_TEXTS) if unit["kind"] == "example" else 4
        records, _ = records_for(tfdp.make_plan(_spec(unit, num_units)), model, TextRecords(_TEXTS, _OWNERS), _LENGTH)
        assert np.array_equal(records[1], encode_texts(model, _TEXTS, _LENGTH)[1])


def test_documents_are_trained_on_in_pieces(tmp_path):
    spec = _spec(_document("user_wise_dp_sgd", 3), 4)
    result = train_text_model(
        plan_for(spec, 4),
        build_model("gpt2:tiny", lora_rank=1),
        TextRecords(_TEXTS, _OWNERS),
        tmp_path,
        sequence_length=_LENGTH,
        verbose=0,
    )
    assert result.steps == 2
    card = json.loads((tmp_path / "MODEL_CARD.json").read_text())
    assert (card["claim"]["status"], card["guarantee"]["unit_kind"]) == ("claimed", "document")
    assert card["guarantee"]["max_records_per_unit"] == 3


def test_the_command_packs_texts_into_sequences(tmp_path, capsys, model):
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in _TEXTS))
    end = 1  # after every text
    count = -(-sum(len(tokens) + end for tokens in _tokens(model)) // (_LENGTH + 1))

    def train(num_units, length=_LENGTH):
        content = _spec(_SEQUENCE, num_units).to_dict()
        (tmp_path / "spec.json").write_text(json.dumps(content))
        with pytest.raises(SystemExit) as caught:
            main(
                ["train", "--spec", str(tmp_path / "spec.json"), "--data", str(tmp_path / "texts.jsonl"),
                 "--model", "gpt2:tiny", "--out", str(tmp_path / "run"), "--holdout", "0",
                 "--sequence-length", str(length)]
            )  # fmt: skip
        return caught.value.code or 0, *capsys.readouterr()

    code, _, error = train(len(_TEXTS))
    assert code == 1
    assert f"write num_units: {count}" in error
    code, _, error = train(count, length=_LENGTH + 1)
    assert code == 2
    assert f"--sequence-length {_LENGTH}" in error.replace("│", " ")
    assert not (tmp_path / "run").exists()
    code, out, _ = train(count)
    assert code == 0
    assert f"packed into sequences of {_LENGTH} tokens" in out
    card = json.loads((tmp_path / "run" / "MODEL_CARD.json").read_text())
    assert card["claim"]["status"] == "claimed"
    assert card["guarantee"]["unit_kind"] == "sequence"
