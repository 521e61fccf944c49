"""The ledger: what is on the disk before a step, and what is refused afterwards."""

from __future__ import annotations

import datetime
import errno
import hashlib
import itertools
import json
import math
import os

import pytest

from tfdp import accounting
from tfdp.errors import LedgerError
from tfdp.ledger import Ledger, read_ledger
from tfdp.plan import make_plan
from tfdp.spec import PrivacySpec

SPEC = {
    "schema_version": "1.0",
    "claim": {
        "epsilon": 8.0,
        "delta": 1e-5,
        "privacy_unit": {"kind": "example", "description": "one sentence"},
        "adjacency": "add_or_remove_one",
        "data_accesses": ["training"],
    },
    "data": {"num_units": 1000, "size_is_public": True},
    "mechanism": {"clip_norm": 1.0, "noise_multiplier": 1.0},
    "sampling": {"scheme": "poisson", "expected_batch_size": 50, "steps": 30},
}


def make(**mechanism):
    return make_plan(PrivacySpec.from_dict({**SPEC, "mechanism": {**SPEC["mechanism"], **mechanism}})).to_dict()


def clock():
    return datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)


@pytest.fixture(scope="module")
def plan():
    return make()


@pytest.fixture
def path(tmp_path, plan):
    path = tmp_path / "run" / "ledger.jsonl"
    with Ledger.create_or_open(path, plan, clock=clock) as ledger:
        ledger.append("fit_begin", epochs=2)
        for step in range(1, 6):
            ledger.append_step(step)
    return path


def rewrite(path, change):
    """Applies a change to the list of lines (without line ends)."""
    lines = path.read_bytes().split(b"\n")[:-1]
    path.write_bytes(b"\n".join(change(lines)) + b"\n")


def test_what_was_written_is_read(path, plan):
    record = read_ledger(path)
    assert record.steps == 5
    assert not record.torn
    assert record.created == "2026-01-02T03:04:05Z"
    assert record.spec == plan["spec"]
    assert {**record.plan, "spec": record.spec} == plan
    assert record.versions["dp-accounting"] == "0.6.0"
    assert record.digest == hashlib.sha256(path.read_bytes()).hexdigest()
    assert [entry["kind"] for entry in record.entries] == ["fit_begin", *["step"] * 5]
    assert record.of_kind("fit_begin")[0]["epochs"] == 2


def test_every_line_carries_the_hash_of_the_one_before(path):
    lines = path.read_bytes().splitlines()
    for before, line in itertools.pairwise(lines):
        assert json.loads(line)["prev"] == hashlib.sha256(before).hexdigest()


def test_step_lines_do_not_tell_how_long_a_step_took(path):
    assert {frozenset(entry) for entry in read_ledger(path).of_kind("step")} == {frozenset({"kind", "step", "prev"})}


def test_epsilon_is_that_of_the_recorded_steps(path):
    record = read_ledger(path)
    event = accounting.step_event(scheme="poisson", sampling_probability=0.05, noise_multiplier=1.0, num_units=1000)
    expected = accounting.epsilon(event, 5, delta=1e-5, adjacency="add_or_remove_one")
    assert record.epsilon() == expected
    assert record.epsilon(1e-3) < expected


def test_no_step_costs_nothing_and_no_noise_costs_everything(tmp_path, plan):
    quiet = {**plan, "noise_multiplier": 0.0}
    quiet["step_event"] = accounting.event_to_dict(
        accounting.step_event(scheme="poisson", sampling_probability=0.05, noise_multiplier=0.0, num_units=1000)
    )
    with Ledger.create_or_open(tmp_path / "ledger", quiet) as ledger:
        assert read_ledger(ledger.path).epsilon() == 0.0
        ledger.append_step(1)
    assert read_ledger(ledger.path).epsilon() == math.inf


def test_a_second_fit_continues_the_same_ledger(path, plan):
    with Ledger.create_or_open(path, plan) as ledger:
        assert ledger.steps == 5
        ledger.append("fit_begin")
        ledger.append_step(6)
    assert read_ledger(path).steps == 6


@pytest.mark.parametrize("step", [0, 4, 5, 7, "6", True, None])
def test_a_step_that_does_not_follow_is_refused_and_not_written(path, plan, step):
    before = path.read_bytes()
    with Ledger.create_or_open(path, plan) as ledger:
        with pytest.raises(LedgerError, match="Expected step 6"):
            ledger.append_step(step)
        assert path.read_bytes() == before
        ledger.append_step(6)


