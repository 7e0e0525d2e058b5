"""Steps of the model without the engine: index tensors for sequences in a small pool."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from qinfer.kvcache.inputs import ModelInputs
from qinfer.kvcache.layout import KVLayout
from qinfer.kvcache.pool import KVPool
from qinfer.models.causal_lm import CausalLM
from qinfer.models.config import ModelConfig
from qinfer.schemes import parse_kv_dtype


@dataclass(frozen=True)
class Chunk:
    """`ids` of one sequence, of which `num_computed` tokens came before; it owns `blocks`."""

    ids: Sequence[int]
    num_computed: int
    blocks: Sequence[int]


def layout_of(config: ModelConfig, kv_dtype: str = "fp32", block_size: int = 16) -> KVLayout:
    return KVLayout(
        config.num_layers,
        config.num_kv_heads,
        config.head_dim,
        parse_kv_dtype(kv_dtype),
        block_size,
    )


def make_inputs(chunks: Sequence[Chunk], block_size: int = 16) -> ModelInputs:
    """Index tensors of one step; logits of every token are wanted."""
    ids, positions, slots, lens, starts = [], [], [], [], [0]
    for chunk in chunks:
        for offset, token in enumerate(chunk.ids):
            position = chunk.num_computed + offset
            ids.append(token)
            positions.append(position)
            slots.append(chunk.blocks[position // block_size] * block_size + position % block_size)
        lens.append(chunk.num_computed + len(chunk.ids))
        starts.append(len(ids))
    width = max(len(chunk.blocks) for chunk in chunks)
    tables = [list(chunk.blocks) + [0] * (width - len(chunk.blocks)) for chunk in chunks]
    return ModelInputs(
        token_ids=torch.tensor(ids),
        positions=torch.tensor(positions),
        slots=torch.tensor(slots),
        block_tables=torch.tensor(tables),
        seq_lens=torch.tensor(lens),
        query_starts=torch.tensor(starts),
        logit_rows=torch.arange(len(ids)),
    )


def run_chunked(
    decoder: CausalLM, ids: Sequence[int], sizes: Sequence[int], pool: KVPool, blocks: Sequence[int]
) -> torch.Tensor:
    """Feed one sequence in chunks of `sizes` tokens; return the logits of all its tokens."""
    rows, done = [], 0
    for size in sizes:
        chunk = Chunk(ids[done : done + size], done, blocks)
        inputs = make_inputs([chunk], pool.layout.block_size)
        rows.append(decoder.forward(inputs, pool).logits.clone())
        done += size
    assert done == len(ids)
    return torch.cat(rows)
