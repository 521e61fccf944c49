"""Mails as they are found in archives: parsed whatever their charset, cut to what their sender wrote, without copies.

What is decided about a mail is decided by the mails of its own sender alone: only there is a copy looked for. A mail
that cannot be read is counted and left out; nothing in a mail raises.
"""

from __future__ import annotations

import collections
import dataclasses
import email
import email.message
import email.policy
import email.utils
import hashlib
import html.parser
import re
from collections.abc import Iterable, Iterator

_QUOTED_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_COMMENT = re.compile(r"\([^()]*\)")
# Wider than RFC 5322 allows (two dots in a row and letters beyond ASCII were seen), but with no leading dot or quote.
_NO_LOCAL = r"\s\x00-\x1f\x7f@<>()\[\]\",:;\\"
_DOMAIN = r"[^\W_](?:[\w-]{0,61}[^\W_])?"
_ADDRESS = re.compile(rf"(?<![^{_NO_LOCAL}'])[^{_NO_LOCAL}.'][^{_NO_LOCAL}]{{0,63}}@{_DOMAIN}(?:\.{_DOMAIN})+")
_FORWARD_SUBJECT = re.compile(r"\s*(fw|fwd)\s*:", re.IGNORECASE)
# Where somebody else's words begin: Outlook's and Notes' forwarding lines, and what Notes puts above a reply.
_FOREIGN = re.compile(
    r"^[ \t]*(-{3,} ?(Original Message|Forwarded by|Forwarded message)|_{10,}"
    r"|(From|To|Sent):[ \t].*\n(.*\n){0,3}?Subject:)",
    re.MULTILINE | re.IGNORECASE,
)
_QUOTE = re.compile(r"^[ \t]*[>|].*\n?", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Mail:
    """One mail.

    Attributes:
        sender: the address in From, normalised: the privacy unit.
        recipients: the addresses in To, Cc and Bcc, normalised, each once, in the order of the headers.
        subject, date: as decoded; the date in ISO 8601 with its offset. Empty where there is none.
        body: the plain text, transfer encoding and charset undone, with line ends as in Unix.
    """

    sender: str
    recipients: tuple[str, ...] = dataclasses.field(repr=False)
    subject: str = dataclasses.field(repr=False)
    date: str = dataclasses.field(repr=False)
    body: str = dataclasses.field(repr=False)

    @property
    def own_text(self) -> str:
        """The body without what it forwards or quotes: what the sender wrote."""
        foreign = _FOREIGN.search(self.body)
        return _QUOTE.sub("", self.body[: foreign.start()] if foreign else self.body).strip()

    @property
    def is_forwarded(self) -> bool:
        """Whether it passes somebody else's mail on: by its subject (FW:, FWD:), or nothing stands above that mail."""
        foreign = _FOREIGN.search(self.body)
        return bool(_FORWARD_SUBJECT.match(self.subject) or (foreign and not self.body[: foreign.start()].strip()))


@dataclasses.dataclass
class MailCounts:
    """What happened to the mails of an archive. Exact numbers of private data, which epsilon does not cover.

    Attributes:
        mails: all that were found; the sum of the others but `records`.
        malformed: left out, by reason.
        repeated: left out, because the sender has sent the same subject and body before.
        forwarded: left out, because they pass somebody else's mail on.
        without_text: left out, because nothing of the sender's own is in them.
        kept: the rest.
        records: records that were made of those.
    """

    mails: int = 0
    malformed: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    repeated: int = 0
    forwarded: int = 0
    without_text: int = 0
    kept: int = 0
    records: int = 0


class MalformedMailError(ValueError):
    """A mail that has to be left out; the message is the reason, and holds nothing of the mail."""


def parse_mail(content: bytes) -> Mail:
    """Parses one mail.

    Raises:
        MalformedMailError: no sender, a sender that is not one address, or bytes on which the parser gives up.
    """
    try:
        message = email.message_from_bytes(content, policy=email.policy.default)
        sender = _sender(message)
        return Mail(sender, _recipients(message), _subject(message), _date(message), _body(message))
    except MalformedMailError:
        raise
    except Exception:  # the parser of the standard library fails in many ways, and its message may quote the mail
        raise MalformedMailError("cannot be parsed") from None


def select_mails(
    contents: Iterable[bytes], counts: MailCounts, *, keep_forwarded: bool = False, keep_quoted: bool = False
) -> Iterator[Mail]:
    """The mails that stay, in their order; of copies the first.

    Args:
        contents: one mail each.
        counts: is added to as the mails are read.
        keep_forwarded: also mails that pass others on.
        keep_quoted: also mails in which nothing but what others wrote is left.
    """
    seen: set[bytes] = set()
    for content in contents:
        counts.mails += 1
        try:
            mail = parse_mail(content)
        except MalformedMailError as error:
            counts.malformed[str(error)] += 1
            continue
        digest = copy_digest(mail)
        if digest in seen:
            counts.repeated += 1
            continue
        seen.add(digest)
        if mail.is_forwarded and not keep_forwarded:
            counts.forwarded += 1
        elif not (mail.body if keep_quoted else mail.own_text).strip():
            counts.without_text += 1
        else:
            counts.kept += 1
            yield mail


def copy_digest(mail: Mail) -> bytes:
    """The same for mails of one sender with the same subject and body, and for no others: 128 bits of BLAKE2b."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (mail.sender, mail.subject, mail.body):
        raw = part.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(8, "big") + raw)
    return digest.digest()


def addresses(header: str) -> tuple[str, ...]:
    """The addresses in a header of recipients, in lower case, each once; names, comments and groups are left out."""
    bare = _COMMENT.sub(" ", _QUOTED_STRING.sub(" ", header)).lower()
    return tuple(dict.fromkeys(_ADDRESS.findall(bare)))


def _sender(message: email.message.Message) -> str:
    """From the raw header: the parser of structured headers fails on some that were seen."""
    raw = _raw(message, "from")
    if not raw:
        raise MalformedMailError("no sender")
    bare = _COMMENT.sub(" ", _QUOTED_STRING.sub("", raw)).lower()
    inside = re.search(r"<([^<>]*)>?", bare)
    found = _ADDRESS.fullmatch((inside[1] if inside else bare.partition(",")[0]).strip().strip("'"))
    if not found:
        raise MalformedMailError("sender is not an address")
    return found[0]


def _recipients(message: email.message.Message) -> tuple[str, ...]:
    # A set: archives are known in which every Bcc repeats the Cc.
    return addresses(", ".join(_raw(message, name) for name in ("to", "cc", "bcc")))


def _subject(message: email.message.Message) -> str:
    raw = _raw(message, "subject")
    if "=?" not in raw:
        return raw
    try:
        return " ".join(str(email.policy.default.header_factory("subject", raw)).split())
    except Exception:
        return raw


def _date(message: email.message.Message) -> str:
    try:
        return email.utils.parsedate_to_datetime(_raw(message, "date")).isoformat()
    except Exception:
        return ""


def _raw(message: email.message.Message, name: str) -> str:
    """A header as it stands, in one line; the first where there are several, empty where there is none."""
    value = next((value for key, value in message.raw_items() if key.lower() == name), "")
    return " ".join(_decoded(str(value).encode("utf-8", "surrogateescape"), None).split())


def _body(message: email.message.Message) -> str:
    parts = [part for part in message.walk() if not part.is_multipart() and not _is_attachment(part)]
    plain = [part for part in parts if _content_type(part) not in ("text/html", "other")]
    marked = [part for part in parts if _content_type(part) == "text/html"]
    for part in (*plain, *marked):
        payload = part.get_payload(decode=True)
        text = _decoded(payload, _charset(part)) if isinstance(payload, bytes) else ""
        text = _without_markup(text) if part in marked else text
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        if text.strip():
            return text
    return ""


def _content_type(part: email.message.Message) -> str:
    """text/plain also for what does not say; "other" for what is no text."""
    try:
        kind = part.get_content_type()
    except Exception:
        return "text/plain"
    # A multipart without parts, as a cut mail has it, holds its text as it stands.
    return kind if kind == "text/html" else "text/plain" if kind.startswith(("text/", "multipart/")) else "other"


def _is_attachment(part: email.message.Message) -> bool:
    try:
        return part.get_content_disposition() == "attachment"
    except Exception:
        return False


def _charset(part: email.message.Message) -> str | None:
    try:
        return part.get_content_charset()
    except Exception:
        return None


def _decoded(raw: bytes, charset: str | None) -> str:
    """Text of bytes in the charset that is stated, or else in the first that fits; Latin-1 fits always."""
    for name in (charset, "utf-8", "cp1252"):
        try:
            if name:
                return raw.decode(name)
        except (LookupError, ValueError):  # nobody knows it, or it is not what it says
            continue
    return raw.decode("latin-1")


class _TextOfHtml(html.parser.HTMLParser):
    _BREAKS = frozenset({"p", "br", "div", "tr", "li", "table", "h1", "h2", "h3", "h4", "blockquote", "pre"})
    _UNSEEN = frozenset({"script", "style", "title"})

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.pieces: list[str] = []
        self._unseen = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._unseen += tag in self._UNSEEN
        if tag in self._BREAKS:
            self.pieces.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self._unseen -= tag in self._UNSEEN and self._unseen > 0

    def handle_data(self, data: str) -> None:
        if not self._unseen:
            self.pieces.append(" ".join(data.split()) if data.strip() else " ")


def _without_markup(text: str) -> str:
    reader = _TextOfHtml()
    try:
        reader.feed(text)
        reader.close()
    except Exception:  # markup on which the parser gives up: what was read so far stays
        pass
    return re.sub(r"\n{3,}", "\n\n", "".join(reader.pieces)).strip()
