"""Atomic writes: the old content or the new one, whatever happens in between."""

from __future__ import annotations

import hashlib
import os
import stat

import pytest

from tfdp import files


def test_writes_and_replaces(tmp_path):
    path = tmp_path / "card.md"
    assert files.atomic_write_text(path, "ä\r\n") == path
    assert path.read_bytes() == "ä\r\n".encode()
    files.atomic_write_bytes(path, b"\x00new")
    assert path.read_bytes() == b"\x00new"
    assert os.listdir(tmp_path) == ["card.md"]


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_a_failure_keeps_the_old_content_and_leaves_no_trace(tmp_path, monkeypatch, broken):
    path = tmp_path / "card.md"
    path.write_text("old")

    def fail(*_args: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(files.os, broken, fail)
    with pytest.raises(OSError, match="disk full"):
        files.atomic_write_text(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["card.md"]


def test_content_is_on_the_disk_before_its_name_and_the_name_before_the_return(tmp_path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, os.replace

    def spy_fsync(handle: int) -> None:
        calls.append("directory" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file")
        fsync(handle)

    def spy_replace(source: str, target: str) -> None:
        assert os.path.dirname(source) == os.path.dirname(target)
        calls.append("replace")
        replace(source, target)

    monkeypatch.setattr(files.os, "fsync", spy_fsync)
    monkeypatch.setattr(files.os, "replace", spy_replace)
    files.atomic_write_text(tmp_path / "card.md", "new")
    assert calls == ["file", "replace", "directory"]


def test_permissions(tmp_path):
    fresh = files.atomic_write_text(tmp_path / "fresh", "x")
    (tmp_path / "plain").write_text("x")
    assert fresh.stat().st_mode == (tmp_path / "plain").stat().st_mode, "not the 0600 of a temporary file"
    fresh.chmod(0o640)
    files.atomic_write_text(fresh, "y")
    assert stat.S_IMODE(fresh.stat().st_mode) == 0o640


def test_symbolic_link_survives(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there" / "file")
    files.atomic_write_text(tmp_path / "link", "x")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there" / "file").read_text() == "x"


def test_missing_directory(tmp_path):
    with pytest.raises(FileNotFoundError):
        files.atomic_write_text(tmp_path / "absent" / "card.md", "x")


def test_digests(tmp_path):
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert files.sha256_bytes(b"") == files.sha256_text("") == empty
    assert files.sha256_text("ä") == hashlib.sha256("ä".encode()).hexdigest()
    path = tmp_path / "weights"
    path.write_bytes(b"ab" * (1 << 20))
    assert files.sha256_file(path) == hashlib.sha256(b"ab" * (1 << 20)).hexdigest()
