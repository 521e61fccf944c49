"""The demo: a small public GPT-2 learns to write docstrings, once without privacy and once with it, side by side."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfdp.demo.corpus import Docstring, private_docstrings, split
from tfdp.demo.public_model import SEQUENCE_LENGTH, load_public_model
from tfdp.evaluation import Perplexity, perplexity
from tfdp.files import atomic_write_text
from tfdp.plan import Plan
from tfdp.spec import PrivacySpec
from tfdp.workflow import TextRecords, TrainingResult, add_lora, encode_texts, plan_for, train_arrays
from tfdp.workflow.run_record import DataSource, ModelSource, start_record
from tfdp.workflow.twin import check_new_twin, plain_fit, save_twin

LORA_RANK = 8
OPTIMIZER, LEARNING_RATE = "adamw", 5e-3
SPEC_FILE = "privacy.yaml"

_SPEC = """\
# Written by `tfdp demo`. num_units depends on the Python whose docstrings are read; everything else is fixed.
schema_version: "1.0"
claim:
  epsilon: 8.0
  delta: 1.0e-5
  adjacency: add_or_remove_one
  privacy_unit:
    kind: example
    description: one docstring of the Python standard library
  data_accesses: [training]
data:
  num_units: {num_units}
  size_is_public: true
  deduplication: exact
mechanism:
  clip_norm: 1.0
sampling:
  scheme: poisson
  expected_batch_size: 256
  steps: {steps}
  microbatch_size: 16
accountant:
  name: pld
tuning:
  kind: private   # learning rate and number of steps were tried out on these docstrings while the demo was written
  trials: 3
  accounted: false
"""


@dataclasses.dataclass(frozen=True)
class DemoResult:
    """Perplexities on the same held-out docstrings, and what the private run cost.

    Attributes:
        public: the model as shipped.
        non_private, private: after the same number of steps of the same size.
        non_private_seconds: of that fit.
        training: the private job, with its plan, time and paths.
    """

    public: Perplexity
    non_private: Perplexity
    private: Perplexity
    non_private_seconds: float
    training: TrainingResult


def demo_plan(num_units: int, steps: int, directory: Path) -> Plan:
    """Writes the demo's spec into `directory` and makes its plan, as `tfdp train` would from a reviewed file."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / SPEC_FILE
    atomic_write_text(path, _SPEC.format(num_units=num_units, steps=steps))
    return plan_for(PrivacySpec.from_file(path), num_units)


def text_records(docstrings: Sequence[Docstring]) -> TextRecords:
    """Docstrings as records, grouped by the package that they stand in."""
    return TextRecords(
        tuple(docstring.text for docstring in docstrings),
        groups=tuple(docstring.unit_id.split(":")[0].split(".")[0] for docstring in docstrings),
    )


def demo_records(most_units: int | None = None) -> tuple[TextRecords, TextRecords]:
    """`(members, non-members)` of a demo: what it trained on, and what it held out."""
    docstrings = split(private_docstrings())
    return text_records(docstrings.train[:most_units]), text_records(docstrings.held_out[:most_units])


def fresh_directory(path: str | os.PathLike[str]) -> Path:
    """`path`, or where it holds a run already, `path-2`, `path-3`, ...: a run is not overwritten."""
    path = Path(path)
    number = 1
    while path.exists() and any(path.iterdir()):
        number += 1
        path = path.with_name(f"{path.name.removesuffix(f'-{number - 1}')}-{number}")
    return path


def run_demo(
    directory: str | os.PathLike[str],
    *,
    steps: int,
    twin: str | os.PathLike[str] | None = None,
    max_units: int | None = None,
    say: Any = print,
    verbose: int = 1,
) -> DemoResult:
    """Runs the whole demo and writes model, ledger and card into `directory`.

    Args:
        directory: a new one; a run is not overwritten.
        steps: of each of the two fits.
        twin: a new directory for the model that is trained without privacy, to attack it beside the private one; None
            forgets it.
        max_units: use only the first docstrings (for tests); None for all.
        say: is called with each line of the story.
        verbose: of Keras.
    """
    directory = Path(directory)
    if twin is not None:
        check_new_twin(twin)
    docstrings = split(private_docstrings())
    train, held_out = docstrings.train[:max_units], docstrings.held_out[:max_units]
    say(f"{len(train)} docstrings of Python's standard library are the private data, {len(held_out)} are held out.")
    plan = demo_plan(len(train), steps, directory)
    say(
        f"The plan: {plan.steps} steps, each docstring joins each with probability {plan.sampling_probability:.4f}, "
        f"noise multiplier {plan.noise_multiplier:.3f}, epsilon {plan.epsilon(plan.steps):.3f} at delta {plan.delta:g}."
    )
    start_record(
        directory,
        data=DataSource(kind="demo", most_units=max_units),
        model=ModelSource(
            name="gpt2:demo",
            lora_rank=LORA_RANK,
            sequence_length=SEQUENCE_LENGTH,
            optimizer=OPTIMIZER,
            learning_rate=LEARNING_RATE,
        ),
        members=text_records(train),
        non_members=text_records(held_out),
    )
    public_model = load_public_model(compile=False)
    records = encode_texts(public_model, [docstring.text for docstring in train], SEQUENCE_LENGTH)
    unseen = encode_texts(public_model, [docstring.text for docstring in held_out], SEQUENCE_LENGTH)
    public = perplexity(public_model, unseen)
    say(f"The public model, trained on Python's help topics only: perplexity {public.perplexity:.1f}.")

    say("Without privacy:")
    model = load_public_model(compile=False)
    add_lora(model, LORA_RANK)
    non_private_seconds = plain_fit(
        model,
        records,
        steps=plan.steps,
        batch_size=round(plan.expected_batch_size),
        optimizer=OPTIMIZER,
        learning_rate=LEARNING_RATE,
        verbose=verbose,
    )
    non_private = perplexity(model, unseen)
    if twin is not None:
        save_twin(model, twin)

    say("With privacy, under the same number of steps and the same expected batch:")
    model = load_public_model(compile=False)
    add_lora(model, LORA_RANK)
    training = train_arrays(
        plan,
        model,
        records,
        directory,
        held_out=unseen,
        non_private=non_private,
        optimizer=OPTIMIZER,
        learning_rate=LEARNING_RATE,
        details={
            "title": "Small GPT-2, fine-tuned privately on Python docstrings",
            "model_name": f"GPT-2 with {public_model.count_params():,} weights, LoRA of rank {LORA_RANK}",
            "data_source": "docstrings of the Python standard library, as installed; they stand in for private text",
            "intended_use": "Shows what tfdp does from spec to card. Not for any other use.",
            "licence": "Apache-2.0; the docstrings are under the Python Software Foundation License",
            "command": "tfdp demo",
            "timings": {"fit without privacy": round(non_private_seconds, 1)},
        },
        verbose=verbose,
    )
    assert training.after is not None
    return DemoResult(public, non_private, training.after, non_private_seconds, training)
