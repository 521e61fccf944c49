"""Many runs on one data set: what they cost together, and what is refused."""

from __future__ import annotations

import json
import math
import os
import shutil
import threading

import dp_accounting
import keras
import numpy as np
import pytest
from dp_accounting.pld import pld_privacy_accountant
from dp_accounting.rdp import rdp_privacy_accountant

import tfdp
from tfdp import accounting
from tfdp.accounting import composed_epsilon, selected_epsilon
from tfdp.budget import declare_trials, note_head, read_budget, register, registering
from tfdp.budget import file as budget_file
from tfdp.errors import AccountingError, BudgetExhaustedError, LedgerError, MisuseError
from tfdp.files import sha256_bytes
from tfdp.ledger import Ledger

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

DELTA = 1e-3


@pytest.fixture
def planned(plan_of, tmp_path):
    """A plan that names the data set's ledger."""

    def make(*, steps=10, noise=2.0, adjacency="add_or_remove_one", accountant="pld", unit=None, **budget):
        base = plan_of(steps=steps, noise=noise)
        spec = base.spec.to_dict()
        # What it costs: a claim above the cap would not pass review.
        spec["claim"]["epsilon"] = 1.001 * accounting.epsilon(
            base.step_event, steps, delta=DELTA, adjacency=adjacency, accountant=accountant
        )
        spec["claim"]["adjacency"] = adjacency
        spec["claim"]["privacy_unit"].update(unit or {})
        spec["accountant"]["name"] = accountant
        spec["budget"] = {"dataset_id": "letters", "ledger": str(tmp_path / "budget.jsonl"), **budget}
        return tfdp.make_plan(tfdp.PrivacySpec.from_text(json.dumps(spec), format="json"))

    return make


@pytest.fixture
def run(tmp_path):
    """A run of some of its steps, as a fit leaves it."""

    def go(plan, name, steps=None, *, killed=False):
        path = tmp_path / name / "ledger.jsonl"
        with Ledger.create_or_open(path, plan.to_dict()) as ledger:
            register(plan, ledger)
            for step in range(ledger.steps + 1, (plan.steps if steps is None else steps) + 1):
                ledger.append_step(step)
            if not killed:
                note_head(plan, ledger)
        return path

    return go


def by_dp_accounting(*runs):
    accountant = pld_privacy_accountant.PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    for noise, steps in runs:
        step = dp_accounting.PoissonSampledDpEvent(0.5, dp_accounting.GaussianDpEvent(noise))
        accountant.compose(dp_accounting.SelfComposedDpEvent(step, steps))
    return accountant.get_epsilon(DELTA)


def test_runs_compose_failed_and_discarded_ones_too(planned, run, tmp_path):
    """One finished, one that stopped early, one whose folder was deleted, one with another accountant."""
    run(planned(), "finished")
    run(planned(noise=3.0, steps=20), "stopped", steps=7)
    run(planned(noise=2.5), "deleted", steps=4)
    shutil.rmtree(tmp_path / "deleted")
    run(planned(noise=4.0, accountant="rdp"), "other", steps=5)
    found = read_budget(tmp_path / "budget.jsonl")
    assert [(each.steps, each.state) for each in found.runs] == [
        (10, "spent"),
        (7, "spent"),
        (10, "ledger missing"),
        (5, "spent"),
    ]
    expected = by_dp_accounting((2.0, 10), (3.0, 7), (2.5, 10), (4.0, 5))
    assert found.epsilon(DELTA) == pytest.approx(expected, rel=2e-3)
    assert found.dataset_id == "letters"


def test_a_run_that_goes_on_is_registered_once_and_counts_as_planned(planned, tmp_path):
    plan = planned()
    with Ledger.create_or_open(tmp_path / "ledger", plan.to_dict()) as ledger:
        register(plan, ledger)
        ledger.append_step(1)
        (going,) = read_budget(tmp_path / "budget.jsonl").runs
        assert (going.steps, going.state) == (10, "running")
    with Ledger.create_or_open(tmp_path / "ledger", plan.to_dict()) as ledger:
        register(plan, ledger)
    (ended,) = read_budget(tmp_path / "budget.jsonl").runs
    assert (ended.steps, ended.state) == (1, "spent")


