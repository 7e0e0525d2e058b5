"""Static scales of the KV cache in a checkpoint: what the settings say and where the scales lie.

compressed-tensors records `kv_cache_scheme` and one `k_scale` and `v_scale` per attention layer;
ModelOpt and older vLLM name the tensors differently. A stored element is `x / scale`, K after the
rotation. qinfer's own FP8 cache measures a scale for every token and head, which is finer, so
these are read as facts for other engines.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from qinfer.errors import CheckpointError, QuantizationError

FP8_MAX = 448.0  # of e4m3
_NAME = re.compile(
    r".*(?:\.self_attn\.(?:[qkv]_scale|[kv]_zero_point|(?:k|v|qkv)_proj\.[kv]_scale|q\.scale)"
    r"|\.[kv]_cache\.scale|\.kv_scale|\.mixer\.[kv]_scale)$"
)


@dataclass(frozen=True, slots=True)
class StaticKVScheme:
    """What `kv_cache_scheme` says.

    Args:
        num_bits: width of an element.
        type: `float` or `int`.
        strategy: `tensor` (one scale for K and one for V of a layer) or `attn_head`.
        symmetric: whether there are no zero points.
    """

    num_bits: int
    type: str
    strategy: str
    symmetric: bool

    def __str__(self) -> str:
        """Return a short label such as `fp8 per tensor`."""
        kind = {"float": "fp", "int": "int"}.get(self.type, self.type)
        return f"{kind}{self.num_bits} per {self.strategy.removeprefix('attn_')}"


def parse_kv_scheme(settings: Mapping[str, Any]) -> StaticKVScheme | None:
    """Return what `quantization_config` says of the cache; None if it says nothing, or dynamic.

    ModelOpt leaves out `strategy` and `symmetric`: one scale per tensor, symmetric.

    Raises:
        CheckpointError: the entry is of the wrong kind.
    """
    raw = settings.get("kv_cache_scheme")
    if raw is None:
        return None
    if not isinstance(raw, Mapping) or not isinstance(raw.get("num_bits"), int):
        raise CheckpointError(
            f"quantization_config.kv_cache_scheme is {raw!r}; it must be an object with num_bits"
        )
    if raw.get("dynamic"):
        return None
    return StaticKVScheme(
        num_bits=raw["num_bits"],
        type=str(raw.get("type", "int")),
        strategy=str(raw.get("strategy") or "tensor"),
        symmetric=raw.get("symmetric") is not False,
    )


def kv_config() -> dict[str, Any]:
    """Return the `kv_cache_scheme` that other engines run: FP8, a scale for K and V of a layer."""
    return {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "group_size": None,
        "strategy": "tensor",
        "block_structure": None,
        "dynamic": False,
        "actorder": None,
        "scale_dtype": None,
        "zp_dtype": None,
        "observer": "static_minmax",
        "observer_kwargs": {},
    }


def kv_scale_tensors(
    layer: int, k_amax: float, v_amax: float, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return the tensors of one layer's scales, by their full names.

    Args:
        layer: of the decoder.
        k_amax: largest magnitude of the layer's keys, after the rotation.
        v_amax: largest magnitude of its values.
        dtype: the model's.

    Raises:
        QuantizationError: a magnitude is negative or not finite, or its scale is in `dtype`.
    """
    tensors: dict[str, torch.Tensor] = {}
    for part, amax in (("k", k_amax), ("v", v_amax)):
        name = f"model.layers.{layer}.self_attn.{part}_scale"
        if not 0 <= amax < float("inf"):
            raise QuantizationError(f"{name}: the largest magnitude is {amax}")
        tensors[name] = _rounded_up(amax / FP8_MAX or 1.0, dtype, name)
    return tensors


def _rounded_up(scale: float, dtype: torch.dtype, name: str) -> torch.Tensor:
    """Return the scale in `dtype`, not below it, so that the largest value is not clipped."""
    stored = torch.tensor([scale], dtype=torch.float64).to(dtype)
    if float(stored) < scale:
        stored = torch.nextafter(stored, torch.full_like(stored, torch.inf))
    if not torch.isfinite(stored).all():
        raise QuantizationError(f"{name}: a scale of {scale:.4g} exceeds {dtype}")
    return stored


def is_kv_scale(name: str) -> bool:
    """Tell whether a tensor holds a scale or zero point of the cache, in any known spelling."""
    return _NAME.fullmatch(name) is not None


def read_kv_scales(
    layer: int, has: Callable[[str], bool], read: Callable[[str], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the scales of K and V of a layer as float32 vectors; None if there are none.

    Args:
        layer: of the decoder.
        has: tells whether there is a tensor of a name.
        read: returns it.

    Raises:
        CheckpointError: there is one of K and V alone, or a scale is not positive.
    """
    attention = f"model.layers.{layer}.self_attn"
    single = f"{attention}.kv_scale"  # vLLM's of 2024: one for both
    found = [next((name for name in _spellings(attention, part) if has(name)), None)
             for part in "kv"]  # fmt: skip
    if found == [None, None]:
        found = [single, single] if has(single) else found
    k_name, v_name = found
    if k_name is None and v_name is None:
        return None
    if k_name is None or v_name is None:
        raise CheckpointError(
            f"{attention} has a static scale for one of K and V only: {k_name or v_name}"
        )
    return _positive(read(k_name), k_name), _positive(read(v_name), v_name)


def _spellings(attention: str, part: str) -> tuple[str, ...]:
    return (
        f"{attention}.{part}_scale",
        f"{attention}.{part}_proj.{part}_scale",
        f"{attention}.qkv_proj.{part}_scale",
        f"{attention}.{part}_cache.scale",
    )


def _positive(scale: torch.Tensor, name: str) -> torch.Tensor:
    flat = scale.flatten().float()
    if not bool((torch.isfinite(flat) & (flat > 0)).all()):
        raise CheckpointError(f"{name} holds a scale that is not a positive number")
    return flat
