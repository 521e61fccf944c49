"""The sampler as a `tf.data.Dataset` for `model.fit`: one element is one logical batch.

One draw is made per element and then cut into microbatches of a fixed size, so the shapes inside do not change from
batch to batch; only their number M does. A logical batch of n units has M = ceil(n / m), 0 when nothing was drawn.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import os
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, NoReturn, Protocol

import numpy as np

from tfdp.entropy import system_bits, words_of
from tfdp.errors import DataError, MisuseError, PlanError
from tfdp.sampling.claims import UnitPlan, checked_units, claims_whole_unit, records_of_units
from tfdp.sampling.poisson import PoissonSampler
from tfdp.sampling.records import as_records
from tfdp.sampling.structures import Array, Leaf, Records, leaves, map_leaves, rebuild

_DEFAULT_MICROBATCH_SIZE = 16
_PREFETCHED_BATCHES = 2

# Process-wide: a number names one draw, whatever dataset, iterator, epoch or fit it belongs to. `next` is atomic. The
# start is random, so that a draw which another process made and kept has a number that this one never gives.
_draw_numbers = itertools.count(system_bits(62))

# What Keras needs of a dataset; every other method could replay, drop, merge or rewrite draws.
_KEPT_METHODS = frozenset({"as_numpy_iterator", "cardinality", "options", "prefetch", "take", "with_options"})


class IssuedDraw(NamedTuple):
    """What a batch has to be, of a draw that no step has used yet."""

    units: int
    microbatches: int
    microbatch_size: int
    token: int
    partition: bytes = b""  # digest of the ids that made the units; empty where a record is a unit


# Draws of this process that no step has used: an entry is taken out by its use. `pop` and item assignment are atomic.
_issued: dict[int, IssuedDraw] = {}


def take_issued_draw(number: int) -> IssuedDraw | None:
    """Marks a draw as used; None where this process never made it, or used it before."""
    return _issued.pop(number, None)


def _begin_in_fork() -> None:
    """The parent may still use the draws that it made."""
    global _draw_numbers
    _draw_numbers = itertools.count(system_bits(62))
    _issued.clear()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_begin_in_fork)


class SamplingPlan(UnitPlan, Protocol):
    """What the sampler reads of a plan."""

    @property
    def sampling_probability(self) -> float: ...
    @property
    def scheme(self) -> str: ...
    @property
    def truncated_batch_size(self) -> int | None: ...
    @property
    def microbatch_size(self) -> int | Literal["auto"] | None: ...
    @property
    def expected_batch_size(self) -> float: ...
    @property
    def digest(self) -> str: ...
    @property
    def seed(self) -> int | None: ...


class PrivateBatch(dict[str, Any]):
    """One logical batch: a dictionary that nothing but the private train step can use as data.

    Keras hands what a dataset yields to the model. A fit without the callback does that with this one; Keras then asks
    it for the model's inputs by name, or for an array, and is told what is missing.
    """

    _KEYS = frozenset({"x", "y", "sample_weight", "record_weight", "unit_weight", "tfdp"})

    def __contains__(self, key: object) -> bool:
        if key not in self._KEYS:
            self._refuse()
        return super().__contains__(key)

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse()

    @property
    def shape(self) -> NoReturn:
        """What Keras asks for first where a distribution strategy makes it build the model from the data."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise MisuseError(
            "Expected batches of poisson_batches in a private fit. Received: one of them as the input of a model. "
            "Train with model.fit(batches, ..., callbacks=[tfdp.PrivacyCallback(plan, ledger=...)]), compile with "
            "tfdp.dp_optimizer, and make model, optimizer and batches within one tf.distribute scope or all outside; "
            "evaluate and predict on ordinary batches of the records."
        )


def plan_token(plan: SamplingPlan) -> int:
    """The number by which a batch says which plan it was drawn for: the first 60 bits of the plan's digest."""
    return int(plan.digest[:15], 16)