@pytest.mark.parametrize("harm", ["cut", "cut to the header", "exchanged", "changed"])
def test_a_ledger_that_cannot_be_believed_counts_as_planned(planned, run, tmp_path, harm):
    path = run(planned(), "one", steps=6)
    lines = path.read_bytes().splitlines(keepends=True)
    if harm == "exchanged":
        path.unlink()
        Ledger.create_or_open(path, planned().to_dict()).close()
    else:
        kept = {"cut": lines[:-1], "cut to the header": lines[:1], "changed": [*lines[:3], *lines[4:]]}[harm]
        path.write_bytes(b"".join(kept))
    (found,) = read_budget(tmp_path / "budget.jsonl").runs
    assert (found.steps, found.state) == (10, "ledger changed")


class TestHeads:
    def test_a_ledger_that_was_cut_is_not_continued(self, planned, run):
        path = run(planned(), "one", steps=6)
        whole = path.read_bytes()
        path.write_bytes(b"".join(whole.splitlines(keepends=True)[:-2]))
        with pytest.raises(LedgerError, match=r"the 7 lines of which .*budget.jsonl knows. Received: 5 lines"):
            run(planned(), "one", steps=10)
        path.write_bytes(whole)
        run(planned(), "one", steps=10)

    def test_what_a_killed_process_left_is_noted_when_it_goes_on(self, planned, run, tmp_path):
        """Before that, a cut cannot be told from steps that were never taken."""
        path = run(planned(), "one", steps=6, killed=True)
        lines = path.read_bytes().splitlines(keepends=True)
        with Ledger.create_or_open(path, planned().to_dict()) as ledger:
            register(planned(), ledger)
        path.write_bytes(b"".join(lines[:-1]))
        (found,) = read_budget(tmp_path / "budget.jsonl").runs
        assert (found.steps, found.state) == (10, "ledger changed")

    def test_a_torn_line_comes_after_the_head(self, planned, run, tmp_path):
        path = run(planned(), "one", steps=6)
        with open(path, "ab") as stream:
            stream.write(b'{"kind":')
        (found,) = read_budget(tmp_path / "budget.jsonl").runs
        assert (found.steps, found.state) == (7, "spent")
        run(planned(), "one", steps=9)

    def test_a_run_that_moved_is_found_once_it_has_gone_on(self, planned, run, tmp_path):
        run(planned(), "one", steps=6)
        shutil.move(tmp_path / "one", tmp_path / "two")
        assert read_budget(tmp_path / "budget.jsonl").runs[0].state == "ledger missing"
        run(planned(), "two", steps=6)
        (found,) = read_budget(tmp_path / "budget.jsonl").runs
        assert (found.steps, found.state, found.ledger) == (6, "spent", str(tmp_path / "two" / "ledger.jsonl"))

    def test_the_same_head_is_noted_once(self, planned, run, tmp_path):
        run(planned(), "one")
        before = (tmp_path / "budget.jsonl").read_bytes()
        run(planned(), "one")
        assert (tmp_path / "budget.jsonl").read_bytes() == before

    def test_a_data_set_ledger_that_was_exchanged_during_a_run(self, planned, run, tmp_path):
        plan, path = planned(), tmp_path / "budget.jsonl"
        with Ledger.create_or_open(tmp_path / "one", plan.to_dict()) as ledger:
            register(plan, ledger)
            path.unlink()
            with pytest.raises(LedgerError, match="No such file"):
                note_head(plan, ledger)
            assert not path.exists()
            run(plan, "other")
            with pytest.raises(LedgerError, match=r"does not know|Received: a ledger without it"):
                note_head(plan, ledger)

    @pytest.mark.parametrize("end", ["well", "by an exception"])
    def test_fits_note_theirs(self, planned, tmp_path, end):
        plan, path = planned(), tmp_path / "one" / "ledger.jsonl"
        if end == "well":
            train(plan, tmp_path / "one", epochs=1, steps=3)
        else:
            stop = keras.callbacks.LambdaCallback(
                on_train_batch_end=lambda batch, logs: batch == 2 and setattr(stop.model, "train_function", abs)
            )
            with pytest.raises(MisuseError, match="Received: another one"):
                train(plan, tmp_path / "one", stop, epochs=1, steps=10)
        content = path.read_bytes()
        for cut in (1, 2, 3):
            path.write_bytes(b"".join(content.splitlines(keepends=True)[:-cut]))
            found = read_budget(tmp_path / "budget.jsonl").runs[0]
            assert (found.steps, found.state) == (10, "ledger changed")
        path.write_bytes(content)
        assert read_budget(tmp_path / "budget.jsonl").runs[0].steps == 3


