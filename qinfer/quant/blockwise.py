"""One decoder block at a time: run the calibration samples to a linear, quantize it, run on.

The order is truly sequential: what a linear is calibrated on was computed with the quantized
weights of everything before it, within the block too. Samples run one by one, in order, in
float32, through the paged attention that also serves. Each linear runs once per sample.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from qinfer.formats.weight import QuantizedWeight
from qinfer.kvcache.inputs import ModelInputs
from qinfer.kvcache.layout import KVLayout
from qinfer.kvcache.pool import KVPool
from qinfer.models.config import ModelConfig
from qinfer.models.decoder import DOWN, GATE_UP, OUTPUT, QKV, DecoderBlock
from qinfer.models.rope import RotaryTable
from qinfer.models.step import StepContext, StepMaker
from qinfer.quant import gptq, rtn
from qinfer.quant.hessian import Hessian, check_finite
from qinfer.quant.report import ModuleRow
from qinfer.quant.targets import Target
from qinfer.schemes import KV_SCHEMES, WeightScheme

PASSES_PER_BLOCK = 4  # over the samples: to q/k/v, to o, to gate/up, to down and out

OnSample = Callable[[], None]
ToInput = Callable[[int, slice], torch.Tensor]  # (sample, its rows) -> [tokens, in]


@dataclass(frozen=True, slots=True, eq=False)
class Solved:
    """A module's quantized weight and its line in the report."""

    weight: QuantizedWeight
    row: ModuleRow


def round_to_nearest(target: Target, weight: torch.Tensor) -> Solved:
    """Quantize one weight without calibration; its error is that of the weight itself."""
    quantized = rtn.quantize(weight, _scheme(target), name=target.name)
    dense = weight.float()
    total = float(dense.square().sum(dtype=torch.float64))
    lost = float((dense - quantized.dequantize()).square().sum(dtype=torch.float64))
    return Solved(quantized, replace(plain_row(target), error=lost / total if total > 0 else 0.0))


