"""Sizes of the paged KV cache: the one place that turns a model's facts into bytes.

The planner, the allocator and the reports all call these functions. Torch-free.
"""

from dataclasses import dataclass

from qinfer.schemes import KVScheme

DEFAULT_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape and storage of a cache.

    Args:
        num_layers: decoder layers.
        num_kv_heads: key/value heads per layer.
        head_dim: elements per head.
        scheme: element type and scales.
        block_size: tokens per block.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    scheme: KVScheme
    block_size: int = DEFAULT_BLOCK_SIZE

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token over all layers: codes and scales of K and V."""
        per_head = self.head_dim * self.scheme.element_bytes + self.scheme.scale_bytes
        return 2 * self.num_layers * self.num_kv_heads * per_head

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.block_size * self.bytes_per_token

    def num_blocks(self, num_tokens: int) -> int:
        """Return the blocks that `num_tokens` of one sequence occupy."""
        return -(-num_tokens // self.block_size)
