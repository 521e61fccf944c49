"""The sentences of a card. They may say less than the numbers, never more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from dp_accounting import dp_event

from tfdp.card.model import Accounting, DataAccess, Exclusion, Term
from tfdp.spec import PrivacySpec
from tfdp.spec.fields import PrivacyUnit

if TYPE_CHECKING:
    from dp_accounting import DpEvent

    from tfdp.card.inputs import CardInputs
    from tfdp.ledger import LedgerRecord

Status = Literal["covered", "not covered", "no access", "not stated"]

_ADJACENCY = {
    "add_or_remove_one": "whether one {unit} is in the training data or not",
    "replace_one": "whether one {unit} in the training data is replaced by another",
    "zero_out": "whether one {unit} in the training data is replaced by one that contributes nothing",
}
_RELEASE = {
    "all_checkpoints": "Every checkpoint of the training, the released model among them, satisfies",
    "final_model": "The released model satisfies",
    "predictions": "The predictions of the released model satisfy",
}
_TRUST = {
    "central": "in the central model, where whoever trains sees the raw data",
    "local": "in the local model",
    "distributed": "in the distributed model",
}
_DEDUPLICATION = {
    "none": "Duplicates were not removed before training.",
    "exact": "The spec states that exact duplicates were removed before training, which tfdp does not check; near "
    "duplicates were not.",
    "near": "The spec states that near duplicates were removed before training, which tfdp does not check.",
}

_SCOPE = {
    None: "",
    "unit": " They were looked for within each unit only, so that copies in other units stay.",
    "all": " They were looked for across units, so that one unit's data decided what another's contribute.",
}
# What a unit that is no person does not protect.
_SEVERAL_UNITS = {
    "example": "A person with several examples is protected less with each; nothing bounds how many they have.",
    "sequence": "A person, or a document, in several sequences is protected less with each. Where texts were packed "
    "into sequences before sampling, a document that was cut is protected only piece by piece, a sequence may hold "
    "texts of several people, and the claim compares data sets that differ in one sequence, not in one document.",
    "document": "All pieces of a document are protected together; a person with several documents is protected less "
    "with each, and a document under two names is two.",
}

# What Keras and the callback put into a history without looking at private data.
_PUBLIC_HISTORY = {"clip_norm", "epsilon", "learning_rate", "steps"}

GLOSSARY = (
    Term(
        term="epsilon, delta",
        meaning="A bound on how much one privacy unit can change the probability of any outcome: by at most a factor "
        "of e to the power epsilon, apart from a probability of delta. Smaller is more private.",
    ),
    Term(
        term="privacy unit",
        meaning="What is hidden as a whole. A person who owns several units is hidden less than one unit is.",
    ),
    Term(term="adjacency", meaning="How two data sets differ that an observer must not be able to tell apart."),
    Term(term="clip norm, C", meaning="The most that one unit can move the sum of gradients, in L2."),
    Term(term="noise multiplier, sigma", meaning="Standard deviation of the noise, divided by the clip norm."),
    Term(
        term="sampling probability, q",
        meaning="The chance of each unit to join a batch, drawn anew and independently for every step.",
    ),
    Term(
        term="amplification by sampling",
        meaning="Not knowing which batches hold a unit makes it harder to see; the accountant may count that only if "
        "the batches really were drawn at random.",
    ),
    Term(
        term="membership inference",
        meaning="Guessing from the model whether something was in its training data. Advantage is the rate of true "
        "positives minus that of false ones.",
    ),
    Term(term="ledger", meaning="A file with one line per training step, on the disk before the step takes effect."),
)


def sampler_of(event: DpEvent) -> str:
    """What the accountant assumes of the sampler, named like the schemes of the spec."""
    return {
        dp_event.PoissonSampledDpEvent: "poisson",
        dp_event.MixtureOfGaussiansDpEvent: "poisson",
        dp_event.TruncatedSubsampledGaussianDpEvent: "truncated_poisson",
        dp_event.GaussianDpEvent: "full_batch",
    }.get(type(event), type(event).__name__)


def sensitivity_of(event: DpEvent) -> int:
    """How many sampled records the accountant lets one unit own."""
    return int(max(event.sensitivities)) if isinstance(event, dp_event.MixtureOfGaussiansDpEvent) else 1


def claim_sentence(spec: PrivacySpec, epsilon: str, delta: str) -> str:
    """Epsilon, delta, unit, adjacency, trust model and release, in one sentence."""
    unit = spec.claim.privacy_unit
    hidden = _ADJACENCY[spec.claim.adjacency].format(unit=unit.kind)
    return (
        f"{_RELEASE[spec.claim.release]} ({epsilon}, {delta})-differential privacy {_TRUST[spec.claim.trust_model]}; "
        f"this bounds what anybody can learn about {hidden}, one {unit.kind} being {_quoted(unit.description)}."
    )


def user_level(spec: PrivacySpec, *, claimed: bool) -> str:
    """What is known about a whole person."""
    if not claimed:
        return "None possible: nothing is claimed for this run."
    unit = spec.claim.privacy_unit
    if unit.kind == "user":
        return (
            "The unit is a user: the guarantee holds for everything that one user contributed, "
            f"at most {unit.max_records_per_unit} records{_taken(unit)}."
        )
    return (
        f"None possible: the unit is one {unit.kind}, and nothing bounds how many of them one person has. "
        "The protection of a person falls with every further unit that is theirs."
    )


def _taken(unit: PrivacyUnit) -> str:
    """How many at a time: chosen anew in every step, more of a user take part in the end."""
    anew = unit.method == "user_wise_dp_sgd" and unit.selection in ("random", "random_chunk")
    return " in any step" if anew else ""


def contribution_map(spec: PrivacySpec) -> str:
    """How records belong to units, and what bounds them."""
    unit = spec.claim.privacy_unit
    if unit.kind in ("example", "sequence"):
        return f"One record is one {unit.kind}; records are sampled and clipped on their own."
    owner = f"Records belong to the {unit.kind} named in {_quoted(unit.id_field or 'an unnamed field')}"
    bound = f"at most {unit.max_records_per_unit} each"
    chosen = f", chosen: {unit.selection.replace('_', ' ')}" if unit.selection else ""
    if unit.max_tokens_per_unit is not None:
        bound += f" and {unit.max_tokens_per_unit} tokens"
    how = (
        f"whole {unit.kind}s are sampled, and the mean gradient of their records is clipped"
        if unit.method == "user_wise_dp_sgd"
        else f"one record of each {unit.kind} is sampled and clipped"
        if (unit.max_records_per_unit or 1) == 1
        else f"records are sampled and clipped singly, and the accounting covers all records of one {unit.kind} at once"
    )
    return f"{owner}, {bound}{chosen}; {how}."


def data_accesses(
    spec: PrivacySpec, inputs: CardInputs, account: Accounting, looks: Sequence[dict[str, Any]], *, claimed: bool
) -> tuple[DataAccess, ...]:
    """Every way in which this library knows that private data can be looked at.

    Args:
        looks: those that the ledger holds, beside the steps.
    """
    return (
        DataAccess(
            name="Training",
            status="covered" if claimed else "not covered",
            note=f"{account.steps_executed:,} noisy steps in the ledger; epsilon counts these and nothing else.",
        ),
        _tuning(spec, inputs),
        _deduplication(spec, inputs, claimed=claimed),
        *_looks_at_units(spec),
        _clip_norm(account, looks, claimed=claimed),
        DataAccess(
            name="Choice of the checkpoint",
            status="not stated",
            note="Covered as processing of released checkpoints if it was chosen without private data; "
            "not covered if it was chosen by a score on private data.",
        ),
        _progress(inputs),
        _evaluation(inputs),
        _audit(inputs),
        DataAccess(
            name="Public pretraining",
            status="not covered",
            note="What the starting weights learned, from whatever data, is outside this guarantee.",
        ),
    )


def _clip_norm(account: Accounting, looks: Sequence[dict[str, Any]], *, claimed: bool) -> DataAccess:
    name, mine = "Choice of the clip norm", [look for look in looks if look.get("what") == "clip_norm"]
    private = [look for look in mine if not look.get("public")]
    if private:
        times = "once" if len(private) == 1 else f"{len(private):,} times"
        most = max(int(look.get("most_units", 0)) for look in private)
        note = f"Exact gradient norms of up to {most:,} units of private data were looked at {times}, before training."
        return DataAccess(name=name, status="not covered", note=note)
    if mine:
        note = "Gradient norms were looked at, on data that whoever did it states to be public."
        return DataAccess(name=name, status="no access", note=note)
    if account.adaptive_clipping is not None:
        note = (
            "It followed a noisy count of units, which epsilon counts together with the gradients. The norm of the "
            "first step is not covered if it was chosen by looking at gradients of private data."
        )
        return DataAccess(name=name, status="covered" if claimed else "not covered", note=note)
    note = "Not covered if it was chosen by looking at gradients of private data."
    return DataAccess(name=name, status="not stated", note=note)


def _tuning(spec: PrivacySpec, inputs: CardInputs) -> DataAccess:
    name = "Tuning of hyperparameters"
    tuning = spec.tuning
    if tuning is None:
        return DataAccess(name=name, status="not stated", note="Not covered if it looked at private data.")
    if tuning.kind != "private":
        what = "public data" if tuning.kind == "public" else "no data"
        return DataAccess(name=name, status="no access", note=f"The spec states that tuning used {what}.")
    count = f"{tuning.trials:,}" if tuning.trials else "an unstated number of"
    trials = f"{count} trial{'' if tuning.trials == 1 else 's'}"
    where = "counted elsewhere, not in this epsilon" if tuning.accounted else "not counted anywhere"
    if tuning.accounted and inputs.others is not None:
        where = f"counted among the runs of the budget, {len(inputs.others):,} beside this one, not in this epsilon"
    return DataAccess(name=name, status="not covered", note=f"The spec states {trials} on private data, {where}.")


def _deduplication(spec: PrivacySpec, inputs: CardInputs, *, claimed: bool) -> DataAccess:
    """Within a unit it is a part of what the unit contributes; across units one unit decides about another."""
    name, unit, scope = "Removal of duplicates", spec.claim.privacy_unit.kind, inputs.deduplication_scope
    if scope is None and spec.data.deduplication == "none":
        return DataAccess(name=name, status="no access", note="The spec states that duplicates were not removed.")
    alone = unit in ("example", "sequence")  # whose only record has none of its own unit to be compared with
    if scope == "unit" and not alone:
        note = f"Within each {unit}, by its own records alone: a part of what it contributes."
        return DataAccess(name=name, status="covered" if claimed else "not covered", note=note)
    across = f"whether a record of one {unit} was kept may depend on the records of another"
    if scope is not None or alone:
        return DataAccess(name=name, status="not covered", note=f"Across units: {across}.")
    return DataAccess(name=name, status="not stated", note=f"Not covered if it was done across units: {across} then.")


def _looks_at_units(spec: PrivacySpec) -> tuple[DataAccess, ...]:
    """What is looked at where a unit has several records, to choose how it is protected."""
    unit = spec.claim.privacy_unit
    if unit.kind in ("example", "sequence"):
        return ()
    return (
        DataAccess(
            name="Choice of k",
            status="not stated",
            note=f"Not covered if the limit of records per {unit.kind} was chosen by looking at how many they have "
            "(tfdp data report, tfdp plan compare): these are exact counts of private data.",
        ),
        DataAccess(
            name="Diagnostics of gradients",
            status="not stated",
            note=f"Not covered if the gradients of {unit.kind}s were compared beforehand "
            "(tfdp plan compare --concentration): what it prints is exact, and so is the choice of a method by it.",
        ),
    )


def _progress(inputs: CardInputs) -> DataAccess:
    shown = ", ".join(sorted(set(inputs.training or {}) - _PUBLIC_HISTORY))
    return DataAccess(
        name="Metrics in the progress bar",
        status="not covered" if shown else "not stated",
        note="Exact values on private data, without noise"
        + (f": {shown}. They are printed on this card." if shown else ". Not covered if anybody outside sees them.")
        + " So is what a callback decides from them (early stopping, learning rate).",
    )


def _evaluation(inputs: CardInputs) -> DataAccess:
    measured = bool(inputs.metrics or inputs.groups.rows)
    return DataAccess(
        name="Evaluation",
        status="not covered" if measured else "not stated",
        note="The metrics and groups on this card are exact values; "
        "what they tell about the data that they were measured on is not bounded."
        if measured
        else "Nothing was handed to this card. Not covered if private data were used.",
    )


def _audit(inputs: CardInputs) -> DataAccess:
    audited = inputs.every_attack or inputs.audit is not None
    verified = inputs.audit is not None and inputs.audit.gradients is not None
    looked_at = "losses of members and non-members" + (" and gradients of a few" if verified else "")
    return DataAccess(
        name="Attacks for an audit",
        status="not covered" if audited else "not stated",
        note=f"The {looked_at} were looked at, without noise, and what they add up to is on this card."
        if audited
        else "None were handed to this card. Not covered if private data were attacked.",
    )


def exclusions(spec: PrivacySpec, inputs: CardInputs) -> tuple[Exclusion, ...]:
    """What a reader might take the guarantee for, and it is not."""
    unit = spec.claim.privacy_unit.kind
    several = [("Several units of one person", _SEVERAL_UNITS[unit])] if unit in _SEVERAL_UNITS else []
    size = (
        "The spec declares the size public; it and everything computed from it are printed here."
        if spec.data.size_is_public
        else "The spec does not declare the size public, yet the batch size, the denominator and this card tell it."
    )
    printed = " and are part of this card." if inputs.training or inputs.metrics else "; none were handed to this card."
    rows = [
        ("Prompts and other input", "What is typed into the model is neither hidden nor protected by its training."),
        ("Retrieval indexes", "Documents that are looked up when the model answers can be repeated word for word."),
        ("Logs", "Records of training and of use are outside the guarantee, this run's console output included."),
        ("What the model infers", "Conclusions about a person from what is true of many people remain possible."),
        ("Later fine-tuning", "Further training on the same data adds to epsilon; on other data it is not covered."),
        (
            "Duplicates and shared records",
            f"A text that stands in several units is protected less than one {unit} is. "
            + _DEDUPLICATION[spec.data.deduplication]
            + _SCOPE[inputs.deduplication_scope],
        ),
        *several,
        ("The size of the data", size),
        ("Several releases", "Other models and statistics from the same data add up with this one."),
        ("Side channels", "How long steps take, and the rounding of gradients in floating point, are not modelled."),
        (
            "The exact metrics printed below",
            "Loss curves, utility, groups and attacks are computed without noise" + printed,
        ),
    ]
    return tuple(Exclusion(what=what, why=why) for what, why in rows)


_SELECTED = (
    " Trials whose number was drawn at random before the first are counted as a selection (Papernot and Steinke 2022): "
    "that holds only as long as nothing but the best of them is ever released."
)


def other_runs(inputs: CardInputs) -> str:
    """What is known about the other runs on the same data."""
    if inputs.others is not None:
        if not inputs.others and not inputs.selections:
            return "The ledger of the data set has no other run."
        lost = [run for run in inputs.others if run.state != "spent"]
        planned = f"; {len(lost):,} of them with all planned steps, as their ledgers cannot be read to the end"
        count = "1 other run" if len(inputs.others) == 1 else f"{len(inputs.others):,} other runs"
        return (
            f"The ledger of the data set has {count}, failed and discarded ones among them{planned if lost else ''}. "
            "Before and after are bounds on all of them together, composed under one accountant."
            + (_SELECTED if inputs.selections else "")
        )
    if inputs.spent_before is None:
        return "Not measured: this card knows one ledger. Other runs on the same data, failed ones too, add to it."
    return "Earlier spending is as the owner stated it; it is added to this run without sharing anything."


def gradients(record: LedgerRecord) -> str:
    """How per-unit gradients were taken, by the fits on the ledger."""
    fits: list[tuple[dict[str, Any], int | None]] = []
    for entry in record.entries:
        if entry["kind"] == "fit_begin":
            fits.append((entry, None))
        elif entry["kind"] == "microbatches" and fits:
            fits[-1] = fits[-1][0], entry.get("units")
    chosen = " (the spec says auto)" if record.plan.get("microbatch_size") == "auto" else ""
    # A fit that met no data has no size, and says nothing where another one has.
    told = [fit for fit in fits if fit[1] is not None] or fits
    ways = dict.fromkeys(
        _way(fit) + (f", in microbatches of {units}{chosen}" if units is not None else "") for fit, units in told
    )
    return "; then ".join(ways) or "not stated"


def _way(fit: dict[str, Any]) -> str:
    replicas = fit.get("replicas", 1)
    return _method(fit) + (f", on {replicas} replicas of one machine" if replicas != 1 else "")


def _method(fit: dict[str, Any]) -> str:
    way = fit.get("gradients")
    if way == "hybrid":
        layers = fit.get("layers_without_rule") or []
        named = f" of {', '.join(str(layer) for layer in layers)}" if layers else " that no rule covers"
        return f"book-keeping; formed per unit for the variables{named}"
    return {"bookkeeping": "book-keeping", "vectorized": "formed per unit (vectorized)"}.get(str(way), "not stated")


def _quoted(text: str) -> str:
    return f'"{" ".join(text.split())}"'
