"""Every finding that tfdp can give: what it means, why it matters and what to do. The one table of them.

`tfdp explain` prints an entry, `tfdp explain --page` the page that lies in examples/findings.md, and the waivers read
from here what can be waived. `tfdp.review.examples` has examples of each, which change `BASE`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "note"]
Source = Literal["file", "spec", "data", "run", "card", "model"]

BASE = """\
schema_version: "1.0"
claim:
  epsilon: 1.2
  delta: 1.0e-6
  privacy_unit:
    kind: example
    description: one text
  adjacency: add_or_remove_one
  data_accesses: [training]
data:
  num_units: 60000
  size_is_public: true
  deduplication: exact
mechanism:
  clip_norm: 1.0
  noise_multiplier: 1.16
sampling:
  scheme: poisson
  expected_batch_size: 256
  epochs: 15
accountant:
  name: pld
"""

SOURCES: dict[Source, str] = {
    "file": "reading the file",
    "spec": "the spec",
    "data": "the spec and counts of the data (`--data`)",
    "run": "the spec and the ledger of a run (`--run`)",
    "card": "a model card",
    "model": "the model, before training",
}


@dataclass(frozen=True)
class Entry:
    """One kind of finding.

    Attributes:
        severities: usual one first.
        title: what is wrong, in one line.
        why: why it matters.
        fix: what to do.
        sources: where it can be told from.
        waivable: whether a waiver can excuse it while it is a warning or a note.
    """

    id: str
    severities: tuple[Severity, ...]
    title: str
    why: str
    fix: str
    sources: tuple[Source, ...] = ("spec",)

    @property
    def waivable(self) -> bool:
        return self.severities[0] != "error" and not self.id.startswith("PS06")


_ENTRIES: tuple[Entry, ...] = (
    Entry(
        "PS000",
        ("error",),
        "The file is not a valid spec.",
        "A field that is misspelt, missing or of the wrong kind would be read as something that nobody wrote.",
        "Correct the place that the message names; `tfdp schema` gives editors the fields.",
        ("file",),
    ),
    Entry(
        "PS001",
        ("error",),
        "The claim lacks epsilon, delta, unit or adjacency.",
        "An epsilon alone promises nothing: whose data are hidden, against which change, and with which probability "
        "of failure is the other half of the sentence.",
        "Add the missing field; none of them has a default.",
        ("file",),
    ),
    Entry(
        "PS002",
        ("error",),
        "A number is not a finite number, or a field stands twice.",
        "Programs disagree on what a quoted number, a boolean or the second of two equal fields means; a reviewer and "
        "the training would read different claims.",
        "Write a plain number, once.",
        ("file",),
    ),
    Entry(
        "PS003",
        ("error",),
        "delta is at least 1/num_units.",
        "Publishing one randomly chosen unit in full has a delta of 1/num_units and satisfies such a claim.",
        "Use a delta of at most 1/(10 num_units).",
    ),
    Entry(
        "PS004",
        ("warning",),
        "delta is above 1/(10 num_units).",
        "The chance that some unit is exposed outright adds up over units; a tenth of a unit is the usual limit.",
        "Use a delta of at most 1/(10 num_units).",
    ),
    Entry(
        "PS005",
        ("error",),
        "The privacy unit lacks a field without which it means nothing.",
        "Records cannot be grouped by a unit without the field that names it, and a unit without a limit on its "
        "records moves the model without a limit.",
        "Add id_field and max_records_per_unit (document, user), sequence_length (sequence), data.num_records (group "
        "privacy).",
    ),
    Entry(
        "PS006",
        ("error",),
        "The epsilon of one record is claimed for a unit of several.",
        "Under group privacy a unit of k records costs several times what one record costs; the smaller number "
        "protects records, not people.",
        "Claim the epsilon for k records, which the message prints, or add noise.",
    ),
    Entry(
        "PS007",
        ("warning",),
        "The unit is an example or a sequence, though the data name who owns it.",
        "A person with a hundred texts is hidden a hundred times less well than the claim suggests to a reader.",
        "Claim a user unit with max_records_per_unit.",
        ("spec", "data"),
    ),
    Entry(
        "PS008",
        ("warning",),
        "Duplicates stay in the data.",
        "A text that occurs twice takes part twice: the claim covers the removal of one copy, and the other remains.",
        "Deduplicate, exactly at least, and say so.",
        ("spec", "data"),
    ),
    Entry(
        "PS009",
        ("error",),
        "The method does not protect a whole unit.",
        "Sampling and clipping single records hides single records; a unit of several needs a method that counts all.",
        "Use user_wise_dp_sgd or group_privacy, or max_records_per_unit: 1.",
    ),
    Entry(
        "PS010",
        ("error",),
        "Batches are shuffled or fixed, and an amplified epsilon is claimed.",
        "Amplification by sampling is proved for units that join each batch independently. For shuffled batches the "
        "true epsilon can be many times larger than the accountant of Poisson sampling says.",
        "Use scheme poisson with the same expected batch size; the message prints the epsilon without amplification.",
    ),
    Entry(
        "PS011",
        ("error",),
        "The accountant does not model this sampler under this adjacency.",
        "A number for another mechanism is not a bound for this one.",
        "Choose another accountant, adjacency or scheme, as the message says.",
    ),
    Entry(
        "PS012",
        ("error",),
        "The claim reaches further than what is accounted.",
        "Epsilon counts the steps of one training in one place. Noise on devices, evaluation and the choice of a clip "
        "norm are not in it.",
        "Claim the central model and the training; the card lists the rest as not covered.",
    ),
    Entry(
        "PS013",
        ("error",),
        "A batch is larger than the data, or a probability above 1.",
        "Such a batch cannot be drawn, so that something else would be.",
        "Write a batch within the data, or correct the size of the data.",
        ("spec", "data"),
    ),
    Entry(
        "PS014",
        ("error",),
        "Numbers contradict each other, or leave something open.",
        "Probability, batch size, steps, epochs and sizes determine each other; where two disagree, nobody knows "
        "which one ran.",
        "Keep one of each pair, and let the other follow.",
        ("spec", "data"),
    ),
    Entry(
        "PS015",
        ("warning",),
        "Many batches are cut to truncated_batch_size.",
        "A batch that is cut learns from fewer, is divided by the expected number all the same, and costs no less "
        "privacy for it.",
        "Write a truncated_batch_size of four standard deviations above the expected size, or expect less.",
    ),
    Entry(
        "PS017",
        ("error",),
        "Replacing a unit is accounted as if it moved the sum by the clip norm.",
        "Taking one unit out and putting another in moves the sum by up to twice the clip norm. An accountant that "
        "counts it once prints about half the true epsilon.",
        "Use accountant pld with replace_one, or claim add_or_remove_one.",
    ),
    Entry(
        "PS018",
        ("note",),
        "The batch size is a share of a number of units that is private.",
        "Adding or removing one unit changes num_units, and with it the probability that follows from the batch size: "
        "the mechanism itself would differ between the two data sets.",
        "State the probability, or a public size, or another adjacency.",
    ),
    Entry(
        "PS020",
        ("error",),
        "The mechanism costs more epsilon than is claimed.",
        "The claim is not true.",
        "More noise, fewer steps, or a claim of what it costs. Only the last digits of floating point are forgiven.",
        ("spec", "run", "card"),
    ),
    Entry(
        "PS021",
        ("note",),
        "Over a tenth of the budget is not used, or a looser accountant was chosen.",
        "The model could be better at the same claim, or the claim smaller for the same model.",
        "Claim less, add steps, take away noise, or use accountant pld.",
    ),
    Entry(
        "PS022",
        ("warning",),
        "The best Renyi order lies at the end of the range that is tried.",
        "The bound holds, but it may be far from what the mechanism costs.",
        "Use accountant pld.",
    ),
    Entry(
        "PS023",
        ("warning",),
        "epsilon is above 10.",
        "At epsilon 10 the bound lets a true guess about one unit become twenty thousand times likelier: it says "
        "little, and what protects the unit then is not the theorem.",
        "Aim lower, or measure attacks and show them.",
    ),
    Entry(
        "PS024",
        ("note",),
        "prv is answered by the pld accountant.",
        "Both compute the same numerically; the card names the one that ran.",
        "Write pld.",
    ),
    Entry(
        "PS030",
        ("error", "warning"),
        "What ran is not what the spec says.",
        "Noise, clip norm, probability, steps, sampler or adjacency of the ledger differ from the reviewed ones: the "
        "claim is about another training.",
        "Train again as the spec says, or have a spec reviewed that says what ran. Where only a library has changed, "
        "compute epsilon again with it.",
        ("run", "card"),
    ),
    Entry(
        "PS031",
        ("error",),
        "The spec was changed after training began.",
        "A claim that is fitted to its result is not the one that was reviewed.",
        "Train again under the spec that is to be claimed, or claim the spec that the ledger holds.",
        ("run", "card"),
    ),
    Entry(
        "PS032",
        ("error",),
        "The budget of the data set is exceeded.",
        "Releases from the same data add up, trainings that were resumed or thrown away among them.",
        "Claim less, or have the cap reviewed.",
        ("spec", "run", "card"),
    ),
    Entry(
        "PS033",
        ("warning",),
        "Over 80% of the budget of the data set is used.",
        "The next release may not be possible any more.",
        "Plan what the rest is for.",
        ("spec", "run", "card"),
    ),
    Entry(
        "PS034",
        ("error",),
        "Ledgers with different units or adjacencies are added up.",
        "An epsilon per text and an epsilon per user are not amounts of the same thing; their sum means nothing.",
        "Keep a budget for each unit and adjacency.",
        ("run",),
    ),
    Entry(
        "PS040",
        ("warning", "error"),
        "Tuning on private data is not accounted.",
        "Every trial has read the data, and the choice between them tells about the data. An error where the claim "
        "says that it covers tuning. It is told too where the spec calls trials accounted and names no ledger, or, on "
        "a card, where they are not on it.",
        "Tune on public data, or account for the trials: train them under specs with the same budget.ledger.",
        ("spec", "card"),
    ),
    Entry(
        "PS041",
        ("warning", "error"),
        "The clip norm was chosen from gradients of the private data.",
        "Looking at the norms is an access that no epsilon counts. An error where the claim says that it covers the "
        "choice.",
        "Use a default such as 1.0, or public data, or let the norm follow a quantile, which is paid for.",
        ("data", "card"),
    ),
    Entry(
        "PS042",
        ("note", "warning", "error"),
        "Randomness is not that of the operating system.",
        "Who knows the seed can take the noise off again. A warning when it has run, an error with a fixed seed.",
        "Write rng: csprng; seeds are for tests.",
        ("spec", "run", "card"),
    ),
    Entry(
        "PS043",
        ("error",),
        "A layer mixes units.",
        "Clipping bounds what one unit does to its own gradient. Batch normalisation carries it into the gradients of "
        "all others, where nothing bounds it.",
        "Use group or layer normalisation, or freeze the layer.",
        ("model",),
    ),
    Entry(
        "PS044",
        ("error",),
        "A trainable layer has no gradient rule, its calls cannot be recorded, or tfdp.verify finds its rule wrong.",
        "The norm of a unit's gradient would be incomplete, and clipping with it.",
        'Freeze it, use a layer with a rule, or pass hybrid=True or method="vectorized".',
        ("model",),
    ),
    Entry(
        "PS045",
        ("error",),
        "A loss joins that is not taken per unit.",
        "A term over the whole batch cannot be clipped unit by unit.",
        "Remove activity_regularizer or add_loss; regularisers of weights are fine.",
        ("model",),
    ),
    Entry(
        "PS046",
        ("error",),
        "The model is not ready for private training.",
        "Not built, nothing to train, LoRA that is frozen, a weight that one layer freezes and another trains, another "
        "backend, or float16, whose loss scaling would act on private gradients.",
        "As the message says.",
        ("model",),
    ),
    Entry(
        "PS050",
        ("warning",),
        "No metrics per group.",
        "Clipping shrinks what is unusual, so that small groups lose most; the average does not show it.",
        "Pass evaluation={'groups': [...]} to export.",
        ("card",),
    ),
    Entry(
        "PS051",
        ("note",),
        "A group is too small to be shown.",
        "The exact value of a small group tells about its members.",
        "Join small groups.",
        ("card",),
    ),
    Entry(
        "PS052",
        ("warning", "error"),
        "No membership-inference result.",
        "An attack that succeeds finds a fault that no proof of the design would show. An error where the spec "
        "requires one.",
        "Attack the model: `tfdp audit RUN_DIR`, or evaluation={'membership_inference': {...}} of export.",
        ("card",),
    ),
    Entry(
        "PS053",
        ("error",),
        "An attack shows more than the claim allows.",
        "The lower bound of an audit above epsilon refutes the claim, at the confidence that stands beside it: "
        "something in the training is not private.",
        "Release nothing; find the fault. At 95%, at most one sound training in twenty shows such a bound by chance.",
        ("card",),
    ),
    Entry(
        "PS054",
        ("note",),
        "An attack lacks the numbers that count.",
        "Averages hide the few who are exposed; the true positive rate at a low false positive rate shows them.",
        "Report it, with the numbers of members and non-members.",
        ("card",),
    ),
    Entry(
        "PS060",
        ("error",),
        "A waiver has expired.",
        "Somebody accepted a finding until a day, and that day has passed.",
        "Mend what it excuses, or have it renewed in a review and write the new day in its expires.",
        ("spec", "card"),
    ),
    Entry(
        "PS061",
        ("warning",),
        "A waiver has no owner.",
        "Nobody answers for it, so it excuses nothing.",
        "Add owner, with a name of somebody who answers for it.",
        ("spec", "card"),
    ),
    Entry(
        "PS062",
        ("warning",),
        "A waiver names what cannot be waived.",
        "An error cannot be excused, and an id that does not exist excuses nothing.",
        "Delete it, and mend what it was to excuse.",
    ),
    Entry(
        "PS070",
        ("warning",),
        "No metric of utility.",
        "Whether the model is any good is the other half of the trade.",
        "Pass evaluation={'metrics': [...]} to export.",
        ("card",),
    ),
    Entry(
        "PS071",
        ("note",),
        "A metric lacks its baselines or its interval.",
        "A number says little without the same one without privacy, before training, and its uncertainty.",
        "Measure what the message names.",
        ("card",),
    ),
    Entry(
        "PS072",
        ("warning",),
        "The model learned nothing.",
        "Budget was spent, and the metric is not better than before.",
        "Look at learning rate, clip norm and batch size, on public data.",
        ("card",),
    ),
    Entry(
        "PS073",
        ("warning",),
        "A metric is not finite.",
        "An overflow, or a model that diverged.",
        "Find out which.",
        ("card",),
    ),
    Entry(
        "PS074",
        ("note",),
        "Something that only the owner can state is not stated.",
        "A card without intended use, limits or licence leaves them to the reader.",
        "Pass details={...} to export.",
        ("card",),
    ),
    Entry(
        "PS080",
        ("error",),
        "The card differs from what its ledger gives.",
        "The card was changed, or belongs to another run.",
        "Export it again, and release nothing until it agrees.",
        ("card",),
    ),
    Entry(
        "PS081",
        ("warning",),
        "A file that the card names is not there.",
        "Its digest could not be compared.",
        "Put the released weights and pages beside the card.",
        ("card",),
    ),
    Entry(
        "PS082",
        ("warning",),
        "The card was computed with another version of the accountant.",
        "Differences in epsilon may come from it.",
        "Check with the version that the card names.",
        ("card",),
    ),
    Entry(
        "PS083",
        ("error",),
        "The model is not one that the run in the ledger left.",
        "Training without privacy, another ledger or another model may have put private data into its weights.",
        "Export right after the private fit, with its ledger.",
        ("card",),
    ),
)

CATALOGUE: dict[str, Entry] = {entry.id: entry for entry in _ENTRIES}
