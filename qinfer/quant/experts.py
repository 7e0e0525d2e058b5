"""The stages of a block with experts: two passes per expert, over the tokens that it is given.

The mathematics is that of `models.moe`. The quantized stream decides which tokens go to which
expert, for the unquantized one too, so that the inputs of the two belong together. One expert after
the other is solved, its outputs are added to the residual stream, and its weights are let go, so
that of all experts only one is in memory in float32. Its gate and up are computed a second time for
that, rather than kept.
"""

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the customary name

from qinfer.models.config import ModelConfig, MoEConfig
from qinfer.models.decoder import OUTPUT, QKV
from qinfer.models.moe import Routing, route
from qinfer.models.rope import RotaryTable
from qinfer.quant.dense import DenseStages, linear
from qinfer.quant.report import ModuleRow
from qinfer.quant.stages import Stage, Stream

UNSEEN = "no calibration token went through this expert"
_EXPERT = re.compile(r"(.*\.experts\.\d+)\.[^.]+")


class ExpertStages:
    """Attention as in a dense block, then a router and its experts.

    Args:
        config: the model's facts.
        moe: those of its experts.
        layer: index, which decides the sliding window.
        rotary: cos and sin of the longest sample.
    """

    def __init__(
        self, config: ModelConfig, moe: MoEConfig, layer: int, rotary: RotaryTable
    ) -> None:
        self._moe = moe
        self._attention = DenseStages(config, layer, rotary)
        self._hidden_size = config.hidden_size
        self._mixed_size = config.num_heads * config.head_dim

    @property
    def stages(self) -> tuple[Stage, ...]:
        """To q/k/v, to o, and for every expert to its gate/up and to its down."""
        attention = self._attention
        stages = [
            Stage(QKV, attention.to_qkv),
            Stage((OUTPUT,), attention.to_output, done=QKV),
        ]
        done: tuple[str, ...] = (OUTPUT,)
        for expert in range(self._moe.num_experts):
            gate, up, down = names = self._moe.names.expert(expert)
            to_gate_up, to_down = partial(self._to_gate_up, expert), partial(self._to_down, expert)
            stages.append(Stage((gate, up), to_gate_up, done=done, unseen=UNSEEN))
            stages.append(Stage((down,), to_down, unseen=UNSEEN))
            done = names
        return tuple(stages)

    @property
    def wide(self) -> int:
        """Columns of the widest input that is kept."""
        return max(self._mixed_size, self._hidden_size)

    def output(self, stream: Stream, sample: int) -> torch.Tensor:
        """Return the hidden states behind the last expert."""
        return self._with_output(stream, sample, self._moe.num_experts - 1)

    def _to_gate_up(self, expert: int, stream: Stream, sample: int) -> torch.Tensor:
        """Return an expert's rows of the normalized hidden states, which are kept."""
        if expert == 0:
            x = self._attention.to_gate_up(stream, sample)
            stream.wide.write(sample, x)
            if stream.lead is None:
                router = stream.weights[f"{self._moe.names.router}.weight"]
                stream.routings[sample] = route(F.linear(x, router), self._moe)
        else:
            stream.residual.write(sample, self._with_output(stream, sample, expert - 1))
        return self._rows(stream, sample, expert)

    def _to_down(self, expert: int, stream: Stream, sample: int) -> torch.Tensor:
        """Return the gated activations of an expert's rows."""
        gate, up, _ = self._moe.names.expert(expert)
        x = self._rows(stream, sample, expert)
        if not len(x):
            return x.new_empty(0, self._moe.intermediate_size)
        return F.silu(linear(stream, gate, x), inplace=True).mul_(linear(stream, up, x))

    def _rows(self, stream: Stream, sample: int, expert: int) -> torch.Tensor:
        rows = _routing(stream, sample).tokens(expert)
        return stream.wide.read(sample, self._hidden_size)[rows]

    def _with_output(self, stream: Stream, sample: int, expert: int) -> torch.Tensor:
        """Return the residual stream with an expert's weighted outputs added to its rows."""
        routing, down = _routing(stream, sample), self._moe.names.expert(expert)[2]
        hidden = stream.residual.read(sample)
        inner = self._to_down(expert, stream, sample)
        if not len(inner):
            return hidden
        y = linear(stream, down, inner) * routing.weights_of(expert).unsqueeze(-1)
        return hidden.index_add(0, routing.tokens(expert), y)


def _routing(stream: Stream, sample: int) -> Routing:
    return (stream.lead or stream).routings[sample]


def under_seen(rows: Sequence[ModuleRow]) -> dict[str, Any]:
    """Return the experts that saw fewer tokens than their gate has inputs, with their counts.

    The Hessian of so few tokens says nothing about some directions of the input.

    Args:
        rows: of all linears, in the model's order, as calibration left them.
    """
    experts: dict[str, ModuleRow] = {}
    for row in rows:
        found = _EXPERT.fullmatch(row.name)
        if found and row.scheme is not None:
            experts.setdefault(found[1], row)  # its gate, the first of the three
    few = {name: row for name, row in experts.items() if row.num_tokens < row.in_features}
    return {
        "count": len(few),
        "of": len(experts),
        "limit": "fewer calibration tokens than inputs",
        "experts": [
            {"name": name, "num_tokens": row.num_tokens, "inputs": row.in_features}
            for name, row in few.items()
        ],
    }
