"""Writing a card, rendering it again, and reading it."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tfdp import __version__
from tfdp.accounting import event_to_dict
from tfdp.budget import read_budget
from tfdp.card.audits import Audit
from tfdp.card.build import build_card
from tfdp.card.inputs import inputs_of, read_inputs
from tfdp.card.model import ModelFacts, OtherRun, PrivacyCard, Trials, canonical, to_json
from tfdp.card.rendering import render_html, render_markdown
from tfdp.errors import CardError
from tfdp.files import atomic_write_bytes, atomic_write_text, fsync_directory, sha256_arrays, sha256_file
from tfdp.ledger import Clock, LedgerRecord, read_ledger, timestamp
from tfdp.spec.schema import Draft, with_head

SCHEMA_ID = "urn:tfdp:schema:model-card:1.0"
CARD_JSON, CARD_MARKDOWN, CARD_HTML = "MODEL_CARD.json", "MODEL_CARD.md", "MODEL_CARD.html"
WEIGHTS, LEDGER, AUDIT = "model.keras", "ledger.jsonl", "audit.json"


def export(
    model: Any,
    directory: str | os.PathLike[str],
    *,
    ledger: str | os.PathLike[str] | None = None,
    evaluation: Mapping[str, Any] | None = None,
    history: Mapping[str, Sequence[Any]] | None = None,
    details: Mapping[str, Any] | None = None,
    clock: Clock | None = None,
) -> dict[str, Path]:
    """Writes the model and its card: model.keras, MODEL_CARD.json, MODEL_CARD.md, MODEL_CARD.html.

    Epsilon on the card is that of the steps in the ledger. A card is written also when nothing can be claimed; it then
    says so in its first line. A ledger outside of `directory` is copied into it, so that the card can be checked there.

    Args:
        model: a Keras model.
        directory: is made where missing.
        ledger: default `directory`/ledger.jsonl.
        evaluation: what was measured, each part optional:
            "metrics": [{"name", "split", "private", "interval": [low, high], "non_private", "public", "n"}, ...],
            "groups": [{"name", "n", "value", "interval", "before", "non_private"}, ...] with "group_field" and
            "group_metric" (`GroupReport.evaluation` of `tfdp.evaluation.metric_by_group` makes both parts),
            "membership_inference": {"threat_model", "members", "non_members", "auc", "advantage",
            "tpr_at_fpr": {0.01: ...}, "epsilon_lower_bound", "confidence"}, and more of these under "attacks".
        history: values per epoch; default `model.history.history` where there is one.
        details: "title", "model_name", "intended_use", "limits", "licence", "citation", "data_source", "command",
            "hardware", "timings" (name to seconds), "spent_before" (epsilon of earlier releases), "deduplication_scope"
            ("unit" or "all": among which records duplicates were looked for; see `tfdp.sampling.dedup`).
        clock: gives the time on the card; for tests.

    Returns:
        The paths under "model", "json", "markdown", "html" and "ledger".

    Raises:
        CardError: no executed steps, or values that do not belong on a card; nothing is written then.
        LedgerError: the ledger cannot be read.
    """
    directory = Path(directory)
    source = Path(ledger) if ledger is not None else directory / LEDGER
    if not source.is_file():
        raise CardError(
            f"Expected the ledger of the training at {source}, received no file. Pass ledger=..., the path that "
            "PrivacyCallback was given. A model that was trained without one has no card."
        )
    record = read_ledger(source)
    if history is None:
        history = getattr(getattr(model, "history", None), "history", None)
    inputs = read_inputs(
        evaluation=evaluation,
        history=history,
        details=details,
        created=timestamp(clock),
        written_by=generator(),
        model=_facts(model),
        parameters_digest=(parameters := sha256_arrays(model.get_weights())),
        audit=audit_of(directory / AUDIT, parameters),
        weights_digest="0" * 64,
        weights_file=WEIGHTS,
        ledger_file=LEDGER,
        **_on_the_same_data(record),
    )
    card = build_card(record, inputs)  # before anything is written: what cannot be on a card fails here
    directory.mkdir(parents=True, exist_ok=True)
    _bring_ledger(source, directory / LEDGER, record)
    digest = _save(model, directory / WEIGHTS)
    provenance = card.provenance.model_copy(update={"weights_digest": digest})
    card = card.model_copy(update={"provenance": provenance})
    atomic_write_text(directory / CARD_JSON, to_json(card))
    return {
        "model": directory / WEIGHTS,
        "json": directory / CARD_JSON,
        **render_card(directory / CARD_JSON),
        "ledger": directory / LEDGER,
    }


def _on_the_same_data(record: LedgerRecord) -> dict[str, Any]:
    """Other runs and trials on the ledger that the spec names; nothing where it names none, or there is none."""
    ledger = (record.spec.get("budget") or {}).get("ledger")
    if ledger is None or not Path(ledger).exists():
        return {}
    found = read_budget(ledger)
    own = [run for run in found.runs if run.identity == record.identity]
    return {
        "others": tuple(
            OtherRun(
                began=run.began, state=run.state, steps=run.steps, step_event=run.plan["step_event"], trial=run.trial
            )
            for run in found.runs
            if run not in own
        ),
        "selections": tuple(
            Trials(
                mean=each.mean,
                shape=None if math.isinf(each.shape) else each.shape,
                steps=each.steps,
                step_event=event_to_dict(each.event),
            )
            for each in found.selections
        ),
        "is_trial": any(run.trial for run in own),
    }


def attach_audit(directory: str | os.PathLike[str], audit: Audit) -> dict[str, Path]:
    """Writes audit.json, and the card again with it in section 9.

    Args:
        directory: of a run, with its card, ledger and weights.
        audit: of those weights.

    Returns:
        The paths under "audit", "json", "markdown" and "html".

    Raises:
        CardError: no card, or the audit is of other weights; nothing is written then.
    """
    directory = Path(directory)
    card = load_card(directory / CARD_JSON)
    if audit.parameters_digest != card.provenance.parameters_digest:
        raise CardError(
            f"Expected an audit of the weights that the card in {directory} names "
            f"({card.provenance.parameters_digest[:12]}), received one of others "
            f"({audit.parameters_digest[:12]}). Audit the model of this run."
        )
    inputs = inputs_of(card).model_copy(update={"audit": audit, "created": audit.created})
    card = build_card(read_ledger(directory / card.provenance.ledger_file), inputs)
    written = atomic_write_text(directory / AUDIT, canonical(audit.model_dump(mode="json")))
    return {
        "audit": written,
        "json": atomic_write_text(directory / CARD_JSON, to_json(card)),
        **render_card(directory / CARD_JSON),
    }


def audit_of(path: Path, parameters: str) -> Audit | None:
    """The audit that lies beside the card, unless it is of other weights: of another fit, then."""
    try:
        audit = Audit.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CardError(
            f"Expected {path} to be written by tfdp audit, received a file that cannot be read. Remove it, and audit "
            "again."
        ) from error
    return audit if audit.parameters_digest == parameters else None


def render_card(path: str | os.PathLike[str]) -> dict[str, Path]:
    """Writes MODEL_CARD.md and MODEL_CARD.html again from MODEL_CARD.json, given it or its directory."""
    file = card_file(path)
    card = load_card(file)
    pages = {"markdown": (CARD_MARKDOWN, render_markdown(card)), "html": (CARD_HTML, render_html(card))}
    return {kind: atomic_write_text(file.parent / name, text) for kind, (name, text) in pages.items()}


def load_card(path: str | os.PathLike[str]) -> PrivacyCard:
    """Reads MODEL_CARD.json.

    Raises:
        CardError: it is not there, or not a card of this version.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        json.loads(text, object_pairs_hook=_without_duplicates)
        return PrivacyCard.model_validate_json(text)
    except OSError as error:
        raise CardError(
            f"Expected a card at {path}, received: {error.strerror or error}. Write one with tfdp.export."
        ) from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the document"
        raise CardError(
            f"Expected {path} to be a card of schema 1.0, received at {where}: {first['msg']}. Export it again."
        ) from error
    except ValueError as error:
        raise CardError(f"Expected {path} to be JSON, received: {error}. Export it again.") from error


