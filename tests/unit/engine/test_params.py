from dataclasses import replace
from typing import Any

import pytest

from qinfer.engine.params import SamplingDefaults, SamplingParams, StructuredOutput
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
        ("typical_p", 0),
        ("typical_p", 1.5),
        ("presence_penalty", 2.1),
        ("frequency_penalty", "much"),
        ("logit_bias", {1: 101}),
        ("logit_bias", {-1: 1}),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {1: None}),
        ("logit_bias", {None: 1}),
        ("logit_bias", [1, 2]),
        ("logit_bias", (1, 2)),
        ("logit_bias", dict.fromkeys(range(1025), 1.0)),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", "all"),
        ("bad_words", "word"),
        ("bad_words", [""]),
        ("bad_words", ["x"] * 300),
        ("prompt_logprobs", 21),
        ("prompt_logprobs", True),
        ("priority", 2**31),
        ("priority", 1.5),
        ("structured", {"json": {}}),
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
    given: dict[str, Any] = {
        "stop": "END",
        "stop_token_ids": [3, 4],
        "logit_bias": {"7": 1, 8: -2.5},
        "allowed_token_ids": {5},
        "bad_words": ["no"],
    }
    params = SamplingParams(**given, seed=-1, top_k=-1)
    assert params.stop == ("END",)
    assert params.stop_token_ids == (3, 4)
    assert params.logit_bias == ((7, 1.0), (8, -2.5))
    assert params.allowed_token_ids == (5,)
    assert params.bad_words == ("no",)
    assert replace(params, n=2).logit_bias == params.logit_bias


def test_defaults_keep_zeros() -> None:
    """E06: a zero is a value, not an omission."""
    params = SamplingDefaults(temperature=0.7, top_k=40).apply(
        SamplingParams(temperature=0.0, top_k=0)
    )
    assert (params.temperature, params.top_k, params.typical_p) == (0.0, 0, 1.0)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"json": {}, "regex": "a"},
        {"json": 5},
        {"json": {"a": {1, 2}}},
        {"json": ""},
        {"regex": ""},
        {"regex": 3},
        {"regex": "x" * 100_000},
        {"choice": []},
        {"choice": ["a", ""]},
        {"choice": "a"},
        {"choice": ["x"] * 2000},
        {"grammar": b"start: 1"},
    ],
)
def test_structured_output_that_is_none(fields: dict[str, Any]) -> None:
    """S04: refused at the door, with the field's name."""
    with pytest.raises(RequestError) as error:
        StructuredOutput(**fields)
    assert str(error.value.field).startswith("structured")


def test_structured_output_is_a_key() -> None:
    """Schemas are kept as text, keys in their order: that is the order in which they come."""
    given: dict[str, Any] = {"json": {"b": 1, "a": [2]}}
    assert StructuredOutput(**given) == StructuredOutput(json='{"b": 1, "a": [2]}')
    assert len({StructuredOutput(json={}), StructuredOutput(json="{}")}) == 1
    choices: dict[str, Any] = {"choice": ["a", "b"]}
    assert StructuredOutput(**choices).choice == ("a", "b")
