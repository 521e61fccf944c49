"""Look-up tables: Embedding, ReversibleEmbedding (tied and untied), PositionEmbedding, the masked-LM head's bias.

A tied table is used twice, as a look-up and as the kernel of the output projection; both uses are returned under the
same variable, and the cross term between them is taken when they are merged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdp import keras_private
from tfdp.errors import UnsupportedLayerError
from tfdp.gradients import uses
from tfdp.gradients.rules.base import Rule, UsesOf, Watch, other_trainable
from tfdp.gradients.rules.dense import bias_use


class EmbeddingRule(Rule):
    """keras.layers.Embedding, with LoRA: table E + s*A@B."""

    relies_on = ("embeddings",)

    def refuse(self, layer: Any) -> str | None:
        if not layer.lora_enabled:
            return None
        covered = [layer.lora_embeddings_a, layer.lora_embeddings_b]
        return other_trainable(layer, [*covered, getattr(layer, "reverse_embeddings", None)])

    def uses(self, layer: Any, inputs: Any, options: dict[str, Any], gradient: Any, units: int) -> UsesOf:
        ids, gradient = uses.row_numbers(inputs, layer.input_dim), tf.cast(gradient, tf.float32)
        if not layer.lora_enabled:
            return [(layer.embeddings, uses.gather(ids, gradient, layer.input_dim, units))]
        a, b, scale = layer.lora_embeddings_a, layer.lora_embeddings_b, layer.lora_alpha / layer.lora_rank
        picked = tf.gather(tf.cast(a.value, tf.float32), ids)
        back = tf.einsum("...p,rp->...r", gradient, tf.cast(b.value, tf.float32))
        return [
            (a, uses.gather(ids, scale * back, layer.input_dim, units)),
            (b, uses.outer(scale * picked, gradient, b.shape, units)),
        ]


class ReversibleEmbeddingRule(EmbeddingRule):
    """keras.layers.ReversibleEmbedding: look-up, or projection back to the vocabulary with a soft cap."""

    finish_attributes = ("logit_soft_cap",)

    def finish(self, layer: Any, output: Any, options: dict[str, Any]) -> Any:
        cap = layer.logit_soft_cap
        return output if cap is None or not options["reverse"] else tf.tanh(output / cap) * cap

    def uses(self, layer: Any, inputs: Any, options: dict[str, Any], gradient: Any, units: int) -> UsesOf:
        if not options["reverse"]:
            return super().uses(layer, inputs, options, gradient, units)
        hidden, gradient = tf.cast(inputs, tf.float32), tf.cast(gradient, tf.float32)
        if not layer.tie_weights:
            variable = layer.reverse_embeddings
            return [(variable, uses.outer(hidden, gradient, variable.shape, units))]
        if not layer.lora_enabled:
            return [(layer.embeddings, uses.outer(gradient, hidden, layer.embeddings.shape, units))]
        a, b, scale = layer.lora_embeddings_a, layer.lora_embeddings_b, layer.lora_alpha / layer.lora_rank
        narrow = tf.einsum("...p,rp->...r", hidden, tf.cast(b.value, tf.float32))
        back = tf.einsum("...v,vr->...r", gradient, tf.cast(a.value, tf.float32))
        return [
            (a, uses.outer(gradient, scale * narrow, a.shape, units)),
            (b, uses.outer(scale * back, hidden, b.shape, units)),
        ]


class PositionEmbeddingRule(Rule):
    """keras_hub.layers.PositionEmbedding: row t of the table is added to token t."""

    def uses(self, layer: Any, inputs: Any, options: dict[str, Any], gradient: Any, units: int) -> UsesOf:
        start, positions = options["start_index"], options["positions"]
        if positions is not None or not isinstance(start, int) or start != 0:
            raise UnsupportedLayerError(
                f"Expected layer '{layer.name}' (PositionEmbedding) to be called without positions and from index 0. "
                f"Received: start_index={start}, positions={positions}. Train without a cache, or freeze the layer."
            )
        table = layer.position_embeddings
        tokens, features = gradient.shape[-2:]
        held = uses.direct(gradient, (tokens, features), units)
        return [(table, uses.Direct(held.gradient, tuple(table.shape)))]


class MaskedLMHeadRule(Rule):
    """keras_hub.layers.MaskedLMHead: an output bias of its own, and without a table to tie to, an output kernel."""

    finish_attributes = ("activation",)

    def run(self, layer: Any, original: Callable[[], Any], batch_size: int, watch: Watch) -> Any:
        if layer.token_embedding is not None:
            return super().run(layer, original, batch_size, watch)
        kernel = keras_private.masked_lm_output_kernel(layer)

        def projected(hidden: Any, reverse: bool) -> Any:
            logits = tf.matmul(hidden, tf.cast(kernel.value, hidden.dtype))
            watch(logits, lambda gradient, units: [(kernel, uses.outer(hidden, gradient, kernel.shape, units))])
            return logits

        # The head asks the tied table where there is one: the product with its own kernel takes that place.
        with keras_private.replaced_attribute(layer, "token_embedding", projected):
            return super().run(layer, original, batch_size, watch)

    def uses(self, layer: Any, inputs: Any, options: dict[str, Any], gradient: Any, units: int) -> UsesOf:
        bias = keras_private.masked_lm_output_bias(layer)
        return [(bias, bias_use(bias, gradient, units))]


def rules() -> dict[type, Rule]:
    import keras
    import keras_hub

    return {
        keras.layers.Embedding: EmbeddingRule(),
        keras.layers.ReversibleEmbedding: ReversibleEmbeddingRule(),
        keras_hub.layers.PositionEmbedding: PositionEmbeddingRule(),
        keras_hub.layers.MaskedLMHead: MaskedLMHeadRule(),
    }
