"""The builders on made-up data, through the test case of TensorFlow Datasets, and on the real data."""

from __future__ import annotations

import collections
import importlib.util
import json
import pathlib
import shutil
from typing import ClassVar

import pytest
import tensorflow_datasets as tfds

import tfdp
from tfdp.datasets.access import EncodedRecords, unit_ids
from tfdp.datasets.builders import BookSum, Enron, EnronConfig, Jsonl, prepare
from tfdp.errors import DataError

SAMPLES = pathlib.Path(__file__).parent / "samples"
ENRON = SAMPLES / "enron" / "maildir"


class EnronTest(tfds.testing.DatasetBuilderTestCase):
    DATASET_CLASS = Enron
    EXAMPLE_DIR = SAMPLES / "enron"
    BUILDER_CONFIG_NAMES_TO_TEST = ("recipients",)
    SPLITS: ClassVar = {"train": 5}


class EnronMailsTest(tfds.testing.DatasetBuilderTestCase):
    DATASET_CLASS = Enron
    EXAMPLE_DIR = SAMPLES / "enron"
    BUILDER_CONFIG_NAMES_TO_TEST = ("mails",)
    SPLITS: ClassVar = {"train": 3}


class BookSumTest(tfds.testing.DatasetBuilderTestCase):
    DATASET_CLASS = BookSum
    EXAMPLE_DIR = SAMPLES / "book_sum"
    SPLITS: ClassVar = {"train": 3}


class JsonlTest(tfds.testing.DatasetBuilderTestCase):
    DATASET_CLASS = Jsonl
    EXAMPLE_DIR = SAMPLES / "jsonl"
    SPLITS: ClassVar = {"train": 3}


def records_of(builder):
    """The records as sorted tuples of texts; the builder's own order is by a hash."""
    source = builder.as_data_source(split="train")
    plain = [{name: getattr(value, "decode", lambda v=value: v)() for name, value in row.items()} for row in source]
    return sorted(plain, key=lambda row: json.dumps(row, default=str))


def test_mails_become_records_of_their_sender(tmp_path):
    builder = prepare(Enron, ENRON, tmp_path)
    found = records_of(builder)
    figures = [row for row in found if row["sender"] == "sales@example.com"]
    assert [row["recipient"] for row in figures] == [f"{name}@example.com" for name in ("legal", "office", "team")]
    assert {(row["subject"], row["text"]) for row in figures} == {("Figures", "The figures of April are complete.")}
    assert {row["date"] for row in figures} == {"2001-05-01T10:00:00-07:00"}
    others = [row for row in found if row not in figures]
    assert [(row["sender"], row["recipient"], row["subject"], row["text"]) for row in others] == [
        ("legal@example.com", "", "Résumé", "The résumé of the contract."),
        ("office@example.com", "sales@example.com", "RE: Figures", "Received."),
    ]
    assert dict(builder.info.metadata) == {
        "mails": 7,
        "malformed": {"sender is not an address": 1, "no sender": 1},
        "repeated": 1,
        "forwarded": 1,
        "without_text": 0,
        "kept": 3,
        "records": 5,
    }
    assert prepare(Enron, ENRON, tmp_path).info.metadata["records"] == 5  # read back from the disk


def test_options_of_mails(tmp_path):
    def texts(**options):
        return [row["text"] for row in records_of(prepare(Enron, ENRON, tmp_path, **options))]

    assert len(texts(expand_recipients=False)) == 3
    assert sum("Original Message" in text for text in texts(keep_quoted=True)) == 1
    assert sum("Original Message" in text for text in texts(keep_quoted=True, keep_forwarded=True)) == 2


def test_books_and_lines(tmp_path):
    books = records_of(prepare(BookSum, SAMPLES / "book_sum" / "chapters.jsonl", tmp_path))
    assert [(row["book_id"], row["title"], int(row["chapter_index"]), row["synopsis"]) for row in books] == [
        ("7", "First book", 1, "It begins."),
        ("7", "First book", 2, ""),
        ("8", "", -1, ""),
    ]
    lines = prepare(Jsonl, SAMPLES / "jsonl" / "texts.jsonl", tmp_path)
    assert records_of(lines) == [
        {"id": "3", "text": "A number is an id."},
        {"id": "a", "text": "First of a."},
        {"id": "b", "text": "First of b."},
    ]
    assert dict(lines.info.metadata) == {"records": 3, "without_id": 0, "without_text": 1}


