"""What one step of the model works on: the index tensors of a batch."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class ModelInputs:
    """The tokens of one step, of all its sequences one after the other.

    Sequence `s` owns the tokens `query_starts[s] : query_starts[s + 1]`; after the step its cache
    holds `seq_lens[s]` tokens, the last of them those of this step.

    Args:
        token_ids: int64 `[tokens]`.
        positions: int64 `[tokens]`, the position of each token in its sequence.
        slots: int64 `[tokens]`, where its K and V go: `block_id * block_size + offset`.
        block_tables: int64 `[sequences, max_blocks]`, padded with 0.
        seq_lens: int64 `[sequences]`.
        query_starts: int64 `[sequences + 1]`.
        logit_rows: int64 `[rows]`, the tokens whose logits are wanted.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    query_starts: torch.Tensor
    logit_rows: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ModelOutput:
    """What one step of the model yields for the wanted rows.

    Args:
        logits: float32 `[rows, vocab]`.
        bad_layers: int64 `[rows]`, the first decoder layer whose output of that token was not
            finite (`num_layers` = final norm or head), or -1 if all were.
        best: int64 `[rows]`, the most likely token of each finite row, the lowest id of equals;
            None if the model does not tell.
    """

    logits: torch.Tensor
    bad_layers: torch.Tensor
    best: torch.Tensor | None = None
