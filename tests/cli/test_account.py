"""`tfdp account` and `tfdp calibrate`."""

from __future__ import annotations

import json
import pathlib

import pytest

from tfdp import accounting
from tfdp.cli import account, main

pytestmark = pytest.mark.quick

SPECS = pathlib.Path(__file__).resolve().parents[2] / "examples" / "specs"
RUN = ("--num-units", 60000, "--batch-size", 256, "--noise-multiplier", 1.1, "--steps", 3515, "--delta", "1e-5")
CLAIM = ("--num-units", 60000, "--batch-size", 256, "--steps", 3515, "--delta", "1e-5", "--epsilon", 1.2)


@pytest.fixture
def run(capsys, monkeypatch):
    """Runs the command line; gives exit code, stdout, stderr."""
    monkeypatch.setenv("COLUMNS", "110")
    monkeypatch.setenv("TERM", "dumb")

    def call(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return caught.value.code or 0, out, err

    return call


@pytest.fixture
def report(run):
    """The JSON object of a call that succeeds."""

    def call(*arguments: object) -> dict:
        code, out, err = run(*arguments, "--json")
        assert (code, err) == (0, "")
        return json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))

    return call


def test_json_says_everything_that_is_assumed(report):
    data = report("account", *RUN)
    assert data["epsilon"] == pytest.approx(1.13374, abs=1e-5)
    assert data["unamplified_epsilon"] == pytest.approx(20.56, abs=6e-3)
    assert data["sampling_probability"] == 256 / 60000
    expected = {
        "unbounded": False,
        "delta": 1e-5,
        "claimed_epsilon": None,
        "noise_multiplier": 1.1,
        "steps": 3515,
        "num_units": 60000,
        "privacy_unit": "one unit",
        "sampled": "units",
        "records_per_unit": 1,
        "expected_batch_size": 256.0,
        "scheme": "poisson",
        "truncated_batch_size": None,
        "adjacency": "add_or_remove_one",
        "accountant": "pld",
        "library": f"dp-accounting {accounting.library_version()}",
        "grid": 1e-4,
        "spec_digest": None,
    }
    assert {name: data[name] for name in expected} == expected
    assert data["step_event"]["event"] == {"type": "GaussianDpEvent", "noise_multiplier": 1.1}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--accountant", "rdp"), 1.28114),
        (("--accountant", "prv"), 1.13374),
        (("--adjacency", "replace_one"), 1.92844),
        (("--adjacency", "zero_out"), 1.13374),
        (("--scheme", "truncated_poisson", "--truncated-batch-size", 320), 1.16562),
        (("--records-per-unit", 5), 7.04816),
    ],
)
def test_every_flag_reaches_the_accountant(report, flags, expected):
    assert report("account", *RUN, *flags)["epsilon"] == pytest.approx(expected, abs=1e-5)


def test_full_batch_needs_no_batch_size(report):
    flags = ("--num-units", 1000, "--noise-multiplier", 8, "--steps", 50, "--delta", "1e-4")
    data = report("account", *flags, "--scheme", "full_batch")
    assert data["epsilon"] == pytest.approx(3.28788, abs=1e-5)
    assert data["sampling_probability"] == 1.0
    assert data["epsilon"] == pytest.approx(data["unamplified_epsilon"], rel=1e-9)


def test_table_and_sentence(run):
    code, out, err = run("account", *RUN, "--records-per-unit", 5)
    assert (code, err) == (0, "")
    assert "q = 256 / 60000 records = 0.00426667" in out
    assert "one unit, up to 5 records (group privacy)" in out
    assert f"dp-accounting {accounting.library_version()}, grid 0.001" in out
    assert out.splitlines()[-1] == "3515 steps cost epsilon 7.04817 at delta 1e-05 under add_or_remove_one."


def test_claim_is_held_against_the_cost(run):
    code, out, _ = run("account", *RUN, "--epsilon", 1.2)
    assert code == 0
    assert "within the claimed 1.2." in out
    code, out, _ = run("account", *RUN, "--epsilon", 1.1)
    assert code == 1
    assert "more than the claimed 1.1." in out


def test_delta_of_an_epsilon(report):
    data = report("account", *RUN[:-2], "--epsilon", 1.1337447)
    assert data["delta"] == pytest.approx(1e-5, rel=1e-3)
    assert data["epsilon"] == 1.1337447


def test_no_noise_is_unbounded(report):
    flags = ("--num-units", 100, "--batch-size", 10, "--noise-multiplier", 0, "--steps", 1, "--delta", "1e-4")
    data = report("account", *flags)
    assert (data["epsilon"], data["unbounded"], data["unamplified_epsilon"], data["grid"]) == (None, True, None, None)


