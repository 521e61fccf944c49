"""What a compiled model must be before a private fit may begin, and what is made anew then."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tfdp import keras_private
from tfdp.entropy import system_bits
from tfdp.errors import MisuseError, PlanError, UnsupportedLayerError
from tfdp.findings import errors
from tfdp.gradients import per_layer
from tfdp.ledger import Ledger
from tfdp.models import check_model, layers_without_rule
from tfdp.optimizer import PrivateUpdates
from tfdp.plan import Plan
from tfdp.replicas import check_made_under, strategy_of
from tfdp.review import RELATIVE_SLACK


def check_plan(plan: Plan) -> None:
    """Whether a plan is as `make_plan` made it, as far as its digest tells.

    Raises:
        MisuseError: a field was changed behind the back of the frozen class.
        PlanError: its fields contradict each other or the spec, or its noise does not keep the claim.
    """
    if dataclasses.replace(plan).digest != plan.digest:
        raise MisuseError(
            f"Expected the plan with the digest {plan.digest[:12]}. Received: one that was changed since. Change the "
            "spec, and make a new plan for batches, optimizer and callback."
        )
    if not plan.epsilon(plan.steps) <= plan.target_epsilon * (1 + RELATIVE_SLACK):
        raise PlanError(
            f"Expected {plan.steps} steps to cost at most epsilon {plan.target_epsilon:g}. Received: a plan with noise "
            f"multiplier {plan.noise_multiplier:g}, which cost {plan.epsilon(plan.steps):.4g}. Use make_plan."
        )


def check_compiled_model(model: Any, plan: Plan, *, method: str, hybrid: bool) -> None:
    """Whether the model, as it was compiled, can be trained under the plan.

    Raises:
        MisuseError, UnsupportedLayerError, LossNotPerUnitError: it cannot; nothing was changed.
    """
    optimizer = getattr(model, "optimizer", None)
    if not isinstance(optimizer, PrivateUpdates):
        raise MisuseError(
            "Expected a model compiled with tfdp.dp_optimizer(...). Received: optimizer "
            f"{type(optimizer).__name__}. "
            'Compile with optimizer=tfdp.dp_optimizer("adamw", plan, learning_rate=...). (Keras wraps optimizers '
            "under mixed_float16; use mixed_bfloat16.)"
        )
    if optimizer.plan_digest != plan.digest:
        raise MisuseError(
            f"Expected one plan for optimizer and callback. Received: plan {optimizer.plan_digest[:12]} in the "
            f"optimizer, {plan.digest[:12]} in the callback. Make one plan and pass it to both."
        )
    if getattr(optimizer, "built", False) and not _same(
        keras_private.optimized_variables(optimizer), model.trainable_variables
    ):
        raise MisuseError(
            "Expected the optimizer to know the variables that are trained. Received: others, because layers were "
            "frozen, unfrozen or given adapters after its first step. Compile with a new tfdp.dp_optimizer(...)."
        )
    if model.steps_per_execution != 1:
        raise MisuseError(
            f"Expected steps_per_execution=1. Received: {model.steps_per_execution}. Every step is recorded before "
            "it runs; compile with steps_per_execution=1."
        )
    if getattr(model, "preprocessor", None) is not None:
        raise MisuseError(
            f"Expected a KerasHub task without its preprocessor during the fit. Received: {type(model).__name__} "
            f"with {type(model.preprocessor).__name__} attached. Preprocess the records with it before "
            "poisson_batches, then set model.preprocessor = None for the fit."
        )
    strategy = strategy_of(model)
    if strategy is not None:
        check_made_under(strategy, model)
    blocking = errors(check_model(model, method=method, hybrid=hybrid))
    if blocking:
        lines = "\n  ".join(str(finding) for finding in blocking)
        raise UnsupportedLayerError(f"Expected a model whose units can be kept apart. Received:\n  {lines}")


def gradients_taken(model: Any, plan: Plan, method: str, hybrid: bool, strategy: Any | None) -> dict[str, Any]:
    """How per-unit gradients are taken and clipped, for the ledger.

    Raises:
        GradientError: the layers of the model do not fit the clip norms of the plan.
    """
    found: dict[str, Any] = {"gradients": "hybrid" if hybrid else method}
    if strategy is not None:
        found["replicas"] = strategy.num_replicas_in_sync
    if hybrid:
        found["layers_without_rule"] = layers_without_rule(model)
    if plan.per_layer is not None:
        bounds = per_layer(model, plan.per_layer)
        found["layer_clip_norms"] = dict(zip(bounds.names, bounds.norms, strict=True))
    return found


def check_history(model: Any, ledger: Ledger, trained_under: str | None) -> None:
    """Whether a ledger holds every private step that a model has taken, as far as that can be told.

    Args:
        model: with its optimizer.
        ledger: of the fit.
        trained_under: identity of the ledger under which this process has trained the model, if it has.

    Raises:
        MisuseError: it does not.
    """
    taken = int(model.optimizer.iterations.numpy())
    if taken > ledger.steps:
        raise MisuseError(
            f"Expected a ledger with every step that the optimizer has taken. Received: {taken} steps in the "
            f"optimizer, {ledger.steps} on {ledger.path}. Continue the ledger of those steps; without it "
            "nothing can be claimed for this model: start again from public weights."
        )
    if trained_under not in (None, ledger.identity):
        raise MisuseError(
            f"Expected a model that only {ledger.path} has trained. Received: one that was trained under "
            "another ledger, whose steps this one would not count. Continue that ledger, or start again from "
            "public weights."
        )


def check_unchanged(model: Any, optimizer: Any, variables: Sequence[Any]) -> None:
    """Whether a model in a fit still trains what it began with.

    Raises:
        MisuseError: another callback changed it.
    """
    if model.optimizer is not optimizer or not _same(variables, model.trainable_variables):
        raise MisuseError(
            "Expected the optimizer and the trainable variables that the private fit began with. Received: others. "
            "Remove the callback that changes them, and freeze, unfreeze or add adapters between two fits."
        )


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return [id(variable) for variable in some] == [id(variable) for variable in others]


def reseed(model: Any) -> None:
    """Seeds the model's own randomness (dropout) from the operating system.

    Which mask a unit gets depends on how many were drawn before it. With masks that nobody can foresee this tells
    nothing; with a seed that is known, one unit more would change the masks, and so the gradients, of all others.
    """
    for state in keras_private.seed_states(model):
        state.assign([system_bits(31), system_bits(31)])
