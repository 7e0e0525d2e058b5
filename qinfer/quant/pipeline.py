"""`quantize`: from a model to a quantized checkpoint, one decoder block at a time.

The order: refuse what cannot work, plan, calibrate and quantize block after block, assemble. One
block's weights are in memory at a time, and every finished block is safe in `OUT.partial`, from
where the same command goes on. What is written depends on the inputs alone, so that equal inputs
give equal bytes, however many threads there are and however often it was interrupted.
"""

import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from qinfer.checkpoint.assemble import write_shards
from qinfer.checkpoint.durable import refuse_existing
from qinfer.checkpoint.hub import resolve_model
from qinfer.checkpoint.partial import PartialDirectory
from qinfer.checkpoint.reader import open_checkpoint
from qinfer.checkpoint.tensor_file import Piece, entry_piece, source_piece
from qinfer.checkpoint.writer import copy_companions, write_json
from qinfer.errors import ConfigError, QuantizationError
from qinfer.host import peak_rss
from qinfer.kernels.cpu.arena import return_freed
from qinfer.models.tokenizer import load_tokenizer
from qinfer.quant import output
from qinfer.quant.allocation import allocated
from qinfer.quant.block_run import CalibratedRun, first_unfinished, round_blocks
from qinfer.quant.budget import Budget
from qinfer.quant.calibration import CalibrationSet, calibration_for
from qinfer.quant.commit import kept_rows
from qinfer.quant.conditioner import (
    ConditioningPlan,
    ConditioningRecord,
    LayerConditioning,
    plan_conditioning,
)
from qinfer.quant.config import QuantizeConfig
from qinfer.quant.experts import under_seen
from qinfer.quant.fingerprint import arithmetic, fingerprint
from qinfer.quant.job import Job, OnProgress, Progress, block_name, prepare
from qinfer.quant.report import REPORT_NAME, ModuleRow, QuantProgress, QuantReport, Sizes
from qinfer.quant.solver import plain_row
from qinfer.quant.workers import Workers

_RETURNED_BYTES = 2**20  # tensors as large leave nothing behind when memory is limited

_log = logging.getLogger(__name__)


def quantize(  # noqa: PLR0913 - each is an option of the command
    model: str | Path,
    out: str | Path | None = None,
    *,
    revision: str | None = None,
    dry_run: bool = False,
    restart: bool = False,
    memory: int | None = None,
    threads: int | None = None,
    on_progress: OnProgress | None = None,
    **options: Any,
) -> QuantReport:
    """Quantize the decoder's linear weights of a model and write a checkpoint.

    Work that was interrupted is continued by the same call: finished blocks are kept in
    `OUT.partial` until the checkpoint is complete.

    Args:
        model: a directory, a hub id or a `.gguf` file.
        out: directory to write; it must not exist, and appears only when all is done. None for a
            dry run only.
        revision: branch, tag or commit of a hub model.
        dry_run: stop after the plan; nothing is calibrated or written.
        restart: forget unfinished work in `OUT.partial`.
        memory: bytes that the process may have resident; activations that do not fit are kept on
            disk. None = a quarter of the free memory for activations.
        threads: CPU threads; None = as many as torch would use. The bytes do not depend on them.
        on_progress: called at every step.
        options: fields of `QuantizeConfig`.

    Raises:
        ConfigError: options or shapes that cannot work, `out` exists, or `OUT.partial` holds the
            work of another run.
        CapacityError: the memory or the disk cannot be enough.
        CheckpointError: the source is damaged or quantized already, or the disk is full.
        QuantizationError: no calibration token, a scale beyond float16, or (`strict`) a fallback.
        NonFiniteError: an activation or weight that is not finite; names layer and sample.
    """
    started = time.monotonic()
    config = QuantizeConfig(**options)
    target = None if dry_run else _free_path(out)
    job = prepare(open_checkpoint(resolve_model(model, revision=revision)), config)
    if memory is not None:
        return_freed(_RETURNED_BYTES)
    plan = _plan_conditioning(job)
    job = replace(job, every_block=plan.conditioner is not None)
    if target is None:
        report = _planned(job, plan, threads, memory, on_progress or _ignore)
    else:
        with Workers(threads) as workers, PartialDirectory(target, restart=restart) as partial:
            report = _run(job, plan, partial, workers, memory, on_progress or _ignore)
        report = replace(report, out=target)
    seconds = time.monotonic() - started
    return replace(report, seconds=seconds, peak_rss_bytes=peak_rss())


