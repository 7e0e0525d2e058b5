"""How much the whole model drifts when one of its linears is quantized in one way or another.

To second order, an error `Δz` of a linear's output changes the next token's distribution by a KL
divergence of `½ E[(g · Δz)²]`, with `g` the gradient of the log-probability of a token drawn from
the model itself (the Fisher information; Amari, "Natural gradient works efficiently in learning",
Neural Computation 10(2), 1998, section 3). Rounding errors of different rows are independent, so of
`g` the mean square per output is enough, and one pass back through the model measures it for all
linears. (Errors of different tokens count as independent too, which is too little where attention
averages them: for v.) What GPTQ makes of a rounding error `e` of column i is `e² / U_ii²` (arXiv
2210.17323, equation 2), so that every form costs one rounding and no solving.

The model goes through memory block by block, forwards and backwards.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F  # noqa: N812 - the customary name

from qinfer.models.load import EMBEDDING, FINAL_NORM, HEAD
from qinfer.models.rope import RotaryTable
from qinfer.quant import gptq, rtn
from qinfer.quant.block_run import dense_weights, embed
from qinfer.quant.blocks import block_stages
from qinfer.quant.hessian import InputStatistics, check_finite
from qinfer.quant.job import Job, block_name
from qinfer.quant.stages import BlockStages, Stream
from qinfer.quant.workers import Workers
from qinfer.schemes import WeightScheme

_LOGITS = 1 << 22  # at a time
_HEAD_ROWS = 1 << 13  # of the head that are float32 at a time

OnStep = Callable[[], None]


@dataclass(frozen=True, slots=True, eq=False)
class LinearSensitivity:
    """What is known about one linear.

    Args:
        gradients: float32 `[out]`, mean square of the gradient of an output.
        columns: float32 `[in]`, mean squared output error that a squared rounding error of a column
            leaves when GPTQ has done its part.
    """

    gradients: torch.Tensor
    columns: torch.Tensor

    def drift(self, weight: torch.Tensor, scheme: WeightScheme, *, name: str) -> float:
        """Return the KL divergence per token to expect from quantizing `weight` `[out, in]`."""
        dense = weight.float()
        error = dense - rtn.quantize(dense, scheme, name=name).dequantize()
        return 0.5 * float(error.square_().mv(self.columns).dot(self.gradients))


class GraphRows:
    """Rows of one sample that stay part of the computation: gradients come back through them."""

    def __init__(self, values: torch.Tensor | None = None) -> None:
        self._values = values

    def read(self, sample: int, width: int | None = None) -> torch.Tensor:
        """Return what was written last."""
        del sample, width
        if self._values is None:
            raise ValueError("nothing was written yet")
        return self._values

    def write(self, sample: int, values: torch.Tensor) -> None:
        """Keep the rows themselves."""
        del sample
        self._values = values


@dataclass(frozen=True, slots=True)
class Tap:
    """Notes what goes into the linears of a block and the gradients that come back."""

    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    squares: dict[str, torch.Tensor] = field(default_factory=dict)

    def __call__(self, name: str, x: torch.Tensor, y: torch.Tensor) -> None:
        """See the input and the output of the linear `name`."""

        def note(gradient: torch.Tensor) -> None:
            self.squares[name] = gradient.square().sum(0)

        self.inputs[name] = x.detach()
        y.register_hook(note)


class SensitivityRun:
    """Windows of text on their way through the unquantized model and back.

    Args:
        job: the source and its facts.
        windows: token ids.
        workers: threads, each with one window at a time.
        damp_percent: as the solver will use it.
        on_step: called for every window and block, forwards and backwards.
    """

    def __init__(
        self,
        job: Job,
        windows: Sequence[Sequence[int]],
        workers: Workers,
        *,
        damp_percent: float,
        on_step: OnStep,
    ) -> None:
        self._job, self._windows, self._workers = job, windows, workers
        self._damp_percent, self._on_step = damp_percent, on_step
        longest = max(len(window) for window in windows)
        rotary = RotaryTable(job.model.rope, job.model.head_dim, longest)
        layers = range(job.model.num_layers)
        self._blocks = [block_stages(job.model, layer, rotary) for layer in layers]

    def layers(self) -> Iterator[tuple[int, dict[str, LinearSensitivity]]]:
        """Yield the layers from the last to the first, with their linears by name inside them.

        Raises:
            NonFiniteError: an activation or a gradient is not finite; names the layer.
        """
        inputs = [self._workers.map(lambda window: embed(self._job.source, window), self._windows)]
        for layer, block in enumerate(self._blocks):
            inputs.append(self._forwards(layer, block, inputs[-1]))
        gradients = self._head_gradients(inputs.pop())
        for layer, block in reversed(list(enumerate(self._blocks))):
            gradients, taps = self._backwards(layer, block, inputs.pop(), gradients)
            yield layer, self._sensitivities(layer, block, taps)

    def _forwards(
        self, layer: int, block: BlockStages, hidden: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        weights = self._weights(layer)

        def run(index: int) -> torch.Tensor:
            out = _run(block, weights, hidden[index])
            check_finite(out, name=f"the output of {block_name(layer)}", sample=index)
            self._on_step()
            return out

        return self._workers.map(run, range(len(hidden)))

    def _head_gradients(self, hidden: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        head = _Head(self._job)
        return self._workers.map(
            lambda index: head.gradient(hidden[index], seed=index), range(len(hidden))
        )

    def _backwards(
        self,
        layer: int,
        block: BlockStages,
        hidden: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
    ) -> tuple[list[torch.Tensor], list[Tap]]:
        weights = self._weights(layer)
        taps = [Tap() for _ in hidden]

        def run(index: int) -> torch.Tensor:
            leaf = hidden[index].detach().requires_grad_()
            with torch.enable_grad():
                out = _run(block, weights, leaf, taps[index])
            (gradient,) = torch.autograd.grad(out, leaf, gradients[index])
            name = f"the gradient of the input of {block_name(layer)}"
            check_finite(gradient, name=name, sample=index)
            self._on_step()
            return gradient

        return self._workers.map(run, range(len(hidden))), taps

    def _sensitivities(
        self, layer: int, block: BlockStages, taps: Sequence[Tap]
    ) -> dict[str, LinearSensitivity]:
        result = {}
        for stage in block.stages:
            if not stage.names:
                continue
            seen = [tap.inputs[stage.names[0]] for tap in taps if stage.names[0] in tap.inputs]
            if not seen:
                continue  # an expert that no token went through
            name = f"{block_name(layer)}.{stage.names[0]}"
            stats = InputStatistics(seen[0].shape[1], name=name)
            for sample, x in enumerate(seen):
                stats.add(x, sample=sample, executor=self._workers.executor)
            columns = self._columns(stats)
            tokens = sum(len(window) for window in self._windows)
            for linear in stage.names:
                squares = [tap.squares[linear] for tap in taps if linear in tap.squares]
                # Per token of the text, while the inputs are a mean over those that came here.
                result[linear] = LinearSensitivity(torch.stack(squares).sum(0) / tokens, columns)
        return result

    def _columns(self, stats: InputStatistics) -> torch.Tensor:
        """Return `1 / U_ii²` of the mean of `x xᵀ`; its diagonal where that has no inverse."""
        mean = stats.matrix() / 2
        factor = gptq.factorize(mean, damp_percent=self._damp_percent, act_order=True)
        if factor.U is None or factor.order is None:
            return mean.diagonal().clone()
        columns = torch.empty(len(mean))
        columns[factor.order] = factor.U.diagonal().square().reciprocal()
        return columns

    def _weights(self, layer: int) -> dict[str, torch.Tensor]:
        return {name: weight.float() for name, weight in dense_weights(self._job, layer).items()}


class _Head:
    """The final norm and the head, and the gradient of what they say."""

    def __init__(self, job: Job) -> None:
        model, source = job.model, job.source
        self._eps = model.rms_norm_eps
        self._norm = source.tensor(FINAL_NORM).float()
        name = EMBEDDING if model.tie_word_embeddings else f"{HEAD}.weight"
        self._weight = source.tensor(name)

    def gradient(self, hidden: torch.Tensor, *, seed: int) -> torch.Tensor:
        """Return the gradient, by the hidden states, of the summed log-probabilities of tokens
        that are drawn from the model's own distribution.

        Args:
            hidden: `[tokens, hidden]`, the last block's output.
            seed: of the draw.
        """
        leaf = hidden.detach().requires_grad_()
        with torch.enable_grad():
            x = F.rms_norm(leaf, self._norm.shape, self._norm, self._eps)
        generator = torch.Generator().manual_seed(seed)
        step = max(1, _LOGITS // len(self._weight))
        parts = [self._logit_gradient(part, generator) for part in x.detach().split(step)]
        (gradient,) = torch.autograd.grad(x, leaf, torch.cat(parts))
        return gradient

    def _logit_gradient(self, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Return the gradient by the head's input `[rows, hidden]`: `(onehot - p) W`."""
        pieces = self._weight.split(_HEAD_ROWS)
        logits = torch.cat([x @ piece.float().T for piece in pieces], dim=1)
        chances = logits.softmax(-1)
        drawn = torch.multinomial(chances, 1, generator=generator)
        signs = chances.neg_().scatter_add_(1, drawn, torch.ones(drawn.shape))
        total = torch.zeros_like(x)
        for part, piece in zip(signs.split(_HEAD_ROWS, dim=1), pieces, strict=True):
            total.addmm_(part, piece.float())
        return total


def _run(
    block: BlockStages,
    weights: dict[str, torch.Tensor],
    hidden: torch.Tensor,
    tap: Tap | None = None,
) -> torch.Tensor:
    """Take one window through a block, outside of the graph unless there is a tap."""
    stream = Stream(dict(weights), GraphRows(hidden), GraphRows(), GraphRows(), tap=tap)
    for stage in block.stages:
        stage.to_input(stream, 0)
    return block.output(stream, 0)
