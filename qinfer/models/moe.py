"""A mixture of experts in the place of a dense MLP (Mixtral, arXiv 2401.04088; Qwen3-MoE).

A router scores all experts, each token goes through the best few, and their outputs are added,
weighted by the scores. Everything is row-stable: an expert computes the rows that were routed to it
in fixed tiles, and a token's sum is taken in ascending order of its experts, so that its bits do
not depend on which other tokens are in the step.

Calibration goes through the experts one by one (`quant.experts`): `route` gives a sample's routing,
`Routing.tokens` the rows of an expert's inputs, `Routing.weights_of` the weights of its outputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from qinfer.kernels import reference
from qinfer.models.config import MoEConfig
from qinfer.models.layers import GatedMLP, KernelRow, Linear, LinearGroup


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """Which experts each token goes through.

    Args:
        experts: int64 `[tokens, experts per token]`, the highest score first.
        weights: float32, the same shape.
    """

    experts: torch.Tensor
    weights: torch.Tensor

    def used(self) -> list[int]:
        """Return the experts that have at least one token, ascending."""
        used: list[int] = self.experts.unique().tolist()
        return used

    def tokens(self, expert: int) -> torch.Tensor:
        """Return the rows of the tokens that go through `expert`, ascending: int64 `[n]`."""
        return (self.experts == expert).any(-1).nonzero()[:, 0]

    def weights_of(self, expert: int) -> torch.Tensor:
        """Return the weights of its outputs, in the order of `tokens`: float32 `[n]`."""
        return self.weights[self.experts == expert]  # row by row, and a row has it at most once


class MoE:
    """A router and its experts.

    Args:
        config: how many there are and how they are weighted.
        router: `[experts, hidden]`, any float type; scores are computed in float32.
        experts: in order.
        device: where it runs.
    """

    def __init__(
        self, config: MoEConfig, router: torch.Tensor, experts: Sequence[GatedMLP], *, device: str
    ) -> None:
        self.config = config
        self.experts = tuple(experts)
        self._router = Linear(router.float(), None, dtype=torch.float32, device=device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Apply to `x` `[tokens, hidden]`; returns the weighted sums in float32."""
        routing = self.route(x)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in routing.used():
            rows = routing.tokens(expert)
            y = self.experts[expert](x[rows]).float() * routing.weights_of(expert).unsqueeze(-1)
            out.index_add_(0, rows, y)
        return out

    def route(self, x: torch.Tensor) -> Routing:
        """Choose the experts of every row of `x` `[tokens, hidden]`."""
        return route(self._router(x.float()), self.config)

    @property
    def groups(self) -> tuple[LinearGroup, ...]:
        """The experts' linears, in order; the router is not among them."""
        return tuple(group for expert in self.experts for group in expert.groups)

    @property
    def router_bytes(self) -> int:
        """Bytes of the router."""
        return self._router.resident_bytes

    def router_row(self, prefix: str) -> KernelRow:
        """Describe the router's kernel for a report."""
        return self._router.row(f"{prefix}.{self.config.names.router}")


def route(logits: torch.Tensor, config: MoEConfig) -> Routing:
    """Choose the experts of every token by the router's float32 `logits` `[tokens, experts]`.

    Softmax over all experts, then the best `num_experts_per_token`; of equal scores the lower
    expert comes first.
    """
    scores = reference.elementwise(torch.exp, logits - logits.amax(-1, keepdim=True))
    scores = scores / scores.sum(-1, keepdim=True)
    ranked, order = scores.sort(dim=-1, descending=True, stable=True)
    weights = ranked[:, : config.num_experts_per_token]
    if config.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    return Routing(order[:, : config.num_experts_per_token], weights)
