"""The same mails from a folder, a tar archive and a table."""

from __future__ import annotations

import csv
import gzip
import io
import os
import tarfile

import pytest

from tfdp.datasets.archives import read_archive
from tfdp.errors import DataError

# A table holds text, so that bytes beyond UTF-8 would not come through it.
MAILS = {
    "a/inbox/1.": b'From: a@example.org\n\nFirst, "quoted",\nin lines.\n',
    "a/inbox/10.": "From: a@example.org\nSubject: é\n\nSecond.\n".encode(),
    "b/sent/2.": b"no headers",
}


def folder_of(path, mails=MAILS):
    for name, content in {**mails, ".hidden/1.": b"not a mail", "a/.DS_Store": b"not a mail"}.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


def tar_of(path, mode="w:gz"):
    with tarfile.open(path, mode) as archive:
        for name, content in {**MAILS, "a/._1": b"not a mail"}.items():
            member = tarfile.TarInfo(f"./maildir/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        for kind in (tarfile.DIRTYPE, tarfile.SYMTYPE):
            member = tarfile.TarInfo(f"maildir/other{kind!r}")
            member.type, member.linkname = kind, "/etc/passwd"
            archive.addfile(member)
    return path


def table_of(path):
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(["file", "message"])
    writer.writerows((name, content.decode()) for name, content in MAILS.items())
    content = text.getvalue().encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def test_every_form_gives_the_same_mails(tmp_path):
    expected = list(MAILS.values())
    assert list(read_archive(folder_of(tmp_path / "maildir"))) == expected
    assert list(read_archive(tar_of(tmp_path / "mails.tar.gz"))) == expected
    assert list(read_archive(tar_of(tmp_path / "mails.tar", "w"))) == expected
    assert list(read_archive(table_of(tmp_path / "mails.csv"))) == expected
    assert list(read_archive(table_of(tmp_path / "mails.csv.gz"))) == expected


def test_a_broken_link_in_a_folder_is_no_mail(tmp_path):
    folder = folder_of(tmp_path / "maildir")
    os.symlink(tmp_path / "nothing", folder / "a" / "link")
    assert len(list(read_archive(folder))) == len(MAILS)


def test_what_is_no_archive_is_refused(tmp_path):
    (tmp_path / "text.tar.gz").write_bytes(b"no archive")
    cut = tar_of(tmp_path / "cut.tar.gz")
    cut.write_bytes(cut.read_bytes()[:-20])
    (tmp_path / "other.csv").write_text("file,text\n1,2\n")
    for name in ("text.tar.gz", "cut.tar.gz", "nothing.tar.gz"):
        with pytest.raises(DataError, match=r"Expected a folder of mails, a tar archive"):
            list(read_archive(tmp_path / name))
    with pytest.raises(DataError, match="one column 'message'"):
        list(read_archive(tmp_path / "other.csv"))
