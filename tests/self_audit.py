"""Audits the pipeline itself: what can be told from many runs, against the epsilon that was accounted for them.

    python tests/self_audit.py                 # thousands of runs, fresh randomness, confidence 99.9%; a table
    python tests/self_audit.py --quick         # fewer runs, fixed seeds, confidence 95%: what the test suite runs

A setting is a spec that claims epsilon 1, and two neighbouring data sets. Its runs are steps of `model.fit` with
everything that a private fit consists of: sampler, clipping, noise, ledger, optimizer. They are independent, because
the model is linear: its gradients do not depend on its weights. A question with the answer yes or no, fixed beforehand,
is put to the updates of every run; how often the answer is yes in either world gives a lower bound on epsilon. It has
to stay below the claim, and to exceed it once the pipeline is broken, by a patch in this file, in the way that the
question was made for.

| bound    | from                                                            | holds for                           |
|----------|-----------------------------------------------------------------|-------------------------------------|
| rates    | Clopper-Pearson on both rates, of yes and of no                 | every mechanism                     |
| Gaussian | the same, on the trade-off of two Gaussians (Nasr et al. 2023)  | full batch: one Gaussian, one shift |

Where every unit has a coordinate of its own to push, or none, a step is one run for each of them, and both worlds at
once.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from scipy import optimize, stats

import tfdp
from tfdp import training
from tfdp.auditing.intervals import clopper_pearson
from tfdp.noise import GaussianNoise
from tfdp.sampling.poisson import PoissonSampler

EPSILON, REPLICAS, SEED = 1.0, 8, 5
VALUES, BLOCK = 64, 4


@dataclasses.dataclass(frozen=True)
class Setting:
    """A claim of epsilon 1 and two worlds.

    Attributes:
        units: in the world with the unit in question.
        steps: of one run, all of which the claim covers.
        inputs: of the first so many units; the gradient of a unit is 100 times its inputs, clipped to 1.
        members: coordinates at whose unit the world is the one with it, False for the others; None where the worlds are
            two data sets, of which the second lacks the last unit.
    """

    units: int
    steps: int
    delta: float
    sampling: dict[str, Any]
    inputs: Callable[[int], np.ndarray]
    members: np.ndarray | None = None

    @functools.cached_property
    def noise_multiplier(self) -> float:
        """What tfdp calibrates for the claim."""
        return self.plan(self.units, self.steps, None).noise_multiplier

    def plan(self, units: int, steps: int, noise_multiplier: float | None, seed: int | None = None) -> Any:
        claim = {
            "epsilon": EPSILON if noise_multiplier is None else 1e9,
            "delta": self.delta,
            "adjacency": "add_or_remove_one" if self.members is None else "zero_out",
            "privacy_unit": {"kind": "example", "description": "one row"},
            "data_accesses": ["training"],
        }
        rng = "csprng" if seed is None else "prng"
        spec = {
            "schema_version": "1.0",
            "claim": claim,
            "data": {"num_units": units, "size_is_public": True, "deduplication": "exact"},
            "mechanism": {"clip_norm": 1.0, "noise_multiplier": noise_multiplier, "rng": rng},
            "sampling": {**self.sampling, "steps": steps},
            "accountant": {"name": "pld" if noise_multiplier is None else "rdp"},
        }
        return tfdp.make_plan(tfdp.PrivacySpec.from_text(json.dumps(spec), format="json"), seed=seed)

    def observe(self, units: int, runs: int, breakage: Callable[..., Any], seed: int | None) -> np.ndarray:
        """Trains on the first so many units. Returns the noisy sums [runs, steps, values]."""
        plan = self.plan(units, runs * self.steps, self.noise_multiplier, seed)
        x = self.inputs(units).astype(np.float32)
        kernel = keras.layers.Dense(1, use_bias=False)
        model = keras.Sequential([keras.Input(x.shape[1:]), kernel])
        model.compile(tfdp.dp_optimizer("sgd", plan, learning_rate=1.0), loss=_loss)
        trail = [model.get_weights()[0].ravel()]
        watch = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: trail.append(kernel.kernel.numpy().ravel())
        )
        with tempfile.TemporaryDirectory() as folder, breakage(plan):
            model.fit(
                tfdp.poisson_batches((x, np.zeros((units, 1), np.float32)), plan),
                steps_per_epoch=runs * self.steps,
                callbacks=[tfdp.PrivacyCallback(plan, Path(folder) / "ledger.jsonl"), watch],
                verbose=0,
                shuffle=False,
            )
        updates = -np.diff(np.array(trail, np.float64), axis=0) * plan.expected_batch_size
        return updates.reshape(runs, self.steps, -1)

    def worlds(self, runs: int, breakage: Callable[..., Any], seed: int | None) -> tuple[np.ndarray, np.ndarray]:
        """Noisy sums of runs with the unit and without it."""
        if self.members is None:
            other = None if seed is None else seed + 1
            return self.observe(self.units, runs, breakage, seed), self.observe(self.units - 1, runs, breakage, other)
        steps = -(-runs // int(self.members.sum()))
        seen = self.observe(self.units, steps, breakage, seed).transpose(2, 0, 1)  # [coordinates, steps, 1]
        return seen[self.members].reshape(-1, 1, 1), seen[~self.members].reshape(-1, 1, 1)


def _loss(y_true: Any, y_pred: Any) -> Any:
    return 100.0 * keras.ops.mean(y_pred, axis=-1)


# The settings. Units without inputs have no gradient: nothing but the noise moves the weights.
FEW = Setting(2, 15, 1e-5, {"scheme": "poisson", "probability": 0.75}, lambda units: np.zeros((units, VALUES)))
EPOCHS = Setting(5, 5, 0.19, {"scheme": "poisson", "probability": 0.2}, lambda units: np.ones((units, 1)))
_COORDINATES = 400
_HALF = np.arange(_COORDINATES) % 2 == 0
OWN = Setting(
    _COORDINATES,
    1,
    1e-5,
    {"scheme": "poisson", "probability": 0.5, "microbatch_size": _COORDINATES // 16},
    lambda units: np.diag(_HALF.astype(float)),
    _HALF,
)


def _blocks(units: int) -> np.ndarray:
    """Per coordinate four units, a microbatch: three push up; the one in question, large, pushes down."""
    inputs = np.repeat(np.eye(_COORDINATES), BLOCK, axis=0)
    inputs[BLOCK - 1 :: BLOCK] *= np.where(_HALF, -1000.0, 0.0)[:, None]
    return inputs


ALL = Setting(
    BLOCK * _COORDINATES,
    1,
    1e-5,
    {"scheme": "full_batch", "expected_batch_size": BLOCK * _COORDINATES, "microbatch_size": BLOCK},
    _blocks,
    _HALF,
)


# The breakages: what is patched for the length of a fit.


@contextlib.contextmanager
def nothing(plan: Any) -> Iterator[None]:
    yield


@contextlib.contextmanager
def noisy_means(make: Callable[..., Any]) -> Iterator[None]:
    """Patches how noise is added: make(add, sums, stddev, denominator, drawn), `drawn` the number of units."""
    drawn: list[int] = []
    add, redeem = GaussianNoise.noisy_means, training.PrivateTrainStep._redeem

    def watched(self: Any, draw: Any, token: Any, unit_weight: Any, extents: Any) -> Any:
        drawn[:] = [int(unit_weight.sum())]
        return redeem(self, draw, token, unit_weight, extents)

    def broken(self: Any, sums: Any, stddev: float, denominator: float, *, step: int, **room: Any) -> Any:
        return make(functools.partial(add, self, step=step, **room), sums, stddev, denominator, drawn[0])

    with (
        mock.patch.object(GaussianNoise, "noisy_means", broken),
        mock.patch.object(training.PrivateTrainStep, "_redeem", watched),
    ):
        yield


def no_noise_on_empty_batches(plan: Any) -> Any:
    def make(add: Any, sums: Any, stddev: float, denominator: float, drawn: int) -> Any:
        return add(sums, stddev, denominator) if drawn else [np.float32(total / denominator) for total in sums]

    return noisy_means(make)


def realised_denominator(plan: Any) -> Any:
    """The public denominator stays in as a scale, so that what is looked at is the mean in both worlds."""
    return noisy_means(lambda add, sums, stddev, denominator, drawn: add(sums, stddev, denominator * max(drawn, 1)))


def noise_without_root(plan: Any) -> Any:
    """Replicas whose noise of sigma * C / R each adds up to sigma * C / sqrt(R)."""
    return noisy_means(
        lambda add, sums, stddev, denominator, drawn: add(sums, stddev / math.sqrt(REPLICAS), denominator)
    )


def clipping_per_microbatch(plan: Any) -> Any:
    """The mean gradient of a microbatch is clipped, and counted once for each of its units."""
    right = training.sums_function

    def sums_function(method: str, hybrid: bool) -> Callable[..., Any]:
        def sums(
            model: Any, x: Any, y: Any, weight: Any, unit_weight: Any, clip_norm: float, record_weight: Any
        ) -> Any:
            raw, *rest = right(method, hybrid)(model, x, y, weight, unit_weight, 1e9, record_weight)
            size = tf.linalg.global_norm(raw) / tf.maximum(tf.reduce_sum(unit_weight), 1.0)
            return [each * clip_norm / tf.maximum(size, clip_norm) for each in raw], *rest

        return sums

    return mock.patch.object(training, "sums_function", sums_function)


def draw_per_microbatch(plan: Any) -> Any:
    """As many draws with the accounted probability as a batch has microbatches."""
    draw, draws = PoissonSampler.draw, math.ceil(plan.expected_batch_size / plan.microbatch_size)
    return mock.patch.object(PoissonSampler, "draw", lambda self: np.concatenate([draw(self) for _ in range(draws)]))


def shuffled_batches(plan: Any) -> Any:
    """A new permutation every epoch, cut into batches of the size that is expected with the unit."""
    generator = np.random.default_rng(plan.seed)
    size, left = round(EPOCHS.units * plan.sampling_probability), []

    def draw(self: Any) -> np.ndarray:
        if not left:
            order = generator.permutation(self.num_units)
            left.extend(np.sort(order[start : start + size]) for start in range(0, EPOCHS.units, size))
        return left.pop(0)

    return mock.patch.object(PoissonSampler, "draw", draw)


@dataclasses.dataclass(frozen=True)
class Row:
    """A breakage and the question that sees it.

    Attributes:
        question: (noisy sums [runs, steps, values], noise multiplier) -> yes or no [runs].
        likelier: in which world the answer should be yes more often.
        runs, quick_runs: of each world.
        gaussian: whether the bound for the Gaussian mechanism holds in this setting.
    """

    name: str
    breakage: Callable[[Any], Any]
    setting: Setting
    question: Callable[[np.ndarray, float], np.ndarray]
    likelier: str
    runs: int
    quick_runs: int
    gaussian: bool = False


def _smaller(sums: np.ndarray, sigma: float) -> np.ndarray:
    """Was noise, in one step at least, that of a sum divided by twice as many?"""
    spread = np.sqrt((sums**2).mean(2)) / sigma
    return (spread < 0.7).any(1)


def _no_noise(sums: np.ndarray, sigma: float) -> np.ndarray:
    """Was there no noise in four steps or more?"""
    return (sums == 0).all(2).sum(1) >= 4


def _far_up(sums: np.ndarray, sigma: float) -> np.ndarray:
    return sums[:, 0, 0] > 2 * sigma


def _lowered(sums: np.ndarray, sigma: float) -> np.ndarray:
    """Is the sum of a block nearer to what it is with the unit that pushes down?"""
    return sums[:, 0, 0] < BLOCK - 1.5


def _whole_batch(sums: np.ndarray, sigma: float) -> np.ndarray:
    """Was the last batch of the epoch a whole one?"""
    return sums[:, -1, 0] > 1.0


ROWS = (
    Row("no noise on empty batches", no_noise_on_empty_batches, FEW, _no_noise, "without", 300, 60),
    Row("realised denominator", realised_denominator, FEW, _smaller, "with", 300, 20),
    Row("one draw per microbatch", draw_per_microbatch, OWN, _far_up, "with", 20_000, 2_000),
    Row("clipping per microbatch", clipping_per_microbatch, ALL, _lowered, "with", 20_000, 4_000, True),
    Row(
        f"noise of {REPLICAS} replicas without the root", noise_without_root, ALL, _lowered, "with", 20_000, 4_000, True
    ),
    Row("shuffled, accounted as Poisson", shuffled_batches, EPOCHS, _whole_batch, "with", 3_000, 300),
)


def lower_bound(
    yes: int, runs: int, other_yes: int, other_runs: int, *, delta: float, confidence: float, gaussian: bool = False
) -> float:
    """Epsilon is at least this, with the confidence stated; 0 where nothing follows."""
    low, _ = clopper_pearson(yes, runs, confidence)  # fails at one end with half of the probability
    _, high = clopper_pearson(other_yes, other_runs, confidence)
    if gaussian:
        return gaussian_epsilon(stats.norm.ppf(low) - stats.norm.ppf(high), delta) if 0 < low < 1 > high > 0 else 0.0
    ratios = [(low - delta) / high, (1.0 - high - delta) / max(1.0 - low, 1e-300)]
    return max(0.0, math.log(max(*ratios, 1.0)))


def gaussian_epsilon(shift: float, delta: float) -> float:
    """Epsilon at delta of one Gaussian with standard deviation 1 and a shift (Balle and Wang 2018, Theorem 5)."""

    def excess(epsilon: float) -> float:
        above, below = shift / 2 - epsilon / shift, -shift / 2 - epsilon / shift
        return float(stats.norm.cdf(above) - math.exp(epsilon) * stats.norm.cdf(below) - delta)

    return 0.0 if shift <= 0 or excess(0.0) <= 0 else float(optimize.brentq(excess, 0.0, 500.0))


@dataclasses.dataclass(frozen=True)
class Result:
    row: Row
    runs: int
    intact: float
    broken: float
    rates: tuple[float, float]


def audit(*, quick: bool, say: Callable[[str], None] = lambda text: None) -> list[Result]:
    """All rows, one after the other."""
    confidence = 0.95 if quick else 0.999
    whole: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    results = []
    for index, row in enumerate(ROWS):
        runs = row.quick_runs if quick else row.runs
        seed = SEED + 4 * index if quick else None
        if id(row.setting) not in whole:
            say(f"intact, for {row.name}")
            fewer = runs // 3 if quick and row.setting.members is None else runs  # each of these takes many steps
            whole[id(row.setting)] = row.setting.worlds(fewer, nothing, seed)
        seed = None if seed is None else seed + 2
        say(row.name)
        bounds, rates = [], (0.0, 0.0)
        for worlds in (whole[id(row.setting)], row.setting.worlds(runs, row.breakage, seed)):
            answers = [row.question(sums, row.setting.noise_multiplier) for sums in worlds]
            one, other = answers if row.likelier == "with" else answers[::-1]
            rates = float(one.mean()), float(other.mean())
            counts = int(one.sum()), len(one), int(other.sum()), len(other)
            bounds.append(lower_bound(*counts, delta=row.setting.delta, confidence=confidence, gaussian=row.gaussian))
        results.append(Result(row, len(one), *bounds, rates))
    return results


def table(results: list[Result]) -> str:
    lines = [
        "| broken on purpose | claim | runs in each world | bound, intact | bound, broken | yes, when broken | by |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in results:
        setting = each.row.setting
        lines.append(
            f"| {each.row.name} | {EPSILON:g} at delta {setting.delta:g}, {setting.steps} step"
            f"{'s' if setting.steps > 1 else ''} | {each.runs} | {each.intact:.2f} | {each.broken:.2f} | "
            f"{each.rates[0]:.3f} to {each.rates[1]:.3f} | {'Gaussian' if each.row.gaussian else 'rates'} |"
        )
    return "\n".join(lines)


def problems(results: list[Result]) -> list[str]:
    """What should not be: a bound above the claim, or a breakage that nobody sees."""
    high = [f"{each.row.name}: intact, epsilon is at least {each.intact}" for each in results if each.intact > EPSILON]
    return high + [f"{each.row.name}: not seen, bound {each.broken}" for each in results if each.broken <= EPSILON]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer runs, fixed seeds, confidence 95%%")
    found = audit(quick=parser.parse_args().quick, say=lambda text: print(text, file=sys.stderr, flush=True))
    print(table(found))
    print("\n".join(problems(found)))
    sys.exit(1 if problems(found) else 0)
