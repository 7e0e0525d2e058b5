"""What a benchmark asks for: seeded random token prompts that share no prefix."""

from collections.abc import Collection

import numpy as np

from qinfer.errors import ConfigError


class RandomPrompts:
    """A seeded source of random prompts, no two of which are equal.

    Tokens are drawn uniformly from the vocabulary without the special tokens, so that a prefix
    cache finds nothing to share: two prompts agree in their first cache block only by chance.

    Args:
        vocab_size: ids are drawn below it.
        excluded: ids never drawn, such as the special tokens.
        seed: the same seed gives the same prompts in the same order.
    """

    def __init__(self, vocab_size: int, *, excluded: Collection[int] = (), seed: int = 0) -> None:
        self._ids = np.setdiff1d(np.arange(vocab_size), np.asarray(sorted(excluded), dtype=int))
        if self._ids.size == 0:
            raise ConfigError("the vocabulary holds nothing but special tokens")
        self._random = np.random.default_rng(seed)
        self._seen: set[tuple[int, ...]] = set()

    def take(self, count: int, length: int) -> list[list[int]]:
        """Return `count` new prompts of `length` tokens.

        Raises:
            ConfigError: the vocabulary has too few different prompts of that length.
        """
        room = self._ids.size**length if length < 8 else None  # beyond: more than anyone draws
        if room is not None and sum(len(p) == length for p in self._seen) + count > room:
            raise ConfigError(
                f"only {room} different prompts have {length} tokens; raise the input length"
            )
        prompts: list[list[int]] = []
        while len(prompts) < count:
            prompt = tuple(int(token) for token in self._random.choice(self._ids, size=length))
            if prompt not in self._seen:
                self._seen.add(prompt)
                prompts.append(list(prompt))
        return prompts
