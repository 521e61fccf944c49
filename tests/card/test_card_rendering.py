"""Markdown and HTML: all sections, and nothing that a user wrote becomes markup."""

from __future__ import annotations

import html.parser
import io
import re

import jinja2
import pytest
from ruamel.yaml import YAML

from tfdp.card import check_card, load_card, render_html, render_markdown
from tfdp.card.fields import clean_text
from tfdp.card.formats import bound, exact, lower_bound, number, percent, seconds
from tfdp.card.plots import Axis, Level, Series, bar_chart, line_chart
from tfdp.card.rendering import escape_markdown

TITLES = [
    "Claim",
    "Guarantee",
    "Accounting",
    "Data accesses",
    "Not covered",
    "Data",
    "Utility",
    "Groups",
    "Attacks",
    "Intended use and limits",
    "Provenance",
    "Budget",
    "Review",
    "Licence, citation, glossary",
]
HOSTILE = (
    "x</td></table><script>alert(1)</script>|y\nlicense: mit\n---\n# z [a](javascript:alert(1)) <img src=x onerror=y>"
)


class Page(html.parser.HTMLParser):
    """Tags, attributes and balance of a page."""

    VOID = ("meta", "br", "rect", "line", "circle", "path")

    def __init__(self, text):
        super().__init__()
        self.tags, self.links, self.open, self.ids, self.handlers = [], [], [], set(), []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        for name, value in attributes:
            self.links += [value] if name in ("href", "src", "xlink:href", "action", "data") else []
            self.ids |= {value} if name == "id" else set()
            self.handlers += [name] if name.startswith("on") else []
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.open.pop()


def front_matter(text):
    """(front matter, body), split the way the model hub does."""
    found = re.match(r"^---\s*\n(.*?\n)---\s*\n(.*)$", text, re.DOTALL)
    return YAML(typ="safe", pure=True).load(found[1]), found[2]


def hostile(run):
    evaluation = {
        "metrics": [{"name": HOSTILE, "split": HOSTILE, "private": 1.0, "public": 2.0}],
        "groups": [{"name": HOSTILE, "n": 100, "value": 1.0}],
        "group_field": HOSTILE,
        "membership_inference": {"name": HOSTILE, "threat_model": HOSTILE},
    }
    names = (
        "title",
        "model_name",
        "intended_use",
        "limits",
        "licence",
        "citation",
        "data_source",
        "command",
        "hardware",
    )
    details = {**dict.fromkeys(names, HOSTILE), "timings": {HOSTILE: 1.0}}
    unit = {"kind": "document", "description": HOSTILE, "id_field": HOSTILE, "max_records_per_unit": 1}
    waiver = {"finding": "PS050", "reason": HOSTILE, "owner": HOSTILE, "expires": "2030-01-01"}
    plan = run.plan(claim={**run.SPEC["claim"], "privacy_unit": unit}, waivers=[waiver], budget={"dataset_id": HOSTILE})
    run.train(plan).export(evaluation=evaluation, details=details, history={HOSTILE: [1.0], "loss": [2.0, 1.0]})


def test_all_sections_are_there(run):
    run.train().export()
    headings = re.findall(r"^## (\d+)\. (.*)$", run.markdown, re.MULTILINE)
    assert headings == [(str(index), title) for index, title in enumerate(TITLES, start=1)]
    page = Page(run.html)
    assert {f"s{index}" for index in range(1, 15)} <= page.ids
    assert page.open == []
    for title in TITLES:
        assert title in run.html


def test_the_page_loads_nothing(run):
    run.train().export()
    page = Page(run.html)
    assert all(re.fullmatch(r"#s\d+", link) for link in page.links)
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert page.tags.count("svg") == 5
    assert "url(" not in run.html
    assert "@import" not in run.html
    assert "default-src 'none'" in run.html


