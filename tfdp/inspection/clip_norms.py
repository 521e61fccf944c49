"""`tfdp.suggest_clip_norm`: how large the gradients of units are, for the choice of a clip norm.

Whoever looks at gradients of private data learns about them, and so does whoever sees the norm that was chosen: epsilon
does not cover it. The look is noted before it happens, and the card lists it. A clip norm that costs nothing is a
default (1.0), or one that was chosen on public data; one that is paid for is `clip_norm: {quantile: ...}`.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tfdp.data import save_figure
from tfdp.entropy import system_generator
from tfdp.errors import DataError, UnsupportedLayerError
from tfdp.findings import errors
from tfdp.gradients import sums_function
from tfdp.inspection.tables import Printed
from tfdp.inspection.trials import restored, tensors
from tfdp.ledger import note_access
from tfdp.models import check_model
from tfdp.sampling.records import as_records

SHARES = (0.05, 0.25, 0.5, 0.75, 0.95)
_MICROBATCH = 16


@dataclasses.dataclass(frozen=True, repr=False)
class ClipNormSuggestion(Printed):
    """The distribution of per-unit gradient norms at the present weights.

    Attributes:
        public: whether the caller states that the data are public.
        norms: [units] float64, of the units whose gradient is finite and not zero; exact values, in ascending order.
        units: how many were looked at.
        not_finite: units whose gradient is not finite; training counts them as zero.
        zero: units without a gradient.
    """

    public: bool
    norms: npt.NDArray[np.float64]
    units: int
    not_finite: int
    zero: int

    @property
    def median(self) -> float:
        return float(np.median(self.norms))

    @property
    def quantiles(self) -> dict[float, float]:
        """Share of the units -> norm that they do not exceed."""
        return {share: float(np.quantile(self.norms, share)) for share in SHARES}

    @property
    def clip_norm(self) -> float:
        """The median with two significant digits: about half of the units are clipped (Andrew et al. 2021)."""
        return float(f"{self.median:.2g}")

    @property
    def statement(self) -> str:
        """In words, as an access to data."""
        if self.public:
            return (
                f"The gradients of {self.units} units were looked at. Whoever asked states that these data are public: "
                "if they are not, this is a data access that no epsilon covers."
            )
        return (
            f"DATA ACCESS, NOT COVERED BY EPSILON: the gradients of {self.units} units of private data were looked at. "
            "These norms are exact values, and so is a clip norm that is chosen by them. The look is noted for the "
            "ledger, and the card will list it."
        )

    def plot(self, path: str | os.PathLike[str]) -> Path:
        """A histogram with the quantiles, as PNG or SVG by the ending of `path`. It shows exact values too."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 3.6), layout="constrained")
        axes = figure.subplots()
        low, high = self.norms[0], self.norms[-1]
        edges = np.geomspace(low / 1.05, high * 1.05, 31).tolist()
        axes.hist(self.norms, bins=edges, color="#9ab", edgecolor="white")
        for share, norm in self.quantiles.items():
            axes.axvline(norm, color="black", linestyle="-" if share == 0.5 else ":", linewidth=1)
            axes.annotate(f" {share:.0%}", (norm, 1), xycoords=("data", "axes fraction"), va="top", fontsize=8)
        what = "public data" if self.public else "private data, not covered by epsilon"
        axes.set(
            xscale="log", xlabel="norm of a unit's gradient", ylabel="units", title=f"{self.units} units of {what}"
        )
        return save_figure(figure, path)

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(title=f"Norms of the gradients of {self.units} units", title_justify="left")
        table.add_column("of the units", justify="right")
        table.add_column("have a norm of at most", justify="right")
        for share, norm in self.quantiles.items():
            table.add_row(f"{share:.0%}", f"{norm:.4g}")
        lost = f" {self.not_finite} not finite and {self.zero} zero, left out." if self.not_finite or self.zero else ""
        advice = f"Suggested clip norm, the median: {self.clip_norm:g}.{lost}"
        return Group(Text(self.statement, style="" if self.public else "bold red"), table, Text(advice))


