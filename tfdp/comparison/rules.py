"""Which rule judges which field: the promise first, then what is covered, then what earns it.

The two tables hold the same facts under the names that they have in a spec and on a card.
"""

from __future__ import annotations

from tfdp.comparison import orders
from tfdp.comparison.orders import UNCHANGED, Rule, always

DELTA = orders.lower_is_stronger("More probability is left out of the bound.", "Less probability is left out.")
EPSILON = orders.lower_is_stronger("The bound on the privacy loss is larger.", "The bound is smaller.")
TRUST = orders.ordered(("local", "distributed", "central"), "From the best: local, distributed, central.")
DEDUPLICATION = orders.ordered(
    ("near", "exact", "none"), "A text that occurs twice is protected once: near is best, then exact, then none."
)
RNG = orders.ordered(("csprng", "prng"), "Noise that a seed reproduces can be taken off again.")
ID_FIELD = orders.stated(
    "The records of a unit are named now.",
    "Nothing says any more which records belong to one unit.",
    "Another field names the unit, so another thing may be protected.",
)
SEQUENCE_LENGTH = orders.higher_is_stronger(
    "A sequence is shorter: fewer tokens are hidden together.", "A sequence is longer: more is hidden together."
)
MIN_GROUP_SIZE = orders.higher_is_stronger(
    "Exact values of smaller groups are published.", "Fewer exact values of small groups are published."
)
EPSILON_CAP = orders.lower_is_stronger("All releases together may spend more.", "All releases may spend less.")
DATASET = orders.stated("A budget is kept now.", "No budget is kept any more.", "Another budget is charged.")
BUDGET_LEDGER = orders.stated(
    "Earlier spending is recorded now.",
    "Nothing records earlier spending any more.",
    "Earlier spending is looked up in another place: what the old one holds may no longer be counted.",
)
PART_OF_THE_MECHANISM = always(
    UNCHANGED, "Part of the mechanism: it counts through epsilon, which follows from all of them together."
)
CLIP_NORM = always(
    UNCHANGED, "Noise is measured in clip norms, and covers the count of a quantile too: this changes no bound."
)
UTILITY = always(UNCHANGED, "Says how useful the model is, or for whom; no effect on privacy.")
NO_EFFECT = always(UNCHANGED, "No effect on the guarantee.")

# Computed, not fields: they have a place in the order, and their directions come from specs.py.
MECHANISM = "epsilon of the mechanism"
REVIEW = "review"

SPEC_RULES: dict[str, Rule] = {
    REVIEW: orders.unknown,
    "schema_version": orders.unknown,
    "claim.privacy_unit.kind": orders.unknown,  # judged in specs.py, with epsilon, delta and adjacency at hand
    "claim.privacy_unit.description": orders.description,
    "claim.privacy_unit.id_field": ID_FIELD,
    "claim.privacy_unit.sequence_length": SEQUENCE_LENGTH,
    "claim.adjacency": orders.unknown,  # likewise
    "sampling.scheme": PART_OF_THE_MECHANISM,
    "claim.delta": DELTA,
    "claim.epsilon": EPSILON,
    MECHANISM: orders.unknown,
    "claim.privacy_unit.max_records_per_unit": orders.records_per_unit,
    "claim.privacy_unit.method": orders.unknown,  # likewise
    "claim.privacy_unit.max_tokens_per_unit": NO_EFFECT,
    "claim.privacy_unit.selection": NO_EFFECT,
    "claim.release": orders.release,
    "claim.trust_model": TRUST,
    "claim.data_accesses": orders.covered,
    "tuning": orders.tuning,
    "data.deduplication": DEDUPLICATION,
    "data.size_is_public": orders.unknown,  # likewise
    "mechanism.rng": RNG,
    "waivers": orders.waivers,
    "budget.dataset_id": DATASET,
    "budget.ledger": BUDGET_LEDGER,
    "budget.epsilon_cap": EPSILON_CAP,
    "budget.delta_cap": EPSILON_CAP,
    "evaluation.membership_inference": orders.membership_inference,
    "evaluation.min_group_size": MIN_GROUP_SIZE,
    "evaluation.group_field": UTILITY,
    "evaluation.metrics": UTILITY,
    "data.num_units": PART_OF_THE_MECHANISM,
    "data.num_records": PART_OF_THE_MECHANISM,
    "mechanism.noise_multiplier": PART_OF_THE_MECHANISM,
    "mechanism.clip_norm": CLIP_NORM,
    "mechanism.clip_norm.per_layer": CLIP_NORM,
    "mechanism.clip_norm.quantile": CLIP_NORM,
    "mechanism.clip_norm.initial": CLIP_NORM,
    "mechanism.clip_norm.learning_rate": CLIP_NORM,
    "mechanism.clip_norm.count_noise": CLIP_NORM,
    "sampling.expected_batch_size": PART_OF_THE_MECHANISM,
    "sampling.probability": PART_OF_THE_MECHANISM,
    "sampling.steps": PART_OF_THE_MECHANISM,
    "sampling.epochs": PART_OF_THE_MECHANISM,
    "sampling.truncated_batch_size": PART_OF_THE_MECHANISM,
    "sampling.microbatch_size": always(UNCHANGED, "Memory and speed only."),
    "accountant.name": always(UNCHANGED, "Another way to compute the same bound."),
}
SPEC_WHOLE = frozenset({"tuning"})

