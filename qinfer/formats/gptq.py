"""GPTQ's tensors (`qweight`, `qzeros`, `scales`, `g_idx`) to and from the canonical weight.

Layout (AutoGPTQ 0.7, GPTQModel 7): `qweight` int32 `[in * bits / 32, out]` packed along the
input, `qzeros` int32 `[groups, out * bits / 32]` packed along the output, `scales` float16
`[groups, out]`, `g_idx` int32 `[in]`. Variant `gptq` stores zero points minus one, `gptq_v2` as
they are. Everything here is a pure function of tensors; files and names are the reader's.
"""

import logging
from collections.abc import Mapping

import torch

from qinfer.errors import CheckpointError, QuantizationError
from qinfer.formats.checks import check_dtype, check_scales, require
from qinfer.formats.gptq_config import Version, config, parse_config, preferred_version
from qinfer.formats.groups import group_index
from qinfer.formats.packing import num_words, pack, to_int32, unpack
from qinfer.formats.weight import QuantizedWeight
from qinfer.schemes import WEIGHT_BITS, WeightScheme

__all__ = [
    "OPTIONAL_TENSORS",
    "TENSORS",
    "Version",
    "config",
    "detect_symmetric",
    "from_tensors",
    "misfit",
    "parse_config",
    "preferred_version",
    "to_tensors",
]

TENSORS = ("qweight", "qzeros", "scales")
OPTIONAL_TENSORS = ("g_idx",)

_log = logging.getLogger(__name__)


def misfit(in_features: int, out_features: int, scheme: WeightScheme) -> str | None:
    """Return why a layer of this shape cannot be written in this scheme; None = it can.

    The message names the dimension at fault: the input must hold whole groups, and both
    dimensions must fill whole int32 words, as padded files are not read by other engines.
    """
    bits, group = scheme.bits, scheme.group_size
    problems: list[str] = []
    if group is not None and in_features % group:
        problems.append(
            f"in_features {in_features} is not a multiple of group size {group} "
            f"({in_features / group:g} groups)"
        )
    for name, size in (("in_features", in_features), ("out_features", out_features)):
        if size * bits % 32:
            problems.append(f"{name} {size} x {bits} bits does not fill whole 32-bit words")
    return "; ".join(problems) or None


def to_tensors(weight: QuantizedWeight, *, version: Version) -> dict[str, torch.Tensor]:
    """Return the tensors of one layer, by the last part of their names.

    Scales are stored as float16: pass float16 scales for an exact round trip.

    Raises:
        QuantizationError: the shape does not fit, a scale is not finite in float16, or a zero
            point of 0 would have to be written as v1.
    """
    scheme = weight.scheme
    problem = misfit(weight.in_features, weight.out_features, scheme)
    if problem:
        raise QuantizationError(problem)
    scales = weight.scales.to(torch.float16)
    if not torch.isfinite(scales).all():
        raise QuantizationError("a scale is not finite in float16, the type that GPTQ stores")
    middle = 1 << (scheme.bits - 1)
    codes = weight.codes.to(torch.int16) + middle  # [out, in]
    zeros = torch.full_like(scales, middle, dtype=torch.int16)  # [out, groups]
    if weight.zeros is not None:
        zeros = weight.zeros.to(torch.int16) + middle
    if version == "gptq":
        if int(zeros.min()) < 1:
            raise QuantizationError(
                "a zero point is 0, which format gptq (v1) cannot store; write gptq_v2"
            )
        zeros = zeros - 1
    return {
        "qweight": pack(codes.T, scheme.bits, 0),
        "qzeros": pack(zeros.T, scheme.bits, 1),
        "scales": scales.T.contiguous(),
        "g_idx": weight.column_groups().to(torch.int32),
    }


def from_tensors(
    tensors: Mapping[str, torch.Tensor],
    scheme: WeightScheme,
    *,
    in_features: int,
    out_features: int,
    version: str,
    name: str,
) -> QuantizedWeight:
    """Return the weight that GPTQ tensors hold.

    Args:
        tensors: `qweight`, `qzeros`, `scales` and, if the file has it, `g_idx`.
        scheme: what the settings say about this module.
        in_features: columns of the weight, from the model's facts.
        out_features: rows of the weight, from the model's facts.
        version: `gptq` or `gptq_v2`; a symmetric layer whose zero points contradict it is read as
            what it is, with a warning.
        name: the module's full name, for messages.

    Raises:
        CheckpointError: a tensor is missing, has another shape or type than the settings imply,
            or holds values that cannot be.
    """
    require(tensors, TENSORS, name)
    _check_shapes(tensors, scheme, in_features, out_features, name)
    check_scales(tensors["scales"], f"{name}.scales")
    scales = tensors["scales"].T.contiguous()  # [out, groups]
    g_idx = tensors.get("g_idx")
    index = None if g_idx is None else group_index(g_idx, scheme, in_features, f"{name}.g_idx")
    middle = 1 << (scheme.bits - 1)
    unsigned = unpack(tensors["qweight"], scheme.bits, 0, in_features)  # [in, out]
    codes = unsigned.T.contiguous().sub_(middle).view(torch.int8)  # bytes wrap around
    return QuantizedWeight(
        codes=codes,
        scales=scales,
        scheme=scheme,
        zeros=_zeros(tensors["qzeros"], scheme, out_features, version, name),
        group_index=index,
    )


