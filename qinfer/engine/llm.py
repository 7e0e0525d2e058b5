"""The offline engine: a model with methods. Prompts in, finished results out, one call at a time.

Everything runs through the same core, scheduler and cache as a server's requests do; `score` too.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from qinfer import host
from qinfer.engine.beams import BeamParams
from qinfer.engine.config import from_options
from qinfer.engine.core import EngineCore
from qinfer.engine.load import Engine, Source, load_engine
from qinfer.engine.memory import MemoryReport, cache_layout
from qinfer.engine.params import SamplingParams
from qinfer.engine.request import RequestOutput
from qinfer.engine.runs import GenerationRun, OnLogprobs, ScoringRun
from qinfer.errors import QinferError, RequestError
from qinfer.models.causal_lm import WeightBytes
from qinfer.models.layers import KernelRow

Prompt = str | Mapping[str, Sequence[int]]
Message = Mapping[str, Any]
OnProgress = Callable[[int, int], None]

_SOURCE_OPTIONS = frozenset(entry.name for entry in fields(Source))


class LLM:
    """A loaded model and its engine.

    Args:
        model: directory in Hugging Face layout, hub id, or `.gguf` file.
        device: `auto` takes the GPU where there is one.
        dtype: of activations and unquantized weights; `auto` = the checkpoint's.
        kv_cache_dtype: `auto` = the scheme recorded in the checkpoint, else `dtype`.
        max_model_len: tokens per sequence; None = what the model, and the memory, allow.
        options: further fields of `EngineConfig` (`memory`, `threads`, `max_num_seqs`,
            `max_num_batched_tokens`, `enable_prefix_caching`, `seed`, `block_size`, `speculative`,
            ...), and those of `engine.load.Source` (`revision`, `token`, `chat_template`,
            `allow_pickle`, `on_load`).

    Attributes:
        config: the final settings; nobody changes them.
        model_config: the model's facts.
        checkpoint: the opened files.
        tokenizer: the model's.

    Raises:
        ConfigError: settings that cannot work.
        CheckpointError: the model is missing, damaged or unsupported.
        CapacityError: it does not fit into memory.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        device: str = "auto",
        dtype: str = "auto",
        kv_cache_dtype: str = "auto",
        max_model_len: int | None = None,
        **options: Any,
    ) -> None:
        source = {name: value for name, value in options.items() if name in _SOURCE_OPTIONS}
        settings = {name: value for name, value in options.items() if name not in source}
        config = from_options(
            {
                "device": device,
                "dtype": dtype,
                "kv_cache_dtype": kv_cache_dtype,
                "max_model_len": max_model_len,
                **settings,
            },
            others=sorted(_SOURCE_OPTIONS),
        )
        engine = load_engine(model, config, Source(**source))
        self._engine: Engine | None = engine
        self._serial = itertools.count()
        self.config = engine.config
        self.model_config = engine.model_config
        self.checkpoint = engine.checkpoint
        self.tokenizer = engine.tokenizer

    @property
    def core(self) -> EngineCore:
        """The engine's core, for `AsyncEngine`; while that runs, it must be the only user."""
        return self._open.core

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_progress: OnProgress | None = None,
    ) -> list[RequestOutput]:
        """Continue prompts and return the results in their order.

        A sequence whose numbers break down ends with the reason `error`; the others do not mind.

        Args:
            prompts: text, `{"prompt_token_ids": [...]}`, or a list of these. Text is encoded with
                the special tokens that the tokenizer adds.
            sampling_params: for all, or one per prompt; None = `SamplingParams()`.
            on_progress: called with the finished prompts and their number.

        Raises:
            RequestError: a prompt or parameter is invalid; nothing was computed then.
            CapacityError: a request could never fit into the cache.
        """
        texts = _as_list(prompts)
        return self._generate(texts, _per_prompt(sampling_params, len(texts)), on_progress)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamParams | None = None,
        *,
        on_progress: OnProgress | None = None,
    ) -> list[RequestOutput]:
        """Continue prompts by beam search, with the semantics of transformers' `generate`.

        Args:
            prompts: as for `generate`.
            params: of every search; None = `BeamParams()`.
            on_progress: as for `generate`.

        Returns:
            Per prompt `num_return_sequences` outputs, best first, each with its `score`.

        Raises:
            RequestError: a prompt or parameter is invalid; nothing was computed then.
            CapacityError: the beams of a search could never be in the cache together.
        """
        texts = _as_list(prompts)
        return self._generate(texts, [params or BeamParams()] * len(texts), on_progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_progress: OnProgress | None = None,
        **template_fields: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, through the model's chat template.

        Args:
            messages: `{"role": ..., "content": ...}` one after the other, or a list of such lists.
            sampling_params: as for `generate`.
            on_progress: as for `generate`.
            template_fields: further variables of the template, such as `tools`.

        Raises:
            RequestError: no messages, no template, or the template refuses them.
        """
        if not messages:
            raise RequestError("messages is empty; send at least one", field="messages")
        first = messages[0]
        chats = [messages] if isinstance(first, Mapping) else messages
        prompts = [
            {"prompt_token_ids": self.tokenizer.apply_chat_template(chat, **template_fields)}
            for chat in _checked_chats(chats)
        ]
        return self.generate(prompts, sampling_params, on_progress=on_progress)

    def score(
        self,
        token_ids: Sequence[Sequence[int]],
        on_logprobs: OnLogprobs | None = None,
        *,
        starts: Sequence[int] | None = None,
        use_prefix_cache: bool = False,
        on_progress: OnProgress | None = None,
    ) -> list[list[float]]:
        """Return the log-probability of every token but the first, through the served path.

        Args:
            token_ids: the sequences.
            on_logprobs: called with (sequence, position, float32 log-softmax rows
                `[rows, vocab]`), in ascending order per sequence; row `i` predicts the token
                after `position + i`. The last token's row, which predicts nothing, is left out.
            starts: per sequence, the first token that is scored, at least 1; None = 1. What lies
                before is context.
            use_prefix_cache: take cached blocks for context before `starts`.
            on_progress: called with the finished sequences and their number.

        Returns:
            Natural logarithms, per sequence from its first scored token on.

        Raises:
            ContextLengthError: a sequence exceeds `max_model_len`.
            RequestError: a sequence is empty or holds an unknown token.
            NonFiniteError: NaN or infinity; names the layer.
        """
        starts = [1] * len(token_ids) if starts is None else starts
        runs = [
            ScoringRun(
                f"score-{next(self._serial)}",
                index,
                list(ids),
                start=start,
                use_prefix_cache=use_prefix_cache,
                on_logprobs=on_logprobs,
            )
            for index, (ids, start) in enumerate(zip(token_ids, starts, strict=True))
        ]
        self._finish(runs, on_progress)
        return [run.logprobs for run in runs]

    def memory(self) -> MemoryReport:
        """Return where the memory goes, now and at its peak."""
        engine = self._open
        layout, blocks = engine.pool.layout, engine.core.scheduler.blocks
        return MemoryReport(
            weights_bytes=engine.decoder.memory_bytes,
            checkpoint_bytes=engine.checkpoint.total_bytes,
            kv_bytes_per_token=layout.bytes_per_token,
            kv_allocated_bytes=engine.pool.allocated_bytes,
            kv_used_bytes=blocks.num_used * layout.block_bytes,
            kv_peak_bytes=blocks.peak_used * layout.block_bytes,
            kv_capacity_tokens=engine.pool.num_blocks * layout.block_size,
            activation_bytes=engine.activation_bytes,
            peak_rss_bytes=host.peak_rss(),
            draft_bytes=engine.draft_bytes,
        )

    def weight_bytes(self) -> WeightBytes:
        """Return where the bytes of the weights are, and how many lie in huge pages."""
        return self._open.decoder.weight_bytes()

    def kernels(self) -> list[KernelRow]:
        """Return which kernel each layer got, and why not the ones before it."""
        return self._open.decoder.kernels(cache_layout(self.model_config, self.config))

    def close(self) -> None:
        """Let go of weights and cache; the engine cannot be used after that."""
        self._engine = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def _open(self) -> Engine:
        if self._engine is None:
            raise QinferError("this LLM is closed; make a new one")
        return self._engine

    def _generate(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams | BeamParams],
        on_progress: OnProgress | None,
    ) -> list[RequestOutput]:
        runs = [
            GenerationRun(
                f"generate-{next(self._serial)}", _text_of(prompt), self._encode(prompt), param
            )
            for prompt, param in zip(prompts, params, strict=True)
        ]
        self._finish(runs, on_progress)
        return [run.output() for run in runs]

    def _encode(self, prompt: object) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        token_ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else None
        if not isinstance(token_ids, Iterable):
            raise RequestError(
                "a prompt must be text or a mapping with a list of prompt_token_ids, not "
                f"{prompt!r:.80}",
                field="prompt",
            )
        return list(token_ids)

    def _finish(
        self, runs: Sequence[GenerationRun] | Sequence[ScoringRun], on_progress: OnProgress | None
    ) -> None:
        """Step the core until every run has ended; whatever happens, nothing is left behind."""
        core = self.core
        unfinished: dict[str, GenerationRun | ScoringRun] = {}
        try:
            for run in runs:
                run.add_to(core)
                unfinished[run.id] = run
            while unfinished:
                for event in core.step():
                    run = unfinished[event.request_id]
                    if run.take(event):
                        del unfinished[event.request_id]
                        if on_progress is not None:
                            on_progress(len(runs) - len(unfinished), len(runs))
        finally:
            for request_id in unfinished:
                core.abort(request_id)


def _per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError(
            f"{len(params)} sampling_params for {count} prompts; give one, or one per prompt",
            field="sampling_params",
        )
    return list(params)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise RequestError(
            f"prompts must be text, a mapping or a list of these, not {prompts!r:.80}",
            field="prompt",
        )
    return list(prompts)


def _text_of(prompt: Prompt) -> str | None:
    return prompt if isinstance(prompt, str) else None


def _checked_chats(chats: Any) -> list[Sequence[Message]]:
    """Return conversations, refusing an empty one."""
    checked = []
    for chat in chats:
        if not chat or not all(isinstance(message, Mapping) for message in chat):
            raise RequestError(
                "each conversation must be a non-empty list of messages", field="messages"
            )
        checked.append(chat)
    return checked
