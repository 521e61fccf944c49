"""Fine-tunes a small public model privately on e-mails: one sender is one privacy unit.

    python examples/enron.py                      # ../shared/data/enron/enron_inbox_subset.tar.gz beside the repository
    python examples/enron.py maildir.tar.gz --out run-enron

How mails become units, and why:

- The unit is the sender: the address in From, in lower case; mails without a proper one are left out. What others quote
  of her is in their units, so forwarded mails are left out and quoted parts cut off: less of her is in other units
  then, and not nothing.
- All mails of a sender become one text, in the order of the archive, and its first tokens are used. One unit is then
  one record: the sampler draws senders, and a sender moves the sum of gradients by at most the clip norm, however much
  she has written.
- A mail that a sender has sent twice is taken once. Duplicates are looked for within a unit only: whether another
  sender wrote the same must not change this one's text, or the claim would not hold.
- One sender in ten is held out, by a digest of the address, for the perplexity before and after.

The spec is examples/specs/enron.yaml. Hyperparameters were not tuned on these mails.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import pathlib

from tfdp.datasets.archives import read_archive
from tfdp.datasets.mail import MailCounts, select_mails
from tfdp.errors import DataError
from tfdp.spec import PrivacySpec
from tfdp.workflow import TextRecords, TrainingResult, add_lora, plan_for, split_held_out, train_text_model

HERE = pathlib.Path(__file__).resolve().parent
ARCHIVE = HERE.parents[1] / "shared" / "data" / "enron" / "enron_inbox_subset.tar.gz"
SPEC = HERE / "specs" / "enron.yaml"
SEQUENCE_LENGTH = 128
HELD_OUT = 0.1


def read_units(path: pathlib.Path, limit: int | None = None) -> tuple[TextRecords, MailCounts]:
    """One text per sender.

    Args:
        path: an archive of mails; see `tfdp.datasets.archives`.
        limit: stop after that many mails, for trying things out.
    """
    counts = MailCounts()
    mails: dict[str, list[str]] = collections.defaultdict(list)
    for mail in select_mails(itertools.islice(read_archive(path), limit), counts):
        # Two mails may differ in what they quote alone.
        if mail.own_text not in mails[mail.sender]:
            mails[mail.sender].append(mail.own_text)
    if not mails:
        raise DataError(f"Expected mails with a sender and text in {path}. Received: none in {counts.mails} files.")
    return TextRecords(tuple("\n\n".join(texts) for texts in mails.values()), tuple(mails)), counts


def spec_for(num_units: int, *, limited: bool) -> PrivacySpec:
    """The reviewed spec; for a slice of the data, a smaller one that is there to try things out."""
    spec = PrivacySpec.from_file(SPEC)
    if not limited:
        return spec
    content = spec.to_dict()
    content["data"]["num_units"] = num_units
    content["claim"]["delta"] = min(spec.claim.delta, 0.1 / num_units)
    content["sampling"] |= {"expected_batch_size": max(1.0, num_units / 8), "steps": 4}
    return PrivacySpec.from_dict(content)


def run(
    archive: pathlib.Path,
    out: pathlib.Path,
    *,
    limit: int | None = None,
    lora_rank: int | None = 8,
    learning_rate: float = 5e-3,
    verbose: int = 1,
) -> TrainingResult:
    """The whole example."""
    from tfdp.demo.public_model import load_public_model

    records, counts = read_units(archive, limit)
    train, held_out = split_held_out(records, HELD_OUT)
    print(
        f"{counts.mails} mails: {counts.malformed.total()} without a proper sender, {counts.repeated} sent twice, "
        f"{counts.forwarded} forwarded, {counts.without_text} without text of their own. {len(train)} senders to train "
        f"on, {len(held_out)} held out.",
        flush=True,
    )
    plan = plan_for(spec_for(len(train), limited=limit is not None), len(train))
    print(
        f"{plan.steps} steps, q = {plan.sampling_probability:.4f}, noise multiplier {plan.noise_multiplier:g}: epsilon "
        f"{plan.epsilon(plan.steps):.4g} at delta {plan.delta:g} per sender.",
        flush=True,
    )
    model = load_public_model(compile=False)
    if lora_rank is not None:
        add_lora(model, lora_rank)
    return train_text_model(
        plan,
        model,
        train,
        out,
        held_out=held_out,
        sequence_length=SEQUENCE_LENGTH,
        learning_rate=learning_rate,
        details={
            "title": "Small GPT-2 fine-tuned on e-mails",
            "model_name": "public model of tfdp.demo, " + (f"LoRA {lora_rank}" if lora_rank else "all weights"),
            "deduplication_scope": "unit",
            "data_source": f"{archive.name}: Enron e-mails that were made public by an authority",
            "intended_use": "An example of private fine-tuning. The model is far too small to be of use.",
            "command": "python examples/enron.py",
        },
        verbose=verbose,
    )


def main() -> None:
    """The command line of the example."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=pathlib.Path, nargs="?", default=ARCHIVE, help="mails: folder, tar or csv")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("run-enron"), help="run directory")
    parser.add_argument("--limit", type=int, help="use the first mails only: a quick trial, under a smaller spec")
    parser.add_argument("--lora-rank", type=int, default=8, help="0 trains all weights")
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    chosen = parser.parse_args()
    result = run(
        chosen.archive,
        chosen.out,
        limit=chosen.limit,
        lora_rank=chosen.lora_rank or None,
        learning_rate=chosen.learning_rate,
    )
    assert result.before is not None
    assert result.after is not None
    print(f"\nPerplexity on {result.after.num_records} held-out senders, by token (not covered by epsilon):")
    for name, value in (("before", result.before), ("after ", result.after)):
        low, high = value.interval() or (float("nan"), float("nan"))
        between = f"(95% interval {low:.2f} to {high:.2f})"
        print(f"  {name}  {value.perplexity:8.2f}  {between}, {value.bits_per_byte:.3f} bits a byte")
    print(
        f"Epsilon {result.epsilon:.4g} at delta {result.plan.delta:g}, {result.steps} steps in {result.seconds:.0f} s."
    )
    print(f"Card: {result.paths['html']}")


if __name__ == "__main__":
    main()
