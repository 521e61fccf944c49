"""What a remedy prescribes passes when it is obeyed to the letter."""

from __future__ import annotations

import copy
import datetime
import re
import shlex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdp.review import REVIEWERS_RULES, review
from tfdp.review.catalogue import BASE, CATALOGUE
from tfdp.review.claim import delta_against_size, duplicates_are_removed, unit_is_complete
from tfdp.review.pages import entry_text
from tfdp.review.sampling import batch_fits_data, few_batches_are_cut, numbers_agree
from tfdp.review.waivers import apply_waivers
from tfdp.spec import PrivacySpec

VALUES = PrivacySpec.from_text(BASE).to_dict()
TODAY = datetime.date(2026, 12, 1)


def spec_of(changes: dict) -> PrivacySpec:
    values = copy.deepcopy(VALUES)
    for path, value in changes.items():
        *sections, name = path.split(".")
        section = values
        for part in sections:
            section = section[part]
        section[name] = value
    return PrivacySpec.from_dict(values)


def one(changes: dict, id: str):
    (finding,) = (finding for finding in review(spec_of(changes), rules=REVIEWERS_RULES) if finding.id == id)
    return finding


@settings(derandomize=True, max_examples=300, deadline=None)
@given(units=st.integers(1, 2**53))
def test_the_delta_that_is_prescribed_passes(units):
    for delta in (min(0.999, 0.5 / units), min(0.999, 2 / units)):
        for finding in delta_against_size(spec_of({"data.num_units": units, "claim.delta": delta})):
            prescribed = float(re.search(r"= (\S+)\.$", finding.fix)[1])
            assert prescribed > 0.05 / units
            assert not list(delta_against_size(spec_of({"data.num_units": units, "claim.delta": prescribed})))


def test_delta_of_600_units():
    """A tenth of 1/600 is 1.66...e-4: 1.7e-4 would be refused again."""
    assert one({"data.num_units": 600, "claim.delta": 1e-3, "sampling.expected_batch_size": 6}, "PS004").fix.endswith(
        "= 0.00016."
    )


GROUP = {
    "claim.privacy_unit": {
        "kind": "user",
        "description": "one account",
        "id_field": "account",
        "max_records_per_unit": 4,
        "method": "group_privacy",
    },
    "data.num_units": 12000,
    "data.num_records": 40000,
}
TOO_DEAR = [
    {"claim.epsilon": 1.0},
    {"claim.epsilon": 0.3, "sampling.epochs": 3},
    {"sampling.scheme": "full_batch", "sampling.expected_batch_size": None, "sampling.epochs": 1},
    {"claim.adjacency": "replace_one"},
    {"accountant.name": "rdp"},
]


class TestEpsilon:
    @pytest.mark.parametrize("changes", TOO_DEAR)
    def test_the_noise_and_the_claim_that_are_prescribed_pass(self, changes):
        fix = one(changes, "PS020").fix
        sigma = float(re.search(r"noise_multiplier: ([0-9.e-]+),", fix)[1])
        epsilon = float(re.search(r"in claim, write epsilon: ([0-9.e-]+),", fix)[1])
        assert fix.startswith("In mechanism, write noise_multiplier: ")
        assert "at this delta (null computes it anew)" in fix
        for obeyed in ({"mechanism.noise_multiplier": sigma}, {"claim.epsilon": epsilon}):
            found = review(spec_of(changes | obeyed))
            assert not [finding for finding in found if finding.id in ("PS020", "PS021")]

    def test_the_command_that_is_named_runs(self, capsys):
        from tfdp.cli import main

        changes = {
            "sampling.scheme": "truncated_poisson",
            "sampling.truncated_batch_size": 320,
            "sampling.epochs": None,
            "sampling.steps": 1,
            "claim.epsilon": 0.01,
        }
        finding = one(changes, "PS020")
        assert "(1 step, " in finding.message
        command = shlex.split(re.search("`tfdp (.*)`", finding.fix)[1])
        with pytest.raises(SystemExit) as caught:
            main(command)
        out = capsys.readouterr().out
        assert not caught.value.code
        sigma = float(re.search(r"multiplier ([0-9.e-]+) keeps", " ".join(out.split()))[1])
        assert not [f for f in review(spec_of(changes | {"mechanism.noise_multiplier": sigma})) if f.id == "PS020"]

    def test_a_plan_does_not_wait_for_the_search(self, monkeypatch):
        monkeypatch.setattr("tfdp.review.costs.least_noise", lambda *_: pytest.fail("calibrated"))
        assert "tfdp calibrate --num-units 60000 --batch-size 256" in review(spec_of({"claim.epsilon": 1.0}))[0].fix


