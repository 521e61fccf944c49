"""Disks, locks and processes that fail for real: the step does not happen, and nothing that was spent comes back."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest

from tfdp.errors import LedgerError
from tfdp.ledger import Ledger, LedgerHead, read_ledger
from tfdp.ledger import locking as tfdp_locking

HOLD = """
import json, sys, time
from tfdp.ledger import Ledger
ledger = Ledger.create_or_open(sys.argv[1], json.load(open(sys.argv[2])))
ledger.append_step(ledger.steps + 1)
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def other_process(five_steps, plan, tmp_path):
    """A process that holds the ledger with a sixth step."""
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(five_steps), str(tmp_path / "plan.json")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


class TestLock:
    def test_two_processes(self, five_steps, plan, other_process):
        with pytest.raises(LedgerError, match=f"only writer.*open elsewhere, in process {other_process.pid} on "):
            Ledger.create_or_open(five_steps, plan)
        assert read_ledger(five_steps).steps == 6  # reading is free

    def test_a_process_that_was_killed(self, five_steps, plan, other_process, caplog):
        other_process.send_signal(signal.SIGKILL)
        other_process.wait()
        with caplog.at_level("WARNING", logger="tfdp"), Ledger.create_or_open(five_steps, plan) as ledger:
            assert ledger.steps == 6
        assert f"was held by process {other_process.pid} on " in caplog.text
        assert "every recorded step stays spent" in caplog.text
        caplog.clear()
        Ledger.create_or_open(five_steps, plan).close()
        assert not caplog.records  # closed as it should be: nothing to tell
        assert [each.name for each in five_steps.parent.iterdir()] == ["ledger.jsonl"]

    def test_two_in_one_process(self, five_steps, plan):
        with Ledger.create_or_open(five_steps, plan):
            with pytest.raises(LedgerError, match="open elsewhere, in this process"):
                Ledger.create_or_open(five_steps, plan)
            os.link(five_steps, five_steps.with_name("same"))
            with pytest.raises(LedgerError, match="open elsewhere"):
                Ledger.create_or_open(five_steps.with_name("same"), plan)

    @pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
    def test_a_copy_of_the_process_may_not_write(self, five_steps, plan):
        with Ledger.create_or_open(five_steps, plan) as ledger:
            child = os.fork()
            if child == 0:  # it has the same open file, and with it the lock
                code = 1
                try:
                    ledger.append_step(6)
                except LedgerError as error:
                    code = 0 if "made by fork" in str(error) else 2
                finally:
                    ledger.close()  # neither the lock nor its note is the copy's to give up
                    os._exit(code)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert five_steps.with_name("ledger.jsonl.lock").exists()
            with pytest.raises(LedgerError, match="open elsewhere"):
                Ledger.create_or_open(five_steps, plan)
            ledger.append_step(6)

    def test_a_file_system_without_locks(self, five_steps, plan, monkeypatch):
        def none(*_):
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(fcntl, "flock", none)
        with pytest.raises(LedgerError, match=r"file system that can lock .*No locks available.*local disk"):
            Ledger.create_or_open(five_steps, plan)

    def test_a_system_without_locks(self, five_steps, plan, monkeypatch):
        monkeypatch.setattr(tfdp_locking, "fcntl", None)
        with pytest.raises(LedgerError, match="system with file locks"):
            Ledger.create_or_open(five_steps, plan)

    def test_threads_take_turns(self, five_steps, plan):
        """Steps have to follow, so of 8 threads that all record the next one, each number goes to one of them."""
        taken, refused = [], []
        with Ledger.create_or_open(five_steps, plan) as ledger:

            def record():
                for _ in range(20):
                    try:
                        step = ledger.steps + 1
                        ledger.append_step(step)
                        taken.append(step)
                    except LedgerError as error:
                        refused.append(str(error))

            threads = [threading.Thread(target=record) for _ in range(8)]
            for each in threads:
                each.start()
            for each in threads:
                each.join()
            assert all("to be recorded next" in each for each in refused)
            assert sorted(taken) == list(range(6, ledger.steps + 1))
        assert read_ledger(five_steps).steps == len(taken) + 5

    def test_two_that_create_at_once_share_one_file(self, tmp_path, plan, monkeypatch):
        """The one that comes second must not put its own file in the place of the first one's steps."""
        path, real, first = tmp_path / "ledger.jsonl", os.link, []

        def late(source, target):
            monkeypatch.setattr(os, "link", real)
            with Ledger.create_or_open(path, plan) as ledger:
                ledger.append_step(1)
                first.append(ledger.identity)
            return real(source, target)

        monkeypatch.setattr(os, "link", late)
        with Ledger.create_or_open(path, plan) as ledger:
            assert (ledger.identity, ledger.steps) == (first[0], 1)
        assert [each.name for each in tmp_path.iterdir()] == ["ledger.jsonl"]


def record_until_it_fails(ledger):
    while True:
        ledger.append_step(ledger.steps + 1)


