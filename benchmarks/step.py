"""One training step: without privacy, private (book-keeping), and TensorFlow Privacy's vectorized path.

All in one process, interleaved, medians; absolute times mean little, the ratio does. Run by run.py:

    python benchmarks/step.py --train full --rounds 9                    # times, as JSON
    python benchmarks/step.py --train lora --memory private              # peak memory above start of one of them
    python benchmarks/step.py --model bert --kinds plain private         # another model
    python benchmarks/step.py --tokens 512 --kinds private gram materialised
    python benchmarks/step.py --kinds private users                      # 16 units, and 4 units of 4 records
    python benchmarks/step.py --kinds gradients logical                  # 16 microbatches: bare, and as a step of a fit
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import json
import os
import resource
import statistics
import tempfile
import time
import unittest.mock
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import keras_hub
import numpy as np
import tensorflow as tf
from peers.protocol import BATCH, HEADS, LAYERS, RANK, TOKENS, VOCABULARY, WIDTH

import tfdp
from tfdp.callback import PrivacyCallback
from tfdp.gradients import sums_function
from tfdp.gradients.uses import Outer
from tfdp.gradients.vectorized import make_vectorized_keras_optimizer_class
from tfdp.noise import GaussianNoise

KINDS = ("plain", "private", "vectorized")
MICROBATCHES = 16  # of the kinds "gradients" and "logical"

SPEC = """
schema_version: "1.0"
claim:
  epsilon: 8.0
  delta: 1.0e-3
  adjacency: add_or_remove_one
  privacy_unit: {kind: example, description: one sequence}
  data_accesses: [training]
data: {num_units: 16, size_is_public: true, deduplication: none}
mechanism: {clip_norm: 1.0, noise_multiplier: 100.0}
sampling: {scheme: full_batch, expected_batch_size: 16, steps: 1000, microbatch_size: 16}
accountant: {name: pld}
"""


# The same sixteen records, four to a unit.
USERS = (
    SPEC.replace(
        "{kind: example, description: one sequence}",
        "{kind: user, description: a writer, id_field: id, max_records_per_unit: 4, selection: random, "
        "method: user_wise_dp_sgd}",
    )
    .replace("num_units: 16,", "num_units: 4, num_records: 16,")
    .replace("batch_size: 16,", "batch_size: 4,")
    .replace("microbatch_size: 16", "microbatch_size: 4")
)


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is trained, and how."""

    model: str = "gpt2"
    train: str = "full"
    tokens: int = TOKENS
    xla: bool = False


@functools.cache
def benchmark_plan(text: str = SPEC) -> Any:
    return tfdp.make_plan(tfdp.PrivacySpec.from_text(text))


