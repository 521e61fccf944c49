"""What the choices of a field mean, and which of them somebody meant who wrote another word."""

from __future__ import annotations

from collections.abc import Sequence

# What each choice means; in the order of nothing, they are matched by value.
CHOICES: dict[str, dict[str, str]] = {
    "PrivacySpec.schema_version": {"1.0": "The only version so far."},
    "PrivacyUnit.kind": {
        "example": "One record of the data.",
        "sequence": "One record of sequence_length tokens.",
        "document": "All records of one document, named by id_field.",
        "user": "All records of one person or account, named by id_field.",
    },
    "PrivacyUnit.method": {
        "native": "A unit is one record.",
        "group_privacy": "Records are sampled and clipped one by one; the accounting covers all records of a unit.",
        "user_wise_dp_sgd": "Units are sampled; the records of a unit are averaged, and clipped together.",
    },
    "PrivacyUnit.selection": {
        "random": "A random choice of records stays.",
        "longest": "The longest records stay.",
        "shortest": "The shortest records stay.",
        "highest_perplexity": "The records that a public model finds hardest stay.",
        "lowest_perplexity": "The records that a public model finds easiest stay.",
        "random_chunk": "A random run of consecutive records stays.",
    },
    "Claim.adjacency": {
        "add_or_remove_one": "One unit is in the data, or is not.",
        "replace_one": "One unit is replaced by any other; costs about twice as much.",
        "zero_out": "One unit contributes nothing; the number of units is public.",
    },
    "Claim.trust_model": {
        "central": "Whoever trains sees the raw data.",
        "local": "Each person adds noise before anything leaves; never passes review here.",
        "distributed": "Noise is added together, without one place that sees raw data; never passes review here.",
    },
    "Claim.release": {
        "all_checkpoints": "Every checkpoint of the training may be published.",
        "final_model": "Only the last model is published.",
        "predictions": "Only what the model answers is published.",
    },
    "Claim.data_accesses": {
        "training": "The noisy updates, which is what epsilon counts.",
        "tuning": "The choice of hyperparameters.",
        "clip_selection": "The choice of the clip norm.",
        "evaluation": "Metrics on private data.",
    },
    "Data.deduplication": {
        "none": "Nothing was removed.",
        "exact": "Identical texts were removed.",
        "near": "Similar texts were removed too.",
    },
    "Mechanism.rng": {
        "csprng": "The operating system's source, which nobody can replay.",
        "prng": "A seeded generator, for tests.",
    },
    "Sampling.scheme": {
        "poisson": "Each unit joins each batch independently.",
        "truncated_poisson": "The same, with an upper limit on the batch.",
        "full_batch": "Every unit is in every batch.",
        "shuffle": "Fixed batches of a shuffled order; never passes review.",
    },
    "Sampling.microbatch_size": {"auto": "The fastest number, found by timing made-up data before training."},
    "Accountant.name": {
        "pld": "Privacy loss distributions, the tightest.",
        "rdp": "Renyi differential privacy, faster and looser.",
        "prv": "Answered by pld, of the same numerical family.",
    },
    "Tuning.kind": {
        "none": "Nothing was tuned.",
        "public": "On public data.",
        "private": "On the private data.",
    },
    "Evaluation.membership_inference": {
        "required": "The card must hold an attack.",
        "not_required": "It may go without.",
    },
}

# Words of other libraries, papers and data sets, where they can only mean one choice.
_MEANT: dict[str, dict[str, str]] = {
    "PrivacyUnit.kind": {
        **dict.fromkeys(("record", "row", "sample", "item", "message"), "example"),
        **dict.fromkeys(("file", "book", "text", "page"), "document"),
        **dict.fromkeys(
            ("person", "account", "author", "client", "customer", "patient", "employee", "sender", "individual"), "user"
        ),
    },
    "Claim.adjacency": {
        **dict.fromkeys(("add_remove", "add_or_remove", "add_remove_one", "unbounded"), "add_or_remove_one"),
        **dict.fromkeys(("bounded", "substitution", "substitute", "substitute_one", "swap"), "replace_one"),
        **dict.fromkeys(("zero", "null", "replace_special"), "zero_out"),
    },
    "Accountant.name": {"moments": "rdp", "renyi": "rdp"},
    "Mechanism.rng": dict.fromkeys(("system", "os", "secure", "urandom"), "csprng"),
    "Evaluation.membership_inference": {
        **dict.fromkeys(("true", "yes"), "required"),
        **dict.fromkeys(("false", "no", "none"), "not_required"),
    },
    "Data.deduplication": {"false": "none", "no": "none"},
    "Tuning.kind": {"false": "none", "no": "none"},
}


def meant_choice(name: str, word: str) -> str | None:
    """The choice that a word stands for; the name is that of the section's class and of the field."""
    return _MEANT.get(name, {}).get(word)


def explained(name: str, choices: Sequence[str]) -> str:
    """The choices of a field, each with its meaning: "poisson (each unit joins each batch independently)"."""
    known = CHOICES.get(name, {})
    return "; ".join(f"{choice} ({meaning(name, choice)})" if choice in known else choice for choice in choices)


def meaning(name: str, choice: str) -> str:
    """What a choice means, as it stands in brackets."""
    sentence = CHOICES[name][choice].removesuffix(".")
    name_of_a_person = sentence.startswith("Renyi")
    return sentence if name_of_a_person else f"{sentence[0].lower()}{sentence[1:]}"