class TestDisk:
    @pytest.fixture
    def limited(self):
        """Lets files grow to a size only, by the kernel."""
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    @pytest.mark.parametrize("room", [0, 1, 60])
    def test_a_file_that_may_not_grow(self, five_steps, plan, limited, room):
        """Not at all, by one byte, by half a line: what was begun is spent."""
        unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        with Ledger.create_or_open(five_steps, plan) as ledger:
            limited(five_steps.stat().st_size + room)
            with pytest.raises(LedgerError, match="File too large"):
                ledger.append_step(6)
            assert ledger.steps == 5
            with pytest.raises(LedgerError, match="failed before"):
                ledger.append_step(6)
            limited(unlimited)
        assert read_ledger(five_steps).steps == 5 + (room > 0)
        with Ledger.create_or_open(five_steps, plan) as ledger:
            ledger.append_step(6 + (room > 0))

    @pytest.mark.skipif(os.geteuid() != 0 or shutil.which("mount") is None, reason="mounting takes root")
    def test_a_disk_that_is_full_and_one_that_becomes_read_only(self, tmp_path, plan):
        disk = tmp_path / "disk"
        disk.mkdir()
        if subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", str(disk)], capture_output=True
        ).returncode:
            pytest.skip("mounting is not allowed here")
        try:
            path = disk / "ledger.jsonl"
            with Ledger.create_or_open(path, plan) as ledger:
                ledger.append_step(1)
                (disk / "filler").write_bytes(b"x" * (os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize))
                with pytest.raises(LedgerError, match="No space left"):
                    record_until_it_fails(ledger)
                done = ledger.steps
            assert done <= read_ledger(path).steps <= done + 1
            (disk / "filler").unlink()
            spent = read_ledger(path).steps
            subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
            with pytest.raises(LedgerError, match="Read-only file system"):
                Ledger.create_or_open(path, plan)
            with pytest.raises(LedgerError, match="Read-only file system"):
                Ledger.create_or_open(disk / "other.jsonl", plan)
            assert read_ledger(path).steps == spent
        finally:
            subprocess.run(["umount", "-l", str(disk)], check=True)

    def test_opening_writes_the_last_line_once_more(self, five_steps, plan, monkeypatch):
        """After an fsync that failed, memory may show a line that the disk does not have; nobody can tell later."""
        written, flushed, content = [], [], five_steps.read_bytes()
        real_write, real_sync = os.write, os.fsync
        monkeypatch.setattr(os, "write", lambda fd, data: (written.append(bytes(data)), real_write(fd, data))[1])
        monkeypatch.setattr(os, "fsync", lambda fd: (flushed.append(len(written)), real_sync(fd))[1])
        Ledger.create_or_open(five_steps, plan).close()
        assert written == [content.splitlines(keepends=True)[-1]]
        assert flushed == [1]
        assert five_steps.read_bytes() == content


class TestHead:
    def test_later_states_contain_earlier_heads_and_nothing_else(self, five_steps, plan, tmp_path):
        heads = []
        with Ledger.create_or_open(five_steps, plan) as ledger:
            for step in range(6, 9):
                heads.append(ledger.head)
                ledger.append_step(step)
        record = read_ledger(five_steps)
        assert record.head.lines == 9
        assert all(record.contains(head) for head in [*heads, record.head])
        assert not record.contains(LedgerHead(10, record.head.digest))
        assert not record.contains(LedgerHead(0, "0" * 64))
        assert not record.contains(LedgerHead(heads[0].lines + 1, heads[0].digest))
        with Ledger.create_or_open(tmp_path / "other.jsonl", plan) as other:
            for step in range(1, 9):
                other.append_step(step)
            assert not record.contains(other.head)

    def test_a_tail_that_was_cut_off(self, five_steps):
        """The chain holds; only the head that was kept tells."""
        before = read_ledger(five_steps)
        five_steps.write_bytes(b"".join(five_steps.read_bytes().splitlines(keepends=True)[:-2]))
        after = read_ledger(five_steps)
        assert after.steps == 3
        assert not after.contains(before.head)
        assert before.once_was(after.digest)
        assert not after.once_was(before.digest)

    def test_lines_of_another_ledger_of_the_same_plan(self, five_steps, plan, tmp_path):
        with Ledger.create_or_open(tmp_path / "other.jsonl", plan) as other:
            for step in range(1, 9):
                other.append_step(step)
        spliced = five_steps.read_bytes() + b"".join(other.path.read_bytes().splitlines(keepends=True)[6:])
        five_steps.write_bytes(spliced)
        with pytest.raises(LedgerError, match="line 7: expected prev"):
            read_ledger(five_steps)


def test_a_process_that_is_killed_while_it_writes(five_steps, plan, tmp_path):
    """Four times at a random moment: the ledger holds together, and has at least what was reported as recorded."""
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    script = HOLD.split("ledger.append")[0] + "print('ready', flush=True)\nsys.stdin.readline()\n"
    script += "for step in range(ledger.steps + 1, 10**6):\n    ledger.append_step(step)\n"
    script += "    print(step, flush=True)\n"
    generator = random.Random(5)
    reported = 5
    for _ in range(4):
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(five_steps), str(tmp_path / "plan.json")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout.readline() == "ready\n"
        process.stdin.write("\n")
        process.stdin.flush()
        time.sleep(generator.uniform(0.0, 0.03))
        process.kill()
        lines = process.communicate()[0].splitlines()
        reported = max([reported, *map(int, filter(str.isdigit, lines[:-1]))])
        assert read_ledger(five_steps).steps >= reported
