"""`quantize`: from a model to a quantized checkpoint, one decoder block at a time.

The order: refuse what cannot work, plan, calibrate and quantize block after block, write. One
block's weights are in memory at a time. What is written depends on the inputs alone, so that
equal inputs give equal bytes.
"""

import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from qinfer.checkpoint.hub import resolve_model
from qinfer.checkpoint.reader import Checkpoint, open_checkpoint
from qinfer.checkpoint.writer import CheckpointWriter
from qinfer.errors import CheckpointError, ConfigError, QuantizationError
from qinfer.formats import gptq as gptq_format
from qinfer.formats import gptq_config
from qinfer.models.config import ModelConfig, linear_shapes
from qinfer.models.load import EMBEDDING, HEAD, block_weights, build_block, check_tensors
from qinfer.models.tokenizer import load_tokenizer
from qinfer.quant.blockwise import (
    PASSES_PER_BLOCK,
    CalibrationRun,
    Solved,
    plain_row,
    round_to_nearest,
)
from qinfer.quant.calibration import CalibrationSet, load_calibration
from qinfer.quant.config import QuantizeConfig
from qinfer.quant.report import REPORT_NAME, ModuleRow, QuantProgress, QuantReport, Sizes
from qinfer.quant.targets import Plan, Target, make_plan

KV_RECORD = "qinfer_kv_cache"
KV_RECORD_VERSION = 1
SHARD_BYTES = 256 * 1024**2  # a shard is collected in memory, so it counts towards the peak

OnProgress = Callable[[QuantProgress], None]


def quantize(
    model: str | Path,
    out: str | Path | None = None,
    *,
    revision: str | None = None,
    dry_run: bool = False,
    memory: int | None = None,
    threads: int | None = None,
    on_progress: OnProgress | None = None,
    **options: Any,
) -> QuantReport:
    """Quantize the decoder's linear weights of a model and write a checkpoint.

    Args:
        model: a directory, a hub id or a `.gguf` file.
        out: directory to write; it must not exist, and appears only when all is done. None for a
            dry run only.
        revision: branch, tag or commit of a hub model.
        dry_run: stop after the plan; nothing is calibrated or written.
        on_progress: called at every step.
        options: fields of `QuantizeConfig`.

    Raises:
        ConfigError: options or shapes that cannot work, or `out` exists.
        CheckpointError: the source is damaged or quantized already.
        QuantizationError: no calibration token, a scale beyond float16, or (`strict`) a fallback.
        NonFiniteError: an activation or weight that is not finite; names layer and sample.
    """
    del memory, threads
    started = time.monotonic()
    config = QuantizeConfig(**options)
    target = None if dry_run else _free_path(out)
    source = open_checkpoint(resolve_model(model, revision=revision))
    job = _prepare(source, config, on_progress or _ignore)
    if target is None:
        rows = tuple(plain_row(item) for item in job.plan.targets)
        report = _report(job, rows, None, _planned_bytes(job))
    else:
        report = replace(_write(job, target), out=target)
    seconds = time.monotonic() - started
    return replace(report, seconds=seconds, peak_rss_bytes=_peak_rss_bytes())


def _free_path(out: str | Path | None) -> Path:
    if out is None:
        raise ConfigError("an output directory is needed, except for a dry run")
    path = Path(out)
    if path.exists():
        raise ConfigError(f"{path} exists already; choose another output or remove it first")
    return path


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """What all steps read."""

    source: Checkpoint
    model: ModelConfig
    config: QuantizeConfig
    plan: Plan
    on_progress: OnProgress

    @property
    def version(self) -> gptq_config.Version:
        return gptq_config.preferred_version(self.plan.scheme)

    @property
    def num_run(self) -> int:
        """Blocks up to the last one that has a module to quantize."""
        layers = range(self.model.num_layers)
        return 1 + max(
            layer for layer in layers if any(t.scheme for t in self.targets_of(layer).values())
        )

    def targets_of(self, layer: int) -> dict[str, Target]:
        """Return the linears of one block by their names inside it."""
        prefix = f"model.layers.{layer}."
        return {
            target.name.removeprefix(prefix): target
            for target in self.plan.targets
            if target.name.startswith(prefix)
        }


