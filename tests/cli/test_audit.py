"""`tfdp audit` and `tfdp twin`, on a run of `tfdp train`."""

from __future__ import annotations

import json

import numpy as np
import pytest

import tfdp.workflow.audit
import tfdp.workflow.twin
from tfdp.card import check_card
from tfdp.errors import DataError
from tfdp.workflow import build_model, encode_texts, read_text_records, split_held_out
from tfdp.workflow.run_record import read_record

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")

_SPEC = """
schema_version: "1.0"
claim:
  epsilon: 9
  delta: 1e-4
  privacy_unit: {{kind: example, description: one text}}
  adjacency: add_or_remove_one
  data_accesses: [training]
data: {{num_units: {units}, size_is_public: true}}
mechanism: {{clip_norm: 1.0, noise_multiplier: 1.0}}
sampling: {{scheme: poisson, expected_batch_size: 8, steps: 2}}
evaluation: {{group_field: team, min_group_size: 3}}
"""


@pytest.fixture
def trained(tmp_path, command):
    """A run with canaries: its folder, and the data file."""
    generator = np.random.default_rng(0)
    words = ["the", "cat", "sat", "on", "a", "mat", "zebra"]
    rows = [{"text": " ".join(generator.choice(words, 20)), "team": "ab"[i % 2]} for i in range(80)]
    data = tmp_path / "d.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    members, _ = split_held_out(read_text_records(data), 0.3)
    (tmp_path / "spec.yaml").write_text(_SPEC.format(units=len(members) + 16))
    code, out, err = command(
        "train", "--spec", tmp_path / "spec.yaml", "--data", data, "--model", "gpt2:tiny", "--out", tmp_path / "run",
        "--holdout", 0.3, "--sequence-length", 80, "--learning-rate", 0.01, "--canaries", 16, "--lora-rank", 2,
    )  # fmt: skip
    assert code == 0, err + out
    return tmp_path / "run", data


@pytest.fixture
def calls(monkeypatch):
    """The arguments of the fit of a twin and of an audit; the one named by "stop" is not carried out."""
    found = {}

    def watch(module, name):
        real = getattr(module, name)

        def watched(*arguments, **settings):
            found[name] = (arguments, settings)
            if name == found.get("stop"):
                raise DataError("stopped")
            return real(*arguments, **settings)

        monkeypatch.setattr(module, name, watched)

    watch(tfdp.workflow.twin, "plain_fit")
    watch(tfdp.workflow.audit, "audit_run")
    return found


def _trained_parts(model):
    return sorted((variable.name, tuple(variable.shape)) for variable in model.trainable_variables)


