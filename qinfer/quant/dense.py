"""The stages of a dense decoder block, computed per sample by torch in float32.

The served path computes every row on its own, whatever else is in the step; calibration knows its
samples beforehand and is deterministic with plain matrix products on whole samples, which cost
less. The mathematics is that of `models.decoder`.
"""

import torch
import torch.nn.functional as F  # noqa: N812 - the customary name

from qinfer.kernels import reference
from qinfer.models.config import ModelConfig
from qinfer.models.decoder import DOWN, GATE_UP, OUTPUT, QKV
from qinfer.models.rope import RotaryTable
from qinfer.quant.attention import causal_attention
from qinfer.quant.stages import Stage, Stream

_INPUT_NORM, _MLP_NORM = "input_layernorm.weight", "post_attention_layernorm.weight"
_Q_NORM, _K_NORM = "self_attn.q_norm.weight", "self_attn.k_norm.weight"


class DenseStages:
    """Attention and a gated MLP, each after a norm and with a residual.

    Args:
        config: the model's facts.
        layer: index, which decides the sliding window.
        rotary: cos and sin of the longest sample.
    """

    def __init__(self, config: ModelConfig, layer: int, rotary: RotaryTable) -> None:
        self._config = config
        self._window = config.windows[layer]
        self._rotary = rotary

    @property
    def stages(self) -> tuple[Stage, ...]:
        """To q/k/v, to o, to gate/up, to down."""
        return (
            Stage(QKV, self.to_qkv),
            Stage((OUTPUT,), self.to_output, done=QKV),
            Stage(GATE_UP, self.to_gate_up, done=(OUTPUT,)),
            Stage((DOWN,), self.to_down, done=GATE_UP),
        )

    @property
    def wide(self) -> int:
        """Columns of the widest input that is kept."""
        config = self._config
        return max(config.num_heads * config.head_dim, config.intermediate_size)

    def to_qkv(self, stream: Stream, sample: int) -> torch.Tensor:
        """Return the normalized hidden states."""
        return self._norm(stream, _INPUT_NORM, stream.hidden.read(sample))

    def to_output(self, stream: Stream, sample: int) -> torch.Tensor:
        """Return what the heads read, side by side; kept for `to_gate_up`."""
        x = self.to_qkv(stream, sample)
        q, k, v = (self._heads(linear(stream, name, x)) for name in QKV)
        if self._config.qk_norm:
            q, k = self._norm(stream, _Q_NORM, q), self._norm(stream, _K_NORM, k)
        cos, sin = self._rotary.cos[: len(x)], self._rotary.sin[: len(x)]
        q, k = reference.rotate(q, cos, sin), reference.rotate(k, cos, sin)
        dtype = stream.weights[QKV[0]].dtype
        mixed = causal_attention(q, k, v, self._window, dtype=dtype).flatten(1)
        stream.wide.write(sample, mixed)
        return mixed

    def to_gate_up(self, stream: Stream, sample: int) -> torch.Tensor:
        """Return the normalized hidden states behind attention, which are kept."""
        hidden = stream.hidden.read(sample)
        mixed = stream.wide.read(sample, stream.weights[OUTPUT].shape[1])
        hidden = linear(stream, OUTPUT, mixed).add_(hidden)
        stream.residual.write(sample, hidden)
        return self._norm(stream, _MLP_NORM, hidden)

    def to_down(self, stream: Stream, sample: int) -> torch.Tensor:
        """Return the gated activations; kept for `output`."""
        x = self._norm(stream, _MLP_NORM, stream.residual.read(sample))
        gate, up = (linear(stream, name, x) for name in GATE_UP)
        inner = F.silu(gate, inplace=True).mul_(up)
        stream.wide.write(sample, inner)
        return inner

    def output(self, stream: Stream, sample: int) -> torch.Tensor:
        """Return the hidden states behind the MLP."""
        inner = stream.wide.read(sample, stream.weights[DOWN].shape[1])
        return linear(stream, DOWN, inner).add_(stream.residual.read(sample))

    def _norm(self, stream: Stream, name: str, x: torch.Tensor) -> torch.Tensor:
        weight = stream.weights[name]
        normed: torch.Tensor = F.rms_norm(x, weight.shape, weight, self._config.rms_norm_eps)
        return normed

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(len(x), -1, self._config.head_dim)


def linear(stream: Stream, name: str, x: torch.Tensor) -> torch.Tensor:
    """Apply the linear `name` of a stream to `x` `[tokens, in]`."""
    weight, bias = stream.weights[name], stream.weights.get(f"{name}.bias")
    if weight.dtype == torch.float32:
        y = F.linear(x, weight, bias)
    else:
        y = F.linear(x.to(weight.dtype), weight).float()
        y = y if bias is None else y.add_(bias)
    if stream.tap is not None:
        stream.tap(name, x, y)
    return y
