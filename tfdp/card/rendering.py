"""Card to Markdown and HTML. Everything in a template goes through an escaper; nothing a user wrote becomes a link.

Markdown: whatever a template prints is escaped for running text and table cells alike, unless it was made a code span
here. HTML: Jinja's autoescape; the pictures are the only markup that is inserted. Front matter is dumped by a YAML
library from a dictionary, never put together from text.
"""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup
from ruamel.yaml import YAML
from ruamel.yaml.representer import SafeRepresenter

from tfdp.card import formats, roc
from tfdp.card.fields import Bound
from tfdp.card.model import Metric, PrivacyCard, to_json
from tfdp.card.plots import Axis, Level, Series, bar_chart, dot_chart, line_chart
from tfdp.errors import CardError
from tfdp.files import sha256_text

_SCHEMES = re.compile(r"(javascript|vbscript|data(?=:\S)|file(?=:/))\s*:", re.IGNORECASE)
_MARKDOWN = re.compile(r"([\\`*_\[\]|~$])")
_BLOCK_START = re.compile(r"^(#|[+-](?=\s|$)|[-=]+$)")
_LIST_START = re.compile(r"^(\d+)([.)])(?=\s|$)")
_MOST_EPOCHS = 20
_SEVERITIES = ("error", "warning", "note")
# The hub's names of what a model is for, by the end of its class's name in KerasHub.
_TASKS = {
    "CausalLM": "text-generation",
    "Seq2SeqLM": "text2text-generation",
    "MaskedLM": "fill-mask",
    "TextClassifier": "text-classification",
}


def render_markdown(card: PrivacyCard) -> str:
    """MODEL_CARD.md: front matter for the Hub, then the fourteen sections."""
    body = _environment("markdown").get_template("MODEL_CARD.md.j2").render(**_context(card))
    return f"---\n{front_matter(card)}---\n\n{body}"


def render_html(card: PrivacyCard) -> str:
    """MODEL_CARD.html: one file that loads nothing."""
    return _environment("html").get_template("MODEL_CARD.html.j2").render(**_context(card), plots=_plots(card))


def front_matter(card: PrivacyCard) -> str:
    """YAML for the model hub. Without a claim there is no epsilon in it."""
    claimed = card.claim.status == "claimed"
    values: dict[str, Any] = {
        "library_name": "keras",
        "tags": ["differential_privacy", "dp-sgd"],
        "differential_privacy": {
            "status": card.claim.status,
            "epsilon": card.claim.epsilon.value if claimed else None,
            "delta": card.claim.delta if claimed else None,
            "privacy_unit": card.claim.privacy_unit,
            "adjacency": card.claim.adjacency,
            "sampling": card.accounting.sampler_ran,
            "accountant": f"{card.accounting.accountant} ({card.accounting.accountant_version})",
            "card": "MODEL_CARD.json",
        },
    }
    if card.legal.licence is not None:
        values["license"] = _one_line(card.legal.licence)
    kind = card.provenance.model.kind or ""
    task = next((task for end, task in _TASKS.items() if kind.endswith(end)), "other")
    results = [
        {
            "task": {"type": task},
            "dataset": {"name": _one_line(metric.split or "not stated"), "type": "private"},
            "metrics": [{"type": _one_line(metric.name), "value": metric.private}],
        }
        for metric in card.utility.metrics
        if metric.private is not None
    ]
    if results:
        values["model-index"] = [{"name": _one_line(card.provenance.model.name), "results": results}]
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.width = 1 << 20  # a folded value would put text of a user at the start of a line
    yaml.allow_unicode = True
    yaml.Representer = _Representer
    stream = io.StringIO()
    yaml.dump(values, stream)
    return stream.getvalue()


class _Representer(SafeRepresenter):
    """Writes 1e-05 as 1.0e-05, which readers of YAML 1.1 take for a number too."""

    def represent_float(self, data: float) -> Any:
        text = repr(data)
        return self.represent_scalar("tag:yaml.org,2002:float", text if "." in text else text.replace("e", ".0e"))


