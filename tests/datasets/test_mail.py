"""Mails: addresses, charsets, what is the sender's own, copies; the real ones beside the repository."""

from __future__ import annotations

import collections
import csv
import email
import email.message
import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdp.datasets import mail as mails
from tfdp.datasets.archives import read_archive
from tfdp.datasets.mail import MailCounts, MalformedMailError, addresses, parse_mail, select_mails


def mail(*headers: str, body: str | bytes = "x") -> bytes:
    content = body.encode() if isinstance(body, str) else body
    return "\n".join(headers).encode("latin-1") + b"\n\n" + content


def sender_of(header: str) -> str:
    return parse_mail(mail(f"From: {header}")).sender


@pytest.mark.parametrize(
    ("header", "sender"),
    [
        ("A <A.B@Example.ORG>", "a.b@example.org"),
        ('"Last, First" <a@example.org>', "a@example.org"),
        ('"x@other.org" <a@example.org>', "a@example.org"),
        ("a@example.org (A of x@other.org)", "a@example.org"),
        ("'a@example.org'", "a@example.org"),
        ("o'a@example.org", "o'a@example.org"),
        ("a..b@example.org", "a..b@example.org"),
        ("=?utf-8?q?Ren=C3=A9?= <r@example.org>", "r@example.org"),
        ("Ren\xe9 <ren\xe9@example.org>", "ren\xe9@example.org"),
        ("a@example.org,\n b@example.org", "a@example.org"),
        ("<a@example.org", "a@example.org"),
    ],
)
def test_the_sender_is_the_normalised_address(header, sender):
    assert sender_of(header) == sender


@pytest.mark.parametrize(
    "header", ["legal <.a@example.org>", '<"a".@example@example.org>', "a <b.>", "<>", "a", "@example.org", "a@b"]
)
def test_a_sender_that_is_no_address_is_malformed(header):
    with pytest.raises(MalformedMailError, match=r"^sender is not an address$"):
        sender_of(header)


@pytest.mark.parametrize("content", [b"", b"\n\nonly a body", b"From:\n\nx", b"Subject: x\n\nx", b"\xff\xfe\x00"])
def test_no_sender(content):
    with pytest.raises(MalformedMailError, match=r"^no sender$"):
        parse_mail(content)


def test_recipients_are_a_set():
    """Every Bcc repeats the Cc, as in a known archive: nobody is counted twice."""
    parsed = parse_mail(
        mail(
            "From: a@example.org",
            "To: B <b@example.org>, c@example.org,",
            "\td@example.org",
            "Cc: C@EXAMPLE.org, e@example.org",
            "Bcc: c@example.org, e@example.org",
        )
    )
    assert parsed.recipients == tuple(f"{name}@example.org" for name in "bcde")
    assert addresses('"x@y.org, Z" <a@b.org>; undisclosed-recipients:; (c@d.org) <.e@f.org>') == ("a@b.org",)


def test_a_header_of_a_megabyte_does_not_stop_the_reader():
    assert addresses("a" * 10**6) == ()
    assert addresses("a" * 10**6 + "@example.org") == ()
    assert addresses("a@" + "b-" * 10**5) == ()


@pytest.mark.parametrize(
    ("headers", "raw", "text"),
    [
        (["Content-Type: text/plain; charset=iso-8859-1"], b"caf\xe9", "café"),
        (["Content-Type: text/plain; charset=utf-8"], "café".encode(), "café"),
        (["Content-Type: text/plain; charset=utf-8"], b"caf\xe9", "café"),  # is not what it says
        (["Content-Type: text/plain; charset=ANSI_X3.4-1968"], b"caf\xe9 \x93x\x94", "café “x”"),
        (["Content-Type: text/plain; charset=no-such"], b"caf\xe9", "café"),
        (["Content-Type: text/plain; charset=euc-kr"], "한글".encode("euc-kr"), "한글"),
        ([], b"\x81\xe9", "\x81é"),  # nothing but Latin-1 takes this
        (["Content-Transfer-Encoding: quoted-printable"], b"caf=C3=A9 =\r\nau lait\r\n", "café au lait\n"),
        (["Content-Transfer-Encoding: base64"], b"Y2Fmw6k=", "café"),
        (["Content-Type: text/html"], b"<style>p{}</style><p>a &lt; b</p><p>c<br>d</p>", "a < b\nc\nd"),
        (["Content-Type: multipart/mixed; boundary=z"], b"no part at all", "no part at all"),
        (["Content-Type: image/png"], b"\x89PNG", ""),
    ],
)
def test_bodies(headers, raw, text):
    assert parse_mail(mail("From: a@example.org", *headers, body=raw)).body == text


