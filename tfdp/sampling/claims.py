"""The claim on a privacy unit, enforced where the records come in.

What the accountant is told about units has to hold of the data that are sampled, so it is made to hold here, from the
ids of the records and the plan alone:

| the claim is about          | what is sampled | how the unit is bounded                                            |
|-----------------------------|-----------------|--------------------------------------------------------------------|
| an example, a sequence      | records         | a record is a unit; ids are refused, since they would mean more    |
| a document, a user, k = 1   | units           | one record of every unit stays                                     |
| the same, user_wise_dp_sgd  | units           | k slots of a unit are averaged, and clipped together               |
| the same, group_privacy     | records         | at most k records of a unit stay; the event covers k of them       |

Which numbers are public. q and the denominator are constants of the plan. The number of units has to be the one that
the spec states. Under group privacy, `data.num_records` is only the number that q was computed from: one unit more or
less changes the number of records by up to k, and neither q nor the denominator may follow it. So the records that stay
may be more or fewer than stated, within a tenth, and a round number can be published.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from tfdp.entropy import WordSource
from tfdp.errors import DataError
from tfdp.sampling.records import as_records
from tfdp.sampling.selection import BY_LENGTH, RANDOM_CHUNK, checked_scores, refuse_more_than
from tfdp.sampling.structures import Array, Leaf, Records
from tfdp.sampling.unit_records import (
    ChunkRecords,
    OneSlot,
    Selection,
    SomeRecords,
    UnitRecords,
    record_lengths,
    used_tokens,
)
from tfdp.sampling.units import UnitMap
from tfdp.spec.fields import PrivacyUnit

# How far the records that stay may be from the number that the sampling probability was computed from.
TOLERANCE = 0.1


class UnitPlan(Protocol):
    """What is read of a plan here."""

    @property
    def num_units(self) -> int: ...
    @property
    def num_records(self) -> int | None: ...
    @property
    def records_per_unit(self) -> int: ...
    @property
    def group_size(self) -> int: ...
    @property
    def privacy_unit(self) -> PrivacyUnit: ...


def claims_whole_unit(unit: PrivacyUnit) -> bool:
    """Whether the claim is about more than single records, so that ids have to say what belongs together."""
    return unit.kind in ("document", "user")


def checked_units(plan: UnitPlan, unit_ids: Any) -> UnitMap:
    """The map of the units, as far as the ids alone tell whether the claim can be kept.

    Args:
        plan: the plan; its claim is about a document or a user.
        unit_ids: one id per record.

    Raises:
        DataError: no ids, or another number of units, of records, or of records of a unit than the plan says.
    """
    unit = plan.privacy_unit
    if unit_ids is None:
        raise DataError(
            f"Expected the id of its {unit.kind} for every record (unit_ids=...), because the plan claims privacy for "
            f"one {unit.kind}, named by {unit.id_field!r}. Received: none. Without ids nothing bounds what a "
            f"{unit.kind} contributes: pass them, or claim an example."
        )
    units = UnitMap.from_ids(unit_ids)
    if units.num_units != plan.num_units:
        raise DataError(
            f"Expected {plan.num_units} units, as data.num_units of the spec says. Received: records of "
            f"{units.num_units}. Sampling probability, denominator and delta rest on this number: pass the ids that "
            f"the spec means ({unit.id_field!r}), or correct the spec and have it reviewed again."
        )
    if unit.selection is None:
        refuse_more_than(unit.max_records_per_unit or 1, units)
    if plan.group_size > 1:
        _check_number_of_records(plan, int(np.minimum(units.counts, plan.group_size).sum()))
    return units


def records_of_units(
    records: Any,
    plan: UnitPlan,
    *,
    units: UnitMap,
    scores: Any = None,
    sequence_length: int | None = None,
    pad_value: int = 0,
    separator: int | None = None,
    words: Callable[[], WordSource],
) -> Records:
    """What the sampler draws from, under a claim about whole units.

    Args:
        records: one row per record; see `tfdp.sampling.records`.
        plan: the plan.
        units: from `checked_units`.
        scores: one number per record that the selection ranks by; lengths are measured where they are not given.
        sequence_length, pad_value: for token records.
        separator: a token between the records of a random chunk.
        words: makes the source of random bits of one draw.

    Returns:
        The source, one item per unit (per record under group privacy).

    Raises:
        DataError: the records do not keep the claim, or do not fit the ids.
    """
    unit, total = plan.privacy_unit, len(units.records)
    if not isinstance(records, tuple | dict) and len(records) != total:
        raise _lengths_differ(len(records), total)
    most = unit.max_records_per_unit or 1
    if unit.selection == RANDOM_CHUNK:
        if unit.method != "user_wise_dp_sgd" or sequence_length is None:
            raise DataError(
                "Expected method user_wise_dp_sgd and a sequence_length with the selection random_chunk, which cuts "
                f"spans from the whole text of a unit. Received: method {unit.method}, "
                f"sequence_length={sequence_length}. Pass token sequences and sequence_length=..., a public number."
            )
        chunks = ChunkRecords(
            records,
            units,
            slots=most,
            length=sequence_length,
            most_tokens=unit.max_tokens_per_unit,
            pad_value=pad_value,
            separator=separator,
            words=words,
        )
        return chunks if most > 1 else OneSlot(chunks)

    source = as_records(records, sequence_length=sequence_length, pad_value=pad_value)
    if len(source) != total:
        raise _lengths_differ(len(source), total)
    _refuse_pre_grouped(source)
    tokens = None
    if unit.max_tokens_per_unit is not None:
        tokens = used_tokens(source, records), unit.max_tokens_per_unit
    selection = Selection(most, unit.selection, _scores(unit, source, records, scores, total), tokens)
    if unit.method == "user_wise_dp_sgd":
        by_unit = UnitRecords(source, units, selection, words)
        return by_unit if most > 1 else OneSlot(by_unit)
    return SomeRecords(source, selection.of(units, words()).records)


def _scores(unit: PrivacyUnit, source: Records, records: Any, scores: Any, total: int) -> Array | None:
    if scores is not None:
        return checked_scores(scores, total)
    return record_lengths(source, records) if unit.selection in BY_LENGTH else None


def _refuse_pre_grouped(source: Records) -> None:
    """A token record is one sequence. Several of them in a row of the data would get past the limit of k."""
    x = source.template["x"]
    token_ids = x.get("token_ids") if isinstance(x, dict) else x
    if isinstance(token_ids, Leaf) and token_ids.dtype.kind in "iu" and len(token_ids.shape) > 1:
        raise DataError(
            f"Expected one record per row, with one id each. Received: tokens with {len(token_ids.shape)} axes in a "
            "row, which look like records grouped by unit. Pass the records one by one: they are grouped here, by "
            "unit_ids."
        )


def _check_number_of_records(plan: UnitPlan, kept: int) -> None:
    stated = plan.num_records or 0
    if not (1 - TOLERANCE) * stated <= kept <= (1 + TOLERANCE) * stated:
        raise DataError(
            f"Expected about {stated} records that may be sampled, as data.num_records of the spec says. Received: "
            f"{kept}, with at most {plan.group_size} of a unit kept. The sampling probability was computed from the "
            f"stated number: write num_records: {kept}, or a round number near it, and have the spec reviewed again."
        )


def _lengths_differ(records: int, ids: int) -> DataError:
    return DataError(
        f"Expected one id per record. Received: {records} records and {ids} ids. Give every record the id of its unit; "
        "a batched dataset is unbatched first, and records that were grouped by unit are passed one by one."
    )