def _prepare(source: Checkpoint, config: QuantizeConfig, on_progress: OnProgress) -> _Job:
    """Check the source and plan, without reading a weight."""
    if source.quantization is not None:
        raise CheckpointError(
            f"{source.path} is quantized already ({source.quantization.method}, "
            f"{source.quantization.scheme}); quantize the model that it was made from"
        )
    model = ModelConfig.from_dict(source.config)
    check_tensors(source, model)
    return _Job(source, model, config, make_plan(linear_shapes(model), config), on_progress)


def _write(job: _Job, out: Path) -> QuantReport:
    """Quantize and write; `out` appears when everything is in it."""
    calibration = _calibration(job)
    rows = {target.name: plain_row(target) for target in job.plan.targets}
    output_bytes = 0
    with CheckpointWriter(out, max_shard_bytes=SHARD_BYTES) as writer:
        for name, tensor in _tensors(job, calibration, rows):
            writer.add(name, tensor)
            output_bytes += tensor.nbytes
        report = _report(job, tuple(rows.values()), calibration, output_bytes)
        if job.config.strict and report.fallback_modules:
            raise QuantizationError(_strict_message(report))
        _write_settings(job, writer, report)
    return report


def _calibration(job: _Job) -> CalibrationSet | None:
    if job.config.algorithm == "rtn":
        return None
    tokenizer = load_tokenizer(job.source.path)
    return load_calibration(
        lambda text: tokenizer.encode(text, add_special_tokens=False),
        path=job.config.calibration,
        num_samples=job.config.num_samples,
        seq_len=job.config.seq_len,
        max_position=job.model.max_position,
    )


