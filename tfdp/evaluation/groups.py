"""A metric for every group of people: what privacy costs, and whom.

Clipping shrinks what is unusual and noise drowns what is rare, so a small group can lose much where the average loses
little (Bagdasaryan et al. 2019). A report holds, for every group and for all together:

| what              | how                                                                                          |
|-------------------|----------------------------------------------------------------------------------------------|
| n                 | people where `units` say who owns a record, else records                                     |
| value, interval   | of the private model; percentile bootstrap over whole people, for this one model             |
| non_private, public | the same metric of the model trained without privacy, and of the one before training       |
| gap               | value minus the value of the whole; `disadvantage` is the same with a sign: above 0 is worse |
| suppressed        | groups with fewer than `min_group_size`: neither n nor value is kept                         |

A single suppressed group can be computed from the whole and the others: join it with another one where that matters.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from tfdp.errors import DataError
from tfdp.evaluation.intervals import RESAMPLES, percentile_interval
from tfdp.evaluation.perplexity import Perplexity

Direction = Literal["lower", "higher"]
MODELS = ("private", "non_private", "public")
NOT_STATED = "not stated"

_LOWER_IS_BETTER = ("loss", "perplexity", "error", "entropy", "bits")
_HIGHER_IS_BETTER = ("accuracy", "auc", "f1", "precision", "recall", "bleu", "rouge", "exact_match")
# Of a rare class, a resample may hold nobody; where most do, an interval would say nothing.
_MOST_UNDEFINED = 0.5

# Indices of records -> the metric there, NaN where it is not defined.
_Statistic = Callable[[np.ndarray], float]


def better_direction(name: str) -> Direction | None:
    """Which direction of a metric is the good one, where its name tells."""
    name = name.lower()
    if any(part in name for part in _HIGHER_IS_BETTER):
        return "higher"
    return "lower" if any(part in name for part in _LOWER_IS_BETTER) else None


@dataclasses.dataclass(frozen=True)
class GroupRow:
    """One group; None: not measured, not defined (AUC of one class), or suppressed."""

    name: str
    n: int | None
    value: float | None = None
    interval: tuple[float, float] | None = None
    non_private: float | None = None
    public: float | None = None
    suppressed: bool = False

    @property
    def cost(self) -> float | None:
        """What privacy changed: the private value minus the non-private one."""
        return None if self.value is None or self.non_private is None else self.value - self.non_private


@dataclasses.dataclass(frozen=True)
class GroupReport:
    """One metric of all groups.

    Attributes:
        field: by what people were grouped.
        metric: name of the metric.
        better: which direction is the good one.
        whole: all records, the suppressed groups included.
        rows: one per group, in order of the names.
        min_group_size: smaller groups are suppressed.
    """

    field: str
    metric: str
    better: Direction
    whole: GroupRow
    rows: tuple[GroupRow, ...]
    min_group_size: int
    split: str | None = None

    def gap(self, row: GroupRow) -> float | None:
        """Value minus the value of the whole."""
        return None if row.value is None or self.whole.value is None else row.value - self.whole.value

    def disadvantage(self, row: GroupRow) -> float | None:
        """How much worse a group fares than the whole, whatever the metric: above 0 is worse."""
        gap = self.gap(row)
        return gap if gap is None or self.better == "lower" else -gap

    @property
    def worst(self) -> GroupRow | None:
        """The group that fares worst under the private model."""
        rows = [(disadvantage, row) for row in self.rows if (disadvantage := self.disadvantage(row)) is not None]
        return max(rows, key=lambda pair: pair[0])[1] if rows else None

    def evaluation(self) -> dict[str, Any]:
        """What `tfdp.export(evaluation=...)` takes: the metric of the whole, and that of the groups."""
        whole, others = self.whole, ("non_private", "public")
        metric = {"name": self.metric, "private": whole.value, "interval": whole.interval, "n": whole.n}
        metric |= {"better": self.better, **({"split": self.split} if self.split else {})}
        metric |= {name: getattr(whole, name) for name in others if getattr(whole, name) is not None}
        groups = [
            {"name": row.name}
            if row.suppressed
            else {
                "name": row.name,
                "n": row.n,
                "value": row.value,
                "interval": row.interval,
                "before": row.public,
                "non_private": row.non_private,
            }
            for row in self.rows
        ]
        return {"metrics": [metric], "groups": groups, "group_field": self.field, "group_metric": self.metric}

    def __str__(self) -> str:
        """A table for a terminal."""
        head = ("group", "n", "public", "non-private", "private", "interval", "gap")
        lines = [head, *(self._cells(row) for row in (self.whole, *self.rows))]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = [
            "  ".join(cell.ljust(width) if not index else cell.rjust(width) for index, (cell, width) in cells).rstrip()
            for cells in (enumerate(zip(line, widths, strict=True)) for line in lines)
        ]
        return "\n".join([f"{self.metric} by {self.field} ({self.better} is better)", *table])

    def _cells(self, row: GroupRow) -> tuple[str, ...]:
        if row.suppressed:
            return (row.name, f"<{self.min_group_size}", "", "", "suppressed", "", "")
        interval = "" if row.interval is None else f"{row.interval[0]:.4g} to {row.interval[1]:.4g}"
        gap = None if row is self.whole else self.gap(row)
        numbers = [_text(row.public), _text(row.non_private), _text(row.value)]
        return (row.name, str(row.n), *numbers, interval, "" if gap is None else f"{gap:+.3g}")


def metric_by_group(
    metric: Any,
    y_true: Any,
    predictions: Mapping[str, Any],
    groups: Sequence[Any] | np.ndarray,
    *,
    field: str,
    min_group_size: int,
    units: Sequence[Any] | np.ndarray | None = None,
    sample_weight: Any = None,
    better: Direction | None = None,
    split: str | None = None,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> GroupReport:
    """Any metric of Keras, for every group.

    Args:
        metric: an instance of a `keras.metrics.Metric` whose result is one number; it is reset.
        y_true: one row per record.
        predictions: what the models say, as the metric wants it: {"private": ..., "non_private": ..., "public": ...},
            the first of which is needed.
        groups: the group of every record; blank ones are "not stated".
        field: by what people are grouped.
        min_group_size: groups with fewer people are suppressed.
        units: whose record it is; people, not records, are then counted and drawn again.
        sample_weight: of the records, for the metric.
        better: which direction is good; needed where the name of the metric does not tell.
        split: which data these are, for the card.
        confidence, resamples, seed: of the bootstrap intervals; the seed is fixed, so that a card can be made again.

    Raises:
        DataError: the arrays do not fit each other, the metric gives more than one number, or `better` is missing.
    """
    import keras
    import tensorflow as tf

    if not isinstance(metric, keras.metrics.Metric):
        raise DataError(
            f"Expected an instance of a Keras metric. Received: {type(metric).__name__}. Pass for example "
            "keras.metrics.AUC(), with predictions that are probabilities."
        )
    columns = {name: _rows(values) for name, values in _checked_models(predictions).items()}
    y_true = _rows(y_true)
    weight = None if sample_weight is None else np.asarray(sample_weight)
    needs_two_classes = isinstance(metric, keras.metrics.AUC)
    for name, column in {**columns, "sample_weight": weight}.items():
        if column is not None and len(column) != len(y_true):
            raise _lengths_differ(name, len(column), len(y_true))

    @tf.function(reduce_retracing=True)
    def result(*arrays: Any) -> Any:
        metric.reset_state()
        metric.update_state(*arrays)
        return metric.result()

    def statistic(column: np.ndarray) -> _Statistic:
        def of(rows: np.ndarray) -> float:
            if needs_two_classes and len(np.unique(y_true[rows])) < 2:
                return math.nan
            arrays = [y_true[rows], column[rows], *([] if weight is None else [weight[rows]])]
            return float(result(*map(tf.constant, arrays)))

        return of

    metric(y_true[:1], columns["private"][:1])  # metrics may make their variables now, which a graph cannot
    shape = keras.ops.convert_to_numpy(metric.result()).shape
    if shape:
        raise DataError(
            f"Expected a metric that gives one number. Received: {metric.name}, which gives values of shape {shape}. "
            "Have it averaged (average='macro'), or pass one for each class."
        )
    return _report(
        {name: statistic(column) for name, column in columns.items()},
        metric.name,
        len(y_true),
        groups,
        units,
        field=field,
        min_group_size=min_group_size,
        better=better,
        split=split,
        bootstrap=_Bootstrap(confidence, resamples, seed),
    )


def perplexity_by_group(
    perplexities: Mapping[str, Perplexity],
    groups: Sequence[Any] | np.ndarray,
    *,
    field: str,
    min_group_size: int,
    units: Sequence[Any] | np.ndarray | None = None,
    split: str | None = None,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> GroupReport:
    """Perplexity of a language model for every group: all tokens of a group together.

    Args:
        perplexities: of the same records under the models {"private": ..., "non_private": ..., "public": ...}.
        groups, field, min_group_size, units, split, confidence, resamples, seed: as for `metric_by_group`.

    Raises:
        DataError: the arrays do not fit each other.
    """
    measured = _checked_models(perplexities)
    count = measured["private"].num_records
    for name, each in measured.items():
        if each.num_records != count:
            raise _lengths_differ(name, each.num_records, count)

    def statistic(each: Perplexity) -> _Statistic:
        return lambda rows: Perplexity(each.losses[rows], each.tokens[rows]).perplexity

    return _report(
        {name: statistic(each) for name, each in measured.items()},
        "perplexity",
        count,
        groups,
        units,
        field=field,
        min_group_size=min_group_size,
        better="lower",
        split=split,
        bootstrap=_Bootstrap(confidence, resamples, seed),
    )


@dataclasses.dataclass(frozen=True)
class _Bootstrap:
    confidence: float
    resamples: int
    seed: int

    def interval(self, statistic: _Statistic, people: Sequence[np.ndarray]) -> tuple[float, float] | None:
        """Percentile interval over whole people; None for fewer than two, or where the metric is mostly not defined."""
        if len(people) < 2:
            return None
        # Each group begins the stream anew: one more group leaves the intervals of the others as they are.
        generator = np.random.default_rng(self.seed)
        single = np.concatenate(people) if all(len(rows) == 1 for rows in people) else None
        values = np.empty(self.resamples)
        for turn in range(self.resamples):
            drawn = generator.integers(0, len(people), len(people))
            values[turn] = statistic(np.concatenate([people[i] for i in drawn]) if single is None else single[drawn])
        values = values[~np.isnan(values)]
        if len(values) < _MOST_UNDEFINED * self.resamples:
            return None
        low, high = percentile_interval(values, self.confidence)
        return (low, high) if math.isfinite(low) and math.isfinite(high) else None


def _report(
    statistics: Mapping[str, _Statistic],
    metric: str,
    count: int,
    groups: Sequence[Any] | np.ndarray,
    units: Sequence[Any] | np.ndarray | None,
    *,
    field: str,
    min_group_size: int,
    better: Direction | None,
    split: str | None,
    bootstrap: _Bootstrap,
) -> GroupReport:
    better = better if better is not None else better_direction(metric)
    if better not in ("lower", "higher"):
        raise DataError(
            f"Expected to know which direction of {metric!r} is the good one. Received: better={better!r}. Pass "
            'better="higher" or better="lower".'
        )
    if isinstance(min_group_size, bool) or not isinstance(min_group_size, int) or min_group_size < 1:
        raise DataError(f"Expected min_group_size to be a whole number of at least 1. Received: {min_group_size!r}.")
    names = np.array([_group_name(each) for each in groups])
    people = _people(units, count)
    for what, length in (("groups", len(names)), ("units", sum(map(len, people)))):
        if length != count:
            raise _lengths_differ(what, length, count)
    of_group: dict[str, list[np.ndarray]] = {name: [] for name in sorted(set(names.tolist()))}
    for rows in people:
        if len(set(names[rows].tolist())) > 1:
            raise DataError(
                "Expected every record of a unit to have the group of that unit. Received: a unit with records in "
                f"{len(set(names[rows].tolist()))} groups. Give its records one group, or leave units out to count "
                "records."
            )
        of_group[names[rows[0]].item()].append(rows)

    def row(index: int, name: str, members: Sequence[np.ndarray]) -> GroupRow:
        if index and len(members) < min_group_size:
            return GroupRow(name, None, suppressed=True)
        rows = np.concatenate(members)
        values = {model: _finite(statistic(rows)) for model, statistic in statistics.items()}
        value = values["private"]
        interval = None if value is None else bootstrap.interval(statistics["private"], members)
        return GroupRow(name, len(members), value, interval, values.get("non_private"), values.get("public"))

    found = tuple(row(index, name, members) for index, (name, members) in enumerate(of_group.items(), start=1))
    return GroupReport(field, metric, better, row(0, "all", people), found, min_group_size, split)


def _rows(values: Any) -> np.ndarray:
    """One row per record. Some metrics average over the last axis, which must not be that of the records."""
    array = np.asarray(values)
    return array[:, None] if array.ndim == 1 else array


def _people(units: Sequence[Any] | np.ndarray | None, count: int) -> list[np.ndarray]:
    """The records of every person."""
    if units is None:
        return list(np.arange(count)[:, None])
    _, owner = np.unique(np.asarray(units), return_inverse=True)
    order = np.argsort(owner, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(owner[order])) + 1)


def _group_name(value: Any) -> str:
    missing = value is None or (isinstance(value, float) and math.isnan(value))
    return ("" if missing else str(value).strip()) or NOT_STATED


def _checked_models(values: Mapping[str, Any]) -> dict[str, Any]:
    unknown = sorted(set(values) - set(MODELS))
    if unknown or "private" not in values:
        raise DataError(
            f'Expected values of "private", and if there are any of "non_private" and "public". Received: '
            f"{sorted(values)}. Name the models so."
        )
    return {name: values[name] for name in MODELS if name in values}


def _lengths_differ(what: str, received: int, expected: int) -> DataError:
    return DataError(f"Expected one value per record, {expected}. Received: {received} in {what}. Pass equal lengths.")


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