def test_another_plan_is_refused_and_told_apart(path):
    with pytest.raises(LedgerError) as caught:
        Ledger.create_or_open(path, make(clip_norm=2.0))
    assert "clip_norm: ledger 1.0, plan 2.0" in str(caught.value)
    assert "spec.mechanism.clip_norm: ledger 1.0, plan 2.0" in str(caught.value)
    assert "sampling_probability" not in str(caught.value)


def test_the_same_digest_with_another_plan_is_refused(path, plan):
    with pytest.raises(LedgerError, match=r"noise_multiplier: ledger 1\.0, plan 3\.0"):
        Ledger.create_or_open(path, {**plan, "noise_multiplier": 3.0})


def test_a_plan_without_its_fields_is_refused(tmp_path, plan):
    with pytest.raises(LedgerError, match="without step_event"):
        Ledger.create_or_open(tmp_path / "ledger", {key: plan[key] for key in plan if key != "step_event"})
    assert not (tmp_path / "ledger").exists()


class TestTornLastLine:
    @pytest.fixture(params=[1, 20, -1], ids=["first byte", "middle", "all but the line end"])
    def torn(self, path, request):
        content = path.read_bytes()
        start = content.rstrip(b"\n").rfind(b"\n") + 1
        cut = start + request.param if request.param > 0 else len(content) - 1
        path.write_bytes(content[:cut])
        return path

    def test_counts_as_a_spent_step(self, torn):
        record = read_ledger(torn)
        assert record.torn
        assert record.steps == 5

    def test_is_completed_as_a_spent_step(self, torn, plan):
        kept = torn.read_bytes().split(b"\n")[-1]
        with Ledger.create_or_open(torn, plan) as ledger:
            assert ledger.steps == 5
            ledger.append_step(6)
        record = read_ledger(torn)
        assert not record.torn
        assert record.steps == 6
        assert bytes.fromhex(record.entries[-2]["torn"]) == kept

    def test_stays_spent_when_completing_it_fails(self, torn, plan, monkeypatch):
        real = os.write

        def half(descriptor, data):
            if len(data) > 10:
                return real(descriptor, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "write", half)
        with pytest.raises(LedgerError, match="No space left"):
            Ledger.create_or_open(torn, plan)
        monkeypatch.undo()
        assert read_ledger(torn).steps == 5
        with Ledger.create_or_open(torn, plan) as ledger:
            assert ledger.steps == 5


class TestTampering:
    def test_changed_line(self, path):
        rewrite(path, lambda lines: [lines[0], lines[1].replace(b'"epochs":2', b'"epochs":3'), *lines[2:]])
        with pytest.raises(LedgerError, match="line 3: expected prev"):
            read_ledger(path)

    def test_changed_header(self, path):
        rewrite(path, lambda lines: [lines[0].replace(b'"clip_norm":1.0', b'"clip_norm":0.1'), *lines[1:]])
        with pytest.raises(LedgerError, match="line 2: expected prev"):
            read_ledger(path)

    def test_removed_line(self, path):
        rewrite(path, lambda lines: lines[:3] + lines[4:])
        with pytest.raises(LedgerError, match="line 4: expected prev"):
            read_ledger(path)

    def test_swapped_lines(self, path):
        rewrite(path, lambda lines: [*lines[:3], lines[4], lines[3], *lines[5:]])
        with pytest.raises(LedgerError, match="line 4"):
            read_ledger(path)

    def test_step_number_that_does_not_follow(self, path):
        def again(lines):
            line = {"kind": "step", "step": 5, "prev": hashlib.sha256(lines[-1]).hexdigest()}
            return [*lines, json.dumps(line).encode()]

        rewrite(path, again)
        with pytest.raises(LedgerError, match="line 8: expected step 6"):
            read_ledger(path)

    def test_garbage_with_a_line_end_is_not_a_torn_line(self, path):
        path.write_bytes(path.read_bytes() + b'{"kind":"st\n')
        with pytest.raises(LedgerError, match="line 8: expected one JSON object"):
            read_ledger(path)

    @pytest.mark.parametrize(
        ("line", "reason"),
        [
            (b'{"kind":"x","kind":"y","prev":"PREV"}', "a key twice"),
            (b'{"kind":"x","prev":"PREV","v":NaN}', "NaN is not a JSON number"),
            (b"[]", "received: list"),
            (b"\xff", "can't decode"),
            (b"", "Expecting value"),
        ],
    )
    def test_lines_that_are_not_strict_json_objects(self, path, line, reason):
        """Even where they follow from the line before: readers of JSON differ in what they make of them."""
        before = path.read_bytes()
        follows = hashlib.sha256(before.splitlines()[-1]).hexdigest().encode()
        path.write_bytes(before + line.replace(b"PREV", follows) + b"\n")
        with pytest.raises(LedgerError, match=f"line 8: expected one JSON object, .*{reason}"):
            read_ledger(path)

    def test_second_header(self, path):
        rewrite(
            path, lambda lines: [*lines, lines[0].replace(b"0" * 64, hashlib.sha256(lines[-1]).hexdigest().encode())]
        )
        with pytest.raises(LedgerError, match="line 8: expected one header"):
            read_ledger(path)

    @pytest.mark.parametrize("content", [b"", b'{"kind":"header"'])
    def test_no_whole_header(self, path, plan, content):
        path.write_bytes(content)
        with pytest.raises(LedgerError, match="without a complete header"):
            read_ledger(path)
        with pytest.raises(LedgerError, match="without a complete header"):
            Ledger.create_or_open(path, plan)

    def test_no_file(self, tmp_path):
        with pytest.raises(LedgerError, match="No such file"):
            read_ledger(tmp_path / "none")