def json_schema(draft: Draft = "2020-12") -> dict[str, Any]:
    """JSON schema of MODEL_CARD.json, of draft 2020-12 or 07."""
    schema = PrivacyCard.model_json_schema(mode="serialization") | {"title": "tfdp model card 1.0"}
    return with_head(schema, draft, SCHEMA_ID)


def card_file(path: str | os.PathLike[str]) -> Path:
    path = Path(path)
    return path / CARD_JSON if path.is_dir() else path


def _without_duplicates(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key twice in one object")
    return found


def generator() -> str:
    return f"tfdp {__version__}"


def _facts(model: Any) -> ModelFacts:
    def count(variables: Any) -> int | None:
        try:
            return sum(math.prod(int(size) for size in variable.shape) for variable in variables)
        except (TypeError, AttributeError):
            return None

    return ModelFacts(
        name=str(getattr(model, "name", None) or type(model).__name__),
        kind=type(model).__name__,
        parameters=count(getattr(model, "weights", None)),
        trainable_parameters=count(getattr(model, "trainable_variables", None)),
    )


def _bring_ledger(source: Path, target: Path, record: LedgerRecord) -> None:
    if source.resolve() == target.resolve():
        return
    content = source.read_bytes()
    # An older copy of the same ledger is a part of the new one; anything else is the ledger of another run.
    if target.exists() and not content.startswith(target.read_bytes()):
        raise CardError(
            f"Expected {target} to be free for a copy of {record.path}, received the ledger of another run. "
            "Export into a directory of its own: a ledger is never overwritten."
        )
    atomic_write_bytes(target, content)


def _save(model: Any, path: Path) -> str:
    """Saves beside the target, then takes its name; returns the digest."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".saving-") as folder:
        temporary = Path(folder) / path.name  # Keras chooses the format by the ending
        model.save(temporary)
        if not temporary.is_file():
            raise CardError(
                f"Expected model.save({str(path)!r}) to write one file, received none. Export a Keras 3 model."
            )
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        digest = sha256_file(temporary)
        os.replace(temporary, path)
    fsync_directory(path.parent)
    return digest
