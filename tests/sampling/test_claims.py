"""A claim on whole units is kept by what the sampler hands out, or refused; statistical tests state their rate."""

from __future__ import annotations

import collections
import dataclasses

import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

from tfdp.errors import DataError
from tfdp.sampling import poisson_batches
from tfdp.sampling.batches import take_issued_draw
from tfdp.sampling.units import UnitMap
from tfdp.spec.fields import PrivacyUnit

FALSE_ALARM = 1e-6
IDS = ["a", "b", "a", "c", "a", "b", "a"]
SCORES = [1.0, 1, 2, 1, 3, 1, 4]


def unit(method="user_wise_dp_sgd", k=3, selection="longest", kind="user", tokens=None):
    return PrivacyUnit(
        kind=kind, description="one writer", id_field="writer", max_records_per_unit=k, method=method,
        selection=selection, max_tokens_per_unit=tokens,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class FakePlan:
    privacy_unit: PrivacyUnit
    num_units: int = 3
    num_records: int | None = None
    sampling_probability: float = 1.0
    expected_batch_size: float = 3.0
    scheme: str = "poisson"
    truncated_batch_size: int | None = None
    microbatch_size: int | None = 4
    digest: str = "0123456789abcdef" * 4
    seed: int | None = None

    @property
    def records_per_unit(self):
        return self.privacy_unit.max_records_per_unit if self.privacy_unit.method == "user_wise_dp_sgd" else 1

    @property
    def group_size(self):
        return self.privacy_unit.max_records_per_unit if self.privacy_unit.method == "group_privacy" else 1


def records(count=7):
    return ({"v": np.arange(count)}, np.arange(count))


def one(plan, data=None, **options):
    options = {"unit_ids": IDS, "scores": SCORES, **options}
    return next(iter(poisson_batches(records() if data is None else data, plan, **options).as_numpy_iterator()))


class TestWhatIsSampled:
    def test_user_wise_the_slots_of_a_unit(self):
        batch = one(FakePlan(unit()))
        assert batch["y"].shape == batch["record_weight"].shape == (1, 4, 3)
        assert batch["y"][0].tolist() == [[2, 4, 6], [1, 5, 0], [3, 0, 0], [0, 0, 0]]
        assert batch["record_weight"][0].sum(1).tolist() == [3, 2, 1, 0]
        assert batch["unit_weight"].tolist() == [[1, 1, 1, 0]]
        assert take_issued_draw(int(batch["tfdp"]["draw"][0])).partition == UnitMap.from_ids(IDS).digest

    def test_group_privacy_single_records_of_those_that_stay(self):
        batch = one(FakePlan(unit("group_privacy", k=2), num_records=5))
        assert "record_weight" not in batch
        kept = batch["y"][batch["unit_weight"] == 1].tolist()
        assert sorted(kept) == [1, 3, 4, 5, 6]  # the two longest of a, both of b, the one of c

    @pytest.mark.parametrize("method", ["native", "group_privacy", "user_wise_dp_sgd"])
    def test_one_record_per_unit(self, method):
        batch = one(FakePlan(unit(method, k=1)))
        assert "record_weight" not in batch
        assert batch["y"].tolist() == [[6, 1, 3, 0]]

    def test_dataset_and_chunks(self):
        data = tf.data.Dataset.from_tensor_slices(records())
        assert one(FakePlan(unit()), data)["y"][0, 0].tolist() == [2, 4, 6]
        tokens = [[10 * index + 1, 10 * index + 2] for index in range(7)]
        plan = FakePlan(unit(selection="random_chunk", k=2))
        batch = one(plan, tokens, sequence_length=4, separator=7, pad_value=8)
        assert batch["x"]["token_ids"].shape == (1, 4, 2, 4)
        assert batch["x"]["token_ids"][0, 2].tolist() == [[31, 32, 8, 8], [8, 8, 8, 8]]
        assert batch["x"]["token_ids"][0, 1].tolist() == [[11, 12, 7, 51], [52, 8, 8, 8]]
        single = one(FakePlan(unit(selection="random_chunk", k=1)), tokens, sequence_length=4)
        assert single["x"]["token_ids"].shape == (1, 4, 4)

    def test_lengths_are_measured(self):
        tokens = [[1] * (2 + index) for index in range(7)]
        batch = one(FakePlan(unit(k=1)), tokens, sequence_length=9, scores=None)
        assert batch["sample_weight"].sum(-1).tolist() == [[7, 6, 4, 0]]  # the last records of a, b and c

    def test_a_unit_gives_what_it_has_within_its_tokens(self):
        """k up to 3, 12 tokens: a gives 6 + 6 (of 8 and 6, cut at 6), b the 7 cut to 6 and its 3, c its 5."""
        tokens = [[index + 1] * size for index, size in enumerate([2, 3, 4, 5, 6, 7, 8])]
        batch = one(FakePlan(unit(tokens=12)), tokens, sequence_length=5, scores=None)
        assert batch["record_weight"][0].tolist() == [[1, 1, 0], [1, 1, 0], [1, 0, 0], [0, 0, 0]]
        assert batch["x"]["token_ids"][0, :, :, 0].tolist() == [[5, 7, 0], [2, 6, 0], [4, 0, 0], [0, 0, 0]]
        few = one(FakePlan(unit(tokens=1)), tokens, sequence_length=5, scores=None)
        assert few["record_weight"][0].tolist() == [[1, 0, 0], [1, 0, 0], [1, 0, 0], [0, 0, 0]]

    @pytest.mark.parametrize("selection", ["longest", "random"])
    def test_a_unit_gives_a_binomial_number_of_records(self, selection):
        """Group privacy, k = 3, q = 0.3: the sensitivities of the event, Binomial(3, 0.3). Chi-square."""
        plan = FakePlan(
            unit("group_privacy", 3, selection), num_records=6, sampling_probability=0.3, expected_batch_size=1.8
        )
        dataset = poisson_batches(records(), plan, unit_ids=IDS, scores=SCORES if selection == "longest" else None)
        counts = collections.Counter()
        seen = set()
        for batch in dataset.take(3000).as_numpy_iterator():
            of_a = [y for y in batch["y"][batch["unit_weight"] == 1].tolist() if IDS[y] == "a"]
            assert len(of_a) == len(set(of_a))
            seen |= set(of_a)
            counts[len(of_a)] += 1
        assert len(seen) == 3  # of the four records of a, always the same three
        expected = stats.binom.pmf(range(4), 3, 0.3) * 3000
        assert stats.chisquare([counts[n] for n in range(4)], expected).pvalue > FALSE_ALARM

    def test_units_join_independently_whatever_they_hold(self):
        plan = FakePlan(unit(selection="random"), sampling_probability=0.4, expected_batch_size=1.2)
        dataset = poisson_batches(records(), plan, unit_ids=IDS)
        table = collections.Counter()
        for batch in dataset.take(4000).as_numpy_iterator():
            drawn = batch["y"][batch["unit_weight"] == 1]
            weight = batch["record_weight"][batch["unit_weight"] == 1]
            table[frozenset(IDS[int(row[0])] for row in drawn)] += 1
            assert all(w.sum() == min(3, IDS.count(IDS[int(row[0])])) for row, w in zip(drawn, weight, strict=True))
        subsets = [frozenset(s) for s in ("", "a", "b", "c", "ab", "ac", "bc", "abc")]
        expected = [4000 * 0.4 ** len(s) * 0.6 ** (3 - len(s)) for s in subsets]
        assert stats.chisquare([table[s] for s in subsets], expected).pvalue > FALSE_ALARM


class TestCheats:
    """Each way to train under a claim on users without keeping it."""

    @pytest.mark.parametrize("method", ["native", "group_privacy", "user_wise_dp_sgd"])
    def test_no_ids(self, method):
        k = 1 if method == "native" else 3
        with pytest.raises(DataError, match=r"id of its user for every record.*Received: none"):
            poisson_batches(records(3), FakePlan(unit(method, k), num_records=3))

    def test_every_record_its_own_unit(self):
        with pytest.raises(DataError, match=r"Expected 3 units.*Received: records of 7"):
            one(FakePlan(unit()), unit_ids=[f"{owner}{number}" for number, owner in enumerate(IDS)])

    def test_records_that_were_grouped_before(self):
        grouped = np.ones((3, 5, 4), int)  # five sequences in a row, under k = 3
        for data in (grouped, list(grouped), ({"token_ids": grouped}, grouped)):
            with pytest.raises(DataError, match="look like records grouped by unit"):
                one(FakePlan(unit()), data, unit_ids=["a", "b", "c"], scores=[1, 1, 1])
        plan = FakePlan(unit(selection="random_chunk"))
        with pytest.raises(DataError, match="sequence of integer tokens"):
            one(plan, list(grouped), unit_ids=["a", "b", "c"], sequence_length=4)

    def test_more_than_k_records_and_no_word_on_which_stay(self):
        with pytest.raises(DataError, match=r"at most 3 records.*1 of 3 units with more, at most 4"):
            one(FakePlan(unit(selection=None)))

    @pytest.mark.parametrize("kind", ["example", "sequence"])
    def test_ids_under_a_plan_for_single_records(self, kind):
        plan = FakePlan(PrivacyUnit(kind=kind, description="one mail"), num_units=7)
        with pytest.raises(DataError, match=f"no unit_ids under a plan whose privacy unit is one {kind}"):
            one(plan)

    def test_ids_of_other_records(self):
        for count in (6, 8):
            with pytest.raises(DataError, match=f"{count} records and 7 ids"):
                one(FakePlan(unit()), records(count))
        with pytest.raises(DataError, match="1 of 7 records without one"):
            one(FakePlan(unit()), unit_ids=[*IDS[:6], None])

    @pytest.mark.parametrize(("stated", "accepted"), [(4, False), (5, True), (5.5, True), (6, False)])
    def test_the_probability_was_computed_from_about_as_many_records(self, stated, accepted):
        """Five records stay: q comes from the stated number, which may be round but not another data set's."""
        plan = FakePlan(unit("group_privacy", k=2), num_records=stated)
        if accepted:
            assert one(plan)["unit_weight"].sum() == 5
        else:
            with pytest.raises(DataError, match=r"Received: 5, with at most 2 of a unit.*write num_records: 5"):
                one(plan)

    def test_chunks_need_units_that_are_sampled_whole(self):
        with pytest.raises(DataError, match="method user_wise_dp_sgd and a sequence_length"):
            one(FakePlan(unit("group_privacy", 3, "random_chunk"), num_records=6), sequence_length=4)
        with pytest.raises(DataError, match="sequence_length=None"):
            one(FakePlan(unit(selection="random_chunk")), [[1, 2]] * 7)