class TestCap:
    def test_a_run_that_would_exceed_it_does_not_begin(self, planned, run, tmp_path):
        one = by_dp_accounting((2.0, 10))
        two = by_dp_accounting((2.0, 20))
        cap = (one + two) / 2
        run(planned(epsilon_cap=cap), "first")
        before = (tmp_path / "budget.jsonl").read_bytes()
        plan = planned(steps=11, epsilon_cap=cap)
        with pytest.raises(BudgetExhaustedError, match=r"PS032: expected at most epsilon .* by others, and this"):
            run(plan, "second")
        assert (tmp_path / "budget.jsonl").read_bytes() == before
        assert tfdp.read_ledger(tmp_path / "second" / "ledger.jsonl").steps == 0
        run(planned(steps=1, epsilon_cap=cap), "small")

    def test_what_a_discarded_run_did_not_spend_is_free_again(self, planned, run):
        cap = by_dp_accounting((2.0, 16)) * 1.01
        run(planned(epsilon_cap=cap), "first", steps=5)
        run(planned(epsilon_cap=cap), "second")
        with pytest.raises(BudgetExhaustedError):  # and the first may not take it back
            run(planned(steps=10, epsilon_cap=cap), "first", steps=10)

    def test_a_run_that_goes_on_is_not_counted_beside_itself(self, planned, run):
        plan = planned(epsilon_cap=by_dp_accounting((2.0, 10)) * 1.01)
        run(plan, "first", steps=5)
        run(plan, "first", steps=10)

    def test_a_warning_from_four_fifths_on(self, planned, run, caplog):
        cap = by_dp_accounting((2.0, 10)) / 0.85
        with caplog.at_level("WARNING", logger="tfdp"):
            run(planned(epsilon_cap=cap), "first")
        assert "PS033" in caplog.text
        assert "85% of the cap" in caplog.text

    def test_delta_is_that_of_the_cap(self, planned, run):
        """What two runs cost at twice the delta fits; at their own it does not."""
        event = planned().step_event
        wide, narrow = (
            accounting.epsilon(event, 20, delta=delta, adjacency="add_or_remove_one") for delta in (2 * DELTA, DELTA)
        )
        cap = (wide + narrow) / 2
        run(planned(epsilon_cap=cap), "first")
        with pytest.raises(BudgetExhaustedError):
            run(planned(epsilon_cap=cap), "second")
        run(planned(epsilon_cap=cap, delta_cap=2 * DELTA), "third")


@pytest.mark.parametrize(
    "other", [{"adjacency": "zero_out"}, {"unit": {"kind": "user", "id_field": "sender", "max_records_per_unit": 1}}]
)
def test_other_units_and_adjacencies_are_not_added_up(planned, run, other):
    run(planned(), "first")
    with pytest.raises(MisuseError, match=r"PS034.*do not add up"):
        run(planned(**other), "second")


def test_another_data_set(planned, run):
    run(planned(), "first")
    with pytest.raises(MisuseError, match=r"the ledger of 'mails'. Received: that of 'letters'"):
        run(planned(dataset_id="mails"), "second")


