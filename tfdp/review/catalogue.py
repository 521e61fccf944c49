"""Every finding that tfdp can give: what it means, why it matters and what to do. The one table of them.

`tfdp explain` prints an entry, `tfdp explain --page` the page that lies in examples/findings.md, and the waivers read
from here what can be waived. An example is a change to `BASE`, and a test makes sure that it triggers its finding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

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
        example: dotted fields of `BASE` and the values that trigger it (`...` deletes a field); for what no field can
            show, `situation` says when it is given.
        data: contributions that trigger it together with `example`.
        waivable: whether a waiver can excuse it while it is a warning or a note.
    """

    id: str
    severities: tuple[Literal["error", "warning", "note"], ...]
    title: str
    why: str
    fix: str
    sources: tuple[Source, ...] = ("spec",)
    example: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    situation: str = ""

    @property
    def waivable(self) -> bool:
        return self.severities[0] != "error" and not self.id.startswith("PS06")


_USER = {"kind": "user", "description": "one account", "id_field": "account", "max_records_per_unit": 5}

_ENTRIES: tuple[Entry, ...] = (
    Entry(
        "PS000",
        ("error",),
        "The file is not a valid spec.",
        "A field that is misspelt, missing or of the wrong kind would be read as something that nobody wrote.",
        "Correct the place that the message names; `tfdp schema` gives editors the fields.",
        ("file",),
        {"sampling.epoch": 15},
    ),
    Entry(
        "PS001",
        ("error",),
        "The claim lacks epsilon, delta, unit or adjacency.",
        "An epsilon alone promises nothing: whose data are hidden, against which change, and with which probability of "
        "failure is the other half of the sentence.",
        "Add the missing field; none of them has a default.",
        ("file",),
        {"claim.delta": ...},
    ),
    Entry(
        "PS002",
        ("error",),
        "A number is not a finite number, or a field stands twice.",
        "Programs disagree on what a quoted number, a boolean or the second of two equal fields means; a reviewer "
        "and the "
        "training would read different claims.",
        "Write a plain number, once.",
        ("file",),
        {"claim.epsilon": "1.2"},
    ),
    Entry(
        "PS003",
        ("error",),
        "delta is at least 1/num_units.",
        "Publishing one randomly chosen unit in full has a delta of 1/num_units and satisfies such a claim.",
        "Use a delta of at most 1/(10 num_units).",
        example={"claim.delta": 2e-5},
    ),
    Entry(
        "PS004",
        ("warning",),
        "delta is above 1/(10 num_units).",
        "The chance that some unit is exposed outright adds up over units; a tenth of a unit is the usual limit.",
        "Use a delta of at most 1/(10 num_units).",
        example={"claim.delta": 1e-5},
    ),
    Entry(
        "PS005",
        ("error",),
        "The privacy unit lacks a field without which it means nothing.",
        "Records cannot be grouped by a unit without the field that names it, and a unit without a limit on its "
        "records "
        "moves the model without a limit.",
        "Add id_field and max_records_per_unit (document, user), sequence_length (sequence), data.num_records (group "
        "privacy).",
        example={"claim.privacy_unit.kind": "user"},
    ),
    Entry(
        "PS006",
        ("error",),
        "The epsilon of one record is claimed for a unit of several.",
        "Under group privacy a unit of k records costs several times what one record costs; the smaller number "
        "protects "
        "records, not people.",
        "Claim the epsilon for k records, which the message prints, or add noise.",
        example={
            "claim.privacy_unit": {**_USER, "method": "group_privacy"},
            "data.num_records": 60000,
            "data.num_units": 12000,
            "claim.delta": 5e-6,
        },
    ),
    Entry(
        "PS007",
        ("warning",),
        "The unit is an example or a sequence, though the data name who owns it.",
        "A person with a hundred texts is hidden a hundred times less well than the claim suggests to a reader.",
        "Claim a user unit with max_records_per_unit.",
        ("spec", "data"),
        {"claim.privacy_unit.id_field": "account"},
    ),
    Entry(
        "PS008",
        ("warning",),
        "Duplicates stay in the data.",
        "A text that occurs twice takes part twice: the claim covers the removal of one copy, and the other remains.",
        "Deduplicate, exactly at least, and say so.",
        ("spec", "data"),
        {"data.deduplication": "none"},
    ),
    Entry(
        "PS009",
        ("error",),
        "The method does not protect a whole unit.",
        "Sampling and clipping single records hides single records; a unit of several needs a method that counts all.",
        "Use user_wise_dp_sgd or group_privacy, or max_records_per_unit: 1.",
        example={"claim.privacy_unit": _USER},
    ),
    Entry(
        "PS010",
        ("error",),
        "Batches are shuffled or fixed, and an amplified epsilon is claimed.",
        "Amplification by sampling is proved for units that join each batch independently. For shuffled batches the "
        "true "
        "epsilon can be many times larger than the accountant of Poisson sampling says.",
        "Use scheme poisson with the same expected batch size; the message prints the epsilon without amplification.",
        example={"sampling.scheme": "shuffle"},
    ),
    Entry(
        "PS011",
        ("error",),
        "The accountant does not model this sampler under this adjacency.",
        "A number for another mechanism is not a bound for this one.",
        "Choose another accountant, adjacency or scheme, as the message says.",
        example={
            "accountant.name": "rdp",
            "sampling.scheme": "truncated_poisson",
            "sampling.truncated_batch_size": 320,
        },
    ),
    Entry(
        "PS012",
        ("error",),
        "The claim reaches further than what is accounted.",
        "Epsilon counts the steps of one training in one place. Noise on devices, evaluation and the choice of a "
        "clip norm "
        "are not in it.",
        "Claim the central model and the training; the card lists the rest as not covered.",
        example={"claim.trust_model": "local"},
    ),
    Entry(
        "PS013",
        ("error",),
        "A batch is larger than the data, or a probability above 1.",
        "Such a batch cannot be drawn, so that something else would be.",
        "Write a batch within the data, or correct the size of the data.",
        ("spec", "data"),
        {"sampling.expected_batch_size": 60001},
    ),
    Entry(
        "PS014",
        ("error",),
        "Numbers contradict each other, or leave something open.",
        "Probability, batch size, steps, epochs and sizes determine each other; where two disagree, nobody knows which "
        "one ran.",
        "Keep one of each pair, and let the other follow.",
        ("spec", "data"),
        {"sampling.steps": 4000},
    ),
    Entry(
        "PS017",
        ("error",),
        "Replacing a unit is accounted as if it moved the sum by the clip norm.",
        "Taking one unit out and putting another in moves the sum by up to twice the clip norm. An accountant that "
        "counts "
        "it once prints about half the true epsilon.",
        "Use accountant pld with replace_one, or claim add_or_remove_one.",
        example={"claim.adjacency": "replace_one", "accountant.name": "rdp"},
    ),
    Entry(
        "PS018",
        ("note",),
        "The batch size is a share of a number of units that is private.",
        "Adding or removing one unit changes num_units, and with it the probability that follows from the batch "
        "size: the "
        "mechanism itself would differ between the two data sets.",
        "State the probability, or a public size, or another adjacency.",
        example={"data.size_is_public": False},
    ),
    Entry(
        "PS020",
        ("error",),
        "The mechanism costs more epsilon than is claimed.",
        "The claim is not true.",
        "More noise, fewer steps, or a claim of what it costs. Only the last digits of floating point are forgiven.",
        ("spec", "run"),
        {"claim.epsilon": 1.0},
    ),
    Entry(
        "PS021",
        ("note",),
        "Over a tenth of the budget is not used, or a looser accountant was chosen.",
        "The model could be better at the same claim, or the claim smaller for the same model.",
        "Claim less, add steps, take away noise, or use accountant pld.",
        example={"claim.epsilon": 3.0},
    ),
    Entry(
        "PS022",
        ("warning",),
        "The best Renyi order lies at the end of the range that is tried.",
        "The bound holds, but it may be far from what the mechanism costs.",
        "Use accountant pld.",
        example={"accountant.name": "rdp", "mechanism.noise_multiplier": 0.2, "claim.epsilon": 100000},
    ),
    Entry(
        "PS023",
        ("warning",),
        "epsilon is above 10.",
        "At epsilon 10 the bound lets a true guess about one unit become twenty thousand times likelier: it says "
        "little, "
        "and what protects the unit then is not the theorem.",
        "Aim lower, or measure attacks and show them.",
        example={"claim.epsilon": 12, "mechanism.noise_multiplier": None},
    ),
    Entry(
        "PS024",
        ("note",),
        "prv is answered by the pld accountant.",
        "Both compute the same numerically; the card names the one that ran.",
        "Write pld.",
        example={"accountant.name": "prv"},
    ),
    Entry(
        "PS030",
        ("error", "warning"),
        "What ran is not what the spec says.",
        "Noise, clip norm, probability, steps, sampler or adjacency of the ledger differ from the reviewed ones: the "
        "claim "
        "is about another training.",
        "Train again as the spec says, or have a spec reviewed that says what ran. Where only a library has changed, "
        "compute epsilon again with it.",
        ("run", "card"),
        situation="`--run` names a ledger whose clip norm is 0.5 where the spec says 1.0. A warning where only the "
        "version "
        "of the accounting library differs.",
    ),
    Entry(
        "PS031",
        ("error",),
        "The spec was changed after training began.",
        "A claim that is fitted to its result is not the one that was reviewed.",
        "Train again under the spec that is to be claimed, or claim the spec that the ledger holds.",
        ("run", "card"),
        situation="`--run` names a ledger that was begun under the spec before its last change.",
    ),
    Entry(
        "PS032",
        ("error",),
        "The budget of the data set is exceeded.",
        "Releases from the same data add up, trainings that were resumed or thrown away among them.",
        "Claim less, or have the cap reviewed.",
        ("spec", "run", "card"),
        {"budget": {"dataset_id": "mails", "epsilon_cap": 1.0}},
    ),
    Entry(
        "PS033",
        ("warning",),
        "Over 80% of the budget of the data set is used.",
        "The next release may not be possible any more.",
        "Plan what the rest is for.",
        ("spec", "run", "card"),
        {"budget": {"dataset_id": "mails", "epsilon_cap": 1.3}},
    ),
    Entry(
        "PS034",
        ("error",),
        "Ledgers with different units or adjacencies are added up.",
        "An epsilon per text and an epsilon per user are not amounts of the same thing; their sum means nothing.",
        "Keep a budget for each unit and adjacency.",
        ("run",),
        situation="`--run one/ --run two/`, where one protects examples and the other protects users.",
    ),
    Entry(
        "PS040",
        ("warning", "error"),
        "Tuning on private data is not accounted.",
        "Every trial has read the data, and the choice between them tells about the data. An error where the claim "
        "says "
        "that it covers tuning.",
        "Tune on public data, or account for the trials.",
        example={"tuning": {"kind": "private"}},
    ),
    Entry(
        "PS041",
        ("warning",),
        "The clip norm was chosen from gradients of the private data.",
        "Looking at the norms is an access that no epsilon counts.",
        "Use a default such as 1.0, or public data.",
        ("data",),
        data={"clip_norm_source": "private"},
    ),
    Entry(
        "PS042",
        ("note", "warning", "error"),
        "Randomness is not that of the operating system.",
        "Who knows the seed can take the noise off again. A warning when it has run, an error with a fixed seed.",
        "Write rng: csprng; seeds are for tests.",
        ("spec", "run", "card"),
        {"mechanism.rng": "prng"},
    ),
    Entry(
        "PS043",
        ("error",),
        "A layer mixes units.",
        "Clipping bounds what one unit does to its own gradient. Batch normalisation carries it into the gradients "
        "of all "
        "others, where nothing bounds it.",
        "Use group or layer normalisation, or freeze the layer.",
        ("model",),
        situation="`tfdp.check_model` of a model with a trainable BatchNormalization.",
    ),
    Entry(
        "PS044",
        ("error",),
        "A trainable layer has no gradient rule, or its calls cannot be recorded.",
        "The norm of a unit's gradient would be incomplete, and clipping with it.",
        'Freeze it, use a layer with a rule, or pass method="vectorized".',
        ("model",),
        situation="`tfdp.check_model` of a model with a trainable layer of your own.",
    ),
    Entry(
        "PS045",
        ("error",),
        "A loss joins that is not taken per unit.",
        "A term over the whole batch cannot be clipped unit by unit.",
        "Remove activity_regularizer or add_loss; regularisers of weights are fine.",
        ("model",),
        situation="`tfdp.check_model` of a layer with an activity regulariser.",
    ),
    Entry(
        "PS046",
        ("error",),
        "The model is not ready for private training.",
        "Not built, nothing to train, another backend, or float16, whose loss scaling would act on private gradients.",
        "As the message says.",
        ("model",),
        situation="`tfdp.check_model` of a model that is not built.",
    ),
    Entry(
        "PS050",
        ("warning",),
        "No metrics per group.",
        "Clipping shrinks what is unusual, so that small groups lose most; the average does not show it.",
        "Pass evaluation={'groups': [...]} to export.",
        ("card",),
        situation="A card without groups.",
    ),
    Entry(
        "PS051",
        ("note",),
        "A group is too small to be shown.",
        "The exact value of a small group tells about its members.",
        "Join small groups.",
        ("card",),
        situation="A group with fewer units than evaluation.min_group_size.",
    ),
    Entry(
        "PS052",
        ("warning", "error"),
        "No membership-inference result.",
        "An attack that succeeds finds a fault that no proof of the design would show. An error where the spec "
        "requires "
        "one.",
        "Attack the model, and pass evaluation={'membership_inference': {...}} to export.",
        ("card",),
        situation="A card without attacks.",
    ),
    Entry(
        "PS053",
        ("error",),
        "An attack shows more than the claim allows.",
        "The lower bound of an audit above epsilon refutes the claim: something in the training is not private.",
        "Release nothing; find the fault.",
        ("card",),
        situation="epsilon_lower_bound of an attack above epsilon.",
    ),
    Entry(
        "PS054",
        ("note",),
        "An attack lacks the numbers that count.",
        "Averages hide the few who are exposed; the true positive rate at a low false positive rate shows them.",
        "Report it, with the numbers of members and non-members.",
        ("card",),
        situation="An attack with nothing but an AUC.",
    ),
    Entry(
        "PS060",
        ("error",),
        "A waiver has expired.",
        "Somebody accepted a finding until a day, and that day has passed.",
        "Mend what it excuses, or have it renewed in a review and write the new day in its expires.",
        ("spec", "card"),
        {"waivers": [{"finding": "PS008", "reason": "known", "owner": "Ada", "expires": "2020-01-31"}]},
    ),
    Entry(
        "PS061",
        ("warning",),
        "A waiver has no owner.",
        "Nobody answers for it, so it excuses nothing.",
        "Add owner, with a name of somebody who answers for it.",
        ("spec", "card"),
        {"waivers": [{"finding": "PS008", "reason": "known", "expires": "2999-01-31"}]},
    ),
    Entry(
        "PS062",
        ("warning",),
        "A waiver names what cannot be waived.",
        "An error cannot be excused, and an id that does not exist excuses nothing.",
        "Delete it, and mend what it was to excuse.",
        example={"waivers": [{"finding": "PS020", "reason": "known", "owner": "Ada", "expires": "2999-01-31"}]},
    ),
    Entry(
        "PS070",
        ("warning",),
        "No metric of utility.",
        "Whether the model is any good is the other half of the trade.",
        "Pass evaluation={'metrics': [...]} to export.",
        ("card",),
        situation="A card without metrics.",
    ),
    Entry(
        "PS071",
        ("note",),
        "A metric lacks its baselines or its interval.",
        "A number says little without the same one without privacy, before training, and its uncertainty.",
        "Measure what the message names.",
        ("card",),
        situation="A metric with a private value only.",
    ),
    Entry(
        "PS072",
        ("warning",),
        "The model learned nothing.",
        "Budget was spent, and the metric is not better than before.",
        "Look at learning rate, clip norm and batch size, on public data.",
        ("card",),
        situation="A perplexity after training that is not below the one before.",
    ),
    Entry(
        "PS073",
        ("warning",),
        "A metric is not finite.",
        "An overflow, or a model that diverged.",
        "Find out which.",
        ("card",),
        situation="A metric that is NaN.",
    ),
    Entry(
        "PS074",
        ("note",),
        "Something that only the owner can state is not stated.",
        "A card without intended use, limits or licence leaves them to the reader.",
        "Pass details={...} to export.",
        ("card",),
        situation="A card without a licence.",
    ),
    Entry(
        "PS080",
        ("error",),
        "The card differs from what its ledger gives.",
        "The card was changed, or belongs to another run.",
        "Export it again, and release nothing until it agrees.",
        ("card",),
        situation="`tfdp card check` of a card with a smaller epsilon written into it.",
    ),
    Entry(
        "PS081",
        ("warning",),
        "A file that the card names is not there.",
        "Its digest could not be compared.",
        "Put the released weights and pages beside the card.",
        ("card",),
        situation="`tfdp card check` of a folder without the weights.",
    ),
    Entry(
        "PS082",
        ("warning",),
        "The card was computed with another version of the accountant.",
        "Differences in epsilon may come from it.",
        "Check with the version that the card names.",
        ("card",),
        situation="`tfdp card check` after an update of dp-accounting.",
    ),
    Entry(
        "PS083",
        ("error",),
        "The model is not one that the run in the ledger left.",
        "Training without privacy, another ledger or another model may have put private data into its weights.",
        "Export right after the private fit, with its ledger.",
        ("card",),
        situation="`tfdp.export` of a model that was trained further without privacy.",
    ),
)

CATALOGUE: dict[str, Entry] = {entry.id: entry for entry in _ENTRIES}