def build_model(setting: Setting) -> Any:
    """The model of the benchmark, all of it trainable or with LoRA on query and value."""
    shape = {"vocabulary_size": VOCABULARY, "num_layers": LAYERS, "hidden_dim": WIDTH, "intermediate_dim": 4 * WIDTH}
    models = keras_hub.models
    if setting.model == "llama":
        backbone = models.LlamaBackbone(**shape, num_query_heads=HEADS, num_key_value_heads=HEADS // 2)
    elif setting.model == "bert":
        backbone = models.BertBackbone(**shape, num_heads=HEADS, max_sequence_length=setting.tokens)
    else:
        backbone = models.GPT2Backbone(**shape, num_heads=HEADS, max_sequence_length=setting.tokens)
    if setting.train == "lora":
        backbone.enable_lora(RANK)
    if setting.model == "bert":
        return models.BertTextClassifier(backbone=backbone, num_classes=2, preprocessor=None)
    task = models.LlamaCausalLM if setting.model == "llama" else models.GPT2CausalLM
    return task(backbone=backbone, preprocessor=None)


def batch_of_sequences(setting: Setting) -> tuple[Any, Any, Any]:
    """One batch of random tokens as (x, y, sample_weight)."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCABULARY, (BATCH, setting.tokens + 1))
    x = {"token_ids": tokens[:, :-1], "padding_mask": np.ones((BATCH, setting.tokens), bool)}
    if setting.model == "bert":
        x["segment_ids"] = np.zeros((BATCH, setting.tokens), np.int32)
        return x, rng.integers(0, 2, BATCH), np.ones(BATCH, np.float32)
    return x, tokens[:, 1:], np.ones((BATCH, setting.tokens), np.float32)


def compile_model(model: Any, optimizer: Any, xla: bool = False) -> None:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, weighted_metrics=[], jit_compile=xla)


def plain_step(setting: Setting) -> Callable[[], Any]:
    """Keras's own train function on an iterator, as `fit` runs it."""
    model = build_model(setting)
    compile_model(model, keras.optimizers.Adam(1e-4), setting.xla)
    model.optimizer.build(model.trainable_variables)
    iterator = iter(tf.data.Dataset.from_tensors(batch_of_sequences(setting)).repeat().prefetch(2))
    model.make_train_function()
    return lambda: float(model.train_function(iterator)["loss"])


def private_step(setting: Setting, text: str = SPEC) -> Callable[[], Any]:
    """A step of a private `fit`: sampler, ledger, clipping, noise, update. Every microbatch has 16 sequences."""
    plan, model = benchmark_plan(text), build_model(setting)
    compile_model(model, tfdp.dp_optimizer("adam", plan, learning_rate=1e-4))
    callback = PrivacyCallback(plan, ledger=Path(tempfile.mkdtemp()) / "ledger.jsonl", jit_compile=setting.xla)
    records = batch_of_sequences(setting)
    repeats = plan.num_units * plan.records_per_unit // BATCH
    records = tf.nest.map_structure(lambda leaf: np.concatenate([leaf] * repeats), records)
    ids = np.repeat(np.arange(plan.num_units), plan.records_per_unit) if plan.records_per_unit > 1 else None
    iterator = iter(tfdp.poisson_batches(records, plan, unit_ids=ids))
    callback.set_model(model)
    model.make_train_function()
    callback.on_train_begin()

    def step() -> float:
        callback.on_train_batch_begin(0)
        logs = model.train_function(iterator)
        callback.on_train_batch_end(0, {})
        return float(logs["loss"])

    return step


def logical_step(setting: Setting) -> Callable[[], Any]:
    """`private_step` with many microbatches."""
    size = str(BATCH * MICROBATCHES)
    text = SPEC.replace("num_units: 16", f"num_units: {size}").replace("batch_size: 16,", f"batch_size: {size},")
    return private_step(setting, text)


def gradients_step(setting: Setting) -> Callable[[], Any]:
    """Clipped gradients of as many microbatches, and nothing else of a step."""
    model = build_model(setting)
    compile_model(model, "adam")
    batch = tf.nest.map_structure(tf.constant, batch_of_sequences(setting))

    @tf.function(autograph=False, jit_compile=setting.xla)
    def microbatch() -> Any:
        return sums_function("bookkeeping", False)(model, *batch, tf.ones(BATCH), 1.0, None)[0]

    def step() -> None:
        for _ in range(MICROBATCHES):
            microbatch()[0].numpy()

    return step


def forced_step(setting: Setting, materialise: bool) -> Callable[[], Any]:
    """`private_step` with one form of the norms, where book-keeping would choose between them."""
    with unittest.mock.patch.multiple(Outer, materialise_is_cheaper=materialise, is_formed_in_turn=False):
        step = private_step(setting)
        step()  # traced with it
    return step


def vectorized_step(setting: Setting) -> Callable[[], Any]:
    """TensorFlow Privacy's recipe as its documentation gives it: a vector loss and the jacobian."""
    model = build_model(setting)
    optimizer_class = make_vectorized_keras_optimizer_class(keras.optimizers.Adam)
    optimizer = optimizer_class(l2_norm_clip=1.0, noise_multiplier=1.0, num_microbatches=BATCH, learning_rate=1e-4)
    optimizer._name = "adam"  # an attribute that its code still asks for under Keras 3
    compile_model(model, keras.optimizers.Adam(1e-4))
    optimizer.build(model.trainable_variables)
    x, y, _ = tf.nest.map_structure(tf.constant, batch_of_sequences(setting))
    variables = [variable.value for variable in model.trainable_variables]

    def run() -> Any:
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            losses = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits), axis=-1)
        pairs = optimizer._compute_gradients(losses, variables, tape=tape)
        keras.optimizers.Adam.apply(optimizer, [gradient for gradient, _ in pairs], model.trainable_variables)
        return tf.reduce_mean(losses)

    step = tf.function(run)
    return lambda: float(step())


