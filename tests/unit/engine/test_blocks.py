import pytest

from qinfer.engine.blocks import BlockManager
from qinfer.engine.params import SamplingParams
from qinfer.engine.request import Request


def make(tokens: list[int], *, use_prefix_cache: bool = True) -> Request:
    return Request(
        id="r",
        tokens=list(tokens),
        num_prompt=len(tokens),
        params=SamplingParams(),
        max_length=100,
        use_prefix_cache=use_prefix_cache,
    )


def compute(blocks: BlockManager, request: Request) -> None:
    """Pretend that all known tokens of a request were computed."""
    num_new = request.num_tokens - request.num_computed
    request.num_computed = request.num_tokens
    blocks.commit(request, num_new)


def test_a_second_equal_prompt_shares_full_blocks_and_stops_one_token_short() -> None:
    blocks = BlockManager(8, 4)
    first, second = make([*range(8)]), make([*range(8)])
    assert blocks.admit(first)
    compute(blocks, first)
    assert blocks.admit(second)
    # 8 tokens are 2 full blocks, but the last token's logits must be computed.
    assert second.num_computed == 4
    assert second.block_ids[0] == first.block_ids[0]
    assert second.block_ids[1] != first.block_ids[1]
    longer = make([*range(9)])
    assert blocks.admit(longer)
    assert longer.num_computed == 8
    blocks.check_integrity([first, second, longer])


def test_blocks_become_shareable_only_when_computed_and_full() -> None:
    blocks = BlockManager(8, 4)
    first = make([*range(7)])
    blocks.admit(first)
    second = make([*range(7)])
    blocks.admit(second)
    assert second.num_computed == 0  # nothing computed yet
    compute(blocks, first)
    third = make([*range(7), 9])
    blocks.admit(third)
    assert third.num_computed == 4  # the second block is not full
    blocks.check_integrity([first, second, third])


def test_a_hash_covers_everything_before_the_block() -> None:
    blocks = BlockManager(8, 4)
    first = make([1, 1, 1, 1, 2, 2, 2, 2, 0])
    blocks.admit(first)
    compute(blocks, first)
    same_second_block = make([3, 3, 3, 3, 2, 2, 2, 2, 0])
    blocks.admit(same_second_block)
    assert same_second_block.num_computed == 0


def test_different_cache_keys_never_share() -> None:
    """K05: the key of a block includes the KV format."""
    hashes = []
    for key in ("model int8", "model fp16"):
        blocks = BlockManager(4, 4, cache_key=key)
        request = make([1, 2, 3, 4, 5])
        blocks.admit(request)
        compute(blocks, request)
        hashes.append(request.block_hashes[0])
    assert hashes[0] != hashes[1]


def test_worthless_blocks_are_reused_first_then_tails_then_heads() -> None:
    blocks = BlockManager(4, 2)
    request = make([1, 2, 3, 4, 5])
    blocks.admit(request)
    compute(blocks, request)
    head, tail, partial = request.block_ids
    blocks.release(request)
    taken = make([9] * 8)
    assert blocks.admit(taken)
    assert taken.block_ids[0] == partial
    assert taken.block_ids[2:] == [tail, head]
    blocks.check_integrity([taken])


def test_released_blocks_stay_reusable_and_least_recently_used_goes_first() -> None:
    blocks = BlockManager(4, 2)
    old, new = make([1, 2, 0]), make([3, 4, 0])
    for request in (old, new):
        blocks.admit(request)
        compute(blocks, request)
        blocks.release(request)
    again = make([1, 2, 0])
    blocks.admit(again)
    assert again.num_computed == 2
    blocks.release(again)
    # `new` is now the least recently used of the two cached prefixes.
    filler = make([7] * 6)
    blocks.admit(filler)
    blocks.release(filler)
    kept, evicted = make([1, 2, 0]), make([3, 4, 0])
    blocks.admit(kept)
    assert kept.num_computed == 2
    blocks.admit(evicted)
    assert evicted.num_computed == 0


def test_admission_is_all_or_nothing() -> None:
    blocks = BlockManager(4, 4)
    request = make([1] * 13)
    assert not blocks.admit(request, reserve=1)
    assert request.block_ids == []
    assert blocks.num_idle == 4
    assert blocks.admit(request)
    assert not blocks.grow(request, 17)
    assert len(request.block_ids) == 4
    blocks.check_integrity([request])


