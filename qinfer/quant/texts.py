"""Where calibration text comes from: the documents of a file, of the hub or of the package.

A text file is one document; a `.jsonl` file holds one document per line, either text or a
conversation. Of a source beyond `limit` bytes only evenly spread parts are kept, so that memory
stays bounded whatever its size; every line is checked all the same.
"""

import codecs
import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from qinfer.data.files import calibration_text
from qinfer.errors import ConfigError

BUILT_IN = "built-in"
EXCERPTS = 64  # of a text file that is too large
MAX_LINE_BYTES = 16 << 20

Kind = Literal["text", "documents", "conversations"]
Message = dict[str, Any]

# ShareGPT's names of the speakers beside the usual ones.
_ROLES = {"human": "user", "gpt": "assistant"}
_USUAL_ROLES = ("system", "user", "assistant", "tool")
_SHAPES = '{"text": ...}, {"messages": [...]}, {"conversations": [...]} or a list of messages'


@dataclass(frozen=True, slots=True)
class Document:
    """One document.

    Args:
        where: for messages, such as `chats.jsonl:17`.
        content: its text, or the messages of a conversation, each with `role` and `content`.
    """

    where: str
    content: str | list[Message]


@dataclass(frozen=True, slots=True)
class Corpus:
    """The documents of one source, in its order.

    Args:
        name: of the file without folders, of the data set, or `built-in`.
        kind: `text` = running text, `documents` = texts, `conversations` = lists of messages.
        documents: those that were kept.
        found: documents that there are; None = not known, since reading stopped early.
        sha256: of the whole file; of a data set, of the documents that were kept.
    """

    name: str
    kind: Kind
    documents: tuple[Document, ...]
    found: int | None
    sha256: str


def built_in() -> Corpus:
    """Return the text in the package."""
    text = calibration_text()
    digest = hashlib.sha256(text.encode()).hexdigest()
    return Corpus(BUILT_IN, "text", (Document(BUILT_IN, text),), 1, digest)


def read_file(path: Path, *, limit: int) -> Corpus:
    """Read a text file, or a `.jsonl` file of texts or conversations.

    Args:
        path: of the file, UTF-8.
        limit: bytes that are kept at most, about.

    Raises:
        ConfigError: it cannot be read, or a line of it is no document; names the line.
    """
    try:
        with path.open("rb") as file:
            if path.suffix == ".jsonl":
                return _read_lines(path, file, limit)
            return _read_text(path, file, limit)
    except OSError as error:
        raise ConfigError(f"calibration file {path}: {error.strerror}") from error


def parse_record(record: object, *, where: str) -> Document:
    """Turn one decoded line or row into a document.

    Raises:
        ConfigError: it is none; says where and why.
    """
    if isinstance(record, Mapping):
        for key in ("messages", "conversations", "text"):
            if record.get(key) is not None:
                return _document(record[key], key, where)
        keys = ", ".join(map(str, record)) or "none"
        raise ConfigError(f"{where}: {_SHAPES} is needed; found the keys {keys:.200}")
    if isinstance(record, list):
        return _document(record, "the line", where)
    raise ConfigError(f"{where}: {_SHAPES} is needed, not {record!r:.80}")


def parse_value(value: object, column: str, *, where: str) -> Document:
    """Turn the content of one column into a document: text, or a list of messages.

    Raises:
        ConfigError: it is neither; says where.
    """
    return _document(value, column, where)


def kind_of(documents: Iterable[Document]) -> Iterator[tuple[Kind, Document]]:
    """Yield the documents with their kind, which must be the same for all.

    Raises:
        ConfigError: texts and conversations are mixed; names the first that differs.
    """
    first: Kind | None = None
    for document in documents:
        kind: Kind = "documents" if isinstance(document.content, str) else "conversations"
        first = first or kind
        if kind != first:
            raise ConfigError(
                f"{document.where}: {kind} among {first}; put them into files of their own, as "
                "they are packed differently"
            )
        yield kind, document


