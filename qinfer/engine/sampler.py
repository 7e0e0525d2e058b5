"""Choosing the next tokens of a step: from rows of logits and what each request wants of them.

A request's choice depends on its own row alone. The random number of a draw is a function of
(seed, sample index, output position): nothing else in the batch can shift it, a preempted request
draws the same again.

A plain greedy request takes the row's most likely token as the model reports it. Any other gets a
`Draw`: the row's edits (`engine.edits`), the tokens that are allowed at all (`allowed_token_ids`,
structured output), and the filters. The C++ kernel computes it where it can, else the reference.
"""

import hashlib
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from qinfer.engine.edits import LogitEditor, bits_of
from qinfer.engine.logprobs import top_logprobs
from qinfer.engine.output import TextTokenizer
from qinfer.engine.params import SamplingParams
from qinfer.engine.request import Request, TokenLogprob
from qinfer.engine.structured import GrammarCompiler, Matcher
from qinfer.kernels import sampling
from qinfer.kernels.cpu import native
from qinfer.kernels.cpu.sampling import NativeSampler
from qinfer.kernels.sampling import Draw
from qinfer.kvcache.inputs import ModelOutput

GREEDY_TEMPERATURE = 1e-5

_NOTHING_LEFT = (
    "no token is left to choose: what allowed_token_ids, logit_bias and structured output leave "
    "has nothing in common"
)


def uniform(seed: int, index: int, position: int) -> float:
    """Return the random number in [0, 1) of one draw; equal arguments, equal number."""
    key = struct.pack("<qqq", seed, index, position)
    bits = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
    return (bits >> 11) / (1 << 53)


def bad_word_ids(words: Iterable[str], tokenizer: TextTokenizer) -> list[tuple[int, ...]]:
    """Return the token sequences that spell words at the start of a text and after a space."""
    spellings = dict.fromkeys(
        tuple(tokenizer.encode(space + word.lstrip(), add_special_tokens=False))
        for word in words
        for space in ("", " ")
    )
    return [spelling for spelling in spellings if spelling]


class SamplerState:
    """What sampling one request needs beyond its row of logits; kept from step to step.

    Args:
        request: grows from step to step.
        editor: makes the edits of its rows.
        allowed: uint32 bits of the tokens that it may hold; None = all.
        matcher: follows its structured output; None = any text.
    """

    def __init__(
        self,
        request: Request,
        editor: LogitEditor,
        allowed: np.ndarray | None,
        matcher: Matcher | None,
    ) -> None:
        self.request = request
        self._editor = editor
        self._allowed = allowed
        self._matcher = matcher
        self._greedy = (request.params.temperature or 0.0) < GREEDY_TEMPERATURE
        self._always_drawn = not self._greedy or allowed is not None or matcher is not None

    @property
    def plain(self) -> bool:
        """Whether the next token is simply the most likely one."""
        return not self._always_drawn and self._editor.idle

    @property
    def error(self) -> str:
        """Why no token was left to choose."""
        return (None if self._matcher is None else self._matcher.error) or _NOTHING_LEFT

    def draw(self, row: int, logits: np.ndarray, *, bans: bool = True) -> Draw:
        """Return how the next token is chosen.

        Args:
            row: of the logits that are drawn from.
            logits: float32 `[vocab]`, that row.
            bans: forbid bad words, and to end below `min_tokens`.
        """
        request, params = self.request, self.request.params
        edits = self._editor.edits(logits, bans=bans)
        allowed = self._mask()
        if self._greedy:
            return Draw(row=row, edits=edits, allowed=allowed)
        return Draw(
            row=row,
            number=uniform(request.seed, request.index, request.num_output),
            temperature=params.temperature or 1.0,
            typical_p=params.typical_p or 1.0,
            top_k=max(params.top_k or 0, 0),
            top_p=params.top_p or 1.0,
            min_p=params.min_p or 0.0,
            edits=edits,
            allowed=allowed,
        )

    def _mask(self) -> np.ndarray | None:
        if self._matcher is None:
            return self._allowed
        mask = self._matcher.mask(self.request.tokens, self.request.num_prompt)
        return mask if self._allowed is None else mask & self._allowed


