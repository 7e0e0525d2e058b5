"""How a request wants its tokens chosen, and when to stop; vLLM's names. Torch-free."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from qinfer.errors import RequestError

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_N = 64
MAX_BIASES = 1024
MAX_BAD_WORDS = 256
MAX_CHOICES = 1024
MAX_STRUCTURE_CHARS = 64 * 1024
_INT64_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """What the output must look like; exactly one field is given.

    Args:
        json: a JSON schema, as a dictionary or as text (which is what is kept); {} = any JSON.
        regex: what the whole output matches, in the syntax of Rust's `regex`, in which digits and
            word characters are the ASCII ones.
        choice: the texts of which the output is one.
        grammar: a context-free grammar in Lark's notation, whose rule `start` is the output, or
            in that of llama.cpp (GBNF), whose rule `root` is.
    """

    json: Mapping[str, object] | str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        """Refuse what is no constraint; whether it can be followed is found by compiling it.

        Raises:
            RequestError: not exactly one field, one of a wrong type, or one that is too long.
        """
        if self.json is not None:
            object.__setattr__(self, "json", _as_schema(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _as_texts("structured.choice", self.choice))
        values = {
            "json": self.json,
            "regex": self.regex,
            "choice": self.choice,
            "grammar": self.grammar,
        }
        given = {name: value for name, value in values.items() if value is not None}
        if len(given) != 1:
            raise RequestError(
                "structured output takes one of json, regex, choice and grammar; given: "
                + (", ".join(given) or "none"),
                field="structured",
            )
        ((name, value),) = given.items()
        _check_structure(f"structured.{name}", value)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when to stop; vLLM's names.

    None in the first six means: the model's generation_config, else the neutral value.

    Args:
        temperature: 0 = greedy (ties go to the lowest id); default 1.
        top_k: keep the k most likely tokens; 0 or -1 = all.
        top_p: keep the smallest set whose probability reaches p, in (0, 1].
        min_p: keep tokens of at least p times the highest probability, in [0, 1].
        typical_p: keep the smallest set of typical tokens (arXiv 2202.00666) whose probability
            reaches p, in (0, 1].
        repetition_penalty: divides (multiplies, if negative) the logits of tokens that the prompt
            or output holds (CTRL, arXiv 1909.05858, section 4.1); 1 = off.
        presence_penalty: taken off the logits of tokens that the output holds, in [-2, 2].
        frequency_penalty: the same, times how often the output holds them, in [-2, 2].
        logit_bias: added to the logits of some tokens, -100 to 100 each; token id (or its
            decimal digits, as JSON needs it) to bias; kept as pairs.
        allowed_token_ids: no other token is chosen; None = all are allowed.
        bad_words: texts whose tokens never come one after the other, at the start of a text or
            after a space; spelled by other tokens they may still come.
        max_tokens: tokens to generate at most; None = up to the context limit.
        min_tokens: no stop before that many tokens.
        stop: strings that end the text; not part of it unless `include_stop_str_in_output`.
        stop_token_ids: tokens that end the text, beside the model's EOS set.
        ignore_eos: go on past the EOS set; without effect on structured output.
        seed: makes the draw reproducible whatever else is in the batch; None = different each time.
        n: independent samples per prompt.
        logprobs: report the chosen token's log-probability and those of so many top tokens, of
            the model's own distribution (before temperature and penalties); None = none.
        prompt_logprobs: the same for every token of the prompt but the first; None = none.
        priority: requests of a lower number run first.
        structured: what the output must look like; None = anything.
        skip_special_tokens: leave special tokens out of the text.
        include_stop_str_in_output: keep the matched stop string in the text.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    priority: int = 0
    structured: StructuredOutput | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        """Refuse values outside their range, naming the field.

        Raises:
            RequestError: the first field that is invalid.
        """
        stop: object = self.stop  # callers without types also give one text
        stops = (stop,) if isinstance(stop, str) else stop
        object.__setattr__(self, "stop", _as_texts("stop", stops))
        object.__setattr__(self, "bad_words", _as_texts("bad_words", self.bad_words))
        stop_ids = _as_ids("stop_token_ids", self.stop_token_ids)
        object.__setattr__(self, "stop_token_ids", stop_ids)
        if self.allowed_token_ids is not None:
            allowed = _as_ids("allowed_token_ids", self.allowed_token_ids)
            object.__setattr__(self, "allowed_token_ids", allowed)
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _as_biases(self.logit_bias))
        self._check_numbers()
        _check_texts("stop", self.stop, MAX_STOP_STRINGS)
        _check_texts("bad_words", self.bad_words, MAX_BAD_WORDS)
        if self.allowed_token_ids == ():
            raise RequestError(
                "allowed_token_ids is empty, so no token could be chosen; leave it out to allow "
                "all tokens",
                field="allowed_token_ids",
            )
        if not isinstance(self.structured, StructuredOutput | None):
            raise RequestError("structured must be a StructuredOutput", field="structured")

    def _check_numbers(self) -> None:
        _check_number("temperature", self.temperature, 0.0, 100.0)
        _check_integer("top_k", self.top_k, -1, _INT64_MAX)
        _check_number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number("typical_p", self.typical_p, 0.0, 1.0, open_low=True)
        _check_number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_integer("max_tokens", self.max_tokens, 0, _INT64_MAX)
        _check_integer("min_tokens", self.min_tokens, 0, _INT64_MAX)
        _check_integer("seed", self.seed, -(2**63), _INT64_MAX)
        _check_integer("n", self.n, 1, MAX_N)
        _check_integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _check_integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        _check_integer("priority", self.priority, -(2**31), 2**31 - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """What an unset sampling field means; from generation_config, or neutral."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0

    def apply(self, params: SamplingParams) -> SamplingParams:
        """Return `params` with every unset field filled in."""
        names = [entry.name for entry in fields(self) if getattr(params, entry.name) is None]
        return replace(params, **{name: getattr(self, name) for name in names})


