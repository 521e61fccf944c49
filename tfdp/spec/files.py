"""Taking the text of a spec from a file, a pipe or anything else that a path may turn out to be."""

from __future__ import annotations

import os
import pathlib
import stat
from typing import BinaryIO

from tfdp.spec.documents import MAX_CHARACTERS, Format, ReadingError

_FORMATS: dict[str, Format] = {".yaml": "yaml", ".yml": "yaml", ".json": "json"}
# One character takes at most four bytes; one byte more tells a longer text from one that just fits.
_MAX_BYTES = 4 * MAX_CHARACTERS + 1


def format_of(path: str | os.PathLike[str]) -> Format | None:
    """The notation that the ending of a name stands for; None for any other ending."""
    return _FORMATS.get(pathlib.PurePath(path).suffix.lower())


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a regular file, in UTF-8; never more of it than a spec can have, and never waiting for a writer.

    Raises:
        ReadingError: it is not there, not a regular file, too long or not UTF-8.
    """
    name = os.fspath(path)
    try:
        handle = os.open(name, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except FileNotFoundError:
        raise _unreadable("expected a privacy spec, received a path where no file is.", "Check the path.") from None
    except (OSError, ValueError) as error:
        raise _not_readable(error) from None
    try:
        with os.fdopen(handle, "rb") as stream:
            _require_regular(os.fstat(stream.fileno()).st_mode)
            return decode(stream)
    except OSError as error:  # such as a directory, where opening it as a file fails
        if os.path.isdir(name):
            _require_regular(stat.S_IFDIR)
        raise _not_readable(error) from None


def decode(stream: BinaryIO) -> str:
    """The text of an open stream, bounded as `read_text` is.

    Raises:
        ReadingError: too long, or not UTF-8.
    """
    content = stream.read(_MAX_BYTES)
    if len(content) >= _MAX_BYTES:
        raise _unreadable(
            f"expected at most {MAX_CHARACTERS} characters, received more.",
            "Is this the right file? A spec is about a page long.",
        )
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        message = f"expected UTF-8 text, received byte 0x{content[error.start]:02x} at offset {error.start}."
        raise _unreadable(message, "Save the file as UTF-8.") from None


def _require_regular(mode: int) -> None:
    if stat.S_ISREG(mode):
        return
    kind = "a directory" if stat.S_ISDIR(mode) else "a pipe" if stat.S_ISFIFO(mode) else "a device or socket"
    fix = "Name the file in it." if stat.S_ISDIR(mode) else "Write it to a file first, or pass it as standard input."
    raise _unreadable(f"expected a privacy spec, received {kind}.", fix)


def _not_readable(error: OSError | ValueError) -> ReadingError:
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return _unreadable(f"expected a readable file, received: {reason}.", "Check the path.")


def _unreadable(message: str, fix: str) -> ReadingError:
    return ReadingError("PS000", message, fix)
