from __future__ import annotations

import email
import email.policy
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
_CODED = (
    b"From: eva@ab.org\nContent-Type: text/plain; charset=no-such\n"
    b"Content-Transfer-Encoding: quoted-printable\n\ncaf=E9 =\nau lait\n"
)
_LONELY = b"From: Zoe@Example.org\nSubject: x\n\nFrom nobody else.\n"


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
    b"From: bob@example.org\n\nFirst.\n",  # what Ann wrote, too: stays
    b"From: bob@example.org\n\n---------------------- Forwarded by Ann on 1 May\n\nAnn's words.\n",
    _LONELY,
    b"Subject: no sender\n\nWhose?\n",
    b"From: <>\n\nWhose?\n",
    _CODED,
    b"From: eva@ab.org\nContent-Type: text/html\n\n<p>Not text</p>\n",
]


def test_mails_of_a_sender_become_one_record(enron, tmp_path):
    records, counts = enron.read_archive(_archive(tmp_path / "mails.tar.gz", _MAILS))
    assert dict(zip(records.unit_ids, records.texts, strict=True)) == {
        "ann@example.org": "First.\n\nSecond.",
        "bob@example.org": "First.",
        "zoe@example.org": "From nobody else.",
        "eva@ab.org": "café au lait",
    }
    assert (counts.mails, counts.without_sender, counts.without_own_text, counts.repeated) == (10, 2, 2, 1)


def test_a_senders_record_does_not_depend_on_the_others(enron, tmp_path):
    whole = enron.read_archive(_archive(tmp_path / "all.tar.gz", _MAILS))[0]
    kept = dict(zip(whole.unit_ids, whole.texts, strict=True))
    for sender in kept:
        left = [mail for mail in _MAILS if sender not in str(mail.split(b"\n")[0]).lower()]
        others = enron.read_archive(_archive(tmp_path / "rest.tar.gz", left))[0]
        expected = {name: text for name, text in kept.items() if name != sender}
        assert dict(zip(others.unit_ids, others.texts, strict=True)) == expected


@pytest.mark.parametrize(
    ("header", "sender"),
    [
        ("Ann Lee <ANN.Lee@Example.ORG>", "ann.lee@example.org"),
        ('"Lee, Ann" <ann@example.org>', "ann@example.org"),
        ("ann@example.org (Ann)", "ann@example.org"),
        ("legal <.hall@enron.com>", ".hall@enron.com"),
        ("pep <performance.>", "pep <performance."),
        ("=?utf-8?q?Ren=C3=A9?= <rene@example.org>", "rene@example.org"),
        ("<>", None),
        ("", None),
    ],
)
def test_sender_of_odd_headers(enron, header, sender):
    message = email.message_from_bytes(f"From: {header}\n\nx".encode(), policy=email.policy.default)
    assert enron.sender_of(message) == sender


def test_raw_bytes_in_a_header_do_not_stop_the_reader(enron):
    message = email.message_from_bytes(b"From: Ren\xe9 <rene@example.org>\n\nx \xe9", policy=email.policy.default)
    assert enron.sender_of(message) == "rene@example.org"
    assert enron.body_of(message) == "x \xe9"


@pytest.mark.parametrize(
    ("body", "own"),
    [
        ("Yes.\n\n> What he said\n> and more\nAnd no.", "Yes.\n\nAnd no."),
        ("Yes.\n -----Original Message-----\nFrom: x\n", "Yes."),
        ("Yes.\nFrom: Ann Lee on 05/01/2001\nTo: Bob\ncc:\nSubject: lunch\n\nAnn's words", "Yes."),
        ("From: is how this begins, and no header.", "From: is how this begins, and no header."),
        ("---------------------- Forwarded by Ann", ""),
    ],
)
def test_own_text_leaves_others_out(enron, body, own):
    assert enron.own_text(body) == own


def test_what_is_no_archive_is_refused(enron, tmp_path):
    (tmp_path / "a.tar.gz").write_bytes(b"no archive")
    with pytest.raises(DataError, match=r"Expected a \.tar\.gz"):
        enron.read_archive(tmp_path / "a.tar.gz")
    with pytest.raises(DataError, match="2 files without"):
        enron.read_archive(_archive(tmp_path / "b.tar.gz", _MAILS[6:8]))


def test_odd_mails_of_the_corpus_are_read(enron, shared):
    for path in sorted((shared / "data" / "enron" / "weird").glob("*")):
        if path.suffix == ".csv":
            continue
        message = email.message_from_bytes(path.read_bytes(), policy=email.policy.default)
        sender = enron.sender_of(message)
        assert sender is None or sender == sender.lower().strip() != ""
        assert "\r" not in enron.body_of(message)


def test_the_spec_counts_the_senders_that_there_are(enron, shared):
    records, counts = enron.read_archive(shared / "data" / "enron" / enron.ARCHIVE.name)
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
