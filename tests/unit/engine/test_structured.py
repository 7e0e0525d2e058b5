"""Structured output on random logits: whatever the model wants, the text fits."""

import itertools
import json
import random
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_engine import EOS as FAKE_EOS
from support.fake_engine import drain, make_core, outputs
from support.tokenizers import (
    SPECIALS,
    byte_alphabet,
    byte_fallback,
    byte_level,
    write_tokenizer,
)
from tokenizers import Tokenizer as Backend
from tokenizers import trainers

from qinfer.engine import structured
from qinfer.engine.params import SamplingParams, StructuredOutput
from qinfer.engine.request import Request
from qinfer.engine.sampler import Sampler
from qinfer.engine.speculation import Speculator
from qinfer.engine.structured import GrammarCompiler
from qinfer.errors import RequestError
from qinfer.kvcache.inputs import ModelOutput
from qinfer.models.tokenizer import Tokenizer, load_tokenizer

MODEL_VOCAB = 700  # more rows than the tokenizers have ids


def trained() -> Backend:
    """Return a byte-level tokenizer whose tokens cut across the punctuation of JSON."""
    tokenizer = byte_level()
    texts = [json.dumps({"name": "x" * n, "list": [n, True, None]}, indent=n) for n in range(9)]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        initial_alphabet=byte_alphabet(),
        special_tokens=list(SPECIALS),
    )
    tokenizer.train_from_iterator(texts * 3, trainer)
    return tokenizer


@pytest.fixture(scope="module", params=["byte level", "byte fallback", "trained"])
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    path: Path = tmp_path_factory.mktemp("tokenizer")
    made = {"byte level": byte_level, "byte fallback": byte_fallback, "trained": trained}
    write_tokenizer(path, made[request.param]())
    return load_tokenizer(path)


@pytest.fixture(scope="module")
def sampler(tokenizer: Tokenizer) -> Sampler:
    return Sampler(tokenizer, vocab_size=MODEL_VOCAB, eos_ids={eos_of(tokenizer)})


def eos_of(tokenizer: Tokenizer) -> int:
    assert tokenizer.eos_token_id is not None
    return tokenizer.eos_token_id


def generate(
    sampler: Sampler, tokenizer: Tokenizer, wanted: StructuredOutput, seed: int, **fields: Any
) -> str:
    """Return the text of a model with random logits, which must end by itself."""
    params = SamplingParams(
        **{"temperature": 1.0, "structured": wanted, "max_tokens": 5000, "seed": seed, **fields}
    )
    eos = eos_of(tokenizer)
    request = Request("r", [65], 1, params, 9999, seed=seed, stop_ids=frozenset({eos}))
    state, generator = sampler.start(request), torch.Generator().manual_seed(seed)
    for _ in range(3000):
        row = torch.randn(1, MODEL_VOCAB, generator=generator)
        row[0, eos] += 2.0  # so that a text which may end mostly does
        (choice,) = sampler.sample(ModelOutput(row, torch.tensor([-1])), [(0, state)])
        assert choice.error is None
        if choice.token_id == eos:
            return tokenizer.decode(request.tokens[1:])
        request.tokens.append(choice.token_id)
    raise AssertionError("the text does not end")


LEAVES = st.sampled_from(
    [
        {"type": "integer", "minimum": -5, "maximum": 2000},
        {"type": "boolean"},
        {"type": "null"},
        {"enum": ["a", 'quote " and \\', "é 🎉", 3, None]},
        {"const": {"k": [1, "two"]}},
        {"type": "string", "maxLength": 5},
        {"type": "string", "pattern": "^[a-z]{2,4}-[0-9]+$", "maxLength": 9},
    ]
)


