"""A private fit on several devices of one machine, under `tf.distribute.MirroredStrategy`.

A step is one step, however many replicas take part: one draw, one line on the ledger, one noise vector.

| what                          | where                                                                            |
|-------------------------------|----------------------------------------------------------------------------------|
| draw, ledger, permission      | once, on the host                                                                |
| microbatches r, r + R, ...    | on replica r of R: clipped per unit and summed there; often one less, or none    |
| sum over the replicas         | once: it is the sum over the logical batch                                       |
| masks of dropout              | on every replica from seeds of its own, fresh in every step                      |
| noise, expected batch size    | once, on the host, with the standard deviation of a single device                |
| update                        | the same on every replica, whose variables stay alike bit by bit                 |

No replica adds noise of its own, so nothing depends on how noise of several replicas would add up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from tfdp import keras_private
from tfdp.entropy import system_words
from tfdp.errors import MisuseError


def checked_strategy(strategy: Any) -> Any | None:
    """`strategy` where a private fit may be under it, None where there is none.

    Args:
        strategy: a `tf.distribute.Strategy`, or None.

    Raises:
        MisuseError: one that is not supported.
    """
    if strategy is None:
        return None
    if type(strategy) is not tf.distribute.MirroredStrategy:
        raise MisuseError(
            f"Expected no tf.distribute strategy, or a MirroredStrategy. Received: {type(strategy).__name__}. Only "
            "with all replicas in one process is it certain that a step has one draw, one noise vector and one line "
            "on the ledger: use MirroredStrategy, or no strategy."
        )
    devices = [tf.DeviceSpec.from_string(device) for device in strategy.extended.worker_devices]
    if len({(device.job, device.replica, device.task) for device in devices}) > 1:
        raise MisuseError(
            "Expected a MirroredStrategy over devices of one machine. Received: devices of several workers. Each would "
            "draw a batch of its own: use the devices of one machine."
        )
    return strategy


def current_strategy() -> Any | None:
    """The strategy in whose scope this is called, None without one.

    Raises:
        MisuseError: one that is not supported.
    """
    return checked_strategy(tf.distribute.get_strategy() if tf.distribute.has_strategy() else None)


def strategy_of(model: Any) -> Any | None:
    """The strategy that a fit of the model is under, None without one.

    Raises:
        MisuseError: one that is not supported, or two.
    """
    current, made_under = current_strategy(), checked_strategy(keras_private.strategy_made_under(model))
    strategy = current if made_under is None else made_under
    if current not in (None, strategy):
        raise MisuseError(
            "Expected fit within the scope of the model's own tf.distribute strategy, or outside of any. Received: the "
            "scope of another one. Take fit out of it."
        )
    return strategy


def check_made_under(strategy: Any, model: Any) -> None:
    """Whether model, optimizer and metrics have their variables on every replica.

    Raises:
        MisuseError: one of them was made outside of the strategy's scope: every replica would change it in its turn.
    """
    parts = {"model": model.variables, "optimizer": model.optimizer.variables, "metrics": model.metrics_variables}
    for name, variables in parts.items():
        outside = [v.path for v in variables if not strategy.extended.variable_created_in_scope(v.value)]
        if outside:
            raise MisuseError(
                f"Expected the {name} to be made within the scope of the tf.distribute strategy. Received: "
                f"{len(outside)} variables made outside of it, such as {outside[0]}. Build the model (with its "
                "adapters), make the optimizer, compile, and call poisson_batches within strategy.scope()."
            )


def check_batches(strategy: Any | None, iterator: Any) -> None:
    """Whether the batches are as a fit under `strategy` takes them.

    Raises:
        MisuseError: they are whole and there is no strategy, or the other way about.
    """
    if isinstance(iterator, ReplicaIterator) != (strategy is not None):
        raise MisuseError(
            "Expected model and batches to be made within the scope of one tf.distribute strategy, or both outside of "
            f"any. Received: {'a model' if strategy else 'batches'} made within a scope and "
            f"{'batches' if strategy else 'a model'} made outside of it. Call poisson_batches where the model is built."
        )


def reseed(states: Sequence[Any], step: Any) -> None:
    """Seeds the generators of this replica (dropout) from the operating system; to be called on every replica.

    Keras seeds all replicas alike, and anything that runs the model between two steps makes them alike again. With the
    same masks on two replicas, which units share a mask would depend on how many came before them, and one unit more
    would change the gradients of all others.

    Args:
        states: of the generators, Keras variables of two integers.
        step: what has to come first, a tensor.
    """

    def draw(_: Any) -> Any:
        return (system_words(2) >> 33).astype(np.int64)

    for state in states:
        seed = tf.numpy_function(draw, [step], tf.int64, stateful=True)
        seed.set_shape([2])
        state.value.assign(tf.cast(seed, state.value.dtype))


class ReplicaIterator(Iterator[Any]):
    """Iterator over batches of `poisson_batches` that were made within the scope of a strategy.

    The logical batches stay whole up to the private train step, which alone takes them from `draws`. To everybody else
    these are batches of shapes: from them Keras builds a model under a strategy, before any callback is asked.

    Args:
        draws: iterator over the logical batches.
    """

    def __init__(self, draws: Any):
        self.draws = draws

    @property
    def element_spec(self) -> Any:
        return self.draws.element_spec

    def __next__(self) -> tuple[Any, ...]:
        spec = self.draws.element_spec
        axes = 2 if spec.get("record_weight") is None else 3

        def microbatch(leaf: Any) -> Any:
            return None if leaf is None else _Shape([math.prod(leaf.shape[1:axes]), *leaf.shape[axes:]], leaf.dtype)

        return tuple(tf.nest.map_structure(microbatch, spec.get(name)) for name in ("x", "y", "sample_weight"))


class ReplicaBatches(tf.data.Dataset, tf.distribute.DistributedDataset):
    """Batches of `poisson_batches` that Keras does not cut into pieces for the replicas: as if that had been done.

    Args:
        dataset: of logical batches.
    """

    def __init__(self, dataset: Any):
        self._dataset = dataset
        super().__init__(tf.data.experimental.to_variant(dataset))

    def __iter__(self) -> ReplicaIterator:
        return ReplicaIterator(iter(self._dataset))

    @property
    def element_spec(self) -> Any:
        return self._dataset.element_spec

    def _inputs(self) -> list[Any]:  # asked for by tf.data
        return [self._dataset]


class _Shape:
    """What stands for a tensor where Keras only asks for shape and type."""

    def __init__(self, shape: list[int], dtype: Any):
        self.shape, self.dtype = shape, dtype

    def __tf_tensor__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise MisuseError(
            "Expected batches of poisson_batches in a private fit. Received: one of them as the input of a model. "
            "Train with model.fit(batches, ..., callbacks=[tfdp.PrivacyCallback(plan, ledger=...)]) and a model made "
            "within the strategy's scope; evaluate and predict on ordinary batches of the records."
        )

    __array__ = __tf_tensor__
