"""Writes a checkpoint directory that appears whole or not at all.

Everything goes into `OUT.partial/`, which is renamed to `OUT` when the work has succeeded and
removed when it has not. Equal inputs give equal bytes: no times, no machine, a fixed order.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors.torch import save_file

from qinfer.checkpoint.durable import refuse_existing, writing
from qinfer.errors import CheckpointError, ConfigError

DEFAULT_SHARD_BYTES = 2 * 1024**3

# Tokenizer, template, sampling defaults and licence: what makes a reload behave the same.
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "LICENSE",
    "LICENSE.txt",
    "LICENSE.md",
    "NOTICE",
    "kv_conditioning.json",
)
_TEMPLATE_FOLDER = "additional_chat_templates"


class CheckpointWriter:
    """Collects tensors and files of a new checkpoint; use it in a `with` block.

    Args:
        out: the directory to make; it must not exist yet.
        max_shard_bytes: a shard is closed before its tensors exceed this.
    """

    def __init__(self, out: Path, *, max_shard_bytes: int = DEFAULT_SHARD_BYTES) -> None:
        refuse_existing(out)
        self.out = out
        self.partial = out.with_name(out.name + ".partial")
        self._max_shard_bytes = max_shard_bytes
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[tuple[Path, list[str]]] = []
        self._seen: set[str] = set()
        self._total_bytes = 0

    def __enter__(self) -> Self:
        try:
            if self.partial.exists():  # left by a run that was killed
                shutil.rmtree(self.partial)
            self.partial.mkdir(parents=True)
        except OSError as error:
            raise ConfigError(f"{self.partial} cannot be made: {error.strerror}") from error
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if exc_type is None:
                self._finish()
        finally:
            if self.partial.exists():
                shutil.rmtree(self.partial)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor; views are copied, so that no two share memory in the file.

        Raises:
            CheckpointError: the name was added before, or the disk is full.
        """
        if name in self._seen:
            raise CheckpointError(f"tensor {name} was added twice")
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self._max_shard_bytes:
            self._flush()
        copy = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        self._seen.add(name)
        self._pending[name] = copy
        self._pending_bytes += size
        self._total_bytes += size

    def write_json(self, name: str, data: Mapping[str, Any]) -> None:
        """Write an object as an indented JSON file in the order of its keys.

        Raises:
            CheckpointError: the file cannot be written.
        """
        write_json(self.partial / name, data)

    def copy_companions(self, source: Path) -> None:
        """Copy tokenizer, chat template, generation config and licence of a model directory.

        Raises:
            CheckpointError: a file cannot be written.
        """
        copy_companions(source, self.partial)

    def _flush(self) -> None:
        # save_file orders tensors by type and name; the number is known only at the end.
        file = self.partial / f"shard-{len(self._shards) + 1:05d}.safetensors"
        with writing(file):
            save_file(self._pending, file, metadata={"format": "pt"})
        self._shards.append((file, list(self._pending)))
        self._pending = {}
        self._pending_bytes = 0

    def _finish(self) -> None:
        if self._pending or not self._shards:
            self._flush()
        self._name_shards()
        for path in self.partial.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        if self.out.exists():
            raise ConfigError(f"{self.out} was made by something else meanwhile; nothing is kept")
        self.partial.rename(self.out)

    def _name_shards(self) -> None:
        finals = shard_files(self.partial, len(self._shards))
        weight_map: dict[str, str] = {}
        for (file, names), final in zip(self._shards, finals, strict=True):
            file.rename(final)
            weight_map |= dict.fromkeys(names, final.name)
        if len(finals) > 1:
            write_index(self.partial, weight_map, self._total_bytes)


def shard_files(folder: Path, count: int) -> list[Path]:
    """Return the files of `count` shards: `model.safetensors`, or numbered ones."""
    if count == 1:
        return [folder / "model.safetensors"]
    return [folder / f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]


def write_index(folder: Path, weight_map: Mapping[str, str], total_bytes: int) -> None:
    """Write which shard holds which tensor.

    Raises:
        CheckpointError: the file cannot be written.
    """
    index = {
        "metadata": {"total_size": total_bytes},
        "weight_map": dict(sorted(weight_map.items())),
    }
    write_json(folder / "model.safetensors.index.json", index)


def write_json(file: Path, data: Mapping[str, Any]) -> None:
    """Write an object as an indented JSON file in the order of its keys.

    Half a surrogate pair, which UTF-8 cannot spell, is written as JSON's escape, as it was read.

    Raises:
        CheckpointError: the file cannot be written.
    """
    text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
    with writing(file):
        file.write_text(text, encoding="utf-8", errors="backslashreplace")


def copy_companions(source: Path, folder: Path) -> None:
    """Copy tokenizer, chat template, generation config and licence of a model directory.

    Raises:
        CheckpointError: a file cannot be written.
    """
    for name in COMPANIONS:
        if (source / name).is_file():
            with writing(folder / name) as file:
                shutil.copyfile(source / name, file)
    if (source / _TEMPLATE_FOLDER).is_dir():
        with writing(folder / _TEMPLATE_FOLDER) as copy:
            shutil.copytree(source / _TEMPLATE_FOLDER, copy)
