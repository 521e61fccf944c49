"""Files that are either wholly the old content or wholly the new one, their digests, and the user's folders."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

_CHUNK = 1 << 20


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike[str], *, replace: bool = True) -> Iterator[IO[bytes]]:
    """A file to write to, which takes the name `path` at the end of the block: a crash leaves the old file or the new.

    The content goes to a temporary file in the same directory (a rename across file systems is a copy), is
    flushed to the disk, and takes the name of `path`; the directory is flushed too, or the rename itself could be
    lost. An existing file keeps its permissions; a symbolic link is followed, so that the link survives.

    Args:
        path: where to.
        replace: False to refuse a file that is there by then.

    Raises:
        OSError: the directory does not exist or cannot be written. No temporary file stays behind.
    """
    target = Path(os.path.realpath(path))
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fchmod(file.fileno(), _permissions(target))
            os.fsync(file.fileno())
        if replace:
            os.replace(temporary, target)
        else:
            os.link(temporary, target)
            os.unlink(temporary)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    fsync_directory(target.parent)


def atomic_write_bytes(path: str | os.PathLike[str], content: bytes) -> Path:
    """Replaces `path` by `content`, wholly or not at all; see `atomic_file`."""
    with atomic_file(path) as file:
        file.write(content)
    return Path(path)


def create_atomically(path: str | os.PathLike[str], content: bytes) -> Path:
    """Makes a new file, wholly or not at all.

    Raises:
        FileExistsError: somebody else made one meanwhile; it is left as it is.
    """
    with atomic_file(path, replace=False) as file:
        file.write(content)
    return Path(path)


def atomic_write_text(path: str | os.PathLike[str], text: str) -> Path:
    """`atomic_write_bytes` for text, as UTF-8 with the line ends as given."""
    return atomic_write_bytes(path, text.encode("utf-8"))


def fsync_directory(directory: str | os.PathLike[str]) -> None:
    """Flushes a directory, so that the names in it survive a power cut."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def user_folder(variable: str, fallback: str) -> Path | None:
    """What an XDG variable names, or a folder in the user's home; None where there is no home."""
    given = os.environ.get(variable, "")
    if os.path.isabs(given):  # the XDG rules: anything else is ignored
        return Path(given)
    try:
        return Path.home() / fallback
    except RuntimeError:
        return None


def sha256_bytes(content: bytes) -> str:
    """Hexadecimal SHA-256 of bytes."""
    return hashlib.sha256(content).hexdigest()


def sha256_text(text: str) -> str:
    """Hexadecimal SHA-256 of text as UTF-8."""
    return sha256_bytes(text.encode("utf-8"))


def sha256_file(path: str | os.PathLike[str]) -> str:
    """Hexadecimal SHA-256 of a file, read in pieces: weights may be larger than memory."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def sha256_arrays(arrays: Iterable[Any]) -> str:
    """Hexadecimal SHA-256 of numpy arrays in order: types, shapes and values."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _permissions(target: Path) -> int:
    """Those of the existing file, else what `open` would give (mkstemp alone gives 0o600)."""
    try:
        return target.stat().st_mode & 0o7777
    except FileNotFoundError:
        mask = os.umask(0)
        os.umask(mask)
        return 0o666 & ~mask
