"""Checking a card: everything on it that follows from the ledger is computed again."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tfdp.card.build import build_card, errors_of
from tfdp.card.inputs import inputs_of
from tfdp.card.model import PrivacyCard, plain
from tfdp.card.rendering import render_html, render_markdown
from tfdp.card.writing import AUDIT, CARD_HTML, CARD_MARKDOWN, audit_of, card_file, generator, load_card
from tfdp.errors import CardError
from tfdp.files import sha256_file
from tfdp.findings import Finding, Severity
from tfdp.ledger import read_ledger

# Another machine may round the last digits of a Fourier transform differently; nothing else may differ. A digit that is
# changed within this slack shows on the pages, which carry the digest of the JSON.
_TOLERANCE = 1e-6


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
    file = card_file(path)
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
        for where, expected, received in _differences(plain(rebuilt), plain(card))
        if where != "accounting.accountant_version"
    ]
    found += _version_findings(rebuilt, card)
    found += _page_findings(file, card)
    found += _weights_findings(file, card)
    found += _audit_findings(file, card)
    return [*found, *(finding for finding in errors_of(rebuilt) if finding not in found)]


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
                f"{card.provenance.written_by}, this is {generator()})."
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


def _audit_findings(file: Path, card: PrivacyCard) -> Iterator[Finding]:
    path = file.parent / AUDIT
    if card.audit is None:
        return
    if not path.is_file():
        yield _absent(AUDIT, "what the card says of attacks could not be compared.", "Put it beside the card.")
    elif audit_of(path, card.provenance.parameters_digest) != card.audit:
        yield _difference(AUDIT, "expected what section 9 of the card says, received something else.")


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