def _array(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": 3}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: (
        inner.map(_array)
        | st.dictionaries(st.sampled_from(["b", "a", "key with space"]), inner).map(_object)
        | st.lists(inner, min_size=1, max_size=2).map(lambda parts: {"anyOf": parts})
    ),
    max_leaves=4,
)


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Validate by the keywords that the strategy uses."""
    if "anyOf" in schema:
        return any(fits(value, part) for part in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"] and not isinstance(value, bool)
    if "const" in schema:
        return bool(value == schema["const"])
    kind = schema["type"]
    if kind == "array":
        return (
            isinstance(value, list)
            and 1 <= len(value) <= 3
            and all(fits(item, schema["items"]) for item in value)
        )
    if kind == "object":
        return (
            isinstance(value, dict)
            and list(value) == schema["required"]
            and all(fits(value[name], part) for name, part in schema["properties"].items())
        )
    if kind == "integer":
        return type(value) is int and -5 <= value <= 2000
    if kind == "string":
        found = re.search(schema.get("pattern", ""), value) if isinstance(value, str) else None
        return found is not None and len(value) <= schema["maxLength"]
    return value is None if kind == "null" else isinstance(value, bool)


@settings(max_examples=25, deadline=None)
@given(schema=SCHEMAS, seed=st.integers(0, 2**32), temperature=st.sampled_from([0.0, 1.0, 5.0]))
def test_json_always_fits_its_schema(
    sampler: Sampler, tokenizer: Tokenizer, schema: Any, seed: int, temperature: float
) -> None:
    text = generate(
        sampler, tokenizer, StructuredOutput(json=schema), seed, temperature=temperature, top_p=0.9
    )
    assert fits(json.loads(text), schema), text


def test_any_object_is_json_and_does_not_indent_for_ever(
    sampler: Sampler, tokenizer: Tokenizer
) -> None:
    wanted = StructuredOutput(json={"type": "object", "maxProperties": 3})
    bias = {tokenizer.encode(text)[0]: 3.0 for text in ('"', "}", "]")}
    text = generate(sampler, tokenizer, wanted, 3, logit_bias=bias)
    assert isinstance(json.loads(text), dict)
    spaces = {tokenizer.encode(" ")[-1]: 100.0}
    text = generate(sampler, tokenizer, StructuredOutput(json={"const": [1]}), 4, logit_bias=spaces)
    assert json.loads(text) == [1]
    assert 32 <= text.count(" ") <= 4 * 32


@pytest.mark.parametrize("pattern", ["[a-c]{3,6}", r"(\d{1,3}\.){3}\d{1,3}", "x|yy?", "é+🎉"])
def test_regex_matches_the_whole_text(sampler: Sampler, tokenizer: Tokenizer, pattern: str) -> None:
    for seed in range(3):
        text = generate(sampler, tokenizer, StructuredOutput(regex=pattern), seed)
        assert re.fullmatch(pattern, text), text


def test_choices_are_taken_literally(sampler: Sampler, tokenizer: Tokenizer) -> None:
    choices = ('a "quoted" one', "back\\slash", "two\nlines", "日本 🎉", "a", "ab", ".*")
    texts = {
        generate(sampler, tokenizer, StructuredOutput(choice=choices), seed) for seed in range(40)
    }
    assert texts <= set(choices)
    assert len(texts) > 4


LARK = 'start: "(" start ")" | "x"'
GBNF = 'root ::= "(" root ")" | "x"'


@pytest.mark.parametrize("grammar", [LARK, GBNF])
def test_grammars_nest(sampler: Sampler, tokenizer: Tokenizer, grammar: str) -> None:
    for seed in range(5):
        text = generate(sampler, tokenizer, StructuredOutput(grammar=grammar), seed)
        depth = text.index("x")
        assert text == "(" * depth + "x" + ")" * depth


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"json": "{"}, "not valid JSON"),
        ({"json": "[1]"}, "is an object"),
        ({"json": {"type": "thing"}}, "Invalid type: thing"),
        ({"json": {"not": {"type": "string"}}}, "not"),
        ({"json": "[" * 60_000}, "not valid JSON"),
        ({"regex": "(?=x)y"}, "look-around"),
        ({"regex": "["}, "unclosed"),
        ({"grammar": "start: missing"}, "missing"),
        ({"grammar": 'other: "a"'}, "start"),
        ({"grammar": 'root ::= "a'}, "GBNF"),
    ],
)
def test_what_cannot_be_followed_is_refused_with_the_reason(
    sampler: Sampler, fields: dict[str, Any], reason: str
) -> None:
    """S03: refused at the door, not ignored."""
    params = SamplingParams(structured=StructuredOutput(**fields))
    (name,) = fields
    for _ in range(2):
        with pytest.raises(RequestError, match=reason) as error:
            sampler.prepare(params)
        assert error.value.field == f"structured.{name}"
        assert len(str(error.value)) < 400


def test_a_model_without_an_end_token_is_refused(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, vocab_size=MODEL_VOCAB)
    with pytest.raises(RequestError, match="end token"):
        compiler.compile(StructuredOutput(regex="a"))


def test_masks_are_cached_and_rolled_back(tokenizer: Tokenizer) -> None:
    """What a draft's tokens led to is forgotten when they are dropped."""
    compiler = GrammarCompiler(tokenizer, vocab_size=MODEL_VOCAB, eos_ids={eos_of(tokenizer)})
    matcher = compiler.matcher(StructuredOutput(regex="[ab]c|d"))
    a, b, c, d = (tokenizer.encode(text)[-1] for text in "abcd")
    prompt = [5, 6]
    first = matcher.mask(prompt, 2)
    assert matcher.mask(prompt, 2) is first
    assert _ids(first) >= {a, b, d}
    after_a = matcher.mask([*prompt, a], 2)
    assert _ids(after_a) == {c}
    assert _ids(matcher.mask([*prompt, a, c], 2)) == {eos_of(tokenizer)}
    assert _ids(matcher.mask([*prompt, b], 2)) == {c}  # another token, one fewer
    assert _ids(matcher.mask([*prompt, d], 2)) == {eos_of(tokenizer)}
    assert _ids(matcher.mask(prompt, 2)) == _ids(first)
    assert matcher.error is None
    assert not _ids(matcher.mask([*prompt, c], 2))
    assert matcher.error is not None


