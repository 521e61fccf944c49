"""The snippets for continuous integration, and the hooks: run on repositories made for the purpose."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from ruamel.yaml import YAML

ROOT = pathlib.Path(__file__).resolve().parents[2]
SNIPPETS = ROOT / "examples" / "ci"
MANIFEST = ROOT / ".pre-commit-hooks.yaml"
SPEC = (ROOT / "examples" / "specs" / "poisson.yaml").read_text(encoding="utf-8")

# `git` of a test sees no settings of whoever runs it, and no repository around it.
IDENTITY = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("GIT_")},
    **IDENTITY,
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
}


@pytest.fixture
def environment(tmp_path):
    """With a `tfdp` on the path that runs what is tested."""
    folder = tmp_path / "bin"
    folder.mkdir()
    command = folder / "tfdp"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -c "from tfdp.cli import main; main()" "$@"\n')
    command.chmod(0o755)
    import tfdp

    source = str(pathlib.Path(tfdp.__file__).parents[1])
    path = os.pathsep.join([str(folder), str(pathlib.Path(sys.executable).parent), os.environ["PATH"]])
    return {**ENVIRONMENT, "PATH": path, "PYTHONPATH": source, "PRE_COMMIT_HOME": str(tmp_path / "pre-commit")}


class Repository:
    """A throw-away git repository."""

    def __init__(self, folder: pathlib.Path, environment: dict[str, str]):
        self.folder, self.environment = folder, environment
        folder.mkdir()
        self.run("git", "init", "--quiet", "--initial-branch=main")

    def run(self, *command: object, check: bool = True) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(part) for part in command],
            cwd=self.folder, env=self.environment, capture_output=True, text=True, check=check,
        )  # fmt: skip

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def commit(self) -> str:
        self.run("git", "add", "--all")
        self.run("git", "commit", "--quiet", "--allow-empty", "-m", "a commit")
        return self.run("git", "rev-parse", "HEAD").stdout.strip()


@pytest.fixture
def repository(tmp_path, environment):
    return Repository(tmp_path / "repository", environment)


class TestCompareSpecs:
    def report(self, repository, base):
        done = repository.run(SNIPPETS / "compare-specs", base, check=False)
        return done.returncode, done.stdout, done.stderr

    def test_every_kind_of_change(self, repository):
        repository.write("privacy.yaml", SPEC)
        repository.write("a b/privacy-`x`.yaml", SPEC)
        repository.write("moved/privacy-old.yaml", SPEC)
        repository.write("other.yaml", "a: 1")
        base = repository.commit()
        repository.write("other.yaml", "a: 2")
        repository.commit()
        assert self.report(repository, base) == (0, "No privacy spec changed.\n", "")

        repository.write("privacy.yaml", SPEC.replace("epsilon: 8", "epsilon: 4"))
        repository.write("privacy-new.json", "{}")
        repository.run("git", "mv", "moved/privacy-old.yaml", "moved/privacy-new.yaml")
        repository.commit()
        code, text, _ = self.report(repository, base)
        assert re.findall("^### (.*)", text, re.MULTILINE) == [
            "Nothing changed",
            "New spec",
            "Privacy becomes stronger",
        ]
        assert code == 0

        weaker = repository.run("git", "rev-parse", "HEAD").stdout.strip()
        repository.write("privacy.yaml", SPEC.replace("epsilon: 8", "epsilon: 9"))
        repository.write("moved/privacy-new.yaml", "claim: [")
        (repository.folder / "a b" / "privacy-`x`.yaml").unlink()
        repository.commit()
        code, text, error = self.report(repository, weaker)
        assert code == 1
        assert "`a b/privacy-?x?.yaml` is removed" in text
        assert "moved/privacy-new.yaml` compared with `./moved/privacy-new.yaml`\n\nThe new file is not valid" in text
        assert "PS000" in text
        assert "| **weaker** | `claim.epsilon` | `4` | `9` |" in text
        assert error == ""

    def test_a_branch_is_compared_with_where_it_left(self, repository):
        repository.write("privacy.yaml", SPEC)
        repository.commit()
        repository.run("git", "checkout", "--quiet", "-b", "change")
        repository.write("note.txt", "x")
        repository.commit()
        repository.run("git", "checkout", "--quiet", "main")
        repository.write("privacy.yaml", SPEC.replace("epsilon: 8", "epsilon: 4"))
        repository.commit()
        repository.run("git", "checkout", "--quiet", "change")
        assert self.report(repository, "main")[:2] == (0, "No privacy spec changed.\n")


@pytest.mark.parametrize(
    ("name", "schema"), [("github.yml", "vendor.github-workflows"), ("gitlab.yml", "vendor.gitlab-ci")]
)
def test_snippets_are_what_their_hosts_expect(name, schema):
    pytest.importorskip("check_jsonschema")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, str(SNIPPETS / name)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["github.yml", "gitlab.yml"])
def test_commands_of_the_snippets_parse(name):
    text = (SNIPPETS / name).read_text(encoding="utf-8")
    from typer.testing import CliRunner

    from tfdp.cli import app

    commands = re.findall(r"xargs -0 -r tfdp (.*) --$", text, re.MULTILINE)
    assert len(commands) == 1
    spec = ROOT / "examples" / "specs" / "full-batch.yaml"
    done = CliRunner().invoke(app, [*commands[0].split(), "--", str(spec)])
    assert done.exit_code == 0, done.output
    values = YAML(typ="safe").load(text)
    job = next(iter(values["jobs"].values())) if "jobs" in values else values["privacy-specs"]
    for step in job.get("steps", ()) or [{"run": "\n".join(job["script"])}]:
        if "run" in step:
            subprocess.run(["bash", "-n", "-c", step["run"]], check=True, capture_output=True)


class TestHooks:
    def test_manifest_is_valid(self, environment):
        pytest.importorskip("pre_commit")
        subprocess.run(
            [sys.executable, "-m", "pre_commit", "validate-manifest", str(MANIFEST)], check=True, env=environment
        )

    def test_on_a_repository(self, repository, tmp_path, environment):
        """The hook for an installed tfdp, because the other one would install TensorFlow; they share the entry."""
        pytest.importorskip("pre_commit")
        hooks = Repository(tmp_path / "hooks", environment)
        shutil.copy(MANIFEST, hooks.folder)
        revision = hooks.commit()
        repository.write(
            ".pre-commit-config.yaml",
            f"repos: [{{repo: '{hooks.folder}', rev: {revision}, hooks: [{{id: tfdp-validate-installed}}]}}]\n",
        )
        repository.write("specs/privacy.yaml", SPEC)
        repository.write("unrelated.yaml", "a: 1")
        repository.commit()
        command = (sys.executable, "-m", "pre_commit", "run", "--all-files", "--color=never")
        done = repository.run(*command, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

        repository.write("privacy-wrong.yml", SPEC.replace("delta: 1e-6", "delta: 1e-2"))
        repository.commit()
        done = repository.run(*command, check=False)
        assert done.returncode == 1
        assert "PS003" in done.stdout
        assert "privacy-wrong.yml" in done.stdout
        assert "unrelated" not in done.stdout

    def test_both_hooks_do_the_same(self):
        isolated, installed = YAML(typ="safe").load(MANIFEST.read_text(encoding="utf-8"))
        differing = {name for name in isolated if isolated[name] != installed[name]}
        assert differing == {"id", "name", "description", "language"}
        assert (isolated["language"], installed["language"]) == ("python", "system")
