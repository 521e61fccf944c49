"""`tfdp.explain`: which way the per-unit gradient of every layer is taken, and what it costs.

The model is traced, not run: the operations that a private microbatch has beyond those of a plain step, which takes the
gradient of the same variables, are counted in the graph that would run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp import keras_private
from tfdp.errors import GradientError, UnsupportedLayerError
from tfdp.findings import Finding, Severity, errors
from tfdp.gradients import bookkeeping, combining, taps, uses
from tfdp.gradients.clipping import Factors
from tfdp.gradients.hybrid import find_cuts
from tfdp.inspection import counting
from tfdp.inspection.tables import Printed
from tfdp.models import check_model

# The microbatch of `tfdp.poisson_batches`.
UNITS = 16


@dataclasses.dataclass(frozen=True)
class Row:
    """One layer that trains variables of its own.

    Attributes:
        layer: where its variables lie.
        kind: its class.
        variables: their names.
        parameters: how many numbers they hold.
        path: "rule", "vectorized" (hybrid) or "refused".
        forms: by kernel, "Gram", "materialised", "one unit at a time" or "one token"; other variables are held
            per unit or by table row.
        flops, bytes: extra, for one microbatch; None where it cannot be traced, or runs in a loop. See
            `tfdp.inspection.counting`.
    """

    layer: str
    kind: str
    variables: tuple[str, ...]
    parameters: int
    path: str
    forms: dict[str, str]
    flops: int | None
    bytes: int | None


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation(Printed):
    """How the gradients of a model are taken.

    Attributes:
        rows: one for each layer that trains variables of its own.
        frozen_layers: layers that hold variables and train none of them.
        frozen_parameters: all that does not train, in layers of which a part trains as well.
        shapes: of one microbatch.
        plain_flops: of forward and backward pass of the plain step; None as for a row.
        findings: why layers are refused.
    """

    rows: tuple[Row, ...]
    frozen_layers: int
    frozen_parameters: int
    shapes: str
    plain_flops: int | None
    findings: tuple[Finding, ...]

    @property
    def extra_flops(self) -> int | None:
        """Of all layers that are not refused; None where that of one is not known."""
        return _total([row.flops for row in self.rows if row.path != "refused"])

    @property
    def extra_bytes(self) -> int | None:
        return _total([row.bytes for row in self.rows if row.path != "refused"])

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(title=f"Per-unit gradients of one microbatch, {self.shapes}", title_justify="left")
        for heading in ("layer", "variables", "path", "form", "extra FLOPs", "extra bytes"):
            table.add_column(heading, justify="right" if heading.startswith("extra") else "left")
        for row in self.rows:
            forms = ", ".join(f"{name}: {form}" for name, form in row.forms.items())
            path = f"{row.path}: {row.kind}"
            table.add_row(row.layer, ", ".join(row.variables), path, forms, _short(row.flops), _short(row.bytes))
        if self.frozen_parameters:
            frozen = f"{self.frozen_parameters:,} parameters"
            table.add_row(f"{self.frozen_layers} other layers", frozen, "frozen", "", "0", "0")
        lines = [Text(str(finding)) for finding in self.findings]
        if self.extra_bytes is not None:
            share = ""
            if self.extra_flops is not None and self.plain_flops is not None:
                share = f" ({self.extra_flops / max(self.plain_flops, 1):+.1%} of the plain step's products)"
            total = f"All together: {_short(self.extra_flops)} FLOPs{share}, "
            lines.append(Text(f"{total}{_short(self.extra_bytes)} bytes written (less where a compiler fuses)."))
        return Group(table, *lines)


def explain(
    model: Any, x: Any = None, *, batch_size: int | None = None, tokens: int | None = None, hybrid: bool = False
) -> Explanation:
    """Explains how a private fit would take the gradients of a model. Traces it, and runs nothing.

    Args:
        model: built; it need not be compiled.
        x: nested arrays or `tf.TensorSpec` [batch, ...] of one microbatch; by default as the model's inputs, with
        batch_size: for the batch axis (16), and
        tokens: for every other open axis; by default the backbone's `max_sequence_length`.
        hybrid: as for `tfdp.PrivacyCallback`.

    Raises:
        UnsupportedLayerError: the model is not ready (not built, nothing to train, float16).
        GradientError: the shape of a microbatch is not known.
    """
    findings = errors(check_model(model, hybrid=hybrid))
    unready = [finding for finding in findings if finding.id == "PS046"]
    if unready:
        raise UnsupportedLayerError(str(unready[0]))
    spec = _spec(model, batch_size, tokens) if x is None else tf.nest.map_structure(_as_spec, x)
    try:
        traced = _trace(model, spec)
    except UnsupportedLayerError:
        if not findings:
            raise
        traced = None
    layers = keras_private.flatten_layers(model)
    trainable = {id(variable) for variable in model.trainable_variables}
    refused = {finding.where for finding in findings}
    costs = None if traced is None else traced.of
    rows, frozen, seen = [], 0, set[int]()
    for layer in layers:
        own = [v for v in keras_private.own_variables(layer) if not keras_private.is_random_state(v)]
        trained = [v for v in own if id(v) in trainable]
        if trained:
            misused = _misused(layer, trained, costs, hybrid) if costs and _name(layer) not in refused else None
            findings += [misused] if misused else []
            refused_here = misused is not None or _name(layer) in refused
            rows.append(_row(layer, [v for v in trained if id(v) not in seen], costs, refused_here))
            seen |= {id(v) for v in trained}
        frozen += bool(own) and not trained
    idle = [v for v in model.non_trainable_variables if not keras_private.is_random_state(v)]
    plain = None if traced is None else traced.plain_flops
    return Explanation(tuple(rows), frozen, sum(map(_numbers, idle)), _shapes(spec), plain, tuple(findings))


def _row(layer: Any, variables: Sequence[Any], costs: dict[int, _Cost] | None, refused: bool) -> Row:
    """`costs` by `id` of a variable; None: the model cannot be traced."""
    of = {v.name: costs[id(v)] for v in variables if id(v) in costs} if costs is not None and not refused else None
    formed = of is not None and any(cost.formed for cost in of.values())
    return Row(
        layer=variables[0].path.rpartition("/")[0] if variables else layer.name,
        kind=type(layer).__name__,
        variables=tuple(v.name for v in variables),
        parameters=sum(_numbers(v) for v in variables),
        path="refused" if refused else "vectorized" if formed else "rule",
        forms={} if of is None else {name: cost.form for name, cost in of.items() if cost.form},
        flops=None if of is None else _total([cost.flops for cost in of.values()]),
        bytes=None if of is None else sum(cost.bytes for cost in of.values()),
    )


def _misused(layer: Any, variables: Sequence[Any], costs: dict[int, _Cost], hybrid: bool) -> Finding | None:
    """What only the trace shows: variables past the calls of their layer, or past the output."""
    if all(id(v) in costs and (hybrid or not costs[id(v)].formed) for v in variables):
        return None
    unused = [v.name for v in variables if id(v) not in costs]
    what = f"{', '.join(unused)}, which take no part in the output" if unused else "uses that its rule does not see"
    return Finding(
        id="PS044",
        severity=Severity.ERROR,
        where=_name(layer),
        message=f"Expected every trainable variable to be used by its own layer, record by record. Received: {what}.",
        fix="Freeze the layer (layer.trainable = False)" + ("." if unused else ", or pass hybrid=True."),
    )


def _name(layer: Any) -> str:
    return f"{layer.name} ({type(layer).__name__})"


@dataclasses.dataclass(frozen=True)
class _Cost:
    """Of the per-unit gradient of one variable, beyond the gradient of a plain step."""

    form: str
    formed: bool
    flops: int | None
    bytes: int


@dataclasses.dataclass(frozen=True)
class _Traced:
    plain_flops: int | None
    of: dict[int, _Cost]


def _trace(model: Any, spec: Any) -> _Traced:
    batch = tf.nest.flatten(spec)[0].shape[0]
    cuts = find_cuts(model, spec, batch)
    found: list[_Traced] = []

    def microbatch(x: Any) -> None:
        graph = tf.compat.v1.get_default_graph()
        variables = model.trainable_variables
        with tf.GradientTape() as tape, taps.record(model, batch, cuts) as recording:
            y_pred = model(x, training=True)
            floating = [leaf for leaf in tf.nest.flatten(y_pred) if leaf.dtype.is_floating]
            total = tf.add_n([tf.reduce_sum(tf.cast(leaf, tf.float32)) for leaf in floating])
        forward = graph.get_operations()
        outputs = [call.output for call in recording.calls]
        of_outputs, plain = tape.gradient(total, (outputs, [v.value for v in variables]))
        backward = set(graph.get_operations()[len(forward) :])
        shared = counting.needed(_tensors(of_outputs), backward)
        gradients = bookkeeping.output_gradients(recording, total)
        factors = Factors(tf.ones([batch]), tf.constant(True))
        start = len(graph.get_operations())
        by_variable = bookkeeping.uses_by_variable(recording, gradients, batch)
        results = {}
        for variable, its_gradient in zip(variables, plain, strict=True):
            if id(variable) in by_variable:
                merged = combining.merged(by_variable[id(variable)])
                if combining.is_formed_in_turn(merged):
                    table = combining.table_of(merged)
                    of_table = None if table is None else table.squared_norm()
                    made = [part for unit in range(batch) for part in combining.formed(merged, unit, of_table)]
                    made += [] if table is None else [table.weighted_sum(factors)]
                else:
                    made = [combining.squared_norm(merged), combining.weighted_sums([merged], [factors])[0]]
                results[id(variable)] = merged, made, its_gradient
        fresh = set(graph.get_operations()[start:])
        formed = {id(variable) for variables in cuts.values() for variable in variables}
        costs = {}
        for key, (merged, made, its_gradient) in results.items():
            mine = counting.needed(made, fresh)
            fresh -= mine  # what two variables of a layer share is counted once
            instead = counting.needed(_tensors([its_gradient]), backward) - shared
            shared |= instead
            costs[key] = _Cost(
                form=", ".join(_form(use) for use in merged if isinstance(use, uses.Outer)),
                formed=key in formed,
                flops=_total([counting.flops(mine), counting.flops(instead)], -1),
                bytes=counting.written(mine) - counting.written(instead),
            )
        found.append(_Traced(_total([counting.flops(forward), counting.flops(backward)]), costs))

    tf.function(microbatch, autograph=False).get_concrete_function(spec)
    return found[0]


def _form(use: uses.Outer) -> str:
    if use.rows.shape[1] == 1:
        return "one token"
    if use.is_formed_in_turn:
        return "one unit at a time"
    return "materialised" if use.materialise_is_cheaper else "Gram"


def _tensors(gradients: Sequence[Any]) -> list[Any]:
    present = [gradient for gradient in gradients if gradient is not None]
    return [g.values if isinstance(g, tf.IndexedSlices) else g for g in present]


def _spec(model: Any, batch_size: int | None, tokens: int | None) -> Any:
    inputs = getattr(model, "inputs", None)
    if not inputs:
        raise GradientError(
            f"Expected the shape of a microbatch. Received: x=None and {type(model).__name__}, whose inputs are not "
            "known. Pass x=..., one batch or its tf.TensorSpec."
        )
    if tokens is None:
        backbone = getattr(model, "backbone", model)
        tokens = getattr(backbone, "max_sequence_length", None)

    def leaf(made: Any) -> Any:
        shape = [UNITS if batch_size is None else batch_size, *(size or tokens for size in made.shape[1:])]
        if None in shape:
            raise GradientError(
                f"Expected tokens=..., the length of a record. Received: tokens=None and input '{made.name}' of shape "
                f"{made.shape}. Pass the length that the records will have."
            )
        return tf.TensorSpec(shape, made.dtype, made.name)

    structure = getattr(model, "input", None)  # a Sequential has a list alone
    return tf.nest.map_structure(leaf, inputs[0] if structure is None else structure)


def _as_spec(leaf: Any) -> Any:
    if isinstance(leaf, tf.TensorSpec):
        return leaf
    tensor = tf.convert_to_tensor(leaf)
    return tf.TensorSpec(tensor.shape, tensor.dtype)


def _shapes(spec: Any) -> str:
    return ", ".join(sorted({str(list(leaf.shape)) for leaf in tf.nest.flatten(spec)}))


def _numbers(variable: Any) -> int:
    return int(tf.TensorShape(variable.shape).num_elements() or 0)


def _total(numbers: Sequence[int | None], sign: int = 1) -> int | None:
    """The first and `sign` times the others; None where one is not known, or there is none."""
    known = [number for number in numbers if number is not None]
    return known[0] + sign * sum(known[1:]) if known and len(known) == len(numbers) else None


def _short(number: int | None) -> str:
    """Three digits and a prefix."""
    if number is None:
        return "unknown"
    for power, prefix in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if abs(number) >= 10**power:
            return f"{number / 10**power:.3g} {prefix}"
    return str(number)


__all__ = ["Explanation", "Row", "explain"]
