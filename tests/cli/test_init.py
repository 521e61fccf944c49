"""`tfdp init`: what it writes passes review, says what it was told, and explains every number."""

from __future__ import annotations

import math
import pathlib
import re

import pytest
from typer.testing import CliRunner

from tfdp.cli import app, main
from tfdp.findings import errors
from tfdp.review import review
from tfdp.spec import PrivacySpec
from tfdp.spec.starting import Answers, commented_spec, suggested_batch_size, suggested_delta, suggested_truncation

CLAIM = ("--description", "one ticket", "--num-units", "7000", "--epsilon", "8")
USER = ("--id-field", "from", "--max-records-per-unit", "4", "--deduplication", "exact")


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main(["init", "--no-ask", *(str(argument) for argument in arguments)])
        out, err = capsys.readouterr()
        return caught.value.code or 0, out, err

    return call


CALLS = [
    ("--unit", "example"),
    ("--unit", "example", "--scheme", "truncated_poisson", "--steps", "40"),
    ("--unit", "example", "--scheme", "full_batch", "--adjacency", "zero_out", "--epochs", "3"),
    ("--unit", "sequence", "--sequence-length", "128", "--adjacency", "replace_one"),
    ("--unit", "document", "--id-field", "doc"),
    ("--unit", "user", *USER),
    ("--unit", "user", *USER, "--selection", "random_chunk", "--max-tokens-per-unit", "2048"),
    ("--unit", "user", *USER, "--method", "group_privacy", "--num-records", "9000"),
    (
        "--unit",
        "example",
        "--accountant",
        "rdp",
        "--tuning",
        "public",
        "--batch-size",
        "12.5",
        "--noise-multiplier",
        "9",
    ),
]


@pytest.mark.parametrize("flags", CALLS, ids=lambda flags: "-".join(flags[1::2])[:40])
def test_what_is_written_passes(run, flags):
    code, out, _ = run("spec.yaml", *CLAIM, *flags)
    assert code == 0
    assert "tfdp validate spec.yaml" in out
    spec = PrivacySpec.from_file("spec.yaml")
    assert errors(review(spec)) == []
    assert (spec.claim.epsilon, spec.data.num_units) == (8.0, 7000)
    assert spec.claim.privacy_unit.description == "one ticket"
    text = pathlib.Path("spec.yaml").read_text()
    if "--epochs" in text or spec.sampling.epochs:
        assert f"epochs / q = {spec.schedule.steps} noisy updates" in text
    numbers = [line for line in text.splitlines() if line.startswith(" ") and line.rstrip()[-1] != ":"]
    assert all("#" in line for line in numbers if "description:" not in line), "every line explains itself"


def test_questions_are_asked_for_what_no_flag_gives(tmp_path):
    path = tmp_path / "p.yaml"
    answers = (
        "user\nall mails of one sender\n5000\n4\nfrom\n8\ngroup_privacy\nlongest\n20000\n1e-6\n\n3\nexact\npublic\n"
    )
    done = CliRunner().invoke(app, ["init", str(path), "--ask"], input=answers)
    assert done.exit_code == 0, done.output
    spec = PrivacySpec.from_file(path)
    unit = spec.claim.privacy_unit
    assert (unit.kind, unit.id_field, unit.max_records_per_unit, unit.method) == ("user", "from", 8, "group_privacy")
    assert (unit.selection, unit.max_tokens_per_unit) == ("longest", None)
    assert (spec.claim.delta, spec.data.num_records, spec.sampling.expected_batch_size) == (1e-6, 20000, 256)
    assert spec.tuning is not None
    assert (spec.tuning.kind, spec.data.deduplication, spec.sampling.epochs) == ("public", "exact", 3)


@pytest.mark.parametrize(("typed", "selection", "tokens"), [("\n\n", "random", None), ("none\n512\n", None, 512)])
def test_a_unit_of_several_records_may_have_a_limit_of_tokens(tmp_path, typed, selection, tokens):
    path = tmp_path / "p.yaml"
    answers = f"user\nmails of one sender\n5000\n4\nfrom\n8\nuser_wise_dp_sgd\n{typed}1e-6\n\n3\nexact\nnone\n"
    done = CliRunner().invoke(app, ["init", str(path), "--ask"], input=answers)
    assert done.exit_code == 0, done.output
    unit = PrivacySpec.from_file(path).claim.privacy_unit
    assert (unit.method, unit.selection, unit.max_tokens_per_unit) == ("user_wise_dp_sgd", selection, tokens)


def test_a_question_is_asked_again(tmp_path):
    path = tmp_path / "p.yaml"
    flags = [
        *CLAIM[:4],
        "--unit",
        "example",
        "--delta",
        "1e-6",
        "--steps",
        "9",
        "--batch-size",
        "64",
        "--tuning",
        "none",
    ]
    flags += ["--deduplication", "exact"]
    done = CliRunner().invoke(app, ["init", str(path), "--ask", *flags], input="much\n2\n")
    assert done.exit_code == 0, done.output
    assert PrivacySpec.from_file(path).claim.epsilon == 2