class TestSampling:
    def test_what_the_accountant_models(self):
        changes = {
            "accountant.name": "rdp",
            "sampling.scheme": "truncated_poisson",
            "sampling.truncated_batch_size": 320,
        }
        fix = one(changes, "PS011").fix
        ways = re.findall(r"[iI]n ([\w.]+), write (\w+): (\w+)( \(and delete)?", fix)
        assert ways
        for section, name, value, delete in ways:
            obeyed = changes | {f"{section}.{name}": value}
            obeyed |= {"sampling.truncated_batch_size": None} if delete else {}
            assert not [finding for finding in review(spec_of(obeyed)) if finding.id in ("PS011", "PS014", "PS017")]

    @pytest.mark.parametrize(("accountant", "id"), [("pld", "PS011"), ("rdp", "PS017")])
    def test_replacing_a_unit_of_several_records(self, accountant, id):
        """What keeps the claim comes first; another adjacency is called another claim; and each way passes."""
        changes = GROUP | {"claim.adjacency": "replace_one", "accountant.name": accountant}
        fix = one(changes, id).fix
        method, adjacency = (
            fix.index("write method: user_wise_dp_sgd (which keeps replace_one"),
            fix.index("a weaker claim"),
        )
        assert method < adjacency
        assert "twice epsilon" in fix
        assert ("In accountant, write name: pld, and beside it: " in fix) == (accountant == "rdp")
        pld = changes | {"accountant.name": "pld"}
        user_wise = {"claim.privacy_unit": GROUP["claim.privacy_unit"] | {"method": "user_wise_dp_sgd"}}
        for obeyed in (user_wise, {"claim.adjacency": "add_or_remove_one"}, {"claim.adjacency": "zero_out"}):
            assert not {"PS011", "PS017"} & {finding.id for finding in review(spec_of(pld | obeyed))}
        assert "use adjacency" not in one(changes, id).message

    def test_replacing_a_record_with_rdp(self):
        fix = one({"claim.adjacency": "replace_one", "accountant.name": "rdp"}, "PS017").fix
        assert fix.startswith("In accountant, write name: pld, which counts it twice and may need more noise")

    @pytest.mark.parametrize(
        ("size", "most", "cut"),
        [(100, 90, True), (400, 300, True), (100, 105, True), (100, 120, False), (100, 150, False), (800, 800, False)],
    )
    def test_a_largest_batch_that_cuts_many(self, size, most, cut):
        """Compared with the exact tail of the binomial distribution; each way out is silent."""
        from scipy.stats import binom

        changes = {
            "data.num_units": 800,
            "claim.delta": 1e-4,
            "sampling.scheme": "truncated_poisson",
            "sampling.expected_batch_size": float(size),
            "sampling.truncated_batch_size": most,
        }
        found = list(few_batches_are_cut(spec_of(changes)))
        exact = binom.sf(most, 800, size / 800)
        assert bool(found) == cut == (exact > 0.05)
        if cut:
            told = int(re.search(r"about (\d+)%", found[0].message)[1]) / 100
            assert told == pytest.approx(exact, abs=0.02)
            for name in ("truncated_batch_size", "expected_batch_size"):
                value = int(re.search(rf"{name}: (\d+)", found[0].fix)[1])
                assert list(few_batches_are_cut(spec_of(changes | {f"sampling.{name}": value}))) == []

    def test_the_whole_data_as_a_batch(self):
        changes = {
            "sampling.expected_batch_size": 70000,
            "sampling.scheme": "truncated_poisson",
            "sampling.truncated_batch_size": 512,
        }
        (finding,) = batch_fits_data(spec_of(changes))
        assert "60000 itself puts everything into every batch" in finding.fix
        assert "truncated_batch_size, 512, has to stay well above it" in finding.fix

    def test_both_steps_and_epochs(self):
        finding = one({"sampling.steps": 4000}, "PS014")
        assert "15 epochs, which are 3515 steps" in finding.message
        assert finding.fix == "Delete steps, for 3515 steps, or delete epochs, for 4000."

    @pytest.mark.parametrize("units", [3, 7, 60000, 999983])
    def test_too_few_epochs(self, units):
        changes = {"data.num_units": units, "sampling.expected_batch_size": 2.0, "sampling.epochs": 1e-7}
        (finding,) = numbers_agree(spec_of(changes))
        epochs = float(re.search(r"epochs: (\S+) or more", finding.fix)[1])
        assert spec_of(changes | {"sampling.epochs": epochs}).schedule.steps == 1

    @pytest.mark.parametrize("size", [60001, 12345678.0, 1e12])
    def test_too_large_a_batch(self, size):
        (finding,) = batch_fits_data(spec_of({"sampling.expected_batch_size": float(size)}))
        assert f"received {int(size)}." in finding.message
        most = float(re.search(r"expected_batch_size: (\d+) or less", finding.fix)[1])
        assert not list(batch_fits_data(spec_of({"sampling.expected_batch_size": most})))

    def test_a_probability_that_is_a_batch_size(self):
        changes = {"sampling.expected_batch_size": None, "sampling.probability": 256.0}
        (finding,) = batch_fits_data(spec_of(changes))
        assert "Then write expected_batch_size: 256 instead." in finding.fix


