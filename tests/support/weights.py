"""Random quantized weights, and packing done one bit at a time as a check of the product's."""

import numpy as np
import torch

from qinfer.formats.weight import QuantizedWeight
from qinfer.schemes import WeightScheme


def random_weight(
    scheme: WeightScheme,
    out: int = 64,
    in_: int = 96,
    *,
    seed: int = 0,
    min_zero: int = 0,
    dtype: torch.dtype = torch.float16,
) -> QuantizedWeight:
    """Return codes over their whole range, scales in `dtype`, unsigned zeros from `min_zero` on."""
    generator = torch.Generator().manual_seed(seed)
    low, high = -(1 << (scheme.bits - 1)), 1 << (scheme.bits - 1)
    groups = scheme.num_groups(in_)
    zeros = None
    if not scheme.symmetric:
        shape = (out, groups)
        zeros = torch.randint(low + min_zero, high, shape, generator=generator).to(torch.int16)
    return QuantizedWeight(
        codes=torch.randint(low, high, (out, in_), generator=generator).to(torch.int8),
        scales=(torch.rand(out, groups, generator=generator) + 0.01).to(dtype),
        scheme=scheme,
        zeros=zeros,
    )


def bit_stream(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack unsigned codes `[rows, n]` along their rows, low bits first, bit after bit."""
    packed = []
    for row in rows.tolist():
        stream = [(code >> position) & 1 for code in row for position in range(bits)]
        stream += [0] * (-len(stream) % 32)
        words = [
            sum(bit << place for place, bit in enumerate(stream[start : start + 32]))
            for start in range(0, len(stream), 32)
        ]
        packed.append(words)
    return torch.from_numpy(np.array(packed, dtype=np.uint32).view(np.int32))


def textbook(weight: QuantizedWeight) -> torch.Tensor:
    """Dequantize element by element: `scale * (code - zero)` in float32."""
    dense = torch.empty(weight.codes.shape)
    size = weight.scheme.group_size or weight.in_features
    for n in range(weight.out_features):
        for k in range(weight.in_features):
            zero = 0 if weight.zeros is None else int(weight.zeros[n, k // size])
            code = torch.tensor(float(int(weight.codes[n, k]) - zero))
            dense[n, k] = weight.scales[n, k // size].float() * code
    return dense


ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # AutoAWQ, WQLinear_GEMM: the output in each lane of a word


def gemm_words(codes: torch.Tensor) -> torch.Tensor:
    """Pack unsigned codes `[rows, out]` lane by lane, as AutoAWQ does."""
    rows = []
    for row in codes.tolist():
        words = []
        for at in range(0, len(row), 8):
            word = 0
            for lane, output in enumerate(ORDER):
                word |= row[at + output] << (4 * lane)
            words.append(word - (1 << 32) if word >= 1 << 31 else word)
        rows.append(words)
    return torch.tensor(rows, dtype=torch.int32)


def gemm_tensors(weight: QuantizedWeight) -> dict[str, torch.Tensor]:
    """Return AutoAWQ's tensors of an asymmetric 4-bit weight."""
    assert weight.zeros is not None
    return {
        "qweight": gemm_words(weight.codes.T.int() + 8),
        "qzeros": gemm_words(weight.zeros.T.int() + 8),
        "scales": weight.scales.T.contiguous(),
    }
