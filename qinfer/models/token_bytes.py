"""The raw bytes of single tokens, from the decoder that tokenizer.json declares.

A token may be part of a UTF-8 character, so its text cannot be had from `decode`. The steps of
the declared decoder are applied to one token; steps that act on the whole text (stripping a
leading space, fusing) are left out.
"""

import json
import re
from typing import Any

from tokenizers import Tokenizer

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_values() -> dict[str, int]:
    """Return the byte behind each printable stand-in of GPT-2's byte-level BPE."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    shifted = [value for value in range(256) if value not in printable]
    table = {chr(value): value for value in printable}
    return table | {chr(256 + index): value for index, value in enumerate(shifted)}


_BYTE_VALUES = _byte_values()


class TokenBytes:
    """Turns a token's spelling in the vocabulary into the bytes that it stands for."""

    __slots__ = ("_steps",)

    def __init__(self, tokenizer: Tokenizer) -> None:
        decoder: dict[str, Any] = json.loads(tokenizer.to_str()).get("decoder") or {}
        nested: list[dict[str, Any]] | None = decoder.get("decoders")
        self._steps = [decoder] if nested is None else nested

    def convert(self, piece: str) -> bytes:
        """Return the bytes of an ordinary (not added) token spelled `piece`."""
        for step in self._steps:
            kind = step.get("type")
            if kind == "Replace":
                piece = _replace(piece, step["pattern"], step["content"])
            elif kind == "Metaspace":
                piece = piece.replace(step["replacement"], " ")
            elif kind == "ByteFallback":
                match = _BYTE_PIECE.fullmatch(piece)
                if match:
                    return bytes([int(match[1], 16)])
            elif kind == "ByteLevel" and all(char in _BYTE_VALUES for char in piece):
                return bytes(_BYTE_VALUES[char] for char in piece)
        return piece.encode()


def _replace(piece: str, pattern: dict[str, str], content: str) -> str:
    if "String" in pattern:
        return piece.replace(pattern["String"], content)
    return re.sub(pattern["Regex"], lambda _: content, piece)
