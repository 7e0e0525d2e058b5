from typing import Any

import pytest

from qinfer.engine.params import SamplingDefaults, SamplingParams
from qinfer.engine.request import Request
from qinfer.errors import RequestError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", 10**400),
        ("temperature", "hot"),
        ("temperature", True),
        ("temperature", 999999),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("max_tokens", -186),
        ("max_tokens", 10**30),
        ("min_tokens", -1),
        ("seed", 2**64),
        ("seed", 1.5),
        ("n", 0),
        ("n", 100000),
        ("logprobs", 1000),
        ("stop", [""]),
        ("stop", ["x"] * 10_000),
        ("stop", ["x" * 1000]),
        ("stop", [1]),
        ("stop", 5),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", [None]),
        ("stop_token_ids", 7),
    ],
)
def test_values_out_of_range_name_their_field(field: str, value: Any) -> None:
    """E08, S04, S05: refused at the door, with the field's name."""
    with pytest.raises(RequestError) as error:
        SamplingParams(**{field: value})
    assert error.value.field == field
    assert field in str(error.value) or field == "stop"


@pytest.mark.parametrize("temperature", [0, 1e-38, 1e-5, 2])
def test_extreme_but_valid_temperatures_are_accepted(temperature: float) -> None:
    """E08."""
    assert SamplingParams(temperature=temperature).temperature == temperature


def test_spellings() -> None:
    given: dict[str, Any] = {"stop": "END", "stop_token_ids": [3, 4]}
    params = SamplingParams(**given, seed=-1, top_k=-1)
    assert params.stop == ("END",)
    assert params.stop_token_ids == (3, 4)


def test_defaults_keep_zeros() -> None:
    """E06: a zero is a value, not an omission."""
    params = SamplingDefaults(temperature=0.7, top_k=40).apply(
        SamplingParams(temperature=0.0, top_k=0)
    )
    assert (params.temperature, params.top_k) == (0.0, 0)


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