def test_calibrate(report, run):
    data = report("calibrate", *CLAIM)
    assert 1.2 * 0.998 <= data["epsilon"] <= 1.2
    assert (data["claimed_epsilon"], data["grid"]) == (1.2, 1e-4)
    again = report("account", *RUN[:4], "--noise-multiplier", data["noise_multiplier"], *RUN[6:])
    assert again["epsilon"] == data["epsilon"]
    code, out, _ = run("calibrate", *CLAIM)
    assert code == 0
    assert f"Noise multiplier {data['noise_multiplier']:g} keeps 3515 steps within epsilon 1.2" in out


def test_spec_as_argument_or_option(report):
    data = report("account", SPECS / "truncated-poisson.yaml")
    assert data == report("account", "--spec", SPECS / "truncated-poisson.yaml")
    assert (data["scheme"], data["truncated_batch_size"], data["steps"]) == ("truncated_poisson", 320, 3515)
    assert data["epsilon"] <= data["claimed_epsilon"]
    assert len(data["spec_digest"]) == 64


def test_spec_without_noise_is_calibrated(report):
    assert report("account", SPECS / "poisson.yaml") == report("calibrate", SPECS / "poisson.yaml")


def test_spec_with_units_of_several_records(report):
    grouped = report("account", SPECS / "group-privacy.yaml")
    assert (grouped["sampled"], grouped["records_per_unit"]) == ("records", 2)
    assert grouped["privacy_unit"].endswith("up to 2 records (group privacy)")
    together = report("account", SPECS / "user-level.yaml")
    assert (together["sampled"], together["records_per_unit"]) == ("units", 1)
    assert together["privacy_unit"].endswith("records (clipped together)")


def test_spec_that_costs_more_than_it_claims(run, tmp_path):
    path = tmp_path / "privacy.yaml"
    path.write_text((SPECS / "truncated-poisson.yaml").read_text().replace("epsilon: 1.6", "epsilon: 1.5"))
    code, out, err = run("account", path)
    assert (code, err) == (1, "")
    assert "more than the claimed 1.5." in out


def test_spec_that_means_nothing_is_not_accounted(run, tmp_path):
    path = tmp_path / "privacy.yaml"
    path.write_text((SPECS / "poisson.yaml").read_text().replace("scheme: poisson", "scheme: shuffle"))
    for command in ("account", "calibrate"):
        code, out, err = run(command, path)
        assert (code, out) == (1, "")
        assert "PS010 error" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("account",), "Missing: --num-units, --steps, --noise-multiplier, --batch-size"),
        (("calibrate", "--steps", 3), "Missing: --num-units, --epsilon, --delta, --batch-size"),
        (("account", *RUN[:-2]), "Expected --delta"),
        (("account", *RUN, "--scheme", "truncated_poisson"), "Missing: --truncated-batch-size"),
        (("account", *RUN, "--truncated-batch-size", 300), "with --scheme truncated_poisson only"),
        (("account", *RUN, "--batch-size", 60001), "at most --num-units 60000. Received: 60001"),
        (("account", *RUN, "--batch-size", 0), "Received: 0"),
        (("account", *RUN, "--scheme", "full_batch"), "no --batch-size but 60000"),
        (("account", *RUN, "--delta", "nan"), "Received: nan"),
        (("account", *RUN, "--delta", 1), "Received: 1.0"),
        (("account", *RUN, "--noise-multiplier", "inf"), "Received: inf"),
        (("account", *RUN, "--noise-multiplier", "nan"), "--noise-multiplier of at least 0. Received: nan"),
        (("account", *RUN, "--noise-multiplier", -1), "Received: -1.0"),
        (("calibrate", *CLAIM, "--epsilon", -1), "--epsilon above 0. Received: -1.0"),
        (("account", *RUN, "--accountant", "moments"), "moments"),
        (("account", *RUN, "--steps", 0), "'--steps'"),
        (("account", SPECS / "poisson.yaml", "--steps", 3), "not both"),
        (("account", SPECS / "poisson.yaml", "--spec", SPECS / "poisson.yaml"), "Expected one spec"),
    ],
)
def test_wrong_calls_exit_with_2(run, arguments, message):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert message in " ".join(err.replace("│", " ").split())


def test_unsupported_combination_exits_with_1(run):
    code, out, err = run("account", *RUN, "--accountant", "rdp", "--adjacency", "replace_one")
    assert (code, out) == (1, "")
    assert "twice the clip norm" in err
    code, _, err = run("account", *RUN, "--records-per-unit", 2, "--adjacency", "replace_one")
    assert code == 1
    assert "does not model" in err


def test_help_teaches(run):
    for command in ("account", "calibrate"):
        code, out, _ = run(command, "--help")
        assert code == 0
        assert f"tfdp {command} privacy.yaml" in out
        assert f"tfdp {command} --num-units" in out


def test_choices_are_those_of_the_library():
    assert tuple(account.Accountant) == accounting.ACCOUNTANTS
    assert tuple(account.Adjacency) == accounting.ADJACENCIES
    assert tuple(account.Scheme) == accounting.SCHEMES
