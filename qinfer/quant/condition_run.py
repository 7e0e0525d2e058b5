"""`condition`: fold KV conditioning into a checkpoint, quantized or not, and keep all else.

One block's weights are in memory at a time. Sample windows run through the blocks as they are:
conditioning does not change what a block computes.
"""

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qinfer.checkpoint.durable import refuse_existing
from qinfer.checkpoint.hub import resolve_model
from qinfer.checkpoint.reader import Checkpoint, open_checkpoint
from qinfer.checkpoint.settings import KV_KEY, kv_config
from qinfer.checkpoint.writer import CheckpointWriter
from qinfer.errors import CheckpointError, ConfigError, UnsupportedModelError
from qinfer.formats.kv_scales import is_kv_scale
from qinfer.formats.weight import QuantizedWeight
from qinfer.kvcache.inputs import ModelInputs
from qinfer.kvcache.layout import KVLayout
from qinfer.kvcache.pool import KVPool
from qinfer.models.config import ModelConfig
from qinfer.models.layers import Weight
from qinfer.models.load import EMBEDDING, block_weights, build_block, check_tensors
from qinfer.models.rope import RotaryTable
from qinfer.models.step import StepMaker
from qinfer.models.tokenizer import load_tokenizer
from qinfer.quant import conditioning
from qinfer.quant.calibration import CalibrationSet, calibration_for
from qinfer.quant.conditioner import (
    RECORD_NAME,
    SEARCH_TOKENS,
    SEARCH_WINDOWS,
    Conditioner,
    ConditioningRecord,
    LayerConditioning,
    scaled_names,
    why_not,
)
from qinfer.quant.hessian import check_finite
from qinfer.schemes import KV_SCHEMES, KVScheme, parse_kv_dtype

SHARD_BYTES = 256 * 1024**2  # a shard is collected in memory
_SETTINGS = (
    "quantize_config.json",
    "quant_config.json",
    "hf_quant_config.json",
    "quantize_report.json",
)
# The tensor with a quantized weight's scales -> its dimension along the output.
_SCALES = {"scales": 1, "weight_scale": 0}

OnLayer = Callable[[int, int, str], None]  # layers done, layers in all, what came out


