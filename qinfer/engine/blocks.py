"""Who owns which cache block: ids, hashes and reference counts only, never a tensor. Torch-free.

A block is in one of three states, and the counts of the three always add up:

    used     reference count > 0: in the table of at least one running request
    cached   reference count 0, holds the full block of a known prefix; reusable until evicted
    free     reference count 0, content worthless

Cached and free blocks are both *idle* and queue in one list: worthless ones in front, then cached
ones, least recently used first. A request's blocks are freed in reverse, so that the tail of a
prefix is evicted before its head.

A block is written by one request only: who wants to write into one that others hold too, or that
is cached, gets a copy first (copy-on-write); `take_copies` says which blocks are to be copied.

Prefixes are recognized by a hash chain: SHA-256 over (the parent's hash, the block's tokens),
rooted in the cache key (model and KV scheme). With SHA-256 a false match is out of the question,
so equal hashes mean equal content. Only computed, full blocks enter the table.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from qinfer.engine.request import Request


class BlockManager:
    """Hands out the blocks of a cache pool and finds prefixes that are already in it.

    Args:
        num_blocks: blocks in the pool.
        block_size: tokens per block.
        enable_prefix_caching: reuse blocks of equal prefixes.
        cache_key: what else the content depends on: the model and the KV scheme.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        cache_key: str = "",
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.peak_used = 0
        self._root = hashlib.sha256(cache_key.encode()).digest()
        self._refs = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._copies: list[tuple[int, int]] = []

    @property
    def num_idle(self) -> int:
        """Blocks that a request could get: free and cached ones."""
        return len(self._idle)

    @property
    def num_used(self) -> int:
        """Blocks that requests hold."""
        return self.num_blocks - len(self._idle)

    def num_needed(self, num_tokens: int) -> int:
        """Return the blocks that `num_tokens` of one sequence occupy."""
        return -(-num_tokens // self.block_size)

    def admit(self, request: Request, *, reserve: int = 0, sibling: Request | None = None) -> bool:
        """Give a request blocks for all its tokens, as many as possible from the cache.

        Sets its `block_ids` and `num_computed`. Nothing changes if fewer than `reserve` idle
        blocks would be left; then the answer is False.

        Args:
            request: holds no blocks.
            reserve: idle blocks to leave.
            sibling: a request whose blocks may be shared too; the last, partial one is copied.
        """
        matched = self._match(request)
        num_computed = len(matched) * self.block_size
        partial = None
        if sibling is not None:
            num_shared = self.num_shareable(sibling, request)
            if num_shared > num_computed:
                whole, rest = divmod(num_shared, self.block_size)
                matched, num_computed = sibling.block_ids[:whole], num_shared
                partial = sibling.block_ids[whole] if rest else None
        num_new = self.num_needed(request.num_tokens) - len(matched)
        num_revived = sum(self._refs[block] == 0 for block in matched)
        if num_new + reserve > len(self._idle) - num_revived:
            return False
        for block in matched:
            self._refs[block] += 1
            self._idle.pop(block, None)
        request.block_ids = matched + [self._take() for _ in range(num_new)]
        request.num_computed = num_computed
        if partial is not None:
            self._copies.append((partial, request.block_ids[len(matched)]))
        self.peak_used = max(self.peak_used, self.num_used)
        return True

    def fork(self, parent: Request, child: Request) -> None:
        """Let `child`, which holds no blocks, share those of the computed tokens it begins with.

        Sets its `block_ids` and `num_computed`. Whoever writes first into the last, partial block
        gets a copy of it (see `grow`).
        """
        num_shared = self.num_shareable(parent, child)
        child.block_ids = parent.block_ids[: self.num_needed(num_shared)]
        child.num_computed = num_shared
        for block in child.block_ids:
            self._refs[block] += 1

    def num_shareable(self, parent: Request, child: Request) -> int:
        """Return how many of `child`'s tokens need not be computed, since `parent` did."""
        limit = min(parent.num_computed, child.max_reusable)
        return _common_length(parent.tokens, child.tokens, limit)

    def grow(self, request: Request, num_tokens: int, *, reserve: int = 0) -> bool:
        """Extend a request's table to `num_tokens`, and make what it will write its own.

        What it will write begins at `num_computed`. The answer is False, and nothing is taken, if
        fewer than `reserve` idle blocks would be left.
        """
        table = request.block_ids
        needed = self.num_needed(num_tokens)
        first = request.num_computed // self.block_size
        foreign = [i for i in range(first, min(needed, len(table))) if not self._is_own(table[i])]
        num_new = max(needed - len(table), 0)
        if num_new + len(foreign) + reserve > len(self._idle):
            return False
        for index in foreign:
            source, table[index] = table[index], self._take()
            self._copies.append((source, table[index]))
            self._drop(source)
        table.extend(self._take() for _ in range(num_new))
        self.peak_used = max(self.peak_used, self.num_used)
        return True

    def shrink(self, request: Request, num_tokens: int) -> None:
        """Take back the blocks behind the first `num_tokens`; what they hold is worthless."""
        needed = self.num_needed(num_tokens)
        for block in reversed(request.block_ids[needed:]):
            self._drop(block)
        del request.block_ids[needed:]

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """Return the `(source, target)` to copy, in this order, before anything else is written."""
        copies = tuple(self._copies)
        self._copies.clear()
        return copies

    def commit(self, request: Request, num_new: int) -> None:
        """Make the blocks shareable that the last `num_new` computed tokens have filled."""
        if not self.enable_prefix_caching:
            return
        first = (request.num_computed - num_new) // self.block_size
        for index in range(first, request.num_computed // self.block_size):
            block = request.block_ids[index]
            key = self._chain(request, index)
            # An equal block may have been computed at the same time; the first one stays.
            if key not in self._block_of:
                self._block_of[key] = block
                self._hash_of[block] = key

    def release(self, request: Request) -> None:
        """Take a request's blocks back; what is in them stays reusable until evicted."""
        for block in reversed(request.block_ids):
            self._drop(block)
        request.block_ids = []
        request.num_computed = 0

    def check_integrity(self, holders: Iterable[Request] = ()) -> None:
        """Verify that every block is in exactly one state and that references add up.

        Args:
            holders: all requests that hold blocks.

        Raises:
            AssertionError: the books are wrong.
        """
        expected = [0] * self.num_blocks
        for request in holders:
            for block in request.block_ids:
                expected[block] += 1
        _check(self._refs == expected, f"references {self._refs} are not those held {expected}")
        idle = {block for block in range(self.num_blocks) if self._refs[block] == 0}
        _check(idle == set(self._idle), "the idle list is not the set of unreferenced blocks")
        hashed = {block: key for block, key in enumerate(self._hash_of) if key is not None}
        inverse = {block: key for key, block in self._block_of.items()}
        _check(hashed == inverse, "hash table and block hashes differ")

    def _match(self, request: Request) -> list[int]:
        """Return the cached blocks that the request's tokens begin with."""
        matched: list[int] = []
        if not self.enable_prefix_caching:
            return matched
        for index in range(request.max_reusable // self.block_size):
            block = self._block_of.get(self._chain(request, index))
            if block is None:
                break
            matched.append(block)
        return matched

    def _chain(self, request: Request, index: int) -> bytes:
        """Return the hash of the request's full block `index` and everything before it."""
        hashes = request.block_hashes
        while len(hashes) <= index:
            start = len(hashes) * self.block_size
            tokens = array("q", request.tokens[start : start + self.block_size])
            parent = hashes[-1] if hashes else self._root
            hashes.append(hashlib.sha256(parent + tokens.tobytes()).digest())
        return hashes[index]

    def _is_own(self, block: int) -> bool:
        """Tell whether the one request that holds a block may write into it."""
        return self._refs[block] == 1 and self._hash_of[block] is None

    def _drop(self, block: int) -> None:
        """Give up one reference; the last one makes the block idle."""
        self._refs[block] -= 1
        if self._refs[block] == 0:
            self._idle[block] = None
            if self._hash_of[block] is None:
                self._idle.move_to_end(block, last=False)

    def _take(self) -> int:
        """Return the idle block that is missed least, evicting what it caches."""
        block, _ = self._idle.popitem(last=False)
        key = self._hash_of[block]
        if key is not None:
            del self._block_of[key]
            self._hash_of[block] = None
        self._refs[block] = 1
        return block


def _common_length(left: Sequence[int], right: Sequence[int], limit: int) -> int:
    """Return how many tokens two sequences begin with alike, at most `limit`."""
    if left[:limit] == right[:limit]:
        return max(limit, 0)
    return next(i for i in range(limit) if left[i] != right[i])


def _check(condition: bool, message: str) -> None:  # noqa: FBT001 - reads like assert
    if not condition:
        raise AssertionError(message)
