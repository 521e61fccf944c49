"""Records as the sampler reads them: something with a length, from which the records of a draw can be taken.

What `as_records` understands, and how it decides:

| given                                               | read as                                                      |
|-----------------------------------------------------|--------------------------------------------------------------|
| a tuple `(x,)`, `(x, y)` or `(x, y, sample_weight)` | columns, as for `model.fit`: leaves have a record axis first |
| a dict                                              | columns of `x` alone                                         |
| one array of integers [records, tokens]             | token records of a language model (see below)                |
| any other array                                     | a column of `x` alone                                        |
| a list, or an array of objects                      | one record per element, checked and stacked now              |
| anything else with `__len__` and `__getitem__`      | one record per index, read and checked when it is drawn      |

A record is `x` (an array, or a dict or tuple of them), or a tuple `(x, y)` or `(x, y, sample_weight)`. Inside either,
dicts and tuples are structure and a list is an array. All records have the same structure, shapes and dtypes.

A record that is nothing but a 1-D sequence of integers is a token record: x = {"token_ids", "padding_mask"} from all
tokens but the last, y = all tokens but the first, sample_weight = 1 where y is a real token. Token records may differ
in length if `sequence_length` (the length of x and y, a public number) is given: longer ones are cut, shorter ones
padded.

Errors name an index and a leaf, never what a record contains.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tfdp.errors import DataError
from tfdp.sampling.structures import (
    Array,
    Indices,
    Leaf,
    Records,
    Structure,
    kept_dtype,
    map_leaves,
    map_with_path,
    numeric_array,
    read_item,
    split_parts,
)
from tfdp.sampling.tokens import TokenOptions, TokenRecords


def as_records(records: Any, *, sequence_length: int | None = None, pad_value: int = 0) -> Records:
    """Makes `records` readable for the sampler; the module docstring says what may be given.

    Args:
        records: the records.
        sequence_length: for token records, the length of x and y.
        pad_value: for token records, the token that fills short ones.

    Raises:
        DataError: the records cannot be sampled; the message says what was expected and what to do.
    """
    options = TokenOptions(sequence_length, pad_value)
    if isinstance(records, tuple):
        return _from_columns(split_parts(records, "records"), options)
    if isinstance(records, dict):
        return _from_columns({"x": records}, options)
    if hasattr(records, "row_splits") and hasattr(records, "flat_values"):  # tf.RaggedTensor
        records = np.split(np.asarray(records.flat_values), np.asarray(records.row_splits)[1:-1])
    if isinstance(records, np.ndarray) and records.dtype == object and records.ndim == 1:
        records = list(records)
    if isinstance(records, np.ndarray) or (hasattr(records, "numpy") and hasattr(records, "shape")):
        array = numeric_array(records, "records")
        if not options.are_tokens(array, axes_before=1):
            return _from_columns({"x": array}, options)
        if len(array) == 0:
            raise _empty()
        return TokenRecords(array, options)
    if isinstance(records, (str, bytes)) or not (hasattr(records, "__len__") and hasattr(records, "__getitem__")):
        raise DataError(
            "Expected records as arrays, a tuple (x, y, sample_weight) of arrays, a list with one record per element, "
            f"a tf.data.Dataset, or a source with __len__ and __getitem__. Received: {type(records).__name__}. "
            "Load the records into one of these; an iterator or a generator cannot be sampled."
        )
    if len(records) == 0:
        raise _empty()
    return _from_items(records, options)


class _ArrayRecords:
    """Columns in memory, or memory-mapped: a draw is one fancy index per leaf."""

    def __init__(self, columns: dict[str, Structure], template: dict[str, Structure], length: int):
        self.template = template
        self._columns = columns
        self._length = length

    def __len__(self) -> int:
        return self._length

    def take(self, indices: Indices, rows: int | None = None) -> dict[str, Structure]:
        count = len(indices) if rows is None else rows

        def gather(leaf: Leaf, column: Array) -> Array:
            out = np.zeros((count, *leaf.shape), leaf.dtype)
            out[: len(indices)] = column[indices]
            return out

        return dict(map_leaves(gather, self.template, self._columns))


class _ItemRecords:
    """A random-access source: the records of a draw are read one by one when they are drawn."""

    def __init__(self, source: Any, template: dict[str, Structure]):
        self.template = template
        self._source = source
        self._length = len(source)

    def __len__(self) -> int:
        return self._length

    def take(self, indices: Indices, rows: int | None = None) -> dict[str, Structure]:
        count = len(indices) if rows is None else rows
        result = dict(map_leaves(lambda leaf: np.zeros((count, *leaf.shape), leaf.dtype), self.template))
        for row, index in enumerate(indices.tolist()):
            _fill(result, self.template, read_item(self._source, index), row, index)
        return result


def _from_columns(parts: dict[str, Structure], options: TokenOptions) -> Records:
    """Columns, checked against each other."""
    options.refuse_sequence_length()
    columns = dict(map_with_path(lambda path, leaf: numeric_array(leaf, path), parts))
    lengths: dict[str, int] = {}

    def describe(path: str, column: Array) -> Leaf:
        if column.ndim == 0:
            raise DataError(
                f"Expected {path} to have a record axis first. Received: a scalar. Give one value per record."
            )
        lengths[path] = len(column)
        return Leaf(path, column.shape[1:], kept_dtype(column.dtype))

    template = dict(map_with_path(describe, columns))
    if not any(path == "x" or path.startswith("x/") for path in lengths):
        raise DataError("Expected at least one array in x. Received: none. Pass the inputs of the model as x.")
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{path} has {count}" for path, count in lengths.items())
        raise DataError(
            f"Expected the same number of records in every array. Received: {counts}. Give every array one row per "
            "record; several inputs of one model go in a dict or a tuple, not in a list."
        )
    length = next(iter(lengths.values()))
    if length == 0:
        raise _empty()
    return _ArrayRecords(columns, template, length)


def _from_items(source: Any, options: TokenOptions) -> Records:
    """One record per index; a list is read, checked and stacked now, any other source when it is drawn."""
    first = read_item(source, 0)
    if set(first) == {"x"} and options.are_tokens(first["x"]):
        return TokenRecords(source, options)
    options.refuse_sequence_length()

    def describe(path: str, leaf: Array) -> Leaf:
        return Leaf(path, leaf.shape, leaf.dtype)

    template = dict(map_with_path(describe, first))
    items = _ItemRecords(source, template)
    if not isinstance(source, list):
        return items
    return _ArrayRecords(items.take(np.arange(len(source), dtype=np.int64)), template, len(source))


def _fill(result: Structure, template: Structure, record: Structure, row: int, index: int) -> None:
    """Copies one record into `row` of `result`, if it has the structure, shapes and dtypes of record 0."""
    if isinstance(template, Leaf):
        if not isinstance(record, np.ndarray) or record.shape != template.shape or record.dtype != template.dtype:
            raise DataError(
                f"Expected {template.path} of record {index} to have the shape and dtype of record 0, "
                f"{template.shape} {template.dtype}. Received: another. Give every record the same form."
            )
        result[row] = record
        return
    keys = list(template) if isinstance(template, dict) else list(range(len(template)))
    same = type(record) is type(template) and len(record) == len(keys)
    if not same or (isinstance(template, dict) and set(record) != set(keys)):
        raise DataError(
            f"Expected record {index} to have the structure of record 0. Received: another structure. "
            "Give every record the same form."
        )
    for key in keys:
        _fill(result[key], template[key], record[key], row, index)


def _empty() -> DataError:
    return DataError("Expected at least one record. Received: none. Check that the records were loaded.")