class CalibrationRun:
    """The calibration samples on their way through the model.

    Holds their hidden states between blocks and the widest activations within one; both buffers
    are allocated once, so memory does not grow from block to block.

    Args:
        config: the model's facts.
        windows: token ids of every sample.
        embedding: `[vocab, hidden]`, any float dtype.
        damp_percent: see `gptq.factorize`.
        on_sample: called after each sample of each pass.

    Raises:
        NonFiniteError: an embedding is not finite; names the sample.
    """

    def __init__(
        self,
        config: ModelConfig,
        windows: Sequence[Sequence[int]],
        embedding: torch.Tensor,
        *,
        damp_percent: float,
        on_sample: OnSample,
    ) -> None:
        self._damp_percent = damp_percent
        self._on_sample = on_sample
        self._spans: list[slice] = []
        start = 0
        for window in windows:
            self._spans.append(slice(start, start + len(window)))
            start += len(window)
        self._hidden = torch.empty(start, config.hidden_size)  # [tokens of all samples, hidden]
        width = max(config.num_heads * config.head_dim, config.intermediate_size)
        self._wide = torch.empty(start * width)
        for sample, (span, window) in enumerate(zip(self._spans, windows, strict=True)):
            self._hidden[span] = embedding[torch.tensor(window)].float()
            check_finite(self._hidden[span], name="model.embed_tokens", sample=sample)
        layout = KVLayout(1, config.num_kv_heads, config.head_dim, KV_SCHEMES["fp32"])
        longest = max(len(window) for window in windows)
        self._cache = KVPool(layout, layout.num_blocks(longest)).layer(0)
        rotary = RotaryTable(config.rope, config.head_dim, longest)
        maker = StepMaker(config, rotary, layout, dtype=torch.float32, device="cpu")
        lengths = [len(window) for window in windows]
        by_length = {n: maker.make(_inputs(n, layout)) for n in dict.fromkeys(lengths)}
        self._steps: list[StepContext] = [by_length[n] for n in lengths]

    def run_block(
        self,
        block: DecoderBlock,
        weights: Mapping[str, torch.Tensor],
        targets: Mapping[str, Target],
    ) -> Iterator[Solved]:
        """Take the samples through one block, quantizing its linears on the way.

        Args:
            block: float32, unfused, with the weights below; its linears are replaced.
            weights: by name inside the block.
            targets: by name inside the block, every linear.

        Yields:
            Each module that is quantized, in the model's order.

        Raises:
            NonFiniteError: an activation is not finite; names the layer and the sample.
        """
        hidden = self._hidden
        mixed = self._buffer(targets[OUTPUT].in_features)
        inner = self._buffer(targets[DOWN].in_features)  # the same memory: mixed is used up by then

        def to_qkv(_: int, span: slice) -> torch.Tensor:
            return block.attention_input(hidden[span])

        def to_output(sample: int, span: slice) -> torch.Tensor:
            x = block.attention_input(hidden[span])
            mixed[span] = block.attention(x, self._steps[sample], self._cache)
            return mixed[span]

        def to_gate_up(_: int, span: slice) -> torch.Tensor:
            hidden[span] = block.attention_output(hidden[span], mixed[span])
            return block.mlp_input(hidden[span])

        def to_down(_: int, span: slice) -> torch.Tensor:
            inner[span] = block.mlp_activation(block.mlp_input(hidden[span]))
            return inner[span]

        passes: tuple[tuple[tuple[str, ...], ToInput], ...] = (
            (QKV, to_qkv),
            ((OUTPUT,), to_output),
            (GATE_UP, to_gate_up),
            ((DOWN,), to_down),
        )
        for names, to_input in passes:
            wanted = [name for name in names if targets[name].scheme is not None]
            hessian = self._pass([targets[name] for name in wanted], to_input)
            for name, solved in self._solve(wanted, hessian, weights, targets):
                # Dense, so that no call has to unpack it; the bits are the same.
                block.replace(name, solved.weight.dequantize())
                yield solved
        layer = targets[DOWN].name.removesuffix(f".{DOWN}")
        for sample, span in enumerate(self._spans):
            hidden[span] = block.mlp_output(hidden[span], inner[span])
            check_finite(hidden[span], name=f"the output of {layer}", sample=sample)

    def _buffer(self, width: int) -> torch.Tensor:
        """Return the shared memory as `[tokens, width]`."""
        return self._wide[: len(self._hidden) * width].view(-1, width)

    def _pass(self, readers: Sequence[Target], to_input: ToInput) -> Hessian | None:
        """Take every sample to an input, gathering the Hessian for the linears that read it.

        Returns None if there are no such linears.
        """
        hessian = None
        if readers:
            short = "/".join(target.name.rpartition(".")[2] for target in readers)
            name = f"{readers[0].name.rpartition('.')[0]}.{short}"
            hessian = Hessian(readers[0].in_features, name=name)
        for sample, span in enumerate(self._spans):
            x = to_input(sample, span)
            if hessian is not None:
                hessian.add(x, sample=sample)
            self._on_sample()
        return hessian

    def _solve(
        self,
        names: Sequence[str],
        hessian: Hessian | None,
        weights: Mapping[str, torch.Tensor],
        targets: Mapping[str, Target],
    ) -> Iterator[tuple[str, Solved]]:
        """Quantize the linears that share an input; its Hessian is factored once."""
        if hessian is None:
            return
        matrix = hessian.matrix()
        act_order = any(_scheme(targets[name]).act_order for name in names)
        factor = gptq.factorize(matrix, damp_percent=self._damp_percent, act_order=act_order)
        for name in names:
            target = targets[name]
            result = gptq.solve_factored(
                weights[name], matrix, _scheme(target), factor, name=target.name
            )
            row = replace(
                plain_row(target),
                error=result.error,
                damp_percent=result.damp_percent,
                attempts=result.attempts,
                num_tokens=hessian.num_tokens,
                fallback=result.fallback,
            )
            yield name, Solved(result.weight, row)


def plain_row(target: Target) -> ModuleRow:
    """Return a module's line without results: it is left as it is, or only planned."""
    return ModuleRow(
        target.name,
        target.in_features,
        target.out_features,
        None if target.scheme is None else str(target.scheme),
        skipped=target.reason,
    )


def _scheme(target: Target) -> WeightScheme:
    if target.scheme is None:
        raise ValueError(f"{target.name} is not to be quantized")
    return target.scheme


def _inputs(num_tokens: int, layout: KVLayout) -> ModelInputs:
    """Return the index tensors of one sequence that starts at the first cache block."""
    order = torch.arange(num_tokens)
    return ModelInputs(
        token_ids=order,  # not read: the hidden states are given
        positions=order,
        slots=order,
        block_tables=torch.arange(layout.num_blocks(num_tokens)).unsqueeze(0),
        seq_lens=torch.tensor([num_tokens]),
        query_starts=torch.tensor([0, num_tokens]),
        logit_rows=order[-1:],
    )
