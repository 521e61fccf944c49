"""`tfdp.verify`: the gradients of a private step against the slow obvious way, on a user's own model and data.

| compared                         | with                                                                           |
|----------------------------------|--------------------------------------------------------------------------------|
| norm of each unit                | the norm of its gradient, formed by one backward pass of its own loss           |
| clipped sum                      | the sum of these gradients, each clipped                                       |
| loss, norm, sum of all others    | the same after one unit was replaced by its neighbour                          |

Where the model draws no random numbers, a unit's own gradient is that of the unit alone, in a batch of its own. Where
it does (dropout), every run begins from the same seeds and keeps the batch, so that all see the same masks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp import keras_private
from tfdp.errors import DataError, LossNotPerUnitError, UnsupportedLayerError
from tfdp.findings import Finding, Severity, errors
from tfdp.gradients import clipped_gradients
from tfdp.gradients.losses import per_unit_losses
from tfdp.inspection.tables import Printed
from tfdp.inspection.trials import restored, tensors
from tfdp.models import check_model, cross_unit_fault
from tfdp.sampling.records import as_records

# What rounding explains: float32 sums in another order, and 8 bits of precision.
FLOAT32, HALF = 1e-4, 2.0**-5
ALONE, IN_BATCH = (
    "every unit alone, in a batch of its own",
    "every unit's own loss in the whole batch, all runs with the same random numbers",
)


@dataclasses.dataclass(frozen=True, repr=False)
class Verification(Printed):
    """What `verify` found. Deviations are relative, the largest of all units or variables; None: not measured.

    Attributes:
        units: how many privacy units were tried.
        reference: what a unit's own gradient is taken from.
        allowed: the largest deviation that rounding explains.
        norms: of per-unit norms.
        sums: of the clipped sum, by variable.
        losses_of_others: of the other units' losses when one unit is replaced.
        gradients_of_others: of the other units' norms and clipped sum when one unit is replaced.
        findings: errors; none when all is well.
    """

    units: int
    reference: str
    allowed: float
    norms: float | None
    sums: float | None
    losses_of_others: float | None
    gradients_of_others: float | None
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether everything was measured and nothing found."""
        return not self.findings

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(title=f"Per-unit gradients of {self.units} units: {'ok' if self.ok else 'NOT OK'}")
        table.title_justify = "left"
        table.add_column("compared")
        table.add_column("largest deviation", justify="right")
        table.add_column("allowed", justify="right")
        rows = {
            "norms of units": self.norms,
            "clipped sum": self.sums,
            "losses of the others, one unit replaced": self.losses_of_others,
            "gradients of the others, one unit replaced": self.gradients_of_others,
        }
        for name, value in rows.items():
            table.add_row(name, "not measured" if value is None else f"{value:.1e}", f"{self.allowed:.1e}")
        return Group(table, Text(f"Compared with {self.reference}."), *(Text(str(each)) for each in self.findings))


