"""Layers made of other layers that also hold variables of their own and use them in the middle of their call.

While such a layer runs, the place where its variable is read gets a tensor with one copy a record instead, and the
gradient of that tensor is the gradient of each record. The copies are as large as the variable, so this is for what is
small beside the kernels of the layers around it: mixing factors, low-rank kernels, relative positions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdp import keras_private
from tfdp.gradients import uses
from tfdp.gradients.rules.base import Rule, UsesOf, Watch


def copies(variable: Any, batch_size: int, watch: Watch, token_axis: bool = False) -> Any:
    """[batch, *shape], or [batch, 1, *shape] for what is broadcast against tokens, in the layer's compute dtype."""
    import keras

    value = keras.ops.convert_to_tensor(variable)
    shape = ([1] if token_axis else []) + list(value.shape)
    repeated = tf.tile(value[None], [batch_size] + [1] * len(value.shape))
    repeated = tf.reshape(repeated, [batch_size, *shape])
    watch(repeated, lambda gradient, units: [(variable, uses.direct(gradient, variable.shape, units))])
    return repeated


class CopiesRule(Rule):
    """Variables that broadcast against [batch, tokens, ...], or are the right operand of a product with it.

    Attributes:
        factors: attributes that multiply or are added, feature by feature.
        kernels: attributes that are the right operand of `ops.matmul`.
    """

    watches_output = False

    def __init__(self, factors: tuple[str, ...], kernels: tuple[str, ...] = (), flattens: tuple[str, ...] = ()):
        self.factors, self.kernels, self.flattens = factors, kernels, flattens

    def run(self, layer: Any, original: Callable[[], Any], batch_size: int, watch: Watch) -> Any:
        with contextlib.ExitStack() as stack:
            for name in (*self.factors, *self.kernels):
                variable = getattr(layer, name, None)  # the first block has no mixing of values
                if variable is not None and variable.trainable:
                    copied = copies(variable, batch_size, watch, token_axis=name in self.factors)
                    stack.enter_context(keras_private.replaced_attribute(layer, name, copied))
            return original()


class RelativeBiasRule(Rule):
    """T5's attention: a bias by head and distance, the same for every record until it is added to the scores."""

    relies_on = ("compute_bias", "_relative_position_bucket")
    watches_output = False

    def run(self, layer: Any, original: Callable[[], Any], batch_size: int, watch: Watch) -> Any:
        with self.biases_by_record(layer, batch_size, watch):
            return original()

    @contextlib.contextmanager
    def biases_by_record(self, layer: Any, batch_size: int, watch: Watch) -> Iterator[None]:
        compute_bias, table = layer.compute_bias, layer.relative_attention_bias
        buckets = table.shape[0]

        def by_record(*args: Any, **kwargs: Any) -> Any:
            numbers = tf.range(buckets, dtype=tf.float32)[:, None]
            with keras_private.replaced_attribute(layer, "relative_attention_bias", numbers):
                bucket = tf.cast(compute_bias(*args, **kwargs)[0, 0], tf.int32)  # [queries, keys]
            biases = tf.repeat(compute_bias(*args, **kwargs), batch_size, 0)  # [batch, heads, queries, keys]

            def uses_of(gradient: Any, units: int) -> UsesOf:
                chosen = tf.one_hot(bucket, buckets)
                by_bucket = tf.einsum("bhqk,qkn->bnh", tf.cast(gradient, tf.float32), chosen)
                return [(table, uses.direct(by_bucket, table.shape, units))]

            watch(biases, uses_of)
            return biases

        with keras_private.replaced_attribute(layer, "compute_bias", by_record):
            yield


class RelativeEmbeddingRule(Rule):
    """DeBERTa's table of distances, normalised and then repeated over the batch: here repeated first."""

    watches_output = False

    def run(self, layer: Any, original: Callable[[], Any], batch_size: int, watch: Watch) -> Any:
        return layer.layer_norm(copies(layer.rel_embeddings, batch_size, watch))


def rules() -> dict[type, Rule]:
    time_mix = CopiesRule(
        factors=("x_r", "x_w", "x_k", "x_v", "x_a", "x_g", "w0", "a0", "v0", "k_k", "k_a", "r_k"),
        kernels=("w1", "w2", "a1", "a2", "v1", "v2", "g1", "g2"),
        flattens=("ln_x",),
    )
    return {
        keras_private.hub_class("deberta_v3.relative_embedding:RelativeEmbedding"): RelativeEmbeddingRule(),
        keras_private.hub_class("rwkv7.rwkv7_layer:RWKV7ChannelMix"): CopiesRule(("x_k",)),
        keras_private.hub_class("rwkv7.rwkv7_layer:RWKV7TimeMix"): time_mix,
        keras_private.hub_class("t5.t5_multi_head_attention:T5MultiHeadAttention"): RelativeBiasRule(),
    }
