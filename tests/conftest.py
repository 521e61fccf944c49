"""Fixtures that every test may use."""

from __future__ import annotations

import functools
import gc
import os
import signal
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of reference tables and data sets, beside the repository or named by TFDP_SHARED.

    Without it the test is skipped; with TFDP_REQUIRE_SHARED=1 it fails, so that a run that is meant to use the tables
    cannot pass by not finding them.
    """
    folder = Path(os.environ.get("TFDP_SHARED") or ROOT.parent / "shared")
    if not folder.is_dir():
        reason = f"no folder of reference data at {folder}; TFDP_SHARED can name one"
        if os.environ.get("TFDP_REQUIRE_SHARED") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return folder


@functools.cache
def _plan(num_units: int, batch: float, steps: int, noise: float, clip: float, rng: str, seed: int | None, more: str):
    import tfdp

    accountant = "pld" if "truncated" in more else "rdp"
    text = f"""
        schema_version: "1.0"
        claim:
          epsilon: 1.0e+9
          delta: 1.0e-3
          adjacency: add_or_remove_one
          privacy_unit: {{kind: example, description: one record}}
          data_accesses: [training]
        data: {{num_units: {num_units}, size_is_public: true, deduplication: exact}}
        mechanism: {{clip_norm: {clip}, noise_multiplier: {noise}, rng: {rng}}}
        sampling: {{expected_batch_size: {batch}, steps: {steps}, {more}}}
        accountant: {{name: {accountant}}}
    """
    return tfdp.make_plan(tfdp.PrivacySpec.from_text(textwrap.dedent(text)), num_units=num_units, seed=seed)


@pytest.fixture(scope="session")
def plan_of():
    """Makes a plan for a test from a few numbers; the cheapest accountant, and a claim that allows any noise."""

    def make(num_units=12, batch=6, steps=4, noise=1.0, clip=1.0, rng="csprng", seed=None, microbatch=4, **sampling):
        fields = {"scheme": "poisson", "microbatch_size": microbatch, **sampling}
        more = ", ".join(f"{name}: {value}" for name, value in fields.items())
        return _plan(num_units, batch, steps, noise, clip, rng, seed, more)

    return make


@pytest.fixture(scope="module", autouse=True)
def _short_collections():
    """What the modules before left behind is freed, and what stays is kept out of the collections to come.

    A collection goes through every object of the process, and Keras asks for one whenever a variable is deleted.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def control_c():
    """Python's own handling of SIGINT; a shell lets what it starts in the background ignore the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def noise_is(monkeypatch):
    """Replaces the noise by values(shape, step, index); returns the calls (step, index, stddev) made for it."""
    import numpy as np

    from tfdp.noise import GaussianNoise

    def replace(values):
        calls = []

        def noisy_means(self, sums, stddev, denominator, *, step, room):
            calls.extend((step, index, stddev) for index in range(len(sums)))
            drawn = [values(total.shape, step, index) for index, total in enumerate(sums)]
            return [np.float32((total + noise) / denominator) for total, noise in zip(sums, drawn, strict=True)]

        monkeypatch.setattr(GaussianNoise, "noisy_means", noisy_means)
        return calls

    return replace


@pytest.fixture
def draws_are(monkeypatch):
    """Replaces the draws: the given ones, then empty ones (the pipeline draws ahead)."""
    import numpy as np

    from tfdp.sampling.poisson import PoissonSampler

    def replace(*draws):
        rest = iter(draws)
        # A pipeline of an earlier test may still be drawing ahead, and must not take them.
        before = {id(each) for each in gc.get_objects() if isinstance(each, PoissonSampler)}
        monkeypatch.setattr(
            PoissonSampler, "draw", lambda self: np.array([] if id(self) in before else next(rest, []), np.int64)
        )

    return replace
