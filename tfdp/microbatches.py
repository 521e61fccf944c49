"""How many units one forward pass should hold: timed on made-up data, and remembered for this model and machine.

The size changes neither what is computed nor what is private: nothing but shapes is read of the records.
"""

from __future__ import annotations

import json
import math
import os
import re
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp import __version__
from tfdp.errors import MisuseError
from tfdp.files import atomic_write_text, sha256_text, user_folder
from tfdp.gradients import sums_function
from tfdp.inspection.trials import restored
from tfdp.plan import Plan
from tfdp.sampling.batches import poisson_batches
from tfdp.training import is_compiled

_FIRST, _LARGEST = 16, 1024
_REPEATS = 3
_SLOWER, _FASTER = 1.25, 0.98  # of the fastest so far: where the search ends


@dataclass(frozen=True)
class Timing:
    """One microbatch of a size.

    Attributes:
        size: units.
        first: seconds of the first call, which traces and, under XLA, compiles.
        seconds: median of the calls after it.
        batch: seconds of a batch of the expected size; its last microbatch is half full on average.
    """

    size: int
    first: float
    seconds: float
    batch: float


@dataclass(frozen=True)
class MicrobatchTimes:
    """What `time_microbatches` found.

    Attributes:
        timings: by size; without those that did not fit into memory.
        remembered: whether they are from an earlier search.
        cut_short: whether the time was up before the search came to its end; more `seconds` make it look again.
        not_saved: why a later search will not find them; None where it will, or was not to.
    """

    timings: tuple[Timing, ...]
    remembered: bool
    cut_short: bool = False
    not_saved: str | None = None

    @property
    def fastest(self) -> int:
        """The size whose batches are fastest."""
        return min(self.timings, key=lambda timing: timing.batch).size

    @property
    def told(self) -> str:
        """What was found, on one line."""
        best, *others = sorted(self.timings, key=lambda timing: timing.batch)
        beside = ", ".join(f"{t.size}: {t.batch:.3g} s" for t in others)
        firsts = dict.fromkeys(f"{pick(t.first for t in self.timings):.1f}" for pick in (min, max))
        return (
            f"Microbatches of {best.size} units: {best.batch:.3g} s a batch, "
            + ("timed earlier on this machine" if self.remembered else "timed on made-up data")
            + (f" ({beside})" if beside else "")
            + f". A first call, with tracing and compilation, took {' to '.join(firsts)} s."
            + (" The search was cut short." if self.cut_short else "")
            + (f" It is not remembered: {self.not_saved}." if self.not_saved else "")
        )

    def __str__(self) -> str:
        lines = ["| units | first call | microbatch | batch |", "|---|---|---|---|"]
        lines += [f"| {t.size} | {t.first:.1f} s | {t.seconds:.4f} s | {t.batch:.3f} s |" for t in self.timings]
        return "\n".join(lines)


def time_microbatches(
    model: Any,
    records: Any,
    plan: Plan,
    *,
    batch_options: Mapping[str, Any] | None = None,
    method: str = "bookkeeping",
    hybrid: bool = False,
    jit_compile: bool | str = "auto",
    remember: bool = True,
    seconds: float = 30.0,
) -> MicrobatchTimes:
    """Times clipped gradients of microbatches of 16 units, of fewer, and of more while that is faster.

    No size is above that of a batch, or 1024. The model, its optimizer and every random generator are left as they
    were, and no ledger is written.

        times = tfdp.time_microbatches(model, records, plan)
        batches = tfdp.poisson_batches(records, plan, microbatch_size=times.fastest)

    Args:
        model: built and compiled.
        records: as for `poisson_batches`; their shapes are read, and nothing else.
        plan: the plan, for its clip norm, its expected batch size and its unit.
        batch_options: more arguments of `poisson_batches`.
        method, hybrid, jit_compile: as for `PrivacyCallback`.
        remember: read and write what was found in `$XDG_CACHE_HOME/tfdp/microbatches.json`, by model, shapes, machine
            and versions. A file that cannot be read or written costs another search, and no more.
        seconds: after so long no further size is tried; the first one always is.

    What XLA compiles (`jit_compile`) TensorFlow keeps between processes where it is told a folder before it is
    imported: `TF_XLA_FLAGS=--tf_xla_persistent_cache_directory=DIR`. Graphs are traced anew in every process.

    Returns:
        Times of every size that was tried.

    Raises:
        MisuseError: `model` is not compiled, or a single unit does not fit into memory.
        GradientError, UnsupportedLayerError: its clipped gradients cannot be computed.
    """
    if not getattr(model, "compiled", False):
        raise MisuseError(
            "Expected a compiled model: its loss is what is timed. Received: one that is not. Call model.compile first."
        )
    spec = poisson_batches(records, plan, **{**(batch_options or {}), "microbatch_size": 1}).element_spec
    compiled = is_compiled(jit_compile)
    sums = sums_function(method, hybrid)
    key = _key(model, spec, plan, [method, hybrid, compiled])
    largest = max(1, min(_LARGEST, int(plan.truncated_batch_size or plan.expected_batch_size)))
    kept = _read(key, largest, seconds) if remember else None
    if kept is not None:
        return kept

    def timing(size: int) -> Timing | None:
        part = _made_up(spec, size)

        @tf.function(autograph=False, jit_compile=compiled)
        def microbatch() -> Any:
            leaves = (part.get("x"), part.get("y"), part.get("sample_weight"), part["unit_weight"])
            return sums(model, *leaves, plan.clip_norm, part.get("record_weight"))[0]

        try:
            first, *others = [_seconds(microbatch) for _ in range(1 + _REPEATS)]
        except tf.errors.ResourceExhaustedError:
            return None
        seconds = statistics.median(others)
        return Timing(size, first, seconds, seconds * (plan.expected_batch_size / size + (size > 1) / 2))

    end, cut_short = time.monotonic() + seconds, False

    def late() -> bool:
        nonlocal cut_short
        cut_short = time.monotonic() > end
        return cut_short

    with restored(model):  # forward passes move the seeds of dropout
        timings = _search(timing, largest, late)
    if not timings:
        raise MisuseError(
            "Expected one unit to fit into memory. Received: an error that it does not. Shorten the records "
            "(sequence_length), train fewer weights (LoRA), or take a smaller model."
        )
    not_saved = _write(key, timings, seconds if cut_short else None) if remember else None
    return MicrobatchTimes(timings, False, cut_short, not_saved)