class TestFile:
    def test_edits_are_seen(self, planned, run, tmp_path):
        run(planned(), "first")
        run(planned(), "second")
        path = tmp_path / "budget.jsonl"
        lines = path.read_bytes().splitlines(keepends=True)
        smaller = [lines[0], lines[1].replace(b'"steps":10', b'"steps":1'), *lines[2:]]
        for changed in ([lines[0], *lines[2:]], [*lines[:2], *lines[3:]], smaller):
            path.write_bytes(b"".join(changed))
            with pytest.raises(LedgerError, match=r"line [23]: expected prev"):
                read_budget(path)
            with pytest.raises(LedgerError, match="expected prev"):
                run(planned(), "third")
        path.write_bytes(b"{}\n")
        with pytest.raises(LedgerError, match="line 1"):
            read_budget(path)
        with pytest.raises(LedgerError, match="No such file"):
            read_budget(tmp_path / "none")

    @pytest.mark.parametrize("length", [1, 30, 5000])
    def test_a_torn_line_never_had_a_step(self, planned, run, tmp_path, length):
        run(planned(), "first")
        path = tmp_path / "budget.jsonl"
        whole = path.read_bytes()
        path.write_bytes(whole + b'{"kind":"run","be'.ljust(length, b"g")[:length])
        assert len(read_budget(path).runs) == 1
        run(planned(), "second")
        assert path.read_bytes().startswith(whole)
        assert len(read_budget(path).runs) == 2

    @pytest.mark.parametrize(
        ("line", "match"),
        [
            (lambda run, head: head | {"identity": "0" * 64}, "a run once, and heads of runs after it"),
            (lambda run, head: run, "a run once, and heads of runs after it"),
            (lambda run, head: head | {"head": head["head"] | {"lines": 2}}, "at least 11 lines of that run"),
            (lambda run, head: {"kind": "head", "identity": run["identity"]}, "a run and its head"),
            (lambda run, head: head | {"kind": "refund"}, "a run, its head or trials"),
        ],
    )
    def test_lines_that_follow_but_say_nothing_that_can_be(self, planned, run, tmp_path, line, match):
        run(planned(), "first")
        path = tmp_path / "budget.jsonl"
        _, begun, head = path.read_bytes().splitlines()
        more = line(json.loads(begun), json.loads(head)) | {"prev": sha256_bytes(head)}
        path.write_bytes(path.read_bytes() + json.dumps(more).encode() + b"\n")
        with pytest.raises(LedgerError, match=f"line 4: expected {match}"):
            read_budget(path)

    def test_a_line_that_failed_to_reach_the_disk_is_written_again(self, planned, run, tmp_path, monkeypatch):
        """After a failed fsync it may be in memory only: the run that comes back must not rely on it."""
        plan, path, real, flushed = planned(), tmp_path / "budget.jsonl", os.fsync, []
        run(plan, "first")

        def failing(descriptor):
            if os.readlink(f"/proc/self/fd/{descriptor}") == str(path):
                raise OSError(5, "Input/output error")
            real(descriptor)

        monkeypatch.setattr(os, "fsync", failing)
        with pytest.raises(LedgerError, match="Input/output error"):
            run(plan, "second")
        assert len(read_budget(path).runs) == 2  # in memory
        stripped = path.read_bytes().splitlines(keepends=True)

        def looking(descriptor):
            if os.readlink(f"/proc/self/fd/{descriptor}") == str(path):
                flushed.append(path.read_bytes())
            real(descriptor)

        monkeypatch.setattr(os, "fsync", looking)
        real_open, written = open, []

        class Watched:
            def __init__(self, stream):
                self.stream = stream

            def __getattr__(self, name):
                return getattr(self.stream, name)

            def __enter__(self):
                return self

            def __exit__(self, *error):
                self.stream.close()

            def write(self, data):
                written.append(bytes(data))
                return self.stream.write(data)

        monkeypatch.setattr(budget_file, "open", lambda *args: Watched(real_open(*args)), raising=False)
        with Ledger.create_or_open(tmp_path / "second" / "ledger.jsonl", plan.to_dict()) as ledger:
            register(plan, ledger)
        assert written == [stripped[-1]]
        assert flushed == [b"".join(stripped)]

    def test_runs_that_register_at_once(self, planned, tmp_path):
        """Eight in threads: each gets its line; and where the cap has room for three, three begin."""
        plan = planned(steps=4, epsilon_cap=by_dp_accounting((2.0, 14)))
        begun, refused, barrier = [], [], threading.Barrier(8)

        def work(number):
            with Ledger.create_or_open(tmp_path / str(number) / "ledger.jsonl", plan.to_dict()) as ledger:
                barrier.wait()
                try:
                    register(plan, ledger)
                    begun.append(number)
                except BudgetExhaustedError:
                    refused.append(number)
                barrier.wait()

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        found = read_budget(tmp_path / "budget.jsonl")
        assert (len(begun), len(refused)) == (3, 5)
        assert sorted(run.ledger for run in found.runs) == sorted(
            str(tmp_path / str(number) / "ledger.jsonl") for number in begun
        )

    def test_a_disk_that_takes_no_line_lets_no_run_begin(self, planned, run, tmp_path, monkeypatch):
        run(planned(), "first")
        real = os.fsync

        def failing(descriptor):
            if os.readlink(f"/proc/self/fd/{descriptor}").endswith("budget.jsonl"):
                raise OSError(5, "Input/output error")
            real(descriptor)

        monkeypatch.setattr(os, "fsync", failing)
        with pytest.raises(LedgerError, match=r"Input/output error.*No run may begin"):
            run(planned(), "second")
        assert tfdp.read_ledger(tmp_path / "second" / "ledger.jsonl").steps == 0


