"""The model card: what ran, what it cost, what it means and what it does not cover.

`export` writes it, `check_card` computes it again from the ledger. One `PrivacyCard` object becomes canonical JSON, and
the JSON becomes Markdown and HTML.
"""

from tfdp.card.audits import Audit
from tfdp.card.build import build_card, errors_of
from tfdp.card.checking import check_card
from tfdp.card.model import PrivacyCard
from tfdp.card.rendering import render_html, render_markdown
from tfdp.card.writing import attach_audit, export, json_schema, load_card, render_card

__all__ = [
    "Audit",
    "PrivacyCard",
    "attach_audit",
    "build_card",
    "check_card",
    "errors_of",
    "export",
    "json_schema",
    "load_card",
    "render_card",
    "render_html",
    "render_markdown",
    "to_json",
]
