"""What the layers of one step share: rotation, cache slots and the plan of attention."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from qinfer.kernels.attention import Attention, AttentionPlan, choose_attention
from qinfer.kernels.spec import AttnSpec
from qinfer.kvcache.inputs import ModelInputs
from qinfer.kvcache.layout import KVLayout
from qinfer.models.config import ModelConfig
from qinfer.models.layers import KernelRow
from qinfer.models.rope import RotaryTable


@dataclass(frozen=True, slots=True, eq=False)
class StepContext:
    """What all layers of one step share.

    Args:
        slots: int64 `[tokens]`, where K and V go.
        cos: float32 `[tokens, 1, head_dim / 2]`.
        sin: the same.
        attention: the kernels by sliding window.
        plans: their plans by sliding window.
    """

    slots: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    attention: Mapping[int | None, Attention]
    plans: Mapping[int | None, AttentionPlan]


class StepMaker:
    """Turns index tensors into a step, with the attention kernels of one cache layout.

    Args:
        config: the model's facts.
        rotary: cos and sin of every admitted position.
        layout: the cache that will be read and written.
        dtype: of activations.
        device: where it runs.
    """

    def __init__(
        self,
        config: ModelConfig,
        rotary: RotaryTable,
        layout: KVLayout,
        *,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        self._rotary = rotary
        self._choices = {
            spec.sliding_window: (spec, choose_attention(spec))
            for spec in attention_specs(config, layout, dtype, device)
        }
        self._attention = {
            window: choice.implementation.prepare(spec)
            for window, (spec, choice) in self._choices.items()
        }

    def make(self, inputs: ModelInputs) -> StepContext:
        """Prepare one step."""
        cos, sin = self._rotary.at(inputs.positions)
        plans = {
            window: kernel.plan(inputs.block_tables, inputs.seq_lens, inputs.query_starts)
            for window, kernel in self._attention.items()
        }
        return StepContext(inputs.slots, cos, sin, self._attention, plans)

    def kernels(self) -> list[KernelRow]:
        """Describe which attention kernel the layers got, one row per sliding window."""
        rows = []
        for spec, choice in self._choices.values():
            name = choice.implementation.name
            row = KernelRow("attention", describe_attention(spec), name, choice.refusals)
            rows.append(row)
        return rows


def describe_attention(spec: AttnSpec) -> str:
    """Return a short text for reports, such as `KV int8, 9/3 heads x 64`."""
    span = "" if spec.sliding_window is None else f", window {spec.sliding_window}"
    return f"KV {spec.kv}, {spec.num_heads}/{spec.num_kv_heads} heads x {spec.head_dim}{span}"


def attention_specs(
    config: ModelConfig, layout: KVLayout, dtype: torch.dtype, device: str
) -> list[AttnSpec]:
    """Return the attention of a model over a cache, one per distinct sliding window."""
    return [
        AttnSpec(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=layout.block_size,
            kv=layout.scheme,
            dtype=dtype,
            device=device,
            sliding_window=window,
        )
        for window in dict.fromkeys(config.windows)
    ]
