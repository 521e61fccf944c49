"""One factory for every optimizer that Keras ships, on TensorFlow Privacy's vectorized DP-Keras class.

What is inherited is the type (so that tools recognise a DP optimizer) and the Keras optimizer below it; what the base
class does with gradients is replaced, because it divides by the realised batch size, draws noise from a seedable
generator and guards with a flag that stays up. Here no gradient is ever accepted but a `NoisyGradients`, which the
private train step makes.

In a new process, a saved model finds its optimizer once this module is imported (`from tfdp import dp_optimizer`).
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any, NoReturn

import keras
import tensorflow as tf

from tfdp.errors import MisuseError
from tfdp.gradients.vectorized import make_vectorized_keras_optimizer_class
from tfdp.models import check_backend
from tfdp.plan import Plan
from tfdp.replicas import current_strategy


@dataclasses.dataclass(frozen=True)
class NoisyGradients:
    """Sum of clipped per-unit gradients plus noise, divided by the expected batch size.

    Attributes:
        gradients: one tensor a variable.
        variables: the trainable variables.
        plan_digest: digest of the plan whose clip norm and noise were used.
    """

    gradients: Sequence[Any]
    variables: Sequence[Any]
    plan_digest: str


class PrivateUpdates:
    """Mixin: the part that is the same for every DP optimizer."""

    plan_digest: str
    iterations: Any
    keras_class: type[keras.optimizers.Optimizer]
    _l2_norm_clip: float
    _noise_multiplier: float

    def build(self, variables: Any) -> None:
        strategy = tf.distribute.get_strategy()
        if tf.distribute.has_strategy() and not strategy.extended.variable_created_in_scope(self.iterations.value):
            raise MisuseError(
                f"Expected {type(self).__name__} to be made within the scope of the tf.distribute strategy. Received: "
                "one that was made outside of it. Call tfdp.dp_optimizer within strategy.scope()."
            )
        self.keras_class.build(self, variables)

    def apply_private(self, noisy: NoisyGradients) -> None:
        """The only way in: applies one noisy update.

        Raises:
            MisuseError: the gradients were made under another plan.
        """
        if not isinstance(noisy, NoisyGradients) or noisy.plan_digest != self.plan_digest:
            raise MisuseError(
                f"Expected noisy gradients of plan {self.plan_digest[:12]}. Received: {type(noisy).__name__} of plan "
                f"{getattr(noisy, 'plan_digest', 'none')[:12]}. Use one plan for the batches, the optimizer and the "
                "callback."
            )
        gradients, replica = list(noisy.gradients), tf.distribute.get_replica_context()
        if replica is not None and replica.num_replicas_in_sync > 1:
            # Keras adds up what the replicas bring. Here they all have the same: the first brings it, the others zeros.
            first = replica.replica_id_in_sync_group == 0
            gradients = [tf.where(first, gradient, 0.0) for gradient in gradients]
        self.keras_class.apply(self, gradients, list(noisy.variables))

    def apply(self, grads: Any, trainable_variables: Any = None) -> NoReturn:
        self._refuse("apply")

    def apply_gradients(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("apply_gradients")

    def stateless_apply(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("stateless_apply")

    def get_gradients(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("get_gradients")

    def _compute_gradients(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("_compute_gradients")

    def _refuse(self, method: str) -> NoReturn:
        raise MisuseError(
            f"Expected noisy gradients from the private train step. Received: a call of {type(self).__name__}.{method} "
            "with gradients that are not private. Train with model.fit(..., callbacks=[tfdp.PrivacyCallback(plan, "
            "ledger=...)]); train_on_batch and custom loops are not covered. To train without privacy, compile with a "
            "plain optimizer."
        )

    def get_config(self) -> dict[str, Any]:
        config = self.keras_class.get_config(self)
        private = {"l2_norm_clip": self._l2_norm_clip, "noise_multiplier": self._noise_multiplier}
        return {**config, **private, "plan_digest": self.plan_digest}


def _make_class(base: type[keras.optimizers.Optimizer]) -> type:
    parent = make_vectorized_keras_optimizer_class(base)

    def initialise(self: Any, *, l2_norm_clip: float, noise_multiplier: float, plan_digest: str, **kwargs: Any) -> None:
        for name in ("gradient_accumulation_steps", "loss_scale_factor"):
            if kwargs.get(name) is not None:
                raise MisuseError(
                    f"Expected no {name}. Received: {name}={kwargs[name]!r}. The sampler already accumulates "
                    "microbatches into one noisy step (sampling.microbatch_size), and losses are not scaled."
                )
        parent.__init__(self, l2_norm_clip, noise_multiplier, **kwargs)
        self.plan_digest = plan_digest

    return type(
        f"DP{base.__name__}",
        (PrivateUpdates, parent),
        {
            "__init__": initialise,
            "__doc__": f"keras.optimizers.{base.__name__} for noisy gradients. Made by `tfdp.dp_optimizer`.",
            "__module__": __name__,
            "keras_class": base,
        },
    )


def _keras_optimizers() -> dict[str, type[keras.optimizers.Optimizer]]:
    wrappers = {"Optimizer", "LossScaleOptimizer"}
    found = inspect.getmembers(keras.optimizers, inspect.isclass)
    return {
        name: each
        for name, each in found
        if issubclass(each, keras.optimizers.Optimizer) and name not in wrappers and name == each.__name__
    }


# Options of TensorFlow Privacy's class, which would be taken and then have no effect.
_DECIDED = {"l2_norm_clip", "noise_multiplier", "num_microbatches", "plan_digest"}

# Module attributes (DPAdam, DPSGD, ...), registered, so that a saved model finds its optimizer again.
_CLASSES: dict[type, type] = {}
for _base in _keras_optimizers().values():
    _class = keras.saving.register_keras_serializable(package="tfdp")(_make_class(_base))
    _CLASSES[_base] = globals()[_class.__name__] = _class


def dp_optimizer(optimizer: Any, plan: Plan, **kwargs: Any) -> Any:
    """A Keras optimizer that takes nothing but noisy gradients made under `plan`.

    Args:
        optimizer: name ("adamw"), class, or instance of an optimizer that Keras ships.
        plan: from `tfdp.make_plan`.
        **kwargs: of the Keras optimizer (learning_rate, weight_decay, ...); not with an instance.

    Returns:
        An instance of the matching DP class; it is saved and loaded with the model.

    Raises:
        MisuseError: not an optimizer of Keras, one that has already trained, or one that accumulates gradients; or
            Keras runs on another backend than TensorFlow.
    """
    if not isinstance(plan, Plan):
        raise MisuseError(f"Expected a plan from tfdp.make_plan. Received: {type(plan).__name__}.")
    for finding in check_backend():
        raise MisuseError(str(finding))
    current_strategy()
    decided = sorted(_DECIDED & kwargs.keys())
    if decided:
        raise MisuseError(
            f"Expected options of the Keras optimizer. Received: {', '.join(decided)}, which the plan decides. Change "
            "the spec instead."
        )
    private = {"l2_norm_clip": plan.clip_norm, "noise_multiplier": plan.noise_multiplier, "plan_digest": plan.digest}
    if isinstance(optimizer, keras.optimizers.Optimizer):
        base = type(optimizer)
        if kwargs:
            raise MisuseError(
                f"Expected no keyword arguments beside an optimizer instance. Received: {sorted(kwargs)}. Give them to "
                "the instance, or pass its class or name."
            )
        if base in _CLASSES and optimizer.built and (taken := int(optimizer.iterations.numpy())) > 0:
            raise MisuseError(
                f"Expected a fresh optimizer. Received: a {base.__name__} that has taken {taken} steps, "
                "whose state would be lost. Pass a new one."
            )
        return _dp_class(base).from_config({**optimizer.get_config(), **private})
    if isinstance(optimizer, str):
        by_name = {name.lower(): each for name, each in _keras_optimizers().items()}
        if optimizer.lower() not in by_name:
            raise MisuseError(f"Expected one of {sorted(by_name)}. Received: optimizer={optimizer!r}.")
        optimizer = by_name[optimizer.lower()]
    return _dp_class(optimizer)(**kwargs, **private)


def _dp_class(base: Any) -> Any:
    if base not in _CLASSES:
        received = getattr(base, "__name__", type(base).__name__)
        remedy = "Pass one of these."
        if base is keras.optimizers.LossScaleOptimizer:
            remedy = (
                "It skips a step where gradients overflow, a decision on private data that no noise covers: pass the "
                "optimizer inside it, and compute in float32 or mixed_bfloat16."
            )
        raise MisuseError(
            f"Expected an optimizer that Keras ships ({', '.join(sorted(each.__name__ for each in _CLASSES))}). "
            f"Received: {received}. {remedy}"
        )
    return _CLASSES[base]
