"""JSON of several megabytes, written without holding up the other threads.

Pydantic and `json` keep the interpreter's lock while they write one value, however large. Here
long lists are written in slices, between which other threads run: for answers with a
log-probability for everything, and for lists of token ids.
"""

import json
from collections.abc import Iterator
from typing import Any, Final

from pydantic import BaseModel

SLICE: Final = 512  # items of a list that are written at once: a millisecond or two


def dumps(model: BaseModel, *, exclude: frozenset[str] = frozenset()) -> str:
    """Return the JSON of a model, as `model_dump_json` does.

    Args:
        model: holds models, lists, dictionaries and plain values.
        exclude: names of fields at the top that are left out.
    """
    return "".join(_model(model, exclude))


def _model(model: BaseModel, exclude: frozenset[str] = frozenset()) -> Iterator[str]:
    fields = type(model).model_fields
    shown = (
        (name, value)
        for name, value in model
        if name not in exclude and not _is_hidden(fields[name].exclude_if, value)
    )
    return _members(shown)


def _is_hidden(rule: Any, value: Any) -> bool:
    return rule is not None and bool(rule(value))


def _members(items: Any) -> Iterator[str]:
    yield "{"
    for number, (name, value) in enumerate(items):
        yield f"{',' if number else ''}{json.dumps(name)}:"
        yield from _value(value)
    yield "}"


def _value(value: Any) -> Iterator[str]:
    if isinstance(value, BaseModel):
        yield from _model(value)
    elif isinstance(value, dict):
        yield from _members(value.items())
    elif isinstance(value, list):
        yield from _list(value)
    else:
        yield json.dumps(value, ensure_ascii=False)


def _list(values: list[Any]) -> Iterator[str]:
    yield "["
    for start in range(0, len(values), SLICE):
        part = values[start : start + SLICE]
        if start:
            yield ","
        if any(isinstance(value, BaseModel | dict | list) for value in part):
            yield ",".join("".join(_value(value)) for value in part)
        else:
            yield json.dumps(part, ensure_ascii=False, separators=(",", ":"))[1:-1]
    yield "]"
