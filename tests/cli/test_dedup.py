"""`tfdp data dedup`, and what `tfdp train` makes of its note."""

from __future__ import annotations

import gzip
import json

import pytest

from tfdp.datasets.notes import DeduplicationStep, note_path, read_note, scope_for
from tfdp.errors import DataError

RUN = " ".join(f"word{number}" for number in range(20))
ROWS = [
    {"who": "a", "body": "Same text.", "rate": 1e5},
    {"who": "b", "body": "Same text."},
    {"who": "a", "body": "Same text."},
    {"who": "a", "body": f"One way: {RUN}"},
    {"who": "b", "body": f"{RUN.upper()}, another way"},
    {"who": "a", "body": "same  TEXT"},
]


@pytest.fixture
def mails(tmp_path):
    """The lines as they stand, odd spacing and a byte order mark included."""
    path = tmp_path / "mails.jsonl"
    lines = [json.dumps(row, indent=None, separators=(" ,", " :  ")) for row in ROWS]
    path.write_bytes(("\ufeff" + "\r\n\n".join(lines)).encode())
    return path, [line.encode() for line in lines]


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        (["--scope", "unit"], [0, 1, 3, 4, 5]),
        (["--scope", "all"], [0, 3, 4, 5]),
        (["--scope", "unit", "--normalise"], [0, 1, 3, 4]),
        (["--scope", "unit", "--method", "20gram"], [0, 1, 3, 4]),
        (["--scope", "all", "--method", "20gram"], [0, 3]),
    ],
)
def test_lines_that_stay_are_copied_as_they_stand(command, mails, tmp_path, options, kept):
    path, lines = mails
    out = tmp_path / "out.jsonl"
    code, printed, _ = command("data", "dedup", path, "--text-field", "body", "--id-field", "who", "-o", out, *options)
    assert code == 0
    assert out.read_bytes().splitlines() == [lines[number] for number in kept]
    assert f"{6 - len(kept)} (" in printed
    assert "6 of 2 units" in printed
    assert "no epsilon covers" in printed
    assert ("one unit's data decide" in printed) == ("all" in options)
    assert "Same text" not in printed


def test_gzip_and_notes_of_several_passes(command, mails, tmp_path):
    packed = tmp_path / "mails.jsonl.gz"
    packed.write_bytes(gzip.compress(mails[0].read_bytes()))
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    fields = ["--text-field", "body"]
    assert command("data", "dedup", packed, *fields, "--scope", "all", "-o", first)[0] == 0
    assert command("data", "dedup", first, *fields, "--id-field", "who", "--method", "20gram", "-o", second)[0] == 0
    steps = read_note(second)
    assert steps == (DeduplicationStep("exact", "all", None), DeduplicationStep("20gram", "unit", "who"))
    assert scope_for(steps, "who") == "all"  # what an earlier pass did stays done
    assert scope_for(steps[1:], "who") == "unit"
    assert scope_for(steps[1:], "other") == scope_for(steps[1:], None) == "all"  # units of another field
    assert scope_for((), "who") is None
    assert read_note(packed) == ()


def test_a_note_belongs_to_one_file(command, mails, tmp_path):
    out = tmp_path / "out.jsonl"
    command("data", "dedup", mails[0], "--text-field", "body", "--id-field", "who", "-o", out)
    out.write_bytes(out.read_bytes() + b'{"who": "c", "body": "more"}\n')
    for content in (note_path(out).read_text(), "no note", "[]", '{"steps": [{}]}'):
        note_path(out).write_text(content)
        with pytest.raises(DataError, match="changed since"):
            read_note(out)


def test_wrong_calls(command, mails, tmp_path):
    path, out = mails[0], tmp_path / "out.jsonl"
    for arguments in (
        [path, "-o", out],  # scope unit without a field
        [path, "-o", out, "--id-field", "who", "--method", "fuzzy"],
        [path, "-o", out, "--id-field", "who", "--scope", "everything"],
        [path, "-o", path, "--id-field", "who"],
        [path, "-o", tmp_path / "out.csv", "--id-field", "who"],
        [path, "-o", tmp_path / "out.jsonl.gz", "--id-field", "who"],
        [tmp_path / "nothing.jsonl", "-o", out, "--id-field", "who"],
    ):
        code, _, err = command("data", "dedup", *arguments)
        assert code == 2, arguments
        assert err
    code, _, err = command("data", "dedup", path, "-o", out, "--id-field", "from", "--text-field", "body")
    assert code == 1
    assert "line 1: expected the field 'from'" in err
    assert not list(tmp_path.glob("*out*"))
