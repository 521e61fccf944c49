"""Canaries among the records of a run, and the coins that keep half of them out."""

from __future__ import annotations

from typing import Any

import numpy as np

from tfdp.auditing import Canaries
from tfdp.errors import DataError
from tfdp.sampling.claims import claims_whole_unit
from tfdp.sampling.selection import RANDOM_CHUNK
from tfdp.spec.fields import PrivacyUnit
from tfdp.workflow.records import TextRecords
from tfdp.workflow.units import splits_documents


def with_canaries(records: TextRecords, canaries: Canaries, unit: PrivacyUnit) -> TextRecords:
    """The records and all canaries, each an owner of its own; those whose coin fell on "out" marked absent.

    An absent record keeps its place, so that the number of units stays a public constant, and its tokens have weight
    zero in training (`without_absent`): its gradient is zero, which is what the mechanism sees of a unit that is not
    there.

    Raises:
        DataError: more repetitions than the claim allows records of a unit, or a unit whose texts are cut.
    """
    most = unit.max_records_per_unit or 1
    if claims_whole_unit(unit) and canaries.repetitions > most:
        raise DataError(
            f"Expected at most {most} repetitions of a canary, as a {unit.kind} has no more records. Received: "
            f"{canaries.repetitions}. Repeat it less, or raise max_records_per_unit in the spec."
        )
    if cuts_texts(unit):
        raise DataError(
            "Expected records that are whole texts, to put canaries among them. Received: a unit whose texts are "
            "packed or cut into pieces. Train without canaries."
        )
    texts = [text for text in canaries.texts for _ in range(canaries.repetitions)]
    out = [not coin for coin in canaries.included.tolist() for _ in range(canaries.repetitions)]
    owners = [owner for owner in canaries.owners for _ in range(canaries.repetitions)]
    return TextRecords(
        (*records.texts, *texts),
        None if records.unit_ids is None else (*records.unit_ids, *owners),
        absent=(*(records.absent or (False,) * len(records)), *out),
    )


def cuts_texts(unit: PrivacyUnit) -> bool:
    """Whether what is trained on are pieces of texts, so that a record is no text any more."""
    return unit.kind == "sequence" or splits_documents(unit) or unit.selection == RANDOM_CHUNK


def without_absent(arrays: Any, records: TextRecords) -> Any:
    """`(x, y, sample_weight)` with weight zero for the tokens of absent records."""
    if records.absent is None:
        return arrays
    x, y, weight = arrays
    return x, y, np.where(np.asarray(records.absent)[:, None], np.float32(0), weight)
