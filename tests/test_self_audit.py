"""The quick form of the self-audit: the intact pipeline stays below its claim, and every breakage exceeds it."""

from __future__ import annotations

import importlib.util
import math
import pathlib
import sys

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import pld_privacy_accountant

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@pytest.fixture(scope="module")
def self_audit():
    path = pathlib.Path(__file__).parent / "self_audit.py"
    specification = importlib.util.spec_from_file_location("self_audit", path)
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module  # dataclasses look their module up
    specification.loader.exec_module(module)
    yield module
    del sys.modules[specification.name]


def test_six_breakages_exceed_the_claim_and_nothing_else_does(self_audit):
    """Seeded, so it gives the same answers every time; `python tests/self_audit.py` draws anew, ten times as often."""
    results = self_audit.audit(quick=True)
    assert len({each.row.name for each in results}) == 6
    assert self_audit.problems(results) == [], self_audit.table(results)
    # An audit that sees nothing would find nothing wrong either: of one Gaussian step it sees most of the claim.
    assert max(each.intact for each in results) > 0.5


@pytest.mark.parametrize("gaussian", [False, True])
def test_the_bound_holds_as_often_as_it_says(self_audit, gaussian):
    """For rates of a mechanism whose epsilon is known; seeded, and without a seed false alarms would be below 1e-5."""
    delta, confidence, runs, audits = 1e-2, 0.9, 400, 200 if gaussian else 2000
    shift = 1.0
    rates = (0.5, 0.15865525393145707)  # of a Gaussian with that shift, above it
    truth = self_audit.gaussian_epsilon(shift, delta) if gaussian else math.log((rates[0] - delta) / rates[1])
    generator = np.random.default_rng(0)
    counts = generator.binomial(runs, rates, (audits, 2))
    bounds = [
        self_audit.lower_bound(int(a), runs, int(b), runs, delta=delta, confidence=confidence, gaussian=gaussian)
        for a, b in counts
    ]
    # At most a tenth of the bounds may be wrong, and five standard deviations.
    assert sum(bound > truth for bound in bounds) < 0.1 * audits + 5 * math.sqrt(audits * 0.1 * 0.9)
    assert np.median(bounds) > 0.7 * truth


def test_the_bound_uses_yes_and_no_alike(self_audit):
    options = {"delta": 0.0, "confidence": 0.95}
    often = self_audit.lower_bound(500, 1000, 50, 1000, **options)
    seldom = self_audit.lower_bound(950, 1000, 500, 1000, **options)
    assert often == pytest.approx(seldom, rel=1e-9)
    assert self_audit.lower_bound(500, 1000, 500, 1000, **options) == 0.0
    assert self_audit.lower_bound(0, 1000, 1000, 1000, **options) == 0.0
    # With nothing but yes on one side and none on the other, what is left is the number of runs.
    low = 0.025 ** (1 / 1000)
    assert self_audit.lower_bound(1000, 1000, 0, 1000, **options) == pytest.approx(math.log(low / (1 - low)))


@pytest.mark.parametrize("shift", [0.2, 1.0, 3.0])
def test_epsilon_of_a_gaussian_is_that_of_the_accountant(self_audit, shift):
    accountant = pld_privacy_accountant.PLDAccountant()
    accountant.compose(dp_event.GaussianDpEvent(1 / shift))
    assert self_audit.gaussian_epsilon(shift, 1e-5) == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-3)
    assert self_audit.gaussian_epsilon(-1.0, 1e-5) == 0.0