_Representer.add_representer(float, _Representer.represent_float)


def escape_markdown(value: object) -> object:
    """Text that Markdown shows as it is, on one line, also inside a table."""
    if isinstance(value, _Verbatim):
        return value
    text = _one_line(str(value))
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = _MARKDOWN.sub(r"\\\1", text)
    text = _SCHEMES.sub(lambda found: f"{found[1]}&#58;", text)
    return _LIST_START.sub(r"\1\\\2", _BLOCK_START.sub(r"\\\1", text))


class _Verbatim(str):
    """Markdown that was made here, from escaped parts."""


def _code(value: object) -> _Verbatim:
    text = _one_line(str(value)).replace("`", "'").replace("|", "\\|")
    return _Verbatim(f"`{text}`" if text else "")


def _one_line(text: str) -> str:
    return " ".join(text.split())


def template_directory() -> Path:
    """Inside the installed package, or at the top of the repository."""
    package = Path(__file__).resolve().parents[1]
    for candidate in (package / "templates", package.parent / "templates"):
        if (candidate / "MODEL_CARD.md.j2").is_file():
            return candidate
    raise CardError(
        f"Expected the templates of the card in {package / 'templates'} or {package.parent / 'templates'}, received "
        "neither. The installation is not complete: install tfdp again."
    )


@functools.cache
def _environment(kind: str) -> jinja2.Environment:
    html = kind == "html"
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(template_directory()),
        undefined=jinja2.StrictUndefined,
        autoescape=html,
        finalize=_not_none if html else lambda value: escape_markdown(_not_none(value)),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(
        bound=formats.bound,
        lower_bound=formats.lower_bound,
        deviation=formats.deviation,
        number=formats.number,
        signed=formats.signed,
        exact=formats.exact,
        percent=formats.percent,
        interval=formats.interval,
        seconds=formats.seconds,
        words=formats.words,
        layer_norms=formats.layer_norms,
        measured=_or(formats.NOT_MEASURED),
        stated=_or(formats.NOT_STATED),
        code=_code,
    )
    return environment


def _not_none(value: object) -> object:
    """A `None` that reaches the page was forgotten by the template."""
    if value is None:
        raise CardError("Expected a value or 'not measured' in a template of the card, received None.")
    return value


def _or(words: str) -> Any:
    return lambda value: words if value is None or value == "" else value


def _context(card: PrivacyCard) -> dict[str, Any]:
    found = card.review.findings
    return {
        "card": card,
        "card_digest": sha256_text(to_json(card)),
        "claimed": card.claim.status == "claimed",
        "counts": ", ".join(_count(sum(one.severity.value == kind for one in found), kind) for kind in _SEVERITIES),
        "findings": sorted(found, key=lambda finding: _SEVERITIES.index(finding.severity.value)),
        "column": _column,
        **_audited(card),
        "epochs": _epochs(card),
        "epoch_count": _epoch_count(card),
        "versions": ", ".join(f"{name} {version}" for name, version in sorted(card.provenance.versions.items())),
    }


def _audited(card: PrivacyCard) -> dict[str, Any]:
    """The attacks of the audit; what is said of one of them once, though it stands there for model and twin."""
    attacks = card.audit.attacks if card.audit is not None else ()
    named = {attack.name: attack for attack in attacks if attack.threat_model is not None}
    return {
        "audited": attacks,
        "attacked": lambda model: "without privacy" if model == "non_private" else model,
        "threats": list(named.values()),
        "bounded": [attack for attack in attacks if attack.epsilon_lower_bound is not None],
        "rates": sorted({point.false_positive_rate for attack in attacks for point in attack.tpr_at_fpr}),
        "rate_of": lambda attack, rate: next(
            (point for point in attack.tpr_at_fpr if point.false_positive_rate == rate), None
        ),
    }


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _column(metric: Metric, name: str) -> str:
    return formats.NOT_FINITE if name in metric.not_finite else formats.number(getattr(metric, name))


def _epoch_count(card: PrivacyCard) -> int:
    return max(map(len, (card.utility.training or {}).values()), default=0)


