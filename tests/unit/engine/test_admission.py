import pytest

from qinfer.engine.admission import Limits, RequestFactory, eos_ids, sampling_defaults
from qinfer.engine.params import SamplingDefaults, SamplingParams
from qinfer.errors import ConfigError, ContextLengthError, RequestError

LIMITS = Limits(max_model_len=128, vocab_size=288, bos_token_id=256, eos_ids=frozenset({257}))
NO_BOS = Limits(max_model_len=128, vocab_size=288)


@pytest.mark.parametrize("num_prompt", [127, 128, 129])
@pytest.mark.parametrize("max_tokens", [None, 1, 64])
def test_prompt_and_output_must_fit_the_context(num_prompt: int, max_tokens: int | None) -> None:
    """E13: never truncated silently; the message has prompt, requested tokens and limit."""
    params = SamplingParams(max_tokens=max_tokens)
    if num_prompt == 127 and max_tokens in {None, 1}:
        assert LIMITS.check_params(num_prompt, params).max_tokens == 1
        return
    with pytest.raises(ContextLengthError) as error:
        LIMITS.check_params(num_prompt, params)
    message = str(error.value)
    assert f"{num_prompt} tokens" in message
    assert f"{max_tokens or 1} more" in message
    assert "128" in message
    assert error.value.field == ("max_tokens" if num_prompt == 127 else "prompt")


def test_omitted_max_tokens_is_the_remaining_room() -> None:
    """E13."""
    assert LIMITS.check_params(28, SamplingParams(max_tokens=None)).max_tokens == 100


def test_empty_prompt_is_bos_or_refused() -> None:
    """E12: with a BOS: generate; without: refused."""
    assert LIMITS.check_prompt([]) == [256]
    with pytest.raises(RequestError, match="empty") as error:
        NO_BOS.check_prompt([])
    assert error.value.field == "prompt"


@pytest.mark.parametrize("bad", [[1, -1], [288], [10**30], [1, 2.0], ["a"], [True], [None]])
def test_token_ids_outside_the_vocabulary_are_refused(bad: list) -> None:
    with pytest.raises(RequestError, match="prompt_token_ids"):
        LIMITS.check_prompt(bad)


def test_stop_tokens_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(RequestError, match="stop_token_ids holds 288"):
        LIMITS.check_params(1, SamplingParams(stop_token_ids=(3, 288)))


def test_scored_sequences_are_checked() -> None:
    assert LIMITS.check_scored([5], 1) == [5]
    assert len(LIMITS.check_scored([5] * 128, 128)) == 128
    with pytest.raises(ContextLengthError, match="129 tokens"):
        LIMITS.check_scored([5] * 129, 1)
    with pytest.raises(RequestError, match="empty"):
        LIMITS.check_scored([], 1)
    for start in (0, 4):
        with pytest.raises(RequestError, match=f"starts at token {start}"):
            LIMITS.check_scored([5] * 3, start)


def test_defaults_fill_only_what_the_request_left_open() -> None:
    """E06: request > generation_config > neutral."""
    defaults = sampling_defaults({"top_k": 1, "temperature": 0.6, "max_length": 20})
    assert defaults == SamplingDefaults(temperature=0.6, top_k=1)
    limits = Limits(max_model_len=128, vocab_size=288, defaults=defaults)
    filled = limits.check_params(1, SamplingParams(temperature=2.0, top_k=0))
    assert (filled.temperature, filled.top_k, filled.top_p) == (2.0, 0, 1.0)
    filled = limits.check_params(1, SamplingParams())
    assert (filled.temperature, filled.top_k, filled.repetition_penalty) == (0.6, 1, 1.0)


def test_generation_config_is_checked_at_load() -> None:
    assert sampling_defaults({"top_p": None}) == SamplingDefaults()
    with pytest.raises(ConfigError, match=r"generation_config.json: top_p is 7"):
        sampling_defaults({"top_p": 7})


def test_eos_sets_are_joined() -> None:
    assert eos_ids(2, [3, 4], None, 2) == {2, 3, 4}


def test_samples_share_the_prompt_and_the_seed_but_not_the_list() -> None:
    factory = RequestFactory(LIMITS, None)
    params = SamplingParams(n=3, seed=5, max_tokens=4, stop_token_ids=(9,))
    requests = factory.generation("r", [1, 2], params, 0.0)
    assert [(r.id, r.parent, r.index, r.seed) for r in requests] == [
        (f"r#{index}", "r", index, 5) for index in range(3)
    ]
    assert requests[0].tokens == requests[1].tokens
    assert requests[0].tokens is not requests[1].tokens
    assert requests[0].stop_ids == {257, 9}
    assert requests[0].max_length == 6
    (alone,) = factory.generation("r", [1], SamplingParams(ignore_eos=True), 0.0)
    assert (alone.id, alone.stop_ids) == ("r", frozenset())


def test_omitted_seeds_differ() -> None:
    """E07: an omitted seed must not become 0."""
    factory = RequestFactory(LIMITS, None)
    seeds = {factory.generation("r", [1], SamplingParams(), 0.0)[0].seed for _ in range(20)}
    assert len(seeds) == 20
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("bad", ["x", 1.5, [1, "x"], {"id": 1}, True])
def test_end_tokens_that_are_no_ids_are_named(bad: object) -> None:
    with pytest.raises(ConfigError, match="eos_token_id is "):
        eos_ids(bad, 2)