class TestTrials:
    """A number of runs drawn beforehand, of which only the best is kept."""

    def drawn(self, monkeypatch, count):
        class Fixed:
            def geometric(self, p):
                assert p == pytest.approx(1 / 8)
                return count

            poisson = geometric

        monkeypatch.setattr(registering, "system_generator", Fixed)

    def test_they_cost_what_the_theorem_says_and_only_as_many_as_were_drawn(self, planned, run, tmp_path, monkeypatch):
        self.drawn(monkeypatch, 3)
        plan = planned(steps=4, noise=8.0)
        assert declare_trials(plan, 8.0) == 3
        path = tmp_path / "budget.jsonl"
        selected = selected_epsilon(plan.step_event, 4, delta=DELTA, adjacency=plan.adjacency, mean=8.0, shape=1.0)
        assert read_budget(path).epsilon(DELTA) == pytest.approx(selected, rel=1e-9)  # before one of them has run
        for index in range(3):
            run(plan, f"trial{index}")
            assert read_budget(path).epsilon(DELTA) == pytest.approx(selected, rel=1e-9)
        run(planned(steps=5, noise=8.0), "another plan")
        run(plan, "one too many")
        found = read_budget(path)
        assert [each.trial for each in found.runs] == [True, True, True, False, False]
        reference = rdp_privacy_accountant.RdpAccountant()
        step = dp_accounting.PoissonSampledDpEvent(0.5, dp_accounting.GaussianDpEvent(8.0))
        reference.compose(
            dp_accounting.dp_event.RepeatAndSelectDpEvent(dp_accounting.SelfComposedDpEvent(step, 4), 8, 1)
        )
        reference.compose(step, 5 + 4)
        assert found.epsilon(DELTA) == pytest.approx(reference.get_epsilon(DELTA), rel=1e-6)
        many, _ = composed_epsilon([(plan.step_event, 4 * 30)], delta=DELTA, adjacency=plan.adjacency)
        assert selected < many

    def test_a_trial_that_goes_on_is_not_counted_again(self, planned, run, tmp_path, monkeypatch):
        self.drawn(monkeypatch, 1)
        plan = planned(steps=4, noise=8.0)
        declare_trials(plan, 8.0)
        run(plan, "trial", steps=2)
        run(plan, "trial", steps=4)
        assert [each.trial for each in read_budget(tmp_path / "budget.jsonl").runs] == [True]

    def test_the_cap_holds_for_all_of_them_at_once(self, planned, run, tmp_path):
        plan = planned(steps=4, noise=8.0)
        selected = selected_epsilon(plan.step_event, 4, delta=DELTA, adjacency=plan.adjacency, mean=8.0, shape=1.0)
        with pytest.raises(BudgetExhaustedError, match="PS032"):
            declare_trials(planned(steps=4, noise=8.0, epsilon_cap=selected * 0.99), 8.0)
        assert read_budget(tmp_path / "budget.jsonl").selections == ()
        declare_trials(planned(steps=4, noise=8.0, epsilon_cap=selected * 1.01), 8.0)

    def test_the_number_follows_its_distribution(self, planned):
        """Means of 200 draws, geometric (variance 56) and Poisson (8), to 5.3 standard errors: false alarms 1e-6."""
        plan = planned(steps=4, noise=8.0)
        for shape, variance in ((1.0, 56.0), (math.inf, 8.0)):
            drawn = [declare_trials(plan, 8.0, shape) for _ in range(200)]
            assert abs(np.mean(drawn) - 8.0) < 5.3 * math.sqrt(variance / 200)
            assert min(drawn) >= (shape == 1.0)
            assert (np.var(drawn) > 16) == (shape == 1.0)  # ten and 3.6 standard errors away, on the lighter side

    def test_refusals(self, planned, plan_of):
        with pytest.raises(MisuseError, match=r"budget\.ledger"):
            declare_trials(plan_of(), 8.0)
        with pytest.raises(MisuseError, match="shape 1"):
            declare_trials(planned(), 8.0, shape=0.5)
        with pytest.raises(AccountingError, match="mean"):
            declare_trials(planned(), 1.0)


