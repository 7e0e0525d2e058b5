"""The index tensors of a step at fixed addresses, where a recorded program reads them."""

import torch

from qinfer.errors import CapacityError
from qinfer.kernels.cpu import paged
from qinfer.kvcache.inputs import ModelInputs


class StepIndex:
    """`ModelInputs` in memory that stays where it is; filled in before each run.

    Args:
        max_tokens: tokens of a step that fit; also bounds its sequences.
        max_rows: rows of logits that fit.
        max_blocks: cache blocks of one sequence that fit.
    """

    def __init__(self, max_tokens: int, max_rows: int, max_blocks: int) -> None:
        def zeros(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int64)

        self.max_tokens = max_tokens
        self.max_rows = max_rows
        self.token_ids = zeros(max_tokens)
        self.positions = zeros(max_tokens)
        self.slots = zeros(max_tokens)
        self.block_tables = zeros(max_tokens * max_blocks)  # [sequences, table_width], compact
        self.seq_lens = zeros(max_tokens)
        self.query_starts = zeros(max_tokens + 1)
        self.logit_rows = zeros(max_rows)
        counts = zeros(4)
        self.num_tokens, self.num_rows, self.num_sequences, self.table_width = counts.split(1)
        # Filled in by numpy: an assignment of torch takes several times as long.
        self._counts = counts.numpy()
        self._lists = tuple(
            tensor.numpy()
            for tensor in (
                self.token_ids,
                self.positions,
                self.slots,
                self.block_tables,
                self.seq_lens,
                self.query_starts,
                self.logit_rows,
            )
        )
        # The part that the ops over the cache read.
        self.cache = paged.StepIndex(
            positions=self.positions,
            slots=self.slots,
            block_tables=self.block_tables,
            seq_lens=self.seq_lens,
            query_starts=self.query_starts,
            num_tokens=self.num_tokens,
            num_sequences=self.num_sequences,
            table_width=self.table_width,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, nearly all of them those of the block tables."""
        return sum(array.nbytes for array in self._lists)

    def load(self, inputs: ModelInputs, max_context: int) -> None:
        """Take over the index tensors of a step.

        Raises:
            CapacityError: a sequence is longer than `max_context` tokens.
        """
        sources = (
            inputs.token_ids,
            inputs.positions,
            inputs.slots,
            inputs.block_tables,
            inputs.seq_lens,
            inputs.query_starts,
            inputs.logit_rows,
        )
        tokens, _, _, tables, lengths, _, rows = arrays = [source.numpy() for source in sources]
        longest = int(lengths.max())
        if longest > max_context:
            raise CapacityError(f"a sequence of {longest} tokens exceeds the {max_context} planned")
        for target, array in zip(self._lists, arrays, strict=True):
            target[: array.size] = array.ravel()
        self._counts[:] = (tokens.size, rows.size, lengths.size, tables.shape[1])
