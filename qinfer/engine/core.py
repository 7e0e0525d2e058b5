"""The engine's heart: schedule, run, update. Synchronous, one step at a time, no threads.

A request's path: `add_request` checks it and queues it; `step` computes a batch and returns the
news of every request in it; its last event carries the finish reason, and then nothing of it is
left in the engine.
"""

import time
from collections.abc import Sequence

import torch

from qinfer.engine.admission import Limits, RequestFactory
from qinfer.engine.batch import build
from qinfer.engine.beam_group import Beam, BeamGroup
from qinfer.engine.beams import BeamParams
from qinfer.engine.jobs import Generation, Rows, RowSink, Scoring, last_event, usage_of
from qinfer.engine.logprobs import PromptScores
from qinfer.engine.metrics import EngineStats, TokenCounters, snapshot
from qinfer.engine.output import OutputStream, TextTokenizer
from qinfer.engine.params import SamplingParams
from qinfer.engine.request import FinishReason, Request, TokenEvent
from qinfer.engine.runner import ModelRunner
from qinfer.engine.sampler import Sampler
from qinfer.engine.scheduler import Batch, Scheduler
from qinfer.engine.speculation import Speculator, Verdict, judge
from qinfer.errors import RequestError
from qinfer.kvcache.inputs import ModelOutput

_Job = Generation | Scoring | Beam


