"""How much the whole model drifts when one of its linears is quantized in one way or another.

To second order, an error `Δz` of a linear's output changes the next token's distribution by a KL
divergence of `½ E[(g · Δz)²]`, with `g` the gradient of the log-probability of a token drawn from
the model itself (the Fisher information; Amari, "Natural gradient works efficiently in learning",
Neural Computation 10(2), 1998, section 3). Rounding errors of different rows are independent, so of
`g` the mean square per output is enough, and one pass back through the model measures it for all
linears. (Errors of different tokens count as independent too, which is too little where attention
averages them: for v.) What GPTQ makes of a rounding error `e` of column i is `e² / U_ii²` (arXiv
2210.17323, equation 2), so that every form costs one rounding and no solving.

The model goes through memory block by block, forwards and backwards; what the windows leave in
front of every block is kept in a `RowsStore`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from qinfer.kernels.cpu.arena import release_freed
from qinfer.models.load import EMBEDDING
from qinfer.models.rope import RotaryTable
from qinfer.quant import gptq, rtn
from qinfer.quant.activations import Rows
from qinfer.quant.block_run import dense_weights, embed
from qinfer.quant.blocks import block_stages
from qinfer.quant.head_gradient import HeadGradient
from qinfer.quant.hessian import InputStatistics, check_finite
from qinfer.quant.job import Job, block_name
from qinfer.quant.rows_store import RowsStore
from qinfer.quant.stages import BlockStages, Stage, Stream
from qinfer.quant.workers import Workers
from qinfer.schemes import WeightScheme

# Weights whose rounding is measured at a time; a constant, for it decides how sums are rounded.
PIECE = 1 << 18

OnStep = Callable[[], None]
Squares = dict[str, torch.Tensor]  # by linear, [out]
Columns = dict[str, torch.Tensor]  # by linear, [in]


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
        rows = max(1, PIECE // weight.shape[1])
        total = 0.0
        for part, gradients in zip(weight.split(rows), self.gradients.split(rows), strict=True):
            dense = part.float()
            error = dense - rtn.quantize(dense, scheme, name=name).dequantize()
            total += float(error.square_().mv(self.columns).dot(gradients))
        return 0.5 * total


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
    """Notes the gradients that come back to the outputs of a block's linears."""

    squares: Squares = field(default_factory=dict)

    def __call__(self, name: str, x: torch.Tensor, y: torch.Tensor) -> None:
        """See the input and the output of the linear `name`."""

        def note(gradient: torch.Tensor) -> None:
            self.squares[name] = gradient.square().sum(0)

        del x
        y.register_hook(note)


