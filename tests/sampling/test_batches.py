"""The data pipeline: what an element holds, and that it is one draw, never replayed.

Statistical tests state their false-alarm rate; all others hold for every draw.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

from tfdp.errors import DataError, MisuseError, PlanError
from tfdp.sampling import plan_token, poisson_batches
from tfdp.sampling.batches import take_issued_draw
from tfdp.spec.fields import PrivacyUnit

FALSE_ALARM = 1e-6


EXAMPLE = PrivacyUnit(kind="example", description="one record")


@dataclasses.dataclass(frozen=True)
class FakePlan:
    num_units: int
    sampling_probability: float
    scheme: str = "poisson"
    truncated_batch_size: int | None = None
    microbatch_size: int | None = 4
    records_per_unit: int = 1
    group_size: int = 1
    num_records: int | None = None
    privacy_unit: PrivacyUnit = EXAMPLE
    digest: str = "0123456789abcdef" * 4
    seed: int | None = None

    @property
    def expected_batch_size(self) -> float:
        return (self.num_records or self.num_units) * self.sampling_probability


def numbered(count: int):
    """Records whose content is their number plus one, so that padding is visible."""
    return ({"id": np.arange(1, count + 1), "wide": np.ones((count, 2, 3), np.float32)}, np.arange(1, count + 1) * 10)


def units_of(batch) -> list[int]:
    """The sampled records of a batch, by unit weight."""
    return (batch["x"]["id"][batch["unit_weight"] == 1] - 1).tolist()


def batches_of(dataset, count: int):
    return list(dataset.take(count).as_numpy_iterator())


class TestElement:
    def test_specification_is_static_but_for_the_number_of_microbatches(self):
        dataset = poisson_batches(numbered(50), FakePlan(50, 0.2))
        assert dataset.element_spec == {
            "tfdp": {"draw": tf.TensorSpec([1], tf.int64), "plan": tf.TensorSpec([1], tf.int64)},
            "x": {"id": tf.TensorSpec([None, 4], tf.int64), "wide": tf.TensorSpec([None, 4, 2, 3], tf.float32)},
            "y": tf.TensorSpec([None, 4], tf.int64),
            "unit_weight": tf.TensorSpec([None, 4], tf.float32),
        }
        assert dataset.cardinality() == tf.data.INFINITE_CARDINALITY

    def test_one_draw_is_cut_into_full_microbatches(self):
        """Only the last microbatch may be short; padding is at the end, is zero and has weight zero."""
        sizes = set()
        for batch in batches_of(poisson_batches(numbered(60), FakePlan(60, 0.15)), 200):
            weight = batch["unit_weight"].reshape(-1)
            count = int(weight.sum())
            sizes.add(count)
            assert batch["unit_weight"].shape == (-(-count // 4), 4)
            assert batch["unit_weight"].dtype == np.float32
            assert weight.tolist() == [1.0] * count + [0.0] * (len(weight) - count)
            flat = batch["x"]["id"].reshape(-1)
            assert (np.diff(flat[:count]) > 0).all()  # no unit twice in one logical batch
            assert (flat[count:] == 0).all()
            assert batch["y"].reshape(-1).tolist() == (flat * 10).tolist()
            assert batch["x"]["wide"].reshape(len(flat), -1).sum(1).tolist() == (weight * 6).tolist()
        assert len(sizes) > 5

    def test_the_whole_logical_batch_is_one_binomial_draw(self):
        """Sizes over 3000 batches against Binomial(60, 0.15), chi-square, false alarms 1e-6 on both sides together."""
        count = 3000
        sizes = np.array(
            [b["unit_weight"].sum() for b in batches_of(poisson_batches(numbered(60), FakePlan(60, 0.15)), count)]
        )
        law = stats.binom(60, 0.15)
        expected = count * np.array([law.cdf(4), *law.pmf(np.arange(5, 15)), law.sf(14)])
        observed = np.array([(sizes <= 4).sum(), *((sizes == k).sum() for k in range(5, 15)), (sizes >= 15).sum()])
        statistic = ((observed - expected) ** 2 / expected).sum()
        assert FALSE_ALARM / 2 < stats.chi2.sf(statistic, 11) < 1 - FALSE_ALARM / 2

    def test_units_are_equally_likely_and_successive_batches_independent(self):
        """Chi-square of inclusion counts and z of repeats in the next batch, false alarms 1e-6 each."""
        count, units, q = 2000, 60, 0.15
        joined = np.zeros((count, units))
        for row, batch in zip(
            joined, batches_of(poisson_batches(numbered(units), FakePlan(units, q)), count), strict=True
        ):
            row[units_of(batch)] = 1
        statistic = ((joined.sum(0) - count * q) ** 2 / (count * q * (1 - q))).sum()
        assert FALSE_ALARM / 2 < stats.chi2.sf(statistic, units) < 1 - FALSE_ALARM / 2
        trials = (count - 1) * units
        repeats = (joined[1:] * joined[:-1]).sum()
        z = (repeats - trials * q**2) / np.sqrt(trials * q**2 * (1 - q**2) * 1.3)  # 1.3 >= the factor for overlap
        assert abs(z) < stats.norm.isf(FALSE_ALARM / 2)

    def test_an_empty_draw_is_an_empty_batch(self):
        batches = batches_of(poisson_batches(numbered(3), FakePlan(3, 1e-9)), 3)
        for batch in batches:
            assert batch["unit_weight"].shape == (0, 4)
            assert batch["x"]["wide"].shape == (0, 4, 2, 3)
        assert len({int(batch["tfdp"]["draw"][0]) for batch in batches}) == 3

    def test_full_batch(self):
        plan = FakePlan(6, 1.0, "full_batch")
        for batch in batches_of(poisson_batches(numbered(6), plan), 3):
            assert units_of(batch) == list(range(6))
            assert batch["unit_weight"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]

    def test_truncated(self):
        plan = FakePlan(40, 0.5, "truncated_poisson", truncated_batch_size=10)
        sizes = [len(units_of(b)) for b in batches_of(poisson_batches(numbered(40), plan), 100)]
        assert max(sizes) == 10

    def test_plan_token_and_draw_number(self):
        plan = FakePlan(10, 0.5)
        batch = batches_of(poisson_batches(numbered(10), plan), 1)[0]
        assert batch["tfdp"]["plan"][0] == plan_token(plan) == 0x0123456789ABCDE
        assert batch["tfdp"]["draw"].dtype == np.int64
        assert plan_token(FakePlan(1, 0.5, digest="f" * 64)) < 2**63

    def test_sample_weight_and_bare_tokens(self):
        weighted = (np.ones((4, 2)), np.zeros(4), np.full((4, 2), 0.5))
        assert poisson_batches(weighted, FakePlan(4, 0.5)).element_spec["sample_weight"].shape.as_list() == [None, 4, 2]
        ragged = [np.arange(1, n + 1) for n in (2, 5, 9)]
        plan = FakePlan(3, 1.0, "full_batch")
        batch = batches_of(poisson_batches(ragged, plan, sequence_length=4, pad_value=7), 1)[0]
        assert batch["x"]["token_ids"].tolist() == [[[1, 2, 7, 7], [1, 2, 3, 4], [1, 2, 3, 4], [7, 7, 7, 7]]]
        assert batch["sample_weight"].tolist() == [[[1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]]]

    @pytest.mark.parametrize(
        ("plan", "argument", "expected"),
        [
            (FakePlan(1000, 0.1), None, 4),
            (FakePlan(1000, 0.1), 7, 7),
            (FakePlan(1000, 0.1, microbatch_size=None), None, 16),
            (FakePlan(1000, 0.0051, microbatch_size=None), None, 6),
            (FakePlan(1000, 0.1, "truncated_poisson", 5, microbatch_size=None), None, 5),
            (FakePlan(1000, 1e-6, microbatch_size=None), None, 1),
        ],
    )
    def test_microbatch_size(self, plan, argument, expected):
        dataset = poisson_batches((np.zeros((1000, 1)),), plan, microbatch_size=argument)
        assert dataset.element_spec["unit_weight"].shape.as_list() == [None, expected]


class TestNoReplay:
    def test_every_iterator_draws_anew(self):
        dataset = poisson_batches(numbered(1000), FakePlan(1000, 0.1))
        seen, numbers = set(), []
        for _ in range(4):
            for batch in dataset.take(5).as_numpy_iterator():
                seen.add(tuple(units_of(batch)))
                numbers.append(int(batch["tfdp"]["draw"][0]))
        other = poisson_batches(numbered(1000), FakePlan(1000, 0.1))
        numbers += [int(b["tfdp"]["draw"][0]) for b in batches_of(other, 3)]
        assert len(seen) == 20  # two equal draws: probability below 1e-100
        assert len(set(numbers)) == len(numbers)
        assert numbers == sorted(numbers)

    def test_numbers_of_another_process_are_others(self):
        """Two starts among 2^62 within 10^6 of each other: false alarms 1e-12; a start in the lowest 2^40: 2e-7."""
        code = "from tfdp.sampling import batches; print(next(batches._draw_numbers))"
        command = [sys.executable, "-c", code]
        other = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        mine = int(batches_of(poisson_batches(numbered(10), FakePlan(10, 0.5)), 1)[0]["tfdp"]["draw"][0])
        assert abs(mine - other) > 10**6
        assert 2**40 < other < 2**62

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
    def test_a_forked_process_has_neither_the_draws_nor_the_numbers(self):
        code = (
            "import os; from tfdp.sampling import batches as b\n"
            "b._issued[1] = b.IssuedDraw(1, 1, 1, 1); ahead = next(b._draw_numbers)\n"
            "if (child := os.fork()) == 0:\n"
            "    os._exit(not (b.take_issued_draw(1) is None and abs(next(b._draw_numbers) - ahead) > 10**6))\n"
            "assert os.waitpid(child, 0)[1] == 0 and b.take_issued_draw(1) and next(b._draw_numbers) == ahead + 1"
        )
        subprocess.run([sys.executable, "-c", code], check=True)

    def test_a_draw_can_be_taken_once_and_says_what_was_drawn(self):
        plan = FakePlan(60, 0.15)
        for batch in batches_of(poisson_batches(numbered(60), plan), 20):
            number, units = int(batch["tfdp"]["draw"][0]), len(units_of(batch))
            assert take_issued_draw(number) == (units, -(-units // 4), 4, plan_token(plan), b"")
            assert take_issued_draw(number) is None

    def test_iterators_that_are_read_in_turns(self):
        dataset = poisson_batches(numbered(1000), FakePlan(1000, 0.1))
        first, second = iter(dataset), iter(dataset)
        pairs = [(next(first), next(second)) for _ in range(5)]
        numbers = [int(b["tfdp"]["draw"][0]) for pair in pairs for b in pair]
        assert len(set(numbers)) == 10

    def test_a_seed_repeats_in_another_process_but_never_in_this_one(self):
        plan = FakePlan(1000, 0.05, seed=21)
        dataset = poisson_batches(numbered(1000), plan)
        draws = [units_of(b) for _ in range(2) for b in batches_of(dataset, 3)]
        draws += [units_of(b) for b in batches_of(poisson_batches(numbered(1000), plan), 3)]
        assert len({tuple(draw) for draw in draws}) == 9
        # The same steps in a fresh process: the sampler alone, since it is what the seed keys.
        code = (
            "import json; from tfdp.sampling.poisson import PoissonSampler as P\n"
            "s = P(1000, 0.05, seed=21); print(json.dumps([s.draw().tolist() for _ in range(9)]))"
        )
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        assert json.loads(out) == draws


class Reader(tf.keras.Model):
    """Records what fit hands to a train step; trains nothing."""

    def __init__(self):
        super().__init__()
        self.seen = []
        self.traces = 0

    def call(self, x):
        return x

    def train_step(self, data):
        self.traces += 1
        assert set(data) == {"tfdp", "x", "y", "unit_weight"}

        def note(draw, ids, weight):
            self.seen.append((int(draw), tuple(ids[weight == 1].tolist())))
            return np.float32(weight.sum())

        inputs = [data["tfdp"]["draw"][0], data["x"]["id"], data["unit_weight"]]
        return {"units": tf.numpy_function(note, inputs, tf.float32)}


class TestUnderFit:
    def test_fit_reads_every_draw_once_over_epochs_and_fits(self):
        model = Reader()
        model.compile(run_eagerly=False, jit_compile=False)
        dataset = poisson_batches(numbered(300), FakePlan(300, 0.1))
        for _ in range(2):
            model.fit(dataset, epochs=3, steps_per_epoch=4, shuffle=False, verbose=0)
        assert len(model.seen) == 24
        numbers = [number for number, _ in model.seen]
        assert numbers == sorted(set(numbers))
        assert len({units for _, units in model.seen}) == 24
        assert len({len(units) for _, units in model.seen}) > 1
        assert model.traces == 1  # neither the number of microbatches nor a second fit traces again

    def test_fit_says_why_a_record_cannot_be_read(self):
        class Source:
            def __len__(self):
                return 5

            def __getitem__(self, index):
                return ({"id": np.arange(2 if index == 3 else 1)}, index)

        model = Reader()
        model.compile(jit_compile=False)
        with pytest.raises(tf.errors.InvalidArgumentError, match="DataError: Expected x/id of record 3 to have"):
            model.fit(
                poisson_batches(Source(), FakePlan(5, 1.0, "full_batch")),
                epochs=1,
                steps_per_epoch=1,
                shuffle=False,
                verbose=0,
            )

    def test_class_weight_is_refused(self):
        model = Reader()
        model.compile(jit_compile=False)
        with pytest.raises(MisuseError, match="class_weight"):
            model.fit(
                poisson_batches(numbered(5), FakePlan(5, 0.5)),
                class_weight={0: 1.0},
                steps_per_epoch=1,
                shuffle=False,
                verbose=0,
            )

    def test_kerashub_fit_needs_its_preprocessor_detached(self):
        from keras_hub.src.models.task import Task

        class HubReader(Reader, Task):
            def __init__(self):
                Reader.__init__(self)
                self.preprocessor = lambda x: x

        model = HubReader()
        model.compile(jit_compile=False)
        dataset = poisson_batches(numbered(50), FakePlan(50, 0.3))
        with pytest.raises(MisuseError, match=r"model\.preprocessor = None"):
            model.fit(dataset, steps_per_epoch=2, shuffle=False, verbose=0)
        model.preprocessor = None
        model.fit(dataset, epochs=2, steps_per_epoch=2, shuffle=False, verbose=0)
        assert len(model.seen) == 4

        class Overridden(HubReader):
            def preprocess_samples(self, x, y=None, sample_weight=None):
                return x

        model = Overridden()
        model.preprocessor = None
        model.compile(jit_compile=False)
        with pytest.raises(MisuseError):
            model.fit(dataset, steps_per_epoch=2, shuffle=False, verbose=0)


class TestGuard:
    @pytest.mark.parametrize(
        "call",
        [
            lambda d: d.map(lambda e: e),
            lambda d: d.batch(2),
            lambda d: d.shuffle(10),
            lambda d: d.repeat(2),
            lambda d: d.cache(),
            lambda d: d.filter(lambda e: True),
            lambda d: d.skip(1),
            lambda d: d.shard(2, 0),
            lambda d: d.snapshot("x"),
            lambda d: d.flat_map(tf.data.Dataset.from_tensors),
            lambda d: d.interleave(tf.data.Dataset.from_tensors),
            lambda d: d.apply(lambda x: x),
            lambda d: d.concatenate(d),
            lambda d: d.unbatch(),
            lambda d: d.window(2),
            lambda d: d.save("x"),
            lambda d: d.take(3).cache(),
            lambda d: d.prefetch(1).map(lambda e: e),
            lambda d: d.with_options(tf.data.Options()).take(2).repeat(),
        ],
    )
    def test_transformations_are_refused(self, call):
        dataset = poisson_batches(numbered(10), FakePlan(10, 0.5))
        with pytest.raises(MisuseError, match=r"Expected .* Received: a call of \."):
            call(dataset)

    def test_every_public_method_is_kept_on_purpose_or_refused(self):
        dataset = poisson_batches(numbered(10), FakePlan(10, 0.5))
        kept = {"as_numpy_iterator", "cardinality", "options", "prefetch", "take", "with_options"}
        static = {n for n in dir(tf.data.Dataset) if isinstance(tf.data.Dataset.__dict__.get(n), staticmethod)}
        for name in sorted(set(dir(type(dataset))) - kept - static - {"element_spec"}):
            if not name.startswith("_"):
                with pytest.raises(MisuseError):
                    getattr(dataset, name)()

    def test_other_datasets_are_left_alone(self):
        poisson_batches(numbered(10), FakePlan(10, 0.5))
        assert list(tf.data.Dataset.range(3).map(lambda i: i + 1).as_numpy_iterator()) == [1, 2, 3]


class TestDatasetsOfRecords:
    def test_elements_are_the_records(self):
        x, y = numbered(7)
        records = tf.data.Dataset.from_tensor_slices((x, y))
        batch = batches_of(poisson_batches(records, FakePlan(7, 1.0, "full_batch")), 1)[0]
        assert units_of(batch) == list(range(7))
        unknown = records.filter(lambda x, y: True)
        assert units_of(batches_of(poisson_batches(unknown, FakePlan(7, 1.0, "full_batch")), 1)[0]) == list(range(7))

    def test_token_records(self):
        records = tf.data.Dataset.from_generator(
            lambda: iter([[1, 2, 3], [4, 5]]), output_signature=tf.TensorSpec([None], tf.int32)
        )
        batch = batches_of(poisson_batches(records, FakePlan(2, 1.0, "full_batch"), sequence_length=2), 1)[0]
        assert batch["y"].tolist() == [[[2, 3], [5, 0], [0, 0], [0, 0]]]

    def test_tensors_and_ragged_tensors(self):
        plan = FakePlan(2, 1.0, "full_batch")
        for records in (tf.constant([[1, 2, 3], [4, 5, 6]]), tf.ragged.constant([[1, 2, 3], [4, 5, 6]])):
            assert batches_of(poisson_batches(records, plan), 1)[0]["y"][0, :2].tolist() == [[2, 3], [5, 6]]

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda d: d.repeat(), "infinite"),
            (lambda d: d.batch(2), "a dataset of 4 elements"),
            (lambda d: d.take(3), "a dataset of 3 elements"),
            (lambda d: d.filter(lambda i: i < 5), "Received: 5 elements"),
            (lambda d: d.repeat(2).filter(lambda i: True), "more than 7 elements"),
            (lambda d: d.map(lambda i: tf.strings.as_string(i)), "Turn text into token numbers"),
        ],
    )
    def test_refused(self, make, message):
        with pytest.raises(DataError, match=message):
            poisson_batches(make(tf.data.Dataset.range(7)), FakePlan(7, 0.5))

    def test_batches_are_not_records(self):
        batches = poisson_batches(numbered(10), FakePlan(10, 0.5))
        with pytest.raises(DataError, match="before poisson_batches"):
            poisson_batches(batches, FakePlan(10, 0.5))


@pytest.mark.parametrize(
    ("plan", "error"),
    [
        (FakePlan(9, 0.5), DataError),
        (FakePlan(11, 0.5), DataError),
        (FakePlan(10, 0.5, "shuffle"), PlanError),
        (FakePlan(10, 0.5, "full_batch"), PlanError),
        (FakePlan(10, 0.5, "poisson", truncated_batch_size=4), PlanError),
        (FakePlan(10, 0.5, "truncated_poisson"), PlanError),
        (FakePlan(10, 0.5, microbatch_size=0), DataError),
    ],
)
def test_records_and_plan_must_agree(plan, error):
    with pytest.raises(error, match=r"Expected .* Received: "):
        poisson_batches(numbered(10), plan)


def test_a_size_that_is_to_be_timed_is_asked_for():
    plan = FakePlan(10, 0.5, microbatch_size="auto")
    with pytest.raises(
        DataError, match=r"times = tfdp\.time_microbatches\(model, records, plan\), and poisson_batches\("
    ):
        poisson_batches(numbered(10), plan)
    assert poisson_batches(numbered(10), plan, microbatch_size=3).element_spec["unit_weight"].shape[1] == 3


def test_importing_the_room_does_not_import_tensorflow():
    code = "import sys, tfdp.sampling, tfdp.noise; print('tensorflow' in sys.modules or 'keras' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "False"
