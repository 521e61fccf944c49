from __future__ import annotations

import json
import math
import shutil

import numpy as np
import pytest

from tfdp.demo import corpus, public_model
from tfdp.errors import DataError
from tfdp.evaluation import perplexity, token_bytes

_TEXT = "Return the number of items.\n\n    Raises ValueError if it is empty — naïvely \x00\t."


@pytest.fixture(scope="module")
def model():
    return public_model.load_public_model()


@pytest.fixture(scope="module")
def tokenizer(model):
    return model.preprocessor.tokenizer


def test_any_text_survives_the_tokenizer(tokenizer):
    for text in (_TEXT, bytes(range(1, 256)).decode("latin-1"), "", " leading", "trailing \n\n"):
        tokens = tokenizer(text)
        assert tokenizer.detokenize(tokens) == text
        assert token_bytes(tokenizer)[np.asarray(tokens, int)].sum() == len(text.encode())


def test_records_begin_and_end_and_are_cut(tokenizer):
    end = tokenizer.token_to_id(public_model.END)
    assert end == 0
    short, long, empty = public_model.token_records(["Return x.", _TEXT * 50, ""], tokenizer)
    assert short[0] == short[-1] == end
    assert tokenizer.detokenize(short[1:-1]) == "Return x."
    assert len(long) == public_model.SEQUENCE_LENGTH + 1
    assert long[-1] != end
    assert empty.tolist() == [end, end]
    assert short.dtype == long.dtype == np.int32


def test_records_are_what_the_preprocessor_of_the_model_makes(model, tokenizer):
    (record,) = public_model.token_records(["Return the number of items."], tokenizer)
    x, y, weight = model.preprocessor("Return the number of items.")
    count = len(record) - 1
    assert np.asarray(x["token_ids"])[:count].tolist() == record[:-1].tolist()
    assert np.asarray(y)[:count].tolist() == record[1:].tolist()
    assert np.asarray(weight).sum() == count


def test_perplexity_equals_one_record_after_the_other(model, tokenizer):
    records = public_model.token_records(["Return the number of items.", _TEXT, "x"], tokenizer)
    losses = []
    for record in records:
        inputs = {"token_ids": record[None, :-1], "padding_mask": np.ones((1, len(record) - 1), np.int32)}
        logits = np.asarray(model(inputs), np.float64)[0]
        normal = np.log(np.sum(np.exp(logits - logits.max(-1, keepdims=True)), -1)) + logits.max(-1)
        losses.append(float(np.sum(normal - logits[np.arange(len(record) - 1), record[1:]])))
    result = perplexity(model, records, batch_size=2)
    np.testing.assert_allclose(result.losses, losses, rtol=1e-4)
    tokens = sum(len(record) - 1 for record in records)
    assert result.perplexity == pytest.approx(math.exp(sum(losses) / tokens), rel=1e-4)
    text_bytes = len(b"Return the number of items.x") + len(_TEXT.encode())
    assert result.bits_per_byte == pytest.approx(sum(losses) / math.log(2) / text_bytes, rel=1e-4)


def test_empty_records_are_refused(model):
    with pytest.raises(DataError, match="at least two tokens"):
        perplexity(model, [])
    with pytest.raises(DataError, match="at least two tokens"):
        perplexity(model, [np.array([0])])


def test_the_public_model_is_as_good_as_its_provenance_says(model, tokenizer):
    provenance = public_model.public_model_provenance()
    assert model.count_params() == provenance["parameters"]
    size = sum((public_model.FOLDER / name).stat().st_size for name in provenance["digests"])
    assert size < 3_000_000
    held_out = corpus.split(corpus.private_docstrings()).held_out[:128]
    records = public_model.token_records([docstring.text for docstring in held_out], tokenizer)
    found = perplexity(model, records)
    # It knows English, and has not seen these: far below chance, far above what a model that had seen them would give.
    assert 2.0 < found.bits_per_byte < 3.2
    assert 40 < found.perplexity < 400


def test_the_public_model_takes_lora(model):
    fresh = public_model.load_public_model()
    fresh.backbone.enable_lora(2)
    adapters = [variable for variable in fresh.trainable_variables if "lora" in variable.path]
    assert len(adapters) == 4 * fresh.backbone.num_layers  # query and value, two factors each
    assert np.array_equal(fresh.backbone.token_embedding.embeddings, model.backbone.token_embedding.embeddings)


def test_damaged_files_are_refused(tmp_path):
    for name in (public_model.WEIGHTS, public_model.TOKENIZER, public_model.PROVENANCE):
        shutil.copy(public_model.FOLDER / name, tmp_path)
    content = json.loads((tmp_path / public_model.TOKENIZER).read_text())
    content["vocabulary"][300], content["vocabulary"][301] = content["vocabulary"][301], content["vocabulary"][300]
    (tmp_path / public_model.TOKENIZER).write_text(json.dumps(content))
    with pytest.raises(DataError, match="SHA-256"):
        public_model.load_public_model(tmp_path)