def _epochs(card: PrivacyCard) -> list[tuple[int, list[str]]]:
    """Some of them where there are many, the first and the last among them: a full batch is an epoch."""
    training = card.utility.training or {}
    last = _epoch_count(card) - 1
    shown = list(range(last + 1))
    if last >= _MOST_EPOCHS:
        shown = [round(index * last / (_MOST_EPOCHS - 1)) for index in range(_MOST_EPOCHS)]
    rows = []
    for epoch in shown:
        cells = []
        for name in sorted(training):
            values = training[name]
            value = values[epoch] if epoch < len(values) else None
            cells.append("" if epoch >= len(values) else formats.NOT_FINITE if value is None else formats.number(value))
        rows.append((epoch + 1, cells))
    return rows


def _plots(card: PrivacyCard) -> dict[str, Any]:
    account = card.accounting
    target = Level(
        f"claimed in the spec: {formats.bound(card.guarantee.target_epsilon)}", card.guarantee.target_epsilon
    )
    return {
        "loss": _loss_plot(card),
        "steps": line_chart(
            [Series("epsilon", [(point.step, _finite(point.epsilon)) for point in account.epsilon_over_steps])],
            x=Axis("step", whole=True),
            y=Axis("epsilon", zero=True),
            levels=[target],
            title="Epsilon over the executed steps",
        ),
        "clip_norms": _clip_norm_plot(card),
        "delta": line_chart(
            [Series("epsilon", [(point.delta, _finite(point.epsilon)) for point in account.epsilon_of_delta])],
            x=Axis("delta", log=True),
            y=Axis("epsilon", zero=True),
            title="Epsilon as a function of delta",
        ),
        "bars": list(_bars(card)),
        "groups": _group_plot(card),
        "roc": roc.pictures(card),
    }


def _finite(bound: Bound) -> float | None:
    return bound.value


def _clip_norm_plot(card: PrivacyCard) -> Markup | None:
    adaptive = card.accounting.adaptive_clipping
    if adaptive is None:
        return None
    points = [(point.step, point.clip_norm) for point in adaptive.over_steps]
    spread = adaptive.largest > 10 * adaptive.smallest
    y = Axis("clip norm", log=spread, zero=not spread)
    return line_chart([Series("clip norm", points)], x=Axis("step", whole=True), y=y, title="Clip norm by step")


def _loss_plot(card: PrivacyCard) -> Markup | None:
    training = card.utility.training or {}
    names = [("loss", "training loss", "line-a"), ("val_loss", "validation loss", "line-b")]
    series = [
        Series(label, list(enumerate(training[name], start=1)), style)
        for name, label, style in names
        if name in training
    ]
    return line_chart(series, x=Axis("epoch", whole=True), y=Axis("loss"), title="Loss by epoch") if series else None


def _group_plot(card: PrivacyCard) -> Markup | None:
    groups = card.groups
    rows = [
        (
            f"{row.name} ({formats.number(row.n)})",
            [(row.before, "dot-b"), (row.non_private, "dot-c"), (row.value, "dot-a")],
            row.interval or (),
        )
        for row in groups.rows
        if row.value is not None
    ]
    legend = [("before", "dot-b"), ("without privacy", "dot-c"), ("private", "dot-a")]
    return dot_chart(rows, legend=legend, line=groups.whole, title=f"{groups.metric or 'The metric'} of every group")


def _bars(card: PrivacyCard) -> Iterator[tuple[Metric, Markup]]:
    rows = (
        ("public", "before (public start)", "bar-b"),
        ("private", "private", "bar-a"),
        ("non_private", "without privacy", "bar-c"),
    )
    for metric in card.utility.metrics:
        bars = [
            (label, value, formats.number(value), style)
            for name, label, style in rows
            if (value := getattr(metric, name)) is not None
        ]
        if len(bars) > 1:
            title = f"{metric.name}: before, private and without privacy"
            yield metric, bar_chart(bars, title=title, interval=metric.interval or ())