def test_the_card_of_the_best_trial(planned, tmp_path, monkeypatch):
    TestTrials().drawn(monkeypatch, 2)
    plan = planned(steps=4, noise=8.0)
    declare_trials(plan, 8.0)
    monkeypatch.undo()
    train(plan, tmp_path / "other")
    model = train(plan, tmp_path / "best")
    paths = tfdp.export(model, tmp_path / "best")
    budget = json.loads(paths["json"].read_text())["budget"]
    selected = selected_epsilon(plan.step_event, 4, delta=DELTA, adjacency=plan.adjacency, mean=8.0, shape=1.0)
    assert budget["is_trial"] is True
    assert [each["trial"] for each in budget["others"]] == [True]
    assert budget["spent_after"]["value"] == pytest.approx(selected, rel=1e-9)
    assert "holds only as long as nothing but the best of them is ever released" in paths["markdown"].read_text()
    assert not [each for each in tfdp.check_card(tmp_path / "best") if each.id == "PS080"]


def train(plan, folder, *callbacks, epochs=None, steps=None):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(
        tfdp.dp_optimizer("sgd", plan), keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=[]
    )
    data = (np.ones((12, 3), np.float32), np.zeros(12, int))
    model.fit(
        tfdp.poisson_batches(data, plan),
        steps_per_epoch=steps or plan.steps_per_epoch,
        epochs=epochs or plan.epochs,
        callbacks=[tfdp.PrivacyCallback(plan, folder / "ledger.jsonl"), *callbacks],
        verbose=0,
        shuffle=False,
    )
    return model


def test_fits_register_themselves_and_cards_tell_of_the_others(planned, tmp_path):
    cap = by_dp_accounting((2.0, 13))
    tuned = {"kind": "private", "trials": 1, "accounted": True}

    def plan_with_tuning(steps):
        spec = planned(steps=steps, epsilon_cap=cap).spec.to_dict()
        spec["tuning"] = tuned
        return tfdp.make_plan(tfdp.PrivacySpec.from_text(json.dumps(spec), format="json"))

    train(plan_with_tuning(4), tmp_path / "trial")
    model = train(plan_with_tuning(8), tmp_path / "run")
    with pytest.raises(BudgetExhaustedError, match="PS032"):
        train(plan_with_tuning(2), tmp_path / "refused")
    paths = tfdp.export(model, tmp_path / "run")
    card = json.loads(paths["json"].read_text())
    budget = card["budget"]
    assert [(each["steps"], each["state"]) for each in budget["others"]] == [(4, "spent")]  # a refused one never began
    assert budget["spent_before"] == pytest.approx(by_dp_accounting((2.0, 4)), rel=2e-3)
    assert budget["spent_after"]["value"] == pytest.approx(by_dp_accounting((2.0, 12)), rel=2e-3)
    assert "1 other run, failed and discarded ones among them" in paths["markdown"].read_text()
    findings = {each["id"]: each for each in card["review"]["findings"]}
    assert "PS033" in findings
    assert "PS032" not in findings
    (tuning,) = [each for each in card["data_accesses"] if each["name"].startswith("Tuning")]
    assert "counted among the runs of the budget, 1 beside this one" in tuning["note"]
    train(planned(steps=1), tmp_path / "later")  # a card is checked as it was written, whatever ran since
    assert not [each for each in tfdp.check_card(tmp_path / "run") if each.id == "PS080"]


def test_trials_that_nobody_counted_are_found(planned, tmp_path):
    spec = planned(steps=2).spec.to_dict()
    spec["tuning"] = {"kind": "private", "trials": 30, "accounted": True}
    model = train(tfdp.make_plan(tfdp.PrivacySpec.from_text(json.dumps(spec), format="json")), tmp_path / "run")
    card = json.loads(tfdp.export(model, tmp_path / "run")["json"].read_text())
    (found,) = [each for each in card["review"]["findings"] if each["id"] == "PS040"]
    assert "expected the 30 trials" in found["message"]
    assert "received 0 other runs" in found["message"]