def verify(
    model: Any,
    data: Any,
    *,
    units: int = 4,
    records_per_unit: int = 1,
    method: str = "bookkeeping",
    hybrid: bool = False,
    sequence_length: int | None = None,
) -> Verification:
    """Compares the gradients of a private step with materialised ones, and tries whether units are kept apart.

    The model is put back as it was. Reads the first `units` units of `data` and prints none of it; on private data
    that is a data access like any other look at gradients, so take public or made-up records where there are some.

    Args:
        model: built and compiled with its loss; any optimizer.
        data: records as `tfdp.poisson_batches` takes them, or one batch (x, y) or (x, y, sample_weight).
        units: how many to try, at least 2.
        records_per_unit: so many records after one another are taken as one unit.
        method, hybrid: as for `tfdp.PrivacyCallback`.
        sequence_length: for bare token records.

    Raises:
        DataError: fewer than two units, or records that cannot be read.
    """
    findings = errors(check_model(model, method=method, hybrid=hybrid))
    if findings:
        return _refused(0, FLOAT32, findings)
    batch = _batch(data, units, records_per_unit, sequence_length)
    count = tf.nest.flatten(batch)[0].shape[0] // records_per_unit
    halves = {"bfloat16", "float16"}
    allowed = HALF if any(each.compute_dtype in halves for each in keras_private.flatten_layers(model)) else FLOAT32
    fault = cross_unit_fault(
        model, tf.nest.map_structure(lambda leaf: tf.TensorSpec(leaf.shape[1:], leaf.dtype), batch[0])
    )
    if fault is not None:
        message = f"Expected a model that treats every unit alone. Received: a model {fault}."
        return _refused(
            count, allowed, [_error("PS043", model.name, message, "Remove or freeze the layer that does it.")]
        )
    with restored(model) as rewind:
        trial = _Trial(model, batch, count, records_per_unit, {"method": method, "hybrid": hybrid}, rewind)
        try:
            return trial.run(allowed)
        except UnsupportedLayerError as error:
            return _refused(count, allowed, [_error("PS044", model.name, str(error), "")])
        except LossNotPerUnitError as error:
            return _refused(count, allowed, [_error("PS045", model.name, str(error), "")])


def _refused(units: int, allowed: float, findings: list[Finding]) -> Verification:
    return Verification(units, "nothing", allowed, None, None, None, None, tuple(findings))


