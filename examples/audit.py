"""Trains a model with and without privacy on the same docstrings and canaries, and attacks both.

    python examples/audit.py --out audit-run/

The data are those of `tfdp demo`: docstrings of Python's standard library. Few of them, and many epochs, so that the
model without privacy learns its data by heart; the private one gets as many steps. The card of the private model then
shows both side by side: audit-run/run/MODEL_CARD.html. About six minutes on two idle cores. One run found, with 95%
intervals:

                                        without privacy           epsilon 8
    AUC of the loss, 504 and 496 units  0.9996 (0.998 to 1.000)   0.546 (0.511 to 0.582)
    mean exposure of 35 canaries        10.0 bits, the most       1.87 bits (by chance 1.00 to 1.94)
    epsilon is at least                 2.05                      0
    completed word for word, of 200     195 (94% to 99%)          0 (0% to 1.8%)
    perplexity held out, 314.5 before   not measured              131.8 (123.6 to 140.4)

Adapters of rank 8 (`--lora-rank 8 --learning-rate 5e-3`) learned docstrings by heart, too, but not the secrets:
exposure stayed near 2 bits in up to 60 epochs. In `tfdp demo` itself an adapter sees each of 6,445 docstrings twice,
and even without privacy gives nobody away: the AUC is 0.506 (0.481 to 0.531).
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys

from tfdp.cli import main as tfdp
from tfdp.demo.corpus import private_docstrings
from tfdp.workflow import TextRecords, split_held_out

_SPEC = """\
schema_version: "1.0"
claim:
  epsilon: {epsilon}
  delta: 1.0e-4
  adjacency: add_or_remove_one
  privacy_unit: {{kind: example, description: one docstring of the Python standard library}}
  data_accesses: [training]
data: {{num_units: {units}, size_is_public: true, deduplication: exact}}
mechanism: {{clip_norm: 1.0}}
sampling: {{scheme: poisson, expected_batch_size: {batch}, steps: {steps}, microbatch_size: 32}}
accountant: {{name: pld}}
tuning: {{kind: private, trials: 4, accounted: false}}  # tried out on these docstrings while this was written
evaluation: {{group_field: package, min_group_size: 20}}
"""
_HOLDOUT = 0.5
# Forty digits: the longer the secret, the more of the loss is memory of it.
_PATTERN = "The access code is " + " ".join(["#####"] * 8) + "."


def main() -> None:
    """Writes data and spec, then calls the commands that a user would."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("audit-run"))
    parser.add_argument("--docstrings", type=int, default=1000, help="half of them are trained on")
    parser.add_argument("--canaries", type=int, default=80, help="half of them get in")
    parser.add_argument("--epochs", type=int, default=30, help="of both trainings")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--lora-rank", type=int, default=0, help="0 trains all weights")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=False)

    docstrings = private_docstrings()
    chosen = docstrings[:: max(1, len(docstrings) // options.docstrings)][: options.docstrings]
    data, spec = options.out / "docstrings.jsonl", options.out / "privacy.yaml"
    rows = [{"text": each.text, "package": each.unit_id.split(":")[0].split(".")[0]} for each in chosen]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    members, _ = split_held_out(TextRecords(tuple(row["text"] for row in rows)), _HOLDOUT)
    units = len(members) + options.canaries
    steps = round(options.epochs * units / options.batch)
    spec.write_text(_SPEC.format(epsilon=options.epsilon, units=units, batch=options.batch, steps=steps))

    run, twin = options.out / "run", options.out / "twin"
    lora = ["--lora-rank", options.lora_rank] if options.lora_rank else []
    _call(
        "train", "--spec", spec, "--data", data, "--model", "gpt2:demo", "--out", run, "--holdout", _HOLDOUT,
        "--sequence-length", 100, "--learning-rate", options.learning_rate, "--canaries", options.canaries,
        "--canary-pattern", _PATTERN, *lora,
    )  # fmt: skip
    _call("twin", run, "--out", twin)
    _call("audit", run, "--against", twin)


def _call(*arguments: object) -> None:
    try:
        tfdp([str(argument) for argument in arguments])
    except SystemExit as done:
        if done.code:
            sys.exit(done.code)


if __name__ == "__main__":
    main()