def test_nobody_to_ask(run):
    code, _, err = run("spec.yaml", "--epsilon", "3")
    assert code == 2
    assert "--unit, --description, --num-units" in " ".join(err.replace("│", " ").split())
    assert not pathlib.Path("spec.yaml").exists()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--delta", "0.1"), "PS003"),
        (("--batch-size", "8000"), "PS013"),
        (("--noise-multiplier", "0.1"), "PS020"),
        (("--epochs", "0"), "PS000"),
        (("--clip-norm", "-1"), "PS000"),
        (("--description", "  "), "PS000"),
        (("--truncated-batch-size", "300"), "PS014"),
        (("--accountant", "rdp", "--adjacency", "replace_one"), "PS017"),
    ],
)
def test_nothing_is_written_that_would_not_pass(run, flags, says):
    code, out, err = run("spec.yaml", "--unit", "example", *CLAIM, *flags)
    assert (code, out) == (1, "")
    assert f"\n  {says} error: " in err, "without a place in a file that is not there"
    assert not pathlib.Path("spec.yaml").exists()


def test_a_warning_is_shown_where_it_stands_in_what_was_written(run):
    code, _, err = run("spec.yaml", "--unit", "example", *CLAIM, "--delta", "1e-4")
    assert code == 0
    line = int(re.search(r"^spec\.yaml:(\d+):\d+: PS004 warning", err, re.MULTILINE)[1])
    assert pathlib.Path("spec.yaml").read_text().splitlines()[line - 1].startswith("  delta: ")


@pytest.mark.parametrize(
    ("given", "comment"),
    [("auto", "the fastest, found by timing; no effect on privacy"), ("16", "memory only; no effect on privacy")],
)
def test_units_in_a_forward_pass(run, given, comment):
    code, out, _ = run("-", "--unit", "example", *CLAIM, "--microbatch-size", given)
    assert code == 0
    assert str(PrivacySpec.from_text(out).sampling.microbatch_size) == given
    assert re.search(rf"^  microbatch_size: {given} +# {comment}$", out, re.MULTILINE)


@pytest.mark.parametrize("given", ["0", "-1", "1.5", "automatic", "", "\u00b2"])
def test_other_words_for_them_are_refused(run, given):
    code, _, err = run("spec.yaml", "--unit", "example", *CLAIM, "--microbatch-size", given)
    assert code == 2
    told = " ".join(err.replace("│", " ").split())
    assert f"Expected --microbatch-size of at least 1, or auto. Received: {given}" in told
    assert not pathlib.Path("spec.yaml").exists()


def test_an_existing_file_stays(run):
    pathlib.Path("spec.yaml").write_text("mine")
    arguments = ("spec.yaml", "--unit", "example", *CLAIM)
    assert run(*arguments)[0] == 2
    assert pathlib.Path("spec.yaml").read_text() == "mine"
    assert run(*arguments, "--force")[0] == 0
    assert run("absent/spec.yaml", *arguments[1:])[0] == 1
    assert run("x.yaml", *arguments[1:], "--steps", "3", "--epochs", "3")[0] == 2


def test_on_stdout(run):
    code, out, err = run("-", "--unit", "example", *CLAIM)
    assert (code, err) == (0, "")
    assert PrivacySpec.from_text(out).claim.epsilon == 8


@pytest.mark.parametrize("text", ['say "x": # no', "back\\slash", "- list", "1e-5", "émoji \U0001f600", "null", "a\nb"])
def test_text_comes_back_as_it_was(text):
    answers = Answers("example", text, 100, 1.0, 1e-4, id_field=text, expected_batch_size=10, epochs=1)
    unit = PrivacySpec.from_text(commented_spec(answers)).claim.privacy_unit
    assert (unit.description, unit.id_field) == (text, text)


@pytest.mark.parametrize("value", [1 / 3, 1e-7, 1e300, 8.0, 0.1, 123456.75, 2.0**60])
def test_numbers_come_back_exactly(value):
    text = commented_spec(Answers("example", "x", 100, value, 1e-5 / 3, expected_batch_size=value, epochs=value))
    spec = PrivacySpec.from_text(text)
    assert (spec.claim.epsilon, spec.claim.delta, spec.sampling.epochs) == (value, 1e-5 / 3, value)


@pytest.mark.parametrize("units", [1, 2, 9, 10, 11, 99, 100, 101, 1000, 59_999, 10**6, 10**9 + 1])
def test_suggestions(units):
    delta = suggested_delta(units)
    assert delta * units * 10 <= 1 + 1e-9
    assert delta * units * 100 > 1 - 1e-9, "not smaller than it needs to be"
    assert math.log10(delta) == pytest.approx(round(math.log10(delta)))
    size = suggested_batch_size(units)
    assert 1 <= size <= min(256, units)
    assert size <= suggested_truncation(size, units) <= units


@pytest.mark.parametrize(
    "name",
    ["", "init", "validate", "explain", "diff", "schema", "account", "calibrate", "train", "card check", "card render"],
)
def test_no_option_is_cut_in_a_terminal_of_80_columns(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([*name.split(), "--help"])
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert "\u2026" not in shown
