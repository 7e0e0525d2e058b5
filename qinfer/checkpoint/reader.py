"""A checkpoint directory as named tensors and facts, checked before the first tensor is read.

Tensors come one at a time, or some of their rows, in the type of the file and as memory of their
own. Files are read and never mapped, so that reading a model costs no more than what the caller
keeps. The reader knows nothing of architectures; which tensors a model needs is the caller's to
say.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from qinfer.checkpoint.files import list_names, read_json, read_optional_json
from qinfer.checkpoint.pickles import find_pickles, index_pickles, load_pickle
from qinfer.checkpoint.settings import read_kv_scheme, read_quantization
from qinfer.checkpoint.shards import TensorEntry, index_safetensors
from qinfer.errors import CheckpointError
from qinfer.formats.codebook import CodebookWeight
from qinfer.formats.gptq import detect_symmetric
from qinfer.formats.kv_scales import is_kv_scale
from qinfer.formats.table import FORMATS, Format, QuantizationSettings, parse_settings
from qinfer.formats.weight import QuantizedWeight
from qinfer.schemes import KVScheme

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """An opened model directory.

    Args:
        path: the directory.
        config: config.json.
        generation_config: generation_config.json, or an empty dictionary.
        quantization: how weights are quantized; None = not at all.
        kv_scheme: the KV-cache scheme that the checkpoint recommends, if any.
        entries: where each tensor lies.
    """

    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    quantization: QuantizationSettings | None
    kv_scheme: KVScheme | None
    entries: dict[str, TensorEntry]

    def names(self) -> list[str]:
        """Return the names of all tensors, sorted."""
        return sorted(self.entries)

    def has(self, name: str) -> bool:
        """Tell whether there is a tensor of this name."""
        return name in self.entries

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without reading it."""
        return self._entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Return a tensor's type in the file without reading it."""
        return self._entry(name).dtype

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors on disk."""
        return sum(entry.num_bytes for entry in self.entries.values())

    @property
    def is_pickled(self) -> bool:
        """Whether tensors lie in pickles, which are opened anew for each."""
        return any(entry.file.suffix != ".safetensors" for entry in self.entries.values())

    def is_quantized(self, prefix: str) -> bool:
        """Tell whether `weight(prefix)` is quantized, without reading it."""
        return self._format_of(prefix) is not None

    def tensor(self, name: str) -> torch.Tensor:
        """Read one tensor, in the type of the file, into memory of its own.

        Raises:
            CheckpointError: there is no such tensor, or its file cannot be read.
        """
        entry = self._entry(name)
        if entry.file.suffix != ".safetensors":
            return load_pickle(entry.file)[name].clone(memory_format=torch.contiguous_format)
        return _read(entry, name, entry.shape, entry.offset)

    def rows(self, name: str, begin: int, end: int) -> torch.Tensor:
        """Read rows `[begin, end)` of a tensor along its first dimension, as `tensor` does.

        Of pickles, whole tensors are cheaper (see `is_pickled`).

        Raises:
            CheckpointError: there is no such tensor, or its file cannot be read.
        """
        entry = self._entry(name)
        if entry.file.suffix != ".safetensors":
            return load_pickle(entry.file)[name][begin:end].clone()
        row_bytes = entry.num_bytes // max(1, entry.shape[0])
        shape = (end - begin, *entry.shape[1:])
        return _read(entry, name, shape, entry.offset + begin * row_bytes)

    def weight(
        self, prefix: str, *, in_features: int, out_features: int
    ) -> torch.Tensor | QuantizedWeight | CodebookWeight:
        """Read the weight of the linear layer `prefix`, quantized if the file has it so.

        Returns:
            `[out_features, in_features]` in the type of the file, or the quantized weight; float32
            where the file has codes of a kind that is dequantized when it is read.

        Raises:
            CheckpointError: a tensor is missing, damaged or of another shape.
        """
        fmt = self._format_of(prefix)
        if fmt is None:
            weight = self.tensor(f"{prefix}.weight")
            expected = (out_features, in_features)
            if tuple(weight.shape) != expected:
                raise CheckpointError(
                    f"{prefix}.weight has shape {tuple(weight.shape)}, expected {expected} from "
                    "config.json"
                )
            if not weight.dtype.is_floating_point:
                raise CheckpointError(
                    f"{prefix}.weight is {weight.dtype}, but no settings say what its codes mean"
                )
            return weight
        stored = self.quantization.module_format(prefix) if self.quantization else None
        if stored is None:
            raise CheckpointError(
                f"{prefix} is quantized in {self.path}, but its settings exclude this layer"
            )
        present = [*fmt.tensors, *(t for t in fmt.optional_tensors if self.has(f"{prefix}.{t}"))]
        return fmt.from_tensors(
            {part: self.tensor(f"{prefix}.{part}") for part in present},
            stored,
            in_features=in_features,
            out_features=out_features,
            name=prefix,
        )

    def weight_names(self, prefix: str) -> list[str]:
        """Return the tensors that `weight(prefix)` reads, for `check_names`."""
        fmt = self._format_of(prefix)
        if fmt is None:
            return [f"{prefix}.weight"]
        optional = [f"{prefix}.{part}" for part in fmt.optional_tensors]
        return [f"{prefix}.{part}" for part in fmt.tensors] + [n for n in optional if self.has(n)]

    def check_names(self, expected: Iterable[str]) -> list[str]:
        """Compare the tensors that a model needs with those that there are.

        Returns:
            The unexpected names, sorted; one line of warning is logged if there are any.

        Raises:
            CheckpointError: some are missing; the message counts them and lists at most ten.
        """
        wanted = set(expected)
        missing = sorted(wanted - self.entries.keys())
        if missing:
            raise CheckpointError(
                f"{len(missing)} of {len(wanted)} tensors that config.json calls for are missing "
                f"from {self.path}:{list_names(missing)}"
            )
        # Static scales of the cache are facts for other engines, not part of the model.
        unexpected = sorted(n for n in self.entries.keys() - wanted if not is_kv_scale(n))
        if unexpected:
            _log.warning(
                "%s holds %d tensors that the model does not use, such as %s",
                self.path, len(unexpected), unexpected[0],
            )  # fmt: skip
        return unexpected

    def _entry(self, name: str) -> TensorEntry:
        entry = self.entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self.path} has no tensor {name}")
        return entry

    def _format_of(self, prefix: str) -> Format | None:
        """Return the layout of a quantized layer, by the tensors there are and the settings."""
        if self.quantization is None:
            return None
        stored = self.quantization.module_format(prefix)
        if stored is None:  # tensors that only a quantized layer has contradict that
            layouts = [FORMATS[found.layout] for found in self.quantization.formats]
            return next((fmt for fmt in layouts if self._is_marked(prefix, fmt)), None)
        fmt = FORMATS[stored.layout]
        weight = self.entries.get(f"{prefix}.weight")
        dense = weight is not None and weight.dtype.is_floating_point
        return None if dense and not self._is_marked(prefix, fmt) else fmt

    def _is_marked(self, prefix: str, fmt: Format) -> bool:
        return any(self.has(f"{prefix}.{part}") for part in fmt.marks)


def open_checkpoint(path: Path, *, allow_pickle: bool = False) -> Checkpoint:
    """Open a model directory and check its files without reading tensors.

    Args:
        path: a directory in Hugging Face layout.
        allow_pickle: read `pytorch_model*.bin` where there are no safetensors.

    Raises:
        CheckpointError: a file is missing, truncated, damaged, unsafe, or contradicts another.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is no directory")
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{path} has no config.json; is it a model directory?")
    config = read_json(path / "config.json")
    if "auto_map" in config:
        _log.warning(
            "%s asks for code of its own (auto_map in config.json), which qinfer never runs; "
            "its built-in implementation is used",
            path,
        )
    entries = index_safetensors(path)
    if entries is None:
        entries = _pickled_entries(path, allow_pickle=allow_pickle)
    checkpoint = Checkpoint(
        path=path,
        config=config,
        generation_config=read_optional_json(path / "generation_config.json"),
        quantization=read_quantization(path, config, entries),
        kv_scheme=read_kv_scheme(config),
        entries=entries,
    )
    return _with_symmetry(checkpoint)


