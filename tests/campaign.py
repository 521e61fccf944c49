"""Kills and starves a private training in every way it can be, and compares what is claimed with what was done.

    python tests/campaign.py                 # 125 random moments, every named point, every failing write; a table
    python tests/campaign.py --quick         # a few of each: what the test suite runs

The truth is counted outside of the ledger: a number in a file that is mapped into memory goes up by one immediately
before an update is applied. A claim is wrong when the ledger, or the card at the end, has fewer steps or a smaller
epsilon than that. A model is lost when what lies on the disk cannot be gone on from, or the released model cannot be
loaded. Every process that is killed is a real one, by SIGKILL; they are forked from one that has imported everything
and started nothing.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import errno
import json
import mmap
import os
import random
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

import tfdp
from tfdp.errors import LedgerError, TfdpError
from tfdp.ledger import read_ledger
from tfdp.optimizer import NoisyGradients, PrivateUpdates
from tfdp.resume import read_checkpoint
from tfdp.sampling import batches as sampling

UNITS, FEATURES, STEPS, EPOCH, SAVE_FREQ = 24, 4, 24, 6, 4
BEGUN, APPLIED, DRAWN = range(3)
INTERRUPTED = 130

SPEC = f"""
schema_version: "1.0"
claim:
  epsilon: 1.0e+4
  delta: 1.0e-3
  adjacency: add_or_remove_one
  privacy_unit: {{kind: example, description: one row}}
  data_accesses: [training]
