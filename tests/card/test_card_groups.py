"""Section 8 of the card, from a report of `tfdp.evaluation`."""

from __future__ import annotations

import re

import pytest

from tfdp.card import check_card
from tfdp.evaluation import GroupReport, GroupRow

REPORT = GroupReport(
    field="dialect",
    metric="hits",
    better="higher",
    whole=GroupRow("all", 5000, 0.78, (0.77, 0.79), 0.81, 0.5),
    rows=(
        GroupRow("large", 4500, 0.79, (0.78, 0.8), 0.82, 0.51),
        GroupRow("<b>small</b>", 400, 0.66, (0.61, 0.71), 0.74, 0.52),
        GroupRow("tiny", None, suppressed=True),
    ),
    min_group_size=100,
)


def test_a_report_becomes_the_section(run):
    run.train().export(evaluation=REPORT.evaluation())
    groups = run.card["groups"]
    assert (groups["field"], groups["metric"], groups["better"], groups["whole"]) == ("dialect", "hits", "higher", 0.78)
    large, small, tiny = groups["rows"]
    assert small["gap"] == pytest.approx(REPORT.gap(REPORT.rows[1]))
    assert (small["value"], small["non_private"], small["before"], small["n"]) == (0.66, 0.74, 0.52, 400)
    assert groups["worst"] == REPORT.worst.name  # its name does not tell which direction is good, the report does
    assert tiny["suppressed"]
    assert large["gap"] == pytest.approx(0.01)
    assert check_card(run.directory) == []


def test_a_group_of_the_least_size_is_shown(run):
    """Fifty are enough where the spec says fifty; one fewer, or no count, are not, and none of those is the worst."""
    rows = [
        {"name": name, "n": n, "value": value} for name, n, value in (("a", 50, 3.0), ("b", 49, 9.0), ("c", None, 8.0))
    ]
    metrics = [{"name": "perplexity", "private": 2.0}]
    run.train().export(evaluation={"metrics": metrics, "groups": rows, "group_field": "dialect"})
    groups = run.card["groups"]
    assert groups["minimum_size"] == 50
    assert [(row["n"], row["value"], row["suppressed"]) for row in groups["rows"]] == [
        (50, 3.0, False),
        (None, None, True),
        (None, None, True),
    ]
    assert groups["worst"] == "a"


def test_the_picture_and_the_tables_show_every_model(run):
    run.train().export(evaluation=REPORT.evaluation())
    picture = re.search(r'<svg[^>]*aria-label="hits of every group".*?</svg>', run.html, re.DOTALL).group()
    assert [picture.count(f'class="dot-{style}"') for style in "abc"] == [3, 3, 3]  # two groups and the legend
    assert picture.count('class="whisker"') == 2
    assert "&lt;b&gt;small&lt;/b&gt; (400)" in picture
    assert "tiny" not in picture
    assert "<b>small</b>" not in run.html
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in run.markdown.splitlines()]
    large, small = (next(row for row in rows if row and name in row[0]) for name in ("large", "small"))
    assert large == ["large", "4,500", "0.51", "0.79", "0.78 to 0.8", "0.82", "+0.01"]
    assert small[1:] == ["400", "0.52", "0.66", "0.61 to 0.71", "0.74", "-0.12"]
    assert [gap in run.html for gap in (">+0.01<", ">-0.12<")] == [True, True]
    # Places along the axis are in the order of the values.
    small = re.findall(r'<circle class="dot-(.)" cx="([\d.]+)" cy="(?!11")', picture)[3:]
    assert [style for style, _ in sorted(small, key=lambda dot: float(dot[1]))] == ["b", "a", "c"]
