"""What a run writes down so that it can be audited: which units it was trained on, which it was not, and how.

No text and no id is copied. The file names the data and the rule that splits them, and keeps a digest of each side by
which a later reading is recognised. Whoever knows a digest can test a guess about the data, so it is keyed with random
bits, and the file is private like the data; see `tfdp.sampling.partition`.
"""

from __future__ import annotations

import hmac
import os
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tfdp.auditing import Canaries
from tfdp.entropy import system_bytes
from tfdp.errors import DataError, MisuseError
from tfdp.files import atomic_write_text
from tfdp.workflow.records import TextRecords, read_text_records, split_held_out

RECORDS = "records.json"
NOTE = "Private, like the data: do not release. Tells an audit which units were trained on; holds no text and no id."


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


class DataSource(_Part):
    """Where the records come from.

    Attributes:
        kind: "file", or "demo": the docstrings that `tfdp demo` reads.
        path: absolute; None for the demo.
        text_field, id_field, group_field, drop_missing: as for `read_text_records`.
        holdout: the share of the units that was set aside.
        most_units: of the demo; None for all.
    """

    kind: Literal["file", "demo"] = "file"
    path: str | None = None
    text_field: str = "text"
    id_field: str | None = None
    group_field: str | None = None
    drop_missing: bool = False
    holdout: float = Field(default=0.1, ge=0, lt=1)
    most_units: int | None = None


class CanarySettings(_Part):
    """The canaries of a run; see `tfdp.auditing.Canaries`."""

    pattern: str
    count: int
    repetitions: int
    key: str = Field(repr=False)

    @property
    def canaries(self) -> Canaries:
        return Canaries(self.pattern, self.count, self.repetitions, bytes.fromhex(self.key))


class ModelSource(_Part):
    """How the model of a run is built and trained.

    Attributes:
        name: as for `tfdp train --model`.
        lora_rank, sequence_length, optimizer, learning_rate: as there.
    """

    name: str
    lora_rank: int | None = None
    sequence_length: int = 128
    optimizer: str = "adamw"
    learning_rate: float = 1e-3


class RunRecord(_Part):
    """The content of records.json.

    Attributes:
        data, model: where both came from.
        canaries: that were put among the training data; None without.
        members, non_members: units on each side, canaries not counted.
        key: of the digests.
        member_digest, non_member_digest: of the records of each side, in order.
    """

    note: str = NOTE
    schema_version: Literal["1.0"] = "1.0"
    data: DataSource
    model: ModelSource
    canaries: CanarySettings | None = None
    members: int
    non_members: int
    key: str = Field(repr=False)
    member_digest: str
    non_member_digest: str


def start_record(
    directory: str | os.PathLike[str],
    *,
    data: DataSource,
    model: ModelSource,
    members: TextRecords,
    non_members: TextRecords,
    canaries: Canaries | None = None,
    begun: bool = False,
) -> RunRecord:
    """Writes the record of a run before its first step, or compares with the one that a run left there.

    A run that goes on keeps its canaries: `canaries` serves a new one only, and of an earlier one the pattern, number
    and repetitions have to be the same.

    Args:
        begun: whether steps of the run were spent already; else what lies there is of a call that came to nothing.

    Raises:
        MisuseError: the run was begun with other data, another model or other canaries, or canaries are to join later.
    """
    path = Path(directory) / RECORDS
    if begun and not path.exists() and canaries is not None:
        raise MisuseError(
            f"Expected {path}, which says which canaries the run was begun with. Received: no file. Restore it, or go "
            "on without canaries if it had none."
        )
    if begun and path.exists():
        known = read_record(directory)
        settings = None if canaries is None else (canaries.pattern, canaries.count, canaries.repetitions)
        before = known.canaries
        differing = [
            name
            for name, same in (
                ("data", known.data == data),
                ("model", known.model == model),
                ("canaries", settings == (before and (before.pattern, before.count, before.repetitions))),
            )
            if not same
        ]
        if differing:
            raise MisuseError(
                f"Expected the {' and '.join(differing)} that the run in {directory} was begun with. Received: others. "
                "Give the same ones, or choose another directory."
            )
        check_records(known, members, non_members, directory)
        return known
    key = system_bytes(32)
    record = RunRecord(
        data=data,
        model=model,
        canaries=None
        if canaries is None
        else CanarySettings(
            pattern=canaries.pattern,
            count=canaries.count,
            repetitions=canaries.repetitions,
            key=canaries.key.hex(),
        ),
        members=members.num_units,
        non_members=non_members.num_units,
        key=key.hex(),
        member_digest=_digest(key, members),
        non_member_digest=_digest(key, non_members),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_text(path, record.model_dump_json(indent=2) + "\n")
    return record


def read_record(directory: str | os.PathLike[str]) -> RunRecord:
    """The record of a run.

    Raises:
        DataError: none is there, or it cannot be read.
    """
    path = Path(directory) / RECORDS
    try:
        return RunRecord.model_validate_json(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        raise DataError(
            f"Expected {path}, in which tfdp train and tfdp demo write down what a run was trained on. Received: "
            f"{type(error).__name__} while reading it. A run of another kind is attacked with tfdp.auditing."
        ) from None


def records_of(record: RunRecord, directory: str | os.PathLike[str]) -> tuple[TextRecords, TextRecords]:
    """Reads the data of a run again, from a file: `(members, non-members)`.

    Raises:
        MisuseError: they are not the ones of the run any more.
        DataError: as `read_text_records`.
    """
    data = record.data
    assert data.path is not None
    read = read_text_records(
        data.path,
        text_field=data.text_field,
        id_field=data.id_field,
        group_field=data.group_field,
        drop_missing=data.drop_missing,
    )
    members, non_members = split_held_out(read, data.holdout)
    check_records(record, members, non_members, directory)
    return members, non_members


def check_records(
    record: RunRecord, members: TextRecords, non_members: TextRecords, directory: str | os.PathLike[str]
) -> None:
    """Refuses records that are not the ones of the run.

    Raises:
        MisuseError: they differ, or stand in another order.
    """
    key = bytes.fromhex(record.key)
    for known, records in ((record.member_digest, members), (record.non_member_digest, non_members)):
        if not hmac.compare_digest(known, _digest(key, records)):
            raise MisuseError(
                f"Expected the records that the run in {directory} was begun with. Received: others, or in another "
                "order. Restore the data: who was trained on cannot be told otherwise."
            )


def _digest(key: bytes, records: TextRecords) -> str:
    digest = hmac.new(key, digestmod="sha256")
    for index, text in enumerate(records.texts):
        owner = "" if records.unit_ids is None else records.unit_ids[index]
        for part in (owner, text):
            content = part.encode("utf-8", "surrogatepass")
            digest.update(len(content).to_bytes(8, "big") + content)
    return digest.hexdigest()
