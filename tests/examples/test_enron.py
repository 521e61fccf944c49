from __future__ import annotations

import importlib.util
import io
import json
import pathlib
import sys
import tarfile

import pytest

from tfdp.errors import DataError

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")

_PATH = pathlib.Path(__file__).parents[2] / "examples" / "enron.py"


@pytest.fixture(scope="module")
def enron():
    specification = importlib.util.spec_from_file_location("enron", _PATH)
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module  # dataclasses look their module up
    specification.loader.exec_module(module)
    yield module
    del sys.modules[specification.name]


def _archive(path, mails):
    with tarfile.open(path, "w:gz") as archive:
        for number, content in enumerate(mails):
            member = tarfile.TarInfo(f"maildir/box/{number}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        folder = tarfile.TarInfo("maildir/empty")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
    return path


_MAILS = [
    b"From: Ann <ann@example.org>\n\nFirst.\n",
    b"From: ANN@Example.org\n\nFirst.\n",  # the same again, under the same address written otherwise
    b"From: ann@example.org\n\nSecond.\n\n-----Original Message-----\nFrom: bob@example.org\n\nBob's words.\n",
    b"From: ann@example.org\n\nSecond.\n\n> Bob's other words\n",  # nothing new of hers
    b"From: bob@example.org\n\nFirst.\n",  # what Ann wrote, too: stays
    b"From: bob@example.org\n\n---------------------- Forwarded by Ann on 1 May\n\nAnn's words.\n",
    b"From: zoe@example.org\nSubject: x\n\nFrom nobody else.\n",
    b"Subject: no sender\n\nWhose?\n",
]


def test_mails_of_a_sender_become_one_record(enron, tmp_path):
    records, counts = enron.read_units(_archive(tmp_path / "mails.tar.gz", _MAILS))
    assert dict(zip(records.unit_ids, records.texts, strict=True)) == {
        "ann@example.org": "First.\n\nSecond.",
        "bob@example.org": "First.",
        "zoe@example.org": "From nobody else.",
    }
    assert (counts.mails, counts.kept, counts.repeated, counts.forwarded) == (8, 5, 1, 1)


def test_a_senders_record_does_not_depend_on_the_others(enron, tmp_path):
    whole = enron.read_units(_archive(tmp_path / "all.tar.gz", _MAILS))[0]
    kept = dict(zip(whole.unit_ids, whole.texts, strict=True))
    for sender in kept:
        left = [mail for mail in _MAILS if sender not in str(mail.split(b"\n")[0]).lower()]
        others = enron.read_units(_archive(tmp_path / "rest.tar.gz", left))[0]
        expected = {name: text for name, text in kept.items() if name != sender}
        assert dict(zip(others.unit_ids, others.texts, strict=True)) == expected


def test_no_mail_at_all_is_refused(enron, tmp_path):
    with pytest.raises(DataError, match="none in 1 files"):
        enron.read_units(_archive(tmp_path / "b.tar.gz", _MAILS[7:]))


def test_the_spec_counts_the_senders_that_there_are(enron, shared):
    records, counts = enron.read_units(shared / "data" / "enron" / enron.ARCHIVE.name)
    assert counts.mails == 14465
    train, held_out = enron.split_held_out(records, enron.HELD_OUT)
    spec = enron.spec_for(len(train), limited=False)
    assert spec.data.num_units == len(train)
    assert spec.claim.delta * len(train) <= 0.1
    assert len(held_out) > 500


def test_a_slice_is_trained_and_gets_its_card(enron, shared, tmp_path):
    result = enron.run(shared / "data" / "enron" / enron.ARCHIVE.name, tmp_path, limit=80, lora_rank=2, verbose=0)
    assert result.steps == 4
    assert result.after.perplexity < result.before.perplexity
    card = json.loads((tmp_path / "MODEL_CARD.json").read_text())
    (metric,) = card["utility"]["metrics"]
    assert metric["private"] == pytest.approx(result.after.perplexity)
    assert card["accounting"]["steps_executed"] == 4
    (removal,) = [row for row in card["data_accesses"] if row["name"] == "Removal of duplicates"]
    assert removal["status"] == "covered"