def _tensors(
    job: _Job, calibration: CalibrationSet | None, rows: dict[str, ModuleRow]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of the output, block by block; fills in `rows` on the way."""
    prefixes = tuple(f"model.layers.{layer}." for layer in range(job.model.num_layers))
    for name in job.source.names():
        if not name.startswith(prefixes) and not _is_tied_copy(name, job.model):
            yield name, job.source.tensor(name)
    progress = _Progress(job, calibration)
    run = None
    if calibration is not None:
        run = CalibrationRun(
            job.model,
            calibration.windows,
            job.source.tensor(EMBEDDING),
            damp_percent=job.config.damp_percent,
            on_sample=progress.sample,
        )
    num_run = job.num_run
    for layer, prefix in enumerate(prefixes):
        targets = job.targets_of(layer)
        # Behind the last module that is quantized nobody looks at the activations.
        solved_block = _solve_block(job, layer, targets, run) if layer < num_run else ()
        for solved in solved_block:
            name = solved.row.name
            rows[name] = solved.row
            progress.module(solved.row)
            tensors = gptq_format.to_tensors(solved.weight, version=job.version)
            for suffix, tensor in tensors.items():
                yield f"{name}.{suffix}", tensor
        replaced = {f"{target.name}.weight" for target in targets.values() if target.scheme}
        for name in job.source.names():
            if name.startswith(prefix) and name not in replaced:
                yield name, job.source.tensor(name)


def _solve_block(
    job: _Job, layer: int, targets: Mapping[str, Target], run: CalibrationRun | None
) -> Iterator[Solved]:
    weights = {
        name: weight
        for name, weight in block_weights(job.source, job.model, layer).items()
        if isinstance(weight, torch.Tensor)
    }
    if run is None:
        for name, target in targets.items():
            if target.scheme is not None:
                yield round_to_nearest(target, weights[name])
        return
    block = build_block(job.model, layer, weights, dtype=torch.float32, device="cpu", fuse=False)
    yield from run.run_block(block, weights, targets)


class _Progress:
    """Turns samples and modules into progress reports."""

    def __init__(self, job: _Job, calibration: CalibrationSet | None) -> None:
        self._report = job.on_progress
        self._modules = sum(target.scheme is not None for target in job.plan.targets)
        samples = 0 if calibration is None else len(calibration.windows)
        self._samples = samples * PASSES_PER_BLOCK * job.num_run
        self._modules_done = 0
        self._samples_done = 0

    def sample(self) -> None:
        """One sample went through one part of a block."""
        self._samples_done += 1
        self._report(QuantProgress("calibrate", self._samples_done, self._samples))

    def module(self, row: ModuleRow) -> None:
        """One module was quantized."""
        self._modules_done += 1
        note = f"{row.name.removeprefix('model.')} error {row.error:.5f}"
        self._report(QuantProgress("quantize", self._modules_done, self._modules, note))


def _write_settings(job: _Job, writer: CheckpointWriter, report: QuantReport) -> None:
    """Write config, settings and report, and copy what lies beside the weights."""
    settings = _settings(job)
    kv = job.config.kv_scheme()
    config = {key: value for key, value in job.source.config.items() if key != KV_RECORD}
    config["quantization_config"] = settings
    if kv is not None:
        config[KV_RECORD] = {
            "format_version": KV_RECORD_VERSION,
            "dtype": kv.dtype,
            "granularity": kv.granularity,
        }
    writer.copy_companions(job.source.path)
    writer.write_json("config.json", config)
    writer.write_json("quantize_config.json", settings)
    writer.write_json(REPORT_NAME, report.to_dict())


def _settings(job: _Job) -> dict[str, Any]:
    calibrated = job.config.algorithm == "gptq"
    meta: dict[str, Any] = {"method": job.config.algorithm, "true_sequential": calibrated}
    if calibrated:
        meta["damp_percent"] = job.config.damp_percent
    return gptq_config.config(
        job.plan.scheme, version=job.version, overrides=job.plan.file_overrides(), meta=meta
    )


def _report(
    job: _Job,
    rows: tuple[ModuleRow, ...],
    calibration: CalibrationSet | None,
    output_bytes: int,
) -> QuantReport:
    return QuantReport(
        config=job.config.to_dict(),
        scheme=str(job.plan.scheme),
        rows=rows,
        calibration=None if calibration is None else calibration.to_dict(),
        sizes=Sizes(
            source_bytes=job.source.total_bytes,
            output_bytes=output_bytes,
            skip_cost_bytes=job.plan.skip_cost_bytes(_element_bytes(job)),
        ),
    )


def _planned_bytes(job: _Job) -> int:
    """Return the size of the checkpoint that would be written."""
    targets = job.plan.targets
    size = _element_bytes(job)
    change = sum(target.file_bytes(size) - target.dense_bytes(size) for target in targets)
    tied = [name for name in job.source.names() if _is_tied_copy(name, job.model)]
    return job.source.total_bytes + change - sum(job.source.tensor(name).nbytes for name in tied)


def _element_bytes(job: _Job) -> int:
    return job.source.dtype(f"{job.plan.targets[0].name}.weight").itemsize


def _is_tied_copy(name: str, model: ModelConfig) -> bool:
    """Tell a head that the config says is the embedding: it is not written twice."""
    return model.tie_word_embeddings and name == f"{HEAD}.weight"


def _strict_message(report: QuantReport) -> str:
    lines = [f"  {row.name}: {row.fallback}" for row in report.fallback_modules]
    return (
        f"{len(lines)} of {len(report.rows)} modules fell back to round-to-nearest and --strict "
        "was given, so nothing was written:\n" + "\n".join(lines)
    )


def _peak_rss_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes on Linux


def _ignore(_: QuantProgress) -> None:
    """Report progress to nobody."""
