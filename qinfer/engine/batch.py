"""From a scheduled batch to the index tensors of a step: the only place that builds them."""

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
    rows: list[int] = []
    tables: list[list[int]] = []
    for request, num_new in batch.sequences:
        start, end = request.num_computed, request.num_computed + num_new
        shift = len(tokens) - start  # from a position of the sequence to a token of the step
        rows.extend(position + shift for position in request.wanted_rows(num_new))
        tokens.extend(request.upcoming(num_new))
        positions.extend(range(start, end))
        tables.append(request.block_ids[: -(-end // block_size)])
    width = max(map(len, tables))
    counts = torch.tensor([num_new for _, num_new in batch.sequences])
    block_tables = torch.tensor([table + [0] * (width - len(table)) for table in tables])
    position_ids = torch.tensor(positions)
    sequence = torch.repeat_interleave(counts)  # [tokens], the sequence of each token
    blocks = block_tables[sequence, position_ids // block_size]
    inputs = ModelInputs(
        token_ids=torch.tensor(tokens),
        positions=position_ids,
        slots=blocks * block_size + position_ids % block_size,
        block_tables=block_tables,
        seq_lens=torch.tensor([r.num_computed + num_new for r, num_new in batch.sequences]),
        query_starts=torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))),
        logit_rows=torch.tensor(rows, dtype=torch.int64),
    )
    return inputs if device == "cpu" else _moved(inputs, device)


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
