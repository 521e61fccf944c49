"""`tfdp.data` and `tfdp data report`: counts against a loop, and that no id leaves."""

from __future__ import annotations

import collections
import gzip
import json
import xml.etree.ElementTree

import numpy as np
import pytest

import tfdp
from tfdp.cli import main
from tfdp.errors import DataError

_IDS = [f"secret{int(number)}@x.org" for number in np.random.default_rng(4).zipf(1.6, 400) % 60]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mails.jsonl.gz"
    with gzip.open(path, "wt") as stream:
        for index, owner in enumerate(_IDS):
            stream.write(json.dumps({"text": f"t{index}", "sender": owner}) + "\n")
    return path


@pytest.fixture
def command(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")

    def call(*arguments):
        with pytest.raises(SystemExit) as caught:
            main(["data", "report", *map(str, arguments)])
        out, err = capsys.readouterr()
        return caught.value.code or 0, out, err

    return call


def test_the_report_counts_and_names_nobody(command, file, tmp_path):
    counts = collections.Counter(_IDS)
    code, out, err = command(
        file, "--id-field", "sender", "--k", 3, "--k", 1, "--plot", tmp_path / "plot.svg",
        "--write", tmp_path / "contributions.json",
    )  # fmt: skip
    assert code == 0
    assert "secret" not in out + err
    over = sum(c > 3 for c in counts.values()) / len(counts)
    assert f"{over:.1%}" in out
    assert f"{max(counts.values())}, " in out
    assert "no epsilon covers them" in out
    written = json.loads((tmp_path / "contributions.json").read_text())
    assert written == {
        "num_units": len(counts), "num_records": 400, "max_records_per_unit": max(counts.values()), "has_user_id": True
    }  # fmt: skip
    plot = (tmp_path / "plot.svg").read_bytes()
    xml.etree.ElementTree.fromstring(plot)
    assert b"secret" not in plot


def test_the_counts_are_what_validate_reads(command, file, tmp_path, capsys):
    command(file, "--id-field", "sender", "--write", tmp_path / "contributions.json")
    spec = tmp_path / "spec.yaml"
    spec.write_text(
        """
schema_version: "1.0"
claim:
  epsilon: 3
  delta: 1e-3
  adjacency: add_or_remove_one
  privacy_unit: {kind: example, description: one mail}
  data_accesses: [training]
data: {num_units: 400, size_is_public: true, deduplication: exact}
mechanism: {clip_norm: 1.0}
sampling: {scheme: poisson, expected_batch_size: 20, steps: 10}
"""
    )
    with pytest.raises(SystemExit):
        main(["validate", str(spec), "--data", str(tmp_path / "contributions.json"), "--no-cache"])
    out = capsys.readouterr().out
    assert "PS007" in out
    with pytest.raises(SystemExit):
        main(["validate", str(spec), "--no-cache"])
    assert "PS007" not in capsys.readouterr().out


def test_as_json(command, file):
    code, out, _ = command(file, "--id-field", "sender", "--json")
    report = json.loads(out)
    assert code == 0
    assert report["num_records"] == 400
    assert sum(units for _, _, units, _ in report["histogram"]) == report["num_units"] == len(set(_IDS))
    assert "no epsilon covers" in report["not_covered"]


def test_records_without_an_id(command, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"sender": "a"}\n{"sender": ""}\n{}\n{"sender": 7}\n')
    code, _, err = command(path, "--id-field", "sender")
    assert code == 1
    assert "2 of 4 records without one" in err
    code, out, _ = command(path, "--id-field", "sender", "--drop-missing")
    assert code == 0
    assert "2, left out" in out


def test_png(tmp_path):
    counts = tfdp.data.count_contributions(tfdp.data.UnitMap.from_ids(["a", "a", "b"]))
    path = tfdp.data.plot_contributions(counts, tmp_path / "plot.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    bad = tmp_path / "b.jsonl"
    bad.write_text('{"sender": [1]}\n')
    with pytest.raises(DataError, match="an id in 'sender'"):
        list(tfdp.data.read_unit_ids(bad, "sender"))


def test_repeated_texts_against_a_loop(command, tmp_path):
    generator = np.random.default_rng(2)
    pairs = [(f"secret{a}", f"text {b}") for a, b in generator.integers(0, 12, (300, 2)).tolist()]
    path = tmp_path / "mails.jsonl"
    rows = [{"sender": owner, "body": text} for owner, text in pairs] + [{"body": "text 0"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    within = sum(pair in pairs[:index] for index, pair in enumerate(pairs))
    texts = [text for _, text in pairs]
    anywhere = sum(text in texts[:index] for index, text in enumerate(texts))
    assert 0 < within < anywhere
    assert tfdp.data.count_duplicates(path, id_field="sender", text_field="body") == (within, anywhere)
    arguments = (path, "--id-field", "sender", "--drop-missing")
    code, out, err = command(*arguments, "--text-field", "body", "--write", tmp_path / "c.json")
    assert code == 0
    assert f"{within} of the same unit, {anywhere - within} more of another" in out
    assert "secret" not in out + err
    assert json.loads((tmp_path / "c.json").read_text())["duplicates"] == anywhere
    assert "repeated" not in command(*arguments)[1]
    code, out, _ = command(*arguments, "--text-field", "body", "--json")
    assert json.loads(out)["repeated_texts"] == {"same_unit": within, "any_unit": anywhere}
