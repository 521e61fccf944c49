"""Fine-tunes a small public model privately on e-mails: one sender is one privacy unit.

    python examples/enron.py                      # ../shared/data/enron/enron_inbox_subset.tar.gz beside the repository
    python examples/enron.py maildir.tar.gz --out run-enron

How mails become units, and why:

- The unit is the sender: the address in From, in lower case. What others quote of her is in their units, so quoted and
  forwarded parts are cut off before anything else; that leaves less of her in other units, not nothing.
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
import dataclasses
import email
import email.message
import email.policy
import email.utils
import pathlib
import re
import tarfile
from collections.abc import Iterator

from tfdp.errors import DataError
from tfdp.spec import PrivacySpec
from tfdp.workflow import TextRecords, TrainingResult, add_lora, plan_for, split_held_out, train_text_model

HERE = pathlib.Path(__file__).resolve().parent
ARCHIVE = HERE.parents[1] / "shared" / "data" / "enron" / "enron_inbox_subset.tar.gz"
SPEC = HERE / "specs" / "enron.yaml"
SEQUENCE_LENGTH = 128
HELD_OUT = 0.1

_ADDRESS = re.compile(r"[^@\s<>]+@[^@\s<>]+")
# Where somebody else's words begin: Outlook's and Notes' forwarding lines, and what Notes puts above a reply.
_FOREIGN = re.compile(
    r"^[ \t]*(-{3,} ?(Original Message|Forwarded by|Forwarded message)|_{10,}"
    r"|(From|To|Sent):[ \t].*\n(.*\n){0,3}?Subject:)",
    re.MULTILINE | re.IGNORECASE,
)
_QUOTED = re.compile(r"^[ \t]*[>|].*\n?", re.MULTILINE)


@dataclasses.dataclass
class Counts:
    """What happened to the mails of an archive."""

    mails: int = 0
    without_sender: int = 0
    without_own_text: int = 0
    repeated: int = 0


def read_archive(path: pathlib.Path, limit: int | None = None) -> tuple[TextRecords, Counts]:
    """One text per sender.

    Args:
        path: a .tar.gz of files that hold one mail each.
        limit: stop after that many mails, for trying things out.
    """
    counts = Counts()
    mails: dict[str, list[str]] = collections.defaultdict(list)
    for content in _files(path, limit):
        counts.mails += 1
        message = email.message_from_bytes(content, policy=email.policy.default)
        sender = sender_of(message)
        if sender is None:
            counts.without_sender += 1
            continue
        text = own_text(body_of(message))
        if not text:
            counts.without_own_text += 1
        elif text in mails[sender]:
            counts.repeated += 1
        else:
            mails[sender].append(text)
    units = {sender: "\n\n".join(texts) for sender, texts in mails.items() if texts}
    if not units:
        raise DataError(
            f"Expected an archive of mails. Received: {counts.mails} files without a sender and text in {path}."
        )
    return TextRecords(tuple(units.values()), tuple(units)), counts


def _files(path: pathlib.Path, limit: int | None) -> Iterator[bytes]:
    count = 0
    try:
        with tarfile.open(path, "r:*") as archive:
            for member in archive:
                file = archive.extractfile(member) if member.isfile() else None
                if file is None:
                    continue
                yield file.read()
                count += 1
                if count == limit:
                    return
    except (OSError, tarfile.TarError, EOFError) as error:
        raise DataError(f"Expected a .tar.gz of mails at {path}. Received: {error}. Give its path.") from error


def sender_of(message: email.message.Message) -> str | None:
    """The address in From, in lower case; None without one.

    From the raw header: the parser of structured headers fails on some that were seen. One without an address in it
    (`legal <.hall@enron.com>` has one, `pep <performance.>` has not) is taken as it stands: it still names one sender.
    """
    raw = next((str(value) for name, value in message.raw_items() if name.lower() == "from"), "")
    raw = " ".join(raw.encode("ascii", "replace").decode().split()).lower()
    found = _ADDRESS.search(email.utils.parseaddr(raw)[1]) or _ADDRESS.search(raw)
    return found[0] if found else raw.strip("<> ") or None


def body_of(message: email.message.Message) -> str:
    """The plain text of a mail, transfer encoding undone; empty where there is none."""
    for part in message.walk():
        if part.get_content_type() != "text/plain" or part.get_content_disposition() == "attachment":
            continue
        payload = part.get_payload(decode=True)
        if not isinstance(payload, bytes):
            continue
        try:
            text = payload.decode(part.get_content_charset() or "utf-8")
        except (LookupError, UnicodeDecodeError):  # a charset nobody knows, or one that is not what it says
            text = payload.decode("latin-1")
        return text.replace("\r\n", "\n")
    return ""


def own_text(body: str) -> str:
    """A body without what it forwards or quotes."""
    foreign = _FOREIGN.search(body)
    return _QUOTED.sub("", body[: foreign.start()] if foreign else body).strip()


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

    records, counts = read_archive(archive, limit)
    train, held_out = split_held_out(records, HELD_OUT)
    print(
        f"{counts.mails} mails: {counts.without_sender} without a sender, {counts.without_own_text} without text of "
        "their "
        f"own, {counts.repeated} sent twice. {len(train)} senders to train on, {len(held_out)} held out.",
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
            "data_source": f"{archive.name}: Enron e-mails that were made public by an authority",
            "intended_use": "An example of private fine-tuning. The model is far too small to be of use.",
            "command": "python examples/enron.py",
        },
        verbose=verbose,
    )


def main() -> None:
    """The command line of the example."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=pathlib.Path, nargs="?", default=ARCHIVE, help="a .tar.gz with one mail a file")
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
