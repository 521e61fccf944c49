"""Writing a card, rendering it again, and checking it against its ledger."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tfdp import __version__
from tfdp.accounting import event_to_dict
from tfdp.budget import read_budget
from tfdp.card.build import build_card, errors_of
from tfdp.card.inputs import inputs_of, read_inputs
from tfdp.card.model import ModelFacts, OtherRun, PrivacyCard, Trials
from tfdp.card.rendering import render_html, render_markdown
from tfdp.errors import CardError
from tfdp.files import atomic_write_bytes, atomic_write_text, fsync_directory, sha256_arrays, sha256_file
from tfdp.findings import Finding, Severity
from tfdp.ledger import Clock, LedgerRecord, read_ledger, timestamp
from tfdp.spec.schema import Draft, with_head

SCHEMA_ID = "urn:tfdp:schema:model-card:1.0"
CARD_JSON, CARD_MARKDOWN, CARD_HTML = "MODEL_CARD.json", "MODEL_CARD.md", "MODEL_CARD.html"
WEIGHTS, LEDGER = "model.keras", "ledger.jsonl"
# Another machine may round the last digits of a Fourier transform differently; nothing else may differ.
_TOLERANCE = 1e-6


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
        written_by=_generator(),
        model=_facts(model),
        parameters_digest=sha256_arrays(model.get_weights()),
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


def render_card(path: str | os.PathLike[str]) -> dict[str, Path]:
    """Writes MODEL_CARD.md and MODEL_CARD.html again from MODEL_CARD.json, given it or its directory."""
    file = _card_file(path)
    card = load_card(file)
    pages = {"markdown": (CARD_MARKDOWN, render_markdown(card)), "html": (CARD_HTML, render_html(card))}
    return {kind: atomic_write_text(file.parent / name, text) for kind, (name, text) in pages.items()}


def check_card(path: str | os.PathLike[str], ledger: str | os.PathLike[str] | None = None) -> list[Finding]:
    """Computes a card again from its ledger, and compares.

    Every field that follows from the ledger must come out the same: steps, noise, clip norm, probability, epsilon,
    digests, sentences, findings. The Markdown and the HTML must be what the JSON renders to, and the weights the ones
    that the card names.

    Args:
        path: MODEL_CARD.json, or the directory that it is in.
        ledger: default: the file that the card names, beside it.

    Returns:
        Findings: PS080 (error) a difference, PS081 (warning) a file that is not there to be compared, PS082 (warning)
        another version of the accountant, and the errors that stand on the card itself. No error among them means that
        the card holds.

    Raises:
        CardError: no card, or no ledger, to check.
        LedgerError: the ledger does not hold together.
    """
    file = _card_file(path)
    card = load_card(file)
    source = Path(ledger) if ledger is not None else file.parent / card.provenance.ledger_file
    if not source.is_file():
        raise CardError(
            f"Expected the ledger of the card at {source}, received no file. Without it nothing on the card can be "
            "checked: pass its path with --ledger (ledger=...)."
        )
    rebuilt = build_card(read_ledger(source), inputs_of(card))
    found = [
        _difference(where, f"expected {_short(expected)}, recomputed from the ledger, received {_short(received)}.")
        for where, expected, received in _differences(_plain(rebuilt), _plain(card))
        if where != "accounting.accountant_version"
    ]
    found += _version_findings(rebuilt, card)
    found += _page_findings(file, card)
    found += _weights_findings(file, card)
    return [*found, *(finding for finding in errors_of(rebuilt) if finding not in found)]


def to_json(card: PrivacyCard) -> str:
    """Canonical JSON: sorted keys, real numbers, one line end."""
    return json.dumps(_plain(card), sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


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


def _card_file(path: str | os.PathLike[str]) -> Path:
    path = Path(path)
    return path / CARD_JSON if path.is_dir() else path


def _plain(card: PrivacyCard) -> dict[str, Any]:
    return card.model_dump(mode="json")


def _without_duplicates(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key twice in one object")
    return found


def _generator() -> str:
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


def _version_findings(rebuilt: PrivacyCard, card: PrivacyCard) -> Iterator[Finding]:
    ours, theirs = rebuilt.accounting.accountant_version, card.accounting.accountant_version
    if ours != theirs:
        message = f"expected the accountant that the card was computed with, {theirs}, received {ours}."
        where, fix = (
            "accounting.accountant_version",
            "Differences in epsilon may come from it: check with that version.",
        )
        yield Finding(id="PS082", severity=Severity.WARNING, where=where, message=message, fix=fix)


def _page_findings(file: Path, card: PrivacyCard) -> Iterator[Finding]:
    for name, text in ((CARD_MARKDOWN, render_markdown(card)), (CARD_HTML, render_html(card))):
        page = file.parent / name
        try:
            same = page.read_bytes() == text.encode("utf-8")
        except FileNotFoundError:
            yield _absent(name, "the page could not be compared.", "Write it with tfdp card render.")
            continue
        if not same:
            message = (
                f"expected what the JSON of the card renders to, received something else (card by "
                f"{card.provenance.written_by}, this is {_generator()})."
            )
            yield _difference(name, message)


def _weights_findings(file: Path, card: PrivacyCard) -> Iterator[Finding]:
    name = card.provenance.weights_file
    path = file.parent / name
    if not path.is_file():
        yield _absent(name, "the digest could not be compared.", "Put the released weights beside the card.")
    elif (digest := sha256_file(path)) != card.provenance.weights_digest:
        expected = _short(card.provenance.weights_digest)
        yield _difference(name, f"expected weights with the digest {expected}, received {_short(digest)}.")


def _difference(where: str, message: str) -> Finding:
    fix = "The card does not belong to this ledger, or was changed: export again, and release nothing until it agrees."
    return Finding(id="PS080", severity=Severity.ERROR, where=where, message=message, fix=fix)


def _absent(where: str, message: str, fix: str) -> Finding:
    return Finding(
        id="PS081",
        severity=Severity.WARNING,
        where=where,
        message=f"expected a file, received none: {message}",
        fix=fix,
    )


def _differences(expected: Any, received: Any, where: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(expected, dict) and isinstance(received, dict):
        for key in sorted(expected.keys() | received.keys()):
            yield from _differences(expected.get(key), received.get(key), f"{where}.{key}" if where else key)
    elif isinstance(expected, list) and isinstance(received, list) and len(expected) == len(received):
        for index, (one, other) in enumerate(zip(expected, received, strict=True)):
            yield from _differences(one, other, f"{where}.{index}")
    elif not _same(expected, received):
        yield where, expected, received


def _same(expected: Any, received: Any) -> bool:
    if isinstance(expected, float) and isinstance(received, float):
        return math.isclose(expected, received, rel_tol=_TOLERANCE, abs_tol=1e-12)
    return type(expected) is type(received) and expected == received


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 90 else f"{text[:87]}..."