def _planned(
    job: Job,
    plan: ConditioningPlan,
    threads: int | None,
    memory: int | None,
    on_progress: OnProgress,
) -> QuantReport:
    """Report what would be done; only a choice of bits has to look at the weights for that."""
    allocation: dict[str, Any] = {}
    calibration = _calibration(job) if job.config.allocated else None
    if calibration is not None:
        with Workers(threads) as workers:
            budget = Budget.settle(job, calibration, threads=workers.threads, memory=memory)
            room = budget.sensitivity_room
            job, allocation = allocated(job, calibration, workers, on_progress, room=room)
    rows = tuple(plain_row(item) for item in job.plan.targets)
    conditioning = _conditioning_facts(plan, None)
    return replace(_report(job, rows, None), allocation=allocation, conditioning=conditioning)


def _free_path(out: str | Path | None) -> Path:
    if out is None:
        raise ConfigError("an output directory is needed, except for a dry run")
    path = Path(out)
    refuse_existing(path)
    return path


def _plan_conditioning(job: Job) -> ConditioningPlan:
    """Decide whether keys are conditioned, and whether static scales of the cache are measured."""
    kv = job.config.kv_scheme()
    static = job.plan.form.carries_kv_scheme and kv is not None and kv.dtype == "fp8_e4m3"
    return plan_conditioning(
        job.config.condition_kv,
        source_config=job.source.config,
        config=job.model,
        scheme=kv,
        calibrated=job.config.calibrated,
        static_scales=static,
    )


def _run(
    job: Job,
    plan: ConditioningPlan,
    partial: PartialDirectory,
    workers: Workers,
    memory: int | None,
    on_progress: OnProgress,
) -> QuantReport:
    """Quantize what is not finished, and assemble the checkpoint."""
    calibration = _calibration(job)
    budget = Budget.settle(job, calibration, threads=workers.threads, memory=memory)
    partial.claim(fingerprint(job, calibration))
    budget.check_disk(partial.path)
    allocation: dict[str, Any] = {}
    if job.config.allocated and calibration is not None:
        room = budget.sensitivity_room
        job, allocation = allocated(
            job, calibration, workers, on_progress, partial=partial, room=room
        )
    first = first_unfinished(job, partial)
    if first:
        _log.warning("%s", _continuing(first, job.num_run))
    modules = sum(target.scheme is not None for target in job.plan.targets)
    if calibration is None:
        progress = Progress(on_progress, samples=0, modules=modules)
        round_blocks(job, partial, workers, progress)
    else:
        passes = sum(len(block.stages) for block in job.blocks(1))
        samples = passes * len(calibration.windows)
        progress = Progress(on_progress, samples=samples, modules=modules)
        CalibratedRun(
            job,
            calibration,
            partial,
            workers,
            progress=progress,
            in_memory=budget.in_memory,
            conditioner=plan.conditioner,
        ).run()
    record = _conditioning_record(job, plan, partial, calibration)
    planned = _report(job, _rows(job, partial), calibration)
    written = sum(piece.num_bytes for piece in _pieces(job, partial))
    report = replace(
        planned,
        sizes=replace(planned.sizes, output_bytes=written),
        allocation=allocation,
        conditioning=_conditioning_facts(plan, record),
    )
    if job.config.strict and report.fallback_modules:
        raise QuantizationError(_strict_message(report, partial.path))
    _assemble(job, partial, report, record)
    return replace(report, resumed_at=first or None)