class EngineCore:
    """Scheduler, model and text output, joined.

    Args:
        runner: computes the steps.
        scheduler: decides what is computed; its block manager's pool is the runner's.
        tokenizer: turns tokens into bytes, and text into tokens.
        limits: what requests are accepted, and the values of unset fields.
        seed: of the draws of requests that bring none; None = different each time.
        device: where the runner's tensors live.
        speculator: drafts tokens; None = one token per request and step.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        tokenizer: TextTokenizer,
        limits: Limits,
        *,
        seed: int | None = None,
        device: str = "cpu",
        speculator: Speculator | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.limits = limits
        self._runner = runner
        self._tokenizer = tokenizer
        self._factory = RequestFactory(limits, seed)
        self._sampler = Sampler(
            tokenizer,
            vocab_size=limits.vocab_size,
            eos_ids=limits.eos_ids,
            threads=runner.num_threads,
        )
        self._device = device
        self._speculator = speculator
        self._jobs: dict[str, _Job] = {}
        self._groups: dict[str, list[str]] = {}  # request id -> ids of its unfinished samples
        self._immediate: list[TokenEvent] = []
        self._tokens = TokenCounters()

    def step(self) -> list[TokenEvent]:
        """Compute one batch and return what is new; an empty list when there is nothing to do."""
        if self._speculator is not None:
            self._speculator.draft(
                [job.request for job in self._jobs.values() if isinstance(job, Generation)]
            )
        batch = self.scheduler.schedule()
        if not batch.items:
            self._restart_beams(batch)
            return self._take_immediate()
        _note_start(batch)
        self._runner.copy_blocks(batch.copies)
        output = self._runner.run(build(batch, self.scheduler.blocks.block_size, self._device))
        return self._take_immediate() + self._update(batch, output)

    def check(self, prompt: Sequence[int], params: SamplingParams | BeamParams) -> None:
        """Refuse a request that `add_request` would refuse for its prompt or parameters.

        Raises:
            RequestError: it is invalid, or too long for the context (ContextLengthError).
            CapacityError: it could never fit into the cache.
        """
        num_prompt = len(self.limits.check_prompt(prompt))
        wanted = params.as_sampling() if isinstance(params, BeamParams) else params
        checked = self.limits.check_params(num_prompt, wanted)
        self._check_capacity(max(num_prompt + (checked.max_tokens or 0) - 1, num_prompt), params)
        self.prepare(wanted)

    def prepare(self, params: SamplingParams) -> None:
        """Do what takes long for a new request: compile its grammar, once. Any thread may call.

        Raises:
            RequestError: structured output that cannot be followed.
        """
        self._sampler.prepare(params)

    def add_request(
        self, request_id: str, prompt: Sequence[int], params: SamplingParams | BeamParams
    ) -> None:
        """Queue the `n` samples of a prompt, or a beam search, which tells nothing but its end.

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
        wanted = params.as_sampling() if isinstance(params, BeamParams) else params
        requests = self._factory.generation(request_id, prompt, wanted, time.monotonic())
        self._check_capacity(requests[0].max_slots, params)
        self._tokens.prompt_tokens += requests[0].num_prompt
        for request in requests:
            if isinstance(params, BeamParams):
                group = BeamGroup(request, params, self._tokenizer, self.scheduler)
                self._add(Beam(request, group))
            elif request.params.max_tokens == 0 and request.prompt_next is None:
                self._tokens.count_finished("length")
                self._immediate.append(last_event(request, "length"))
            else:
                sampler, text = self._sampler.start(request), OutputStream(request, self._tokenizer)
                scores = None if request.prompt_next is None else PromptScores(request)
                self._add(Generation(request, sampler, text, scores))

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
            self._immediate.append(last_event(request, "length"))
            return
        self._add(Scoring(request, sink))

    def abort(self, request_id: str) -> None:
        """Drop a request, waiting or running; unknown ids are ignored, it may just have ended."""
        self._immediate = [event for event in self._immediate if event.request_id != request_id]
        jobs = [self._jobs[child] for child in self._groups.get(request_id, ())]
        if jobs and isinstance(jobs[0], Beam):
            self._end_search(jobs[0].group, "abort")
            return
        for job in jobs:
            self._close(job.request, "abort")

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

    def _check_capacity(self, num_slots: int, params: SamplingParams | BeamParams) -> None:
        """Refuse what could never fit; the beams of a search must be in the cache together."""
        beams = params.beam_width if isinstance(params, BeamParams) else 1
        self.scheduler.check_capacity(num_slots, num_sequences=beams)

    def _add(self, job: _Job) -> None:
        self.scheduler.add(job.request)
        self._enter(job)

    def _enter(self, job: _Job) -> None:
        self._jobs[job.request.id] = job
        self._groups.setdefault(job.request.parent, []).append(job.request.id)

    def _close(self, request: Request, reason: FinishReason) -> None:
        """Forget a request that ended, and free what it holds."""
        self._tokens.count_finished(reason)
        self._leave(request, reason)

    def _leave(self, request: Request, reason: FinishReason) -> None:
        self.scheduler.finish(request, reason)
        if self._speculator is not None:
            self._speculator.forget(request.id)
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
        generated: list[tuple[Generation, int]] = []
        verdicts: list[Verdict] = []
        scored: list[tuple[Scoring, Rows]] = []
        beams: list[tuple[Beam, int]] = []
        for job, rows in self._rows(batch):
            if isinstance(job, Generation):
                verdict = _read_prompt(job, rows, output)
                if verdict is not None:
                    verdicts.append(verdict)
                elif rows.at(job.request.num_tokens - 1) < rows.stop:
                    generated.append((job, rows.at(job.request.num_tokens - 1)))
            elif isinstance(job, Beam):
                beams.append((job, rows.start))
            else:
                scored.append((job, rows))
        verdicts += judge(generated, output, self._sampler)
        self.scheduler.update(batch, {v.job.request.id: v.token_ids for v in verdicts})
        if self._speculator is not None:
            self._speculator.learn(verdicts, len(batch.items), sum(n for _, n in batch.items))
        events = [self._tell(verdict) for verdict in verdicts]
        self._restart_beams(batch)
        events += self._advance_beams(beams, output)
        # Last, since a sink is foreign code: if it raises, the books are in order.
        for scoring, rows in scored:
            events += self._hand_over(scoring, rows, output)
        return events

    def _rows(self, batch: Batch) -> list[tuple[_Job, Rows]]:
        """Return which rows of the logits belong to whom; requests without rows are left out."""
        result = []
        start = 0
        for request, num_new in batch.items:
            wanted = request.wanted_rows(num_new)
            if wanted:
                stop = start + len(wanted)
                result.append((self._jobs[request.id], Rows(start, stop, wanted.start)))
                start = stop
        return result

    def _tell(self, verdict: Verdict) -> TokenEvent:
        """Return the event of a request's new tokens, and close it if they were the last."""
        request, reason, error = verdict.job.request, verdict.reason, None
        self._tokens.generation_tokens += len(verdict.chosen)
        if verdict.bad_layer is not None:
            reason, error = "error", self._breakdown(request, verdict.bad_layer)
        elif verdict.error is not None:
            reason, error = "error", verdict.error
        if reason is not None:
            self._close(request, reason)
        return TokenEvent(
            request_id=request.parent,
            index=request.index,
            token_ids=verdict.token_ids,
            text="".join(verdict.texts),
            logprobs=verdict.logprobs,
            prompt_logprobs=None if verdict.job.prompt is None else verdict.job.prompt.take(),
            finish_reason=reason,
            usage=None if reason is None else usage_of(request),
            error=error,
            contradictory=error is not None and verdict.bad_layer is None,
            queue_seconds=None if reason is None else request.queue_seconds,
        )

    def _breakdown(self, request: Request, layer: int) -> str:
        """Return what to tell of a request whose numbers broke down."""
        return (
            f"{self._runner.layer_name(layer)} gave NaN or infinity within the first "
            f"{request.num_computed} tokens; try another dtype: float16 overflows where bfloat16 "
            "and float32 do not"
        )

    def _hand_over(self, job: Scoring, rows: Rows, output: ModelOutput) -> list[TokenEvent]:
        """Give the rows of a scored sequence to its sink; its last event when it is complete."""
        request = job.request
        bad_layer = _first_bad(output.bad_layers[rows.start : rows.stop])
        if bad_layer is not None:
            self._close(request, "error")
            return [last_event(request, "error", self._breakdown(request, bad_layer))]
        request.score_next = request.num_computed
        complete = request.num_computed == request.num_tokens
        if complete:
            self._close(request, "length")
        job.sink(rows.position, torch.log_softmax(output.logits[rows.start : rows.stop], dim=-1))
        return [last_event(request, "length")] if complete else []

    def _restart_beams(self, batch: Batch) -> None:
        """Let searches start again of which a beam was preempted."""
        for request in batch.preempted:
            job = self._jobs.get(request.id)
            if isinstance(job, Beam):
                job.group.restart()

    def _advance_beams(
        self, beams: Sequence[tuple[Beam, int]], output: ModelOutput
    ) -> list[TokenEvent]:
        """Give beams their rows of logits and let those searches go on that have all of them."""
        events = []
        for beam, row in beams:
            if beam.request.id not in self._jobs or beam.request.num_computed == 0:
                continue  # its search broke down, or has lost its blocks
            bad_layer = _first_bad(output.bad_layers[row : row + 1])
            if bad_layer is not None:
                message = self._breakdown(beam.request, bad_layer)
                events += self._end_search(beam.group, "error", message)
                continue
            beam.group.add_row(beam.request, output.logits[row])
            if beam.group.complete:
                events += self._continue_search(beam.group)
        return events

    def _continue_search(self, group: BeamGroup) -> list[TokenEvent]:
        """Let a search take a step; its events if that was the last."""
        begun, ended = group.advance()
        for request in begun:
            self._enter(Beam(request, group))
        for request in ended:
            self._leave(request, "stop")
        if group.members:
            return []
        events = group.events()
        for event in events:
            self._tokens.generation_tokens += len(event.token_ids)
            self._tokens.count_finished(event.finish_reason or "stop")
        return events

    def _end_search(
        self, group: BeamGroup, reason: FinishReason, error: str | None = None
    ) -> list[TokenEvent]:
        """Close a search before its end and return its events."""
        events = group.last_events(reason, error)
        for _ in events:
            self._tokens.count_finished(reason)
        for request in group.members:
            self._leave(request, reason)
        return events


def _read_prompt(job: Generation, rows: Rows, output: ModelOutput) -> Verdict | None:
    """Give a request the rows of its prompt, if it wants them; a verdict if that was its end."""
    request = job.request
    if job.prompt is not None and request.prompt_next is not None:
        bad_layer = _first_bad(output.bad_layers[rows.start : rows.stop])
        if bad_layer is not None:
            return Verdict(job, rows.start, bad_layer=bad_layer)
        job.prompt.add(rows.position, output.logits[rows.start : rows.stop])
    over = request.params.max_tokens == 0 and request.prompt_next is None
    return Verdict(job, rows.start, reason="length") if over else None


def _first_bad(bad_layers: torch.Tensor) -> int | None:
    """Return the first layer in `bad_layers` `[rows]` that was not finite; None: all were."""
    return next((layer for layer in bad_layers.tolist() if layer >= 0), None)


def _note_start(batch: Batch) -> None:
    """Note when requests got their first step."""
    now = time.monotonic()
    for request, _ in batch.items:
        if request.started is None:
            request.started = now