def _batch(data: Any, units: int, records_per_unit: int, sequence_length: int | None) -> tuple[Any, Any, Any]:
    """(x, y, sample_weight), nested tensors [units * records_per_unit, ...]."""
    if isinstance(data, tf.data.Dataset):
        data = list(data.take(max(units, 2) * records_per_unit).as_numpy_iterator())
    records = as_records(data, sequence_length=sequence_length)
    count = min(units, len(records) // records_per_unit)
    if count < 2:
        raise DataError(
            f"Expected at least two units to compare. Received: {len(records)} records and units={units!r}. Pass more."
        )
    return tensors(records.take(np.arange(count * records_per_unit)))


@dataclasses.dataclass
class _Trial:
    """One model and one batch."""

    model: Any
    batch: tuple[Any, Any, Any]
    units: int
    records_per_unit: int
    options: dict[str, Any]
    rewind: Callable[[], None]

    def run(self, allowed: float) -> Verification:
        alone = not self._draws()
        own = [self._own_gradient(unit, alone) for unit in range(self.units)]
        own_norms = np.array([np.sqrt(sum(float(np.sum(g * g)) for g in unit)) for unit in own])
        finite = own_norms[np.isfinite(own_norms)]
        clip_norm = max(float(np.median(finite)), 1e-6) if finite.size else 1.0  # some are clipped, some are not
        private = self._private(clip_norm)
        everyone = np.ones(self.units, np.float32)
        sums, norms, _ = private(self.batch, everyone)
        factors = clip_norm / np.maximum(own_norms, clip_norm)
        wanted = [sum(f * g for f, g in zip(factors, column, strict=True)) for column in zip(*own, strict=True)]
        of_norms, of_sums = _apart(norms, own_norms), _apart(sums, wanted)
        of_losses, of_gradients = 0.0, 0.0
        for unit in range(self.units):
            others = everyone.copy()
            others[unit] = 0.0
            before, after = (private(batch, others) for batch in (self.batch, self._with_neighbour_at(unit)))
            of_losses = max(of_losses, _apart(after[2], before[2]))
            of_gradients = max(of_gradients, _apart(after[1], before[1]), _apart(after[0], before[0]))
        result = Verification(
            self.units, ALONE if alone else IN_BATCH, allowed, of_norms, of_sums, of_losses, of_gradients, ()
        )
        return dataclasses.replace(result, findings=tuple(self._judged(result)))

    def _judged(self, result: Verification) -> Iterator[Finding]:
        bound = result.allowed
        for name, value in (("norms of units", result.norms), ("clipped sum", result.sums)):
            if not (value is not None and value <= bound):
                yield _error(
                    "PS044",
                    self.model.name,
                    f"Expected the {name} of the private step to be those of materialised gradients, to {bound:.1e}. "
                    f"Received: a deviation of {value:.1e}.",
                    "Take method='vectorized', and report the model: its gradient rules are wrong.",
                )
        for name, value in (("losses", result.losses_of_others), ("gradients", result.gradients_of_others)):
            if not (value is not None and value <= bound):
                yield _error(
                    "PS043",
                    self.model.name,
                    f"Expected the {name} of all other units to stay, to {bound:.1e}, when one unit is replaced. "
                    f"Received: a deviation of {value:.1e}.",
                    "Remove or freeze the layer that carries one unit over to another.",
                )

    def _draws(self) -> bool:
        """Whether a forward pass draws random numbers."""
        seeds = keras_private.seed_states(self.model)
        before = [seed.numpy() for seed in seeds]
        self.model(self.batch[0], training=True)
        drawn = any(not np.array_equal(seed.numpy(), value) for seed, value in zip(seeds, before, strict=True))
        self.rewind()
        return drawn

    def _own_gradient(self, unit: int, alone: bool) -> list[Any]:
        """Gradient of one unit's loss, float64, by one backward pass through Keras's own operations."""
        size = self.records_per_unit
        mine = slice(unit * size, (unit + 1) * size)
        x, y, weight = self._map(lambda leaf: leaf[mine]) if alone else self.batch
        units, index = (1, 0) if alone else (self.units, unit)
        variables = [variable.value for variable in self.model.trainable_variables]
        with tf.GradientTape() as tape:
            loss = per_unit_losses(self.model, y, self.model(x, training=True), weight, units, size)[index]
        self.rewind()
        found = tape.gradient(loss, variables, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        return [np.asarray(tf.cast(tf.convert_to_tensor(each), tf.float32), np.float64) for each in found]

    def _private(self, clip_norm: float) -> Callable[[Any, Any], Any]:
        """(batch, unit_weight) -> (sums, norms, losses), traced as the private step traces it."""

        @tf.function(autograph=False)
        def function(batch: Any, unit_weight: Any) -> Any:
            return clipped_gradients(
                self.model,
                batch,
                clip_norm,
                unit_weight=unit_weight,
                records_per_unit=self.records_per_unit,
                **self.options,
            )

        def run(batch: Any, unit_weight: Any) -> Any:
            found = tf.nest.map_structure(lambda leaf: np.asarray(leaf, np.float64), function(batch, unit_weight))
            self.rewind()
            return found

        return run

    def _with_neighbour_at(self, unit: int) -> tuple[Any, Any, Any]:
        """The batch with the records of the next unit in the place of those of `unit`."""
        rows = np.arange(self.units * self.records_per_unit).reshape(self.units, -1)
        rows[unit] = rows[(unit + 1) % self.units]
        return self._map(lambda leaf: tf.gather(leaf, rows.ravel()))

    def _map(self, function: Callable[[Any], Any]) -> tuple[Any, Any, Any]:
        parts = (part if part is None else tf.nest.map_structure(function, part) for part in self.batch)
        return tuple(parts)  # type: ignore[return-value]


def _apart(found: Any, wanted: Any) -> float:
    """Largest distance of an array from the wanted one, relative to it but at least to 1% of all together."""
    floor = 1e-2 * float(np.sqrt(sum(np.sum(np.square(each)) for each in wanted)))
    pairs = zip(found, wanted, strict=True)
    parts = [float(np.linalg.norm(a - b)) / max(float(np.linalg.norm(b)), floor, 1e-30) for a, b in pairs]
    return max(parts) if np.all(np.isfinite(parts)) else float("inf")


def _error(identifier: str, where: str, message: str, fix: str) -> Finding:
    return Finding(id=identifier, severity=Severity.ERROR, where=where, message=message, fix=fix)
