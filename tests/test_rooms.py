"""The floors of the house: who may import whom, read from the sources."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pathlib

import pytest

_PACKAGE = pathlib.Path(__file__).parents[1] / "tfdp"

_FLOORS = {
    "errors": 0,
    "entropy": 0,
    "findings": 0,
    "keras_private": 0,
    "files": 0,
    "spec": 1,
    "replicas": 1,
    "accounting": 2,
    "sampling": 2,
    "datasets": 2,
    "gradients": 2,
    "noise": 2,
    "review": 3,
    "auditing": 3,
    "plan": 4,
    "ledger": 4,
    "data": 4,
    "models": 4,
    "inspection": 5,
    "optimizer": 5,
    "resume": 5,
    "budget": 5,
    "planner": 5,
    "training": 6,
    "admission": 6,
    "evaluation": 6,
    "callback": 7,
    "microbatches": 7,
    "card": 7,
    "comparison": 8,
    "workflow": 8,
    "demo": 9,
    "cli": 10,
    "__main__": 11,
}
# Rooms that a reviewer uses, or that must be testable without a deep-learning library.
_WITHOUT_TENSORFLOW = {
    "entropy",
    "errors",
    "findings",
    "files",
    "spec",
    "accounting",
    "auditing",
    "review",
    "plan",
    "ledger",
    "resume",
    "planner",
    "data",
    "comparison",
}
_HEAVY = {"tensorflow", "keras", "keras_hub", "keras_nlp", "tensorflow_privacy", "tensorflow_datasets"}

# In rooms that may know TensorFlow, the only files that do.
_MAY_IMPORT_TENSORFLOW = {"sampling": {"batches.py"}, "datasets": {"builders.py"}}

_FILES = sorted(_PACKAGE.rglob("*.py"))
_BESIDE = sorted(path for room in ("benchmarks", "examples") for path in (_PACKAGE.parent / room).rglob("*.py"))


def _room(path: pathlib.Path) -> str:
    return path.relative_to(_PACKAGE).parts[0].removesuffix(".py")


def _imports(tree: ast.AST, package: str, *, functions: bool = True, typing: bool = False) -> set[str]:
    """Dotted names of everything imported; `functions`: also inside them; `typing`: also under TYPE_CHECKING."""
    names: set[str] = set()
    pending = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join(parents[: len(parents) - node.level + 1] + ([node.module] if node.module else []))
            names |= {f"{base}.{alias.name}" for alias in node.names}
        children = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.If) and not typing and "TYPE_CHECKING" in ast.unparse(node.test):
            children = list(node.orelse)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not functions:
            children = []
        pending.extend(children)
    return names


def _file_imports(path: pathlib.Path, **options: bool) -> set[str]:
    package = ".".join(("tfdp", *path.relative_to(_PACKAGE).parts[:-1]))
    return _imports(ast.parse(path.read_bytes()), package, **options)


def _violations(path: pathlib.Path, names: set[str]) -> list[str]:
    room = _room(path)
    found = []
    for name in names:
        parts = name.split(".")
        if parts[0] != "tfdp" or len(parts) < 2 or parts[1] not in _FLOORS or parts[1] == room:
            continue
        if _FLOORS[parts[1]] >= _FLOORS[room]:
            found.append(f"{path.relative_to(_PACKAGE)} (floor {_FLOORS[room]}) imports {name} ({_FLOORS[parts[1]]})")
    return found


def test_every_file_has_a_room_on_a_floor():
    assert {_room(path) for path in _FILES} - {"__init__"} <= set(_FLOORS)


@pytest.mark.parametrize("path", _FILES, ids=lambda path: str(path.relative_to(_PACKAGE)))
def test_imports_go_strictly_down(path):
    if path != _PACKAGE / "__init__.py":
        assert _violations(path, _file_imports(path)) == []


def test_the_check_sees_every_way_to_import():
    code = (
        "import tfdp.cli\nfrom tfdp import plan\ndef f():\n    from . import review\n    from ..workflow import fit\n"
    )
    code += "if TYPE_CHECKING:\n    from tfdp.card import export\n"
    names = _imports(ast.parse(code), "tfdp.spec")
    assert names == {"tfdp.cli", "tfdp.plan", "tfdp.spec.review", "tfdp.workflow.fit"}
    assert len(_violations(_PACKAGE / "spec" / "x.py", names)) == 3
    assert _imports(ast.parse(code), "tfdp.spec", functions=False, typing=True) == {
        "tfdp.cli",
        "tfdp.plan",
        "tfdp.card.export",
    }
    assert _violations(_PACKAGE / "plan.py", {"tfdp.ledger.Ledger", "tfdp.spec.PrivacySpec"}) == [
        "plan.py (floor 4) imports tfdp.ledger.Ledger (4)"
    ]


@pytest.mark.parametrize("path", _FILES, ids=lambda path: str(path.relative_to(_PACKAGE)))
def test_tensorflow_stays_out_of_the_rooms_that_do_without(path):
    room = _room(path)
    if room in _WITHOUT_TENSORFLOW or path.name not in _MAY_IMPORT_TENSORFLOW.get(room, {path.name}):
        names = _file_imports(path)
    elif room in {"__init__", "noise", "cli", "demo", "card"}:
        names = _file_imports(path, functions=False)  # inside a function, when it is needed
    else:
        return
    assert {name for name in names if name.split(".")[0] in _HEAVY} == set()


@pytest.mark.parametrize("path", _BESIDE, ids=lambda path: str(path.relative_to(_PACKAGE.parent)))
def test_what_no_test_runs_imports_what_there_is(path):
    """Benchmarks are run by hand, and seldom."""
    names = _imports(ast.parse(path.read_bytes()), "")
    for name in sorted(name for name in names if name.startswith("tfdp.")):
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute) or importlib.util.find_spec(name), name


def _importers(library: str) -> list[str]:
    return [
        str(path.relative_to(_PACKAGE))
        for path in _FILES
        if any(name.split(".")[0] == library for name in _file_imports(path, typing=True))
    ]


def test_one_file_imports_tensorflow_privacy():
    assert len(_importers("tensorflow_privacy")) == 1
    # By name and at run time would be the way around the check above.
    by_name = [
        path.name for path in _FILES if "import_module" in (text := path.read_text()) and "tensorflow_privacy" in text
    ]
    assert len(set(by_name)) <= 1


def test_only_one_file_reaches_into_keras():
    reaching = [path for path in _FILES if any(".src" in f".{name}" for name in _file_imports(path))]
    assert {path.name for path in reaching} <= {"keras_private.py"}


@pytest.mark.parametrize("path", _FILES, ids=lambda path: str(path.relative_to(_PACKAGE)))
def test_private_attributes_of_others_are_touched_in_one_file(path):
    """A name with one underscore may be used on self, cls, and on what the same file defines."""
    if path.name == "keras_private.py":
        return
    tree = ast.parse(path.read_bytes())
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    own |= {
        node.target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    touched = {
        f"{ast.unparse(node)} (line {node.lineno})"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and node.attr not in own
        and not (isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"})
    }
    assert touched == set()
