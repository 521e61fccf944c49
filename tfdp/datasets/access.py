"""Reading prepared data at random, so that the texts stay on the disk until the sampler draws them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol


class RandomAccess(Protocol):
    """What `tfds` calls a data source; a list is one, too."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class EncodedRecords:
    """Records that are read and encoded when they are drawn, for `tfdp.poisson_batches`.

    Args:
        source: for example `builder.as_data_source(split="train")`; its records are dictionaries.
        encode: from the text of a record to what the model is fed, for example a list of tokens.
        text_field: the field with the text.
    """

    def __init__(self, source: RandomAccess, encode: Callable[[str], Any], text_field: str = "text"):
        self._source = source
        self._encode = encode
        self._field = text_field

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Any:
        return self._encode(_text(self._source[index][self._field]))


def unit_ids(source: RandomAccess, id_field: str) -> Iterator[str]:
    """The privacy unit of every record, in the order of the source; one record is in memory at a time."""
    for index in range(len(source)):
        yield _text(source[index][id_field])


def _text(value: Any) -> str:
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)
