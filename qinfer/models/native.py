"""The decoder as one C++ program per step: recorded once, replayed by one native call.

All activations are float32, or int8 where they meet quantized weights; the weights lie in tiles.
What it computes is what `models.decoder` computes; the tests hold one against the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from qinfer.kernels.cpu import paged, tiled
from qinfer.kernels.cpu.arena import huge_page_bytes
from qinfer.kernels.cpu.faults import Notes, add_faults
from qinfer.kernels.cpu.program import Norm, Program
from qinfer.kernels.spec import AttnSpec
from qinfer.kvcache.inputs import ModelInputs, ModelOutput
from qinfer.kvcache.layout import KVLayout
from qinfer.kvcache.pool import KVPool
from qinfer.models.causal_lm import WeightBytes
from qinfer.models.config import ModelConfig
from qinfer.models.layers import KernelRow
from qinfer.models.native_index import StepIndex
from qinfer.models.native_layer import (
    NativeAttention,
    NativeGroup,
    NativeLayer,
    Recording,
)
from qinfer.models.rope import RotaryTable
from qinfer.models.step import attention_specs, describe_attention

# Programs are recorded for token counts in steps of a factor, so that few are ever made.
_SMALLEST_STEP = 16


@dataclass(frozen=True, slots=True, eq=False)
class NativeWeights:
    """All weights of a model.

    Args:
        dtype: of the dense ones.
        embedding: float32 or bfloat16 `[vocab, hidden]`; None = the tied head's tiles.
        layers: in order.
        norm: float32 `[hidden]`, the final norm.
        head: hidden to vocab.
    """

    dtype: torch.dtype
    embedding: torch.Tensor | None
    layers: Sequence[NativeLayer]
    norm: torch.Tensor
    head: NativeGroup


class NativeDecoder:
    """A causal language model over the paged cache, run by C++ kernels.

    Args:
        config: the model's facts.
        weights: in tiles.
        rotary: cos and sin up to the longest admitted sequence.
        threads: size of the thread team.
    """

    def __init__(
        self, config: ModelConfig, weights: NativeWeights, rotary: RotaryTable, *, threads: int
    ) -> None:
        self.config = config
        self.dtype = weights.dtype
        self.device = "cpu"
        self._weights = weights
        self._rotary = rotary
        self._threads = threads
        self._last: RecordedStep | None = None

    @property
    def uses_torch(self) -> bool:
        """Whether torch's threads compute the layers."""
        return False

    @property
    def max_positions(self) -> int:
        """Positions that the rotary table covers."""
        return self._rotary.length

    @property
    def memory_bytes(self) -> int:
        """Resident bytes of all weights: the embedding, and the head where it has its own."""
        weights = self._weights
        layers = sum(layer.resident_bytes for layer in weights.layers)
        embedding = 0 if weights.embedding is None else weights.embedding.nbytes
        return layers + weights.norm.nbytes + embedding + weights.head.resident_bytes

    def weight_bytes(self) -> WeightBytes:
        """Return where these bytes are."""
        embedding, head = self._weights.embedding, self._weights.head
        dense = 0 if embedding is None else embedding.nbytes
        groups = [group for layer in self._weights.layers for group in layer.groups]
        tiles = [linear.weight.data for group in [*groups, head] for linear in group.linears]
        return WeightBytes(
            layers=self.memory_bytes - dense - head.resident_bytes,
            embedding=dense,
            head=head.resident_bytes,
            huge_pages=huge_page_bytes(tensor.data_ptr() for tensor in tiles),
        )

    def step_bytes(self, layout: KVLayout, max_tokens: int, max_rows: int) -> int | None:
        """Return the memory of the program that serves steps of this size: found by recording it.

        Its buffers become resident when they are first written, so asking costs little.
        """
        step = self._record(KVPool(layout, 1), _bucket(max_tokens), _bucket(max_rows))
        return step.nbytes + self._scratch_floats() * torch.float32.itemsize

    def kernels(self, layout: KVLayout) -> list[KernelRow]:
        """Describe which kernel each linear and the attention over a cache of `layout` got."""
        groups = [group for layer in self._weights.layers for group in layer.groups]
        rows = [linear.row for group in [*groups, self._weights.head] for linear in group.linears]
        attention = [
            KernelRow("attention", describe_attention(spec), "cpu.paged", ())
            for spec in self._specs(layout)
        ]
        return rows + attention

    def forward(self, inputs: ModelInputs, pool: KVPool) -> ModelOutput:
        """Run one step: write the tokens' K and V to `pool`, return the wanted logits.

        The logits are valid until the next step.
        """
        step = self._step(inputs, pool)
        step.index.load(inputs, self.max_positions)
        step.tokens.program.run(self._threads)
        return step.output(inputs.logit_rows.numel())

    def _step(self, inputs: ModelInputs, pool: KVPool) -> "RecordedStep":
        """Return a program for a step of this size over this cache; the last one, if it serves."""
        num_tokens, num_rows = inputs.token_ids.numel(), max(inputs.logit_rows.numel(), 1)
        last = self._last
        if last is None or last.pool is not pool or not last.holds(num_tokens, num_rows):
            tokens, rows = _bucket(num_tokens), _bucket(num_rows)
            if last is not None:
                tokens = max(tokens, last.index.max_tokens)
                rows = max(rows, last.index.max_rows)
            self._last = last = self._record(pool, tokens, rows)
        return last

    def _record(self, pool: KVPool, max_tokens: int, max_rows: int) -> "RecordedStep":
        config, weights = self.config, self._weights
        max_blocks = pool.layout.num_blocks(self.max_positions)
        index = StepIndex(max_tokens, max_rows, max_blocks)
        attention = self._attention(pool.layout, index)
        program = Program()
        recording = Recording(program, max_tokens, index.num_tokens)
        hidden = recording.floats("hidden", config.hidden_size)
        if weights.embedding is not None:
            program.embed(weights.embedding, index.token_ids, hidden, index.num_tokens)
        else:
            table = weights.head.linears[0].weight
            tiled.add_embed(program, table, index.token_ids, hidden, index.num_tokens)
        for position, layer in enumerate(weights.layers):
            layer.record(recording, hidden, attention[layer.window], pool.layer(position))
        rows = Recording(program, max_rows, index.num_rows)
        logits = self._record_head(rows, index, hidden)
        best, bad_layers = torch.zeros(2, max_rows, dtype=torch.int64)
        program.argmax(logits, best, index.num_rows)
        notes = Notes(
            tokens=recording.bad_layers,
            num_tokens=index.num_tokens,
            rows=rows.bad_layers,
            num_rows=index.num_rows,
            num_layers=config.num_layers,
        )
        add_faults(program, best, index.logit_rows, notes, bad_layers)
        return RecordedStep(pool, index, recording, rows, ModelOutput(logits, bad_layers, best))

    def _attention(self, layout: KVLayout, index: StepIndex) -> dict[int | None, NativeAttention]:
        """Return what attention needs, by sliding window."""
        specs = self._specs(layout)
        scratch = torch.zeros(self._scratch_floats())
        return {
            spec.sliding_window: NativeAttention(spec, self._rotary, index, scratch)
            for spec in specs
        }

    def _record_head(self, rows: Recording, index: StepIndex, hidden: torch.Tensor) -> torch.Tensor:
        """Write down the final norm and the head of the wanted rows; returns their logits."""
        weights, config = self._weights, self.config
        wanted = rows.floats("wanted", config.hidden_size)
        rows.program.gather(hidden, index.logit_rows, wanted, index.num_rows)
        norm = Norm(weights.norm, config.rms_norm_eps)
        feed = rows.norm(wanted, norm, weights.head, config.num_layers - 1)
        return rows.linears(weights.head, feed)

    def _scratch_floats(self) -> int:
        heads = (self.config.num_heads, self.config.num_kv_heads, self.config.head_dim)
        return paged.scratch_floats(self._threads, self.max_positions, *heads)

    def _specs(self, layout: KVLayout) -> list[AttnSpec]:
        return attention_specs(self.config, layout, torch.float32, self.device)


