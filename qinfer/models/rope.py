"""Rotary position tables, with the context stretching that checkpoints ask for."""

import math

import torch

from qinfer.models.config import RopeConfig


class RotaryTable:
    """cos and sin of every position up to a length, float32.

    A table, and not functions of the positions of a step: vectorized cosines may differ in the
    last bit with their neighbours, and a token's bits must not depend on its batch.

    Args:
        rope: the frequencies.
        head_dim: elements per head; pairs are `(i, i + head_dim / 2)`.
        length: positions `0 … length - 1` are covered.
    """

    def __init__(self, rope: RopeConfig, head_dim: int, length: int) -> None:
        angles = torch.outer(
            torch.arange(length, dtype=torch.float32), inverse_frequencies(rope, head_dim)
        )
        self.length = length
        # In place: for long contexts the tables are large, and no third one is needed.
        self.cos = angles.cos().mul_(rope.attention_factor).unsqueeze(1)  # [length, 1, dim / 2]
        self.sin = angles.sin_().mul_(rope.attention_factor).unsqueeze(1)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin `[tokens, 1, dim / 2]` at `positions` int64 `[tokens]`."""
        return self.cos[positions], self.sin[positions]


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Return the angle per position of each pair, float32 `[head_dim / 2]`."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.type == "linear":
        return plain / rope.factor
    if rope.type == "llama3":
        return _llama3(plain, rope)
    if rope.type == "yarn":
        return _yarn(plain, rope, head_dim)
    return plain


def _llama3(plain: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Stretch low frequencies, keep high ones, and blend in between (Llama 3.1)."""
    wavelength = 2 * math.pi / plain
    longest = rope.original_max_position / rope.low_freq_factor
    shortest = rope.original_max_position / rope.high_freq_factor
    keep = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - keep) * plain / rope.factor + keep * plain
    stretched = torch.where(wavelength > longest, plain / rope.factor, blended)
    return torch.where(wavelength < shortest, plain, stretched)


def _yarn(plain: torch.Tensor, rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Interpolate by parts: the ramp runs over dimensions (arXiv 2309.00071, section 3.2)."""

    def dimension(rotations: float) -> float:
        ratio = rope.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return plain / rope.factor * ramp + plain * (1 - ramp)
