"""Data sets for TensorFlow Datasets: e-mails by sender, chapters by book, and any JSON lines by an id.

Nothing is downloaded: each builder reads a file or folder that the caller has. With the file format "array_record",
which `prepare` chooses, the result is read at random by `builder.as_data_source(split="train")`, and the sampler takes
it from there without loading the texts; see `tfdp.datasets.access`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import numpy as np
import tensorflow_datasets as tfds

from tfdp.datasets.archives import mail_files, read_archive, read_mail_file
from tfdp.datasets.mail import Mail, MailCounts, MalformedMailError, copy_digest, parse_mail, select_mails
from tfdp.datasets.rows import is_missing, read_rows, refuse, text_at, unit_id_at
from tfdp.errors import DataError

Example = tuple[str, dict[str, Any]]
_TEXT_FILES = ("*.jsonl", "*.jsonl.gz", "*.ndjson", "*.ndjson.gz")


@dataclasses.dataclass
class SourceConfig(tfds.core.BuilderConfig):
    """Where a data set is read from.

    Attributes:
        path: the file or folder; None: the only one that fits in the folder of manually downloaded data.
    """

    path: str | None = None


@dataclasses.dataclass
class EnronConfig(SourceConfig):
    """How mails become records.

    Attributes:
        expand_recipients: one record for each address in To, Cc and Bcc together; else one record for each mail.
        keep_forwarded: also mails that pass others on.
        keep_quoted: the whole body; else without what is quoted or forwarded, which others wrote.
        use_beam: prepare with Apache Beam, which must be installed; the records are the same.
    """

    expand_recipients: bool = True
    keep_forwarded: bool = False
    keep_quoted: bool = False
    use_beam: bool = False


@dataclasses.dataclass
class JsonlConfig(SourceConfig):
    """Which fields are read.

    Attributes:
        text_field, id_field: of the text, and of the name of its privacy unit.
        drop_missing: leave records without an id out; else they are an error that says how many there are.
    """

    text_field: str = "text"
    id_field: str = "id"
    drop_missing: bool = False


class _FileBuilder(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
    """One split, "train", from one file or folder. What was counted on the way is in `info.metadata`.

    Those counts are exact numbers of private data, which epsilon does not cover.
    """

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES: ClassVar[dict[str, str]] = {"1.0.0": "First release."}
    patterns: ClassVar[tuple[str, ...]] = _TEXT_FILES

    def _features(self) -> dict[str, Any]:
        raise NotImplementedError

    def _info(self) -> Any:
        features = tfds.features.FeaturesDict(self._features())
        return self.dataset_info_from_configs(features=features, metadata=tfds.core.MetadataDict())

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        path = self.builder_config.path
        return {"train": self._generate_examples(Path(path) if path else self._found(Path(dl_manager.manual_dir)))}

    def _found(self, folder: Path) -> Path:
        found = sorted({path for pattern in self.patterns for path in folder.glob(pattern)})
        if len(found) != 1:
            raise DataError(
                f"Expected one of {', '.join(self.patterns)} in {folder}. Received: {len(found)}. Put the data there, "
                "or name them in the path of the builder's config."
            )
        return found[0]


class Enron(_FileBuilder):
    """E-mails; the privacy unit is the sender, by the normalised address.

    Copies of a mail (same sender, subject and body) and forwarded mails are left out, and mails that cannot be read.
    Each of these is decided by the mails of one sender alone.
    """

    BUILDER_CONFIGS: ClassVar[list[Any]] = [
        EnronConfig(name="recipients", description="One record for each recipient of a mail."),
        EnronConfig(name="mails", description="One record for each mail.", expand_recipients=False),
    ]
    MANUAL_DOWNLOAD_INSTRUCTIONS = (
        "Put the mails there: a folder (maildir), a tar archive of one (*.tar, *.tar.gz, *.tgz), or a table with a "
        "column message (*.csv). The CMU release is at https://www.cs.cmu.edu/~enron/."
    )
    patterns = ("maildir", "*.tar", "*.tar.gz", "*.tgz", "*.csv", "*.csv.gz")

    def _features(self) -> dict[str, Any]:
        return {name: tfds.features.Text() for name in ("sender", "recipient", "subject", "date", "text")}

    def _generate_examples(self, path: Path) -> Any:
        return self._beam_examples(path) if self.builder_config.use_beam else self._examples(path)

    def _examples(self, path: Path) -> Iterator[Example]:
        config, counts = self.builder_config, MailCounts()
        mails = select_mails(
            read_archive(path), counts, keep_forwarded=config.keep_forwarded, keep_quoted=config.keep_quoted
        )
        for mail in mails:
            for example in _mail_records(mail, config):
                counts.records += 1
                yield example
        if not counts.records:
            raise DataError(f"Expected mails with a sender and text in {path}. Received: none in {counts.mails} files.")
        self.info.metadata.update(vars(counts) | {"malformed": dict(counts.malformed)})

    def _beam_examples(self, path: Path) -> Any:
        """The same records from a Beam pipeline, without the counts."""
        if importlib.util.find_spec("apache_beam") is None:
            raise DataError(
                "Expected Apache Beam for use_beam=True. Received: it is not installed. "
                "Install apache-beam, or prepare without use_beam."
            )
        beam = tfds.core.lazy_imports.apache_beam
        if path.is_dir():
            contents = beam.Create(list(enumerate(map(str, mail_files(path))))) | beam.MapTuple(_read_numbered)
        else:
            contents = beam.Create([str(path)]) | beam.FlatMap(_numbered_mails) | beam.Reshuffle()
        return (
            contents
            | "parse" >> beam.FlatMapTuple(_parsed)
            | "first of copies" >> beam.CombinePerKey(min)
            | "records" >> beam.FlatMap(_kept_records, self.builder_config)
        )


def _mail_records(mail: Mail, config: EnronConfig) -> Iterator[Example]:
    """Records of one mail under keys that are its own: copies of it would have the same."""
    key = copy_digest(mail).hex()
    recipients = (mail.recipients or ("",)) if config.expand_recipients else (", ".join(mail.recipients),)
    text = mail.body.strip() if config.keep_quoted else mail.own_text
    for recipient in recipients:
        record = {"sender": mail.sender, "subject": mail.subject, "date": mail.date, "text": text}
        yield f"{key} {recipient}", {**record, "recipient": recipient}


def _numbered_mails(path: str) -> Iterable[tuple[int, bytes]]:
    return enumerate(read_archive(path))


def _read_numbered(number: int, path: str) -> tuple[int, bytes]:
    return number, read_mail_file(path)


def _parsed(number: int, content: bytes) -> Iterator[tuple[bytes, tuple[int, bytes]]]:
    """What copies have in common, and where this one stands; nothing for a mail that cannot be read."""
    try:
        yield copy_digest(parse_mail(content)), (number, content)
    except MalformedMailError:
        return


def _kept_records(numbered: tuple[bytes, tuple[int, bytes]], config: EnronConfig) -> Iterator[Example]:
    content = numbered[1][1]
    options = {"keep_forwarded": config.keep_forwarded, "keep_quoted": config.keep_quoted}
    for mail in select_mails([content], MailCounts(), **options):
        yield from _mail_records(mail, config)


class BookSum(_FileBuilder):
    """Chapters with their synopses; the privacy unit is the book. `tfds` has a builder named booksum of its own."""

    BUILDER_CONFIGS: ClassVar[list[Any]] = [SourceConfig(name="chapters", description="One record for each chapter.")]
    MANUAL_DOWNLOAD_INSTRUCTIONS = (
        'Put a file of JSON lines there (*.jsonl, *.jsonl.gz): {"book_id", "title", "chapter_index", "synopsis", '
        '"text"}, of which book_id and text must be in every line.'
    )

    def _features(self) -> dict[str, Any]:
        texts = {name: tfds.features.Text() for name in ("book_id", "title", "synopsis", "text")}
        return {**texts, "chapter_index": tfds.features.Scalar(np.int64)}

    def _generate_examples(self, path: Path) -> Iterator[Example]:
        records = 0
        for line, row in read_rows(path, ["book_id", "text"]):
            number = row.get("chapter_index")
            if number is None:
                number = -1
            elif isinstance(number, bool) or not isinstance(number, int):
                refuse(path, line, "a whole number in 'chapter_index'", "something else", "Mend the line.")
            optional = {name: text_at(path, line, name, row) if row.get(name) else "" for name in ("title", "synopsis")}
            records += 1
            yield (
                str(line),
                {
                    **optional,
                    "book_id": unit_id_at(path, line, "book_id", row),
                    "chapter_index": number,
                    "text": text_at(path, line, "text", row),
                },
            )
        self.info.metadata.update(records=records)


class Jsonl(_FileBuilder):
    """Any JSON lines, or a table, with a text and the name of its privacy unit in every record."""

    BUILDER_CONFIGS: ClassVar[list[Any]] = [JsonlConfig(name="texts", description="Fields text and id.")]
    MANUAL_DOWNLOAD_INSTRUCTIONS = "Put one file there: *.jsonl, *.ndjson, *.csv or *.tsv, plain or *.gz."
    patterns = (*_TEXT_FILES, "*.csv", "*.csv.gz", "*.tsv", "*.tsv.gz")

    def _features(self) -> dict[str, Any]:
        return {"id": tfds.features.Text(), "text": tfds.features.Text()}

    def _generate_examples(self, path: Path) -> Iterator[Example]:
        config = self.builder_config
        records = missing = blank = 0
        for line, row in read_rows(path, [config.text_field], optional=[config.id_field]):
            text = text_at(path, line, config.text_field, row)
            if is_missing(row.get(config.id_field)):
                missing += 1
            elif not text.strip():
                blank += 1
            else:
                records += 1
                yield str(line), {"id": unit_id_at(path, line, config.id_field, row), "text": text}
        if missing and not config.drop_missing:
            _refuse_missing(path, config.id_field, missing, missing + blank + records)
        self.info.metadata.update(records=records, without_id=missing, without_text=blank)


def _refuse_missing(path: Path, field: str, missing: int, records: int) -> NoReturn:
    raise DataError(
        f"Expected an id in {field!r} in every record of {path}. Received: {missing} of {records} records without one. "
        "Fill it in, name another field, or drop these records (drop_missing=True)."
    )


def prepare(
    builder: type[_FileBuilder], path: str | os.PathLike[str], directory: str | os.PathLike[str], **options: Any
) -> Any:
    """Reads a file or folder once, and writes it as records that can be read at random.

    Args:
        builder: `Enron`, `BookSum` or `Jsonl`.
        path: the file or folder.
        directory: where the prepared data are put, and found again by a second call for the same, unchanged file.
        **options: fields of the builder's config, such as `expand_recipients`.

    Returns:
        The builder; its `as_data_source(split="train")` is for the sampler.

    Raises:
        DataError: the path or an option is not one of this builder, or the platform has no array_record.
    """
    if importlib.util.find_spec("array_record") is None:
        raise DataError(
            "Expected the package array_record, which reads records at random. Received: it is not installed. "
            "Install array-record; where there is none for this platform, read the file into memory instead."
        )
    default = builder.BUILDER_CONFIGS[0]
    unknown = options.keys() - {field.name for field in dataclasses.fields(default)}
    if unknown:
        raise DataError(f"Expected options of {type(default).__name__}. Received: {sorted(unknown)}. See its fields.")
    path = Path(path).resolve()
    try:
        state = path.stat()
    except OSError as error:
        raise DataError(f"Expected a file or folder at {path}. Received: {error.strerror}. Give its path.") from error
    # A changed file or option has a name of its own: what was prepared from another is never taken for it.
    settings = dataclasses.replace(default, **options, path=str(path))
    told = (builder.name, str(builder.VERSION), repr(settings), state.st_size, state.st_mtime_ns)
    name = f"{default.name}-{hashlib.sha256(repr(told).encode()).hexdigest()[:12]}"
    made = builder(
        data_dir=os.fspath(directory), config=dataclasses.replace(settings, name=name), file_format="array_record"
    )
    made.download_and_prepare()
    return made