def test_remedies_are_lines_of_their_sections():
    """Each is copied where it says, and passes."""
    private = {"data.size_is_public": False}
    fix = one(private, "PS018").fix
    probability = float(
        re.search(r"Write probability: (\S+) in its place, or in data, write size_is_public: true,", fix)[1]
    )
    mended = private | {"sampling.expected_batch_size": None, "sampling.probability": probability}
    assert spec_of(mended).schedule.steps == spec_of({}).schedule.steps
    assert not [finding for finding in review(spec_of(mended)) if finding.id == "PS018"]
    fix = one({"claim.data_accesses": ["training", "tuning"]}, "PS040").fix
    assert fix == "Delete tuning here, or say how it was done. Such as: tuning: {kind: none}"
    fix = one(GROUP | {"claim.epsilon": 0.3}, "PS020").fix
    assert fix.startswith(
        "In mechanism, write noise_multiplier: null, which computes the least that keeps the claim, or in"
    )


class TestWords:
    def test_no_method_that_nobody_wrote(self):
        unit = {"kind": "user", "description": "x"}
        found = list(unit_is_complete(spec_of({"claim.privacy_unit": unit})))
        assert [finding.where.rpartition(".")[2] for finding in found] == ["id_field", "max_records_per_unit"]
        assert "for a user unit, received" in found[0].message
        assert "Such as: id_field: <field of a record that names its user>" in found[0].fix
        assert "Such as: max_records_per_unit: <most records of one user>" in found[1].fix

    def test_articles(self):
        (finding,) = duplicates_are_removed(spec_of({"data.deduplication": "none"}))
        assert "with an example unit" in finding.message
        assert "received deduplication none" in finding.message
        (finding,) = duplicates_are_removed(PrivacySpec.from_text(BASE.replace("  deduplication: exact\n", "")))
        assert "received no deduplication (none is assumed)" in finding.message

    def test_method_and_number_of_records_together(self):
        unit = {"kind": "example", "description": "x", "max_records_per_unit": 3, "method": "user_wise_dp_sgd"}
        finding = one({"claim.privacy_unit": unit}, "PS009")
        assert finding.message.endswith("received user_wise_dp_sgd with max_records_per_unit 3.")
        assert finding.fix.startswith("Delete both")

    def test_what_a_method_samples_and_leaves_out(self):
        unit = GROUP["claim.privacy_unit"] | {"method": "native"}
        fix = one(GROUP | {"claim.privacy_unit": unit}, "PS009").fix
        assert (
            "averaged, and clipped together; expected_batch_size then counts users, and num_records goes unused" in fix
        )
        assert "clipped one by one" in fix
        assert "expected_batch_size counts records" in fix
        assert fix.endswith("max_records_per_unit: 1, which leaves out the other records of a user.")

    def test_what_is_left_of_the_budget(self):
        assert "noise_multiplier: null computes the least" in one({"claim.epsilon": 3.0}, "PS021").fix