data: {{num_units: {UNITS}, size_is_public: true, deduplication: exact}}
mechanism: {{clip_norm: 1.0, noise_multiplier: 1.0}}
sampling: {{scheme: poisson, expected_batch_size: 4, steps: {STEPS}, microbatch_size: 4}}
accountant: {{name: rdp}}
"""


class Counters:
    """Three numbers in a file that is mapped into memory: what a process wrote survives its being killed."""

    def __init__(self, path: Path):
        if not path.exists():
            path.write_bytes(bytes(24))
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 24)

    def __getitem__(self, index: int) -> int:
        return struct.unpack_from("<Q", self._map, 8 * index)[0]

    def bump(self, index: int) -> None:
        struct.pack_into("<Q", self._map, 8 * index, self[index] + 1)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def full(*_: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def broken(*_: Any) -> Any:
    raise OSError(errno.EIO, "Input/output error")


class Fault:
    """One way to fail, at the nth time that a place is passed."""

    def __init__(self, place: str | None = None, nth: int = 1, act: Callable[..., Any] = die):
        self.place, self.left, self.act = place, nth, act

    def __call__(self, place: str) -> Any:
        """Fails here, or returns."""
        if place == self.place:
            self.left -= 1
            if self.left == 0:
                return self.act()
        return None


def instrument(counters: Counters, fault: Fault, folder: Path) -> None:
    """Puts counters and faults around what a step does. Only in a process that was forked for it."""
    draw, apply = sampling._draw_batch, PrivateUpdates.apply_private
    append = tfdp.Ledger.append_step
    write, fsync, replace, write_array = os.write, os.fsync, os.replace, np.lib.format.write_array
    ledger = str(folder / "run" / "ledger.jsonl")

    def drawn(*arguments: Any) -> Any:
        batch = draw(*arguments)
        counters.bump(DRAWN)
        fault("after the draw")
        return batch

    def appended(self: Any, step: int) -> None:
        fault("before the record")
        append(self, step)
        fault("after the record")

    def count(index: int, place: str) -> Callable[..., Any]:
        def bump(value: Any) -> Any:
            counters.bump(index)
            fault(place)
            return value

        return lambda value: tf.numpy_function(bump, [value], value.dtype, stateful=True)

    def applied(self: Any, noisy: NoisyGradients) -> None:
        first = count(BEGUN, "before the update")(noisy.gradients[0])
        first.set_shape(noisy.gradients[0].shape)
        with tf.control_dependencies([first]):
            gradients = [first, *(tf.identity(each) for each in noisy.gradients[1:])]
        apply(self, NoisyGradients(gradients, noisy.variables, noisy.plan_digest))
        count(APPLIED, "after the update")(tf.reduce_sum(noisy.variables[-1]))

    def of_ledger(descriptor: int) -> bool:
        return os.readlink(f"/proc/self/fd/{descriptor}") == ledger

    def written(descriptor: int, data: Any) -> int:
        if of_ledger(descriptor) and b'"kind":"step"' in bytes(data):
            if fault.place == "half a record" and fault.left == 1:
                write(descriptor, bytes(data)[: len(data) // 2])
            fault("half a record")
            fault("the record")
        if of_ledger(descriptor) and b'"kind":"checkpoint"' in bytes(data):
            fault("line of the checkpoint")
        return write(descriptor, data)

    def flushed(descriptor: int) -> None:
        if of_ledger(descriptor):
            fault("flush of the record")
        elif "checkpoint.npz" in os.readlink(f"/proc/self/fd/{descriptor}"):
            fault("flush of the checkpoint")
        fsync(descriptor)

    def replaced(source: Any, target: Any) -> None:
        mine = "checkpoint" in str(target)
        fault("before the rename of the checkpoint" if mine else "rename in the export")
        replace(source, target)
        fault("after the rename of the checkpoint" if mine else "after a rename in the export")

    def array_written(file: Any, array: Any, **options: Any) -> None:
        write_array(file, array, **options)
        fault("middle of the checkpoint")

    sampling._draw_batch = drawn
    tfdp.Ledger.append_step = appended
    PrivateUpdates.apply_private = applied
    os.write, os.fsync, os.replace = written, flushed, replaced
    np.lib.format.write_array = array_written


def train(folder: Path, plan: Any, counters: Counters, fault: Fault, *, export: bool) -> None:
    """The command that is killed and given again."""
    instrument(counters, fault, folder)
    run = folder / "run"
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((FEATURES,)), keras.layers.Dense(3, activation="tanh"), keras.layers.Dense(2)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tfdp.dp_optimizer("adam", plan, learning_rate=0.01), loss)
    generator = np.random.default_rng(0)
    records = generator.normal(size=(UNITS, FEATURES)).astype(np.float32), generator.integers(0, 2, UNITS)
    model.fit(
        tfdp.poisson_batches(records, plan),
        epochs=STEPS // EPOCH,
        steps_per_epoch=EPOCH,
        callbacks=[
            tfdp.PrivacyCallback(plan, run / "ledger.jsonl", checkpoint=run / "checkpoint", save_freq=SAVE_FREQ)
        ],
        verbose=0,
        shuffle=False,
    )
    fault("after the fit")
    if export:
        tfdp.export(model, run)
        loaded = keras.saving.load_model(run / "model.keras")
        assert int(loaded.optimizer.iterations) <= read_ledger(run / "ledger.jsonl").steps


def forked(work: Callable[[], None], watch: Callable[[int], None] = lambda process: None) -> tuple[int, str]:
    """Runs `work` in a process of its own; gives minus the signal or the exit code (3: error of tfdp), and stderr."""
    with tempfile.TemporaryFile() as told:
        process = os.fork()
        if process == 0:
            code = 1
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets its background ignore it
            os.dup2(told.fileno(), 2)
            try:
                work()
                code = 0
            except KeyboardInterrupt:
                code = INTERRUPTED
            except TfdpError as error:
                code = 3
                print(f"{type(error).__name__}: {error}", file=sys.stderr)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        watch(process)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        told.seek(0)
        return code, told.read().decode(errors="replace")


class Case:
    """One folder, one fault, and the same command again until the run is over."""

    def __init__(self, plan: Any, kind: str, *, export: bool):
        self.plan, self.kind, self.export = plan, kind, export
        self.folder = Path(tempfile.mkdtemp(prefix="campaign-"))
        (self.folder / "run").mkdir()
        self.counters = Counters(self.folder / "counters")
        self.kills = self.wrong = self.lost = self.failures = 0
        self.problems: list[str] = []

    def attempt(self, fault: Fault, watch: Callable[[int], None] = lambda process: None) -> int:
        """Gives the command once and compares."""
        code, told = forked(lambda: train(self.folder, self.plan, self.counters, fault, export=self.export), watch)
        self.kills += code in (-signal.SIGKILL, INTERRUPTED)
        self.failures += code == 3
        if code not in (0, 3, -signal.SIGKILL, INTERRUPTED):
            self.lost += 1
            self.problems.append(f"exit code {code}: {told[-2000:]}")
        self.compare()
        return code

    def compare(self) -> None:
        path, begun = self.folder / "run" / "ledger.jsonl", self.counters[BEGUN]
        steps, epsilon = 0, 0.0
        if path.exists():
            try:
                record = read_ledger(path)
                steps, epsilon = record.steps, record.epsilon()
            except LedgerError as error:
                self.problems.append(str(error))
        if steps < begun or epsilon < self.plan.epsilon(begun) or begun < self.counters[APPLIED]:
            self.wrong += 1
            self.problems.append(
                f"{steps} steps on the ledger, {begun} updates begun, {self.counters[APPLIED]} applied"
            )
        try:
            read_checkpoint(self.folder / "run" / "checkpoint")
        except LedgerError as error:
            self.lost += 1
            self.problems.append(str(error))

    def finish(self) -> None:
        """The same command, undisturbed, to its end."""
        code = self.attempt(Fault())
        if code != 0:
            self.lost += 1
            self.problems.append(f"the run could not be finished: exit code {code}")
        record = read_ledger(self.folder / "run" / "ledger.jsonl")
        if record.steps != STEPS:
            self.lost += 1
            self.problems.append(f"ended after {record.steps} of {STEPS} steps")
        if self.export and code == 0:
            card = json.loads((self.folder / "run" / "MODEL_CARD.json").read_text())
            claimed = card["claim"]["epsilon"]["value"]
            if card["claim"]["status"] != "claimed" or claimed < self.plan.epsilon(self.counters[BEGUN]):
                self.wrong += 1
                self.problems.append(f"the card says {card['claim']}")

    def random_kill(self, generator: random.Random, number: int = signal.SIGKILL) -> None:
        """Once or twice, at a random moment after a random number of updates of that process."""
        for _ in range(generator.choice((1, 1, 2))):
            before, wait = self.counters[BEGUN], generator.randrange(STEPS + 1)
            delay = generator.uniform(0, 0.02 if wait else 1.5)

            def watch(process: int, target: int = before + wait, delay: float = delay) -> None:
                while self.counters[BEGUN] < min(target, STEPS) and not exited(process):
                    time.sleep(0.0005)
                time.sleep(delay)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, number)

            if self.attempt(Fault(), watch) == INTERRUPTED:
                self.compare_interrupted()

    def compare_interrupted(self) -> None:
        """Whether an interrupted fit said so, and saved every update, once it had taken a step."""
        path = self.folder / "run" / "ledger.jsonl"
        entries = read_ledger(path).entries if path.exists() else ()
        kinds = [entry["kind"] for entry in entries]
        fit = kinds[len(kinds) - kinds[::-1].index("fit_begin") :] if "fit_begin" in kinds else []
        if "step" not in fit:
            return
        found = read_checkpoint(self.folder / "run" / "checkpoint")
        if fit[-1] not in ("fit_interrupted", "fit_end") or found is None or found.steps != entries[-1]["steps"]:
            self.lost += 1
            self.problems.append(f"interrupted, the ledger ended with {kinds[-3:]}")


def exited(process: int) -> bool:
    """Whether a child has ended, without waiting for it."""
    return os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


POINTS = (
    ("after the draw", 5),
    ("before the record", 5),
    ("half a record", 5),
    ("flush of the record", 7),
    ("after the record", 5),
    ("before the update", 5),
    ("after the update", 5),
    ("line of the checkpoint", 2),
    ("middle of the checkpoint", 9),
    ("flush of the checkpoint", 2),
    ("before the rename of the checkpoint", 2),
    ("after the rename of the checkpoint", 2),
    ("after the fit", 1),
    ("rename in the export", 1),
    ("after a rename in the export", 2),
)
FAILURES = (
    ("the record", 5, full),
    ("the record", 6, broken),
    ("half a record", 5, full),
    ("flush of the record", 7, broken),
    ("line of the checkpoint", 2, full),
    ("middle of the checkpoint", 9, full),
    ("flush of the checkpoint", 2, broken),
    ("before the rename of the checkpoint", 2, full),
)
QUICK_POINTS = (
    "half a record",
    "after the record",
    "before the update",
    "after the update",
    "middle of the checkpoint",
)


def campaign(arguments: argparse.Namespace) -> int:
    """Runs the cases, prints the table, and says how many problems there were."""
    plan = tfdp.make_plan(tfdp.PrivacySpec.from_text(SPEC))
    plan.epsilon_bound(1)
    generator = random.Random(arguments.seed)
    export = not arguments.quick
    cases: list[Case] = []

    def new(kind: str) -> Case:
        case = Case(plan, kind, export=export)
        cases.append(case)
        print(f"{len(cases)}: {kind}", file=sys.stderr, flush=True)
        return case

    for place, nth in POINTS:
        if not arguments.quick or place in QUICK_POINTS:
            case = new(f"killed: {place}")
            if case.attempt(Fault(place, nth)) != -signal.SIGKILL:
                case.problems.append("was not killed")
            case.finish()
    for place, nth, act in FAILURES[:1] if arguments.quick else FAILURES:
        case = new(f"fails ({errno.errorcode[errno.ENOSPC if act is full else errno.EIO]}): {place}")
        if case.attempt(Fault(place, nth, act)) != 3:
            case.problems.append("did not fail")
        case.finish()
    for _ in range(arguments.random):
        case = new("killed at a random moment")
        case.random_kill(generator)
        case.finish()
    for _ in range(arguments.random // 4):
        case = new("interrupted at a random moment")
        case.random_kill(generator, signal.SIGINT)
        case.finish()
    print(table(cases))
    problems = [f"{case.kind}: {problem}" for case in cases for problem in case.problems]
    print("\n".join(problems))
    return len(problems)


def table(cases: list[Case]) -> str:
    rows: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for case in cases:
        rows[case.kind].update(cases=1, kills=case.kills, errors=case.failures, wrong=case.wrong, lost=case.lost)
    total = sum(rows.values(), collections.Counter())
    lines = ["| fault | cases | kills | errors | wrong claims | lost models |", "|---|---|---|---|---|---|"]
    for kind, row in [*rows.items(), ("all", total)]:
        lines.append(
            f"| {kind} | " + " | ".join(str(row[n]) for n in ("cases", "kills", "errors", "wrong", "lost")) + " |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--random", type=int, default=None, help="kills at random moments, 100, or 1 with --quick; Ctrl-C at a quarter"
    )
    parser.add_argument("--quick", action="store_true", help="a few cases, and no card")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments")
    chosen = parser.parse_args()
    if chosen.random is None:
        chosen.random = 1 if chosen.quick else 100
    sys.exit(1 if campaign(chosen) else 0)
