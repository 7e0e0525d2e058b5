"""What all steps of quantizing read: the source, the options, the plan, and how far it is."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from qinfer.checkpoint.reader import Checkpoint
from qinfer.errors import CheckpointError
from qinfer.models.config import ModelConfig, linear_shapes
from qinfer.models.load import HEAD, check_tensors
from qinfer.models.rope import RotaryTable
from qinfer.quant.blocks import block_stages
from qinfer.quant.bnb import BnbRounding, make_rounding
from qinfer.quant.config import QuantizeConfig
from qinfer.quant.gptaq import enough_pairs
from qinfer.quant.report import ModuleRow, QuantProgress
from qinfer.quant.stages import BlockStages
from qinfer.quant.targets import Plan, Target, make_plan

OnProgress = Callable[[QuantProgress], None]


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """A source, what to do with it, and what becomes of every linear.

    `rounding` is set where the linears are rounded by bitsandbytes, `every_block` where more than
    the linears of blocks may change (keys are conditioned).
    """

    source: Checkpoint
    model: ModelConfig
    config: QuantizeConfig
    plan: Plan
    rounding: BnbRounding | None = None
    every_block: bool = False

    @property
    def num_run(self) -> int:
        """Blocks that are run: all, or up to the last one that has a module to quantize."""
        layers = range(self.model.num_layers)
        if self.every_block:
            return len(layers)
        return 1 + max(
            layer for layer in layers if any(t.scheme for t in self.targets_of(layer).values())
        )

    @property
    def element_bytes(self) -> int:
        """Size of an element of the source's linears."""
        return self.source.dtype(f"{self.plan.targets[0].name}.weight").itemsize

    def targets_of(self, layer: int) -> dict[str, Target]:
        """Return the linears of one block by their names inside it."""
        prefix = block_name(layer) + "."
        return {
            target.name.removeprefix(prefix): target
            for target in self.plan.targets
            if target.name.startswith(prefix)
        }

    def blocks(self, longest: int) -> list[BlockStages]:
        """Return the stages of the blocks that are run, for samples of `longest` tokens at most.

        Raises:
            UnsupportedModelError: a block cannot be calibrated.
        """
        rotary = RotaryTable(self.model.rope, self.model.head_dim, longest)
        return [block_stages(self.model, layer, rotary) for layer in range(self.num_run)]

    def paired_samples(self, lengths: Sequence[int]) -> int:
        """Return how many of the first samples run through the unquantized model too (GPTAQ).

        None where so many say too little of every linear.

        Args:
            lengths: tokens of every sample.
        """
        first = lengths[: self.config.gptaq_samples] if self.config.gptaq else ()
        widths = {target.in_features for target in self.plan.targets if target.scheme}
        return len(first) if any(enough_pairs(sum(first), width) for width in widths) else 0

    def kept_names(self) -> list[str]:
        """Return the source's tensors that are not replaced by quantized ones."""
        replaced = {f"{target.name}.weight" for target in self.plan.targets if target.scheme}
        return [
            name
            for name in self.source.names()
            if name not in replaced and not self._is_tied_copy(name)
        ]

    def planned_bytes(self) -> int:
        """Return the size of the checkpoint that will be written."""
        kept = sum(self.source.entries[name].num_bytes for name in self.kept_names())
        return kept + sum(self._file_bytes(item) for item in self.plan.targets if item.scheme)

    def _file_bytes(self, target: Target) -> int:
        if self.rounding is not None:
            return self.rounding.file_bytes(target.in_features, target.out_features)
        return target.file_bytes(self.element_bytes)

    def _is_tied_copy(self, name: str) -> bool:
        """Tell a head that the config says is the embedding: it is not written twice."""
        return self.model.tie_word_embeddings and name == f"{HEAD}.weight"


def block_name(layer: int) -> str:
    """Return the module name of a decoder block."""
    return f"model.layers.{layer}"


def prepare(source: Checkpoint, config: QuantizeConfig) -> Job:
    """Check the source and plan, without reading a weight.

    Raises:
        ConfigError: options or shapes that cannot work.
        CheckpointError: the source is incomplete, or quantized already.
    """
    if source.quantization is not None:
        raise CheckpointError(
            f"{source.path} is quantized already ({source.quantization.method}, "
            f"{source.quantization.scheme}); quantize the model that it was made from"
        )
    model = ModelConfig.from_dict(source.config)
    check_tensors(source, model)
    shapes = linear_shapes(model)
    rounding = make_rounding(config, shapes)
    return Job(source, model, config, make_plan(shapes, config), rounding)


class Progress:
    """Turns samples and modules into progress reports with the time that is left.

    Args:
        report: called at every step.
        samples: sample passes in all.
        modules: modules in all.
    """

    def __init__(self, report: OnProgress, *, samples: int, modules: int) -> None:
        self._report = report
        self._samples, self._modules = samples, modules
        self._samples_done = self._modules_done = self._first_sample = 0
        self._started = time.monotonic()

    def skip(self, *, samples: int, modules: int) -> None:
        """Count what an earlier run did."""
        self._samples_done += samples
        self._first_sample += samples
        self._modules_done += modules
        note = "from an earlier run"
        self._report(QuantProgress("quantize", self._modules_done, self._modules, note))

    def sample(self) -> None:
        """One sample went through one part of a block."""
        self._samples_done += 1
        done, total = self._samples_done, self._samples
        per_sample = (time.monotonic() - self._started) / (done - self._first_sample)
        eta = (total - done) * per_sample
        self._report(QuantProgress("calibrate", done, total, seconds_left=eta))

    def module(self, row: ModuleRow) -> None:
        """One module was quantized."""
        self._modules_done += 1
        note = f"{row.name.removeprefix('model.')} error {row.error:.5f}"
        self._report(QuantProgress("quantize", self._modules_done, self._modules, note))