def _read(entry: TensorEntry, name: str, shape: tuple[int, ...], offset: int) -> torch.Tensor:
    """Return a tensor whose values begin at byte `offset` of the file."""
    tensor = torch.empty(shape, dtype=entry.dtype)
    room = tensor.flatten().view(torch.uint8).numpy().data
    try:
        with entry.file.open("rb", buffering=0) as file:
            file.seek(offset)
            while room:
                count = file.readinto(room)
                if not count:
                    raise CheckpointError(
                        f"{entry.file}: tensor {name} cannot be read: the file became shorter "
                        "after it was opened"
                    )
                room = room[count:]
    except OSError as error:
        raise CheckpointError(f"{entry.file}: tensor {name} cannot be read: {error}") from error
    return tensor


def _pickled_entries(path: Path, *, allow_pickle: bool) -> dict[str, TensorEntry]:
    source = find_pickles(path)
    if source is None:
        raise CheckpointError(f"{path} holds no weights: no *.safetensors file was found")
    if not allow_pickle:
        raise CheckpointError(
            f"{path} has its weights in pickles only ({source.name}), which can run code when "
            "they are loaded; if you trust them, convert them once: "
            f"qinfer convert {path} -o OUT --allow-pickle"
        )
    return index_pickles(source)


def _with_symmetry(checkpoint: Checkpoint) -> Checkpoint:
    """Find out from the zero points whether weights are symmetric where the settings are silent."""
    settings = checkpoint.quantization
    if settings is None or settings.method != "gptq" or settings.raw.get("sym") is not None:
        return checkpoint
    name = next((name for name in checkpoint.names() if name.endswith(".qzeros")), None)
    scheme = settings.scheme_for(name.removesuffix(".qzeros")) if name else None
    if name is None or scheme is None:
        return checkpoint
    if len(checkpoint.shape(name)) != 2 or checkpoint.dtype(name) != torch.int32:
        return checkpoint  # refused when it is read
    if detect_symmetric(checkpoint.tensor(name), scheme.bits):
        return checkpoint
    asymmetric = parse_settings({**settings.raw, "sym": False})
    return replace(checkpoint, quantization=replace(asymmetric, raw=settings.raw))
