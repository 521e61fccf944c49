"""Nested records: dicts and tuples are structure, anything else is a leaf (an array); reading one from a source."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from tfdp.errors import DataError

Array: TypeAlias = npt.NDArray[Any]
Indices: TypeAlias = npt.NDArray[np.int64]
# dict[str, Structure] | tuple[Structure, ...] | leaf; spelling the recursion out would help neither a reader nor mypy.
Structure: TypeAlias = Any

_PARTS = ("x", "y", "sample_weight")


@dataclasses.dataclass(frozen=True)
class Leaf:
    """What one leaf of every record looks like: `path` such as "x/token_ids", `shape` without the record axis."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class Records(Protocol):
    """Records that can be sampled.

    Attributes:
        template: {"x": ..., "y": ..., "sample_weight": ...} with a `Leaf` at each leaf; absent parts are left out.
    """

    template: dict[str, Structure]

    def __len__(self) -> int: ...

    def take(self, indices: Indices, rows: int | None = None) -> dict[str, Structure]:
        """Reads the records at `indices`.

        Args:
            indices: int64 [n].
            rows: the length of the record axis of the result, at least n; by default n.

        Returns:
            The structure of `template`, every leaf an array [rows, ...]; what follows row n is zero (the padding
            token in token records).
        """


def map_leaves(function: Callable[..., Any], *structures: Structure) -> Structure:
    """Applies `function` to the corresponding leaves of structures of the same form."""
    first = structures[0]
    if isinstance(first, dict):
        return {key: map_leaves(function, *(structure[key] for structure in structures)) for key in first}
    if isinstance(first, tuple):
        return tuple(map_leaves(function, *parts) for parts in zip(*structures, strict=True))
    return function(*structures)


def map_with_path(function: Callable[[str, Any], Any], structure: Structure, path: str = "") -> Structure:
    """Applies `function` to the path ("x/token_ids") and the value of each leaf."""
    prefix = f"{path}/" if path else ""
    if isinstance(structure, dict):
        return {key: map_with_path(function, value, f"{prefix}{key}") for key, value in structure.items()}
    if isinstance(structure, tuple):
        return tuple(map_with_path(function, value, f"{prefix}{i}") for i, value in enumerate(structure))
    return function(path, structure)


def leaves(structure: Structure) -> list[Any]:
    """The leaves in the order in which `rebuild` puts them back."""
    if isinstance(structure, dict):
        return [leaf for value in structure.values() for leaf in leaves(value)]
    if isinstance(structure, tuple):
        return [leaf for value in structure for leaf in leaves(value)]
    return [structure]


def rebuild(structure: Structure, values: Sequence[Any]) -> Structure:
    """`structure` with its leaves replaced by `values`."""
    rest = iter(values)
    return map_leaves(lambda _: next(rest), structure)


def kept_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype in which a leaf is handed on: float64 becomes float32, as in `model.fit`."""
    return np.dtype(np.float32) if dtype == np.float64 else dtype


def numeric_array(leaf: Any, path: str) -> Array:
    """`leaf` as an array of numbers; raises DataError where it is none."""
    try:
        array = np.asarray(leaf)
    except Exception:
        # The message of numpy or of the leaf may quote values.
        raise DataError(
            f"Expected {path} to be an array of numbers. Received: {type(leaf).__name__} that does not form an array. "
            "Give all its rows the same length; bare token sequences may differ in length with sequence_length."
        ) from None
    # Numpy calls the dtypes that it does not know itself, such as bfloat16, the kind V.
    if array.dtype.kind not in "biuf" and not (array.dtype.kind == "V" and "float" in array.dtype.name):
        raise DataError(
            f"Expected {path} to be an array of numbers. Received: dtype {array.dtype.type.__name__}. "
            "Turn text into token numbers before, for example with the model's preprocessor; "
            "rows of different lengths are padded before, or passed as bare token sequences with sequence_length."
        )
    return array


def split_parts(record: tuple[Any, ...], name: str) -> dict[str, Structure]:
    """(x, y, sample_weight) as a dict without the absent parts."""
    if not 1 <= len(record) <= len(_PARTS) or record[0] is None:
        raise DataError(
            f"Expected {name} to be (x,), (x, y) or (x, y, sample_weight). Received: a tuple of {len(record)} values"
            + (", the first of them None" if record and record[0] is None else "")
            + ". Several inputs of one model go in a dict or a tuple inside x."
        )
    return {part: value for part, value in zip(_PARTS, record, strict=False) if value is not None}


def read_item(source: Any, index: int) -> dict[str, Structure]:
    """Reads record `index` of a random-access source as {"x": ..., ...} of arrays.

    Raises:
        DataError: the source failed, or the record is not made of numbers; only the index is named.
    """
    try:
        item = source[index]
    except Exception as error:
        # The message of a source may quote the record, and a chained exception would print it.
        raise DataError(
            f"Expected the source to return record {index}. Received: {type(error).__name__} from its __getitem__. "
            "Read that index yourself to see the whole error."
        ) from None
    parts = split_parts(item, f"record {index}") if isinstance(item, tuple) else {"x": item}

    def read(path: str, leaf: Any) -> Array:
        array = numeric_array(leaf, f"{path} of record {index}")
        return array.astype(kept_dtype(array.dtype), copy=False)

    return dict(map_with_path(read, parts))