class SensitivityRun:
    """Windows of text on their way through the unquantized model and back.

    Forwards as calibration goes: all windows to the input of some linears, whose statistics are
    summed and made use of at once. Backwards one window after the other through a whole block,
    whose input lies in the store.

    Args:
        job: the source and its facts.
        windows: token ids.
        workers: threads, each with one window at a time.
        store: of rows for these windows.
        damp_percent: as the solver will use it.
        on_step: called for every window and block, forwards and backwards.
    """

    def __init__(
        self,
        job: Job,
        windows: Sequence[Sequence[int]],
        workers: Workers,
        store: RowsStore,
        *,
        damp_percent: float,
        on_step: OnStep,
    ) -> None:
        self._job, self._windows, self._workers, self._store = job, windows, workers, store
        self._damp_percent, self._on_step = damp_percent, on_step
        rotary = RotaryTable(job.model.rope, job.model.head_dim, max(store.lengths))
        layers = range(job.model.num_layers)
        self._blocks = [block_stages(job.model, layer, rotary) for layer in layers]

    def layers(self) -> Iterator[tuple[int, dict[str, LinearSensitivity]]]:
        """Yield the layers from the last to the first, with their linears by name inside them.

        Raises:
            NonFiniteError: an activation or a gradient is not finite; names the layer.
            CheckpointError: the source cannot be read, or rows cannot be written.
        """
        size = self._job.model.hidden_size
        wide = self._store.make("wide", max(block.wide for block in self._blocks))
        residual, gradients = (self._store.make(name, size) for name in ("residual", "gradients"))
        inputs = [self._store.make("hidden-0", size)]
        self._workers.map(lambda sample: self._embed(sample, inputs[0]), range(len(self._windows)))
        columns = []
        for layer in range(len(self._blocks)):
            inputs.append(self._store.make(f"hidden-{layer + 1}", size))
            columns.append(self._forwards(layer, inputs[-2], residual, wide, inputs[-1]))
        head = HeadGradient(self._job, inputs.pop(), gradients, self._store.lengths, self._workers)
        head.run()
        while inputs:
            layer = len(inputs) - 1
            squares = self._backwards(layer, inputs.pop(), gradients)
            yield layer, self._sensitivities(squares, columns.pop())

    def _embed(self, sample: int, rows: Rows) -> None:
        hidden = embed(self._job.source, self._windows[sample])
        check_finite(hidden, name=EMBEDDING, sample=sample)
        rows.write(sample, hidden)

    def _forwards(
        self, layer: int, hidden: Rows, residual: Rows, wide: Rows, following: Rows
    ) -> Columns:
        """Write the output of a block; return the columns of its linears by their names."""
        block, name = self._blocks[layer], block_name(layer)
        stream = Stream(self._weights(layer), hidden, residual, wide)
        columns: Columns = {}
        for stage in block.stages:
            stats = self._statistics(stage, stream, name)
            for done in stage.done:
                del stream.weights[done]
            if stats is not None and stats.num_tokens:
                columns |= dict.fromkeys(stage.names, self._columns(stats))

        def finish(sample: int) -> None:
            out = block.output(stream, sample)
            check_finite(out, name=f"the output of {name}", sample=sample)
            following.write(sample, out)
            self._on_step()

        self._workers.map(finish, range(len(self._windows)))
        return columns

    def _statistics(self, stage: Stage, stream: Stream, block: str) -> InputStatistics | None:
        """Take all windows to an input; return its statistics if linears read it."""
        count, threads = len(self._windows), self._workers.threads
        stats = None
        for start in range(0, count, threads):
            group = range(start, min(start + threads, count))
            found = self._workers.map(lambda sample: stage.to_input(stream, sample), group)
            if stage.names:
                name = f"{block}.{stage.names[0]}"
                stats = stats or InputStatistics(found[0].shape[1], name=name)
                stats.add_samples(found, first=start, executor=self._workers.executor)
        return stats

    def _columns(self, stats: InputStatistics) -> torch.Tensor:
        """Return `1 / U_ii²` of the mean of `x xᵀ`; its diagonal where that has no inverse."""
        release_freed()
        mean = stats.matrix().mul_(0.5)
        factor = gptq.factorize(mean, damp_percent=self._damp_percent, act_order=True)
        if factor.U is None or factor.order is None:
            return mean.diagonal().clone()
        columns = torch.empty(len(mean))
        columns[factor.order] = factor.U.diagonal().square().reciprocal()
        return columns

    def _backwards(self, layer: int, hidden: Rows, gradients: Rows) -> list[Squares]:
        """Replace the gradients behind a block by those in front of it.

        Returns:
            For every window, the summed squares of the gradients of its linears' outputs.
        """
        release_freed()
        block, weights = self._blocks[layer], self._weights(layer)

        def run(sample: int) -> Squares:
            leaf = hidden.read(sample).detach().requires_grad_()
            tap = Tap()
            with torch.enable_grad():
                out = _run(block, weights, leaf, tap)
            (gradient,) = torch.autograd.grad(out, leaf, gradients.read(sample))
            name = f"the gradient of the input of {block_name(layer)}"
            check_finite(gradient, name=name, sample=sample)
            gradients.write(sample, gradient)
            self._on_step()
            return tap.squares

        return self._workers.map(run, range(len(self._windows)))

    def _sensitivities(
        self, squares: Sequence[Squares], columns: Columns
    ) -> dict[str, LinearSensitivity]:
        # Gradients per token of the text, while the inputs are a mean over those that came here.
        tokens = sum(self._store.lengths)
        result = {}
        for linear, found in columns.items():
            sums = torch.stack([window[linear] for window in squares if linear in window])
            result[linear] = LinearSensitivity(sums.sum(0) / tokens, found)
        return result

    def _weights(self, layer: int) -> dict[str, torch.Tensor]:
        """Return a block's weights in float32, of which few are there in another type too."""
        weights = dense_weights(self._job, layer)
        for name in weights:
            weights[name] = weights[name].float()
        return weights


def _run(
    block: BlockStages,
    weights: dict[str, torch.Tensor],
    hidden: torch.Tensor,
    tap: Tap,
) -> torch.Tensor:
    """Take one window through a block."""
    stream = Stream(dict(weights), GraphRows(hidden), GraphRows(), GraphRows(), tap=tap)
    for stage in block.stages:
        stage.to_input(stream, 0)
    return block.output(stream, 0)
