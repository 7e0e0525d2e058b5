"""What a decoder block is to calibration: passes over the samples, each to the input of linears.

A block kind provides its stages in the order of the computation; `quant.blockwise` runs them and
knows nothing of attention or experts. Between two passes the linears of the first are solved, so
that a stage computes with the quantized weights of all stages before it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from qinfer.models.moe import Routing
from qinfer.quant.activations import Rows


@dataclass(slots=True, eq=False)
class Stream:
    """The samples on their way through one block, and the weights that they see.

    Args:
        weights: by name inside the block, float32, but for linears: those that a stage computes
            with have the type of the products, those still to be solved that of the source.
        hidden: the block's input, `[tokens, hidden]`.
        residual: room for the hidden states inside the block; may be the memory of `hidden`.
        wide: room for what linears read, as wide as the block asks for.
        num_samples: that have rows: the first ones.
        lead: of the unquantized stream, the quantized one (whose choices, such as the routing to
            experts, count for both); None = this is the quantized one.
        routings: which experts the tokens of each sample go through, in a block that has experts.
        tap: sees name, input and output of every linear; None = nothing does.
    """

    weights: dict[str, torch.Tensor]
    hidden: Rows
    residual: Rows
    wide: Rows
    num_samples: int = 1
    lead: "Stream | None" = None
    routings: dict[int, Routing] = field(default_factory=dict)
    tap: "Tap | None" = None


Tap = Callable[[str, torch.Tensor, torch.Tensor], None]
ToInput = Callable[[Stream, int], torch.Tensor]  # (stream, sample) -> [tokens, in]


@dataclass(frozen=True, slots=True)
class Stage:
    """One pass over the samples.

    Args:
        names: the linears that read the input, by name inside the block; with none, the pass only
            computes.
        to_input: takes a sample to the input, from what earlier stages left in the stream. Called
            once per sample and stream, by several threads for different samples.
        done: weights that no later stage needs.
        unseen: why linears that no token reaches are rounded; None = that is an error.
    """

    names: tuple[str, ...]
    to_input: ToInput
    done: tuple[str, ...] = ()
    unseen: str | None = None


class BlockStages(Protocol):
    """The stages of one block."""

    @property
    def stages(self) -> tuple[Stage, ...]:
        """In the order of the computation."""
        ...

    @property
    def wide(self) -> int:
        """Columns that `Stream.wide` must have."""
        ...

    def output(self, stream: Stream, sample: int) -> torch.Tensor:
        """Return a sample's hidden states behind the block, `[tokens, hidden]`."""
        ...
