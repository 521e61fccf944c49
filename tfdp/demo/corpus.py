"""The demo's corpus, read from the running Python itself: docstrings are private, help topics are public."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import pathlib
import re
import sysconfig
from collections.abc import Iterator, Sequence

from tfdp.errors import DataError

# Tests and applications are not library documentation; pydoc_data is the public part; generated files differ by build.
_SKIPPED_FOLDERS = {"__pycache__", "dist-packages", "site-packages", "test", "tests"}
_SKIPPED_FOLDERS |= {"ensurepip", "idlelib", "lib2to3", "pydoc_data", "turtledemo"}
_SKIPPED_PREFIXES = ("config-", "_sysconfigdata", "sitecustomize", "usercustomize")
_TOPICS_WITH_DOCSTRINGS = {"debugger"}  # repeats the docstrings of pdb, which are private here
_FEWEST_PLAUSIBLE = 2000
_SHORTEST = 16
_HELD_OUT_SHARE = 0.1

_Documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclasses.dataclass(frozen=True)
class Docstring:
    """One privacy unit.

    Attributes:
        unit_id: where it stands, such as "asyncio.tasks:Task.cancel@140" (module, name, line).
        text: the docstring without its indentation.
    """

    unit_id: str
    text: str

    @property
    def key(self) -> str:
        """The letters and digits alone: two docstrings with the same key are duplicates of each other."""
        return re.sub(r"[\W_]+", " ", self.text.lower()).strip()


@dataclasses.dataclass(frozen=True)
class Split:
    """Training and held-out docstrings; no key is in both, or twice in one of them."""

    train: tuple[Docstring, ...]
    held_out: tuple[Docstring, ...]


def standard_library() -> pathlib.Path:
    """The folder with the sources of the running Python's standard library."""
    return pathlib.Path(sysconfig.get_path("stdlib"))


def private_docstrings(library: pathlib.Path | None = None) -> list[Docstring]:
    """Every docstring of the standard library, each text once, in the order of the sources.

    Args:
        library: a folder with Python sources; the running Python's standard library by default.

    Raises:
        DataError: the folder holds hardly any docstrings (a Python that is installed without its sources).
    """
    root = standard_library() if library is None else library
    unique: dict[str, Docstring] = {}
    for path in _sources(root):
        for docstring in _docstrings(path, root):
            if len(docstring.text) >= _SHORTEST:
                unique.setdefault(docstring.key, docstring)
    if library is None and len(unique) < _FEWEST_PLAUSIBLE:
        raise DataError(
            f"Expected the sources of Python's standard library in {root}, with over {_FEWEST_PLAUSIBLE} docstrings. "
            f"Received: {len(unique)}. Run the demo with a Python that is installed with its library as .py files."
        )
    return list(unique.values())


def split(docstrings: Sequence[Docstring], held_out_share: float = _HELD_OUT_SHARE) -> Split:
    """Splits by a digest of each text, so that a docstring is on the same side in every run and in every Python."""
    limit = int(held_out_share * 2**32)
    train: list[Docstring] = []
    held_out: list[Docstring] = []
    for docstring in docstrings:
        digest = hashlib.sha256(docstring.key.encode()).digest()
        (held_out if int.from_bytes(digest[:4], "big") < limit else train).append(docstring)
    return Split(tuple(train), tuple(held_out))


def public_topics() -> dict[str, str]:
    """The help topics of the language reference by name: the public part."""
    from pydoc_data.topics import topics

    return {name: text for name, text in sorted(topics.items()) if name not in _TOPICS_WITH_DOCSTRINGS}


def _sources(root: pathlib.Path) -> Iterator[pathlib.Path]:
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if _SKIPPED_FOLDERS.isdisjoint(parts) and not parts[0].startswith(_SKIPPED_PREFIXES):
            yield path


def _docstrings(path: pathlib.Path, root: pathlib.Path) -> Iterator[Docstring]:
    module = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # templates and deliberately broken files are not documentation
        return
    pending: list[tuple[ast.AST, tuple[str, ...]]] = [(tree, ())]
    while pending:
        node, names = pending.pop()
        if isinstance(node, _Documented):
            names = (*names, node.name) if not isinstance(node, ast.Module) else names
            text = ast.get_docstring(node)
            if text:
                yield Docstring(f"{module}:{'.'.join(names)}@{getattr(node, 'lineno', 1)}", text)
        pending.extend((child, names) for child in reversed(list(ast.iter_child_nodes(node))))
