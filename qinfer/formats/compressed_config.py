"""The settings of compressed-tensors: read in the spellings found in the wild, written in one.

They are groups of a scheme and its targets (a class of modules, a module's name, or `re:` and a
regular expression) and a list of what to ignore. Keys as in compressed-tensors 0.20
(`QuantizationConfig`, `QuantizationScheme`, `QuantizationArgs`).
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from qinfer.errors import CheckpointError
from qinfer.formats.compressed import INT8, PACKED
from qinfer.formats.settings import ModuleFormat, QuantizationSettings, Rule
from qinfer.schemes import WEIGHT_BITS, WeightScheme

METHOD = "compressed-tensors"
MIXED = "mixed-precision"
FORMAT_VERSION = "0.20.0"  # of compressed-tensors whose keys are written
_LAYOUTS = {PACKED: PACKED, INT8: INT8, "naive-quantized": INT8}
_REFUSED = {
    "float-quantized": "its weights are FP8, which no kernel of qinfer multiplies",
    "nvfp4-pack-quantized": "its weights are NVFP4, 4-bit floats for one generation of GPUs",
    "mxfp4-pack-quantized": "its weights are MXFP4, 4-bit floats with shared exponents",
    "mxfp8-quantized": "its weights are MXFP8, 8-bit floats with shared exponents",
    "sparse-bitmask": "its weights are sparse, stored by a bitmask",
    "sparse-24-bitmask": "its weights are 2:4 sparse, stored by a bitmask",
    "marlin-24": "its weights are 2:4 sparse and repacked for one GPU kernel",
    "dense": "its weights are not compressed; save the model compressed",
    "fakequant": "its weights are not compressed; save the model compressed",
}
_ALL_LINEARS = "Linear"
_REGEX = "re:"


def parse_config(raw: Mapping[str, Any]) -> QuantizationSettings:
    """Read the settings of compressed-tensors.

    Exact names come before regular expressions, and those before classes, as in
    `compressed_tensors.utils.match_targets`. What a group says of activations changes nothing in
    how weights are read.

    Raises:
        CheckpointError: a key is missing, of the wrong kind, or asks for a layout that is not read.
    """
    _refuse_transforms(raw)
    groups = raw.get("config_groups")
    if not isinstance(groups, Mapping):
        raise CheckpointError("quantization_config.config_groups is missing or no object")
    named: list[Rule] = []
    matched: list[Rule] = []
    targets: dict[str, ModuleFormat] = {}
    default: ModuleFormat | None = None
    for key, group in groups.items():
        where = f"quantization_config.config_groups.{key}"
        stored = _group(group, raw.get("format"), where)
        if stored is None:
            continue
        for target in _strings(group.get("targets"), f"{where}.targets"):
            if targets.setdefault(target, stored) != stored:
                raise CheckpointError(
                    f"{where} targets {target!r} as {stored}, although another group says "
                    f"{targets[target]}; remove one of them"
                )
            if target == _ALL_LINEARS:
                default = stored
            elif target.startswith(_REGEX):
                matched.append((_pattern(target, f"{where}.targets"), stored))
            else:
                named.append((_pattern(target, f"{where}.targets"), stored))
    ignored = _strings(raw.get("ignore"), "quantization_config.ignore")
    skip: list[Rule] = [(_pattern(name, "quantization_config.ignore"), None) for name in ignored]
    return QuantizationSettings(
        method=METHOD,
        version=str(raw.get("format") or PACKED),
        default=default,
        rules=(*skip, *named, *matched),
        raw=dict(raw),
    )


def _refuse_transforms(raw: Mapping[str, Any]) -> None:
    transforms = raw.get("transform_config")
    if isinstance(transforms, Mapping) and transforms.get("config_groups"):
        raise CheckpointError(
            "quantization_config.transform_config names rotations that run beside the weights, "
            "which qinfer does not apply; get the checkpoint without them"
        )
    sparsity = raw.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        raise CheckpointError(
            f"quantization_config.sparsity_config.format is {sparsity['format']!r}, which qinfer "
            "does not read; get the checkpoint without sparse storage"
        )


def _group(group: object, top: object, where: str) -> ModuleFormat | None:
    """Return the format of a group's modules; None if it leaves weights as they are."""
    if not isinstance(group, Mapping):
        raise CheckpointError(
            f"{where} is {group!r}; qinfer reads schemes written out in full, no names of presets"
        )
    weights = group.get("weights")
    if weights is None:
        return None
    if not isinstance(weights, Mapping):
        raise CheckpointError(f"{where}.weights is {weights!r}; it must be an object")
    layout = group.get("format") or (None if top == MIXED else top)
    if layout is None:  # old files leave it to the reader
        layout = INT8 if group.get("input_activations") else PACKED
    layout = str(layout)
    if layout in _REFUSED:
        raise CheckpointError(
            f"{where} has format {layout!r}, which qinfer does not read: {_REFUSED[layout]}"
        )
    if layout not in _LAYOUTS:
        raise CheckpointError(f"{where} has format {layout!r}; qinfer reads {', '.join(_LAYOUTS)}")
    return ModuleFormat(_LAYOUTS[layout], _scheme(weights, f"{where}.weights"))


