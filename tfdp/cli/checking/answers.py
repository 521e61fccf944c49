"""Answers of the accountant, kept between calls of `tfdp validate`.

The name of an entry is the digest of its question: every number that goes in, the versions of the libraries that
compute, and the sources of the accounting. An entry carries a seal (HMAC-SHA256) made with a key that lies outside of
the cache, in the state folder of the user and readable by nobody else: a cache that was restored from elsewhere, or
written by another, is not believed but computed again. Where a folder cannot be written, nothing is kept and nothing
fails.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import importlib.metadata
import json
import os
import secrets
import stat
from pathlib import Path
from typing import Any

from tfdp import __version__
from tfdp.files import atomic_write_bytes, sha256_bytes, sha256_text, user_folder

_LIBRARIES = ("dp-accounting", "numpy", "scipy")
_KEY_BYTES = 32
_MAX_ENTRY = 1 << 16


class KeptAnswers:
    """A store for `tfdp.review.costs.kept_in`."""

    def __init__(self, folder: Path, key: bytes):
        self._folder = folder
        self._key = key

    @classmethod
    def of_the_user(cls) -> KeptAnswers | None:
        """The cache of this user, or None where there can be none."""
        cache, state = user_folder("XDG_CACHE_HOME", ".cache"), user_folder("XDG_STATE_HOME", ".local/state")
        if cache is None or state is None:
            return None
        try:
            folder = cache / "tfdp" / "answers"
            folder.mkdir(parents=True, exist_ok=True)
            return cls(folder, _key(state / "tfdp" / "cache.key"))
        except (OSError, ValueError):
            return None

    def get(self, question: dict[str, Any]) -> Any:
        name = _name(question)
        try:
            with open(self._folder / f"{name}.json", "rb") as file:
                raw = file.read(_MAX_ENTRY)
            entry = json.loads(raw)
            content, seal = entry["content"], entry["seal"]
            if not hmac.compare_digest(seal, self._seal(name, content)):
                return None
            return json.loads(content)
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return None

    def put(self, question: dict[str, Any], answer: Any) -> None:
        name = _name(question)
        content = json.dumps(answer, sort_keys=True, allow_nan=False)
        entry = json.dumps({"content": content, "seal": self._seal(name, content)})
        try:
            atomic_write_bytes(self._folder / f"{name}.json", entry.encode("ascii"))
        except OSError:  # a full or read-only disk: the answer is computed again next time
            return

    def _seal(self, name: str, content: str) -> str:
        return hmac.new(self._key, f"{name}\n{content}".encode(), hashlib.sha256).hexdigest()


def _key(path: Path) -> bytes:
    """The key of this user, made on the first call.

    Raises:
        ValueError: somebody else could have written it.
        OSError: it cannot be read or written.
    """
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        key = secrets.token_bytes(_KEY_BYTES)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(key)
            os.link(temporary, path)  # unlike a rename, never over the key of a call that runs at the same time
        except FileExistsError:
            return _key(path)
        finally:
            temporary.unlink(missing_ok=True)
        return key
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o077 or status.st_uid != os.getuid():
            raise ValueError("a key that others can read or write")
        key = file.read(_KEY_BYTES + 1)
    if len(key) != _KEY_BYTES:
        raise ValueError("not a key")
    return key


def _name(question: dict[str, Any]) -> str:
    return sha256_text(json.dumps([question, _computed_by()], sort_keys=True, allow_nan=False))


@functools.cache
def _computed_by() -> dict[str, str]:
    """Whatever an answer depends on besides its question."""
    versions = {name: importlib.metadata.version(name) for name in _LIBRARIES}
    package = Path(__file__).parents[2]
    sources = [package / "review" / "costs.py", *sorted((package / "accounting").glob("*.py"))]
    content = b"".join(path.read_bytes() for path in sources if path.is_file())
    return {**versions, "tfdp": __version__, "sources": sha256_bytes(content)}