class TestWaivers:
    def judged(self, **fields):
        waivers = [{"finding": "PS008", "reason": "r", "owner": "Ada", "expires": "2027-01-01"} | fields]
        spec = spec_of({"waivers": waivers, "data.deduplication": "none"})
        return [f for f in apply_waivers(spec, review(spec), TODAY).findings if f.id != "PS008"], waivers[0]

    def test_an_expired_one_names_the_key_and_a_day_that_passes(self):
        (finding,), waiver = self.judged(expires="2026-11-30")
        assert "waivers[0].expires" in finding.fix
        assert "A waiver is written: {finding: PS008, reason:" in finding.fix
        day = re.search(r"expires: (\d{4}-\d\d-\d\d)", finding.fix)[1]
        assert self.judged(**waiver | {"expires": day})[0] == []

    def test_one_without_an_owner(self):
        (finding,), _ = self.judged(owner=None)
        assert "owner: <who answers for it>" in finding.fix
        assert "waivers[0]" in finding.fix

    def test_a_finding_whose_waiver_has_ended_says_so(self):
        spec = spec_of(
            {
                "waivers": [{"finding": "PS008", "reason": "r", "owner": "Ada", "expires": "2026-11-30"}],
                "data.deduplication": "none",
            }
        )
        fixes = {finding.id: finding.fix for finding in apply_waivers(spec, review(spec), TODAY).findings}
        assert fixes["PS008"].endswith("Its waiver ended on 2026-11-30.")
        assert "ended on" not in one({"data.deduplication": "none"}, "PS008").fix

    def test_the_one_that_is_offered_for_tuning_is_copied(self):
        """With an owner, a reason and a day of one's own it excuses the finding."""
        tuning = {"kind": "private", "trials": 8}
        fix = one({"tuning": tuning}, "PS040").fix
        written = re.search(r"waivers: (\[\{.*?\}\])", fix)[1]
        assert [PrivacySpec.all_from_text(f"{BASE}tuning: {{kind: private}}\nwaivers: {written}\n")[0]] == [[]]
        mine = {"<why it is acceptable here>": "r", "<who answers for it>": "Ada", "<YYYY-MM-DD>": "2027-01-01"}
        for placeholder, value in mine.items():
            written = written.replace(placeholder, value)
        spec = PrivacySpec.from_text(f"{BASE}tuning: {{kind: private}}\nwaivers: {written}\n")
        assert apply_waivers(spec, review(spec), TODAY).findings == ()
        there = {"finding": "PS050", "reason": "r", "owner": "Ada", "expires": "2027-01-01"}
        assert "add to waivers {finding: PS040," in one({"tuning": tuning, "waivers": [there]}, "PS040").fix

    def test_trials_that_are_called_accounted_need_a_ledger(self):
        changes = {"tuning": {"kind": "private", "trials": 8, "accounted": True}}
        finding = one(changes, "PS040")
        assert "nothing supports it" in finding.message
        assert "in tuning, write accounted: false" in finding.fix
        assert "budget: {dataset_id: <name of the data set>, ledger: <file of the ledger>}" in finding.fix
        budget = {"dataset_id": "d", "ledger": "budget.jsonl"}
        assert [f.id for f in review(spec_of(changes | {"budget": budget}))] == []
        assert [f.id for f in review(spec_of(changes | {"budget": {"dataset_id": "d"}}))] == ["PS040"]

    def test_explained_where_possible(self):
        for entry in CATALOGUE.values():
            assert (f"  - finding: {entry.id}\n" in entry_text(entry)) == entry.waivable