def _read_text(path: Path, file: BinaryIO, limit: int) -> Corpus:
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    digest = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type] # typeshed wants readinto
    spans = [(0, size)] if size <= limit else _spans(size, limit)
    documents = []
    for begin, end in spans:
        file.seek(begin)
        piece = _whole_lines(file.read(end - begin), first=begin == 0)
        try:
            text, _ = codecs.utf_8_decode(piece, "strict", end == size)  # a cut character is left
        except UnicodeDecodeError as error:
            raise ConfigError(f"calibration file {path}: no UTF-8 text ({error.reason})") from error
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        documents.append(Document(path.name, text))
    return Corpus(path.name, "text", tuple(documents), 1, digest)


def _spans(size: int, limit: int) -> list[tuple[int, int]]:
    """Return where evenly spread excerpts lie that have `limit` bytes together."""
    piece = limit // EXCERPTS
    starts = (index * (size - piece) // (EXCERPTS - 1) for index in range(EXCERPTS))
    return [(start, start + piece) for start in starts]


def _whole_lines(piece: bytes, *, first: bool) -> bytes:
    """Return a piece from its first new line on, or else from its first whole character on."""
    if first:
        return piece
    line = piece.find(b"\n") + 1
    return piece[line:].lstrip(bytes(range(0x80, 0xC0))) if line == 0 else piece[line:]


def _read_lines(path: Path, file: BinaryIO, limit: int) -> Corpus:
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    every = max(1, -(-size // limit))
    digest = hashlib.sha256()
    kept: list[Document] = []
    kind: Kind = "documents"
    found = 0
    for kind, document in kind_of(_lines(path, file, digest)):  # noqa: B007 - the last one counts
        if found % every == 0:
            kept.append(document)
        found += 1
    return Corpus(path.name, kind, tuple(kept), found, digest.hexdigest())


def _lines(path: Path, file: BinaryIO, digest: "hashlib._Hash") -> Iterator[Document]:
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        where = f"{path.name}:{number}"
        if len(line) > MAX_LINE_BYTES:
            raise ConfigError(f"{where}: the line is longer than {MAX_LINE_BYTES >> 20} MiB")
        digest.update(line)
        if line.strip():
            yield parse_record(_decode(line, where), where=where)


def _decode(line: bytes, where: str) -> object:
    try:
        return json.loads(line.decode("utf-8").rstrip())
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: no UTF-8 text ({error.reason})") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: no JSON: {error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise ConfigError(f"{where}: no JSON that can be read: nested too deeply") from error


def _document(value: object, key: str, where: str) -> Document:
    if isinstance(value, str):
        return Document(where, _checked(value, where))
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{where}: {key} is {value!r:.80}; text or a list of messages is needed")
    return Document(where, [_message(item, index, where) for index, item in enumerate(value)])


def _message(item: object, index: int, where: str) -> Message:
    """Return a message with `role` and `content`, from that spelling or ShareGPT's."""
    if not isinstance(item, Mapping):
        raise ConfigError(f"{where}: message {index} is {item!r:.80}; an object is needed")
    sharegpt = item.get("from") is not None
    role, content = (
        item.get(key) for key in (("from", "value") if sharegpt else ("role", "content"))
    )
    role = _ROLES.get(role, role) if isinstance(role, str) else role
    if role not in _USUAL_ROLES:
        known = ", ".join([*_USUAL_ROLES, *_ROLES])
        raise ConfigError(f"{where}: message {index} is by {role!r:.40}; known are {known}")
    if not isinstance(content, str):
        raise ConfigError(
            f"{where}: the content of message {index} is {content!r:.80}; text is needed"
        )
    _checked(json.dumps(item, ensure_ascii=False, default=str), f"{where}: message {index}")
    # Rows of a data set have every key that any message of it has, None where this one lacks it.
    rest = {} if sharegpt else {key: value for key, value in item.items() if value is not None}
    return rest | {"role": role, "content": content}


def _checked(text: str, where: str) -> str:
    """Refuse what JSON can spell, but no tokenizer can read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{where}: half a surrogate pair, {text[error.start]!r}; no tokenizer can read it"
        ) from error
    return text
