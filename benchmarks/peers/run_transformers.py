"""transformers' process: plain forward calls with a growing cache and argmax, no `generate`."""

import time

import torch
import transformers
from protocol import Settings, serve
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel


class Forward:
    """A causal language model of the library, called below its generation loop."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def prefill(self, cached: list[int], prompt: list[int]) -> float:
        cache = DynamicCache()
        if cached:
            self._next(torch.tensor([cached]), cache)
        start = time.perf_counter()
        self._next(torch.tensor([prompt]), cache)
        return time.perf_counter() - start

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        cache = DynamicCache()
        tokens = self._next(torch.tensor(prompts), cache)
        start = time.perf_counter()
        for _ in range(steps):
            tokens = self._next(tokens, cache)
        return time.perf_counter() - start

    @torch.inference_mode()
    def _next(self, token_ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        """Return the most likely next tokens `[batch, 1]`."""
        output = self._model(token_ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return output.logits.argmax(-1)


class Transformers(Forward):
    """A model of the library, unquantized."""

    def __init__(self, settings: Settings) -> None:
        torch.set_num_threads(settings["threads"])
        model = AutoModelForCausalLM.from_pretrained(
            settings["model"],
            dtype=settings["dtype"],
            attn_implementation=settings["attention"],
        )
        super().__init__(model.eval())
        self.versions = {"transformers": transformers.__version__, "torch": torch.__version__}


def prepare(settings: Settings) -> None:
    """Nothing to make: the source's own directory is loaded."""


if __name__ == "__main__":
    serve(prepare, Transformers)
