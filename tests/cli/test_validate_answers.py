"""Kept answers: the same question finds them, nothing forged is believed, and no disk makes a validation fail."""

from __future__ import annotations

import json
import multiprocessing
import os
import stat

import pytest

from tfdp.cli.checking import answers
from tfdp.cli.checking.answers import KeptAnswers

QUESTION = {"kind": "epsilon", "noise_multiplier": 1.1, "steps": 3}


@pytest.fixture
def homes(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


def entries(homes):
    return list((homes / "cache" / "tfdp" / "answers").iterdir())


@pytest.mark.parametrize("answer", [{"answer": 1.1337000000000001}, {"answer": None}, {"answer": {"error": "é"}}])
def test_the_same_question_finds_its_answer(homes, answer):
    KeptAnswers.of_the_user().put(QUESTION, answer)
    assert KeptAnswers.of_the_user().get(dict(reversed(QUESTION.items()))) == answer
    assert KeptAnswers.of_the_user().get(QUESTION | {"steps": 4}) is None


def test_another_version_finds_nothing(homes, monkeypatch):
    KeptAnswers.of_the_user().put(QUESTION, {"answer": 1.0})
    computed_by = answers._computed_by()
    assert set(computed_by) == {"dp-accounting", "numpy", "scipy", "tfdp", "sources"}
    for name in computed_by:
        monkeypatch.setattr(answers, "_computed_by", lambda name=name: computed_by | {name: "other"})
        assert KeptAnswers.of_the_user().get(QUESTION) is None


def test_an_entry_that_was_changed_is_not_believed(homes):
    store = KeptAnswers.of_the_user()
    store.put(QUESTION, {"answer": 9.0})
    (path,) = entries(homes)
    entry = json.loads(path.read_text())
    for content in (
        json.dumps({**entry, "content": '{"answer": 0.1}'}),
        json.dumps({**entry, "seal": ""}),
        json.dumps({**entry, "seal": 3}),
        json.dumps([]),
        "",
        "[" * 100_000,
        '{"content": "{',
    ):
        path.write_text(content)
        assert store.get(QUESTION) is None, content
    path.write_text(json.dumps(entry))
    assert store.get(QUESTION) == {"answer": 9.0}


def test_an_entry_cannot_be_moved_to_another_question(homes):
    store = KeptAnswers.of_the_user()
    store.put(QUESTION, {"answer": 0.1})
    (cheap,) = entries(homes)
    store.put(QUESTION | {"noise_multiplier": 0.5}, {"answer": 9.0})
    (dear,) = set(entries(homes)) - {cheap}
    dear.write_bytes(cheap.read_bytes())
    assert store.get(QUESTION | {"noise_multiplier": 0.5}) is None


def test_a_cache_with_the_key_of_somebody_else_is_not_believed(homes, monkeypatch):
    KeptAnswers.of_the_user().put(QUESTION, {"answer": 0.1})
    monkeypatch.setenv("XDG_STATE_HOME", str(homes / "other"))
    assert KeptAnswers.of_the_user().get(QUESTION) is None


def test_the_key_is_readable_by_its_owner_only(homes):
    KeptAnswers.of_the_user()
    key = homes / "state" / "tfdp" / "cache.key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    key.chmod(0o644)
    assert KeptAnswers.of_the_user() is None
    key.unlink()
    key.symlink_to("/dev/zero")
    assert KeptAnswers.of_the_user() is None
    key.unlink()
    key.write_bytes(b"short")
    key.chmod(0o600)
    assert KeptAnswers.of_the_user() is None


@pytest.mark.parametrize("variable", ["XDG_CACHE_HOME", "XDG_STATE_HOME"])
def test_a_place_that_cannot_be_written_is_no_fault(command, homes, monkeypatch, variable):
    from tfdp.review.catalogue import BASE

    (homes / "file").write_text("")
    (homes / "privacy.yaml").write_text(BASE)
    monkeypatch.setenv(variable, str(homes / "file" / "below"))
    assert KeptAnswers.of_the_user() is None
    assert command("validate", homes / "privacy.yaml")[0] == 0


def test_a_folder_that_stops_being_writable(homes, monkeypatch):
    store = KeptAnswers.of_the_user()

    def full(*_: object):
        raise OSError("disk full")

    monkeypatch.setattr(answers, "atomic_write_bytes", full)
    store.put(QUESTION, {"answer": 1.0})
    assert store.get(QUESTION) is None


def _put(number: int) -> None:
    store = KeptAnswers.of_the_user()
    for _ in range(20):
        store.put(QUESTION, {"answer": 1.0})
        assert store.get(QUESTION) == {"answer": 1.0}


def test_calls_at_the_same_time(homes):
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_put, args=(number,)) for number in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert len(entries(homes)) == 1
    assert os.listdir(homes / "state" / "tfdp") == ["cache.key"]