class TestDisk:
    @pytest.mark.parametrize("call", ["write", "fsync"])
    def test_a_write_that_fails_is_an_error_and_stays_one(self, path, plan, monkeypatch, call):
        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        with Ledger.create_or_open(path, plan) as ledger:
            monkeypatch.setattr(os, call, full)
            with pytest.raises(LedgerError, match="No space left on device"):
                ledger.append_step(6)
            monkeypatch.undo()
            assert ledger.steps == 5
            with pytest.raises(LedgerError, match="failed before"):
                ledger.append_step(6)
        # Whatever was written is spent; nothing is given back.
        assert read_ledger(path).steps == (6 if call == "fsync" else 5)

    def test_half_a_line_before_the_disk_is_full_is_a_spent_step(self, path, plan, monkeypatch):
        real = os.write

        def half(descriptor, data):
            monkeypatch.setattr(os, "write", full)
            return real(descriptor, data[:30])

        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        with Ledger.create_or_open(path, plan) as ledger:
            monkeypatch.setattr(os, "write", half)
            with pytest.raises(LedgerError):
                ledger.append_step(6)
            monkeypatch.undo()
        assert read_ledger(path).steps == 6
        assert read_ledger(path).torn

    def test_the_line_is_synced_before_append_returns(self, path, plan, monkeypatch):
        calls = []
        real_write, real_sync = os.write, os.fsync
        with Ledger.create_or_open(path, plan) as ledger:
            monkeypatch.setattr(os, "write", lambda fd, data: calls.append("write") or real_write(fd, data))
            monkeypatch.setattr(os, "fsync", lambda fd: calls.append("fsync") or real_sync(fd))
            ledger.append_step(6)
            assert calls == ["write", "fsync"]
            assert json.loads(path.read_bytes().splitlines()[-1])["step"] == 6

    def test_a_second_writer_is_refused_until_the_first_closes(self, path, plan):
        first = Ledger.create_or_open(path, plan)
        with pytest.raises(LedgerError, match="only writer"):
            Ledger.create_or_open(path, plan)
        first.close()
        Ledger.create_or_open(path, plan).close()

    @pytest.mark.parametrize("change", ["append", "delete", "replace"])
    def test_a_file_that_changes_underneath_is_refused(self, path, plan, change):
        with Ledger.create_or_open(path, plan) as ledger:
            if change == "append":
                with open(path, "ab") as stream:
                    stream.write(b"x")
            else:
                content = path.read_bytes()
                path.unlink()
                if change == "replace":
                    path.write_bytes(content)
            with pytest.raises(LedgerError):
                ledger.append_step(6)

    def test_after_close_nothing_is_written(self, path, plan):
        ledger = Ledger.create_or_open(path, plan)
        ledger.close()
        ledger.close()
        with pytest.raises(LedgerError, match="after close"):
            ledger.append_step(6)

    def test_a_folder_that_cannot_be_made(self, tmp_path, plan):
        (tmp_path / "file").write_text("")
        with pytest.raises(LedgerError, match="Expected the ledger"):
            Ledger.create_or_open(tmp_path / "file" / "ledger", plan)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("step", {}),
        ("header", {}),
        ("", {}),
        ("note", {"prev": 1}),
        ("note", {"value": math.nan}),
        ("note", {"x": set()}),
    ],
)
def test_entries_that_would_break_the_ledger_are_refused(path, plan, kind, fields):
    before = path.read_bytes()
    with Ledger.create_or_open(path, plan) as ledger, pytest.raises(LedgerError):
        ledger.append(kind, **fields)
    assert path.read_bytes() == before
