from qinfer.engine.params import SamplingParams
from qinfer.engine.request import Request


def make(num_tokens: int, num_computed: int, score_next: int | None = None) -> Request:
    return Request(
        id="r",
        tokens=[1] * num_tokens,
        num_prompt=num_tokens,
        params=SamplingParams(),
        max_length=num_tokens + 4,
        num_computed=num_computed,
        score_next=score_next,
    )


def test_wanted_rows() -> None:
    assert make(10, 0).wanted_rows(9) == range(0)
    assert make(10, 0).wanted_rows(10) == range(9, 10)
    assert make(10, 4).wanted_rows(6) == range(9, 10)
    assert make(10, 0, score_next=0).wanted_rows(4) == range(4)
    assert make(10, 4, score_next=6).wanted_rows(6) == range(6, 10)
    assert len(make(10, 0, score_next=6).wanted_rows(4)) == 0


def test_slots_and_reusable_tokens() -> None:
    assert (make(10, 0).max_slots, make(10, 0).max_reusable) == (13, 9)
    assert (make(10, 0, score_next=6).max_slots, make(10, 0, score_next=6).max_reusable) == (10, 6)