def test_records_without_an_id_are_an_error_with_a_count(tmp_path):
    path = tmp_path / "mails.jsonl"
    rows = [{"who": "a", "text": "x"}, {"text": "y"}, {"who": None, "text": "z"}, {"who": " ", "text": "z"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=r"3 of 4 records without one") as caught:
        prepare(Jsonl, path, tmp_path, id_field="who")
    assert "y" not in str(caught.value).split()
    kept = prepare(Jsonl, path, tmp_path, id_field="who", drop_missing=True)
    assert records_of(kept) == [{"id": "a", "text": "x"}]
    assert kept.info.metadata["without_id"] == 3


def test_a_changed_file_is_prepared_again(tmp_path):
    path = tmp_path / "texts.jsonl"
    for count in (1, 2):
        path.write_text("".join(json.dumps({"id": "a", "text": f"x{number}"}) + "\n" for number in range(count)))
        assert len(records_of(prepare(Jsonl, path, tmp_path))) == count


def test_what_cannot_be_prepared(tmp_path, monkeypatch):
    with pytest.raises(DataError, match="Expected a file or folder"):
        prepare(Jsonl, tmp_path / "nothing.jsonl", tmp_path)
    with pytest.raises(DataError, match=r"\['colour'\]"):
        prepare(Jsonl, SAMPLES / "jsonl" / "texts.jsonl", tmp_path, colour="red")
    empty = tmp_path / "maildir"
    empty.mkdir()
    with pytest.raises(DataError, match="none in 0 files"):
        prepare(Enron, empty, tmp_path)
    (tmp_path / "chapters.jsonl").write_text('{"book_id": 1, "text": "x", "chapter_index": "one"}\n')
    with pytest.raises(DataError, match="line 1: expected a whole number in 'chapter_index'"):
        prepare(BookSum, tmp_path / "chapters.jsonl", tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="array_record"):
        prepare(Enron, ENRON, tmp_path)


def test_manual_data_must_be_one_file(tmp_path):
    manual = tmp_path / "manual"
    shutil.copytree(ENRON, manual / "maildir")
    settings = tfds.download.DownloadConfig(manual_dir=manual)
    builder = Enron(data_dir=tmp_path / "data", config="mails", file_format="array_record")
    builder.download_and_prepare(download_config=settings)
    assert builder.info.splits["train"].num_examples == 3
    (manual / "more.csv").write_text("message\n")
    with pytest.raises(DataError, match="Received: 2"):
        Enron(data_dir=tmp_path / "data", config="recipients").download_and_prepare(download_config=settings)


class Counted:
    """A source that remembers what was read of it."""

    def __init__(self, source):
        self.source = source
        self.read = []

    def __len__(self):
        return len(self.source)

    def __getitem__(self, index):
        self.read.append(index)
        return self.source[index]


def test_the_sampler_reads_what_it_draws_and_nothing_else(tmp_path, plan_of):
    path = tmp_path / "texts.jsonl"
    rows = [{"id": f"u{number}", "text": "ab" * (number + 1)} for number in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = Counted(prepare(Jsonl, path, tmp_path).as_data_source(split="train"))
    lengths = [len(row["text"]) for row in source.source]
    records = EncodedRecords(source, lambda text: list(text.encode()))
    assert list(unit_ids(source.source, "id")) == [row["id"].decode() for row in source.source]
    batches = tfdp.poisson_batches(records, plan_of(num_units=40, batch=4, seed=3, rng="prng"), sequence_length=9)
    assert set(source.read) <= {0}  # what a record looks like
    source.read.clear()
    drawn = 0
    for batch in batches.take(5).as_numpy_iterator():
        real = batch["sample_weight"].sum(axis=-1)[batch["unit_weight"] > 0]
        drawn += int(batch["unit_weight"].sum())
        assert sorted(real.astype(int)) == sorted(min(lengths[index] - 1, 9) for index in source.read[-len(real) :])
    assert len(source.read) == drawn
    assert 0 < drawn < 40


@pytest.mark.skipif(importlib.util.find_spec("apache_beam") is not None, reason="Apache Beam is installed")
def test_beam_must_be_installed(tmp_path):
    with pytest.raises(DataError, match="Install apache-beam"):
        prepare(Enron, ENRON, tmp_path, use_beam=True)


@pytest.mark.filterwarnings("ignore")  # Beam's own
@pytest.mark.parametrize("expand", [True, False])
def test_beam_makes_the_same_records(tmp_path, expand):
    pytest.importorskip("apache_beam", reason="needs Apache Beam, which is not a dependency")
    plain = prepare(Enron, ENRON, tmp_path, expand_recipients=expand)
    with_beam = prepare(Enron, ENRON, tmp_path, expand_recipients=expand, use_beam=True)
    assert records_of(with_beam) == records_of(plain)


class TestRealData:
    """Counts that the description of the data sets states."""

    def test_enron(self, shared, tmp_path):
        archive = shared / "data" / "enron" / "enron_inbox_subset.tar.gz"
        builder = prepare(Enron, archive, tmp_path)
        assert builder.info.metadata["mails"] == 14465
        assert builder.info.metadata["malformed"] == {"sender is not an address": 18}
        assert builder.info.metadata["repeated"] == 1507
        source = builder.as_data_source(split="train")
        assert len(source) == builder.info.metadata["records"] == 65456
        assert len(set(unit_ids(source, "sender"))) == 5655

    def test_books(self, shared, tmp_path):
        for name, chapters, books in (("pd_chapter_synopses", 397, 6), ("litbank_chapters", 1142, 100)):
            builder = prepare(BookSum, shared / "data" / "books" / f"{name}.jsonl.gz", tmp_path)
            source = builder.as_data_source(split="train")
            assert len(source) == chapters
            assert len(set(unit_ids(source, "book_id"))) == books

    def test_lines_by_speaker(self, shared, tmp_path):
        folder = shared / "data" / "speakers"
        irc = prepare(Jsonl, folder / "irc_ubuntu_by_nick.jsonl.gz", tmp_path, id_field="nick")
        assert dict(irc.info.metadata) == {"records": 57409 - 7, "without_id": 0, "without_text": 7}
        speeches = prepare(Jsonl, folder / "sotu_by_president.jsonl.gz", tmp_path, id_field="speaker")
        counts = collections.Counter(unit_ids(speeches.as_data_source(split="train"), "id"))
        assert (sum(counts.values()), len(counts)) == (1611, 43)
        assert max(counts.values()) == 40


def test_settings_have_their_names():
    assert {config.name for config in Enron.BUILDER_CONFIGS} == {"recipients", "mails"}
    assert EnronConfig(name="x").expand_recipients