class TestHostileText:
    def test_html(self, run):
        hostile(run)
        page = Page(run.html)
        assert page.open == []
        assert not {"script", "img"} & set(page.tags)
        assert all(link.startswith("#s") for link in page.links)
        assert page.handlers == []
        assert "&lt;script&gt;" in run.html

    def test_front_matter(self, run):
        hostile(run)
        values, body = front_matter(run.markdown)
        assert values["license"] == " ".join(HOSTILE.split())
        assert values["library_name"] == "keras"
        assert values["differential_privacy"]["epsilon"] == run.card["claim"]["epsilon"]["value"]
        assert body.startswith("# x")
        assert run.markdown.count("\n---\n") == 1

    def test_markdown(self, run):
        hostile(run)
        _, body = front_matter(run.markdown)
        outside = re.sub(r"`[^`\n]*`", "", body)
        assert "<script" not in outside
        assert "<img" not in outside
        assert "javascript:" not in outside
        assert not re.search(r"(?<!\\)\]\(", outside)
        assert not re.search(r"^# z", body, re.MULTILINE)
        for table in re.findall(r"(?:^\|.*\n)+", body, re.MULTILINE):
            widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
            assert len(widths) == 1, table

    def test_check_agrees(self, run):
        hostile(run)
        assert check_card(run.directory) == []

    @pytest.mark.parametrize(
        ("text", "shown"),
        [
            ("a|b", r"a\|b"),
            ("a\nb", "a b"),
            ("# a", r"\# a"),
            ("- a", r"\- a"),
            ("-0.5", "-0.5"),
            ("---", r"\---"),
            ("1. a", r"1\. a"),
            ("<b>", "&lt;b&gt;"),
            ("[a](JavaScript :x)", r"\[a\](JavaScript&#58;x)"),
            ("`a`", r"\`a\`"),
            ("a_b*c*", r"a\_b\*c\*"),
            ("&lt;", "&amp;lt;"),
        ],
    )
    def test_escapes(self, text, shown):
        assert escape_markdown(text) == shown

    def test_characters_that_reorder_or_hide(self):
        assert clean_text("a\u202eb\u200bc\x00d\x1b[31m\r\ne\u2028f\ud800") == "abcd[31m\ne\nf"


def test_front_matter_of_an_ordinary_card(run):
    run.train().export()
    values, _ = front_matter(run.markdown)
    assert values["tags"] == ["differential_privacy", "dp-sgd"]
    assert values["license"] == "apache-2.0"
    privacy = values["differential_privacy"]
    assert privacy["delta"] == 1e-5
    assert "delta: 1.0e-05" in run.markdown, "readers of YAML 1.1 take 1e-05 for text"
    assert privacy["privacy_unit"] == "example"
    assert privacy["adjacency"] == "add_or_remove_one"
    assert privacy["sampling"] == "poisson"
    (model,) = values["model-index"]
    assert model["name"] == "gpt2-small"
    assert [metric["type"] for result in model["results"] for metric in result["metrics"]] == ["perplexity"]


@pytest.mark.parametrize(
    ("kind", "task"),
    [
        ("GPT2CausalLM", "text-generation"),
        ("T5Seq2SeqLM", "text2text-generation"),
        ("BertMaskedLM", "fill-mask"),
        ("BertTextClassifier", "text-classification"),
        ("Sequential", "other"),
        (None, "other"),
    ],
)
def test_front_matter_names_the_task_of_the_model(run, kind, task):
    run.train().export()
    card = load_card(run.directory / "MODEL_CARD.json")
    model = card.provenance.model.model_copy(update={"kind": kind})
    card = card.model_copy(update={"provenance": card.provenance.model_copy(update={"model": model})})
    values, _ = front_matter(render_markdown(card))
    assert {each["task"]["type"] for each in values["model-index"][0]["results"]} == {task}


def test_markdown_tables_have_even_rows(run):
    run.train().export()
    _, body = front_matter(run.markdown)
    tables = re.findall(r"(?:^\|.*\n)+", body, re.MULTILINE)
    assert len(tables) > 12
    for table in tables:
        lines = table.splitlines()
        assert re.fullmatch(r"\|(-+:?\|)+", lines[1]), table
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1, table


def test_a_missing_name_in_a_template_is_an_error(run, monkeypatch):
    from tfdp.card import rendering

    run.train().export()
    monkeypatch.setattr(rendering, "_context", lambda card: {"card": card})
    with pytest.raises(jinja2.UndefinedError):
        render_html(load_card(run.directory / "MODEL_CARD.json"))


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (bound(1.13371), "1.134"),
        (bound(7.9999), "8"),
        (bound(8.0), "8"),
        (bound(8.0000001), "8.001"),
        (bound(float("inf")), "unbounded"),
        (bound(0.0), "0"),
        (bound(12345.6), "12,346"),
        (bound(3.2e-9), "3.2e-9"),
        (bound(None), "not measured"),
        (lower_bound(1.13379), "1.133"),
        (number(59.84999), "59.85"),
        (number(1234567), "1,234,567"),
        (number(-0.00001234567), "-1.235e-5"),
        (percent(0.0271828), "2.719%"),
        (exact(1e-06), "1e-6"),
        (exact(0.0042666666666666), "0.0042666666666666"),
        (exact(256.0), "256"),
        (seconds(142.3), "2 min 22 s"),
        (seconds(7300), "2 h 1 min"),
    ],
)
def test_formats(shown, expected):
    assert shown == expected