@dataclass(frozen=True, slots=True)
class ConditionReport:
    """The result of conditioning a checkpoint.

    Args:
        out: where it was written.
        record: the factors, and errors before and after.
        calibration: what text was used.
        repeated: the source had been conditioned before.
        seconds: wall time.
    """

    out: Path
    record: ConditioningRecord
    calibration: dict[str, Any]
    repeated: bool
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return the record that `qinfer condition --json` writes."""
        return self.record.to_dict() | {
            "calibration": self.calibration,
            "repeated": self.repeated,
            "seconds": self.seconds,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionOptions:
    """How to condition.

    Args:
        kv_cache_dtype: the quantized KV type to condition for and to record; None = the one that
            the checkpoint records, else int8.
        calibration: see `quant.calibration`; None = the text in the package.
        num_samples: windows to search, at most `SEARCH_WINDOWS`.
        seq_len: tokens per window, at most `SEARCH_TOKENS`.
    """

    kv_cache_dtype: str | None = None
    calibration: str | Path | None = None
    num_samples: int = SEARCH_WINDOWS
    seq_len: int = SEARCH_TOKENS

    def __post_init__(self) -> None:
        """Refuse what can never work.

        Raises:
            ConfigError: naming the option.
        """
        for name, value, most in (
            ("num_samples", self.num_samples, SEARCH_WINDOWS),
            ("seq_len", self.seq_len, SEARCH_TOKENS),
        ):
            if not 1 <= value <= most:
                raise ConfigError(f"{name} {value} is not between 1 and {most}")
        if self.kv_cache_dtype is not None and not parse_kv_dtype(self.kv_cache_dtype).quantized:
            raise ConfigError(
                f"kv_cache_dtype {self.kv_cache_dtype!r} is not quantized; condition for int8 or "
                "fp8_e4m3"
            )

    def scheme(self, recorded: KVScheme | None) -> KVScheme:
        """Return the KV scheme to condition for, where the checkpoint records `recorded`."""
        if self.kv_cache_dtype is not None:
            return parse_kv_dtype(self.kv_cache_dtype)
        return recorded if recorded is not None and recorded.quantized else KV_SCHEMES["int8"]


def condition(
    model: str | Path,
    out: str | Path,
    *,
    revision: str | None = None,
    on_layer: OnLayer | None = None,
    **options: Any,
) -> ConditionReport:
    """Write MODEL anew with conditioned keys and queries; every other tensor keeps its bytes.

    Conditioning a second time is harmless: the function stays the same, and so do the keys where
    nothing is left to gain.

    Args:
        model: a directory, a hub id or a `.gguf` file.
        out: directory to write; it must not exist, and appears only when all is done.
        revision: branch, tag or commit of a hub model.
        on_layer: called after every layer.
        options: fields of `ConditionOptions`.

    Raises:
        ConfigError: options that cannot work, or `out` exists.
        UnsupportedModelError: the architecture allows no such factors; says why.
        CheckpointError: the source cannot be read, or its scales cannot carry factors.
        NonFiniteError: an activation is not finite; names layer and sample.
    """
    started = time.monotonic()
    chosen = ConditionOptions(**options)
    target = Path(out)
    refuse_existing(target)
    source = open_checkpoint(resolve_model(model, revision=revision))
    reason = why_not(source.config)
    if reason is not None:
        raise UnsupportedModelError(f"{source.path} cannot be conditioned: {reason}")
    _refuse_static_scales(source)
    config = ModelConfig.from_dict(source.config)
    check_tensors(source, config)
    scheme = chosen.scheme(source.kv_scheme)
    samples = calibration_for(
        load_tokenizer(source.path),
        path=chosen.calibration,
        num_samples=chosen.num_samples,
        seq_len=chosen.seq_len,
        max_position=config.max_position,
    )
    record = _write(source, config, scheme, samples, target, on_layer)
    return ConditionReport(
        out=target,
        record=record,
        calibration=samples.to_dict(),
        repeated="conditioning" in (source.config.get(KV_KEY) or {}),
        seconds=time.monotonic() - started,
    )


def _refuse_static_scales(source: Checkpoint) -> None:
    static = [name for name in source.names() if is_kv_scale(name)]
    if static:
        raise CheckpointError(
            f"{source.path} holds static scales of the cache ({static[0]} and others), measured on "
            "the keys as they are; condition the model before its KV scales are calibrated"
        )


def _write(
    source: Checkpoint,
    config: ModelConfig,
    scheme: KVScheme,
    samples: CalibrationSet,
    out: Path,
    on_layer: OnLayer | None,
) -> ConditioningRecord:
    """Write the checkpoint; `out` appears when everything is in it."""
    conditioner = Conditioner(config, scheme)
    rows: list[LayerConditioning] = []
    with CheckpointWriter(out, max_shard_bytes=SHARD_BYTES) as writer:
        prefixes = tuple(f"model.layers.{layer}." for layer in range(config.num_layers))
        for name in source.names():
            if not name.startswith(prefixes):
                writer.add(name, source.tensor(name))
        run = WindowRun(config, samples.windows, source.tensor(EMBEDDING))
        for layer, prefix in enumerate(prefixes):
            weights = block_weights(source, config, layer)
            scaled = _scaled(source, prefix, weights, qk_norm=config.qk_norm)
            tensors = {name: item.rows for name, item in scaled.items()}
            row = conditioner.search(layer, weights, run.hidden, tensors, {})
            folded = conditioning.fold(tensors, row.factors())
            changed = {
                prefix + name: folded[name].transpose(0, item.axis) for name, item in scaled.items()
            }
            for name in source.names():
                if name.startswith(prefix):
                    tensor = changed[name] if name in changed else source.tensor(name)
                    writer.add(name, tensor)
            rows.append(row)
            if layer + 1 < config.num_layers:  # behind the last layer nobody looks
                run.advance(layer, weights)
            if on_layer is not None:
                note = f"error {row.relative_before:.3g} -> {row.relative_after:.3g}"
                on_layer(layer + 1, config.num_layers, note)
        record = conditioner.record(rows, [len(window) for window in samples.windows])
        _write_settings(source, scheme, record, writer)
    return record


def _write_settings(
    source: Checkpoint, scheme: KVScheme, record: ConditioningRecord, writer: CheckpointWriter
) -> None:
    """Write config and record, and copy what lies beside the weights."""
    writer.copy_companions(source.path)
    for name in _SETTINGS:
        if (source.path / name).is_file():
            shutil.copyfile(source.path / name, writer.partial / name)
    kv = {KV_KEY: kv_config(scheme, record.summary())}
    writer.write_json("config.json", source.config | kv)
    writer.write_json(RECORD_NAME, record.to_dict())


@dataclass(frozen=True, slots=True, eq=False)
class _Scaled:
    """A tensor that factors are folded into: its output rows first, and where they lie on disk."""

    rows: torch.Tensor
    axis: int


def _scaled(
    source: Checkpoint, prefix: str, weights: Mapping[str, Weight], *, qk_norm: bool
) -> dict[str, _Scaled]:
    """Return the tensors of a block that factors are folded into, by their names in the block.

    Raises:
        CheckpointError: a quantized weight whose scales are not one or more for each row.
    """
    scaled = {}
    for name in scaled_names(weights, qk_norm=qk_norm):
        weight = weights[name]
        if isinstance(weight, torch.Tensor):
            file_name = name if source.has(prefix + name) else f"{name}.weight"
            scaled[file_name] = _Scaled(weight, 0)
        else:
            part, axis = _scales_of(source, prefix + name, weight)
            stored = source.tensor(f"{prefix}{name}.{part}")
            scaled[f"{name}.{part}"] = _Scaled(stored.transpose(0, axis), axis)
    return scaled


def _scales_of(source: Checkpoint, module: str, weight: QuantizedWeight) -> tuple[str, int]:
    """Return the name of the tensor with a module's scales, and its dimension along the output."""
    found = [(part, axis) for part, axis in _SCALES.items() if source.has(f"{module}.{part}")]
    if len(found) == 1 and weight.offsets is None:
        part, axis = found[0]
        shape = source.shape(f"{module}.{part}")
        if len(shape) == 2 and shape[axis] == weight.out_features:
            return part, axis
    raise CheckpointError(
        f"{source.path}: {module} does not keep its scales row by row (there are "
        f"{', '.join(part for part, _ in found) or 'none'}), so factors cannot be folded into it; "
        "condition the unquantized model and quantize that"
    )


