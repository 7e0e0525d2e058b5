"""Tool calls found in generated text while it streams, in the spellings of the common templates.

A parser takes the text piece by piece and answers with what became certain: plain text, the start
of a call, more of its arguments. How the text is cut makes no difference, so a streamed answer and
a whole one hold the same calls. What looks like a call and turns out to be none stays text.
"""

import json
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final, Protocol


@dataclass(frozen=True, slots=True)
class Said:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Called:
    """A call, or what was added to the arguments of call `index`; `name` only at its start."""

    index: int
    arguments: str
    name: str | None = None


Piece = Said | Called


class CallParser(Protocol):
    """Finds calls in text."""

    def push(self, text: str) -> list[Piece]:
        """Take in text and return what became certain."""

    def finish(self) -> list[Piece]:
        """Return what was held back, at the end of the text."""


@dataclass(frozen=True, slots=True)
class Family:
    """How a family of templates spells calls: JSON objects with a name and arguments.

    Args:
        name: as in `--tool-call-parser`.
        marker: what goes before a call, or before a list of them; "" = nothing.
        end: what goes after a call; "" = nothing.
        bare: the text may also begin with a call that has no marker. Its name must then be one of
            the tools, or it is JSON of another kind.
        named: `name{...}` may stand after the marker in place of an object with both.
        special: the marker is a special token, which must not be left out of the text.
    """

    name: str
    marker: str = ""
    end: str = ""
    bare: bool = False
    named: bool = False
    special: bool = False


HERMES: Final = Family("hermes", marker="<tool_call>", end="</tool_call>")
LLAMA: Final = Family("llama3_json", marker="<|python_tag|>", bare=True, special=True)
MISTRAL: Final = Family("mistral", marker="[TOOL_CALLS]", named=True, special=True)
PLAIN_JSON: Final = Family("json", bare=True)
FAMILIES: Final = {family.name: family for family in (HERMES, LLAMA, MISTRAL, PLAIN_JSON)}


def family_of(template: str) -> Family:
    """Return the family whose spelling a chat template shows; plain JSON if none."""
    for family in (HERMES, MISTRAL):
        if family.marker in template:
            return family
    llama = LLAMA.marker in template or ('"parameters"' in template and "ipython" in template)
    return LLAMA if llama else PLAIN_JSON


class _Nesting:
    """Tells where in JSON a character stands."""

    def __init__(self) -> None:
        self.depth = 0
        self.in_string = False
        self._escaped = False

    def push(self, char: str) -> None:
        if self.in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            else:
                self.in_string = char != '"'
        elif char == '"':
            self.in_string = True
        elif char in "{[":
            self.depth += 1
        elif char in "}]":
            self.depth -= 1


class _Object:
    """Reads one object `{"name": ..., "arguments": {...}}`, from its opening brace on.

    Args:
        index: of the call.
        names: those that a call may have; None = any.
    """

    def __init__(self, index: int, names: Collection[str] | None) -> None:
        self.raw = ""
        self.name: str | None = None
        self.closed = False
        self._index = index
        self._names = names
        self._nesting = _Nesting()
        self._key: str | None = None
        self._token = ""  # the key or value that is being read
        self._arguments = ""  # not yet passed on
        self._any_arguments = False

    @property
    def started(self) -> bool:
        """Whether it is a call for certain."""
        return self.name is not None

    def push(self, char: str) -> list[Piece]:
        """Take in one character."""
        nesting = self._nesting
        depth, quoted = nesting.depth, nesting.in_string
        nesting.push(char)
        self.raw += char
        if nesting.depth == 0:
            self.closed = True
            return self._member_ends() + self._ends()
        if depth == 0:
            return []
        if depth == 1 and not quoted and char == "," and nesting.depth == 1:
            return self._member_ends()
        if self._key is None:
            if depth == 1 and not quoted and char == ":":
                self._key, self._token = _text(self._token), ""
            else:
                self._token += char
            return []
        self._token += char
        inside = depth > 1 or nesting.depth > 1
        if self._key in ("arguments", "parameters") and inside:
            self._arguments += char
            return self._pass_on()
        return []

    def _member_ends(self) -> list[Piece]:
        key, value = self._key, self._token.strip()
        self._key, self._token = None, ""
        if key == "name":
            name = _text(value)
            if name and (self._names is None or name in self._names):
                self.name = name
        elif key in ("arguments", "parameters"):
            self._any_arguments = True
            if value.startswith('"'):  # JSON within a string
                self._arguments += _text(value) or "{}"
            elif not value.startswith(("{", "[")):
                self._arguments += "{}"  # null
        return self._pass_on()

    def _ends(self) -> list[Piece]:
        if not self._any_arguments:
            self._arguments += "{}"
        return self._pass_on()

    def _pass_on(self) -> list[Piece]:
        if self.name is None or not self._arguments:
            return []
        text, self._arguments = self._arguments, ""
        return [Called(self._index, text, self.name)]