def test_matched_idle_blocks_do_not_count_as_room() -> None:
    blocks = BlockManager(3, 4)
    first = make([*range(9)])
    blocks.admit(first)
    compute(blocks, first)
    blocks.release(first)
    # Two blocks are matched and revived; only one is left for the other two that are needed.
    assert not blocks.admit(make([*range(8), *range(40, 48)]))
    assert blocks.admit(make([*range(8), 1, 2, 3]))


def test_prefix_caching_can_be_off_for_the_pool_or_a_request() -> None:
    off = BlockManager(8, 4, enable_prefix_caching=False)
    on = BlockManager(8, 4)
    for blocks, wanted in ((off, True), (on, False)):
        first = make([*range(9)])
        blocks.admit(first)
        compute(blocks, first)
        second = make([*range(9)], use_prefix_cache=wanted)
        blocks.admit(second)
        assert second.num_computed == 0


def test_integrity_check_notices_wrong_books() -> None:
    blocks = BlockManager(4, 4)
    request = make([1, 2, 3])
    blocks.admit(request)
    with pytest.raises(AssertionError, match="references"):
        blocks.check_integrity([])
    blocks._idle[request.block_ids[0]] = None
    with pytest.raises(AssertionError, match="idle list"):
        blocks.check_integrity([request])


def test_peak_counts_the_busiest_moment() -> None:
    blocks = BlockManager(8, 4)
    request = make([1] * 12)
    blocks.admit(request)
    blocks.grow(request, 17)
    blocks.release(request)
    assert (blocks.num_used, blocks.peak_used) == (0, 5)


def test_a_fork_takes_no_blocks_and_the_first_to_write_gets_a_copy() -> None:
    blocks = BlockManager(4, 4)
    parent, child = make([*range(6)]), make([*range(6), 9])
    blocks.admit(parent)
    compute(blocks, parent)
    blocks.fork(parent, child)
    assert (child.num_computed, blocks.num_used) == (6, 2)
    shared = parent.block_ids[1]
    assert blocks.grow(child, 7)
    assert blocks.take_copies() == ((shared, child.block_ids[1]),)
    assert blocks.take_copies() == ()
    assert blocks.grow(parent, 7)  # alone in its block now: no copy
    assert parent.block_ids[1] == shared
    assert blocks.take_copies() == ()
    blocks.check_integrity([parent, child])


def test_a_fork_shares_only_what_both_have_in_common() -> None:
    blocks = BlockManager(8, 4)
    parent = make([*range(10)])
    blocks.admit(parent)
    compute(blocks, parent)
    early = make([0, 1, 2, 3, 4, 60, 61])
    blocks.fork(parent, early)
    assert early.num_computed == 5
    # The block that it goes on in is full and cached, so even its last holder copies it.
    cached = early.block_ids[1]
    blocks.release(parent)
    assert blocks.grow(early, 7)
    assert blocks.take_copies() == ((cached, early.block_ids[1]),)
    again = make([*range(10)])
    blocks.admit(again)
    assert again.num_computed == 8
    blocks.check_integrity([early, again])


def test_without_room_for_a_copy_nothing_is_taken() -> None:
    blocks = BlockManager(2, 4)
    parent, child = make([*range(6)]), make([*range(6), 9])
    blocks.admit(parent)
    compute(blocks, parent)
    blocks.fork(parent, child)
    assert not blocks.grow(child, 7)
    assert blocks.take_copies() == ()
    assert child.block_ids == parent.block_ids
    blocks.release(parent)
    assert blocks.grow(child, 7)
    blocks.check_integrity([child])


def test_a_sample_is_admitted_with_its_sibling_blocks_and_a_copy_of_the_partial_one() -> None:
    for caching in (True, False):
        blocks = BlockManager(8, 4, enable_prefix_caching=caching)
        first, second = make([*range(7)]), make([*range(7)])
        blocks.admit(first)
        compute(blocks, first)
        assert blocks.admit(second, sibling=first)
        assert second.num_computed == 6
        assert second.block_ids[0] == first.block_ids[0]
        assert blocks.take_copies() == ((first.block_ids[1], second.block_ids[1]),)
        blocks.check_integrity([first, second])


def test_shrinking_gives_the_tail_back() -> None:
    blocks = BlockManager(4, 4)
    request = make([*range(5)])
    blocks.admit(request)
    blocks.grow(request, 16)
    blocks.shrink(request, 5)
    assert (len(request.block_ids), blocks.num_idle) == (2, 2)
    blocks.check_integrity([request])
