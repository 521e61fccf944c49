"""What a user gets: the wheel that the repository builds, installed away from the sources."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile

import pytest

pytestmark = pytest.mark.quick

_ROOT = pathlib.Path(__file__).parents[1]
# Where the tests are run beside an installed wheel and without the sources, that wheel is what is tested.
_HAS_SOURCES = (_ROOT / "tfdp").is_dir()
_needs_sources = pytest.mark.skipif(not _HAS_SOURCES, reason="the sources of tfdp are not beside the tests")


def _run(*command, **options):
    # A search path of the caller's would come before what the wheel installed.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False, env=environment, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    _run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", folder, _ROOT)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def scripts(request, tmp_path_factory):
    """The folder of commands of an environment with the wheel in it."""
    if not _HAS_SOURCES:
        return pathlib.Path(sysconfig.get_path("scripts"))
    wheel = request.getfixturevalue("wheel")
    folder = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(folder, symlinks=True, with_pip=True)
    python = folder / "bin" / "python"
    _run(python, "-m", "pip", "install", "--no-deps", "--no-index", wheel)
    # The dependencies are those of the environment that runs the tests; its own tfdp comes later on the path.
    packages = pathlib.Path(_run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


@pytest.fixture
def python(scripts):
    return scripts / "python"


def _names(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@_needs_sources
def test_wheel_holds_the_package_its_templates_its_schemas_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {f"tfdp/templates/{name}" for name in _names(_ROOT / "templates")} <= names
    assert {f"tfdp/schemas/{name}" for name in _names(_ROOT / "schemas")} <= names
    assert {f"tfdp/demo/public_model{end}" for end in (".json", ".npz", ".tokenizer.json")} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"tfdp"}
    assert not any("__pycache__" in name or name.startswith("tfdp/tests") for name in names)
    assert wheel.stat().st_size < 4_000_000


def test_version_is_the_same_everywhere(python, tmp_path):
    code = "import importlib.metadata as m, tfdp; print(tfdp.__version__, m.version('tfdp'))"
    stated, installed = _run(python, "-c", code, cwd=tmp_path).split()
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    assert stated == installed == project["version"]


def test_importing_tfdp_loads_neither_tensorflow_nor_keras(python, tmp_path):
    code = (
        "import sys, tfdp, tfdp.spec, tfdp.cli; print(tfdp.__file__); print({'tensorflow', 'keras'} & set(sys.modules))"
    )
    file, loaded = _run(python, "-c", code, cwd=tmp_path).splitlines()
    assert not pathlib.Path(file).is_relative_to(_ROOT)
    assert loaded == "set()"


def test_templates_and_schemas_are_found_by_the_installed_package(python, tmp_path):
    code = "import json, importlib.resources as r; p = r.files('tfdp')\n"
    code += "print(json.dumps([sorted(q.name for q in (p / d).iterdir()) for d in ('templates', 'schemas')]))"
    templates, schemas = json.loads(_run(python, "-c", code, cwd=tmp_path))
    assert set(templates) == _names(_ROOT / "templates") != set()
    assert set(schemas) == _names(_ROOT / "schemas") != set()


def test_the_command_explains_itself(scripts, tmp_path):
    text = _run(scripts / "tfdp", "--help", cwd=tmp_path)
    for command in ("validate", "account", "calibrate", "train", "card", "schema", "demo"):
        assert command in text


def test_the_installed_command_prints_the_published_schema(scripts, tmp_path):
    printed = _run(scripts / "tfdp", "schema", "privacy-spec", cwd=tmp_path)
    assert json.loads(printed) == json.loads((_ROOT / "schemas" / "privacy-spec-1.0.json").read_text())