class _State(Enum):
    START = auto()  # nothing but white space so far, where a call needs no marker
    TEXT = auto()
    OPEN = auto()  # after a marker, or between the calls of a list
    NAME = auto()
    OBJECT = auto()
    VALUE = auto()  # arguments after a name
    AFTER = auto()  # after a call


class FamilyParser:
    """Finds the calls of one family.

    Args:
        family: how they are spelled.
        names: of the tools.
        max_calls: further ones are left out; None = no limit.
    """

    def __init__(
        self, family: Family, names: Collection[str], *, max_calls: int | None = None
    ) -> None:
        self._family = family
        self._names = names
        self._max_calls = max_calls
        self._state = _State.START if family.bare else _State.TEXT
        self._raw = ""  # what is held back, to be shown if it is no call
        self._space = ""  # white space that is shown only if text follows
        self._in_list = False
        self._object: _Object | None = None
        self._nesting = _Nesting()
        self._num_calls = 0
        self._opened = -1  # the call whose start was passed on
        self._steps = {
            _State.START: self._start,
            _State.TEXT: self._text,
            _State.OPEN: self._open,
            _State.NAME: self._name,
            _State.OBJECT: self._in_object,
            _State.VALUE: self._value,
            _State.AFTER: self._after,
        }

    def push(self, text: str) -> list[Piece]:
        """Take in text and return what became certain."""
        pieces: list[Piece] = []
        marker = self._family.marker
        if self._state is _State.TEXT and not self._raw and not (marker and marker[0] in text):
            return self._join(self._say(text))  # the usual case, at once
        for char in text:
            pieces += self._steps[self._state](char)
        return self._join(pieces)

    def finish(self) -> list[Piece]:
        """Return what was held back, at the end of the text."""
        pieces: list[Piece] = []
        call = self._object
        if self._state is _State.OBJECT and call is not None:
            if not call.started:
                pieces = self._say(self._raw + call.raw)
        elif self._state in (_State.START, _State.TEXT, _State.NAME) or not self._num_calls:
            pieces = self._say(self._raw)
        if self._num_calls == 0 and self._space:
            pieces.append(Said(self._space))
        return self._join(pieces)

    def _start(self, char: str) -> list[Piece]:
        if char.isspace():
            self._raw += char
            return []
        if char in "{[":
            self._state = _State.OPEN
            return self._open(char)
        return self._back_to_text(char)

    def _text(self, char: str) -> list[Piece]:
        self._raw += char
        marker = self._family.marker
        if marker and self._raw.endswith(marker):
            said = self._say(self._raw[: -len(marker)])
            self._raw, self._state = marker, _State.OPEN
            return said
        keep = _overlap(self._raw, marker)
        said = self._say(self._raw[: len(self._raw) - keep])
        self._raw = self._raw[len(self._raw) - keep :]
        return said

    def _open(self, char: str) -> list[Piece]:
        if char == "{":
            names = self._names if self._family.bare else None
            self._object = _Object(self._num_calls, names)
            self._state = _State.OBJECT
            return self._in_object(char)
        if char.isspace() or (char == "[" and not self._in_list):
            self._in_list = self._in_list or char == "["
            self._raw += char
            return []
        if self._family.named and not self._in_list:
            self._state = _State.NAME
            return self._name(char)
        return self._back_to_text(char)

    def _name(self, char: str) -> list[Piece]:
        self._raw += char
        if char != "{":
            return []
        name = self._raw.removeprefix(self._family.marker)[:-1].partition("[")[0].strip()
        self._nesting = _Nesting()
        self._state = _State.VALUE
        self._num_calls += 1
        self._raw = ""
        return [Called(self._num_calls - 1, "", name), *self._value(char)]

    def _value(self, char: str) -> list[Piece]:
        self._nesting.push(char)
        if self._nesting.depth == 0:
            self._state = _State.AFTER
        return [Called(self._num_calls - 1, char)]

    def _in_object(self, char: str) -> list[Piece]:
        call = self._object
        assert call is not None
        pieces = call.push(char)
        if not call.closed:
            return pieces
        self._object = None
        if not call.started:
            self._raw += call.raw
            return self._back_to_text("")
        self._num_calls += 1
        self._raw, self._state = "", _State.AFTER
        return pieces

    def _after(self, char: str) -> list[Piece]:
        self._raw += char
        found = self._raw.strip()
        if not found:
            return []
        if found == (self._family.end or "]") or (found == "]" and self._in_list):
            self._raw, self._in_list, self._state = "", False, _State.TEXT
            return []
        if found in (",", ";") and (self._in_list or self._family.bare):
            self._raw, self._state = "", _State.OPEN
            return []
        if found == "{" and self._family.bare:
            self._raw, self._state = "", _State.OPEN
            return self._open(char)
        if self._family.end.startswith(found):
            return []
        return self._back_to_text("")

    def _back_to_text(self, char: str) -> list[Piece]:
        """Show what was held back as text, in which a marker may stand."""
        held, self._raw = self._raw + char, ""
        self._in_list, self._state = False, _State.TEXT
        marker = self._family.marker
        if marker and held.startswith(marker):
            return self._say(marker) + [p for c in held[len(marker) :] for p in self._text(c)]
        return [piece for c in held for piece in self._text(c)]

    def _say(self, text: str) -> list[Piece]:
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        return [Said(shown)] if shown else []

    def _join(self, pieces: list[Piece]) -> list[Piece]:
        """Join what belongs together, leave out calls over the limit, name each call once."""
        joined: list[Piece] = []
        for piece in pieces:
            last = joined[-1] if joined else None
            if isinstance(piece, Said):
                if isinstance(last, Said):
                    joined[-1] = Said(last.text + piece.text)
                else:
                    joined.append(piece)
                continue
            if self._max_calls is not None and piece.index >= self._max_calls:
                continue
            if isinstance(last, Called) and last.index == piece.index:
                joined[-1] = Called(last.index, last.arguments + piece.arguments, last.name)
                continue
            name = piece.name if piece.index > self._opened else None
            self._opened = max(self._opened, piece.index)
            joined.append(Called(piece.index, piece.arguments, name))
        return joined


@dataclass(slots=True)
class ForcedCall:
    """Takes the whole text as the arguments of one call, whose name is known beforehand."""

    name: str
    _begun: bool = field(default=False, init=False)

    def push(self, text: str) -> list[Piece]:
        """Take in text and return what became certain."""
        if not text:
            return []
        name = None if self._begun else self.name
        self._begun = True
        return [Called(0, text, name)]

    def finish(self) -> list[Piece]:
        """Return the call even if there was no text."""
        return [] if self._begun else [Called(0, "", self.name)]


def _text(token: str) -> str | None:
    """Return the text that a JSON string spells; None if it is no string."""
    try:
        value = json.loads(token)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def _overlap(text: str, marker: str) -> int:
    """Return how many characters at the end of `text` may begin `marker`."""
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0
