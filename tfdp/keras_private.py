"""The only file that touches what Keras and TensorFlow keep private, each with its reason.

`tests/test_keras_private.py` breaks loudly when one of them changes.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

_replacing_the_scale = threading.RLock()


def flatten_layers(layer: Any) -> list[Any]:
    """`layer` and every layer below it, each once. Keras lists only a model's direct layers in public."""
    return list(layer._flatten_layers(include_self=True, recursive=True))


def own_variables(layer: Any) -> list[Any]:
    """Variables that `layer` holds itself, not through a sublayer."""
    below = {id(v) for child in layer._flatten_layers(include_self=False) for v in child.variables}
    return [v for v in layer.variables if id(v) not in below]


def keras_mask(tensor: Any) -> Any | None:
    """The mask that a layer attached to its output; the loss reads it from there."""
    return getattr(tensor, "_keras_mask", None)


def set_keras_mask(tensor: Any, mask: Any) -> None:
    """Attach `mask` to `tensor` as a layer does, so that a Keras loss finds it."""
    tensor._keras_mask = mask


# The root-mean-square norms of KerasHub's families: it exports none of them, and each family has its own copy.
HUB_ROOT_MEAN_SQUARE_NORMS = (
    "edrec.edrec_layers:EdRecRMSNormalization",
    "gemma.rms_normalization:RMSNormalization",
    "gemma3.gemma3_layers:RMSNormalization",
    "gemma3n.rms_normalization:Gemma3nRMSNorm",
    "gemma4.gemma4_layers:RMSNormalization",
    "gpt_oss.gpt_oss_layer_norm:GptOssLayerNormalization",
    "llama.llama_layernorm:LlamaLayerNorm",
    "mistral.mistral_layer_norm:MistralLayerNormalization",
    "mixtral.mixtral_layer_norm:MixtralLayerNormalization",
    "mobilenetv5.mobilenetv5_layers:RmsNorm2d",
    "phi3.phi3_layernorm:Phi3LayerNorm",
    "qwen.qwen_layernorm:QwenLayerNorm",
    "qwen3.qwen3_layernorm:Qwen3LayerNorm",
    "qwen3_5.qwen3_5_layers:Qwen3_5LayerNorm",
    "qwen3_5.qwen3_5_layers:Qwen3_5RMSNormGated",
    "qwen3_moe.qwen3_moe_layernorm:Qwen3MoeLayerNorm",
    "qwen_moe.qwen_moe_layernorm:QwenMoeLayerNorm",
    "roformer_v2.roformer_v2_attention:RoformerNorm",
    "t5.t5_layer_norm:T5LayerNorm",
)


def hub_class(name: str) -> type:
    """A layer class of a KerasHub model that KerasHub does not export, such as "llama.llama_layernorm:LlamaLayerNorm".

    Nothing else imports from `keras_hub.src`: what is looked up here is what an upgrade of KerasHub can break.
    """
    module, attribute = name.split(":")
    return getattr(importlib.import_module(f"keras_hub.src.models.{module}"), attribute)


def masked_lm_output_kernel(head: Any) -> Any:
    """The variable that an untied `keras_hub.layers.MaskedLMHead` multiplies with."""
    return head._kernel


def masked_lm_output_bias(head: Any) -> Any:
    """The variable that a `keras_hub.layers.MaskedLMHead` adds to its logits."""
    return head._bias


def own_losses(layer: Any) -> list[Any]:
    """Tensors given to `add_loss` in the last call of `layer` itself."""
    return list(layer._get_own_losses())


def mentions_add_loss(layer: Any) -> bool:
    """Whether a method that the layer does not have from Keras's own base classes speaks of `add_loss`."""
    import keras

    inherited = {*keras.Model.__mro__, keras.Sequential}
    functions = [each for one in type(layer).__mro__ if one not in inherited for each in vars(one).values()]
    return any("add_loss" in each.__code__.co_names for each in functions if inspect.isfunction(each))


def input_specs(model: Any) -> Any:
    """What a functional or sequential model takes, as nested `tf.TensorSpec`; None where a class keeps it to itself."""
    import tensorflow as tf

    functional = getattr(model, "_functional", model)  # inside of a sequential model
    structure = getattr(functional, "_inputs_struct", None)
    if structure is None:
        return None
    return tf.nest.map_structure(lambda each: tf.TensorSpec(each.shape, each.dtype), structure)


def adding_losses(model: Any, layers: list[Any]) -> list[Any]:
    """Those of the layers that call `add_loss` in training, by a call that is traced and never run."""
    import keras
    import tensorflow as tf

    adding: list[Any] = []

    @tf.function(autograph=False)
    def call(inputs: Any) -> None:
        with keras.StatelessScope(collect_losses=True):
            model(inputs, training=True)
            adding.extend(layer for layer in layers if own_losses(layer))

    call.get_concrete_function(input_specs(model))
    return adding


