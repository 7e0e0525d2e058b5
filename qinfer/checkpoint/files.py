"""Small reads of a model directory that must fail with the file's name and the reason."""

import json
from pathlib import Path
from typing import Any

from qinfer.errors import CheckpointError


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        CheckpointError: the file cannot be read, is no JSON, or holds no object.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} must hold a JSON object, found {type(data).__name__}")
    return data


def read_optional_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or an empty one if there is no such file."""
    return read_json(path) if path.is_file() else {}


def list_names(names: list[str], limit: int = 10) -> str:
    """Return at most `limit` names, one a line, and how many there are beyond them."""
    shown = "".join(f"\n  {name}" for name in names[:limit])
    more = len(names) - limit
    return shown + (f"\n  … and {more} more" if more > 0 else "")
