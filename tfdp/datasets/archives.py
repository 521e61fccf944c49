"""Files that hold mails: a tree of folders, a tar archive, or a table with one mail a row."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

from tfdp.datasets.rows import read_rows
from tfdp.errors import DataError

_TABLES = (".csv", ".csv.gz", ".tsv", ".tsv.gz")
MAIL_COLUMN = "message"


def read_archive(path: str | os.PathLike[str]) -> Iterator[bytes]:
    """The mails of an archive, as bytes, one after the other.

    Args:
        path: a folder, whose files are one mail each (in the order of their names; hidden ones are left out); a tar
            archive of such a folder, compressed or not, in its own order; or a table (.csv, .tsv, also .gz) with a
            column "message" that holds whole mails.

    Raises:
        DataError: none of these, or one that cannot be read to its end.
    """
    path = Path(path)
    if path.is_dir():
        yield from map(read_mail_file, mail_files(path))
    elif path.name.lower().endswith(_TABLES):
        for _, row in read_rows(path, [MAIL_COLUMN]):
            yield row[MAIL_COLUMN].encode("utf-8", "surrogatepass")
    else:
        yield from _tar(path)


def mail_files(folder: str | os.PathLike[str]) -> list[Path]:
    """The files of a tree that may be mails, sorted by their path."""
    root = Path(folder)
    found = []
    for directory, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(directory, name) for name in names if not name.startswith(".")]
    return sorted(path for path in found if path.is_file())


def read_mail_file(path: str | os.PathLike[str]) -> bytes:
    """The bytes of one file; raises DataError where it cannot be read."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"Expected a mail in {path}. Received: {error.strerror or error}. Check the file.") from error


def _tar(path: Path) -> Iterator[bytes]:
    try:
        with tarfile.open(path, "r:*") as archive:
            for member in archive:
                hidden = any(part.startswith(".") and part not in (".", "..") for part in member.name.split("/"))
                file = archive.extractfile(member) if member.isfile() and not hidden else None
                if file is not None:
                    yield file.read()
    except (OSError, tarfile.TarError, EOFError) as error:
        raise DataError(
            f"Expected a folder of mails, a tar archive of one, or a table (.csv, .tsv) with a column {MAIL_COLUMN!r} "
            f"at {path}. Received: {error}. Give its path."
        ) from error
