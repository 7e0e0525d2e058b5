"""The one decoder: a pre-norm transformer with grouped-query attention and a gated MLP or experts.

A family differs by the facts in `ModelConfig`. Calibration has stages of its own for the same
mathematics (`quant.dense`, `quant.experts`).
"""

from collections.abc import Mapping

import torch

from qinfer.kernels import reference
from qinfer.kernels.spec import PagedKV
from qinfer.kvcache.inputs import ModelInputs, ModelOutput
from qinfer.kvcache.layout import KVLayout
from qinfer.kvcache.pool import KVPool
from qinfer.models.causal_lm import WeightBytes
from qinfer.models.config import ModelConfig
from qinfer.models.layers import GatedMLP, KernelRow, Linear, LinearGroup, RMSNorm, Weight
from qinfer.models.moe import MoE
from qinfer.models.rope import RotaryTable
from qinfer.models.step import StepContext, StepMaker

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
OUTPUT = "self_attn.o_proj"
DOWN = "mlp.down_proj"


class DecoderBlock:
    """One layer: attention and MLP, each after a norm and with a residual.

    Attributes:
        mlp: what follows attention: a dense MLP, or a mixture of experts.

    Args:
        config: the model's facts.
        layer: index, which decides the sliding window.
        weights: by name inside the block: linears without a suffix (`self_attn.q_proj`), the rest
            with one (`self_attn.q_proj.bias`, `input_layernorm.weight`).
        dtype: of activations and unquantized weights.
        device: where it runs.
        fuse: run q, k, v and gate, up as one product each.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        weights: Mapping[str, Weight],
        *,
        dtype: torch.dtype,
        device: str,
        fuse: bool = True,
    ) -> None:
        self.config = config
        self.window = config.windows[layer]
        plain = {name: w for name, w in weights.items() if isinstance(w, torch.Tensor)}

        def group(*names: str) -> LinearGroup:
            biases = {name: plain[f"{name}.bias"] for name in names if f"{name}.bias" in plain}
            chosen = {name: weights[name] for name in names}
            return LinearGroup(chosen, biases, dtype=dtype, device=device, fuse=fuse)

        def norm(name: str) -> RMSNorm:
            return RMSNorm(plain[name], config.rms_norm_eps, dtype)

        def gated(gate: str, up: str, down: str) -> GatedMLP:
            return GatedMLP(group(gate, up), group(down))

        self._qkv, self._output = group(*QKV), group(OUTPUT)
        self.mlp: GatedMLP | MoE
        if config.moe is not None and config.is_sparse(layer):
            names = config.moe.names
            experts = [gated(*names.expert(index)) for index in range(config.moe.num_experts)]
            self.mlp = MoE(config.moe, plain[f"{names.router}.weight"], experts, device=device)
        else:
            self.mlp = gated(*GATE_UP, DOWN)
        self._input_norm = norm("input_layernorm.weight")
        self._mlp_norm = norm("post_attention_layernorm.weight")
        self._q_norm = norm("self_attn.q_norm.weight") if config.qk_norm else None
        self._k_norm = norm("self_attn.k_norm.weight") if config.qk_norm else None

    def forward(self, hidden: torch.Tensor, step: StepContext, cache: PagedKV) -> torch.Tensor:
        """Run the layer on `hidden` `[tokens, hidden]`."""
        mixed = self.attention(self.attention_input(hidden), step, cache)
        hidden = self.attention_output(hidden, mixed)
        return hidden + self.mlp(self.mlp_input(hidden))

    def attention_input(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what q, k and v read: `[tokens, hidden]`."""
        return self._input_norm(hidden)

    def attention(self, x: torch.Tensor, step: StepContext, cache: PagedKV) -> torch.Tensor:
        """Project, rotate, write K and V to the cache and attend through it.

        Returns what o reads: `[tokens, heads * head_dim]`.
        """
        q, k, v = (part.unflatten(-1, (-1, self.config.head_dim)) for part in self._qkv(x))
        if self._q_norm is not None and self._k_norm is not None:
            q, k = self._q_norm(q), self._k_norm(k)
        q = reference.rotate(q, step.cos, step.sin)
        k = reference.rotate(k, step.cos, step.sin)
        kernel = step.attention[self.window]
        kernel.store(k, v, cache, step.slots)
        return kernel.run(q, cache, step.plans[self.window])

    def attention_output(self, hidden: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        """Project the heads back and add the residual."""
        return hidden + self._output(mixed)[0]

    def mlp_input(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what gate and up, or the experts' router, read: `[tokens, hidden]`."""
        return self._mlp_norm(hidden)

    @property
    def _groups(self) -> tuple[LinearGroup, ...]:
        return (self._qkv, self._output, *self.mlp.groups)

    @property
    def resident_bytes(self) -> int:
        """Bytes of weights, biases and norms."""
        norms = [self._input_norm, self._mlp_norm, self._q_norm, self._k_norm]
        router = self.mlp.router_bytes if isinstance(self.mlp, MoE) else 0
        return (
            router
            + sum(group.resident_bytes for group in self._groups)
            + sum(norm.weight.nbytes for norm in norms if norm is not None)
        )

    def kernels(self, prefix: str) -> list[KernelRow]:
        """Describe which kernel each linear got."""
        rows = [row for group in self._groups for row in group.rows(prefix)]
        return [*rows, self.mlp.router_row(prefix)] if isinstance(self.mlp, MoE) else rows


class Decoder:
    """A causal language model over the paged cache.

    Args:
        config: the model's facts.
        embedding: `[vocab, hidden]`; its dtype and device are those of all activations.
        blocks: the layers in order.
        norm: the final norm.
        head: hidden to vocab; shares the embedding's memory where they are tied.
        rotary: cos and sin up to the longest admitted sequence.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        embedding: torch.Tensor,
        blocks: list[DecoderBlock],
        norm: RMSNorm,
        head: Linear,
        rotary: RotaryTable,
    ) -> None:
        self.config = config
        self.dtype = embedding.dtype
        self.device = embedding.device.type
        self.blocks = blocks
        self._embedding = embedding
        self._norm = norm
        self._head = head
        self._rotary = rotary
        self._step_makers: dict[KVLayout, StepMaker] = {}

    @property
    def uses_torch(self) -> bool:
        """Whether torch's threads compute the layers."""
        return True

    @property
    def max_positions(self) -> int:
        """Positions that the rotary table covers."""
        return self._rotary.length

    @property
    def memory_bytes(self) -> int:
        """Resident bytes of all weights; tied ones once."""
        return self.weight_bytes().total

    def weight_bytes(self) -> WeightBytes:
        """Return where these bytes are."""
        layers = sum(block.resident_bytes for block in self.blocks)
        tied = self.config.tie_word_embeddings
        return WeightBytes(
            layers=layers + self._norm.weight.nbytes,
            embedding=self._embedding.nbytes,
            head=0 if tied else self._head.resident_bytes,
        )

    def step_bytes(self, layout: KVLayout, max_tokens: int, max_rows: int) -> int | None:
        """Return None: every op makes its output anew."""
        del layout, max_tokens, max_rows
        return None

    def step_maker(self, layout: KVLayout) -> StepMaker:
        """Return what prepares the steps over a cache of this layout; kept for the next call."""
        if layout not in self._step_makers:
            self._step_makers[layout] = StepMaker(
                self.config, self._rotary, layout, dtype=self.dtype, device=self.device
            )
        return self._step_makers[layout]

    def kernels(self, layout: KVLayout) -> list[KernelRow]:
        """Describe which kernel each linear and the attention over a cache of `layout` got."""
        rows = [
            row
            for index, block in enumerate(self.blocks)
            for row in block.kernels(f"model.layers.{index}")
        ]
        return [*rows, self._head.row("lm_head"), *self.step_maker(layout).kernels()]

    @torch.inference_mode()
    def forward(self, inputs: ModelInputs, pool: KVPool) -> ModelOutput:
        """Run one step: write the tokens' K and V to `pool`, return the wanted logits."""
        step = self.step_maker(pool.layout).make(inputs)
        # The residual stream stays float32: in bfloat16 the roundings of 2 sums per layer would be
        # of the size of what an 8-bit cache costs, and hide it.
        hidden = self._embedding[inputs.token_ids].float()  # [tokens, hidden]
        bad_layers = torch.full(inputs.token_ids.shape, -1)
        for index, block in enumerate(self.blocks):
            hidden = block.forward(hidden, step, pool.layer(index))
            _mark_bad(bad_layers, hidden, index)
        hidden = self._norm(hidden[inputs.logit_rows])
        logits = self._head(hidden).float()
        bad_rows = bad_layers[inputs.logit_rows]
        _mark_bad(bad_rows, logits, len(self.blocks))
        return ModelOutput(logits, bad_rows)


def _mark_bad(bad_layers: torch.Tensor, values: torch.Tensor, layer: int) -> None:
    """Note `layer` for the rows of `values` that are not finite and were so far."""
    # A sum is finite only if every element is; float32 so that it cannot overflow by itself.
    finite = values.sum(-1, dtype=torch.float32).isfinite()
    if not finite.all():
        bad_layers[~finite & (bad_layers < 0)] = layer