def poisson_batches(
    records: Any,
    plan: SamplingPlan,
    *,
    unit_ids: Any = None,
    scores: Any = None,
    sequence_length: int | None = None,
    pad_value: int = 0,
    separator: int | None = None,
    microbatch_size: int | None = None,
) -> Any:
    """Makes the training data of a private `model.fit`.

    Every iterator over the result draws afresh, from operating-system entropy: a second epoch, a second `fit` or
    another process never sees a draw again. The dataset is infinite: pass `steps_per_epoch=plan.steps_per_epoch`.

    Each element is a `PrivateBatch`, a dictionary. With M microbatches of m units, and R the shape of a record's leaf
    (where k records of a unit are clipped together, [k, *R]):

    | key                           | value                                                                      |
    |-------------------------------|----------------------------------------------------------------------------|
    | "x", "y", "sample_weight"     | as the records have them, each leaf [M, m, *R]; absent where they are      |
    | "unit_weight"                 | float32 [M, m]: 1 for a sampled unit, 0 for padding, which comes at the end |
    | "record_weight"               | float32 [M, m, k]: 1 for a record, 0 for an empty slot of a unit; k > 1    |
    | "tfdp"                        | {"draw": [1], "plan": [1]} int64: number of the draw, token of the plan    |

    Args:
        records: one record per row; see `tfdp.sampling.records` for what is understood. A `tf.data.Dataset` is read
            into memory, its elements are the records.
        plan: the plan; its `num_units` must be the number of units.
        unit_ids: the id of its unit for every record. Needed, and only allowed, where the plan claims a document or
            a user: records are grouped here, and the limit of records per unit is kept here, by the selection that
            the spec states.
        scores: one number per record, by which that selection ranks: perplexities under the public model, or lengths
            (which are measured where they are not given).
        sequence_length: for bare token records: the length of x and y, public.
        pad_value: for bare token records: the token that fills short ones.
        separator: for the selection random_chunk: a token to put between two records of a unit.
        microbatch_size: m, in units; by default the plan's, or 16, or less where the expected batch is smaller or a
            unit has many records. It bounds memory and does not change what is computed. Needed where the plan says
            "auto": see `tfdp.time_microbatches`.

    Returns:
        A `tf.data.Dataset` that refuses transformations (`map`, `batch`, `shuffle`, `cache`, ...) with `MisuseError`.

    Raises:
        DataError: the records cannot be sampled as the plan says.
        PlanError: the plan's sampling scheme is not one of this sampler.
    """
    import tensorflow as tf

    from tfdp.replicas import current_strategy

    # Before the records are read: what is public is checked first.
    whole = current_strategy() is not None
    _check_scheme(plan)
    size = _choose_microbatch_size(plan, microbatch_size)
    partition = b""
    if claims_whole_unit(plan.privacy_unit):
        units = checked_units(plan, unit_ids)
        if isinstance(records, tf.data.Dataset):
            records = _read_dataset(records, len(units.records))
        source = records_of_units(
            records,
            plan,
            units=units,
            scores=scores,
            sequence_length=sequence_length,
            pad_value=pad_value,
            separator=separator,
            words=functools.partial(words_of, plan.seed),
        )
        partition = units.digest
    else:
        _refuse_ids(plan, unit_ids)
        if isinstance(records, tf.data.Dataset):
            records = _read_dataset(records, plan.num_units)
        source = as_records(records, sequence_length=sequence_length, pad_value=pad_value)
        if len(source) != plan.num_units:
            raise DataError(
                f"Expected one record per privacy unit of the plan, {plan.num_units}. Received: {len(source)} records. "
                "Make the plan for these records, or give each unit one record (a batched dataset is unbatched first)."
            )
    sampler = PoissonSampler(
        len(source), plan.sampling_probability, truncated_batch_size=plan.truncated_batch_size, seed=plan.seed
    )

    template = source.template
    specs: list[Leaf] = leaves(template)
    dtypes = [tf.int64, tf.float32, *(tf.as_dtype(leaf.dtype) for leaf in specs)]
    token = plan_token(plan)

    def draw() -> list[Array]:
        return _draw_batch(sampler, source, size, token, partition)

    @tf.autograph.experimental.do_not_convert
    def element(_: Any) -> dict[str, Any]:
        # Stateful, so that TensorFlow neither folds nor shares nor caches it.
        number, weight, *values = tf.numpy_function(draw, [], dtypes, stateful=True)
        number.set_shape([])
        weight.set_shape([None, size])
        for value, leaf in zip(values, specs, strict=True):
            value.set_shape([None, size, *leaf.shape])
        # One axis: with scalars, a tf.distribute strategy fails in words of its own before it can be refused.
        mark = {"draw": number[None], "plan": tf.constant([token], tf.int64)}
        return PrivateBatch(tfdp=mark, unit_weight=weight, **rebuild(template, values))

    dataset = tf.data.Dataset.counter().map(element, num_parallel_calls=None)
    if sampler.seed is None:
        dataset = dataset.prefetch(_PREFETCHED_BATCHES)
    else:
        # Drawing ahead would make it a matter of timing which draws a fit sees; a seed is there to see the same ones.
        options = tf.data.Options()
        options.experimental_optimization.inject_prefetch = False
        dataset = dataset.with_options(options)
    return _guard(dataset, whole)


