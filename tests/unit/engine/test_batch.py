import torch

from qinfer.engine.batch import build
from qinfer.engine.params import SamplingParams
from qinfer.engine.request import Request
from qinfer.engine.scheduler import Batch


def make(tokens: list[int], *, num_computed: int, blocks: list[int], score_next: int | None = None):
    return Request(
        id="r",
        tokens=tokens,
        num_prompt=len(tokens),
        params=SamplingParams(),
        max_length=50,
        num_computed=num_computed,
        block_ids=blocks,
        score_next=score_next,
    )


def test_index_tensors_of_a_mixed_batch() -> None:
    prefill = make([*range(10, 19)], num_computed=3, blocks=[7, 2, 5])
    decode = make([*range(30, 36)], num_computed=5, blocks=[1, 4])
    scored = make([*range(50, 54)], num_computed=0, blocks=[3], score_next=1)
    inputs = build(Batch(((prefill, 4), (decode, 1), (scored, 4))), 4)
    assert inputs.token_ids.tolist() == [13, 14, 15, 16, 35, 50, 51, 52, 53]
    assert inputs.positions.tolist() == [3, 4, 5, 6, 5, 0, 1, 2, 3]
    assert inputs.slots.tolist() == [31, 8, 9, 10, 17, 12, 13, 14, 15]
    # Only the blocks that hold tokens after this step, padded with 0.
    assert inputs.block_tables.tolist() == [[7, 2], [1, 4], [3, 0]]
    assert inputs.seq_lens.tolist() == [7, 6, 4]
    assert inputs.query_starts.tolist() == [0, 4, 5, 9]
    # No logits for an unfinished prefill; the last token's; all from position 1 on.
    assert inputs.logit_rows.tolist() == [4, 6, 7, 8]
    assert all(
        tensor.dtype == torch.int64
        for tensor in (inputs.token_ids, inputs.slots, inputs.block_tables, inputs.logit_rows)
    )


def test_a_batch_without_logits() -> None:
    inputs = build(Batch(((make([1, 2, 3], num_computed=0, blocks=[0]), 2),)), 4)
    assert inputs.logit_rows.shape == (0,)
    assert inputs.logit_rows.dtype == torch.int64
