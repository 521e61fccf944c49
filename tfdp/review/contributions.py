"""What the data turned out to be, counted by whoever may see them, against what the spec says of them.

A contributions file is JSON with any of the fields of `Contributions`. It holds counts of private data: it belongs
where the data are, not in the repository.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from tfdp.findings import Finding, Severity
from tfdp.spec import PrivacySpec
from tfdp.spec.consistency import population
from tfdp.spec.fields import MAX_COUNT, Count, Section
from tfdp.spec.numbers import shown

_Number = Annotated[int, Field(ge=0, le=MAX_COUNT)]


class Contributions(Section):
    """Counts of a data set, each optional, of what training will see."""

    num_units: Count | None = None
    """Privacy units, counted."""
    num_records: Count | None = None
    """Records, counted."""
    max_records_per_unit: Count | None = None
    """Records of the unit, or of the user, that has most."""
    has_user_id: bool | None = None
    """Whether records carry the id of a person or account."""
    duplicates: _Number | None = None
    """Records that are equal to an earlier one."""
    clip_norm_source: Literal["default", "public", "private"] | None = None
    """Where the clip norm was chosen: not at all, on public data, or on gradients of the private data."""


def compare(spec: PrivacySpec, data: Contributions) -> Iterator[Finding]:
    """PS007, PS008, PS013, PS014 and PS041 that take a look at the data to see."""
    unit, single = spec.claim.privacy_unit, spec.claim.privacy_unit.kind in ("example", "sequence")
    if single and (data.has_user_id or (data.max_records_per_unit or 1) > 1) and unit.id_field is None:
        most = f" up to {data.max_records_per_unit} of one owner" if (data.max_records_per_unit or 1) > 1 else ""
        message = f"expected a user unit, because the data name the owner of a record,{most or ' as stated'}, received "
        fix = "Claim a user unit with max_records_per_unit, or say in a waiver why no owner has two records."
        path = ("claim", "privacy_unit", "kind")
        yield spec.finding("PS007", Severity.WARNING, path, f"{message}{unit.kind}.", fix)
    if data.duplicates and unit.kind != "user" and spec.data.deduplication != "none":
        message = (
            f"expected data without duplicates, as deduplication {spec.data.deduplication} says, received "
            f"{data.duplicates} of them."
        )
        fix = f"Deduplicate what training will read, or write {spec.snippet('deduplication', 'none')}."
        yield spec.finding("PS008", Severity.WARNING, ("data", "deduplication"), message, fix)
    for name in ("num_units", "num_records"):
        stated, counted = getattr(spec.data, name), getattr(data, name)
        if stated is not None and counted is not None and stated != counted:
            message = f"expected {name} to be what the data hold, {counted}, received {stated}."
            fix = "Correct it: sampling probability, denominator and epsilon follow from it."
            yield spec.finding("PS014", Severity.ERROR, ("data", name), message, fix)
    most_records, bound = data.max_records_per_unit, unit.max_records_per_unit
    if not single and most_records is not None and bound is not None and most_records > bound and not unit.selection:
        message = (
            f"expected selection, because a unit has up to {most_records} records and {bound} stay, received nothing."
        )
        fix = f"I{spec.change(('claim', 'privacy_unit', 'selection'), 'random')[1:]}, or another choice of records."
        yield spec.finding("PS014", Severity.ERROR, ("claim", "privacy_unit", "max_records_per_unit"), message, fix)
    _, counted_name = population(spec)
    there = data.num_records if counted_name == "data.num_records" else data.num_units
    for name in ("expected_batch_size", "truncated_batch_size"):
        size = getattr(spec.sampling, name)
        if size is not None and there is not None and size > there:
            message = f"expected {name} of at most the {there} that the data hold, received {shown(size)}."
            fix = f"Write {spec.snippet(name, str(there))} or less. Then tfdp account says what it costs."
            yield spec.finding("PS013", Severity.ERROR, ("sampling", name), message, fix)
    if data.clip_norm_source == "private":
        message = (
            "expected a clip norm chosen on nothing or on public data, received one chosen on gradients of the "
            "private data, an access that epsilon does not count."
        )
        fix = "Use a default such as 1.0, or choose it on public data; the card lists it as not covered."
        yield spec.finding("PS041", Severity.WARNING, ("mechanism", "clip_norm"), message, fix)
