"""What a checkpoint is made of: parameters and bytes by part, types, and quantization schemes.

Everything comes from file headers and settings; no tensor is read.
"""

import re
from collections import Counter
from dataclasses import dataclass

from qinfer.checkpoint.reader import Checkpoint
from qinfer.formats.table import FORMATS, split_name

PARTS = ("embedding", "attention", "mlp", "experts", "router", "norm", "head", "other")
_PATTERNS = (
    (re.compile(r"norm\.|norm$"), "norm"),
    (re.compile(r"embed_tokens"), "embedding"),
    (re.compile(r"^lm_head"), "head"),
    (re.compile(r"self_attn"), "attention"),
    (re.compile(r"\.experts\."), "experts"),
    (re.compile(r"\.(?:mlp|block_sparse_moe)\.gate\."), "router"),
    (re.compile(r"\.mlp\."), "mlp"),
)
_LINEAR = re.compile(r"(?:_proj|\.experts\.\d+\.w[123])\.weight$")


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a model.

    Args:
        name: one of `PARTS`.
        parameters: weights as the model sees them; scales and zero points do not count.
        num_bytes: bytes on disk, scales and zero points included.
    """

    name: str
    parameters: int
    num_bytes: int

    @property
    def bits_per_weight(self) -> float:
        """Bits on disk per parameter."""
        return 8 * self.num_bytes / self.parameters if self.parameters else 0.0


@dataclass(frozen=True, slots=True)
class Description:
    """What `describe` found.

    Args:
        parts: those that exist, in the order of `PARTS`.
        dtypes: bytes by type.
        schemes: quantized modules by scheme.
        dense_linears: decoder linears that are not quantized.
    """

    parts: tuple[Part, ...]
    dtypes: dict[str, int]
    schemes: dict[str, int]
    dense_linears: int

    @property
    def total(self) -> Part:
        """All parts together."""
        return Part(
            "total",
            sum(part.parameters for part in self.parts),
            sum(part.num_bytes for part in self.parts),
        )


def describe(checkpoint: Checkpoint) -> Description:
    """Sum up the tensors of a checkpoint by part, type and scheme."""
    parameters: Counter[str] = Counter()
    num_bytes: Counter[str] = Counter()
    dtypes: Counter[str] = Counter()
    schemes: Counter[str] = Counter()
    dense_linears = 0
    for name in checkpoint.names():
        entry = checkpoint.entries[name]
        part = _part_of(name)
        num_bytes[part] += entry.num_bytes
        dtypes[str(entry.dtype).removeprefix("torch.")] += entry.num_bytes
        count, scheme = _parameters(checkpoint, name)
        parameters[part] += count
        if scheme:
            schemes[scheme] += 1
        elif _LINEAR.search(name):
            dense_linears += 1
    parts = [Part(name, parameters[name], num_bytes[name]) for name in PARTS if num_bytes[name]]
    return Description(tuple(parts), dict(dtypes), dict(schemes), dense_linears)


def _part_of(name: str) -> str:
    return next((part for pattern, part in _PATTERNS if pattern.search(name)), "other")


def _parameters(checkpoint: Checkpoint, name: str) -> tuple[int, str | None]:
    """Return the parameters that a tensor stands for, and its scheme if it holds codes."""
    entry = checkpoint.entries[name]
    module, part = split_name(name)
    settings = checkpoint.quantization
    stored = settings.module_format(module) if settings else None
    if stored is None or not checkpoint.is_quantized(module):
        return entry.num_elements, None
    fmt = FORMATS[stored.layout]
    if part == fmt.tensors[0]:
        return fmt.count_codes(entry.num_bytes, stored), str(stored)
    return (0 if part in {*fmt.tensors, *fmt.optional_tensors} else entry.num_elements), None
