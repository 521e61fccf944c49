"""What `tfdp validate` is given: files, patterns, folders, standard input, several specs, counts, runs."""

from __future__ import annotations

import io
import json
import os
import pathlib
import subprocess
import sys
import time

import pytest

from tfdp.cli.checking import sources
from tfdp.review.catalogue import BASE

ROOT = pathlib.Path(__file__).resolve().parents[2]
BAD = BASE.replace("epsilon: 1.2", "epsilon: '1.2'")


@pytest.fixture
def piped(command, monkeypatch):
    def call(content: bytes, *arguments: object):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
        return command("validate", "-", *arguments)

    return call


@pytest.fixture
def tree(tmp_path):
    files = {
        "privacy.yaml": BASE,
        "deep/er/claim.yml": BAD,
        "deep/values.json": '{"claim": {}, "mechanism": {}}',
        "deep/privacy-broken.yaml": "a: [",
        "ci.yaml": "name: CI\non: push\njobs: {data: 1}\n",
        "package.json": '{"name": "x", "data": 1}',
        "MODEL_CARD.json": '{"claim": {}, "data": {}, "provenance": {}}',
        "schema.json": '{"$schema": "x", "claim": {}, "data": {}}',
        ".git/privacy.yaml": BAD,
        "node_modules/privacy.yaml": BAD,
        "big.json": "[" + "0," * 200_000 + "0]",
    }
    for name, text in files.items():
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "tree"


class TestPlaces:
    def test_a_folder_is_searched_for_specs(self, tree):
        names = {os.path.relpath(source.name, tree) for source in sources.collect([str(tree)])}
        assert names == {"privacy.yaml", "deep/er/claim.yml", "deep/values.json", "deep/privacy-broken.yaml"}

    def test_patterns(self, tree):
        names = [os.path.relpath(source.name, tree) for source in sources.collect([f"{tree}/**/*.y*ml"])]
        assert "deep/er/claim.yml" in names
        assert "ci.yaml" in names, "what a pattern names is meant to be a spec"

    def test_each_file_once(self, tree):
        path = str(tree / "privacy.yaml")
        assert len(sources.collect([path, path, f"{tree}/privacy.*"])) == 1

    @pytest.mark.parametrize("argument", ["*.absent", "folder", "absent.yaml"])
    def test_an_argument_that_finds_nothing_fails(self, command, tmp_path, monkeypatch, argument):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "folder").mkdir()
        code, out, _ = command("validate", argument)
        assert (code, "error[PS000]" in out) == (1, True)

    def test_the_examples(self, command):
        assert command("validate", ROOT / "examples", "--fail-on", "note")[0] == 0

    @pytest.mark.parametrize("content", [BASE, json.dumps({"schema_version": "1.0"}), "\ufeff" + BASE])
    def test_standard_input(self, piped, content):
        code, out, _ = piped(content.encode())
        assert code == (0 if "clip_norm" in content else 1)
        assert ("<stdin>:1:1: error" in out) == (code == 1)

    def test_standard_input_that_is_no_text(self, piped):
        code, out, _ = piped(b"a: \xff")
        assert (code, "<stdin>: error[PS000]: spec: expected UTF-8" in out) == (1, True)
        assert "more" in piped(b"#" * (1 << 23))[1]


def test_several_specs_in_a_file_with_their_own_lines(command, tmp_path):
    path = tmp_path / "two.yaml"
    path.write_text(f"---\n{BASE}---\n{BAD}---\na: &x [*x]\n---\n# nothing\n...\n")
    code, out, _ = command("validate", path, "--format", "json")
    report = json.loads(out)
    assert code == 1
    (number, alias) = report["findings"]
    assert (number["id"], number["where"], number["line"]) == ("PS002", "claim.epsilon", 4 + len(BASE.splitlines()) + 1)
    assert (alias["id"], "alias" in alias["message"]) == ("PS000", True)


def test_json_names_the_line_of_the_offending_key(command, tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{\n  "claim": {\n    "epsilonn": 3\n  }\n}\n')
    _, out, _ = command("validate", path)
    assert f"{path}:3:5: error[PS000]: claim.epsilonn" in out
    assert '3 |     "epsilonn": 3\n  |     ^^^^^^^^^^\n' in out


class TestData:
    def test_counts(self, command, tmp_path):
        spec, counts = tmp_path / "privacy.yaml", tmp_path / "contributions.json"
        spec.write_text(BASE)
        counts.write_text('{"has_user_id": true, "num_units": 60000}')
        code, out, _ = command("validate", spec, "--data", counts, "--fail-on", "warning")
        assert (code, "warning[PS007]" in out, f"{spec}:6:11" in out) == (1, True, True)
        counts.write_text('{"has_user_id": false}')
        assert command("validate", spec, "--data", counts, "--fail-on", "note")[0] == 0

    @pytest.mark.parametrize("content", ['{"units": 3}', '{"num_units": true}', "[", "num_units: 3", None])
    def test_a_wrong_file_is_a_finding(self, command, tmp_path, content):
        spec, counts = tmp_path / "privacy.yaml", tmp_path / "contributions.json"
        spec.write_text(BASE)
        if content:
            counts.write_text(content)
        code, out, _ = command("validate", spec, "--data", counts)
        assert (code, str(counts) in out) == (1, True)


def test_run_needs_one_spec(command, tmp_path):
    path = tmp_path / "two.yaml"
    path.write_text(f"{BASE}---\n{BASE}")
    assert command("validate", path, "--run", tmp_path)[0] == 2


def test_a_run_that_is_not_there(command, tmp_path):
    path = tmp_path / "privacy.yaml"
    path.write_text(BASE)
    code, out, _ = command("validate", path, "--run", tmp_path / "absent")
    assert (code, "error[PS030]" in out) == (1, True)


class TestExplain:
    def test_ids_in_any_case(self, command):
        code, out, _ = command("explain", "ps010", "PS041")
        assert code == 0
        assert out.startswith("PS010 (error): ")
        assert "PS041 (warning or error): " in out

    def test_list_and_page(self, command):
        assert command("explain")[1].startswith("PS000  error    ")
        assert command("explain", "--page")[1] == (ROOT / "examples" / "findings.md").read_text(encoding="utf-8")

    def test_unknown(self, command):
        assert command("explain", "PS999")[0] == 2


def test_cold_start_without_a_recomputation(tmp_path):
    """Under a second of processor time, and neither TensorFlow nor the accounting is imported."""
    path = tmp_path / "privacy.yaml"
    path.write_text(BASE.replace("noise_multiplier: 1.16", "noise_multiplier: null"))
    code = (
        "import sys, time\nfrom tfdp.cli import main\n"
        "try:\n    main(['validate', sys.argv[1], '--no-cache'])\nexcept SystemExit as end:\n    assert not end.code\n"
        "heavy = {'tensorflow', 'keras', 'dp_accounting', 'scipy', 'numpy', 'rich', 'jinja2'} & set(sys.modules)\n"
        "print(time.process_time(), *sorted(heavy))"
    )
    out = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True).stdout
    seconds, *heavy = out.splitlines()[-1].split()
    assert heavy == []
    assert float(seconds) < 1.0


def test_a_recomputation_is_kept(command, tmp_path, monkeypatch):
    path = tmp_path / "privacy.yaml"
    path.write_text(BASE.replace("epochs: 15", "epochs: 14"))
    start = time.process_time()
    first = command("validate", path)
    assert time.process_time() - start < 3
    monkeypatch.setattr("tfdp.review.costs._compute", lambda asked: pytest.fail("computed a second time"))
    assert command("validate", path) == first
