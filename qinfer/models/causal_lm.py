"""What the engine needs of a model, whichever way it runs."""

from dataclasses import dataclass
from typing import Protocol

import torch

from qinfer.kvcache.inputs import ModelInputs, ModelOutput
from qinfer.kvcache.layout import KVLayout
from qinfer.kvcache.pool import KVPool
from qinfer.models.config import ModelConfig
from qinfer.models.layers import KernelRow


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Where the resident bytes of the weights are.

    Args:
        layers: the decoder layers and the final norm.
        embedding: the embedding; 0 where it is read from the head's memory, which it shares.
        head: the head; 0 where it shares the embedding's memory.
        huge_pages: of the whole, in huge pages; None = not known.
    """

    layers: int
    embedding: int
    head: int
    huge_pages: int | None = None

    @property
    def total(self) -> int:
        """All of them."""
        return self.layers + self.embedding + self.head


class CausalLM(Protocol):
    """A causal language model over the paged cache."""

    @property
    def config(self) -> ModelConfig:
        """The model's facts."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Type of the unquantized weights."""
        ...

    @property
    def device(self) -> str:
        """Where it runs."""
        ...

    @property
    def uses_torch(self) -> bool:
        """Whether torch's threads compute the layers."""
        ...

    @property
    def max_positions(self) -> int:
        """Positions that a sequence may have."""
        ...

    @property
    def memory_bytes(self) -> int:
        """Resident bytes of all weights; tied ones once."""
        ...

    def weight_bytes(self) -> WeightBytes:
        """Return where these bytes are; not for every step, as it may ask the system."""
        ...

    def step_bytes(self, layout: KVLayout, max_tokens: int, max_rows: int) -> int | None:
        """Return the memory that steps of this size keep beside weights and cache.

        Args:
            layout: of the cache.
            max_tokens: tokens of the largest step.
            max_rows: rows of logits of the largest step.

        Returns:
            Bytes, the logits included; None if every op makes its output anew, so that nothing is
            kept (`engine.memory.activation_bytes` estimates what that takes).
        """
        ...

    def kernels(self, layout: KVLayout) -> list[KernelRow]:
        """Describe which kernel each linear and the attention over a cache of `layout` got."""
        ...

    def forward(self, inputs: ModelInputs, pool: KVPool) -> ModelOutput:
        """Run one step: write the tokens' K and V to `pool`, return the wanted logits.

        The logits are valid until the next step.
        """
        ...
