"""Events of one step, and their JSON."""

from __future__ import annotations

import json
import math

import pytest
from dp_accounting import dp_event
from scipy import stats

from tfdp import accounting
from tfdp.errors import AccountingError

pytestmark = pytest.mark.quick

RUN = {"scheme": "poisson", "sampling_probability": 0.25, "noise_multiplier": 1.5, "num_units": 400}


def event(**changes):
    return accounting.step_event(**{**RUN, **changes})


def test_poisson():
    assert event() == dp_event.PoissonSampledDpEvent(0.25, dp_event.GaussianDpEvent(1.5))


def test_sampling_everything_is_the_gaussian_mechanism():
    for scheme in ("poisson", "full_batch"):
        assert event(scheme=scheme, sampling_probability=1.0) == dp_event.GaussianDpEvent(1.5)


def test_truncated_poisson():
    expected = dp_event.TruncatedSubsampledGaussianDpEvent(
        dataset_size=400, sampling_probability=0.25, truncated_batch_size=120, noise_multiplier=1.5
    )
    assert event(scheme="truncated_poisson", truncated_batch_size=120) == expected


def test_group_of_records_is_a_mixture_over_how_many_are_sampled():
    mixture = event(records_per_unit=3)
    assert mixture.standard_deviation == 1.5
    assert mixture.sensitivities == (0.0, 1.0, 2.0, 3.0)
    assert mixture.sampling_probs == pytest.approx([0.75**3, 3 * 0.25 * 0.75**2, 3 * 0.25**2 * 0.75, 0.25**3])
    assert math.fsum(mixture.sampling_probs) == pytest.approx(1.0, abs=1e-12)


def test_whole_group_in_a_full_batch_moves_the_sum_k_times_as_far():
    whole = event(scheme="full_batch", sampling_probability=1.0, records_per_unit=3)
    assert whole == dp_event.GaussianDpEvent(0.5)
    by_mixture = dp_event.MixtureOfGaussiansDpEvent(1.5, (3.0,), (1.0,))
    options = {"delta": 1e-5, "adjacency": "add_or_remove_one", "grid": 1e-2}
    assert accounting.epsilon(whole, 4, **options) == pytest.approx(
        accounting.epsilon(by_mixture, 4, **options), rel=1e-3
    )


def test_group_costs_more_than_its_record_and_the_mixture_sums_to_one_for_large_groups():
    large = event(records_per_unit=40, sampling_probability=0.01)
    assert sum(large.sampling_probs) == pytest.approx(1.0, abs=1e-12)
    assert large.sampling_probs[1] == pytest.approx(stats.binom.pmf(1, 40, 0.01))
    options = {"delta": 1e-5, "adjacency": "add_or_remove_one", "grid": 1e-2}
    assert accounting.epsilon(large, 10, **options) > 3 * accounting.epsilon(
        event(sampling_probability=0.01), 10, **options
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scheme": "shuffle"}, "scheme='shuffle'.*sample with poisson"),
        ({"scheme": "cyclic"}, "scheme='cyclic'"),
        ({"sampling_probability": 0.0}, r"sampling_probability=0\.0"),
        ({"sampling_probability": 1.01}, r"sampling_probability=1\.01"),
        ({"sampling_probability": math.nan}, "sampling_probability=nan"),
        ({"scheme": "full_batch"}, r"sampling_probability=1 with scheme full_batch.*Received.*0\.25"),
        ({"noise_multiplier": -1.0}, r"noise_multiplier=-1\.0"),
        ({"noise_multiplier": math.inf}, "noise_multiplier=inf"),
        ({"num_units": 0}, "num_units=0"),
        ({"num_units": 2.5}, r"num_units=2\.5"),
        ({"records_per_unit": 0}, "records_per_unit=0"),
        ({"records_per_unit": True}, "records_per_unit=True"),
        ({"truncated_batch_size": 100}, "no truncated_batch_size with scheme poisson"),
        ({"scheme": "truncated_poisson"}, "truncated_batch_size=None"),
        ({"scheme": "truncated_poisson", "truncated_batch_size": 0}, "truncated_batch_size=0"),
        ({"scheme": "truncated_poisson", "truncated_batch_size": 9, "records_per_unit": 2}, "records_per_unit=2"),
    ],
)
def test_what_is_no_mechanism_is_refused(changes, message):
    with pytest.raises(AccountingError, match=message):
        event(**changes)


@pytest.mark.parametrize(
    "original",
    [
        event(),
        event(sampling_probability=1.0),
        event(records_per_unit=3),
        event(scheme="truncated_poisson", truncated_batch_size=120),
        dp_event.SelfComposedDpEvent(event(), 7),
        dp_event.ComposedDpEvent((event(), dp_event.NoOpDpEvent(), dp_event.NonPrivateDpEvent())),
    ],
    ids=lambda value: type(value).__name__,
)
def test_json_and_back(original):
    restored = accounting.event_from_dict(json.loads(json.dumps(accounting.event_to_dict(original), allow_nan=False)))
    assert restored == original
    assert hash(restored) == hash(original)


def test_json_can_be_read_by_people():
    assert accounting.event_to_dict(event()) == {
        "type": "PoissonSampledDpEvent",
        "sampling_probability": 0.25,
        "event": {"type": "GaussianDpEvent", "noise_multiplier": 1.5},
    }


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"type": "os.system"},
        {"type": ["GaussianDpEvent"]},
        {"type": "GaussianDpEvent"},
        {"type": "GaussianDpEvent", "noise_multiplier": 1.0, "clip": 1.0},
        {"type": "PoissonSampledDpEvent", "sampling_probability": 0.1, "event": {"type": "LaplaceDpEvent"}},
        ["GaussianDpEvent"],
    ],
)
def test_unknown_json_is_refused(data):
    with pytest.raises(AccountingError, match="Received"):
        accounting.event_from_dict(data)


def test_only_known_events_are_written():
    with pytest.raises(AccountingError, match="Received: LaplaceDpEvent"):
        accounting.event_to_dict(dp_event.LaplaceDpEvent(1.0))
