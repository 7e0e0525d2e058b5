"""AWQ checkpoints in AutoAWQ's GEMM layout, read into the canonical weight.

Layout: `qweight` int32 `[in, out / 8]`, eight 4-bit codes of neighbouring outputs per word in the
order 0, 2, 4, 6, 1, 3, 5, 7; `qzeros` int32 `[groups, out / 8]` packed alike, zero points as they
are; `scales` `[groups, out]`. Settings in AutoAWQ's spelling (`w_bit`, `q_group_size`) and that of
transformers' `AwqConfig`.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch

from qinfer.errors import CheckpointError
from qinfer.formats.checks import check_dtype, check_scales, require
from qinfer.formats.packing import unpack
from qinfer.formats.settings import ModuleFormat, QuantizationSettings, Rule
from qinfer.formats.weight import QuantizedWeight
from qinfer.schemes import WeightScheme

TENSORS = ("qweight", "qzeros", "scales")
_BITS = 4
_LANES = 32 // _BITS
# Output 8 w + i lies in lane _LANE_OF[i] of word w: the inverse of the order above.
_LANE_OF = (0, 4, 1, 5, 2, 6, 3, 7)
_SYNONYMS = {"w_bit": "bits", "q_group_size": "group_size"}
_MIDDLE = 1 << (_BITS - 1)
_REFUSED = {
    "gemv": "its weights are interleaved for one GPU kernel",
    "gemv_fast": "its weights are interleaved for one GPU kernel",
    "marlin": "its weights are repacked for one GPU kernel",
    "exllama": "its weights are repacked for one GPU kernel",
    "ipex": "its weights are repacked for one library",
}


def parse_config(raw: Mapping[str, Any]) -> QuantizationSettings:
    """Read AWQ's settings.

    Raises:
        CheckpointError: a key is missing, of the wrong kind, or asks for a layout that is not read.
    """
    data = {_SYNONYMS.get(key, key): value for key, value in raw.items()}
    version = str(data.get("version") or data.get("format") or "gemm").lower()
    if version in _REFUSED:
        raise CheckpointError(
            f"quantization_config.version is {version!r}, which qinfer does not read: "
            f"{_REFUSED[version]}; get the checkpoint in version gemm"
        )
    if version != "gemm":
        raise CheckpointError(f"quantization_config.version is {version!r}; qinfer reads gemm")
    if data.get("bits") != _BITS:
        raise CheckpointError(
            f"quantization_config.bits is {data.get('bits')!r}; AWQ's gemm layout holds {_BITS}"
        )
    size = data.get("group_size")
    if not isinstance(size, int) or isinstance(size, bool) or size == 0 or size < -1:
        raise CheckpointError(
            f"quantization_config.group_size is {size!r}; it must be positive or -1"
        )
    if data.get("zero_point", True) is not True:
        raise CheckpointError(
            f"quantization_config.zero_point is {data['zero_point']!r}; gemm files store zero "
            "points, so it must be true"
        )
    scheme = WeightScheme(_BITS, None if size == -1 else size, symmetric=False)
    return QuantizationSettings(
        method="awq",
        version=version,
        default=ModuleFormat("awq", scheme),
        rules=_skipped(data.get("modules_to_not_convert")),
        raw=dict(raw),
    )


def _skipped(names: object) -> tuple[Rule, ...]:
    """Return rules for modules that are left out: those with one of the names in theirs."""
    if names is None:
        return ((r"lm_head$", None),)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(
            f"quantization_config.modules_to_not_convert is {names!r}; it must be a list of names"
        )
    return (*((f".*{re.escape(name)}", None) for name in names), (r"lm_head$", None))


def from_tensors(
    tensors: Mapping[str, torch.Tensor],
    stored: ModuleFormat,
    *,
    in_features: int,
    out_features: int,
    name: str,
) -> QuantizedWeight:
    """Return the weight that AWQ tensors hold (see `table.FromTensors`).

    Raises:
        CheckpointError: a tensor is missing, has another shape or type than the settings imply, or
            holds values that cannot be.
    """
    scheme = stored.grid
    groups = scheme.num_groups(in_features)
    words = -(-out_features // _LANES)
    expected = {
        "qweight": (in_features, words),
        "qzeros": (groups, words),
        "scales": (groups, out_features),
    }
    require(tensors, TENSORS, name)
    for part, shape in expected.items():
        _check_shape(tensors[part], shape, f"{name}.{part}", in_features)
    for part in ("qweight", "qzeros"):
        check_dtype(tensors[part], torch.int32, f"{name}.{part}")
    check_scales(tensors["scales"], f"{name}.scales")
    return QuantizedWeight(
        codes=_codes(tensors["qweight"], out_features).to(torch.int8),
        scales=tensors["scales"].T.contiguous(),
        scheme=scheme,
        zeros=_codes(tensors["qzeros"], out_features).to(torch.int16),
    )


def _check_shape(tensor: torch.Tensor, shape: tuple[int, int], name: str, in_features: int) -> None:
    found = tuple(tensor.shape)
    if found != shape:
        hint = ""
        rows = found[0] if found else 0
        if not name.endswith("qweight") and rows and rows != shape[0]:
            hint = f"; group_size {in_features // rows} would fit"
        elif name.endswith("qweight") and found == (shape[0] // _LANES, shape[1] * _LANES):
            hint = "; that is GPTQ's layout: set quant_method to gptq"
        raise CheckpointError(f"{name} has shape {found}, expected {shape}{hint}")


def _codes(words: torch.Tensor, out_features: int) -> torch.Tensor:
    """Return `[rows, out / 8]` words as signed codes `[out, rows]`, int16."""
    lanes: torch.Tensor = unpack(words, _BITS, 1, words.shape[1] * _LANES)
    lanes = lanes.unflatten(1, (-1, _LANES))  # [rows, words, lanes]
    order = torch.tensor(_LANE_OF, device=lanes.device)
    ordered: torch.Tensor = lanes.index_select(2, order).flatten(1)[:, :out_features]
    return ordered.T.to(torch.int16).sub_(_MIDDLE).contiguous()
