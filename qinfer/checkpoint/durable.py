"""Writing that survives a crash: all bytes or an error that names the file, then a rename.

A file counts once `publish` has returned: its bytes are on the disk, under its final name.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from qinfer.errors import CheckpointError, ConfigError

Buffer = bytes | memoryview


@contextmanager
def writing(file: Path) -> Iterator[Path]:
    """Name the file when writing it fails, be it a full disk.

    Raises:
        CheckpointError: in the place of an OSError.
    """
    try:
        yield file
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise CheckpointError(f"{file} cannot be written: {reason or error}") from error


def refuse_existing(out: Path) -> None:
    """Refuse a path that exists.

    Raises:
        ConfigError: it does.
    """
    if out.exists():
        raise ConfigError(f"{out} exists already; choose another output or remove it first")


def write_all(descriptor: int, data: Buffer) -> None:
    """Write all bytes at the place of the file where it stands."""
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def publish(temporary: Path, final: Path) -> None:
    """Make sure that the bytes of a file are on the disk, then give it its final name.

    Raises:
        CheckpointError: it cannot be done.
    """
    with writing(final):
        descriptor = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.replace(final)
        sync_folder(final.parent)


def write_durably(file: Path, data: bytes) -> None:
    """Write a small file so that after a crash it is there whole or not at all.

    Raises:
        CheckpointError: it cannot be written.
    """
    temporary = file.with_name(f"{file.name}.tmp")
    with writing(file):
        temporary.write_bytes(data)
    publish(temporary, file)


def sync_folder(folder: Path) -> None:
    """Make sure that the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
