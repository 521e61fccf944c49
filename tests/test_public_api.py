"""What `import tfdp` offers, and what it does not load."""

from __future__ import annotations

import ast
import importlib.util
import pathlib
import re
import subprocess
import sys

import pytest

import tfdp

ROOT = pathlib.Path(__file__).resolve().parents[1]
HEAVY = ("tensorflow", "keras", "keras_hub", "tensorflow_privacy", "matplotlib")


def loaded_by(code: str) -> set[str]:
    """Names of the heavy modules that a fresh interpreter has loaded after this code."""
    tail = f"\nimport sys\nprint('LOADED', *[name for name in {HEAVY!r} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code + tail], cwd=ROOT, capture_output=True, text=True, check=True)
    (line,) = [line for line in run.stdout.splitlines() if line.startswith("LOADED")]
    return set(line.split()[1:])


def command(*arguments: str) -> str:
    return f"from tfdp.cli import main\ntry:\n    main({list(arguments)})\nexcept SystemExit: pass"


@pytest.mark.parametrize(
    "code",
    [
        "import tfdp; dir(tfdp); tfdp.__version__",
        "import tfdp; tfdp.review(tfdp.PrivacySpec.from_file('examples/specs/truncated-poisson.yaml'))",
        "import tfdp.cli",
        command("validate", "examples/specs/truncated-poisson.yaml"),
        command("schema"),
        command("diff", "examples/specs/truncated-poisson.yaml", "examples/specs/poisson.yaml"),
        command("init", "-", "--unit", "example", "--description", "x", "--num-units", "900", "--epsilon", "8"),
        command("--help"),
    ],
    ids=["import", "review", "import-cli", "validate", "schema", "diff", "init", "help"],
)
def test_without_tensorflow(code):
    assert loaded_by(code) == set()


def test_the_probe_sees_what_is_loaded():
    assert loaded_by("import sys, types; sys.modules['keras'] = types.ModuleType('keras')") == {"keras"}


@pytest.mark.parametrize("name", sorted(set(tfdp.__all__) - {"__version__"}))
def test_every_name_is_defined_where_the_table_says(name):
    """Without importing it, because that would load TensorFlow for each name."""
    home = tfdp._HOMES[name]
    spec = importlib.util.find_spec(home or f"tfdp.{name}")
    assert spec is not None
    if home is not None:
        tree = ast.parse(pathlib.Path(spec.origin).read_text())
        assert name in set(_top_level_names(tree)), f"{home} does not define {name}"


def _top_level_names(tree: ast.Module):
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.ImportFrom | ast.Import):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def test_table_and_all_agree():
    assert len(tfdp.__all__) == len(set(tfdp.__all__))
    assert set(tfdp.__all__) == {*tfdp._HOMES, "__version__"}
    assert set(tfdp.__all__) <= set(dir(tfdp))


def test_light_names_resolve():
    from tfdp.spec import PrivacySpec

    assert tfdp.PrivacySpec is PrivacySpec
    assert issubclass(tfdp.errors.SpecError, tfdp.errors.TfdpError)
    assert callable(tfdp.review)


def test_unknown_name():
    with pytest.raises(AttributeError, match="module 'tfdp' has no attribute 'nothing'"):
        _ = tfdp.nothing


def test_version_is_the_one_of_the_package():
    written = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
    assert written is not None
    assert written[1] == tfdp.__version__