def _scheme(weights: Mapping[str, Any], where: str) -> WeightScheme:
    kind, bits = str(weights.get("type", "int")).lower(), weights.get("num_bits", 8)
    if kind != "int":
        raise CheckpointError(
            f"{where} asks for {bits}-bit numbers of type {kind!r}; qinfer reads integers"
        )
    if not isinstance(bits, int) or bits not in WEIGHT_BITS:
        raise CheckpointError(f"{where}.num_bits is {bits!r}; qinfer reads {WEIGHT_BITS}")
    if weights.get("dynamic"):
        raise CheckpointError(f"{where}.dynamic is {weights['dynamic']!r}; weights are static")
    return WeightScheme(
        bits=bits,
        group_size=_group_size(weights, where),
        symmetric=_symmetric(weights, where),
        act_order=bool(weights.get("actorder")),
    )


def _group_size(weights: Mapping[str, Any], where: str) -> int | None:
    """Return the group size; None = one scale per row, or one for the whole tensor."""
    size, strategy = weights.get("group_size"), weights.get("strategy")
    if strategy is None:
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    if str(strategy).lower() in {"channel", "tensor"}:
        return None
    if str(strategy).lower() != "group":
        raise CheckpointError(
            f"{where}.strategy is {strategy!r}; qinfer reads group, channel and tensor"
        )
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise CheckpointError(f"{where}.group_size is {size!r}; it must be a positive integer")
    return size


def _symmetric(weights: Mapping[str, Any], where: str) -> bool:
    symmetric = weights.get("symmetric", True)
    if not isinstance(symmetric, bool):
        raise CheckpointError(f"{where}.symmetric is {symmetric!r}; it must be true or false")
    return symmetric


def _strings(raw: object, where: str) -> list[str]:
    if raw is None:
        return []
    if not isinstance(raw, list) or not all(isinstance(item, str) for item in raw):
        raise CheckpointError(f"{where} is {raw!r}; it must be a list of strings")
    return raw


def _pattern(target: str, where: str) -> str:
    """Return the regular expression of a target, to be matched at the start of a name."""
    if target == _ALL_LINEARS:
        return ""
    if not target.startswith(_REGEX):
        return f"{re.escape(target)}$"
    pattern = target.removeprefix(_REGEX)
    try:
        re.compile(pattern)
    except re.error as error:
        raise CheckpointError(f"{where}: {target!r} is no regular expression: {error}") from error
    return pattern


def config(
    groups: Mapping[WeightScheme, Iterable[str]],
    *,
    ignore: Iterable[str],
    layout: str = PACKED,
    kv_scheme: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the `quantization_config` object.

    Args:
        groups: targets of every scheme; the names of modules, or `Linear` for all others.
        ignore: linears that stay as they are, such as `lm_head`.
        layout: `pack-quantized`, or `int-quantized` for INT8 weights whose inputs are quantized
            too, per token as they come (W8A8).
        kv_scheme: `kv_cache_scheme` (see `qinfer.formats.kv_scales`).
    """
    return {
        "quant_method": METHOD,
        "version": FORMAT_VERSION,
        "format": layout,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "config_groups": {
            f"group_{number}": {
                "targets": list(targets),
                "format": layout,
                "weights": _weights(scheme),
                "input_activations": _token_activations() if layout == INT8 else None,
                "output_activations": None,
            }
            for number, (scheme, targets) in enumerate(groups.items())
        },
        "ignore": list(ignore),
        "kv_cache_scheme": None if kv_scheme is None else dict(kv_scheme),
        "sparsity_config": {},
        "transform_config": {},
    }


def _weights(scheme: WeightScheme) -> dict[str, Any]:
    grouped = scheme.group_size is not None
    return _arguments(
        num_bits=scheme.bits,
        symmetric=scheme.symmetric,
        strategy="group" if grouped else "channel",
        group_size=scheme.group_size,
        dynamic=False,
        # Static groups in the order of activations change how codes were found, not how they lie.
        actorder="weight" if scheme.act_order and grouped else None,
        observer="memoryless_minmax",
    )


def _token_activations() -> dict[str, Any]:
    return _arguments(
        num_bits=8,
        symmetric=True,
        strategy="token",
        group_size=None,
        dynamic=True,
        actorder=None,
        observer=None,
    )


def _arguments(**given: Any) -> dict[str, Any]:
    """Return `QuantizationArgs`, in its order; it refuses keys that it does not know."""
    return {
        "num_bits": given["num_bits"],
        "type": "int",
        "symmetric": given["symmetric"],
        "group_size": given["group_size"],
        "strategy": given["strategy"],
        "block_structure": None,
        "dynamic": given["dynamic"],
        "actorder": given["actorder"],
        "scale_dtype": None,
        "zp_dtype": None if given["symmetric"] else "torch.int8",
        "observer": given["observer"],
        "observer_kwargs": {},
    }
