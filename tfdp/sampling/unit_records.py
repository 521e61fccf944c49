"""Records of units for the sampler: some of the records one by one, k slots per unit, or spans of a unit's text.

| source         | draws from   | what `take` returns of each                                                  |
|----------------|--------------|------------------------------------------------------------------------------|
| `SomeRecords`  | kept records | the record                                                                   |
| `UnitRecords`  | units        | k slots with its records, chosen anew each time where the strategy is random |
| `ChunkRecords` | units        | k slots with one span of its text, which begins at a random token each time  |
| `OneSlot`      | units        | the only slot of one of these two, without its axis                          |

A unit with fewer than k records leaves slots empty. `record_weight` [k] is 1 for a slot in use and 0 for an empty one,
and the loss of the unit is the mean over the slots in use: a unit with one record is that record, however large k is.
Its gradient is clipped after this mean, so that the unit moves the sum by at most C either way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from tfdp.entropy import WordSource
from tfdp.errors import DataError
from tfdp.sampling.selection import RANDOM, keep_records, uniform_below
from tfdp.sampling.structures import Array, Indices, Leaf, Records, Structure, map_leaves
from tfdp.sampling.tokens import TokenRecords, checked_tokens, token_batch, token_template
from tfdp.sampling.units import UnitMap

RECORD_WEIGHT = "record_weight"


class SomeRecords:
    """The records at `indices` of another source."""

    def __init__(self, source: Records, indices: Indices):
        self.template = source.template
        self._source = source
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def take(self, indices: Indices, rows: int | None = None) -> dict[str, Structure]:
        """Reads the records at `indices`; see `structures.Records`."""
        return self._source.take(self._indices[indices], rows)


@dataclasses.dataclass(frozen=True)
class Selection:
    """How a unit's k records are chosen.

    Attributes:
        most: k, the slots of a unit.
        strategy: of `tfdp.sampling.selection`; None where no unit has more than k records.
        scores: [all records] what it ranks by.
        tokens: ([all records] number of tokens, most tokens of a unit), or None for no such limit.
    """

    most: int
    strategy: str | None
    scores: Array | None = None
    tokens: tuple[Array, int] | None = None

    def of(self, units: UnitMap, words: WordSource | None = None) -> UnitMap:
        """The records that stay."""
        return keep_records(units, self.most, self.strategy, scores=self.scores, words=words, tokens=self.tokens)


class UnitRecords:
    """k slots per unit.

    Args:
        source: all records.
        units: the map from units to records.
        selection: how the k are chosen. "random" chooses anew for every draw, the others once.
        words: makes the source of random bits of one draw.
    """

    def __init__(self, source: Records, units: UnitMap, selection: Selection, words: Callable[[], WordSource]):
        self._source, self._selection, self._words = source, selection, words
        self._redrawn = selection.strategy in RANDOM
        self._units = units if self._redrawn else selection.of(units)
        slots = selection.most
        self.template: dict[str, Structure] = dict(
            map_leaves(lambda leaf: dataclasses.replace(leaf, shape=(slots, *leaf.shape)), source.template)
        )
        self.template[RECORD_WEIGHT] = Leaf(RECORD_WEIGHT, (slots,), np.dtype(np.float32))

    def __len__(self) -> int:
        return self._units.num_units

    def take(self, indices: Indices, rows: int | None = None) -> dict[str, Structure]:
        """Reads the units at `indices`; see `structures.Records`."""
        count = len(indices) if rows is None else rows
        chosen = self._units.only(indices)
        if self._redrawn:
            chosen = self._selection.of(chosen, self._words())
        # One row more than there are records: it is padding, and stands in every empty slot.
        taken = self._source.take(chosen.records, len(chosen.records) + 1)
        place = np.full((count, self._selection.most), len(chosen.records), np.int64)
        slot = np.arange(len(chosen.records)) - np.repeat(chosen.starts[:-1], chosen.counts)
        place[chosen.owners, slot] = np.arange(len(chosen.records))
        used = (place < len(chosen.records)).astype(np.float32)
        return {**dict(map_leaves(lambda leaf: leaf[place], taken)), RECORD_WEIGHT: used}


class ChunkRecords:
    """One span of up to k * length + 1 consecutive tokens per unit, across the borders of its records.

    The span begins at a uniformly random token of those after which it still fits; the whole text is taken where it is
    shorter. Slot j reads tokens j * length to (j + 1) * length of the span and predicts the ones after them, so that
    every token of the span but the first is predicted once.

    Args:
        tokens: all records, each a sequence of integers.
        units: the map from units to records.
        slots: k.
        length: tokens of a slot, public.
        most_tokens: the most tokens of a span that are predicted, None for k * length.
        pad_value: the token that fills what is empty.
        separator: a token between two records, None for none.
        words: makes the source of random bits of one draw.
    """

    def __init__(
        self,
        tokens: Any,
        units: UnitMap,
        *,
        slots: int,
        length: int,
        most_tokens: int | None,
        pad_value: int,
        separator: int | None,
        words: Callable[[], WordSource],
    ):
        texts = [checked_tokens(tokens[index], index) for index in units.records.tolist()]
        if separator is not None:
            after = np.array([separator], np.int32)
            last = set((units.starts[1:] - 1).tolist())
            texts = [text if place in last else np.append(text, after) for place, text in enumerate(texts)]
        sizes = np.concatenate([[0], np.cumsum([len(text) for text in texts], dtype=np.int64)])
        self._starts = sizes[units.starts]
        self._text = np.concatenate(texts)
        self._slots, self._length, self._pad_value, self._words = slots, length, pad_value, words
        self._most = slots * length if most_tokens is None else min(slots * length, most_tokens)
        self.template = token_template((slots, length))
        self.template[RECORD_WEIGHT] = Leaf(RECORD_WEIGHT, (slots,), np.dtype(np.float32))

    def __len__(self) -> int:
        return len(self._starts) - 1

    def take(self, indices: Indices, rows: int | None = None) -> dict[str, Structure]:
        """Reads one span of each of the units at `indices`; see `structures.Records`."""
        count = len(indices) if rows is None else rows
        width, span = self._slots * self._length + 1, self._most + 1
        first, sizes = self._starts[indices], np.diff(self._starts)[indices]
        first = first + uniform_below(np.maximum(sizes - span, 0) + 1, self._words())
        place = np.arange(width)
        inside = place < np.minimum(sizes, span)[:, None]
        tokens = np.full((count, width), self._pad_value, np.int32)
        real = np.zeros((count, width), np.bool_)
        real[: len(indices)] = inside
        tokens[: len(indices)][inside] = self._text[(first[:, None] + place)[inside]]
        # Slot j: columns j * length to j * length + length, the last of which is the first of slot j + 1.
        columns = np.arange(self._slots)[:, None] * self._length + np.arange(self._length + 1)
        taken = token_batch(tokens[:, columns], real[:, columns])
        return {**taken, RECORD_WEIGHT: taken["sample_weight"].any(-1).astype(np.float32)}


class OneSlot:
    """Units of one slot, without the axis of slots and without its weight: for plans of one record per unit."""

    def __init__(self, source: UnitRecords | ChunkRecords):
        self._source = source
        self.template = self._first(lambda leaf: dataclasses.replace(leaf, shape=leaf.shape[1:]), source.template)

    def __len__(self) -> int:
        return len(self._source)

    def take(self, indices: Indices, rows: int | None = None) -> dict[str, Structure]:
        """Reads the units at `indices`; see `structures.Records`."""
        return self._first(lambda leaf: leaf[:, 0], self._source.take(indices, rows))

    def _first(self, function: Callable[[Any], Any], parts: dict[str, Structure]) -> dict[str, Structure]:
        return {name: map_leaves(function, part) for name, part in parts.items() if name != RECORD_WEIGHT}


def used_tokens(source: Records, raw: Any) -> Array:
    """[records] tokens of each record that are used: what is cut off is not counted.

    Raises:
        DataError: as `record_lengths`.
    """
    lengths = record_lengths(source, raw)
    if isinstance(source, TokenRecords):  # the last token is predicted only, so one more is used than are read
        lengths = np.minimum(lengths, source.template["y"].shape[0] + 1)
    return lengths


def record_lengths(source: Records, raw: Any) -> Array:
    """[records] tokens of each record, where the records themselves tell.

    Raises:
        DataError: they do not, or only by reading all of them.
    """
    if isinstance(source, TokenRecords):
        lengths = source.lengths
        if lengths is not None:
            return lengths.astype(np.float64)
    elif isinstance(raw, tuple | dict | list) and "sample_weight" in source.template:
        leaf = source.template["sample_weight"]
        if isinstance(leaf, Leaf) and len(leaf.shape) == 1:
            every = np.arange(len(source))
            return np.concatenate(
                [
                    (np.asarray(source.take(part)["sample_weight"]) != 0).sum(1)
                    for part in np.array_split(every, max(1, len(every) // 4096))
                ]
            ).astype(np.float64)
    raise DataError(
        "Expected records that tell their length (token sequences, or token weights as sample_weight). Received: "
        "others. Pass scores=..., the length of each record."
    )
