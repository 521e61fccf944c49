"""Group privacy against user-wise DP-SGD on e-mails: the comparison of Chua et al. (2024), small enough for two cores.

    python examples/mind_the_privacy_unit.py        # needs ../shared/data beside the repository: mails and stories260K
    python examples/mind_the_privacy_unit.py maildir.tar.gz --model stories260K/ --out run-unit

The privacy unit is the sender of a mail. A public model (stories260K) gets LoRA adapters and learns to write mails at
epsilon 1, 3 and 8, with at most 2, 5 or 10 records of a sender, three times each:

- Group privacy samples and clips mails one by one, the k longest of a sender, and accounts for k of them at once.
- User-wise DP-SGD samples senders; each gives a span of k * LENGTH tokens that begins somewhere new every time, and the
  mean gradient of the span is clipped.

Both sample as many items a step, mails or senders, and take as many steps. What it found is told in
mind_the_privacy_unit.md. Stopped, it goes on at the first run that is missing when it is started again.

Sampling and noise take no seed, so a run cannot be repeated exactly: "seed" is that of the adapters. Each run is a
release of its own, and all of them together cost what they add up to.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import enron
import stories260k

from tfdp.data import UnitMap, save_figure
from tfdp.datasets.archives import read_archive
from tfdp.datasets.mail import MailCounts, select_mails
from tfdp.errors import DataError
from tfdp.evaluation import perplexity
from tfdp.files import atomic_write_text
from tfdp.ledger import read_ledger
from tfdp.sampling.records import as_records
from tfdp.spec import PrivacySpec
from tfdp.workflow import TextRecords, add_lora, plan_for, private_fit, split_held_out

MODEL = enron.ARCHIVE.parents[1] / "models" / "stories260K"
SELECTION = {"group_privacy": "longest", "user_wise_dp_sgd": "random_chunk"}
NAMES = {"group_privacy": "group privacy", "user_wise_dp_sgd": "user-wise DP-SGD"}
PUBLIC, NON_PRIVATE = "public", "non_private"
EPSILONS, KS, SEEDS = (1.0, 3.0, 8.0), (2, 5, 10), (0, 1, 2)

# Chosen on other text (see mind_the_privacy_unit.md), none of it by looking at these mails.
BATCH, STEPS, LENGTH = 128, 40, 32
LORA_RANK, LEARNING_RATE = 4, 1e-2
EVALUATED = 128  # tokens of each held-out mail


@dataclasses.dataclass(frozen=True)
class Run:
    """One training: `epsilon` and `k` are None for the two references."""

    method: str
    epsilon: float | None = None
    k: int | None = None
    seed: int = 0

    @property
    def name(self) -> str:
        parts = [self.method] if self.k is None else [self.method, f"k{self.k}", f"epsilon{self.epsilon:g}"]
        return "-".join([*parts, f"seed{self.seed}"])


def all_runs(epsilons: Sequence[float], ks: Sequence[int], seeds: Sequence[int]) -> list[Run]:
    """References first, then seed by seed, so that an unfinished table has every cell early."""
    runs = [Run(PUBLIC), *(Run(NON_PRIVATE, seed=seed) for seed in seeds)]
    return runs + [Run(method, e, k, seed) for seed in seeds for e in epsilons for k in ks for method in SELECTION]


@dataclasses.dataclass(frozen=True)
class Mails:
    """Mails as tokens, and whose they are."""

    tokens: list[np.ndarray] = dataclasses.field(repr=False)
    senders: tuple[str, ...] = dataclasses.field(repr=False)
    held_out: list[np.ndarray] = dataclasses.field(repr=False)
    limited: bool

    @property
    def units(self) -> UnitMap:
        return UnitMap.from_ids(self.senders)


def read_mails(archive: pathlib.Path, tokenizer: stories260k.Tokenizer, limit: int | None = None) -> Mails:
    """One record per mail: a sender's own words, without what she forwards, quotes or has sent before."""
    mails = select_mails(itertools.islice(read_archive(archive), limit), MailCounts())
    pairs = list(dict.fromkeys((mail.sender, mail.own_text) for mail in mails))
    train, held_out = split_held_out(TextRecords(tuple(text for _, text in pairs), tuple(who for who, _ in pairs)))
    if train.unit_ids is None or not len(held_out):
        raise DataError(f"Expected mails to train on and to hold out. Received: {len(pairs)} in all. Use more of them.")
    encode = tokenizer.encode
    return Mails(
        [np.array(encode(text), np.int32) for text in train.texts],
        train.unit_ids,
        [np.array(encode(text)[: EVALUATED + 1], np.int32) for text in held_out.texts],
        limit is not None,
    )