def test_the_plain_part_of_a_multipart_is_taken():
    body = (
        b"--z\nContent-Type: text/html\n\n<p>marked</p>\n--z\nContent-Disposition: attachment; filename=a.txt\n\nfile\n"
        b"--z\nContent-Type: multipart/alternative; boundary=y\n\n--y\n\nplain\n--y--\n--z--\n"
    )
    headers = ("From: a@example.org", "Content-Type: multipart/mixed; boundary=z")
    assert parse_mail(mail(*headers, body=body)).body == "plain"
    without = body.replace(b"plain", b" ")
    assert parse_mail(mail(*headers, body=without)).body == "marked"


def test_subject_and_date():
    parsed = parse_mail(
        mail("From: a@example.org", "Subject: =?iso-8859-1?q?caf=E9?=\n au lait", "Date: 1 May 2001 10:00 -0700")
    )
    assert (parsed.subject, parsed.date) == ("café au lait", "2001-05-01T10:00:00-07:00")
    odd = parse_mail(mail("From: a@example.org", "Date: Fri, 31 Feb 0001 99:00", "Subject: =?no-such?q?x?="))
    assert odd.date == ""
    assert "x" in odd.subject


@pytest.mark.parametrize(
    ("body", "own"),
    [
        ("Yes.\n\n> What was said\n> and more\nAnd no.", "Yes.\n\nAnd no."),
        ("Yes.\n -----Original Message-----\nFrom: x\n", "Yes."),
        ("Yes.\nFrom: A on 05/01/2001\nTo: B\ncc:\nSubject: lunch\n\nWords of A", "Yes."),
        ("From: is how this begins, and no header.", "From: is how this begins, and no header."),
        ("---------------------- Forwarded by A", ""),
    ],
)
def test_own_text_leaves_others_out(body, own):
    assert parse_mail(mail("From: a@example.org", body=body)).own_text == own


FORWARD = "-----Original Message-----\nFrom: b@example.org\n\nWords of B\n"
MAILS = [
    mail("From: a@example.org", "Subject: s", body="First."),
    mail("From: A@Example.org", "Subject: s", "To: b@example.org", body="First."),  # a copy
    mail("From: b@example.org", "Subject: s", body="First."),  # of another sender: stays
    mail("From: a@example.org", "Subject: t", body="First."),  # another subject: stays
    mail("From: a@example.org", "Subject: Fwd: s", body="Look.\n" + FORWARD),
    mail("From: a@example.org", "Subject: s", body=FORWARD),
    mail("From: a@example.org", "Subject: FW s", body="Not a prefix.\n" + FORWARD),
    mail("From: a@example.org", "Subject: RE: s", body="> Words of B\n"),
    mail("From: <>"),
    b"no headers",
]


def test_selection_and_its_counts():
    counts = MailCounts()
    kept = [(one.sender[0], one.subject, one.own_text) for one in select_mails(MAILS, counts)]
    assert kept == [
        ("a", "s", "First."),
        ("b", "s", "First."),
        ("a", "t", "First."),
        ("a", "FW s", "Not a prefix."),
    ]
    assert counts.malformed == {"sender is not an address": 1, "no sender": 1}
    assert (counts.mails, counts.repeated, counts.forwarded, counts.without_text, counts.kept) == (10, 1, 2, 1, 4)
    assert counts.mails == 2 + counts.repeated + counts.forwarded + counts.without_text + counts.kept
    everything = MailCounts()
    assert len(list(select_mails(MAILS, everything, keep_forwarded=True, keep_quoted=True))) == 7


def test_what_stays_of_a_sender_does_not_depend_on_others():
    def kept(contents):
        found = collections.defaultdict(list)
        for one in select_mails(contents, MailCounts()):
            found[one.sender].append(one)
        return found

    without_b = [content for content in MAILS if not content.lower().startswith(b"from: b@")]
    assert len(without_b) == len(MAILS) - 1
    assert kept(MAILS)["a@example.org"] == kept(without_b)["a@example.org"]


HEADER_NAMES = st.sampled_from(
    [
        "From",
        "To",
        "Subject",
        "Date",
        "Content-Type",
        "Content-Transfer-Encoding",
        "Content-Disposition",
        "MIME-Version",
    ]
)
HEADER_VALUES = st.one_of(
    st.binary(max_size=30),
    st.sampled_from(
        [
            b"a@example.org",
            b"multipart/mixed; boundary=z",
            b"text/html; charset=\xff",
            b"base64",
            b"=?utf-7?b?x?=",
            b"<<>;",
        ]
    ),
)
BODIES = st.one_of(st.binary(max_size=80), st.just(b"--z\nContent-Type: \xff\n\nx\n--z\n\n\xe9\n--z--"))


