import pytest
from hypothesis import given
from hypothesis import strategies as st

from qinfer.engine.drafting import NgramDrafter
from qinfer.engine.params import SamplingParams
from qinfer.engine.request import Request


def make(tokens: list[int], request_id: str = "r") -> Request:
    return Request(
        id=request_id,
        tokens=tokens,
        num_prompt=len(tokens),
        params=SamplingParams(),
        max_length=1000,
    )


def propose(tokens: list[int], length: int = 4, **sizes: int) -> list[int]:
    (draft,) = NgramDrafter(**sizes).propose([make(tokens)], [length])
    return draft


@pytest.mark.parametrize(
    ("tokens", "draft"),
    [
        ([1, 2, 3, 4, 5, 6, 1, 2], [3, 4, 5, 6]),
        ([1, 2, 3, 9, 9, 1, 2, 7, 9, 9, 1, 2], [7, 9, 9, 1]),  # the latest of two
        ([8, 1, 2, 3, 9, 9, 1, 2, 7, 9, 8, 1, 2], [3, 9, 9, 1]),  # the longer ending wins
        ([5, 1, 2, 1, 2], [1, 2, 1, 2]),  # a repetition goes on with itself
        ([7, 7, 7], [7, 7, 7, 7]),
        ([1, 2, 3, 4, 5], []),
        ([1, 9, 1], []),  # one token is no ending
        ([1], []),
    ],
)
def test_what_followed_the_same_ending(tokens: list[int], draft: list[int]) -> None:
    assert propose(tokens) == draft


def test_sizes() -> None:
    assert propose([1, 9, 8, 1], min_ngram=1) == [9, 8, 1, 9]
    assert propose([4, 1, 2, 3, 7, 5, 1, 2, 3], max_ngram=2) == [7, 5, 1, 2]
    assert propose([1, 2, 9, 1, 2], min_ngram=3, max_ngram=3) == []
    assert propose([1, 2, 9, 1, 2], length=0) == []
    assert propose([1, 2, 9, 1, 2], length=1) == [9]


def test_bytes_across_token_borders_are_no_occurrence() -> None:
    """256 is the bytes 0 1 0 0 and 65536 is 0 0 1 0: shifted, one looks like the other."""
    assert propose([65536, 65536, 65536, 5, 256, 256]) == []
    assert propose([1, 256, 256, 65536, 65536, 65536, 5, 256, 256]) == [65536, 65536, 65536, 5]


def test_new_tokens_are_seen_and_requests_told_apart() -> None:
    drafter = NgramDrafter()
    one, other = make([1, 2, 3, 4], "one"), make([9, 8, 7, 9], "other")
    assert drafter.propose([one, other], [3, 3]) == [[], []]
    one.tokens += [1, 2]
    other.tokens += [8]
    assert drafter.propose([other, one], [2, 3]) == [[7, 9], [3, 4, 1]]
    drafter.forget("one")
    drafter.forget("unknown")
    again = make([5, 6, 5, 6], "one")
    assert drafter.propose([again], [2]) == [[5, 6]]


def literal(tokens: list[int], length: int) -> list[int]:
    """Look an ending up token by token, as a textbook would."""
    for size in (4, 3, 2):
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == tokens[-size:]:
                draft: list[int] = []
                while len(draft) < length:
                    draft.append((tokens + draft)[start + size + len(draft)])
                return draft
    return []


@given(st.lists(st.sampled_from([0, 1, 256, 65536]), min_size=1, max_size=40), st.integers(1, 6))
def test_equals_a_literal_lookup(tokens: list[int], length: int) -> None:
    assert propose(tokens, length) == literal(tokens, length)