@dataclass(frozen=True, slots=True, eq=False)
class RecordedStep:
    """A program, the memory it reads its step from, and where its results lie.

    Args:
        pool: the cache that it writes and reads.
        index: the step's index tensors.
        tokens: the part of the program that runs on all tokens.
        rows: the part that runs on the wanted rows; the same program.
        results: with room for the most rows.
        views: the results of the last number of rows that was asked for.
    """

    pool: KVPool
    index: StepIndex
    tokens: Recording
    rows: Recording
    results: ModelOutput
    views: dict[int, ModelOutput] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the index tensors, the activations and the logits."""
        return self.index.nbytes + self.tokens.nbytes + self.rows.nbytes

    def holds(self, num_tokens: int, num_rows: int) -> bool:
        """Tell whether a step of this size fits."""
        return num_tokens <= self.index.max_tokens and num_rows <= self.index.max_rows

    def output(self, num_rows: int) -> ModelOutput:
        """Return the results of the last run."""
        view = self.views.get(num_rows)
        if view is None:
            results = self.results
            best = None if results.best is None else results.best[:num_rows]
            view = ModelOutput(results.logits[:num_rows], results.bad_layers[:num_rows], best)
            self.views.clear()
            self.views[num_rows] = view
        return view


def _bucket(count: int) -> int:
    """Return the size that a program for `count` rows is recorded for: a power of two."""
    return max(_SMALLEST_STEP, 1 << (count - 1).bit_length())