class WindowRun:
    """Sample windows on their way through the blocks of a model, float32.

    Args:
        config: the model's facts.
        windows: token ids.
        embedding: `[vocab, hidden]`, any float dtype.
    """

    def __init__(
        self, config: ModelConfig, windows: Sequence[Sequence[int]], embedding: torch.Tensor
    ) -> None:
        self._config = config
        self.hidden = [embedding[torch.tensor(window)].float() for window in windows]
        for sample, hidden in enumerate(self.hidden):
            check_finite(hidden, name=EMBEDDING, sample=sample)
        longest = max(len(window) for window in windows)
        layout = KVLayout(1, config.num_kv_heads, config.head_dim, KV_SCHEMES["fp32"])
        self._layout = layout
        self._cache = KVPool(layout, layout.num_blocks(longest)).layer(0)
        rotary = RotaryTable(config.rope, config.head_dim, longest)
        self._steps = StepMaker(config, rotary, layout, dtype=torch.float32, device="cpu")

    @torch.inference_mode()
    def advance(self, layer: int, weights: Mapping[str, Weight]) -> None:
        """Replace the windows' inputs of a block by its outputs.

        Raises:
            NonFiniteError: an output is not finite; names layer and sample.
        """
        block = build_block(
            self._config, layer, weights, dtype=torch.float32, device="cpu", fuse=False
        )
        for sample, hidden in enumerate(self.hidden):
            step = self._steps.make(self._inputs(len(hidden)))
            self.hidden[sample] = block.forward(hidden, step, self._cache)
            name = f"the output of model.layers.{layer}"
            check_finite(self.hidden[sample], name=name, sample=sample)

    def _inputs(self, num_tokens: int) -> ModelInputs:
        """Return the index tensors of one sequence from the first cache block on."""
        order = torch.arange(num_tokens)
        return ModelInputs(
            token_ids=order,  # not read: hidden states are given
            positions=order,
            slots=order,
            block_tables=torch.arange(self._layout.num_blocks(num_tokens)).unsqueeze(0),
            seq_lens=torch.tensor([num_tokens]),
            query_starts=torch.tensor([0, num_tokens]),
            logit_rows=order[-1:],
        )
