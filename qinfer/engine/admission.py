"""The door of the engine: a request is checked once, completely, and its defaults filled in.

Everything that can be wrong with a request is found here, before it has taken anything, so that
one bad request never hurts another. Torch-free.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from qinfer.engine.params import SamplingDefaults, SamplingParams
from qinfer.engine.request import Request
from qinfer.errors import ConfigError, ContextLengthError, RequestError


@dataclass(frozen=True, slots=True)
class Limits:
    """What an engine accepts, and what an unset field means.

    Args:
        max_model_len: tokens of prompt and output together.
        vocab_size: rows of the embedding; token ids lie below.
        bos_token_id: stands in for an empty prompt; None = an empty prompt is refused.
        eos_ids: tokens that end a text unless `ignore_eos`.
        defaults: values of unset sampling fields.
    """

    max_model_len: int
    vocab_size: int
    bos_token_id: int | None = None
    eos_ids: frozenset[int] = frozenset()
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)

    def check_prompt(self, token_ids: Sequence[int]) -> list[int]:
        """Return the prompt to run: a copy, or BOS for an empty one.

        Raises:
            RequestError: empty without a BOS, or a token id outside the vocabulary.
        """
        tokens = list(token_ids)
        if not tokens:
            if self.bos_token_id is None:
                raise RequestError(
                    "the prompt is empty, and the model has no BOS token to start from; "
                    "give at least one token",
                    field="prompt",
                )
            return [self.bos_token_id]
        if not all(type(token) is int for token in tokens):
            raise RequestError("prompt_token_ids must be integers", field="prompt")
        if min(tokens) < 0 or max(tokens) >= self.vocab_size:
            raise RequestError(
                f"prompt_token_ids holds {min(tokens) if min(tokens) < 0 else max(tokens)}; "
                f"ids lie in 0 to {self.vocab_size - 1}",
                field="prompt",
            )
        return tokens

    def check_params(self, num_prompt: int, params: SamplingParams) -> SamplingParams:
        """Return `params` with every default filled in, `max_tokens` too.

        Raises:
            ContextLengthError: prompt and requested tokens exceed the context.
            RequestError: a token outside the vocabulary.
        """
        room = self.max_model_len - num_prompt
        wanted = max(room, 1) if params.max_tokens is None else params.max_tokens
        if wanted > room:
            raise ContextLengthError(
                f"the prompt has {num_prompt} tokens and {wanted} more are requested, but the "
                f"context holds {self.max_model_len}; shorten the prompt"
                + ("" if params.max_tokens is None else " or lower max_tokens"),
                field="prompt" if room < 1 else "max_tokens",
            )
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("allowed_token_ids", params.allowed_token_ids or ())
        self._check_ids("logit_bias", dict(params.logit_bias or ()))
        return self.defaults.apply(replace(params, max_tokens=wanted))

    def _check_ids(self, name: str, token_ids: Iterable[int]) -> None:
        largest = max(token_ids, default=0)
        if largest >= self.vocab_size:
            raise RequestError(
                f"{name} holds {largest}; ids lie in 0 to {self.vocab_size - 1}", field=name
            )

    def check_scored(self, token_ids: Sequence[int], start: int) -> list[int]:
        """Return a sequence to score, checked.

        Raises:
            ContextLengthError: longer than the context.
            RequestError: empty, a token id outside the vocabulary, or `start` outside of it.
        """
        tokens = list(token_ids)
        if not tokens:
            raise RequestError("an empty sequence cannot be scored", field="prompt")
        tokens = self.check_prompt(tokens)
        if len(tokens) > self.max_model_len:
            raise ContextLengthError(
                f"the sequence has {len(tokens)} tokens, but the context holds "
                f"{self.max_model_len}; score shorter windows",
                field="prompt",
            )
        if not 1 <= start <= len(tokens):
            raise RequestError(
                f"scoring starts at token {start}; it must be from 1 to {len(tokens)}, since the "
                "first token has no context",
                field="start",
            )
        return tokens


class RequestFactory:
    """Turns checked prompts into requests, one per sample, with the seeds of their draws.

    Args:
        limits: what is accepted.
        seed: makes the draws of requests without a seed reproducible, in the order in which they
            come; None = different each time.
    """

    def __init__(self, limits: Limits, seed: int | None) -> None:
        self.limits = limits
        self._seeds = random.SystemRandom() if seed is None else random.Random(seed)

    def generation(
        self, request_id: str, prompt: Sequence[int], params: SamplingParams, arrival: float
    ) -> list[Request]:
        """Return the `n` requests of one prompt.

        Raises:
            RequestError: prompt or parameters cannot be run; see `Limits`.
        """
        tokens = self.limits.check_prompt(prompt)
        params = self.limits.check_params(len(tokens), params)
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        # The end of structured output is an end token: nothing else could follow.
        goes_on = params.ignore_eos and params.structured is None
        eos_ids = frozenset() if goes_on else self.limits.eos_ids
        scored = params.prompt_logprobs is not None  # the first sample tells it for all
        return [
            Request(
                id=request_id if params.n == 1 else f"{request_id}#{index}",
                tokens=list(tokens),
                num_prompt=len(tokens),
                params=params,
                max_length=len(tokens) + (params.max_tokens or 0),
                parent=request_id,
                index=index,
                seed=seed,
                stop_ids=eos_ids | frozenset(params.stop_token_ids),
                prompt_next=0 if scored and index == 0 else None,
                use_prefix_cache=not scored or index > 0,
                arrival=arrival,
            )
            for index in range(params.n)
        ]

    def scoring(
        self,
        request_id: str,
        token_ids: Sequence[int],
        *,
        start: int,
        use_prefix_cache: bool,
        arrival: float,
    ) -> Request:
        """Return the request that computes the distribution over every token from `start` on.

        It runs all tokens but the last, which predicts nothing of the sequence.

        Raises:
            RequestError: see `Limits.check_scored`.
        """
        tokens = self.limits.check_scored(token_ids, start)[:-1]
        return Request(
            id=request_id,
            tokens=tokens,
            num_prompt=len(tokens),
            params=SamplingParams(max_tokens=0),
            max_length=len(tokens),
            parent=request_id,
            score_next=start - 1,
            use_prefix_cache=use_prefix_cache,
            arrival=arrival,
        )


def sampling_defaults(generation_config: Mapping[str, Any]) -> SamplingDefaults:
    """Return the sampling defaults that a generation_config.json sets.

    Raises:
        ConfigError: a value is out of range.
    """
    names = [entry.name for entry in fields(SamplingDefaults)]
    values = {name: value for name in names if (value := generation_config.get(name)) is not None}
    try:
        SamplingParams(**values)
    except RequestError as error:
        raise ConfigError(f"generation_config.json: {error}") from error
    return SamplingDefaults(**values)


def eos_ids(*sources: Any) -> frozenset[int]:
    """Return the set of end tokens from spellings such as 2, [1, 2] or None.

    Raises:
        ConfigError: a source, which comes from the model's files, is something else.
    """
    ids: set[int] = set()
    for source in sources:
        values = source if isinstance(source, list | tuple) else [source]
        found = [value for value in values if value is not None]
        if not all(type(value) is int for value in found):
            raise ConfigError(
                f"the model's generation_config.json or config.json: eos_token_id is {source!r}; "
                "a token id or a list of them is needed"
            )
        ids.update(found)
    return frozenset(ids)