def test_from_training_to_the_card(trained, command, calls, tmp_path):
    run, data = trained
    code, out, err = command("twin", run, "--out", tmp_path / "twin", "--epochs", 1)
    assert code == 0, err
    assert "Do not release" in out
    # The twin saw what the private model could see: the members, and the canaries that the coins let in.
    (model, arrays), settings = calls["plain_fit"]
    record = read_record(run)
    members, others = split_held_out(read_text_records(data), 0.3)
    canaries = record.canaries.canaries
    inside = [text for text, coin in zip(canaries.texts, canaries.included, strict=True) if coin]
    public = build_model("gpt2:tiny")
    expected = encode_texts(public, (*members.texts, *inside), 80)[0]["token_ids"]
    seen = arrays[0]["token_ids"][np.asarray(arrays[2]).sum(axis=1) > 0]
    assert sorted(map(tuple, seen)) == sorted(map(tuple, expected))
    fixed = {"batch_size": 8, "optimizer": "adamw", "learning_rate": 0.01}
    assert settings == {"steps": round((len(members) + 16) / 8), **fixed}
    calls["stop"] = "plain_fit"
    assert command("twin", run, "--out", tmp_path / "long")[0] == 1
    assert calls["plain_fit"][1] == {"steps": 2, **fixed}
    code, out, err = command("audit", run, "--against", tmp_path / "twin", "--candidates", 31, "--prompts", 4)
    assert code == 0, err + out
    assert "no epsilon covers" in out
    (_, models, reference, *sides), options = calls["audit_run"]
    assert [side.texts for side in sides] == [members.texts, others.texts]
    batch = {"token_ids": seen[:2], "padding_mask": np.ones_like(seen[:2])}
    logits = {name: np.asarray(each(batch)) for name, each in {"reference": reference, **models}.items()}
    for name, expected in (("reference", public), ("non_private", model)):
        np.testing.assert_allclose(logits[name], np.asarray(expected(batch)), atol=1e-5)
    assert all(np.abs(logits["private"] - logits[name]).max() > 1e-3 for name in ("reference", "non_private"))
    audit = json.loads((run / "audit.json").read_text())
    # As tfdp.verify does, of the adapters that were trained and nothing else.
    assert audit["gradients"]["units"] == 4
    assert 0 <= audit["gradients"]["norms"] < audit["gradients"]["allowed"] == 1e-4
    assert 0 < audit["gradients"]["sums"] < 1e-4
    assert audit["gradients"]["findings"] == []
    adapted = build_model("gpt2:tiny", lora_rank=2)
    assert _trained_parts(options["trained"]) == _trained_parts(adapted) != _trained_parts(public)
    np.testing.assert_allclose(np.asarray(options["trained"](batch)), logits["private"], atol=1e-4)
    names = {(attack["name"], attack["model"], attack["group"]) for attack in audit["attacks"]}
    assert {(name, model, None) for name in ("canaries", "loss ratio", "loss threshold")
            for model in ("private", "non_private")} <= names  # fmt: skip
    assert ("loss ratio", "private", "a") in names
    assert {row["model"] for row in audit["exposures"]} == {"private", "non_private"}
    assert {row["documents"] for row in audit["extractions"]} == {"members", "non_members"}
    private = next(one for one in audit["attacks"] if one["name"] == "canaries" and one["model"] == "private")
    assert private["members"] + private["non_members"] == 16
    assert private["epsilon_lower_bound"] is not None
    card = json.loads((run / "MODEL_CARD.json").read_text())
    assert card["audit"] == audit
    assert card["accounting"]["num_units"] == 16 + json.loads((run / "records.json").read_text())["members"]
    assert not [finding for finding in check_card(run) if finding.severity == "error"]
    for page in ("audit.json", "MODEL_CARD.json", "MODEL_CARD.md", "MODEL_CARD.html"):
        assert "zebra" not in (run / page).read_text()
    assert "zebra" not in out + err

    # No time: what was found before is replaced by what was not done.
    code, out, _ = command("audit", run, "--time-budget", 0.01, "--most-units", 4)
    assert code == 0
    # Another twin in the same place would overwrite a model.
    code, _, err = command("twin", run, "--out", tmp_path / "twin")
    assert (code, "not empty" in err) == (1, True)
    data.write_text(data.read_text() + '{"text": "one more", "team": "a"}\n')
    for arguments in (("audit", run), ("twin", run, "--out", tmp_path / "other")):
        code, _, err = command(*arguments)
        assert (code, "Restore the data" in err) == (1, True)
    (run / "model.keras").write_bytes(b"other")
    data.write_text("".join(data.read_text().splitlines(keepends=True)[:-1]))
    code, _, err = command("audit", run)
    assert (code, "weights that the card names" in err) == (1, True)


def test_a_folder_of_something_else_is_refused(tmp_path, command):
    code, _, err = command("audit", tmp_path)
    assert (code, "records.json" in err) == (1, True)


def test_wrong_gradients_are_found(trained, command, monkeypatch):
    """A rule that leaves out a token: the audit fails, and the card claims nothing any more."""
    from tfdp.gradients import uses

    run, _ = trained
    right = uses.outer
    monkeypatch.setattr(
        uses, "outer", lambda rows, columns, *rest, **more: right(rows[:, 1:], columns[:, 1:], *rest, **more)
    )
    code, out, err = command("audit", run, "--candidates", 3, "--prompts", 1, "--most-units", 4)
    assert code == 1, err
    assert "PS044" in out
    card = json.loads((run / "MODEL_CARD.json").read_text())
    assert card["claim"]["status"] == "not claimed"
    assert not (run / "MODEL_CARD.md").read_text().count("Gradients of a private step: not measured")