@pytest.mark.parametrize(("epochs", "rows"), [(20, 20), (21, 20), (727, 20)])
def test_of_many_epochs_some_are_shown(run, epochs, rows):
    run.train().export(history={"loss": [900.0 - epoch for epoch in range(epochs)]})
    assert len(run.card["utility"]["training"]["loss"]) == epochs
    shown = re.findall(
        r"^\| (\d+) \| ([\d.]+) \|\s*$", run.markdown.split("Training, by epoch")[1].split("## 8")[0], re.M
    )
    assert len(shown) == len({epoch for epoch, _ in shown}) == rows
    assert [int(epoch) for epoch, _ in (shown[0], shown[-1])] == [1, epochs]
    assert all(float(loss) == pytest.approx(901 - int(epoch)) for epoch, loss in shown)
    assert (f"{rows} of {epochs} epochs; all are in" in run.markdown) == (epochs > rows)
    assert (f"{rows} of {epochs} epochs; MODEL_CARD.json has all" in run.html) == (epochs > rows)


class TestPlots:
    def test_lines_are_where_the_numbers_say(self):
        picture = line_chart(
            [Series("a", [(0, 0.0), (10, 5.0), (20, 10.0)])], x=Axis("step"), y=Axis("y", zero=True), title="t"
        )
        (path,) = re.findall(r'class="line-a" d="M(.*?)"', picture)
        (x0, y0), (x1, y1), (x2, y2) = (map(float, point.split()) for point in path.split("L"))
        assert x1 == pytest.approx((x0 + x2) / 2, abs=0.1)
        assert y1 == pytest.approx((y0 + y2) / 2, abs=0.1)
        assert x0 < x2
        assert y0 > y2, "larger values stand higher"

    def test_gaps_levels_and_text(self):
        points = [(1, 1.0), (2, 2.0), (3, None), (4, 3.0), (5, 4.0)]
        picture = line_chart([Series("<a>", points), Series("b", points)], x=Axis("x"), y=Axis("y"), title='"<t>"')
        assert picture.count('class="line-a" d=') == 4
        assert "&lt;a&gt;" in picture
        assert "<t>" not in picture
        level = line_chart([Series("a", points)], x=Axis("x"), y=Axis("y"), title="t", levels=[Level("top", 40.0)])
        assert ">top<" in level

    @pytest.mark.parametrize("values", [[1.0, 1.0], [0.0, 0.0], [-1.0, 1.0], [1e-9, 2e-9], [1e12, 2e12]])
    def test_extreme_ranges(self, values):
        points = list(zip((1e-9, 1e-2), values, strict=True))
        picture = line_chart([Series("a", points)], x=Axis("x", log=True), y=Axis("y"), title="t")
        assert "nan" not in picture
        assert 'class="tick-y"' in picture

    def test_too_few_points(self):
        assert line_chart([Series("a", [(1, 1.0), (2, None)])], x=Axis("x"), y=Axis("y"), title="t") is None

    def test_bars(self):
        picture = bar_chart([("a", 1.0, "1", "bar-b"), ("b", 2.0, "2", "bar-a")], title="t", interval=(1.5, 2.5))
        widths = [float(width) for width in re.findall(r'width="([\d.]+)" height="21"', picture)]
        assert widths[1] == pytest.approx(2 * widths[0], abs=0.2)
        assert "whisker" in picture
        assert "nan" not in bar_chart([("a", 0.0, "0", "bar-a"), ("b", 0.0, "0", "bar-b")], title="t")


def test_yaml_is_dumped_without_touching_the_library(run):
    stream = io.StringIO()
    YAML(typ="safe", pure=True).dump({"x": 1e-5}, stream)
    run.train().export()
    again = io.StringIO()
    YAML(typ="safe", pure=True).dump({"x": 1e-5}, again)
    assert stream.getvalue() == again.getvalue()
