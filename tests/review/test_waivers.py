"""What a waiver excuses, and what it does not, to the day."""

from __future__ import annotations

import datetime

import pytest

from tfdp.findings import Severity
from tfdp.review import review
from tfdp.review.catalogue import BASE
from tfdp.review.waivers import apply_waivers
from tfdp.spec import PrivacySpec

LAST_DAY = datetime.date(2027, 3, 31)
DUPLICATES = BASE.replace("deduplication: exact", "deduplication: none")


def judged(text: str, today: datetime.date = LAST_DAY, **fields: str):
    waiver = {"finding": "PS008", "reason": "known", "owner": "Ada", "expires": str(LAST_DAY), **fields}
    lines = ", ".join(f"{name}: {value}" for name, value in waiver.items() if value)
    spec = PrivacySpec.from_text(f"{text}waivers:\n  - {{{lines}}}\n")
    return apply_waivers(spec, review(spec), today)


def ids(result):
    return [(finding.id, finding.severity.value) for finding in result.findings]


def test_in_force_until_the_end_of_its_last_day():
    result = judged(DUPLICATES)
    assert ids(result) == []
    assert [(waived.finding.id, waived.waiver.owner) for waived in result.waived] == [("PS008", "Ada")]
    assert result.idle == ()


def test_the_day_after_it_is_an_error_and_excuses_nothing():
    result = judged(DUPLICATES, LAST_DAY + datetime.timedelta(days=1))
    assert ids(result) == [("PS008", "warning"), ("PS060", "error")]
    assert result.waived == ()
    expired = result.findings[-1]
    assert (expired.where, expired.line) == ("waivers[0].expires", 24)


def test_without_an_owner_it_excuses_nothing():
    assert ids(judged(DUPLICATES, owner="")) == [("PS008", "warning"), ("PS061", "warning")]


@pytest.mark.parametrize(
    ("finding", "says"), [("PS020", "an error"), ("PS999", "no such finding"), ("PS061", "never excused")]
)
def test_what_cannot_be_waived(finding, says):
    (problem,) = judged(BASE, finding=finding).findings
    assert (problem.id, problem.severity) == ("PS062", Severity.WARNING)
    assert says in problem.message


@pytest.mark.parametrize("owner", ["Ada", ""])
def test_what_cannot_be_waived_is_not_to_be_renewed(owner):
    """A later day or an owner would not help: the only advice is to delete it."""
    result = judged(BASE, LAST_DAY + datetime.timedelta(days=1), owner=owner, finding="PS020")
    assert ids(result) == [("PS062", "warning")]
    assert result.findings[0].fix == "Delete the waiver: it has no effect."


def test_an_error_stays_and_says_that_its_waiver_has_no_effect():
    result = judged(BASE.replace("deduplication", "num_records: 60000\n  deduplication"), finding="PS040")
    assert ids(result) == [], "a waiver of what is not there is no fault: it may be there with --data or --run"
    assert [waiver.finding for waiver in result.idle] == ["PS040"]
    covered = BASE.replace("[training]", "[training, tuning]") + "tuning: {kind: private}\n"
    result = judged(covered, finding="PS040")
    assert ids(result) == [("PS040", "error")]
    assert "cannot be waived" in result.findings[0].fix
    assert ids(judged(BASE + "tuning: {kind: private}\n", finding="PS040")) == []


def test_review_itself_knows_neither_date_nor_waiver():
    spec = PrivacySpec.from_text(f"{DUPLICATES}waivers:\n  - {{finding: PS008, reason: r, expires: 2001-01-01}}\n")
    assert [finding.id for finding in review(spec)] == ["PS008"]
