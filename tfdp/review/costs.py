"""What a mechanism costs: one question to the accountant, asked once.

Rules ask here rather than the accounting itself, so that `tfdp validate` can keep answers from one call to the next
(`kept_in`), and then need not even import it. An answer is a pure function of its question and of the installed
versions.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import json
import math
from collections.abc import Iterator
from typing import Any, Protocol

from tfdp.errors import AccountingError
from tfdp.spec import PrivacySpec, Schedule

Question = dict[str, Any]

# What dp-accounting 0.6 says yes to for single records, as a test checks: importing it to ask takes most of a second.
_MODELLED = frozenset(
    {
        *itertools.product(("poisson", "full_batch"), ("pld", "prv"), ("add_or_remove_one", "replace_one", "zero_out")),
        *itertools.product(("poisson", "full_batch"), ("rdp",), ("add_or_remove_one", "zero_out")),
    }
)


class Store(Protocol):
    """Where answers are kept. What it gives back is believed: it has to know that it is what was put in."""

    def get(self, question: Question) -> Any:
        """The answer, or None."""

    def put(self, question: Question, answer: Any) -> None:
        """Keeps an answer; may silently decline."""


_store: contextvars.ContextVar[Store | None] = contextvars.ContextVar("store", default=None)


@contextlib.contextmanager
def kept_in(store: Store | None) -> Iterator[None]:
    """Within this, answers are looked for in `store` first, and put there."""
    token = _store.set(store)
    try:
        yield
    finally:
        _store.reset(token)


def unsupported_reason(spec: PrivacySpec, schedule: Schedule) -> str | None:
    """Why the accountant does not model the sampler; None when it does."""
    setting = (spec.sampling.scheme, spec.accountant.name, spec.claim.adjacency)
    if spec.mechanism.noise_multiplier is None and schedule.records_per_unit == 1 and setting in _MODELLED:
        return None
    # Support depends on the kind of event only: any sigma serves while it is not calibrated.
    return _ask("support", spec, schedule, noise_multiplier=spec.mechanism.noise_multiplier or 1.0)


def epsilon(
    spec: PrivacySpec, schedule: Schedule, *, accountant: str | None = None, records_per_unit: int | None = None
) -> float:
    """Epsilon of the mechanism as written, or by another accountant, or for another number of records.

    Raises:
        AccountingError: it cannot be certified.
    """
    changed = {"accountant": accountant, "records_per_unit": records_per_unit}
    return _number(_ask("epsilon", spec, schedule, **{k: v for k, v in changed.items() if v is not None}))


def unamplified_epsilon(spec: PrivacySpec, schedule: Schedule) -> float:
    """Epsilon without the help of sampling.

    Raises:
        AccountingError: it cannot be certified.
    """
    return _number(_ask("unamplified", spec, schedule))


def renyi_order(spec: PrivacySpec, schedule: Schedule) -> tuple[float, bool] | None:
    """The order that the rdp accountant chose, and whether it is the first or last that it tried."""
    answer = _ask("order", spec, schedule, accountant="rdp")
    return None if answer is None or isinstance(answer, dict) else (answer[0], answer[1])


def least_noise(spec: PrivacySpec, schedule: Schedule) -> float | None:
    """The smallest noise multiplier that keeps the claim; None where there is none, or where finding it takes long."""
    if spec.sampling.scheme == "truncated_poisson" or schedule.records_per_unit > 1:
        return None
    answer = _ask("least noise", spec, schedule, noise_multiplier=None, epsilon=spec.claim.epsilon)
    return None if isinstance(answer, dict) else float(answer)


def _ask(kind: str, spec: PrivacySpec, schedule: Schedule, **changes: Any) -> Any:
    question = {
        "kind": kind,
        "scheme": spec.sampling.scheme,
        "sampling_probability": schedule.sampling_probability,
        "noise_multiplier": spec.mechanism.noise_multiplier,
        "population": schedule.population,
        "truncated_batch_size": spec.sampling.truncated_batch_size,
        "records_per_unit": schedule.records_per_unit,
        "steps": schedule.steps,
        "delta": spec.claim.delta,
        "accountant": spec.accountant.name,
        "adjacency": spec.claim.adjacency,
        **changes,
    }
    if kind == "support":
        del question["steps"], question["delta"]
    store = _store.get()
    if store is not None and (kept := store.get(question)) is not None:
        return kept["answer"]
    answer = _compute(json.dumps(question, sort_keys=True))
    if store is not None:
        store.put(question, {"answer": answer})
    return answer


@functools.lru_cache(maxsize=64)
def _compute(asked: str) -> Any:
    """The answer as plain JSON: {"error": ...} in place of an AccountingError, "inf" for what is unbounded."""
    from tfdp import accounting

    question = json.loads(asked)
    setting = {"accountant": question["accountant"], "adjacency": question["adjacency"]}
    try:
        if question["kind"] == "unamplified":
            value = accounting.unamplified_epsilon(
                noise_multiplier=question["noise_multiplier"],
                sampling_probability=question["sampling_probability"],
                steps=question["steps"],
                delta=question["delta"],
                records_per_unit=question["records_per_unit"],
                **setting,
            )
            return "inf" if math.isinf(value) else value
        if question["kind"] == "least noise":
            return accounting.calibrate_noise_multiplier(
                target_epsilon=question["epsilon"],
                delta=question["delta"],
                steps=question["steps"],
                scheme=question["scheme"],
                sampling_probability=question["sampling_probability"],
                num_units=question["population"],
                **setting,
            ).noise_multiplier
        event = accounting.step_event(
            scheme=question["scheme"],
            sampling_probability=question["sampling_probability"],
            noise_multiplier=question["noise_multiplier"],
            num_units=question["population"],
            truncated_batch_size=question["truncated_batch_size"],
            records_per_unit=question["records_per_unit"],
        )
        if question["kind"] == "support":
            return accounting.unsupported_reason(event, setting["accountant"], setting["adjacency"])
        if question["kind"] == "order":
            order = accounting.best_renyi_order(
                event, question["steps"], delta=question["delta"], adjacency=question["adjacency"]
            )
            return None if order is None else list(order)
        value = accounting.epsilon(event, question["steps"], delta=question["delta"], **setting)
        return "inf" if math.isinf(value) else value
    except AccountingError as error:
        return str(error) if question["kind"] == "support" else {"error": str(error)}


def _number(answer: Any) -> float:
    if isinstance(answer, dict):
        raise AccountingError(answer["error"])
    return math.inf if answer == "inf" else float(answer)
