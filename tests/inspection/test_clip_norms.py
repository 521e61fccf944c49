"""`tfdp.suggest_clip_norm`: the norms are those of single units, and the look is on the card."""

from __future__ import annotations

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tfdp.errors import DataError, LedgerError
from tfdp.ledger.accesses import accesses_path

UNITS, FEATURES = 37, 4


def network(*middle):
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(6, activation="tanh"), *middle, keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((FEATURES,)), *layers])
    model.compile("sgd", "mse")
    return model


def records():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(UNITS, FEATURES)) * np.geomspace(0.01, 10, UNITS)[:, None]
    return x.astype("float32"), generator.normal(size=(UNITS, 2)).astype("float32")


def true_norms(model, x, y, size=1):
    """One unit at a time."""
    found = []
    for start in range(0, len(x) - size + 1, size):
        with tf.GradientTape() as tape:
            mine = slice(start, start + size)
            loss = model.compute_loss(x=x[mine], y=y[mine], y_pred=model(x[mine], training=True))
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        found.append(np.sqrt(sum(np.sum(np.asarray(g, np.float64) ** 2) for g in gradients)))
    return np.sort(found)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("options", [{}, {"method": "vectorized"}, {"hybrid": True}])
def test_norms_and_quantiles_are_those_of_a_loop(size, options):
    """Every unit once, over three microbatches of which the last is not full."""
    model, data = network(), records()
    found = tfdp.suggest_clip_norm(model, data, public=True, records_per_unit=size, **options)
    wanted = true_norms(model, *data, size)
    np.testing.assert_allclose(found.norms, wanted, rtol=1e-5)
    assert found.units == len(wanted)
    assert found.median == pytest.approx(np.median(wanted))
    assert found.quantiles[0.75] == pytest.approx(np.quantile(wanted, 0.75))
    assert found.clip_norm == pytest.approx(found.median, rel=0.05)
    assert f"{found.clip_norm:g}" in str(found)


def test_units_are_chosen_at_random_and_counted():
    """Two looks at 5 of 37 units agree with a chance of 2e-6."""
    model, data = network(), records()
    one, other = (tfdp.suggest_clip_norm(model, data, public=True, units=5).norms for _ in range(2))
    assert len(one) == len(other) == 5
    assert not np.array_equal(one, other)
    everybody = true_norms(model, *data)
    assert all(np.isclose(everybody, norm, rtol=1e-5).any() for norm in one)


def test_what_is_not_finite_or_zero_is_counted_apart():
    model, (x, y) = network(), records()
    x[3] = np.nan
    still = model.predict(x[5:6], verbose=0)
    y[5] = still[0]
    found = tfdp.suggest_clip_norm(model, (x, y), public=True)
    assert (found.units, found.not_finite, found.zero, len(found.norms)) == (UNITS, 1, 1, UNITS - 2)
    assert "1 not finite and 1 zero" in str(found)


def test_the_model_is_left_as_it_was():
    model, data = network(keras.layers.Dropout(0.5, seed=1)), records()
    before = [variable.numpy() for variable in model.variables]
    tfdp.suggest_clip_norm(model, data, public=True)
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_plot(tmp_path, ending):
    found = tfdp.suggest_clip_norm(network(), records(), public=False, ledger=tmp_path / "ledger.jsonl")
    content = found.plot(tmp_path / f"norms.{ending}").read_bytes()
    assert content.startswith(b"\x89PNG" if ending == "png" else b"<?xml")
    if ending == "svg":
        assert b"private data, not covered by epsilon" in content or b"<use" in content


class TestAccess:
    def test_private_data_need_a_ledger(self):
        with pytest.raises(DataError, match=r"Expected ledger=\.\.\., .* say public=True"):
            tfdp.suggest_clip_norm(network(), records(), public=False)
        with pytest.raises(TypeError, match="public"):
            tfdp.suggest_clip_norm(network(), records())

    def test_it_is_said_loudly(self, tmp_path, caplog):
        found = tfdp.suggest_clip_norm(network(), records(), public=False, ledger=tmp_path / "ledger.jsonl")
        assert "DATA ACCESS, NOT COVERED BY EPSILON" in caplog.text
        assert "DATA ACCESS, NOT COVERED BY EPSILON" in str(found)
        caplog.clear()
        public = tfdp.suggest_clip_norm(network(), records(), public=True)
        assert caplog.text == ""
        assert "states that these data are public" in " ".join(str(public).split())

    def test_it_is_noted_before_a_record_is_read(self, tmp_path):
        class Guarded:
            """A source that says what lies beside the ledger when it is read."""

            def __len__(self):
                seen.append(accesses_path(tmp_path / "ledger.jsonl").exists())
                return 2

            def __getitem__(self, index):
                return np.ones(FEATURES, np.float32), np.ones(2, np.float32)

        seen = []
        tfdp.suggest_clip_norm(network(), Guarded(), public=False, ledger=tmp_path / "ledger.jsonl")
        assert seen
        assert all(seen)

    @pytest.mark.parametrize("public", [True, False])
    def test_the_fit_writes_it_into_the_ledger_once_and_the_card_lists_it(self, plan_of, tmp_path, public):
        model, data, ledger = network(), records(), tmp_path / "ledger.jsonl"
        for _ in range(2):
            tfdp.suggest_clip_norm(model, data, public=public, ledger=ledger, units=9)
        plan = plan_of(num_units=UNITS)
        model.compile(tfdp.dp_optimizer("sgd", plan, learning_rate=0.1), "mse")
        for _ in range(2):
            callback = tfdp.PrivacyCallback(plan, ledger=ledger)
            batches = tfdp.poisson_batches(data, plan)
            model.fit(batches, steps_per_epoch=1, callbacks=[callback], verbose=0, shuffle=False)
        looks = tfdp.read_ledger(ledger).of_kind("data_access")
        assert [(look["what"], look["public"], look["most_units"]) for look in looks] == [("clip_norm", public, 9)] * 2
        card = json.loads(tfdp.export(model, tmp_path)["json"].read_text())
        (row,) = [each for each in card["data_accesses"] if each["name"] == "Choice of the clip norm"]
        assert row["status"] == ("no access" if public else "not covered")
        said = "states to be public" if public else "up to 9 units of private data were looked at 2 times"
        assert said in row["note"]
        found = [finding["id"] for finding in card["review"]["findings"]]
        assert ("PS041" in found) is not public
        assert [finding for finding in tfdp.check_card(tmp_path) if finding.id == "PS080"] == []

    def test_a_damaged_note_ends_the_fit(self, plan_of, tmp_path):
        model, data, ledger = network(), records(), tmp_path / "ledger.jsonl"
        tfdp.suggest_clip_norm(model, data, public=False, ledger=ledger)
        accesses_path(ledger).write_text("{}\n")
        plan = plan_of(num_units=UNITS)
        model.compile(tfdp.dp_optimizer("sgd", plan, learning_rate=0.1), "mse")
        callback = tfdp.PrivacyCallback(plan, ledger=ledger)
        batches = tfdp.poisson_batches(data, plan)
        with pytest.raises(LedgerError, match="line 1 is not one"):
            model.fit(batches, steps_per_epoch=1, callbacks=[callback], verbose=0, shuffle=False)
        assert tfdp.read_ledger(ledger).steps == 0


@pytest.mark.parametrize("wrong", [{"units": 0}, {"records_per_unit": True}, {"public": 1}])
def test_wrong_arguments(wrong):
    with pytest.raises(DataError, match=f"Expected {next(iter(wrong))} to be"):
        tfdp.suggest_clip_norm(network(), records(), **{"public": True, **wrong})
