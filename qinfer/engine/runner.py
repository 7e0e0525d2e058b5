"""Runs the model on one step's inputs; the only place where the engine touches the decoder."""

from collections.abc import Sequence
from typing import Protocol

import torch

from qinfer.kvcache.inputs import ModelInputs, ModelOutput
from qinfer.kvcache.pool import KVPool
from qinfer.models.causal_lm import CausalLM


class ModelRunner(Protocol):
    """Whatever turns the inputs of a step into logits; tests bring a model of their own."""

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy cache blocks, `(source, target)` in this order, before the step is computed."""
        ...

    @property
    def num_threads(self) -> int:
        """CPU threads of the kernels that compute the model."""
        ...

    def run(self, inputs: ModelInputs) -> ModelOutput:
        """Compute one step."""
        ...

    def layer_name(self, index: int) -> str:
        """Return what to call an entry of `ModelOutput.bad_layers`."""
        ...


class Runner:
    """A decoder and the cache that it reads and writes.

    Args:
        decoder: the model.
        pool: its cache, whose blocks the scheduler's block manager hands out.
        num_threads: CPU threads of the decoder's kernels.
    """

    def __init__(self, decoder: CausalLM, pool: KVPool, *, num_threads: int = 1) -> None:
        self.decoder = decoder
        self.pool = pool
        self.num_threads = num_threads

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy cache blocks, `(source, target)` in this order, before the step is computed."""
        for source, target in copies:
            self.pool.copy_block(source, target)

    @torch.inference_mode()
    def run(self, inputs: ModelInputs) -> ModelOutput:
        """Write the new tokens' K and V to the cache and return the wanted rows of logits."""
        return self.decoder.forward(inputs, self.pool)

    def layer_name(self, index: int) -> str:
        """Return the name of a decoder layer, or of what comes after the last."""
        if index < self.decoder.config.num_layers:
            return f"model.layers.{index}"
        return "the final norm or lm_head"
