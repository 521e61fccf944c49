"""YAML and JSON to plain values, each with the line and column it came from.

Only what a reviewer can read off the page is accepted: no key twice, no aliases, no tags, no merge keys. A file may
hold several YAML documents (`read_all`), each a spec of its own. Numbers are checked later, by the fields.
"""

from __future__ import annotations

from tfdp.spec.documents import MAX_CHARACTERS, START, Document, Format, ReadingError, too_deep
from tfdp.spec.json_reading import read_json
from tfdp.spec.yaml_reading import read_yaml


def read(text: str, format: Format) -> Document:
    """Reads a text that holds one document.

    Raises:
        ReadingError: at the first fault of the notation itself.
    """
    documents = read_all(text, format)
    for document in documents[1:]:
        place = document if isinstance(document, ReadingError) else document.positions[()]
        raise ReadingError(
            "PS000",
            "expected a single document, received another document.",
            f"Keep one of them, or give each a file of its own.{_is_meant(document)}",
            line=place.line,
            column=place.column,
        )
    if isinstance(documents[0], ReadingError):
        raise documents[0]
    return documents[0]


def _is_meant(document: Document | ReadingError) -> str:
    if isinstance(document, ReadingError) or document.separator is None:
        return ""
    return f" Document {document.number} begins at line {document.separator} with ---: is that line meant?"


def read_all(text: str, format: Format) -> list[Document | ReadingError]:
    """Reads every document of a text, at least one; JSON holds one only.

    A fault within one document stands in its place, so that the others can be reviewed all the same.

    Raises:
        ReadingError: the text cannot be cut into documents.
    """
    text = text.removeprefix("\ufeff")
    if len(text) > MAX_CHARACTERS:
        raise ReadingError(
            "PS000",
            f"expected at most {MAX_CHARACTERS} characters, received {len(text)}.",
            "Is this the right file? A spec is about a page long.",
        )
    if not text.strip():
        raise ReadingError("PS000", "expected a privacy spec, received an empty document.", START)
    try:
        return [read_json(text)] if format == "json" else read_yaml(text)
    except RecursionError:
        too_deep()
