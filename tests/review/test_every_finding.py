"""Every finding of the catalogue both ways: its examples trigger it, and mended they do not.

The examples are the ones that the page of findings shows, run here from a spec, from counts of the data, from ledgers,
from a card and from a model.
"""

from __future__ import annotations

import datetime
import json
import pathlib
from collections.abc import Iterator

import keras
import numpy as np
import pytest

import tfdp
from tfdp.card import check_card, export
from tfdp.card.runs import compare_runs
from tfdp.errors import SpecError
from tfdp.files import sha256_arrays, sha256_bytes
from tfdp.findings import Finding
from tfdp.ledger import Ledger, note_access, record_accesses
from tfdp.plan import make_plan
from tfdp.review import REVIEWERS_RULES, examples, review
from tfdp.review.catalogue import BASE, CATALOGUE
from tfdp.review.contributions import Contributions, compare
from tfdp.review.examples import EXAMPLES, Case, Example, Ran
from tfdp.review.pages import nested, with_changes
from tfdp.review.waivers import apply_waivers
from tfdp.spec import PrivacySpec

TODAY = datetime.date(2026, 12, 1)
VALUES = PrivacySpec.from_text(BASE).to_dict()
CASES = [
    pytest.param(case, id=f"{id}-{case.source}-{case.severity}") for id, cases in EXAMPLES.items() for case in cases
]
MEASURED = {
    "metrics": [examples.METRIC],
    **examples.GROUPS,
    "groups": [{"name": "German", "n": 400, "value": 48.0, "before": 120.0}],
    "membership_inference": examples.ATTACK,
}


class Model:
    """All that export asks of a model."""

    name = "model"

    def get_weights(self) -> list[np.ndarray]:
        return [np.arange(3.0)]

    def save(self, path: str) -> None:
        pathlib.Path(path).write_bytes(b"weights")


def clock() -> datetime.datetime:
    return datetime.datetime(2026, 12, 1, tzinfo=datetime.UTC)


def trained(folder: pathlib.Path, values: dict, ran: Ran, weights: str) -> pathlib.Path:
    """A folder with the ledger that a training under `values` leaves."""
    spec = PrivacySpec.from_dict(with_changes(values, ran.spec))
    folder.mkdir()
    path = folder / "ledger.jsonl"
    with Ledger.create_or_open(path, make_plan(spec, seed=ran.seed).to_dict(), clock=clock) as ledger:
        if ran.public_look is not None:
            note_access(path, "clip_norm", public=ran.public_look, most_units=9)
            record_accesses(ledger)
        for _ in range(ran.steps):
            ledger.append_step(ledger.steps + 1)
        ledger.append("fit_end", steps=ledger.steps, weights=weights)
    if ran.header:
        first, *others = map(json.loads, path.read_bytes().splitlines())
        out, previous = [], "0" * 64
        for entry in (with_changes(first, ran.header), *others):  # in a chain that holds together again
            out.append(json.dumps({**entry, "prev": previous}, sort_keys=True, separators=(",", ":")).encode("ascii"))
            previous = sha256_bytes(out[-1])
        path.write_bytes(b"\n".join(out) + b"\n")
    return folder


def of_spec(example: Example) -> Iterator[Finding]:
    try:
        spec = PrivacySpec.from_dict(with_changes(VALUES, example.spec))
    except SpecError as error:
        yield from error.findings
        return
    found = review(spec, rules=REVIEWERS_RULES)
    if example.data:
        found += compare(spec, Contributions(**example.data))
    yield from apply_waivers(spec, found, TODAY).findings


def of_runs(example: Example, folder: pathlib.Path) -> list[Finding]:
    """Only what the runs add: the finding must not come from the spec alone."""
    values = with_changes(VALUES, example.spec)
    runs = [trained(folder / f"run{i}", values, ran, "0" * 64) for i, ran in enumerate(example.runs)]
    return compare_runs(PrivacySpec.from_dict(values), runs)


def of_card(example: Example, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Finding]:
    """What stands on the card, and what a check of it finds."""
    model = _keras_model() if example.code else Model()
    ran = example.runs[0] if example.runs else Ran()
    run = trained(folder / "run", with_changes(VALUES, example.spec), ran, sha256_arrays(model.get_weights()))
    if example.code:
        monkeypatch.chdir(folder)
        exec(example.code, {"model": model, "mails": np.ones((2, 8)), "labels": np.ones((2, 4)), "tfdp": tfdp})
    else:
        given = {"evaluation": MEASURED, "details": examples.STATED, **example.export}
        export(model, run, history={"loss": [4.6, 4.3]}, clock=clock, **given)
    path = run / "MODEL_CARD.json"
    card = json.loads(path.read_text(encoding="utf-8"))
    yield from (Finding.model_validate(finding) for finding in card["review"]["findings"])
    if example.card:
        path.write_text(json.dumps(with_changes(card, example.card)), encoding="utf-8")
    for name in example.absent:
        (run / name).unlink()
    yield from check_card(run)


def _keras_model() -> keras.Model:
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    model.compile("sgd", "mse")
    return model


def of_model(example: Example) -> list[Finding]:
    names = {"keras": keras}
    exec(example.code, names)
    return tfdp.check_model(names["model"])


def found(case: Case, example: Example, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    match case.source:
        case "file" | "spec" | "data":
            return list(of_spec(example))
        case "run":
            return of_runs(example, folder)
        case "card":
            return list(of_card(example, folder, monkeypatch))
        case "model":
            return of_model(example)


@pytest.mark.parametrize("case", CASES)
def test_an_example_triggers_its_finding_and_mended_does_not(case, request, tmp_path, monkeypatch):
    id = request.node.callspec.id.partition("-")[0]
    for folder in (tmp_path / "as_it_is", tmp_path / "mended"):
        folder.mkdir()
    given = [f for f in found(case, case.triggers, tmp_path / "as_it_is", monkeypatch) if f.id == id]
    assert [finding.severity.value for finding in given][:1] == [case.severity]
    assert not [f for f in found(case, case.mended, tmp_path / "mended", monkeypatch) if f.id == id]


def test_no_finding_without_an_example_of_each_place_and_severity():
    assert list(EXAMPLES) == list(CATALOGUE)
    for id, cases in EXAMPLES.items():
        assert {case.source for case in cases} == set(CATALOGUE[id].sources), id
        assert {case.severity for case in cases} == set(CATALOGUE[id].severities), id
        assert cases[0].severity == CATALOGUE[id].severities[0], id


def test_what_is_not_triggered_is_silent(tmp_path, monkeypatch):
    """The spec that the examples change, its run and its card have no finding at all."""
    assert list(of_spec(Example(data={"num_units": 60000}))) == []
    assert of_runs(Example(runs=(Ran(),)), tmp_path) == []
    assert list(of_card(Example(), tmp_path, monkeypatch)) == []


def test_nested():
    assert nested({"a.b": 1, "a.c": 2, "d": 3}) == {"a": {"b": 1, "c": 2}, "d": 3}