def _continuing(first: int, count: int) -> str:
    if first == count:
        return f"all {count} blocks were finished by an earlier run"
    return f"continuing at block {first + 1} of {count}"


def _calibration(job: Job) -> CalibrationSet | None:
    if not job.config.calibrated:
        return None
    return calibration_for(
        load_tokenizer(job.source.path),
        path=job.config.calibration,
        num_samples=job.config.num_samples,
        seq_len=job.config.seq_len,
        max_position=job.model.max_position,
    )


def _conditioning_record(
    job: Job,
    plan: ConditioningPlan,
    partial: PartialDirectory,
    calibration: CalibrationSet | None,
) -> ConditioningRecord | None:
    """Return the record of the finished blocks; None if keys were not conditioned."""
    if plan.conditioner is None or calibration is None:
        return None
    rows = [
        LayerConditioning.from_dict(partial.block_facts(layer)["conditioning"])
        for layer in range(job.num_run)
    ]
    return plan.conditioner.record(rows, [len(window) for window in calibration.windows])


def _conditioning_facts(
    plan: ConditioningPlan, record: ConditioningRecord | None
) -> dict[str, Any]:
    """Return what the report says of conditioning: what it gained, or why it was left out."""
    if record is not None:
        return record.summary()
    return {} if plan.notice is None else {"notice": plan.notice}


def _rows(job: Job, partial: PartialDirectory) -> tuple[ModuleRow, ...]:
    """Return the row of every module, in the model's order."""
    rows = {target.name: plain_row(target) for target in job.plan.targets}
    for layer in range(job.num_run):
        rows |= {row.name: row for row in kept_rows(partial, layer)}
    return tuple(rows.values())


def _assemble(
    job: Job, partial: PartialDirectory, report: QuantReport, record: ConditioningRecord | None
) -> None:
    """Write the checkpoint from the finished blocks and the source, and give it its name."""
    folder = partial.begin_result()
    write_shards(folder, _pieces(job, partial))
    copy_companions(job.source.path, folder)
    files = output.json_files(job.source.config, job.plan, job.config, record)
    for name, data in files.items():
        write_json(folder / name, data)
    write_json(folder / REPORT_NAME, report.to_dict())
    partial.publish_result()


def _pieces(job: Job, partial: PartialDirectory) -> Iterator[Piece]:
    """Yield every tensor of the output: first those outside the blocks, then block by block."""
    kept = job.kept_names()
    prefixes = tuple(f"{block_name(layer)}." for layer in range(job.model.num_layers))
    for name in kept:
        if not name.startswith(prefixes):
            yield source_piece(job.source, name)
    for layer, prefix in enumerate(prefixes):
        made = partial.block_entries(layer) if layer < job.num_run else {}
        for name, entry in made.items():
            yield entry_piece(name, entry)
        for name in kept:
            if name.startswith(prefix) and name not in made:
                yield source_piece(job.source, name)


def _report(
    job: Job, rows: tuple[ModuleRow, ...], calibration: CalibrationSet | None
) -> QuantReport:
    return QuantReport(
        config=job.config.to_dict(),
        scheme=str(job.plan.scheme),
        rows=rows,
        calibration=None if calibration is None else calibration.to_dict(),
        arithmetic=None if calibration is None else arithmetic(),
        sizes=Sizes(
            source_bytes=job.source.total_bytes,
            output_bytes=job.planned_bytes(),
            skip_cost_bytes=job.plan.skip_cost_bytes(job.element_bytes),
        ),
        under_seen_experts=under_seen(rows) if calibration and job.model.moe else {},
    )


def _strict_message(report: QuantReport, partial: Path) -> str:
    lines = [f"  {row.name}: {row.fallback}" for row in report.fallback_modules]
    return (
        f"{len(lines)} of {len(report.rows)} modules fell back to round-to-nearest and --strict "
        f"was given, so no checkpoint was written; the work is kept in {partial}, and the same "
        "command without --strict finishes it:\n" + "\n".join(lines)
    )


def _ignore(_: QuantProgress) -> None:
    """Report progress to nobody."""
