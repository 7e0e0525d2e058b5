"""JSON files: strict reading into dataclasses, atomic writing. It knows no particular record."""

import json
import os
import tempfile
import types
import typing
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from qinfer.errors import ConfigError

Record = TypeVar("Record")


def read_record(cls: type[Record], data: object, *, kind: str, version: int) -> Record:
    """Build a record class from JSON data after checking its kind and version.

    Raises:
        ConfigError: another kind or version, a missing or unknown field, or a wrong type.
    """
    if not isinstance(data, dict) or data.get("kind") != kind:
        raise ConfigError(f"this is no qinfer {kind} record: its field `kind` is not {kind!r}")
    if data.get("format_version") != version:
        raise ConfigError(
            f"the record has format_version {data.get('format_version')!r}; "
            f"this version of qinfer reads {version}"
        )
    return build(cls, data, where=kind)


def build(cls: type[Record], data: object, *, where: str) -> Record:
    """Build a dataclass from JSON data by its annotations; every field must be there.

    Args:
        cls: the dataclass; fields may be numbers, strings, tuples, dicts, optional or dataclasses.
        data: what `json.loads` gave, or `dataclasses.asdict`.
        where: name of the whole, for messages.

    Raises:
        ConfigError: a missing or unknown field, or a wrong type; the message names the field.
    """
    result = _build(cls, data, where)
    if not isinstance(result, cls):
        raise TypeError(f"{cls.__name__} is no dataclass")
    return result


def dump_json(data: dict[str, Any]) -> str:
    """Return readable JSON that UTF-8 can spell; NaN and infinity are refused: JSON has neither."""
    text = json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    # Of halves of surrogate pairs (names of files that are no UTF-8) this makes JSON's escapes.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def load_json(path: Path) -> object:
    """Read a JSON file.

    Raises:
        ConfigError: it cannot be read or is no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error


def write_atomic(path: Path, text: str) -> None:
    """Write a text file under a temporary name beside it, then rename.

    Readers see the old file or the new one, never a part.

    Raises:
        ConfigError: the folder does not exist, or the file cannot be written.
    """
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        _fill(handle, Path(temporary), text, path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def _fill(handle: int, temporary: Path, text: str, path: Path) -> None:
    """Write the temporary file and give it its name; it is gone if that fails."""
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        temporary.chmod(0o644)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _build(kind: Any, value: object, where: str) -> object:
    """Turn JSON data into the annotated type `kind`; `where` names the field for messages."""
    origin = typing.get_origin(kind)
    if kind is Any:
        return value
    if origin is types.UnionType:
        options = typing.get_args(kind)
        if value is None and type(None) in options:
            return None
        return _build(next(o for o in options if o is not type(None)), value, where)
    if origin is tuple:
        return _build_tuple(typing.get_args(kind), value, where)
    if origin is dict:
        if not isinstance(value, dict):
            raise _wrong(where, "an object", value)
        item = typing.get_args(kind)[1]
        return {key: _build(item, entry, f"{where}.{key}") for key, entry in value.items()}
    if is_dataclass(kind) and isinstance(kind, type):
        return _build_dataclass(kind, value, where)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise _wrong(where, kind.__name__, value)
    return value


def _build_tuple(items: tuple[Any, ...], value: object, where: str) -> tuple[object, ...]:
    if not isinstance(value, list | tuple):
        raise _wrong(where, "a list", value)
    if items[-1] is not Ellipsis and len(items) != len(value):
        raise _wrong(where, f"a list of {len(items)}", value)
    return tuple(_build(items[0], entry, f"{where}[{i}]") for i, entry in enumerate(value))


def _build_dataclass(kind: type, value: object, where: str) -> object:
    if not isinstance(value, dict):
        raise _wrong(where, "an object", value)
    names = {item.name for item in fields(kind)}
    if names != set(value):
        unknown, missing = sorted(set(value) - names), sorted(names - set(value))
        raise ConfigError(f"{where}: unknown fields {unknown}, missing fields {missing}")
    hints = typing.get_type_hints(kind)
    return kind(**{name: _build(hints[name], value[name], f"{where}.{name}") for name in names})


def _wrong(where: str, expected: str, value: object) -> ConfigError:
    return ConfigError(f"{where} should be {expected}, not {str(value)[:60]!r}")