class Sampled(NamedTuple):
    """A chosen token, and its log-probabilities if they were asked for.

    Args:
        token_id: the token; -1 if none was left to choose.
        logprob: under the model's own distribution.
        error: why no token was left.
    """

    token_id: int
    logprob: TokenLogprob | None = None
    error: str | None = None


class Sampler:
    """Chooses tokens; made once per engine.

    Args:
        tokenizer: spells the words that requests forbid, and what structured output is made of.
        vocab_size: width of a row of logits.
        eos_ids: tokens that end a text.
        threads: of the C++ kernels; the same as the model's, for they share a team.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        *,
        vocab_size: int,
        eos_ids: Iterable[int] = (),
        threads: int = 1,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._compiler = GrammarCompiler(tokenizer, vocab_size=vocab_size, eos_ids=eos_ids)
        self._native = NativeSampler(vocab_size, threads) if native.load() is not None else None

    def prepare(self, params: SamplingParams) -> None:
        """Do what takes long for a new request: compile its grammar. Any thread may call.

        Raises:
            RequestError: structured output that cannot be followed.
        """
        if params.structured is not None:
            self._compiler.compile(params.structured)

    def start(self, request: Request) -> SamplerState:
        """Return the state of a new request.

        Raises:
            RequestError: see `prepare`.
        """
        params = request.params
        words = bad_word_ids(params.bad_words, self._tokenizer)
        allowed = params.allowed_token_ids
        structured = params.structured
        return SamplerState(
            request,
            LogitEditor(request, words),
            None if allowed is None else bits_of(allowed, self._vocab_size),
            None if structured is None else self._compiler.matcher(structured),
        )

    def sample(
        self, output: ModelOutput, choices: Sequence[tuple[int, SamplerState]]
    ) -> list[Sampled]:
        """Return the next token of some requests.

        Args:
            output: of the step.
            choices: a row of its logits, which must be finite, and whose next token it gives.
        """
        plain = [state.plain for _, state in choices]
        best = _most_likely(output) if any(plain) else []
        drawn = [choice for choice, easy in zip(choices, plain, strict=True) if not easy]
        tokens = iter(self._draw(output.logits, drawn) if drawn else ())
        return [
            _sampled(output.logits, row, state, best[row] if easy else next(tokens))
            for (row, state), easy in zip(choices, plain, strict=True)
        ]

    def _draw(self, logits: torch.Tensor, choices: Sequence[tuple[int, SamplerState]]) -> list[int]:
        if logits.device.type != "cpu":
            rows = torch.tensor([row for row, _ in choices], device=logits.device)
            logits = logits[rows].cpu()
            choices = [(row, state) for row, (_, state) in enumerate(choices)]
        values = logits.numpy()
        tokens = self._choose(logits, [state.draw(row, values[row]) for row, state in choices])
        for i, (row, state) in enumerate(choices):
            if tokens[i] < 0:  # bans alone must not leave a request without a next token
                (tokens[i],) = self._choose(logits, [state.draw(row, values[row], bans=False)])
        return tokens

    def _choose(self, logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
        if self._native is None:
            return [sampling.choose(logits[draw.row], draw) for draw in draws]
        supported = [draw for draw in draws if self._native.unsupported_reason(draw) is None]
        tokens = iter(self._native.choose(logits, supported))
        return [
            next(tokens)
            if self._native.unsupported_reason(draw) is None
            else sampling.choose(logits[draw.row], draw)
            for draw in draws
        ]


def _most_likely(output: ModelOutput) -> list[int]:
    # Of equal ones argmax takes the lowest id.
    best = torch.argmax(output.logits, dim=-1) if output.best is None else output.best
    tokens: list[int] = best.tolist()
    return tokens


def _sampled(logits: torch.Tensor, row: int, state: SamplerState, token: int) -> Sampled:
    if token < 0:
        return Sampled(-1, None, state.error)
    count = state.request.params.logprobs
    return Sampled(token, None if count is None else top_logprobs(logits[row], token, count))
