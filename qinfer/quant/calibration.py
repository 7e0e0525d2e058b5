"""Calibration data: text to token windows, with what was used on record.

Lines and documents are concatenated, never padded: a short text is used as it is, a long one is
cut into windows that are spread over it evenly.
"""

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qinfer.data.files import calibration_text
from qinfer.errors import ConfigError, QuantizationError

BUILT_IN = "built-in"
MIN_TOKENS = 64  # fewer say next to nothing about the inputs of a layer

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CalibrationSet:
    """The token windows that every layer sees, in this order.

    Args:
        windows: token ids; at most `seq_len` each.
        source: file name of the text, or `built-in`.
        seq_len: tokens per window after capping at the model's context.
        available_tokens: tokens of the whole text.
    """

    windows: tuple[tuple[int, ...], ...]
    source: str
    seq_len: int
    available_tokens: int

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
            "num_samples": len(self.windows),
            "seq_len": self.seq_len,
            "num_tokens": self.num_tokens,
            "available_tokens": self.available_tokens,
            "sha256": self.sha256,
        }


def load_calibration(
    encode: Callable[[str], Sequence[int]],
    *,
    path: str | Path | None,
    num_samples: int,
    seq_len: int,
    max_position: int,
) -> CalibrationSet:
    """Read the calibration text, tokenize it and cut it into windows.

    Args:
        encode: text to token ids, without special tokens.
        path: a UTF-8 text file; None = the text in the package.
        num_samples: windows wanted; fewer if the text is shorter.
        seq_len: tokens per window wanted.
        max_position: what the model allows; a longer window is cut to it.

    Raises:
        ConfigError: the file cannot be read as text.
        QuantizationError: fewer than `MIN_TOKENS` tokens; states the lengths found.
    """
    text = calibration_text() if path is None else _read(Path(path))
    source = BUILT_IN if path is None else Path(path).name
    tokens = encode(text)
    length = min(seq_len, max_position)
    windows = cut_windows(tokens, num_samples=num_samples, seq_len=length)
    result = CalibrationSet(windows, source, length, len(tokens))
    if result.num_tokens < MIN_TOKENS:
        raise QuantizationError(
            f"calibration text {source}: {len(text)} characters in {len(text.splitlines())} lines "
            f"give {len(tokens)} tokens, of which {num_samples} x {length} are used at most; "
            f"at least {MIN_TOKENS} are needed"
        )
    if len(windows) < num_samples:
        _log.warning(
            "calibration text %s: only %d of %d samples of %d tokens found (%d tokens in all)",
            *(source, len(windows), num_samples, length, result.num_tokens),
        )
    _log.info(
        "calibration: %d windows of up to %d tokens, %d tokens in all, from %s",
        *(len(windows), length, result.num_tokens, source),
    )
    return result


def cut_windows(
    tokens: Sequence[int], *, num_samples: int, seq_len: int
) -> tuple[tuple[int, ...], ...]:
    """Cut tokens into windows: evenly spread full ones, or all there is, the rest included."""
    whole = len(tokens) // seq_len
    if whole >= num_samples:
        starts = [index * whole // num_samples * seq_len for index in range(num_samples)]
    else:
        starts = list(range(0, len(tokens), seq_len))
    return tuple(tuple(tokens[start : start + seq_len]) for start in starts)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"calibration file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"calibration file {path}: no UTF-8 text ({error.reason})") from error