def _search(
    timing: Callable[[int], Timing | None], largest: int, late: Callable[[], bool] = lambda: False
) -> tuple[Timing, ...]:
    """Halves the size until that is clearly slower; then doubles it while it is faster, which memory pays for."""
    found: dict[int, Timing] = {}

    def ratio(size: int) -> float:
        """Of the batch to the fastest so far."""
        new = timing(size)
        if new is None:
            return math.inf
        best = min((old.batch for old in found.values()), default=new.batch)
        found[size] = new
        return new.batch / best

    start = size = min(_FIRST, largest)
    while size and not (found and late()) and (ratio(size) < _SLOWER or not found):
        size //= 2
    size = 2 * start
    while start in found and size <= largest and not late() and ratio(size) < _FASTER:
        size *= 2
    return tuple(found[size] for size in sorted(found))


def _seconds(microbatch: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    for leaf in microbatch()[:1]:
        leaf.numpy()
    return time.perf_counter() - begin


def _made_up(spec: Any, size: int) -> dict[str, Any]:
    """A full microbatch of numbers that have nothing to do with the records; leaves [size * records, ...]."""
    generator = np.random.default_rng(0)
    # [microbatches, units, ...], and where units have several records [microbatches, units, records, ...].
    counted = list(spec.get("record_weight", spec["unit_weight"]).shape[2:])

    def leaf(each: Any) -> Any:
        shape = [size * math.prod(counted), *each.shape[2 + len(counted) :]]
        values = generator.normal(size=shape) if each.dtype.is_floating else generator.integers(0, 2, shape)
        return tf.constant(values, each.dtype)

    part = {name: tf.nest.map_structure(leaf, spec[name]) for name in ("x", "y") if name in spec}
    if "sample_weight" in spec:
        part["sample_weight"] = tf.nest.map_structure(lambda each: tf.ones_like(leaf(each)), spec["sample_weight"])
    part["unit_weight"] = tf.ones([size])
    if counted:
        part["record_weight"] = tf.ones([size, *counted])
    return part


def _key(model: Any, spec: Any, plan: Plan, how: list[Any]) -> str:
    """Names a question; the same name in another process, where functions lie elsewhere and layers are counted anew."""
    trained = {id(variable) for variable in model.trainable_variables}
    known = [
        type(model).__name__,
        re.sub(r" at 0x[0-9a-fA-F]+", "", str(model.loss)),
        [(re.sub(r"_\d+(?=/|$)", "", v.path), list(v.shape), str(v.dtype), id(v) in trained) for v in model.variables],
        [str(leaf) for leaf in tf.nest.flatten({name: spec[name] for name in spec if name != "tfdp"})],
        plan.expected_batch_size,
        plan.truncated_batch_size,
        how,
        [
            (each.device_type, tf.config.experimental.get_device_details(each).get("device_name"))
            for each in tf.config.list_physical_devices()
        ],
        os.cpu_count(),
        [__version__, tf.__version__, keras.__version__],
    ]
    return sha256_text(json.dumps(known))


def _file() -> Path | None:
    base = user_folder("XDG_CACHE_HOME", ".cache")
    return None if base is None else base / "tfdp" / "microbatches.json"


def _known() -> dict[str, Any]:
    """Everything that is remembered; nothing, where the file cannot be read: a search finds it again."""
    file = _file()
    if file is None:
        return {}
    try:
        known = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _read(key: str, largest: int, seconds: float) -> MicrobatchTimes | None:
    """What a search of at least `seconds` left; None where there is nothing, or what a search leaves in no case."""
    try:
        kept = _known()[key]
        timings = tuple(Timing(size, *map(float, others)) for size, *others in kept["timings"])
        ended = kept["cut_after"] is None
        looks_enough = ended or seconds <= float(kept["cut_after"])
    except (KeyError, TypeError, ValueError):
        return None
    clean = all(
        type(each.size) is int
        and 1 <= each.size <= largest
        and all(math.isfinite(value) and value > 0 for value in (each.first, each.seconds, each.batch))
        for each in timings
    )
    return MicrobatchTimes(timings, True, not ended) if timings and clean and looks_enough else None


def _write(key: str, timings: tuple[Timing, ...], cut_after: float | None) -> str | None:
    """Remembers a search; says why it could not."""
    file = _file()
    if file is None:
        return "there is no home folder and no XDG_CACHE_HOME"
    kept = {"timings": [[t.size, t.first, t.seconds, t.batch] for t in timings], "cut_after": cut_after}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_text(file, json.dumps({**_known(), key: kept}))
    except OSError as error:
        return f"{file} cannot be written ({error.strerror or error})"
    return None