def _ids(mask: Any) -> set[int]:
    return {i for i in range(MODEL_VOCAB) if mask[i // 32] >> (i % 32) & 1}


def test_the_number_of_compiled_grammars_is_bounded(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structured, "MAX_COMPILED", 3)
    compiler = GrammarCompiler(tokenizer, vocab_size=MODEL_VOCAB, eos_ids={eos_of(tokenizer)})
    wanted = [StructuredOutput(regex="a" * n) for n in range(1, 6)]
    threads = [threading.Thread(target=compiler.compile, args=(each,)) for each in wanted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiler._compiled) == 3
    for each in (*wanted[:2], wanted[0], wanted[2]):
        compiler.compile(each)
    assert list(compiler._compiled) == [wanted[1], wanted[0], wanted[2]]


def test_min_tokens_yield_to_a_text_that_can_only_end(
    sampler: Sampler, tokenizer: Tokenizer
) -> None:
    choice = StructuredOutput(choice=("ab", "ba"))
    assert generate(sampler, tokenizer, choice, 1, min_tokens=50) in {"ab", "ba"}
    text = generate(sampler, tokenizer, StructuredOutput(regex="a+"), 1, min_tokens=20)
    assert len(tokenizer.encode(text)) >= 1
    assert len(text) >= 20


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_sample_of_a_batch_follows_its_own_grammar(temperature: float) -> None:
    """E04: beside others, in a small pool, and to its end even with ignore_eos."""
    core, _ = make_core(num_blocks=14, max_batch_tokens=16)
    regexes = ["[A-Z]{3,20}", "(AB|CD){2,9}", "[0-9]{10}"]
    rng = random.Random(0)
    for index, regex in enumerate(regexes):
        params = SamplingParams(
            temperature=temperature,
            n=1 if temperature == 0 else 2,
            seed=index,
            max_tokens=30,
            ignore_eos=True,
            structured=StructuredOutput(regex=regex),
        )
        core.check(rng.choices(range(60), k=9), params)
        core.add_request(str(index), rng.choices(range(60), k=9), params)
    events = drain(core)
    assert {event.finish_reason for event in events} <= {None, "stop"}
    for (request_id, _), tokens in outputs(events).items():
        assert tokens[-1] == FAKE_EOS
        text = bytes(token + 32 for token in tokens[:-1]).decode()
        assert re.fullmatch(regexes[int(request_id)], text)


class HalfRight:
    """Drafts what will come, every other draft with a wrong token in it."""

    def __init__(self, truth: list[int]) -> None:
        self.truth = truth
        self.count = 0

    def prepare(self, requests: Sequence[Request]) -> Sequence[Request]:
        return requests

    def propose(self, requests: Sequence[Request], lengths: Sequence[int]) -> list[list[int]]:
        self.count += 1
        (request,), (length,) = requests, lengths
        draft = self.truth[request.num_output :][:length]
        return [draft[:1] + [5] * (len(draft) - 1) if self.count % 2 else draft]

    def forget(self, request_id: str) -> None:
        del request_id


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_change_nothing(temperature: float) -> None:
    """E04: grammar, history and bans follow the tokens that were accepted, not those on trial."""
    params = SamplingParams(
        temperature=temperature,
        seed=4,
        max_tokens=40,
        min_tokens=8,
        frequency_penalty=1.0,
        logit_bias={40: 2.0},
        structured=StructuredOutput(regex="([A-F]{2}|[0-9]+,){3,8}END"),
    )
    plain, _ = make_core()
    plain.add_request("a", [1, 2, 3], params)
    truth = outputs(drain(plain))[("a", 0)]
    clock = itertools.count()
    speculator = Speculator(HalfRight(truth), 4, clock=lambda: float(next(clock)))
    core, _ = make_core(speculator=speculator)
    core.add_request("a", [1, 2, 3], params)
    assert outputs(drain(core))[("a", 0)] == truth
    assert 0 < core.stats().accepted_draft_tokens < core.stats().draft_tokens


def test_a_bad_grammar_hurts_nobody_else() -> None:
    core, _ = make_core()
    bad = SamplingParams(structured=StructuredOutput(regex="["))
    with pytest.raises(RequestError, match=r"structured\.regex"):
        core.check([1, 2], bad)
    with pytest.raises(RequestError, match=r"structured\.regex"):
        core.add_request("bad", [1, 2], bad)
    core.add_request("good", [1, 2], SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(outputs(drain(core))[("good", 0)]) == 3
