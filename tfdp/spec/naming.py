"""What a name in a spec was probably meant to be, and which fields there are."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel

from tfdp.spec.documents import Path

_LONGEST = 200  # characters of a name that are compared: it can be as long as the file

# What other libraries and papers call a field; the first name that the section knows, else the first one.
_ALIASES: dict[str, tuple[str, ...]] = {
    "batch_size": ("expected_batch_size",),
    "batch": ("expected_batch_size",),
    "lot_size": ("expected_batch_size",),
    "mean_batch_size": ("expected_batch_size",),
    "max_batch_size": ("truncated_batch_size",),
    "noise": ("noise_multiplier",),
    "sigma": ("noise_multiplier",),
    "clip": ("clip_norm",),
    "clipping": ("clip_norm",),
    "clipping_norm": ("clip_norm",),
    "l2_norm_clip": ("clip_norm",),
    "max_grad_norm": ("clip_norm",),
    "max_norm": ("clip_norm",),
    "unit": ("privacy_unit", "kind"),
    "q": ("probability",),
    "sample_rate": ("probability",),
    "sampling_rate": ("probability",),
    "sampling_probability": ("probability",),
    "num_epochs": ("epochs",),
    "n_epochs": ("epochs",),
    "num_steps": ("steps",),
    "max_steps": ("steps",),
    "iterations": ("steps",),
    "n": ("num_units",),
    "num_examples": ("num_units",),
    "num_samples": ("num_units",),
    "num_users": ("num_units",),
    "dataset_size": ("num_units",),
    "eps": ("epsilon",),
    "target_epsilon": ("epsilon",),
    "target_delta": ("delta",),
    "neighboring_relation": ("adjacency",),
    "neighbouring_relation": ("adjacency",),
    "user_id": ("id_field",),
    "id_column": ("id_field",),
    "max_examples_per_user": ("max_records_per_unit",),
    "max_records_per_user": ("max_records_per_unit",),
    "version": ("schema_version",),
    "random": ("rng",),
    "max_epsilon": ("epsilon_cap",),
    "cap": ("epsilon_cap",),
    "groups": ("group_field",),
    "group_by": ("group_field",),
    "waiver": ("waivers",),
}
# The same, for words that mean something else in each section.
_ALIASES_INSIDE: dict[str, tuple[str, ...]] = {
    "id": ("finding", "id_field", "dataset_id"),
    "type": ("kind", "scheme", "name"),
    "kind": ("scheme", "name"),
    "unit_type": ("kind",),
    "method": ("scheme", "name"),
    "sampler": ("sampling", "scheme"),
    "why": ("reason",),
    "justification": ("reason",),
    "by": ("owner",),
    "approver": ("owner",),
    "author": ("owner",),
    "until": ("expires",),
    "expiry": ("expires",),
    "expiration": ("expires",),
    "valid_until": ("expires",),
    "epsilon": ("epsilon_cap",),
    "delta": ("delta_cap",),
}


def meant(model: type[BaseModel], path: Path) -> list[Path]:
    """The fields that an unknown one may stand for: those of its own section by their name, else whole paths."""
    above = path[:-1]
    here = section(model, above)
    siblings = list(here.model_fields) if here else []
    name = plain(str(path[-1]))
    for alias in (*_ALIASES.get(name, ()), *_ALIASES_INSIDE.get(name, ())):
        if alias in siblings:
            return [(*above, alias)]
    homes = list(all_fields(model))
    same = [] if name in siblings else [home for home in homes if home[-1] == name]
    if close := closest(name, siblings, cutoff=0.85 if same else 0.6):
        return [(*above, close)]
    if same:
        return same
    for alias in _ALIASES.get(name, ()):
        return [home for home in homes if home[-1] == alias][:1]
    everywhere = {str(home[-1]): home for home in homes}
    close = closest(name, list(everywhere), cutoff=0.75)
    return [everywhere[close]] if close else []


def closest(name: str, choices: Sequence[str], *, cutoff: float = 0.6) -> str | None:
    """The choice nearest to a name, whatever its case, its hyphens and its spaces."""
    folded = {plain(choice): choice for choice in choices}
    close = difflib.get_close_matches(plain(name), list(folded), 1, cutoff=cutoff)
    return folded[close[0]] if close else None


def plain(name: str) -> str:
    """Small letters, with underscores between words."""
    return re.sub(r"[\s-]", "_", name[:_LONGEST].strip().lower())


def section(model: type[BaseModel], path: Path) -> type[BaseModel] | None:
    """The model class at a path, or None where there is none."""
    for part in path:
        if isinstance(part, int):
            continue
        field = model.model_fields.get(part)
        inside = next(_models(field.annotation), None) if field else None
        if inside is None:
            return None
        model = inside
    return model


def choices_at(model: type[BaseModel], path: Path) -> list[str]:
    """The values of the Literal at a path."""
    while path and isinstance(path[-1], int):
        path = path[:-1]
    found = section(model, path[:-1]) if path else None
    field = found.model_fields.get(str(path[-1])) if found else None
    return [str(choice) for choice in _literals(field.annotation)] if field else []


def all_fields(model: type[BaseModel], above: Path = ()) -> Iterator[Path]:
    """The path of every field, sections included; lists without their index."""
    for name, field in model.model_fields.items():
        yield (*above, name)
        for inside in _models(field.annotation):
            yield from all_fields(inside, (*above, name))


def _literals(annotation: Any) -> Iterator[Any]:
    for argument in get_args(annotation):
        if isinstance(argument, str):
            yield argument
        else:
            yield from _literals(argument)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models(argument)