def detect_symmetric(qzeros: torch.Tensor, bits: int) -> bool:
    """Tell whether zero points are those of a symmetric layer, in either variant."""
    size = qzeros.shape[1] * 32 // bits
    return _constant_version(unpack(qzeros, bits, 1, size), bits) is not None


def _check_shapes(
    tensors: Mapping[str, torch.Tensor],
    scheme: WeightScheme,
    in_features: int,
    out_features: int,
    name: str,
) -> None:
    bits, groups = scheme.bits, scheme.num_groups(in_features)
    expected = {
        "qweight": (num_words(in_features, bits), out_features),
        "scales": (groups, out_features),
        "qzeros": (groups, num_words(out_features, bits)),
    }
    for key, shape in expected.items():
        found = tuple(tensors[key].shape)
        if found != shape:
            cause = _likely_cause(key, found, scheme, in_features, out_features)
            raise CheckpointError(f"{name}.{key} has shape {found}, expected {shape}{cause}")
    for key in ("qweight", "qzeros"):
        check_dtype(tensors[key], torch.int32, f"{name}.{key}")


def _likely_cause(
    key: str, found: tuple[int, ...], scheme: WeightScheme, in_features: int, out_features: int
) -> str:
    """Return a hint such as `; 4 bits would fit, the settings say 8`, or nothing."""
    if len(found) != 2:
        return ""
    rows, columns = found
    if key == "qzeros" and columns == out_features:
        return "; its zero points seem not to be packed"
    if key == "qweight" and columns != out_features:
        return f"; config.json implies {out_features} output features"
    for bits in WEIGHT_BITS:
        fits = {
            "qweight": rows == num_words(in_features, bits),
            "qzeros": columns == num_words(out_features, bits),
        }
        if fits.get(key) and bits != scheme.bits:
            return f"; {bits} bits would fit, the settings say bits = {scheme.bits}"
    if key != "qweight" and rows and rows != scheme.num_groups(in_features):
        said = -1 if scheme.group_size is None else scheme.group_size
        likely = -1 if rows == 1 else -(-in_features // rows)
        return f"; group_size {likely} would fit, the settings say group_size = {said}"
    return ""


def _constant_version(stored: torch.Tensor, bits: int) -> Version | None:
    """Return the variant whose symmetric zero point fills all of `stored`; None = neither."""
    first = int(stored.flatten()[0]) if stored.numel() else -1
    if not (stored == first).all():
        return None
    middle = 1 << (bits - 1)
    if first == middle:
        return "gptq_v2"
    # GPTQModel's v1 of 3 bits subtracts 4 from every field, not 1.
    return "gptq" if first == middle - 1 or (bits == 3 and first == 0) else None


def _zeros(
    qzeros: torch.Tensor, scheme: WeightScheme, out_features: int, version: str, name: str
) -> torch.Tensor | None:
    """Return the zero points as int16 `[out, groups]`, shifted; None for symmetric weights."""
    bits = scheme.bits
    middle = 1 << (bits - 1)
    stored = unpack(qzeros, bits, 1, out_features)  # [groups, out]
    actual = _constant_version(stored, bits)
    if actual is not None and actual != version:
        _log.warning(
            "%s: the zero points are those of format %s although the settings say %s; read as %s",
            name, actual, version, actual,
        )  # fmt: skip
    if scheme.symmetric:
        if actual is None:
            raise CheckpointError(
                f"{name}.qzeros holds zero points other than {middle} although the settings say "
                f"sym = true; the checkpoint is asymmetric: set sym to false"
            )
        return None
    if actual is not None:
        return torch.zeros(out_features, qzeros.shape[0], dtype=torch.int16, device=qzeros.device)
    if version == "gptq":
        stored = _asymmetric_v1(qzeros, stored, bits, name)
    return (stored.T.to(torch.int16) - middle).contiguous()


def _asymmetric_v1(
    qzeros: torch.Tensor, stored: torch.Tensor, bits: int, name: str
) -> torch.Tensor:
    """Undo the `- 1` on the packed word, as GPTQModel does; it inverts even where a field was 0."""
    if bits == 3:
        raise CheckpointError(
            f"{name} is asymmetric with 3 bits in format gptq (v1), which AutoGPTQ and GPTQModel "
            "write differently; get the checkpoint in format gptq_v2"
        )
    ones = sum(1 << shift for shift in range(0, 32, bits))
    zeros = unpack(to_int32(qzeros.to(torch.int64) + ones), bits, 1, stored.shape[1])
    if (zeros == 0).any() or (stored == (1 << bits) - 1).any():
        _log.warning(
            "%s: zero points of 0 in format gptq (v1), which other programs read differently; "
            "read as GPTQModel writes them",
            name,
        )
    return zeros