def spec_for(run: Run, mails: Mails) -> PrivacySpec:
    """The spec of one private run; on a slice of the mails, a smaller one to try things out."""
    units = mails.units
    records = int(np.minimum(units.counts, run.k or 1).sum())
    batch, steps = (max(1.0, units.num_units / 8), 2) if mails.limited else (float(BATCH), STEPS)
    unit = {
        "kind": "user",
        "description": "all mails sent from one address, without what they quote or forward",
        "id_field": "from",
        "max_records_per_unit": run.k,
        "method": run.method,
        "selection": SELECTION[run.method],
    }
    return PrivacySpec.from_dict(
        {
            "schema_version": "1.0",
            "claim": {
                "epsilon": run.epsilon,
                "delta": 1e-5,
                "adjacency": "add_or_remove_one",
                "privacy_unit": unit,
                "data_accesses": ["training"],
            },
            "data": {
                "num_units": units.num_units,
                # The number that q is computed from, rounded: it need not follow one sender more or less.
                "num_records": round(records, -2 if records > 1000 else None)
                if run.method == "group_privacy"
                else None,
                "size_is_public": True,
                "deduplication": "exact",
            },
            "mechanism": {"clip_norm": 1.0},
            "sampling": {"scheme": "poisson", "expected_batch_size": batch, "steps": steps, "microbatch_size": 16},
            "tuning": {"kind": "public"},
        }
    )


def new_model(folder: pathlib.Path, seed: int) -> Any:
    """The public model with new adapters. A model that was trained under one ledger is not reset for another."""
    import keras

    keras.utils.set_random_seed(seed)
    model, _ = stories260k.load(folder / "stories260K.bin", folder / "tok512.bin")
    add_lora(model, LORA_RANK)
    return model


def train(run: Run, model: Any, mails: Mails, ledgers: pathlib.Path) -> dict[str, float]:
    """Trains `model` privately; returns what the ledger says that it has cost."""
    plan = plan_for(spec_for(run, mails), mails.units.num_units)
    # A run that was killed has spent its steps: its ledger stays, and the run begins anew under another.
    ledger = ledgers / f"{run.name}-{len(list(ledgers.glob(f'{run.name}-*.jsonl')))}.jsonl"
    private_fit(
        model,
        plan,
        mails.tokens,
        ledger=ledger,
        batch_options={"unit_ids": mails.senders, "sequence_length": LENGTH, "separator": stories260k.END},
        learning_rate=LEARNING_RATE,
        verbose=0,
    )
    steps = read_ledger(ledger).steps
    return {"sigma": plan.noise_multiplier, "batch": plan.expected_batch_size, "spent": plan.epsilon(steps)}


def train_without_privacy(model: Any, mails: Mails) -> dict[str, float]:
    """As many steps on all text, in pieces, with as many pieces a step as k = 10 has at most."""
    import keras
    import tensorflow as tf

    pieces = [text[at : at + LENGTH + 1] for text in mails.tokens for at in range(0, len(text) - 1, LENGTH)]
    taken = as_records(pieces, sequence_length=LENGTH).take(np.arange(len(pieces)))
    arrays = (taken["x"], taken["y"], taken["sample_weight"])
    batch, steps = (64, 2) if mails.limited else (BATCH * KS[-1], STEPS)
    data = tf.data.Dataset.from_tensor_slices(arrays).shuffle(len(pieces)).repeat().batch(batch)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight")
    model.compile(optimizer=keras.optimizers.AdamW(LEARNING_RATE), loss=loss, weighted_metrics=[])
    model.fit(data, steps_per_epoch=steps, shuffle=False, verbose=0)
    return {}


def do(run: Run, folder: pathlib.Path, mails: Mails, ledgers: pathlib.Path) -> dict[str, Any]:
    """One run: trains, and measures the held-out mails."""
    began = time.monotonic()
    model = new_model(folder, run.seed)
    facts: dict[str, float] = {}
    if run.method == NON_PRIVATE:
        facts = train_without_privacy(model, mails)
    elif run.method != PUBLIC:
        facts = train(run, model, mails, ledgers)
    reached = perplexity(model, mails.held_out, batch_size=128).perplexity
    return {**dataclasses.asdict(run), "perplexity": reached, "seconds": round(time.monotonic() - began, 1), **facts}


