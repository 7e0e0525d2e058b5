"""JSON of several megabytes, parsed without holding up the other threads.

`json.loads` keeps the interpreter's lock from its first character to its last: 0.1 to 0.5 s for
4 MB, whatever thread it runs in, and the event loop waits for it. Here the structure is walked in
Python, which gives the lock away every few milliseconds, and what there is a lot of (runs of
numbers and short texts, long texts) goes to C in bounded pieces. The result is `json.loads`'s.
"""

import json
import re
from json import JSONDecodeError
from typing import Any

PIECE = 32 * 1024  # characters that C gets at once: about a millisecond
MAX_DEPTH = 200
MAX_CONTAINERS = 65_536  # objects and lists that hold others, or long texts

_SPACE = re.compile(r"[ \t\n\r]*+")
_STRING_PART = re.compile(r'(?:[^"\\\x00-\x1f]++|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*+')
_S = r"[ \t\n\r]*+"
_SHORT = r'"[^"\\\x00-\x1f]{0,256}+"'
_SCALAR = (
    r"(?:-?(?:0|[1-9][0-9]{0,99}+)(?:\.[0-9]{1,99}+)?+(?:[eE][-+]?[0-9]{1,9}+)?+|true|false|null"
    rf"|{_SHORT})"
)
_MEMBER = rf"{_SHORT}{_S}:{_S}{_SCALAR}"
_LIST = rf"\[{_S}(?:{_SCALAR}{_S}(?:,{_S}{_SCALAR}{_S})*+)?+\]"
_OBJECT = rf"\{{{_S}(?:{_MEMBER}{_S}(?:,{_S}{_MEMBER}{_S})*+)?+\}}"
_FLAT = rf"(?:{_SCALAR}|{_LIST}|{_OBJECT})"
# As many items of a list, or members of an object, as there are up to the place where to end.
_ITEMS = re.compile(rf"(?:{_S}{_FLAT}{_S},)++")
_MEMBERS = re.compile(rf"(?:{_S}{_SHORT}{_S}:{_S}{_FLAT}{_S},)++")
_OTHER = re.compile(r"[^ \t\n\r,:\]}\[{\"]{0,5000}+")


def loads(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is no JSON (a JSONDecodeError, with the place), or nested too deeply.
    """
    walk = _Walk(text)
    value, end = walk.value(0, 0)
    end = walk.skip(end)
    if end != len(text):
        raise JSONDecodeError("Extra data", text, end)
    return value


class _Walk:
    """One pass over a text; every method takes a position and returns the one after."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._containers = 0

    def skip(self, at: int) -> int:
        match = _SPACE.match(self._text, at)
        return at if match is None else match.end()

    def value(self, at: int, depth: int) -> tuple[Any, int]:
        at = self.skip(at)
        first = self._text[at : at + 1]
        if first == '"':
            return self._string(at + 1)
        if first and first in "[{":
            self._containers += 1
            if depth >= MAX_DEPTH:
                raise JSONDecodeError(f"nested deeper than {MAX_DEPTH} levels", self._text, at)
            if self._containers > MAX_CONTAINERS:
                raise JSONDecodeError(
                    f"more than {MAX_CONTAINERS} nested objects and lists", self._text, at
                )
            inside = self._array if first == "[" else self._object
            return inside(at + 1, depth + 1)
        return self._other(at)

    def _other(self, at: int) -> tuple[Any, int]:
        match = _OTHER.match(self._text, at)
        assert match is not None  # it may be empty
        if not match[0]:
            raise JSONDecodeError("Expecting value", self._text, at)
        try:
            return json.loads(match[0]), match.end()
        except JSONDecodeError as error:
            raise JSONDecodeError(error.msg, self._text, at + error.pos) from None

    def _string(self, start: int) -> tuple[str, int]:
        """Read a string from after its opening quote."""
        text, at = self._text, start
        pieces: list[str] = []
        while text[at : at + 1] != '"':
            match = _STRING_PART.match(text, at, at + PIECE)
            assert match is not None  # it may be empty
            if match.end() == at:
                message = (
                    "Unterminated string" if at >= len(text) else "Invalid character or escape"
                )
                raise JSONDecodeError(message, text, min(at, len(text)))
            at = match.end()
            pieces.append(json.loads(f'"{match[0]}"'))
        return _join(pieces), at + 1

    def _array(self, at: int, depth: int) -> tuple[list[Any], int]:
        values: list[Any] = []
        if self._next(at) == "]":
            return values, self.skip(at) + 1
        while True:
            run = _ITEMS.match(self._text, at, at + PIECE)
            if run is not None:
                values += json.loads(f"[{run[0][:-1]}]")
                at = run.end()
                continue
            value, at = self.value(at, depth)
            values.append(value)
            at, ended = self._separator(at, "]")
            if ended:
                return values, at

    def _object(self, at: int, depth: int) -> tuple[dict[str, Any], int]:
        values: dict[str, Any] = {}
        if self._next(at) == "}":
            return values, self.skip(at) + 1
        while True:
            run = _MEMBERS.match(self._text, at, at + PIECE)
            if run is not None:
                values |= json.loads(f"{{{run[0][:-1]}}}")
                at = run.end()
                continue
            at = self.skip(at)
            if self._text[at : at + 1] != '"':
                raise JSONDecodeError(
                    "Expecting property name enclosed in double quotes", self._text, at
                )
            name, at = self._string(at + 1)
            if self._next(at) != ":":
                raise JSONDecodeError("Expecting ':' delimiter", self._text, self.skip(at))
            values[name], at = self.value(self.skip(at) + 1, depth)
            at, ended = self._separator(at, "}")
            if ended:
                return values, at

    def _separator(self, at: int, end: str) -> tuple[int, bool]:
        at = self.skip(at)
        found = self._text[at : at + 1]
        if found not in {",", end}:
            raise JSONDecodeError("Expecting ',' delimiter", self._text, at)
        return at + 1, found == end

    def _next(self, at: int) -> str:
        at = self.skip(at)
        return self._text[at : at + 1]


def _join(pieces: list[str]) -> str:
    """Join the pieces of a string; a surrogate pair may have been cut in two."""
    for index in range(1, len(pieces)):
        high, low = pieces[index - 1][-1:], pieces[index][:1]
        if "\ud800" <= high <= "\udbff" and "\udc00" <= low <= "\udfff":
            pair = (high + low).encode("utf-16", "surrogatepass").decode("utf-16")
            pieces[index - 1] = pieces[index - 1][:-1]
            pieces[index] = pair + pieces[index][1:]
    return "".join(pieces)
