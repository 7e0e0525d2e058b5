"""The engine's heart: schedule, run, update. Synchronous, one step at a time, no threads.

A request's path: `add_request` checks it and queues it; `step` computes a batch and returns the
news of every request in it; its last event carries the finish reason, and then nothing of it is
left in the engine.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from qinfer.engine.admission import Limits, RequestFactory
from qinfer.engine.batch import build
from qinfer.engine.metrics import EngineStats, TokenCounters, snapshot
from qinfer.engine.output import OutputStream, TokenDecoder
from qinfer.engine.params import SamplingParams
from qinfer.engine.request import FinishReason, Request, TokenEvent, Usage
from qinfer.engine.runner import ModelRunner
from qinfer.engine.sampler import Sampled, SamplerState, sample
from qinfer.engine.scheduler import Batch, Scheduler
from qinfer.errors import RequestError
from qinfer.kvcache.inputs import ModelOutput

RowSink = Callable[[int, torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class _Generation:
    """A request that is continued, and what turns its logits into tokens and text."""

    request: Request
    sampler: SamplerState
    output: OutputStream


@dataclass(frozen=True, slots=True)
class _Scoring:
    """A request that is scored, and who wants its rows."""

    request: Request
    sink: RowSink


_Job = _Generation | _Scoring


@dataclass(frozen=True, slots=True)
class _Rows:
    """Which rows of a step's logits belong to a request; `position` is that of the first."""

    start: int
    stop: int
    position: int


