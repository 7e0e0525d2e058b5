"""From one format of quantized weights to another without loss, with a proof.

Three passes, each of one module at a time: every weight is asked whether the target can carry it,
before anything is written; then it is written; then source and result are read, dequantized and
compared bit for bit. The directory appears when the proof holds.
"""

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from qinfer.checkpoint.durable import refuse_existing, writing
from qinfer.checkpoint.files import list_names
from qinfer.checkpoint.reader import Checkpoint, open_checkpoint
from qinfer.checkpoint.writer import DEFAULT_SHARD_BYTES, CheckpointWriter, write_json
from qinfer.errors import CheckpointError, ConfigError, QuantizationError
from qinfer.formats import bnb, compressed, gguf_blocks
from qinfer.formats.kv_scales import is_kv_scale, parse_kv_scheme
from qinfer.formats.output import HEAD, OutputFacts, OutputFormat, output_format
from qinfer.formats.settings import ModuleFormat
from qinfer.formats.table import FORMATS, split_name
from qinfer.formats.weight import QuantizedWeight
from qinfer.schemes import WeightScheme

REPORT_NAME = "convert_report.json"
REPORT_VERSION = 1
_PIECE = 1 << 22  # elements that are dequantized at a time
_KV_SCHEME = "kv_cache_scheme"
_INPUT_SCALES = (".input_scale", ".input_zero_point")

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """What a conversion did and proved.

    Args:
        source_format: what the weights were in.
        target_format: what they are in.
        modules: quantized modules that were compared.
        equal: those whose dequantized weights are equal bit for bit.
        worst_difference: largest difference of two weights.
        copied_tensors: other tensors, equal bit for bit.
        left_out: tensors that the target has no place for.
    """

    source_format: str
    target_format: str
    modules: int
    equal: int
    worst_difference: float
    copied_tensors: int
    left_out: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the documented JSON object."""
        facts = asdict(self) | {"left_out": list(self.left_out)}
        return {"kind": "conversion", "format_version": REPORT_VERSION, **facts}


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """What all passes read.

    Args:
        source: the checkpoint that is read.
        target: the format that is written.
        modules: the quantized modules and their schemes.
        scattered: whether a module has its groups scattered over the inputs.
    """

    source: Checkpoint
    target: OutputFormat
    modules: dict[str, WeightScheme]
    scattered: bool

    def others(self) -> list[str]:
        """Return the tensors that belong to no quantized weight."""
        return [name for name in self.source.names() if not self._is_weight(name)]

    def copied(self) -> list[str]:
        """Return the tensors that are written as they are."""
        keep = self.target.carries_kv_scheme
        return [name for name in self.others() if keep or not is_kv_scale(name)]

    def left_out(self) -> tuple[str, ...]:
        """Return the tensors that the target has no place for: scales of activations."""
        inputs = [name for name in self.source.names() if name.endswith(_INPUT_SCALES)]
        return (*inputs, *sorted(set(self.others()) - set(self.copied())))

    def _is_weight(self, name: str) -> bool:
        module, part = split_name(name)
        if module not in self.modules:
            return False
        fmt = FORMATS[_stored(self.source, module).layout]
        return part in {*fmt.tensors, *fmt.optional_tensors}


def transcode(
    source: Checkpoint,
    out: Path,
    *,
    name: str,
    version: str | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    on_progress: Progress | None = None,
) -> Conversion:
    """Write the quantized checkpoint `source` in another format as the new directory `out`.

    Args:
        source: an opened checkpoint.
        out: appears when the proof holds.
        name: `gptq` or `compressed-tensors`.
        version: `gptq` or `gptq_v2`; None = v1 where all weights are symmetric.
        max_shard_bytes: largest weight file.
        on_progress: called with (stage, modules done, modules in all).

    Raises:
        ConfigError: `out` exists, the source is not quantized, or `version` is not the format's.
        QuantizationError: the target cannot carry a weight without loss; lists up to ten modules
            with the reason of each. Or a weight came back as another, which is a defect.
        CheckpointError: a file is damaged or cannot be written.
    """
    refuse_existing(out)
    progress = on_progress or (lambda *_: None)
    job = _plan(source, name, version, progress)
    unproved = out.with_name(f"{out.name}.unproved")
    if unproved.exists():  # left by a run that was killed
        with writing(unproved):
            shutil.rmtree(unproved)
    try:
        with CheckpointWriter(unproved, max_shard_bytes=max_shard_bytes) as writer:
            _write(job, writer, progress)
        conversion = _prove(job, open_checkpoint(unproved), progress)
        write_json(unproved / REPORT_NAME, conversion.to_dict())
        refuse_existing(out)
        with writing(out):
            unproved.rename(out)
    finally:
        if unproved.exists():
            shutil.rmtree(unproved)
    return conversion


def _plan(source: Checkpoint, name: str, version: str | None, progress: Progress) -> _Job:
    """Ask of every weight whether the target can carry it, and learn what the settings say."""
    settings = source.quantization
    if settings is None or not settings.formats:
        raise ConfigError(
            f"{source.path} holds no quantized weights, which --format is about; "
            "qinfer quantize makes them"
        )
    stored = {module: _stored(source, module) for module in _quantized_modules(source)}
    schemes = [found.scheme for found in stored.values()]
    symmetric = all(scheme is not None and scheme.symmetric for scheme in schemes)
    w8a8 = {found.layout for found in stored.values()} == {compressed.INT8}
    target = output_format(
        name,
        symmetric=symmetric,
        version=version,
        input_activations="int8" if w8a8 and name != "gptq" else "none",
    )
    modules: dict[str, WeightScheme] = {}
    problems: list[str] = []
    scattered = False
    for done, module in enumerate(stored, start=1):
        weight = _read(source, module)
        if isinstance(weight, QuantizedWeight):
            modules[module] = weight.scheme
            scattered = scattered or weight.group_index is not None
            reason = target.refusal(weight)
        else:
            reason = f"{stored[module]} is no grid of whole numbers with scales"
        if reason is not None:
            problems.append(f"{module}: {reason}")
        progress("check", done, len(stored))
    if problems:
        raise QuantizationError(
            f"{len(problems)} of {len(stored)} modules cannot be written as {target.label} without "
            f"loss, so nothing was written:{list_names(problems)}"
        )
    return _Job(source, target, modules, scattered)


def _quantized_modules(source: Checkpoint) -> list[str]:
    parts = {part for fmt in FORMATS.values() for part in fmt.tensors}
    split = [split_name(name) for name in source.names()]
    modules = dict.fromkeys(module for module, part in split if part in parts)
    return [module for module in modules if source.is_quantized(module)]


def _stored(source: Checkpoint, module: str) -> ModuleFormat:
    found = source.quantization.module_format(module) if source.quantization else None
    if found is None:
        raise CheckpointError(
            f"{module} is quantized in {source.path}, but its settings exclude this layer"
        )
    return found


def _read(source: Checkpoint, module: str) -> object:
    """Read a weight in the shape that its own tensors have."""
    out_features, in_features = _shape(source, module)
    return source.weight(module, in_features=in_features, out_features=out_features)


def _grid(source: Checkpoint, module: str) -> QuantizedWeight:
    """Read a weight that the plan has seen."""
    weight = _read(source, module)
    if not isinstance(weight, QuantizedWeight):
        raise CheckpointError(f"{module} of {source.path} is no longer what it was")
    return weight


def _shape(source: Checkpoint, module: str) -> tuple[int, int]:
    """Return `(out, in)` of a quantized weight from its tensors."""
    stored = _stored(source, module)
    fmt = FORMATS[stored.layout]
    if stored.layout == bnb.FOUR_BIT_LAYOUT:
        raise QuantizationError(
            f"{module} is stored as {stored}, codes that are places in a table of "
            "values, which neither gptq nor compressed-tensors can carry; nothing was written"
        )
    part = fmt.tensors[0]
    shape = source.shape(f"{module}.{part}")
    if stored.layout == compressed.PACKED:
        part = "weight_shape"
        shape = tuple(source.tensor(f"{module}.{part}").long().flatten().tolist())
    if len(shape) != 2 or min(shape) < 1:
        raise CheckpointError(f"{module}.{part} tells of shape {shape}, expected two dimensions")
    rows, columns = shape
    if stored.layout == "gptq":
        return columns, rows * 32 // stored.grid.bits
    if stored.layout == "awq":
        return columns * 32 // stored.grid.bits, rows
    if stored.layout == gguf_blocks.LAYOUT:
        return rows, fmt.count_codes(rows * columns, stored) // rows
    return rows, columns


def _write(job: _Job, writer: CheckpointWriter, progress: Progress) -> None:
    for name in job.copied():
        writer.add(name, job.source.tensor(name))
    for done, module in enumerate(job.modules, start=1):
        weight = _grid(job.source, module)
        for part, tensor in job.target.to_tensors(weight).items():
            writer.add(f"{module}.{part}", tensor)
        progress("write", done, len(job.modules))
    settings = job.target.settings(_facts(job))
    writer.write_json("config.json", job.source.config | {"quantization_config": settings})
    for file in job.target.side_files:
        writer.write_json(file, settings)
    writer.copy_companions(job.source.path)


def _facts(job: _Job) -> OutputFacts:
    settings = job.source.quantization
    raw = settings.raw if settings else {}
    parse_kv_scheme(raw)  # what is passed on as it is must be readable
    plain = [replace(scheme, act_order=False) for scheme in job.modules.values()]
    usual = Counter(plain).most_common(1)[0][0]
    ordered = any(scheme.act_order for scheme in job.modules.values())
    return OutputFacts(
        scheme=replace(usual, act_order=ordered),
        modules=job.modules | dict.fromkeys(_dense_linears(job)),
        ignored=(HEAD,),  # a tied one has no tensor of its own
        desc_act=job.scattered,
        meta=dict(raw["meta"]) if isinstance(raw.get("meta"), dict) else {},
        kv_scheme=raw.get(_KV_SCHEME) if job.target.carries_kv_scheme else None,
    )


def _dense_linears(job: _Job) -> Iterator[str]:
    """Yield the modules with a plain matrix, but the head: all but the embedding are linears."""
    for name in job.others():
        module, part = split_name(name)
        is_matrix = part == "weight" and len(job.source.shape(name)) == 2
        if is_matrix and module != HEAD and "embed" not in module:
            yield module


def _prove(job: _Job, result: Checkpoint, progress: Progress) -> Conversion:
    """Read both, compare, and count.

    Raises:
        QuantizationError: something is not equal.
    """
    equal, worst = 0, 0.0
    for done, module in enumerate(job.modules, start=1):
        difference, same = _compare(_grid(job.source, module), _grid(result, module))
        worst, equal = max(worst, difference), equal + same
        progress("prove", done, len(job.modules))
    copied = job.copied()
    changed = [
        name
        for name in copied
        if not torch.equal(_bytes(job.source.tensor(name)), _bytes(result.tensor(name)))
    ]
    if equal != len(job.modules) or changed:
        raise QuantizationError(
            f"{len(job.modules) - equal} of {len(job.modules)} modules and {len(changed)} other "
            f"tensors came back changed (by up to {worst:.3g}); nothing was kept. This is a "
            "defect of qinfer: please report it"
        )
    settings = job.source.quantization
    return Conversion(
        source_format=settings.version if settings else "",
        target_format=job.target.label,
        modules=len(job.modules),
        equal=equal,
        worst_difference=worst,
        copied_tensors=len(copied),
        left_out=job.left_out(),
    )


def _compare(before: QuantizedWeight, after: QuantizedWeight) -> tuple[float, bool]:
    """Return the largest difference of two weights, and whether all bits are equal."""
    worst, same = 0.0, before.codes.shape == after.codes.shape
    step = max(1, _PIECE // before.in_features)
    for begin in range(0, before.out_features if same else 0, step):
        left, right = (
            weight.rows(begin, min(begin + step, before.out_features)).dequantize()
            for weight in (before, after)
        )
        worst = max(worst, float((left - right).abs().max()))
        same = same and torch.equal(left.view(torch.int32), right.view(torch.int32))
    return worst if same or worst else float("inf"), same


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)
