"""The generic bound for groups, beside the event that knows the sampling."""

from __future__ import annotations

import math

import pytest

from tfdp import accounting
from tfdp.accounting import generic_group_epsilon

SETTING = {"scheme": "poisson", "sampling_probability": 0.01, "num_units": 10_000}


def single(noise=1.0):
    return accounting.step_event(**SETTING, noise_multiplier=noise)


@pytest.mark.parametrize("k", [2, 3, 5])
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_is_a_point_of_the_curve_of_one_record_and_hardly_a_smaller_one_will_do(k, accountant):
    """k e^((k-1) e) delta(e) is within the target at what is returned, and above it two percent below."""
    found = generic_group_epsilon(
        single(), 300, delta=1e-4, group_size=k, accountant=accountant, adjacency="add_or_remove_one"
    )

    def of_group(epsilon):
        names = ("rdp",) if accountant == "rdp" else ("pld", "rdp")
        one = min(
            accounting.delta(single(), 300, epsilon=epsilon, accountant=name, adjacency="add_or_remove_one")
            for name in names
        )
        return k * math.exp((k - 1) * epsilon) * one

    assert of_group(found / k) <= 1e-4
    assert of_group(0.98 * found / k) > 1e-4


def test_the_event_of_the_group_is_tighter():
    for k in (2, 4):
        event = accounting.step_event(**SETTING, noise_multiplier=1.0, records_per_unit=k)
        tight = accounting.epsilon(event, 300, delta=1e-5, adjacency="add_or_remove_one")
        generic = generic_group_epsilon(single(), 300, delta=1e-5, group_size=k, adjacency="add_or_remove_one")
        assert tight < generic


def test_a_group_of_one_costs_what_one_costs():
    found = generic_group_epsilon(single(), 300, delta=1e-5, group_size=1, adjacency="add_or_remove_one")
    one = accounting.epsilon(single(), 300, delta=1e-5, adjacency="add_or_remove_one")
    assert one <= found <= 1.01 * one


def test_nothing_follows_without_noise():
    none = generic_group_epsilon(single(0.0), 300, delta=1e-5, group_size=2, adjacency="add_or_remove_one")
    assert none == math.inf