STEPS: dict[str, Callable[[Setting], Callable[[], Any]]] = {
    "plain": plain_step,
    "private": private_step,
    "vectorized": vectorized_step,
    "gram": functools.partial(forced_step, materialise=False),
    "materialised": functools.partial(forced_step, materialise=True),
    "users": functools.partial(private_step, text=USERS),
    "gradients": gradients_step,
    "logical": logical_step,
}


def measure_times(setting: Setting, kinds: Sequence[str], rounds: int) -> dict[str, Any]:
    """Medians in seconds of each kind, and of the ratios to the first kind within a round, with their quartiles."""
    steps, first = {}, {}
    for kind in kinds:
        steps[kind] = STEPS[kind](setting)
        begin = time.perf_counter()
        steps[kind]()
        first[kind] = time.perf_counter() - begin
        steps[kind]()
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for kind in kinds:
            begin = time.perf_counter()
            steps[kind]()
            times[kind].append(time.perf_counter() - begin)
    ratios = {
        kind: [time / base for time, base in zip(times[kind], times[kinds[0]], strict=True)] for kind in kinds[1:]
    }
    found: dict[str, Any] = {
        "median": {kind: statistics.median(values) for kind, values in times.items()},
        "first": first,
        "ratio": {kind: statistics.median(values) for kind, values in ratios.items()},
        "quartiles": {kind: statistics.quantiles(values, n=4)[::2] for kind, values in ratios.items()},
    }
    if "private" in kinds:
        found["noise_share"] = noise_seconds(setting) / found["median"]["private"]
    return found


def noise_seconds(setting: Setting) -> float:
    """Median time of adding one step's noise, all trainable variables together."""
    sums = [np.zeros(variable.shape, np.float32) for variable in build_model(setting).trainable_variables]
    noise = GaussianNoise()
    times = []
    for step in range(9):
        begin = time.perf_counter()
        noise.noisy_means(sums, 1.0, 1.0, step=step)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def measure_memory(setting: Setting, kind: str) -> dict[str, float]:
    """Peak resident memory in MiB above what the process held before the model was built."""
    benchmark_plan()  # accounting is over before training starts, whatever is trained
    gc.collect()
    start = resident_mib()
    step = STEPS[kind](setting)
    for _ in range(3):
        step()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"peak_mib": peak - start}


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def count_traces() -> dict[str, int]:
    """How often a fit whose batches have 0 to many microbatches traces its step."""
    spec = SPEC.replace("num_units: 16,", "num_units: 64,").replace("full_batch", "poisson").replace("1000", "20")
    spec = spec.replace("microbatch_size: 16", "microbatch_size: 4")
    plan = tfdp.make_plan(tfdp.PrivacySpec.from_text(spec))
    tokens = np.random.default_rng(0).integers(0, 50, (64, 9))
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=50, num_layers=1, num_heads=2, hidden_dim=8, intermediate_dim=16, max_sequence_length=8
    )
    model = keras_hub.models.GPT2CausalLM(backbone=backbone, preprocessor=None)
    compile_model(model, tfdp.dp_optimizer("adam", plan, learning_rate=1e-4))
    callback = PrivacyCallback(plan, ledger=Path(tempfile.mkdtemp()) / "ledger.jsonl")
    model.fit(
        tfdp.poisson_batches(tokens, plan),
        epochs=plan.epochs,
        steps_per_epoch=plan.steps_per_epoch,
        callbacks=[callback],
        shuffle=False,
        verbose=0,
    )
    return {"steps": callback.steps, "traces": callback.traces}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("gpt2", "bert", "llama"), default="gpt2")
    parser.add_argument("--train", choices=("full", "lora"), default="full")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--xla", action="store_true")
    parser.add_argument("--kinds", nargs="+", choices=STEPS, default=KINDS)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--memory", choices=STEPS)
    parser.add_argument("--traces", action="store_true")
    arguments = parser.parse_args()
    setting = Setting(arguments.model, arguments.train, arguments.tokens, arguments.xla)
    if arguments.traces:
        result: dict[str, Any] = count_traces()
    elif arguments.memory:
        result = measure_memory(setting, arguments.memory)
    else:
        result = measure_times(setting, arguments.kinds, arguments.rounds)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