def computes_loss_itself(model: Any) -> bool:
    """Whether the model's class overrides `compute_loss` or `train_step` of Keras, or the model itself `compute_loss`.

    (The private fit itself puts a `train_step` on the model.)
    """
    import keras

    base = keras.Model
    overridden = type(model).compute_loss is not base.compute_loss or type(model).train_step is not base.train_step
    return overridden or "compute_loss" in vars(model)


def compiled_loss(model: Any) -> Callable[..., Any] | None:
    """The compiled loss as a function of (y, y_pred, sample_weight); None without one.

    `compute_loss` would add the weight regularisers to it, once for every unit.
    """
    return model._compile_loss if model.compiled else None


@contextlib.contextmanager
def losses_of_one_device() -> Iterator[None]:
    """Losses whole under a `tf.distribute` strategy, where Keras divides a mean by the number of replicas."""
    module: Any = importlib.import_module("keras.src.losses.loss")
    with _replacing_the_scale:
        before = module.scale_loss_for_distribution
        module.scale_loss_for_distribution = lambda value: value
        try:
            yield
        finally:
            module.scale_loss_for_distribution = before


class InItsOwnWords:
    """Of an error raised within a layer's call: Keras raises it as it is, not anew with the call's arguments."""

    _keras_call_info_injected = True


def is_recomputed(layer: Any) -> bool:
    """Whether the layer was made under `keras.RematScope`: its call then runs again in the backward pass."""
    return layer._remat_mode is not None


def is_recording() -> bool:
    """Whether gradient tapes record at this point; `tf.recompute_grad` stops them all."""
    from tensorflow.python.eager import record

    return record.could_possibly_record()


def is_compiled_by_xla() -> bool:
    """Whether what is traced at this point is for XLA, which lacks some operations."""
    import tensorflow as tf
    from tensorflow.python.ops import control_flow_util

    return bool(control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))


@contextlib.contextmanager
def replaced_call(layer: Any, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Put `make(layer.call)` in the place of `layer.call`, and take it off again.

    Keras looks `call` up on the instance at every call, so an instance attribute is enough. It is set past Keras's
    attribute tracking, which would otherwise see a change of a locked layer.
    """
    object.__setattr__(layer, "call", make(layer.call))
    try:
        yield
    finally:
        object.__delattr__(layer, "call")


@contextlib.contextmanager
def replaced_attribute(layer: Any, name: str, value: Any) -> Iterator[None]:
    """Give `layer.name` another value for a moment (past Keras's attribute tracking)."""
    attributes = vars(layer)
    held, before = name in attributes, getattr(layer, name)
    object.__setattr__(layer, name, value)
    try:
        yield
    finally:
        if held:
            object.__setattr__(layer, name, before)
        else:  # a method of the class, seen again when nothing on the instance hides it
            object.__delattr__(layer, name)


def seed_states(model: Any) -> list[Any]:
    """The variables of the model's random number generators. Keras gives them no type of their own, only a name."""
    return [v for v in model.non_trainable_variables if is_random_state(v)]


def is_random_state(variable: Any) -> bool:
    """Whether this is the state of a random number generator."""
    return variable.path.split("/")[-1] == "seed_generator_state"


def shared_seed_state() -> Any:
    """The state of the generator from which Keras draws for those that name none; no model lists it."""
    from keras.src.random import seed_generator

    return seed_generator.global_seed_generator().state


def build_metrics(model: Any, x: Any, y: Any, sample_weight: Any) -> None:
    """Create the variables of the compiled metrics, from specs. Keras would in the first step, and trace it twice."""
    model._symbolic_build(data_batch=(x, y, sample_weight))


def strategy_made_under(model: Any) -> Any | None:
    """The `tf.distribute` strategy in whose scope the model was made; `distribute_strategy` would name a default."""
    return model._distribute_strategy


def initial_epoch(model: Any) -> int | None:
    """The epoch that the next `fit` begins with, where something has set it: `BackupAndRestore` does, and so do we."""
    return model._initial_epoch


def set_initial_epoch(model: Any, epoch: int | None) -> None:
    """Makes the fit that is about to begin start with another epoch; `on_train_begin` is early enough."""
    model._initial_epoch = epoch


def optimized_variables(optimizer: Any) -> list[Any]:
    """The variables that a built optimizer was built for."""
    return list(optimizer._trainable_variables)


def fit_runs(model: Any) -> Callable[[FrameType | None], bool]:
    """A function that tells from a frame whether Keras's `fit` of this model is on its stack. Keeps no model alive."""
    import keras

    code, alive = inspect.unwrap(keras.Model.fit).__code__, weakref.ref(model)

    def runs(frame: FrameType | None) -> bool:
        while frame is not None:
            if frame.f_code is code and frame.f_locals.get("self") is alive():
                return True
            frame = frame.f_back
        return False

    return runs
