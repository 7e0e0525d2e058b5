"""Calibration text from a data set on the hub, through the library `datasets`, as a stream.

The library is not among qinfer's needs: it is found when it is asked for.
"""

import hashlib
import importlib
import json
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from huggingface_hub.errors import HfHubHTTPError

from qinfer.errors import ConfigError
from qinfer.quant.texts import Corpus, Document, Kind, kind_of, parse_record, parse_value

PREFIX = "hf:"
MAX_ROWS = 1 << 20  # where rows are empty or tiny
# The base of all errors of the hub's HTTP client.
_HTTP_ERROR: type[BaseException] = HfHubHTTPError.__bases__[0]


def read_dataset(spec: str, *, limit: int) -> Corpus:
    """Read the first rows of a data set, as many as have about `limit` bytes of text.

    Args:
        spec: `hf:DATASET[:CONFIG[:SPLIT[:COLUMN]]]`; an empty part is as if it were not there. The
            split is `train` unless said; the column is `messages`, `conversations` or `text`,
            whichever there is.
        limit: bytes of text after which reading stops.

    Raises:
        ConfigError: the library is missing, the hub cannot be reached, there is no such data set,
            configuration, split or column, or a row is no document.
    """
    name, config, split, column = _parse(spec)
    documents: list[Document] = []
    digest = hashlib.sha256()
    kind: Kind = "documents"
    size = 0
    ended = True
    for kind, document in kind_of(_rows(name, config, split, column)):  # noqa: B007 - the last one counts
        text = json.dumps(document.content, ensure_ascii=False, sort_keys=True).encode()
        digest.update(len(text).to_bytes(8, "little") + text)
        documents.append(document)
        size += len(text)
        if size >= limit or len(documents) >= MAX_ROWS:
            ended = False
            break
    found = len(documents) if ended else None
    return Corpus(spec, kind, tuple(documents), found, digest.hexdigest())


def _parse(spec: str) -> tuple[str, str | None, str, str | None]:
    parts = spec.removeprefix(PREFIX).split(":")
    if not parts[0] or len(parts) > 4:
        raise ConfigError(
            f"calibration {spec!r}: write hf:DATASET[:CONFIG[:SPLIT[:COLUMN]]], such as "
            "hf:HuggingFaceH4/ultrachat_200k::train_sft:messages"
        )
    name, config, split, column = (*parts, "", "", "")[:4]
    return name, config or None, split or "train", column or None


def _rows(name: str, config: str | None, split: str, column: str | None) -> Iterator[Document]:
    library = _library()
    try:
        rows = library.load_dataset(name, name=config, split=split, streaming=True)
        for index, row in enumerate(rows):
            yield _document(row, column, f"{PREFIX}{name}, {split}[{index}]")
    except FileNotFoundError as error:  # the library's "no such data set, or no access to it"
        raise ConfigError(f"{PREFIX}{name}: {error}") from error
    except (ConnectionError, _HTTP_ERROR) as error:
        raise ConfigError(
            f"{PREFIX}{name}: the hub cannot be reached (offline, or HF_HUB_OFFLINE is set): "
            f"{error!s:.200}; give a text or .jsonl file instead"
        ) from error
    except ValueError as error:  # an unknown configuration or split; it lists those there are
        raise ConfigError(f"{PREFIX}{name}: {error}") from error


def _document(row: dict[str, Any], column: str | None, where: str) -> Document:
    if column is None:
        return parse_record(row, where=where)
    if column not in row:
        raise ConfigError(f"{where}: no column {column!r}; there are {', '.join(row)}")
    return parse_value(row[column], column, where=where)


def _library() -> ModuleType:
    try:
        return importlib.import_module("datasets")
    except ModuleNotFoundError as error:
        raise ConfigError(
            "calibrating on a data set of the hub needs the library datasets: "
            "pip install datasets (or give a text or .jsonl file)"
        ) from error