def suggest_clip_norm(
    model: Any,
    data: Any,
    *,
    public: bool,
    ledger: str | os.PathLike[str] | None = None,
    units: int = 256,
    records_per_unit: int = 1,
    method: str = "bookkeeping",
    hybrid: bool = False,
    sequence_length: int | None = None,
) -> ClipNormSuggestion:
    """How large the gradients of units are at the present weights, and which clip norm that suggests.

    On private data this is a data access that epsilon does not cover. It is noted before the first record is read, and
    the first fit on `ledger` writes the note into it. The model is put back as it was.

    Args:
        model: built and compiled with its loss; any optimizer.
        data: records as `tfdp.poisson_batches` takes them.
        public: whether these data are public. What is said here stands on the card.
        ledger: path of the ledger that the private run will have. Needed unless the data are public; for public data
            the card then says where the norm is from.
        units: the most units to look at, chosen at random.
        records_per_unit: so many records after one another are taken as one unit.
        method, hybrid: as for `tfdp.PrivacyCallback`.
        sequence_length: for bare token records.

    Raises:
        DataError: private data without a ledger, no unit, or none with a gradient.
        UnsupportedLayerError: the model's units cannot be kept apart.
        LedgerError: the note cannot be written; nothing was looked at.
    """
    _check_arguments(public, ledger, units, records_per_unit)
    findings = errors(check_model(model, method=method, hybrid=hybrid))
    if findings:
        raise UnsupportedLayerError(
            "Expected a model whose units can be kept apart. Received:\n  " + "\n  ".join(map(str, findings))
        )
    if ledger is not None:
        note_access(ledger, "clip_norm", public=public, most_units=units)
    if isinstance(data, tf.data.Dataset):
        data = list(data.as_numpy_iterator())
    records = as_records(data, sequence_length=sequence_length)
    available = len(records) // records_per_unit
    if available < 1:
        raise DataError(f"Expected at least one unit. Received: {len(records)} records. Pass more.")
    chosen = system_generator().choice(available, min(units, available), replace=False)
    with restored(model) as rewind:
        squares = list(_norms(model, records, chosen, records_per_unit, sums_function(method, hybrid), rewind))
    norms = np.sort(np.concatenate(squares))
    finite = norms[np.isfinite(norms)]
    found = ClipNormSuggestion(
        public=public,
        norms=finite[finite > 0],
        units=len(chosen),
        not_finite=len(norms) - len(finite),
        zero=int((finite == 0).sum()),
    )
    if not len(found.norms):
        raise DataError(
            f"Expected units with a gradient. Received: {found.units}, of which {found.not_finite} are not finite and "
            f"{found.zero} zero. Check records, weights and loss."
        )
    if not public:
        logging.getLogger("tfdp").warning(found.statement)
    return found


def _check_arguments(public: Any, ledger: Any, units: Any, records_per_unit: Any) -> None:
    if not isinstance(public, bool):
        raise DataError(f"Expected public to be True or False. Received: public={public!r}.")
    if not public and ledger is None:
        raise DataError(
            "Expected ledger=..., the path of the ledger that the private run will have, because the look at private "
            "data is noted there. Received: none. Give it, or take public data and say public=True."
        )
    for name, value in (("units", units), ("records_per_unit", records_per_unit)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise DataError(f"Expected {name} to be a whole number of at least 1. Received: {name}={value!r}.")


def _norms(
    model: Any, records: Any, chosen: npt.NDArray[np.int64], size: int, clipped_sums: Any, rewind: Any
) -> Iterator[npt.NDArray[np.float64]]:
    """Norms of the chosen units, a microbatch at a time; every microbatch has the same shape."""

    @tf.function(autograph=False)
    def function(x: Any, y: Any, weight: Any) -> Any:
        return clipped_sums(model, x, y, weight, tf.ones([width]), 1.0)[1]

    width = min(_MICROBATCH, len(chosen))
    for start in range(0, len(chosen), width):
        part = chosen[start : start + width]
        padded = np.resize(part, width)  # the first ones again
        rows = (padded[:, None] * size + np.arange(size)).ravel()
        yield np.asarray(function(*tensors(records.take(rows))), np.float64)[: len(part)]
        rewind()