@settings(derandomize=True, max_examples=500, deadline=None)
@given(headers=st.lists(st.tuples(HEADER_NAMES, HEADER_VALUES), max_size=6), body=BODIES)
def test_no_bytes_stop_the_reader(headers, body):
    content = b"".join(name.encode() + b": " + value + b"\n" for name, value in headers) + b"\n" + body
    counts = MailCounts()
    for parsed in select_mails([content], counts, keep_forwarded=True, keep_quoted=True):
        assert "@" in parsed.sender
        assert "\r" not in parsed.body
        (parsed.sender + parsed.subject + parsed.own_text).encode()  # raises for half of a surrogate pair
    assert "cannot be parsed" not in counts.malformed  # that would be a case that was not foreseen


@pytest.fixture(scope="module")
def contents(shared):
    return list(read_archive(shared / "data" / "enron" / "enron_inbox_subset.tar.gz"))


@pytest.fixture(scope="module")
def read(contents):
    """One pass over the archive: counts, the mails that stay, all that were parsed, and the bytes that were not."""
    counts, parsed, malformed = MailCounts(), [], []

    def noted(content):
        try:
            parsed.append(parse_mail(content))
        except MalformedMailError:
            malformed.append(content)
            raise
        return parsed[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mails, "parse_mail", noted)
        kept = list(select_mails(contents, counts))
    return types.SimpleNamespace(counts=counts, kept=kept, parsed=parsed, malformed=malformed)


class TestRealMails:
    """Counts that the description of the data sets states."""

    def test_enron(self, read):
        counts, kept = read.counts, collections.Counter(one.sender for one in read.kept)
        assert counts.mails == 14465
        assert counts.malformed == {"sender is not an address": 18}
        assert counts.repeated == 1507
        assert counts.mails == 18 + 1507 + counts.forwarded + counts.without_text + counts.kept
        assert (counts.forwarded, counts.without_text, counts.kept, len(kept)) == (2130, 10, 10800, 5655)

    def test_enron_headers(self, contents, read):
        parsed, malformed = read.parsed, [email.message_from_bytes(content) for content in read.malformed]
        assert len(parsed) + len(malformed) == len(contents)
        left_out = collections.Counter(message["From"] for message in malformed)
        assert len(left_out) == 12
        senders = collections.Counter(one.sender for one in parsed)
        assert len(senders) == 6118 - 12
        assert max(senders.values()) == 123
        counts = [*senders.values(), *left_out.values()]
        assert [sum(n >= least for n in counts) for least in (2, 5, 20)] == [1777, 401, 54]
        assert sum(not one.subject for one in parsed) + sum(not message["Subject"] for message in malformed) == 403
        groups = collections.Counter((one.sender, one.subject, one.body) for one in parsed)
        assert sum(n > 1 for n in groups.values()) == 779
        both = [message for message in map(email.message_from_bytes, contents) if message["Cc"]]
        assert len(both) == 4359
        assert all(addresses(str(message["Cc"])) == addresses(str(message["Bcc"])) for message in both)
        assert max(len(one.recipients) for one in parsed) >= 302

    def test_odd_cases(self, shared):
        folder = shared / "data" / "enron" / "weird"
        with open(folder / "INDEX.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        assert len(rows) == 81
        for row in rows:
            content = (folder / row["file"]).read_bytes()
            if row["tag"] == "malformed_from":
                with pytest.raises(MalformedMailError, match="not an address"):
                    parse_mail(content)
                continue
            parsed = parse_mail(content)
            assert parsed.body.strip()
            assert "�" not in parsed.body + parsed.subject
            assert (row["tag"] == "no_subject") <= (not parsed.subject)
            assert (row["tag"] == "forward_only") <= parsed.is_forwarded
            assert (row["tag"] == "quoted_printable") <= ("=20\n" not in parsed.body)

    def test_odd_mime(self, shared):
        contents = list(read_archive(shared / "data" / "mail_mime" / "spamassassin_ham_subset.tar.gz"))
        parsed = [parse_mail(content) for content in contents]
        assert len(parsed) == 492
        messages = [email.message_from_bytes(content) for content in contents]
        assert len({" ".join(str(message["From"]).split()) for message in messages}) == 255
        assert len({one.sender for one in parsed}) == 238  # several names for one address
        assert sum(message.is_multipart() for message in messages) >= 144
        assert all(one.body.strip() for one in parsed)
        assert not any(
            "<html" in one.body.lower()
            for one, message in zip(parsed, messages, strict=True)
            if message.get_content_type() == "text/html"
        )