class EngineCore:
    """Scheduler, model and text output, joined.

    Args:
        runner: computes the steps.
        scheduler: decides what is computed; its block manager's pool is the runner's.
        tokenizer: turns tokens into bytes.
        limits: what requests are accepted, and the values of unset fields.
        seed: of the draws of requests that bring none; None = different each time.
        device: where the runner's tensors live.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        tokenizer: TokenDecoder,
        limits: Limits,
        *,
        seed: int | None = None,
        device: str = "cpu",
    ) -> None:
        self.scheduler = scheduler
        self.limits = limits
        self._runner = runner
        self._tokenizer = tokenizer
        self._factory = RequestFactory(limits, seed)
        self._device = device
        self._jobs: dict[str, _Job] = {}
        self._groups: dict[str, list[str]] = {}  # request id -> ids of its unfinished samples
        self._immediate: list[TokenEvent] = []
        self._tokens = TokenCounters()

    def step(self) -> list[TokenEvent]:
        """Compute one batch and return what is new; an empty list when there is nothing to do."""
        batch = self.scheduler.schedule()
        if not batch.items:
            return self._take_immediate()
        _note_start(batch)
        self._runner.copy_blocks(batch.copies)
        output = self._runner.run(build(batch, self.scheduler.blocks.block_size, self._device))
        return self._take_immediate() + self._update(batch, output)

    def check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Refuse a request that `add_request` would refuse for its prompt or parameters.

        Raises:
            RequestError: it is invalid, or too long for the context (ContextLengthError).
            CapacityError: it could never fit into the cache.
        """
        num_prompt = len(self.limits.check_prompt(prompt))
        checked = self.limits.check_params(num_prompt, params)
        self.scheduler.check_capacity(num_prompt + (checked.max_tokens or 0) - 1)

    def add_request(self, request_id: str, prompt: Sequence[int], params: SamplingParams) -> None:
        """Queue the `n` samples of a prompt.

        Args:
            request_id: addresses the events; unique among unfinished requests.
            prompt: token ids; empty = BOS.
            params: unset fields take the engine's defaults.

        Raises:
            RequestError: it is invalid, too long (ContextLengthError), or the id is in use.
            CapacityError: it could never fit into the cache, or too many wait already
                (OverloadedError).
        """
        self._refuse_known(request_id)
        self.scheduler.check_queue()
        requests = self._factory.generation(request_id, prompt, params, time.monotonic())
        self.scheduler.check_capacity(requests[0].max_slots)
        for request in requests:
            self._tokens.prompt_tokens += request.num_prompt
            if request.params.max_tokens == 0:
                self._tokens.count_finished("length")
                self._immediate.append(_last_event(request, "length"))
                continue
            sampler = SamplerState(request, self.limits.vocab_size, self._device)
            self._add(_Generation(request, sampler, OutputStream(request, self._tokenizer)))

    def add_score(
        self,
        request_id: str,
        token_ids: Sequence[int],
        sink: RowSink,
        *,
        start: int = 1,
        use_prefix_cache: bool = False,
    ) -> None:
        """Queue a sequence whose next-token distributions are wanted; no token is sampled.

        Args:
            request_id: addresses the last event; unique among unfinished requests.
            token_ids: the whole sequence.
            sink: called in ascending order with a position and float32 log-softmax rows
                `[rows, vocab]`, of which row `i` predicts the token after `position + i`.
            start: the first token whose distribution is wanted, at least 1.
            use_prefix_cache: take cached blocks for what lies before `start`.

        Raises:
            RequestError: it is invalid, too long (ContextLengthError), or the id is in use.
            CapacityError: it could never fit into the cache.
        """
        self._refuse_known(request_id)
        request = self._factory.scoring(
            request_id,
            token_ids,
            start=start,
            use_prefix_cache=use_prefix_cache,
            arrival=time.monotonic(),
        )
        self._tokens.prompt_tokens += request.num_prompt
        if start == len(token_ids):  # nothing follows the first token that is left out
            self._tokens.count_finished("length")
            self._immediate.append(_last_event(request, "length"))
            return
        self._add(_Scoring(request, sink))

    def abort(self, request_id: str) -> None:
        """Drop a request, waiting or running; unknown ids are ignored, it may just have ended."""
        self._immediate = [event for event in self._immediate if event.request_id != request_id]
        for child in list(self._groups.get(request_id, ())):
            self._close(self._jobs[child].request, "abort")

    @property
    def has_unfinished(self) -> bool:
        """Whether a step would do or tell anything."""
        return self.scheduler.has_unfinished or bool(self._immediate)

    def stats(self) -> EngineStats:
        """Return the engine's numbers now."""
        return snapshot(self.scheduler, self._tokens)

    def check_integrity(self) -> None:
        """Verify the books; for tests and idle moments.

        Raises:
            AssertionError: they are wrong.
        """
        self.scheduler.check_integrity()
        if self._groups.keys() != {job.request.parent for job in self._jobs.values()}:
            raise AssertionError("jobs and groups differ")

    def _refuse_known(self, request_id: str) -> None:
        if request_id in self._groups:
            raise RequestError(f"request id {request_id!r} is already in use", field="request_id")

    def _add(self, job: _Job) -> None:
        self.scheduler.add(job.request)
        self._jobs[job.request.id] = job
        self._groups.setdefault(job.request.parent, []).append(job.request.id)

    def _close(self, request: Request, reason: FinishReason) -> None:
        """Forget a request and free what it holds."""
        self.scheduler.finish(request, reason)
        self._tokens.count_finished(reason)
        del self._jobs[request.id]
        siblings = self._groups[request.parent]
        siblings.remove(request.id)
        if not siblings:
            del self._groups[request.parent]

    def _take_immediate(self) -> list[TokenEvent]:
        events, self._immediate = self._immediate, []
        return events

    def _update(self, batch: Batch, output: ModelOutput) -> list[TokenEvent]:
        """Turn a step's logits into tokens, texts and scores, and let go of what ended."""
        bad_layers = output.bad_layers.tolist()
        failed: list[tuple[Request, int]] = []
        scored: list[tuple[_Scoring, _Rows]] = []
        sampled: list[tuple[_Generation, int]] = []
        for job, rows in self._rows(batch):
            bad = [layer for layer in bad_layers[rows.start : rows.stop] if layer >= 0]
            if bad:
                failed.append((job.request, bad[0]))
            elif isinstance(job, _Scoring):
                scored.append((job, rows))
            else:
                sampled.append((job, rows.start))
        choices = sample(output.logits, [(row, job.request, job.sampler) for job, row in sampled])
        news = [(job, choice) for (job, _), choice in zip(sampled, choices, strict=True)]
        self.scheduler.update(batch, {job.request.id: (choice.token_id,) for job, choice in news})
        self._tokens.generation_tokens += len(news)
        events = [self._fail(request, layer) for request, layer in failed]
        events += [self._tell(job, choice) for job, choice in news]
        # Last, since a sink is foreign code: if it raises, the books are in order.
        for scoring, rows in scored:
            events += self._hand_over(scoring, rows, output.logits)
        return events

    def _rows(self, batch: Batch) -> list[tuple[_Job, _Rows]]:
        """Return which rows of the logits belong to whom; requests without rows are left out."""
        result = []
        start = 0
        for request, num_new in batch.items:
            wanted = request.wanted_rows(num_new)
            if wanted:
                stop = start + len(wanted)
                result.append((self._jobs[request.id], _Rows(start, stop, wanted.start)))
                start = stop
        return result

    def _tell(self, job: _Generation, choice: Sampled) -> TokenEvent:
        """Return the event of a newly sampled token, and close its request if that was the end."""
        request = job.request
        text, reason = job.output.push(choice.token_id)
        if reason is not None:
            self._close(request, reason)
        return TokenEvent(
            request_id=request.parent,
            index=request.index,
            token_ids=(choice.token_id,),
            text=text,
            logprobs=None if choice.logprob is None else (choice.logprob,),
            finish_reason=reason,
            usage=None if reason is None else _usage(request),
            queue_seconds=None if reason is None else request.queue_seconds,
        )

    def _fail(self, request: Request, layer: int) -> TokenEvent:
        """Return the event of a request whose numbers broke down, and close it."""
        message = (
            f"{self._runner.layer_name(layer)} gave NaN or infinity within the first "
            f"{request.num_computed} tokens; try another dtype: float16 overflows where bfloat16 "
            "and float32 do not"
        )
        self._close(request, "error")
        return _last_event(request, "error", message)

    def _hand_over(self, job: _Scoring, rows: _Rows, logits: torch.Tensor) -> list[TokenEvent]:
        """Give the rows of a scored sequence to its sink; its last event when it is complete."""
        request = job.request
        request.score_next = request.num_computed
        complete = request.num_computed == request.num_tokens
        if complete:
            self._close(request, "length")
        job.sink(rows.position, torch.log_softmax(logits[rows.start : rows.stop], dim=-1))
        return [_last_event(request, "length")] if complete else []


def _note_start(batch: Batch) -> None:
    """Note when requests got their first step."""
    now = time.monotonic()
    for request, _ in batch.items:
        if request.started is None:
            request.started = now


def _usage(request: Request) -> Usage:
    return Usage(request.num_prompt, request.num_output, request.num_cached)


def _last_event(request: Request, reason: FinishReason, error: str | None = None) -> TokenEvent:
    return TokenEvent(
        request_id=request.parent,
        index=request.index,
        token_ids=(),
        text="",
        finish_reason=reason,
        usage=_usage(request),
        error=error,
        queue_seconds=request.queue_seconds,
    )
