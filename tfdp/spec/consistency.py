"""Where the numbers of a spec contradict each other, or leave something open."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tfdp.spec.fields import MOVING_CLIP_NORMS, Clipping
from tfdp.spec.numbers import counted, rounded_up, shown
from tfdp.spec.starting import suggested_truncation

if TYPE_CHECKING:
    from tfdp.spec.privacy_spec import PrivacySpec
    from tfdp.spec.schedule import Schedule

# Path of the field, message, remedy.
Conflict = tuple[tuple[str, ...], str, str]


def conflicts(spec: PrivacySpec) -> Iterator[Conflict]:
    """Every contradiction between clip norms, probability, batch sizes, steps, epochs and sizes of the data."""
    yield from _clipping_conflicts(spec)
    yield from _batch_conflicts(spec)
    yield from _length_conflicts(spec)
    yield from _size_conflicts(spec)


def population(spec: PrivacySpec) -> tuple[int, str]:
    """What the sampler draws from, and the name of that number."""
    unit = spec.claim.privacy_unit
    if unit.method == "group_privacy" and (unit.max_records_per_unit or 1) > 1 and spec.data.num_records is not None:
        return spec.data.num_records, "data.num_records"
    return spec.data.num_units, "data.num_units"


def _clipping_conflicts(spec: PrivacySpec) -> Iterator[Conflict]:
    clipping, sigma, path = spec.mechanism.clip_norm, spec.mechanism.noise_multiplier, ("mechanism", "clip_norm")
    if not isinstance(clipping, Clipping):
        return
    if (clipping.per_layer is None) == (clipping.quantile is None):
        what = "neither" if clipping.quantile is None else "both"
        message = f"expected a number, or either per_layer or quantile, received {what}."
        yield path, message, "Keep one of them." if what == "both" else f"Write {spec.snippet('clip_norm', '1.0')}."
    elif clipping.per_layer is not None:
        for name in ("initial", "learning_rate", "count_noise"):
            if getattr(clipping, name) is not None:
                message = f"expected no {name} with per_layer, received {shown(getattr(clipping, name))}."
                yield (*path, name), message, "Delete it: norms of layers stay as they are."
    elif clipping.initial is None:
        message = "expected initial, the clip norm of the first step, received nothing."
        yield path, message, f"Add it. {spec.such_as((*path, 'initial'), 1.0)}"
    elif not MOVING_CLIP_NORMS[0] <= clipping.initial <= MOVING_CLIP_NORMS[1]:
        message = (
            f"expected initial from 1e-6 to 1e12, which a norm that moves keeps to, received {shown(clipping.initial)}."
        )
        yield (*path, "initial"), message, f"Write {spec.snippet('initial', '1.0')}."
    elif clipping.count_noise is not None and sigma is not None and not 2 * clipping.count_noise > sigma:
        message = (
            f"expected count_noise above noise_multiplier / 2 = {shown(sigma / 2)}, received "
            f"{shown(clipping.count_noise)}: the count alone would tell more than that noise allows."
        )
        fix = (
            f"Write {spec.snippet('count_noise', shown(max(2 * sigma, 1.0)))} or more: a small part of the batch size."
        )
        yield (*path, "count_noise"), message, fix


def _batch_conflicts(spec: PrivacySpec) -> Iterator[Conflict]:
    sampling, (total, name) = spec.sampling, population(spec)
    size, probability = sampling.expected_batch_size, sampling.probability
    if sampling.scheme == "full_batch":
        if size is not None and size != total:
            message = f"expected the full batch of {name} = {total}, received {shown(size)}."
            yield ("sampling", "expected_batch_size"), message, "Delete it, or use scheme poisson."
        if probability is not None and probability != 1:
            message = f"expected probability 1 with full_batch, received {shown(probability)}."
            yield ("sampling", "probability"), message, "Delete it, or use scheme poisson."
    elif size is None and probability is None:
        message = "expected expected_batch_size or probability, received neither."
        yield ("sampling",), message, _one_of_them(spec, "expected_batch_size", min(256, -(-total // 10)))
    elif size is not None and probability is not None:
        message = (
            f"expected either expected_batch_size or probability, received both: {shown(size)} "
            f"and {shown(probability)} * {total} = {shown(probability * total)}."
        )
        yield ("sampling", "probability"), message, "Keep one of them; the other follows."
    if sampling.scheme == "truncated_poisson" and sampling.truncated_batch_size is None:
        message = "expected truncated_batch_size with scheme truncated_poisson, received nothing."
        yield ("sampling", "scheme"), message, _truncation(spec, total)
    if sampling.scheme != "truncated_poisson" and sampling.truncated_batch_size is not None:
        message = (
            f"expected no truncated_batch_size with scheme {sampling.scheme}, received {sampling.truncated_batch_size}."
        )
        yield ("sampling", "truncated_batch_size"), message, "Delete it, or use scheme truncated_poisson."


def _one_of_them(spec: PrivacySpec, name: str, value: int) -> str:
    return f"Add one of them. {spec.such_as(('sampling', name), value)}"


def _truncation(spec: PrivacySpec, total: int) -> str:
    size = spec.sampling.expected_batch_size
    if size is None or not size <= total:
        return "Add truncated_batch_size, the largest batch, or use scheme poisson."
    line = spec.such_as(("sampling", "truncated_batch_size"), suggested_truncation(size, total))
    return f"Add truncated_batch_size, the largest batch, or use scheme poisson. {line}"


def _length_conflicts(spec: PrivacySpec) -> Iterator[Conflict]:
    sampling, schedule = spec.sampling, None
    if sampling.steps is None and sampling.epochs is None:
        yield ("sampling",), "expected steps or epochs, received neither.", _one_of_them(spec, "epochs", 10)
    elif sampling.steps is not None and sampling.epochs is not None:
        message = f"expected either steps or epochs, received both: {sampling.steps} and {shown(sampling.epochs)}"
        without = spec.model_copy(update={"sampling": sampling.model_copy(update={"steps": None})})
        schedule = _computed_schedule(without)
        message += f" epochs, which are {counted(schedule.steps, 'step')}." if schedule else " epochs."
        fix = "Keep one of them; the other follows."
        if schedule is not None and schedule.steps >= 1:
            fix = f"Delete steps, for {counted(schedule.steps, 'step')}, or delete epochs, for {sampling.steps}."
        yield ("sampling", "epochs"), message, fix
    else:
        schedule = _computed_schedule(spec)
        if schedule is not None and schedule.steps < 1:
            message = f"expected at least one step, received {shown(sampling.epochs or 0)} epochs at q = "
            message += f"{shown(schedule.sampling_probability)}, which is less than one."
            fix = f"Write {spec.snippet('epochs', str(rounded_up(schedule.sampling_probability)))} or more, or "
            fix += f"{spec.snippet('steps', '1')}."
            yield ("sampling", "epochs"), message, fix


def _size_conflicts(spec: PrivacySpec) -> Iterator[Conflict]:
    data, unit = spec.data, spec.claim.privacy_unit
    if data.num_records is None:
        return
    if data.num_records < data.num_units:
        message = (
            f"expected at least one record per unit, received {data.num_records} records for {data.num_units} units."
        )
        yield ("data", "num_records"), message, "Correct num_records or num_units."
    most = data.num_units * (unit.max_records_per_unit or 1)
    if unit.method == "group_privacy" and data.num_records > most:
        message = (
            f"expected at most max_records_per_unit * num_units = {most} records after bounding contributions, "
            f"received {data.num_records}."
        )
        yield (
            ("data", "num_records"),
            message,
            "Count the records that may be sampled, or correct max_records_per_unit.",
        )


def _computed_schedule(spec: PrivacySpec) -> Schedule | None:
    try:
        return spec.schedule
    except ValueError:
        return None
