"""Random prompts: reproducible, all different, without special tokens."""

import pytest

from qinfer.bench.workload import RandomPrompts
from qinfer.errors import ConfigError


def test_same_seed_same_prompts():
    assert RandomPrompts(50, seed=3).take(4, 6) == RandomPrompts(50, seed=3).take(4, 6)
    assert RandomPrompts(50, seed=3).take(4, 6) != RandomPrompts(50, seed=4).take(4, 6)


def test_prompts_never_repeat_across_calls():
    source = RandomPrompts(4, seed=0)
    prompts = source.take(8, 2) + source.take(8, 2)
    assert len({tuple(prompt) for prompt in prompts}) == 16
    with pytest.raises(ConfigError, match="only 16 different prompts"):
        source.take(1, 2)


def test_special_tokens_are_left_out():
    prompts = RandomPrompts(6, excluded={0, 5}, seed=1).take(20, 10)
    assert {token for prompt in prompts for token in prompt} == {1, 2, 3, 4}
    with pytest.raises(ConfigError, match="special"):
        RandomPrompts(2, excluded={0, 1})
