"""Calibration data: documents to token windows, with what was used on record.

Nothing is ever padded. Texts are concatenated with nothing between and cut into windows that are
spread over them evenly; a short text is used as it is. A window of conversations begins with the
beginning of one and takes whole ones until it is full; what the last one has beyond is left out,
so that every token sees its conversation from the start.
"""

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from qinfer.errors import ConfigError, QuantizationError, RequestError
from qinfer.models.tokenizer import Tokenizer
from qinfer.quant.hub_texts import PREFIX, read_dataset
from qinfer.quant.texts import Corpus, Document, Message, built_in, read_file

MIN_TOKENS = 64  # fewer say next to nothing about the inputs of a layer
# Text that is read at most: several times what the windows hold, and never little.
MIN_LIMIT_BYTES = 4 << 20
BYTES_PER_TOKEN = 16

_log = logging.getLogger(__name__)

Encode = Callable[[str], Sequence[int]]
Windows = tuple[tuple[int, ...], ...]


class Render(Protocol):
    """Turns a conversation into the text that the model is given."""

    def __call__(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """Return the text; it holds the special tokens that the template writes."""
        ...


@dataclass(frozen=True, slots=True)
class CalibrationSet:
    """The token windows that every layer sees, in this order.

    Args:
        windows: token ids; at most `seq_len` each.
        source: file name of the text, the data set, or `built-in`.
        seq_len: tokens per window after capping at the model's context.
        available_tokens: tokens of all documents that were read.
        kind: of the documents: `text`, `documents` or `conversations`.
        documents: that the source has; None = not known.
        documents_read: those that were read; for a large text file, excerpts.
        text_sha256: see `Corpus`.
    """

    windows: Windows
    source: str
    seq_len: int
    available_tokens: int
    kind: str = "text"
    documents: int | None = 1
    documents_read: int = 1
    text_sha256: str | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens over all windows."""
        return sum(len(window) for window in self.windows)

    @property
    def sha256(self) -> str:
        """Hash of the windows: their lengths and ids as 32-bit little-endian integers."""
        digest = hashlib.sha256()
        for window in self.windows:
            for value in (len(window), *window):
                digest.update(value.to_bytes(4, "little"))
        return digest.hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Return the record that stays with the checkpoint."""
        return {
            "source": self.source,
            "kind": self.kind,
            "documents": self.documents,
            "documents_read": self.documents_read,
            "text_sha256": self.text_sha256,
            "num_samples": len(self.windows),
            "seq_len": self.seq_len,
            "num_tokens": self.num_tokens,
            "available_tokens": self.available_tokens,
            "sha256": self.sha256,
        }


def calibration_for(
    tokenizer: Tokenizer,
    *,
    path: str | Path | None,
    num_samples: int,
    seq_len: int,
    max_position: int,
) -> CalibrationSet:
    """Do what `load_calibration` does with a model's tokenizer and chat template."""
    return load_calibration(
        partial(tokenizer.encode, add_special_tokens=False),
        path=path,
        num_samples=num_samples,
        seq_len=seq_len,
        max_position=max_position,
        render=tokenizer.render_chat if tokenizer.has_chat_template else None,
    )


def load_calibration(
    encode: Encode,
    *,
    path: str | Path | None,
    num_samples: int,
    seq_len: int,
    max_position: int,
    render: Render | None = None,
) -> CalibrationSet:
    """Read the calibration data, tokenize it and cut it into windows.

    Args:
        encode: text to token ids, without special tokens beside those that the text spells.
        path: a UTF-8 text file; a `.jsonl` file with a text or a conversation per line;
            `hf:DATASET[:CONFIG[:SPLIT[:COLUMN]]]`; None = the text in the package.
        num_samples: windows wanted; fewer if there is less.
        seq_len: tokens per window wanted.
        max_position: what the model allows; a longer window is cut to it.
        render: the model's chat template, for conversations; None = it has none.

    Raises:
        ConfigError: the data cannot be read, or a line is no document; names it.
        QuantizationError: fewer than `MIN_TOKENS` tokens; states the lengths found.
    """
    length = min(seq_len, max_position)
    corpus = _read(path, max(MIN_LIMIT_BYTES, BYTES_PER_TOKEN * num_samples * length))
    if corpus.kind == "conversations":
        tokens = [encode(_rendered(item, render)) for item in corpus.documents]
        windows = spread(list(pack(tokens, seq_len=length)), num_samples)
    else:
        tokens = [encode(str(item.content)) for item in corpus.documents]
        joined = [token for document in tokens for token in document]
        windows = cut_windows(joined, num_samples=num_samples, seq_len=length)
    available = sum(len(document) for document in tokens)
    result = CalibrationSet(
        windows=windows,
        source=corpus.name,
        seq_len=length,
        available_tokens=available,
        kind=corpus.kind,
        documents=corpus.found,
        documents_read=len(corpus.documents),
        text_sha256=corpus.sha256,
    )
    _check(result, corpus, num_samples)
    return result


def cut_windows(tokens: Sequence[int], *, num_samples: int, seq_len: int) -> Windows:
    """Cut tokens into windows: evenly spread full ones, or all there is, the rest included."""
    whole = len(tokens) // seq_len
    if whole >= num_samples:
        starts = [index * whole // num_samples * seq_len for index in range(num_samples)]
    else:
        starts = list(range(0, len(tokens), seq_len))
    return tuple(tuple(tokens[start : start + seq_len]) for start in starts)


def pack(documents: Iterable[Sequence[int]], *, seq_len: int) -> Iterator[tuple[int, ...]]:
    """Pack documents into windows of `seq_len` tokens, each beginning with a document.

    Every window but the last is full. What its last document has beyond is left out.
    """
    window: list[int] = []
    for document in documents:
        window += document
        if len(window) >= seq_len:
            yield tuple(window[:seq_len])
            window = []
    if window:
        yield tuple(window)


def spread(windows: Sequence[tuple[int, ...]], num_samples: int) -> Windows:
    """Return `num_samples` windows, evenly spread, or all if there are fewer.

    A last one that is not full is taken only then.
    """
    if len(windows) <= num_samples:
        return tuple(windows)
    if len(windows[-1]) < len(windows[0]):
        windows = windows[:-1]
    count = len(windows)
    return tuple(windows[index * count // num_samples] for index in range(num_samples))


def _read(path: str | Path | None, limit: int) -> Corpus:
    if path is None:
        return built_in()
    if isinstance(path, str) and path.startswith(PREFIX):
        return read_dataset(path, limit=limit)
    return read_file(Path(path).expanduser(), limit=limit)


def _rendered(document: Document, render: Render | None) -> str:
    """Return a conversation as the server would give it to the model."""
    messages = document.content
    if isinstance(messages, str):
        raise TypeError(f"{document.where} is text")
    if render is None:
        raise ConfigError(
            f"{document.where}: a conversation, but the model has no chat template to turn it into "
            "text; calibrate on texts"
        )
    try:
        # Nobody answered the last message: the model would be asked to.
        return render(messages, add_generation_prompt=messages[-1]["role"] != "assistant")
    except RequestError as error:
        raise ConfigError(f"{document.where}: {error}") from error


def _check(result: CalibrationSet, corpus: Corpus, num_samples: int) -> None:
    """Refuse too few tokens, and tell what will be used."""
    if result.num_tokens < MIN_TOKENS:
        raise QuantizationError(
            f"calibration data {result.source}: {_amount(corpus)} give {result.available_tokens} "
            f"tokens, of which {num_samples} x {result.seq_len} are used at most; at least "
            f"{MIN_TOKENS} are needed"
        )
    if len(result.windows) < num_samples:
        _log.warning(
            "calibration data %s: only %d of %d samples of %d tokens found (%d tokens in all)",
            *(result.source, len(result.windows), num_samples, result.seq_len, result.num_tokens),
        )
    _log.info(
        "calibration: %d windows of up to %d tokens, %d tokens in all, from %s (%s)",
        *(len(result.windows), result.seq_len, result.num_tokens, result.source, result.kind),
    )


def _amount(corpus: Corpus) -> str:
    """Return how much text there is, in words."""
    texts = [item.content for item in corpus.documents if isinstance(item.content, str)]
    if corpus.kind != "text":
        return f"{len(corpus.documents)} {corpus.kind}"
    characters = sum(len(text) for text in texts)
    return f"{characters} characters in {sum(len(text.splitlines()) for text in texts)} lines"
