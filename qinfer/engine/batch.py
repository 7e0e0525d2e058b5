"""From a scheduled batch to the index tensors of a step: the only place that builds them."""

from collections.abc import Sequence

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
    # By numpy: of these sizes, an operation of torch takes several times as long.
    tokens: list[int] = []
    rows: list[int] = []
    first: list[int] = []  # of each sequence, the position of its first token
    counts: list[int] = []
    tables: list[list[int]] = []
    for request, num_new in batch.sequences:
        start = request.num_computed
        shift = len(tokens) - start  # from a position of the sequence to a token of the step
        rows += [position + shift for position in request.wanted_rows(num_new)]
        tokens += request.upcoming(num_new)
        first.append(start)
        counts.append(num_new)
        tables.append(request.block_ids[: -(-(start + num_new) // block_size)])
    starts, lengths, block_tables = _int64(first), _int64(counts), _padded(tables)
    ends = lengths.cumsum()
    sequence = np.repeat(np.arange(len(counts)), lengths)  # [tokens], the sequence of each token
    positions = np.arange(len(tokens)) + (starts - ends + lengths)[sequence]
    blocks = block_tables[sequence, positions // block_size]
    inputs = ModelInputs(
        token_ids=torch.from_numpy(_int64(tokens)),
        positions=torch.from_numpy(positions),
        slots=torch.from_numpy(blocks * block_size + positions % block_size),
        block_tables=torch.from_numpy(block_tables),
        seq_lens=torch.from_numpy(starts + lengths),
        query_starts=torch.from_numpy(np.concatenate(([0], ends))),
        logit_rows=torch.from_numpy(_int64(rows)),
    )
    return inputs if device == "cpu" else _moved(inputs, device)


def _int64(values: Sequence[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def _padded(tables: Sequence[Sequence[int]]) -> np.ndarray:
    """Return rows of different lengths as one array, filled up with 0."""
    width = max(map(len, tables))
    flat: list[int] = []
    for table in tables:
        flat += table
        flat += [0] * (width - len(table))
    return _int64(flat).reshape(len(tables), width)


def _moved(inputs: ModelInputs, device: str) -> ModelInputs:
    return ModelInputs(
        token_ids=inputs.token_ids.to(device),
        positions=inputs.positions.to(device),
        slots=inputs.slots.to(device),
        block_tables=inputs.block_tables.to(device),
        seq_lens=inputs.seq_lens.to(device),
        query_starts=inputs.query_starts.to(device),
        logit_rows=inputs.logit_rows.to(device),
    )
