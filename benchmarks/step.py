"""One training step: without privacy, private (book-keeping), and TensorFlow Privacy's vectorized path.

All three in one process, interleaved, medians; absolute times mean little, the ratio does. Run by run.py:

    python benchmarks/step.py --train full --rounds 9            # times, as JSON
    python benchmarks/step.py --train lora --memory private     # peak memory above start of one of them, as JSON
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import keras_hub
import numpy as np
import tensorflow as tf

import tfdp
from tfdp.callback import PrivacyCallback
from tfdp.gradients.vectorized import make_vectorized_keras_optimizer_class
from tfdp.noise import GaussianNoise

VOCABULARY, LAYERS, HEADS, WIDTH, TOKENS, BATCH, RANK = 8000, 4, 4, 256, 128, 16, 8
KINDS = ("plain", "private", "vectorized")

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


@functools.cache
def benchmark_plan() -> Any:
    return tfdp.make_plan(tfdp.PrivacySpec.from_text(SPEC))


def build_model(train: str) -> Any:
    """The GPT-2 of the benchmark, all of it trainable or with LoRA on query and value."""
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=VOCABULARY,
        num_layers=LAYERS,
        num_heads=HEADS,
        hidden_dim=WIDTH,
        intermediate_dim=4 * WIDTH,
        max_sequence_length=TOKENS,
    )
    if train == "lora":
        backbone.enable_lora(RANK)
    return keras_hub.models.GPT2CausalLM(backbone=backbone, preprocessor=None)


def batch_of_sequences() -> tuple[Any, Any, Any]:
    """One batch of random tokens as (x, y, sample_weight)."""
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (BATCH, TOKENS + 1))
    x = {"token_ids": tokens[:, :-1], "padding_mask": np.ones((BATCH, TOKENS), bool)}
    return x, tokens[:, 1:], np.ones((BATCH, TOKENS), np.float32)


def compile_model(model: Any, optimizer: Any) -> None:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, weighted_metrics=[])


def plain_step(model: Any) -> Callable[[], Any]:
    """Keras's own train function on an iterator, as `fit` runs it."""
    compile_model(model, keras.optimizers.Adam(1e-4))
    model.optimizer.build(model.trainable_variables)
    iterator = iter(tf.data.Dataset.from_tensors(batch_of_sequences()).repeat().prefetch(2))
    model.make_train_function()
    return lambda: float(model.train_function(iterator)["loss"])


def private_step(model: Any) -> Callable[[], Any]:
    """A step of a private `fit`: sampler, ledger, clipping, noise, update. Every batch has 16 sequences."""
    plan = benchmark_plan()
    compile_model(model, tfdp.dp_optimizer("adam", plan, learning_rate=1e-4))
    callback = PrivacyCallback(plan, ledger=Path(tempfile.mkdtemp()) / "ledger.jsonl")
    iterator = iter(tfdp.poisson_batches(batch_of_sequences(), plan))
    callback.set_model(model)
    model.make_train_function()
    callback.on_train_begin()

    def step() -> float:
        callback.on_train_batch_begin(0)
        logs = model.train_function(iterator)
        callback.on_train_batch_end(0, {})
        return float(logs["loss"])

    return step


def vectorized_step(model: Any) -> Callable[[], Any]:
    """TensorFlow Privacy's recipe as its documentation gives it: a vector loss and the jacobian."""
    optimizer_class = make_vectorized_keras_optimizer_class(keras.optimizers.Adam)
    optimizer = optimizer_class(l2_norm_clip=1.0, noise_multiplier=1.0, num_microbatches=BATCH, learning_rate=1e-4)
    optimizer._name = "adam"  # an attribute that its code still asks for under Keras 3
    compile_model(model, keras.optimizers.Adam(1e-4))
    optimizer.build(model.trainable_variables)
    x, y, _ = tf.nest.map_structure(tf.constant, batch_of_sequences())
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


STEPS = {"plain": plain_step, "private": private_step, "vectorized": vectorized_step}


def measure_times(train: str, rounds: int) -> dict[str, Any]:
    """Medians in seconds of each kind, and of the ratios within a round, with their quartiles."""
    steps, first = {}, {}
    for kind in KINDS:
        steps[kind] = STEPS[kind](build_model(train))
        begin = time.perf_counter()
        steps[kind]()
        first[kind] = time.perf_counter() - begin
        steps[kind]()
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(rounds):
        for kind in KINDS:
            begin = time.perf_counter()
            steps[kind]()
            times[kind].append(time.perf_counter() - begin)
    ratios = [private / plain for private, plain in zip(times["private"], times["plain"], strict=True)]
    return {
        "median": {kind: statistics.median(values) for kind, values in times.items()},
        "first": first,
        "ratio": statistics.median(ratios),
        "ratio_quartiles": statistics.quantiles(ratios, n=4)[::2],
        "speedup_over_vectorized": statistics.median(
            slow / fast for slow, fast in zip(times["vectorized"], times["private"], strict=True)
        ),
        "noise_share": noise_seconds(train) / statistics.median(times["private"]),
    }


def noise_seconds(train: str) -> float:
    """Median time of adding one step's noise, all trainable variables together."""
    sums = [np.zeros(variable.shape, np.float32) for variable in build_model(train).trainable_variables]
    noise = GaussianNoise()
    times = []
    for step in range(9):
        begin = time.perf_counter()
        noise.noisy_means(sums, 1.0, 1.0, step=step)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def measure_memory(train: str, kind: str) -> dict[str, float]:
    """Peak resident memory in MiB above what the process held before the model was built."""
    benchmark_plan()  # accounting is over before training starts, whatever is trained
    gc.collect()
    start = resident_mib()
    step = STEPS[kind](build_model(train))
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
    parser.add_argument("--train", choices=("full", "lora"), default="full")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--memory", choices=KINDS)
    parser.add_argument("--traces", action="store_true")
    arguments = parser.parse_args()
    if arguments.traces:
        result: dict[str, Any] = count_traces()
    elif arguments.memory:
        result = measure_memory(arguments.train, arguments.memory)
    else:
        result = measure_times(arguments.train, arguments.rounds)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