def run_all(archive: pathlib.Path, folder: pathlib.Path, out: pathlib.Path, runs: list[Run], limit: int | None) -> str:
    """Does what is missing in `out`, and writes table and plot; returns the table."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    ledgers, path = out / "ledgers", out / "results.jsonl"
    ledgers.mkdir(parents=True, exist_ok=True)
    settings = [archive.name, limit, BATCH, STEPS, LENGTH, LORA_RANK, LEARNING_RATE, EVALUATED]
    results = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if any(result["settings"] != settings for result in results):
        raise DataError(f"Expected results of the same settings in {path}. Received: others. Choose another --out.")
    done = {Run(*(result[field.name] for field in dataclasses.fields(Run))) for result in results}
    mails = read_mails(archive, stories260k.Tokenizer.from_file(folder / "tok512.bin"), limit)
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, speed_estimate_period=3600) as progress:
        progress.console.print(
            f"{len(mails.tokens):,} mails of {mails.units.num_units:,} senders; {len(mails.held_out):,} mails held out"
        )
        task = progress.add_task("", total=len(runs), completed=len(done))
        for run in runs:
            if run in done:
                continue
            progress.update(task, description=run.name)
            results.append({**do(run, folder, mails, ledgers), "settings": settings})
            atomic_write_text(path, "".join(json.dumps(result) + "\n" for result in results))
            progress.console.print(f"{run.name}: perplexity {results[-1]['perplexity']:.2f}")
            progress.advance(task)
    written = table(results)
    atomic_write_text(out / "table.md", written)
    for ending in ("png", "svg"):
        plot(results, out / f"perplexity.{ending}")
    return written


def reached(results: list[dict[str, Any]], method: str, epsilon: Any = None, k: Any = None) -> np.ndarray:
    """[seeds] perplexities of one cell."""
    wanted = {"method": method, "epsilon": epsilon, "k": k}
    return np.array([each["perplexity"] for each in results if wanted.items() <= each.items()])


def values_of(results: list[dict[str, Any]], field: str) -> list[Any]:
    """The epsilons, or the values of k, in ascending order."""
    return sorted({each[field] for each in results} - {None})


def shown(values: np.ndarray) -> str:
    """Mean and standard deviation over seeds."""
    if not len(values):
        return "to come"
    return f"{values.mean():.2f} ± {values.std(ddof=1):.2f}" if len(values) > 1 else f"{values.mean():.2f}"


def table(results: list[dict[str, Any]]) -> str:
    """Perplexity on held-out senders, as Markdown."""
    lines = [f"| epsilon | k | {' | sigma | '.join(NAMES.values())} | sigma |", "|---|---|---|---|---|---|"]
    sigmas = {(each["method"], each["epsilon"], each["k"]): f"{each.get('sigma', 0):.3g}" for each in results}
    for epsilon in values_of(results, "epsilon"):
        for k in values_of(results, "k"):
            cells = [(shown(reached(results, m, epsilon, k)), sigmas.get((m, epsilon, k), "")) for m in SELECTION]
            lines.append(f"| {epsilon:g} | {k} | " + " | ".join(" | ".join(cell) for cell in cells) + " |")
    references = ", ".join(f"{name}: {shown(reached(results, name))}" for name in (PUBLIC, NON_PRIVATE))
    return "\n".join([*lines, "", f"References: {references.replace('_', '-')}.", ""])


def plot(results: list[dict[str, Any]], path: pathlib.Path) -> None:
    """One panel for each epsilon: perplexity against k, mean and range over seeds."""
    from matplotlib.figure import Figure

    epsilons, ks = values_of(results, "epsilon"), values_of(results, "k")
    figure = Figure(figsize=(3.4 * len(epsilons) + 1, 3.8), layout="constrained")
    panels = np.atleast_1d(figure.subplots(1, len(epsilons), sharey=True))
    for axes, epsilon in zip(panels, epsilons, strict=True):
        for place, (method, style) in enumerate(zip(SELECTION, ("o-", "s--"), strict=True)):
            cells = {at: values for at, k in enumerate(ks) if len(values := reached(results, method, epsilon, k))}
            spread = np.array([(np.mean(v), np.min(v), np.max(v)) for v in cells.values()]).reshape(-1, 3).T
            axes.errorbar(
                np.array(list(cells)) + 0.06 * (2 * place - 1),
                spread[0],
                yerr=[spread[0] - spread[1], spread[2] - spread[0]],
                fmt=style,
                capsize=3,
                label=f"{NAMES[method]}, {SELECTION[method].replace('_', ' ')}",
            )
        label = f"trained without privacy (before training: {reached(results, PUBLIC).mean():.0f})"
        axes.axhline(reached(results, NON_PRIVATE).mean(), color="grey", linestyle=":", label=label)
        axes.set(title=f"epsilon {epsilon:g}", xlabel="k, records of a sender")
        axes.set_xticks(range(len(ks)), ks)
    panels[0].set(ylabel="perplexity on held-out senders")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(panels), fontsize="small")
    save_figure(figure, path)


def main() -> None:
    """The command line of the example."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "archive", type=pathlib.Path, nargs="?", default=enron.ARCHIVE, help="mails: folder, tar or csv"
    )
    parser.add_argument("--model", type=pathlib.Path, default=MODEL, help="folder with stories260K.bin and tok512.bin")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("run-unit"), help="results, table and plot")
    parser.add_argument("--limit", type=int, help="the first mails only, two steps a run: a quick trial")
    chosen = parser.parse_args()
    runs = all_runs(EPSILONS, KS, SEEDS)
    print(run_all(chosen.archive, chosen.model, chosen.out, runs, chosen.limit))
    print(f"Perplexity on held-out senders, which no epsilon covers. Plot: {chosen.out / 'perplexity.png'}")


if __name__ == "__main__":
    main()