def _as_schema(schema: object) -> str:
    """Return a JSON schema as text, keys in the order given: they are generated in that order."""
    if isinstance(schema, Mapping):
        try:
            return json.dumps(dict(schema))
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(
                f"structured.json cannot be written as JSON: {error}", field="structured.json"
            ) from error
    if not isinstance(schema, str):
        raise RequestError(
            f"structured.json must be a JSON schema, not {type(schema).__name__}",
            field="structured.json",
        )
    return schema


def _check_structure(name: str, value: object) -> None:
    if isinstance(value, tuple):
        if not 1 <= len(value) <= MAX_CHOICES or not all(value):
            raise RequestError(f"{name} needs 1 to {MAX_CHOICES} texts, none empty", field=name)
        length = sum(map(len, value))
    elif isinstance(value, str):
        length = len(value)
    else:
        raise RequestError(f"{name} must be a string, not {value!r}", field=name)
    if not 1 <= length <= MAX_STRUCTURE_CHARS:
        raise RequestError(
            f"{name} has {length} characters; it must have 1 to {MAX_STRUCTURE_CHARS}", field=name
        )


def _as_texts(name: str, texts: object) -> tuple[str, ...]:
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        kind = "a string or a list of strings" if name == "stop" else "a list of strings"
        raise RequestError(f"{name} must be {kind}", field=name)
    return tuple(texts)


def _check_texts(name: str, texts: tuple[str, ...], limit: int) -> None:
    if len(texts) > limit:
        raise RequestError(
            f"{name} has {len(texts)} strings; at most {limit} are allowed", field=name
        )
    for text in texts:
        if not 1 <= len(text) <= MAX_STOP_CHARS:
            raise RequestError(
                f"each string of {name} must have 1 to {MAX_STOP_CHARS} characters", field=name
            )


def _as_ids(name: str, token_ids: object) -> tuple[int, ...]:
    if not isinstance(token_ids, list | tuple | set | frozenset):
        raise RequestError(f"{name} must be a list of integers", field=name)
    for token_id in token_ids:
        if token_id is None:
            raise RequestError(f"{name} must be integers", field=name)
        _check_integer(name, token_id, 0, _INT64_MAX)
    return tuple(token_ids)


def _as_biases(biases: object) -> tuple[tuple[int, float], ...]:
    if isinstance(biases, tuple) and all(isinstance(p, tuple) and len(p) == 2 for p in biases):
        biases = dict(biases)
    if not isinstance(biases, Mapping):
        raise RequestError("logit_bias must map token ids to numbers", field="logit_bias")
    if len(biases) > MAX_BIASES:
        raise RequestError(
            f"logit_bias has {len(biases)} entries; at most {MAX_BIASES} are allowed",
            field="logit_bias",
        )
    pairs: dict[int, float] = {}
    for key, bias in biases.items():
        token_id = int(key) if isinstance(key, str) and key.isdecimal() and len(key) < 20 else key
        if token_id is None or bias is None:
            raise RequestError("logit_bias must map token ids to numbers", field="logit_bias")
        _check_integer("logit_bias", token_id, 0, _INT64_MAX)
        _check_number("logit_bias", bias, -100.0, 100.0)
        pairs[token_id] = float(bias)
    return tuple(pairs.items())


def _check_number(
    name: str, value: object, low: float, high: float, *, open_low: bool = False
) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{name} must be a number, not {value!r}", field=name)
    if not low <= value <= high or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise RequestError(f"{name} is {value}; it must be in {bracket}{low}, {high}]", field=name)


def _check_integer(name: str, value: object, low: int, high: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, not {value!r}", field=name)
    if not low <= value <= high:
        raise RequestError(f"{name} is {value}; it must be from {low} to {high}", field=name)