def _check_scheme(plan: SamplingPlan) -> None:
    """Whether the sampler has the law that the plan's accountant was told."""
    probability, limit = plan.sampling_probability, plan.truncated_batch_size
    fits = {
        "poisson": limit is None,
        "truncated_poisson": limit is not None,
        "full_batch": limit is None and probability == 1.0,
    }
    if not fits.get(plan.scheme, False):
        raise PlanError(
            'Expected the scheme "poisson", "truncated_poisson" with a truncated_batch_size, or "full_batch" with '
            f"sampling probability 1. Received: scheme={plan.scheme!r}, truncated_batch_size={limit}, "
            f"sampling_probability={probability}. Choose a scheme that the sampler can run."
        )


def _refuse_ids(plan: SamplingPlan, unit_ids: Any) -> None:
    if unit_ids is not None:
        raise DataError(
            f"Expected no unit_ids under a plan whose privacy unit is one {plan.privacy_unit.kind}: it bounds single "
            "records, and who owns several is protected less. Received: ids. Claim a document or user unit in the "
            "spec, or leave the ids out."
        )


def _choose_microbatch_size(plan: SamplingPlan, size: int | Literal["auto"] | None) -> int:
    """m, from public numbers alone."""
    size = plan.microbatch_size if size is None else size
    if size == "auto":
        raise DataError(
            "Expected a microbatch size in units, as only the compiled model can be timed. Received: microbatch_size "
            '"auto". Compile the model, then: times = tfdp.time_microbatches(model, records, plan), and '
            "poisson_batches(records, plan, microbatch_size=times.fastest). tfdp train and tfdp.workflow do it by "
            "themselves."
        )
    if size is None:
        expected = math.ceil(plan.expected_batch_size)
        most = max(1, _DEFAULT_MICROBATCH_SIZE // plan.records_per_unit)
        return min(most, expected, plan.truncated_batch_size or expected)
    if size < 1:
        raise DataError(
            f"Expected a microbatch size of at least 1. Received: microbatch_size={size}. "
            "It is the number of units whose gradients are in memory at a time."
        )
    return int(size)


def _read_dataset(dataset: Any, num_units: int) -> list[Any]:
    """The elements of a tf.data.Dataset, which must be as many as there are units."""
    cardinality = int(dataset.cardinality())  # -1: infinite, -2: unknown
    if cardinality == -1:
        raise DataError(
            "Expected a finite dataset whose elements are the records. Received: an infinite one. "
            "Pass it before repeat(), and before poisson_batches."
        )
    if cardinality >= 0 and cardinality != num_units:
        raise DataError(
            f"Expected one element per privacy unit of the plan, {num_units}. Received: a dataset of {cardinality} "
            "elements. Make the plan for these records; a batched dataset is unbatched first."
        )
    items = list(itertools.islice(dataset.as_numpy_iterator(), num_units + 1))
    if len(items) != num_units:
        received = f"{len(items)} elements" if len(items) < num_units else f"more than {num_units} elements"
        raise DataError(
            f"Expected one element per privacy unit of the plan, {num_units}. Received: {received}. "
            "Make the plan for these records; a batched dataset is unbatched first."
        )
    return items


def _draw_batch(sampler: PoissonSampler, source: Records, size: int, token: int, partition: bytes) -> list[Array]:
    """One logical batch as [number of the draw, unit weights, leaves...], cut into microbatches of `size` units."""
    number = next(_draw_numbers)
    chosen = sampler.draw()
    count = -(-len(chosen) // size)
    weight = np.zeros(count * size, np.float32)
    weight[: len(chosen)] = 1.0
    taken = source.take(chosen, rows=count * size)
    cut = map_leaves(lambda value: value.reshape(count, size, *value.shape[1:]), taken)
    _issued[number] = IssuedDraw(len(chosen), count, size, token, partition)
    return [np.array(number, np.int64), weight.reshape(count, size), *leaves(cut)]


def _guard(dataset: Any, whole: bool) -> Any:
    """Takes the methods off a dataset object that would change what the accountant was told.

    Args:
        dataset: the object.
        whole: for the replicas of a strategy, among which Keras would divide the batches.
    """
    if whole:
        from tfdp.replicas import ReplicaBatches

        dataset = ReplicaBatches(dataset)
    for name in dir(type(dataset)):
        method = inspect.getattr_static(type(dataset), name)
        if not name.startswith("_") and inspect.isfunction(method) and name not in _KEPT_METHODS:
            setattr(dataset, name, _refusal(name))
    dataset.map = _guarded_map(dataset)
    # Already done as far as it should be: more would only hold more draws in memory.
    dataset.prefetch = lambda *args, **kwargs: dataset
    for name in ("take", "with_options"):
        setattr(dataset, name, _guarded(getattr(dataset, name), whole))
    return dataset


def _guarded(method: Callable[..., Any], whole: bool) -> Callable[..., Any]:
    return lambda *args, **kwargs: _guard(method(*args, **kwargs), whole)


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise MisuseError(
            f"Expected the batches of the sampler as they are. Received: a call of .{name}(), which could replay, "
            "merge or change draws that the accountant counts. Prepare the records before poisson_batches, and pass "
            "its result to fit."
        )

    return refuse


def _guarded_map(dataset: Any) -> Callable[..., Any]:
    def map_(function: Any = None, *args: Any, **kwargs: Any) -> Any:
        # KerasHub's fit maps its preprocessing over any data; with the preprocessor detached that is the identity.
        if _is_detached_preprocessing(function):
            return dataset
        if str(getattr(function, "__module__", None)).startswith("tensorflow.python."):
            raise MisuseError(
                "Expected batches that were made within the scope of the model's tf.distribute strategy. Received: "
                "others, which it would cut into pieces for its replicas. Call poisson_batches within strategy.scope()."
            )
        raise MisuseError(
            "Expected the batches of the sampler as they are. Received: a call of .map(). From `fit` of a KerasHub "
            "model: its preprocessor is attached; apply it to the records before poisson_batches and set "
            "`model.preprocessor = None`. From `fit(class_weight=...)`: put the weights in the records' sample_weight. "
            "From your own code: map the records before poisson_batches."
        )

    return map_


def _is_detached_preprocessing(function: Any) -> bool:
    """Whether this is KerasHub's own `preprocess_samples`, not an override, of a model without a preprocessor."""
    owner = getattr(function, "__self__", None)
    return (
        inspect.ismethod(function)
        and function.__func__.__module__.partition(".")[0] in ("keras_hub", "keras_nlp")
        and function.__func__.__qualname__ in ("Task.preprocess_samples", "PipelineModel.preprocess_samples")
        and getattr(owner, "preprocessor", None) is None
    )
