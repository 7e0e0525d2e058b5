"""The torch reference of every op: what the faster kernels are tested against, and the fallback.

Everything here is *row-stable*: the bits of a token's result depend neither on how many tokens
are in the step nor on which. Matrix products therefore run on tiles of a fixed shape, padded with
zeros, because a BLAS may sum in another order for another shape.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 - the customary name

from qinfer.schemes import KVScheme

ROW_TILE = 16

# Below the size at which torch splits an elementwise op over threads, and a multiple of any
# vector width, so that `elementwise` never leaves a scalar remainder.
_CHUNK = 16384
_LANES = 128

INT8_MAX = 127.0
FP8_E4M3_MAX = 448.0

TORCH_KV_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "int8": torch.int8,
}


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return `x @ weight.T` in fixed tiles of `ROW_TILE` rows.

    Args:
        x: `[rows, in]`.
        weight: `[out, in]`, of the same dtype.

    Returns:
        `[rows, out]` in the dtype of `x`.
    """
    rows = x.shape[0]
    x = pad_rows(x)  # [tiles * ROW_TILE, in]
    out = x.new_empty(x.shape[0], weight.shape[0])
    weight_t = weight.t()
    for start in range(0, x.shape[0], ROW_TILE):
        torch.mm(x[start : start + ROW_TILE], weight_t, out=out[start : start + ROW_TILE])
    return out[:rows]


def pad_rows(x: torch.Tensor) -> torch.Tensor:
    """Return `x` `[rows, ...]`, contiguous, with zero rows added up to a multiple of `ROW_TILE`."""
    rows = x.shape[0]
    padding = -rows % ROW_TILE
    if padding == 0:
        return x.contiguous()
    out = x.new_zeros(rows + padding, *x.shape[1:])
    out[:rows] = x
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalize the last dimension by its root mean square (arXiv 1910.07467), in float32.

    Args:
        x: `[..., dim]`.
        weight: `[dim]`.
        eps: added to the mean of squares.

    Returns:
        `[..., dim]` in the dtype of the weight.
    """
    x32 = x.float()
    scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (x32 * scale).to(weight.dtype) * weight


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs `(i, i + dim / 2)` of every head (RoPE, arXiv 2104.09864), in float32.

    Args:
        x: `[tokens, heads, dim]`.
        cos: float32 `[tokens, 1, dim / 2]`.
        sin: float32 `[tokens, 1, dim / 2]`.
    """
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return `silu(gate) * up` (SwiGLU, arXiv 2002.05202)."""
    return elementwise(F.silu, gate) * up


def elementwise(op: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Apply a transcendental `op` so that an element's bits do not depend on its place.

    torch computes whole vectors and the scalar remainder of a range with different code, whose
    last bits may differ, and the ranges follow from the size and the threads. Padded chunks leave
    no remainder.
    """
    numel = x.numel()
    flat = x.new_zeros(numel + -numel % _LANES)
    flat[:numel] = x.reshape(-1)
    for start in range(0, flat.numel(), _CHUNK):
        chunk = flat[start : start + _CHUNK]
        chunk.copy_(op(chunk))
    return flat[:numel].view(x.shape)


def quantize_kv(x: torch.Tensor, scheme: KVScheme) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Turn keys or values into what the cache stores.

    For `int8` and `fp8_e4m3`, one scale per token and head:
    `scale = bf16_up(amax / max_code)`, `code = clamp(round_half_even(x / scale))` from the stored
    scale; amax 0 gives scale 0 and codes 0. A vector that is not finite gets the scale NaN, so
    that it poisons its own sequence visibly instead of turning into plausible numbers.

    Args:
        x: `[tokens, heads, dim]`.
        scheme: how to store it.

    Returns:
        The elements `[tokens, heads, dim]` and the scales bf16 `[tokens, heads]` or None.
    """
    dtype = TORCH_KV_DTYPES[scheme.dtype]
    if not scheme.quantized:
        return x.to(dtype), None
    max_code = INT8_MAX if scheme.dtype == "int8" else FP8_E4M3_MAX
    x32 = x.float()
    amax = x32.abs().amax(-1)  # [tokens, heads]; NaN and inf survive
    scales = bf16_round_up(amax / max_code)
    scales = torch.where(amax.isfinite(), scales, torch.nan)
    divisor = scales.float().unsqueeze(-1)
    codes = torch.where(divisor > 0, x32 / divisor, 0.0)  # NaN > 0 is false
    if scheme.dtype == "int8":
        codes = codes.round()
    return codes.clamp(-max_code, max_code).to(dtype), scales


def isolate_broken(
    k: torch.Tensor, v: torch.Tensor, scheme: KVScheme
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where a key or its values would not be finite in the cache, make the key NaN, the values 0.

    Who sees them gets NaN by way of the score; a query that does not see them yet gets weight 0
    times 0, where a NaN value would reach it.

    Args:
        k: `[tokens, heads, dim]`.
        v: the same.
        scheme: how they will be stored.
    """
    stored = torch.float32 if scheme.quantized else TORCH_KV_DTYPES[scheme.dtype]
    finite = [x.to(stored).isfinite().all(-1, keepdim=True) for x in (k, v)]
    broken = ~(finite[0] & finite[1])
    return k.masked_fill(broken, torch.nan), v.masked_fill(broken, 0.0)


def dequantize_kv(codes: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """Return cached keys or values as float32; `scales` lacks the last dimension of `codes`."""
    x = codes.float()
    return x if scales is None else x * scales.float().unsqueeze(-1)


def bf16_round_up(x: torch.Tensor) -> torch.Tensor:
    """Return the smallest bfloat16 not below the non-negative float32 `x`."""
    nearest = x.to(torch.bfloat16)
    bits = nearest.view(torch.int16)
    return torch.where(nearest.float() < x, bits + 1, bits).view(torch.bfloat16)
