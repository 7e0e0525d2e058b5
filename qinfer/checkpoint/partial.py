"""Unfinished work beside the checkpoint that it will become, so that it can be continued.

`OUT.partial/` belongs to one process at a time, which holds a lock on the folder itself, and to
one fingerprint: what was computed from other inputs is never mixed in. A block counts as finished
when its file has its final name. The finished checkpoint is assembled in `OUT.partial/result` and
then renamed to `OUT`.
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from qinfer.checkpoint.durable import (
    publish,
    refuse_existing,
    sync_folder,
    write_durably,
    writing,
)
from qinfer.checkpoint.shards import TensorEntry, read_header
from qinfer.checkpoint.tensor_file import Piece, read_metadata, write_tensors
from qinfer.errors import CheckpointError, ConfigError

FINGERPRINT_NAME = "run.json"
RESULT_NAME = "result"
_NOTE = "note-"
_BLOCK = re.compile(r"block-(\d{5})\.safetensors")
_FACTS = "qinfer_block"
_MAX_LISTED = 5


class PartialDirectory:
    """The folder `OUT.partial`, locked; use it in a `with` block.

    When the block ends by an error, the folder stays if a finished block or a note is in it.

    Args:
        out: the checkpoint that it will become; it must not exist yet.
        restart: forget what another run left.

    Raises:
        ConfigError: `out` exists.
    """

    def __init__(self, out: Path, *, restart: bool = False) -> None:
        refuse_existing(out)
        self.out = out
        self.path = out.with_name(out.name + ".partial")
        self._restart = restart
        self._lock: int | None = None
        self._owned = False

    def __enter__(self) -> Self:
        """Make the folder and lock it.

        Raises:
            ConfigError: it cannot be made, or another process works in it.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._unlock()
            raise ConfigError(
                f"another process is working in {self.path}; wait for it or choose another output"
            ) from error
        except OSError as error:
            self._unlock()
            raise ConfigError(f"{self.path} cannot be made: {error.strerror}") from error
        if self.out.exists():  # it was finished by the process that held the lock
            self._unlock()
            refuse_existing(self.out)
        if self._restart:
            self._clear()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Unlock; remove the folder if nothing in it is worth keeping."""
        try:
            if self.path.exists():
                notes = self.path.glob(f"{_NOTE}*")
                if self._owned and not self.finished_blocks() and not any(notes):
                    self._clear()
                if not any(self.path.iterdir()):
                    self.path.rmdir()
        finally:
            self._unlock()

    def claim(self, fingerprint: Mapping[str, Any]) -> None:
        """Take over what a run with the same fingerprint left, or begin.

        Args:
            fingerprint: of everything that decides the result; JSON values.

        Raises:
            ConfigError: what is there belongs to another run; names what differs.
            CheckpointError: it cannot be written.
        """
        file = self.path / FINGERPRINT_NAME
        own = json.loads(json.dumps(fingerprint))
        if file.exists():
            differing = _differences(_read_json(file), own)
            if differing:
                raise ConfigError(
                    f"{self.path} holds unfinished work of another run, which differs in "
                    f"{_listing(differing)}; run that command again to continue it, or start over "
                    "with --restart (or remove the directory)"
                )
        else:
            self._clear()
            write_durably(file, (json.dumps(own, indent=2) + "\n").encode())
        self._owned = True

    def block_file(self, index: int) -> Path:
        """Return where a finished block lies."""
        return self.path / f"block-{index:05d}.safetensors"

    def finished_blocks(self) -> set[int]:
        """Return the blocks whose files are there."""
        matches = (_BLOCK.fullmatch(file.name) for file in self.path.iterdir())
        return {int(match[1]) for match in matches if match}

    def write_block(self, index: int, pieces: Iterable[Piece], facts: Mapping[str, Any]) -> None:
        """Make a block durable: its tensors, and JSON facts about them.

        Raises:
            CheckpointError: it cannot be written.
        """
        final = self.block_file(index)
        temporary = final.with_name(f"{final.name}.tmp")
        write_tensors(temporary, pieces, metadata={_FACTS: json.dumps(facts)})
        publish(temporary, final)

    def block_facts(self, index: int) -> dict[str, Any]:
        """Return the facts of a finished block.

        Raises:
            CheckpointError: its file is damaged.
        """
        facts: dict[str, Any] = json.loads(read_metadata(self.block_file(index))[_FACTS])
        return facts

    def block_entries(self, index: int) -> dict[str, TensorEntry]:
        """Return where the tensors of a finished block lie.

        Raises:
            CheckpointError: its file is damaged.
        """
        return read_header(self.block_file(index))

    def write_note(self, name: str, data: Any) -> None:
        """Make a JSON value durable, for a later run to read.

        Raises:
            CheckpointError: it cannot be written.
        """
        write_durably(self._note(name), json.dumps(data).encode())

    def read_note(self, name: str) -> Any:
        """Return a value that `write_note` wrote; None if there is none."""
        file = self._note(name)
        return _read_json(file) if file.exists() else None

    def _note(self, name: str) -> Path:
        return self.path / f"{_NOTE}{name}.json"

    def begin_result(self) -> Path:
        """Return the empty folder to put the finished checkpoint into.

        Raises:
            CheckpointError: it cannot be made.
        """
        folder = self.path / RESULT_NAME
        with writing(folder):
            if folder.exists():
                shutil.rmtree(folder)
            folder.mkdir()
        return folder

    def publish_result(self) -> None:
        """Rename the finished checkpoint to `out`, and remove everything else.

        Raises:
            ConfigError: something else made `out` meanwhile.
            CheckpointError: it cannot be done.
        """
        folder = self.path / RESULT_NAME
        with writing(folder):
            for file in folder.rglob("*"):
                file.chmod(0o755 if file.is_dir() else 0o644)
                descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
                os.fsync(descriptor)
                os.close(descriptor)
            sync_folder(folder)
        refuse_existing(self.out)
        with writing(self.out):
            folder.rename(self.out)
        with contextlib.suppress(OSError, CheckpointError):  # the checkpoint is complete
            sync_folder(self.out.parent)
            self._clear()
            self.path.rmdir()

    def _clear(self) -> None:
        with writing(self.path):
            for item in self.path.iterdir():
                if item.is_dir():
                    shutil.rmtree(item)
                else:
                    item.unlink()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


def _differences(there: Any, here: Any, path: str = "") -> list[str]:
    """Return one line for every value that differs, by its dotted path."""
    if isinstance(there, dict) and isinstance(here, dict):
        return [
            line
            for key in dict.fromkeys([*there, *here])
            for line in _differences(there.get(key), here.get(key), f"{path}.{key}".lstrip("."))
        ]
    return [] if there == here else [f"{path} ({_short(there)} there, {_short(here)} here)"]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _listing(lines: list[str]) -> str:
    more = len(lines) - _MAX_LISTED
    return ", ".join(lines[:_MAX_LISTED]) + (f" and {more} more" if more > 0 else "")