# On a card, most of the rest is derived from these fields or from the training; it is compared in silence.
CARD_RULES: dict[str, Rule | None] = {
    "schema_version": orders.unknown,
    "claim.status": orders.ordered(("claimed", "not claimed"), "A card claims its guarantee, or none at all."),
    "guarantee.unit_kind": orders.unknown,  # judged in cards.py
    "guarantee.unit_definition": orders.description,
    "guarantee.unit_id_field": ID_FIELD,
    "guarantee.sequence_length": SEQUENCE_LENGTH,
    "claim.adjacency": orders.unknown,  # likewise
    "accounting.sampler_assumed": PART_OF_THE_MECHANISM,
    "accounting.sampler_ran": PART_OF_THE_MECHANISM,
    "claim.delta": DELTA,
    "claim.epsilon": EPSILON,
    "guarantee.target_epsilon": orders.lower_is_stronger("The spec allowed more.", "The spec allowed less."),
    "guarantee.max_records_per_unit": orders.records_per_unit,
    "guarantee.unit_method": orders.unknown,  # likewise
    "guarantee.selection": NO_EFFECT,
    "claim.release": orders.release,
    "claim.trust_model": TRUST,
    "data_accesses": orders.access_states,
    "data.deduplication": DEDUPLICATION,
    "data.size_is_public": orders.unknown,  # likewise
    "provenance.rng": RNG,
    "provenance.seed": orders.unseeded,
    "review.findings": orders.error_findings,
    "review.waivers": orders.waivers,
    "budget.dataset_id": DATASET,
    "budget.epsilon_cap": EPSILON_CAP,
    "budget.delta_cap": EPSILON_CAP,
    "groups.minimum_size": MIN_GROUP_SIZE,
    "accounting.num_units": PART_OF_THE_MECHANISM,
    "accounting.sampling_probability": PART_OF_THE_MECHANISM,
    "accounting.truncated_batch_size": PART_OF_THE_MECHANISM,
    "accounting.num_records": PART_OF_THE_MECHANISM,
    "accounting.records_per_unit": PART_OF_THE_MECHANISM,
    "accounting.group_size": PART_OF_THE_MECHANISM,
    "accounting.noise_multiplier": PART_OF_THE_MECHANISM,
    "accounting.steps_executed": PART_OF_THE_MECHANISM,
    "accounting.accountant": always(UNCHANGED, "Another way to compute the same bound."),
    "accounting.accountant_version": always(UNCHANGED, "Another version of the accountant."),
    **dict.fromkeys(
        (
            "title", "created", "claim.sentence", "claim.reasons", "claim.privacy_unit",
            "guarantee.realised_epsilon", "guarantee.delta", "guarantee.delta_times_units", "guarantee.user_level",
            "guarantee.membership", "guarantee.max_membership_advantage",
            "accounting", "not_covered", "data", "utility", "groups", "attacks", "audit", "use",
            "provenance", "budget", "review", "legal",
        )
    ),
}  # fmt: skip
CARD_WHOLE = frozenset({"data_accesses", "claim.epsilon", "guarantee.user_level", "guarantee.realised_epsilon"})
