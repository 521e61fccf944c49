"""The rules that turn a privacy spec into findings, and the table of all findings.

`tfdp.review.catalogue` says what each finding means; `tfdp explain PS010` prints it. PS000 (not a valid spec), PS001
and PS002 come from reading the file. Rules live outside pydantic, which does not look at two fields together once one
of them has failed. Comparisons are written so that a value that cannot be compared fails.

A rule says what is so, whatever the date and whatever was waived: `tfdp.review.waivers` decides what is shown.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator, Sequence

from tfdp.errors import SpecError
from tfdp.findings import Finding
from tfdp.review.claim import (
    RELATIVE_SLACK,
    claim_fits_budget,
    claim_is_covered,
    delta_against_size,
    duplicates_are_removed,
    epsilon_is_small,
    method_protects_unit,
    randomness_is_secret,
    unit_is_complete,
    unit_is_the_person,
)
from tfdp.review.epsilon import (
    epsilon_is_earned,
    epsilon_is_earned_or_how,
    prv_is_pld,
    renyi_against_pld,
    renyi_order_is_inside,
)
from tfdp.review.sampling import (
    accountant_models_sampler,
    batch_fits_data,
    few_batches_are_cut,
    numbers_agree,
    shuffled_batches,
    size_is_known,
)
from tfdp.spec import PrivacySpec

__all__ = ["RELATIVE_SLACK", "REVIEWERS_RULES", "RULES", "Rule", "review"]

Rule = Callable[[PrivacySpec], Iterator[Finding]]

RULES: tuple[Rule, ...] = (
    delta_against_size,
    unit_is_complete,
    unit_is_the_person,
    duplicates_are_removed,
    method_protects_unit,
    shuffled_batches,
    accountant_models_sampler,
    claim_is_covered,
    batch_fits_data,
    numbers_agree,
    few_batches_are_cut,
    size_is_known,
    epsilon_is_earned,
    renyi_order_is_inside,
    epsilon_is_small,
    prv_is_pld,
    randomness_is_secret,
    claim_fits_budget,
)
# Also what only a person who can still change the spec wants to know, and what takes more accounting.
REVIEWERS_RULES: tuple[Rule, ...] = (
    *(epsilon_is_earned_or_how if rule is epsilon_is_earned else rule for rule in RULES),
    renyi_against_pld,
)


def review(spec: PrivacySpec, *, rules: Sequence[Rule] = RULES) -> list[Finding]:
    """Every finding of the rules, in the order of the file.

    Without an error among them the claim is earned by the mechanism as written, provided that what runs is what is
    written; a calibrated noise multiplier (null) is left to the plan.

    Raises:
        SpecError: `spec` is not a PrivacySpec, or was changed into something that could not have been read.
    """
    if not isinstance(spec, PrivacySpec):
        received = type(spec).__name__
        raise SpecError(f"expected a PrivacySpec, received {received}. Read the file with PrivacySpec.from_file first.")
    PrivacySpec.from_dict(spec.to_dict())  # model_copy and model_construct check nothing
    findings = [finding for rule in rules for finding in rule(spec)]
    return sorted(findings, key=lambda finding: (finding.line or 0, finding.column or 0))


class _CallableModule(types.ModuleType):
    """`tfdp.review` is this module and the public function: importing the module must not take the function away."""

    def __call__(self, spec: PrivacySpec) -> list[Finding]:
        return review(spec)


sys.modules[__name__].__class__ = _CallableModule
