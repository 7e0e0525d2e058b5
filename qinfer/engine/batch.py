"""From a scheduled batch to the index tensors of a step: the only place that builds them."""

import numpy as np
import torch

from qinfer.engine.scheduler import Batch
from qinfer.kvcache.inputs import ModelInputs


def build(batch: Batch, block_size: int, device: str = "cpu") -> ModelInputs:
    """Return the inputs of the model for a non-empty batch.

    Args:
        batch: which requests compute how many tokens; their blocks cover these tokens.
        block_size: tokens per cache block.
        device: where the tensors go.
    """
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    rows: list[int] = []
    lengths: list[int] = []
    starts: list[int] = [0]
    tables: list[list[int]] = []
    for request, num_new in batch.sequences:
        start, end = request.num_computed, request.num_computed + num_new
        table = request.block_ids[: -(-end // block_size)]
        if num_new == 1:  # most often; to make lists of one takes longer than to add the one
            if request.wanted_rows(1):
                rows.append(len(tokens))
            tokens.append(request.tokens[start])
            positions.append(start)
            slots.append(table[-1] * block_size + start % block_size)
        else:
            shift = len(tokens) - start  # from a position of the sequence to a token of the step
            places = range(start, end)
            rows += [place + shift for place in request.wanted_rows(num_new)]
            tokens += request.upcoming(num_new)
            positions += places
            slots += [table[p // block_size] * block_size + p % block_size for p in places]
        lengths.append(end)
        starts.append(len(tokens))
        tables.append(table)
    width = max(map(len, tables))
    blocks: list[int] = []
    for table in tables:
        blocks += table
        blocks += [0] * (width - len(table))
    # One array for all: a step of one token should not pay for making seven.
    lists = (tokens, positions, slots, blocks, lengths, starts, rows)
    joined = [*tokens, *positions, *slots, *blocks, *lengths, *starts, *rows]
    numbers = torch.from_numpy(np.array(joined, dtype=np.int64))
    parts = numbers.to(device).split([len(part) for part in lists])
    return ModelInputs(
        token_ids=parts[0],
        positions=parts[1],
        slots=parts[2],
        block_tables=parts[3].view(len(tables), width),
        seq_lens=parts[4],
        query_starts=parts[5],
        logit_rows=parts[6],
    )
