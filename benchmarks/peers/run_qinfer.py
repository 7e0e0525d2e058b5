"""qinfer's process: the engine's own steps, with scheduler, cache, sampler and detokenizer."""

import time
from pathlib import Path
from typing import Any

import torch
from protocol import Settings, serve

from qinfer import LLM, SamplingParams, __version__, quantize
from qinfer.kernels.cpu import native


class Qinfer:
    """An `LLM` whose core is stepped here, so that the clock can start between two steps."""

    def __init__(self, settings: Settings) -> None:
        self._llm = LLM(
            settings["model"],
            device="cpu",
            kv_cache_dtype=settings["kv"],
            max_model_len=settings["max_len"],
            threads=settings["threads"],
            memory=settings["memory"],
        )
        self._serial = 0
        kernels = {row.kernel for row in self._llm.kernels()}
        library = native.load()
        self.versions = {
            "qinfer": __version__,
            "torch": torch.__version__,
            "library": "none" if library is None else library.isa,
            "kernels": ", ".join(sorted(kernels)),
        }

    def prefill(self, cached: list[int], prompt: list[int]) -> float:
        if cached:
            self._first_tokens([cached], 1)
        start = time.perf_counter()
        (last,) = self._first_tokens([cached + prompt], 1).values()
        seconds = time.perf_counter() - start
        if last.usage.cached_tokens != len(cached):
            raise RuntimeError(
                f"{last.usage.cached_tokens} tokens came from the cache, not {len(cached)}"
            )
        return seconds

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        core = self._llm.core
        # The first to be prefilled decode while the last are: they need tokens to spare.
        running = self._first_tokens(prompts, 2 * steps + len(prompts))
        start = time.perf_counter()
        for _ in range(steps):
            num_tokens = sum(len(event.token_ids) for event in core.step())
            if num_tokens != len(prompts):
                raise RuntimeError(f"a step gave {num_tokens} tokens for {len(prompts)} sequences")
        seconds = time.perf_counter() - start
        for request_id in running:
            core.abort(request_id)
        return seconds

    def _first_tokens(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        """Add requests and step until each has a token; return their first events by id."""
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        core = self._llm.core
        waiting = set()
        for prompt in prompts:
            self._serial += 1
            core.add_request(str(self._serial), prompt, params)
            waiting.add(str(self._serial))
        events: dict[str, Any] = {}
        while waiting - events.keys():
            for event in core.step():
                events.setdefault(event.request_id, event)
        return events


def prepare(settings: Settings) -> None:
    """Quantize the model to where the settings want it."""
    if not Path(settings["model"]).exists():
        quantize(settings["source"], settings["model"], **settings["quantize"])


if __name__ == "__main__":
    serve(prepare, Qinfer)
