"""Which kernel a linear gets and why, and that both give the same bits."""

import pytest
import torch

from qinfer.errors import ConfigError
from qinfer.formats.weight import QuantizedWeight
from qinfer.kernels import linear
from qinfer.kernels.cpu import native
from qinfer.kernels.linear import DenseLinear, PackedLinear, choose_linear
from qinfer.kernels.spec import LinearSpec
from qinfer.schemes import WeightScheme


def random_weight(
    out_features: int,
    in_features: int,
    scheme: WeightScheme,
    *,
    scattered: bool = False,
    offsets: bool = False,
) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(0)
    half = 2 ** (scheme.bits - 1)
    groups = scheme.num_groups(in_features)
    size = (out_features, groups)
    index = torch.arange(in_features) // (scheme.group_size or in_features)
    shuffled = index[torch.randperm(in_features, generator=generator)].int()
    return QuantizedWeight(
        codes=torch.randint(
            -half, half, (out_features, in_features), generator=generator, dtype=torch.int8
        ),
        scales=torch.rand(size, generator=generator).half(),
        scheme=scheme,
        zeros=None
        if scheme.symmetric
        else torch.randint(-half, half, size, generator=generator, dtype=torch.int16),
        group_index=shuffled if scattered else None,
        offsets=torch.randn(size, generator=generator) if offsets else None,
    )


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group_size", [32, None])
@pytest.mark.parametrize("beside", ["nothing", "zeros", "offsets"])
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_and_dense_give_the_same_bits(
    bits: int, group_size: int | None, beside: str, scattered: bool, dtype: torch.dtype
) -> None:
    if native.load() is None:
        pytest.skip("the C++ library is not installed")
    scheme = WeightScheme(bits, group_size, symmetric=beside != "zeros")
    scattered = scattered and group_size is not None
    weight = random_weight(48, 80, scheme, scattered=scattered, offsets=beside == "offsets")
    spec = LinearSpec(80, 48, dtype, "cpu", scheme)
    x = torch.randn(5, 80, generator=torch.Generator().manual_seed(1)).to(dtype)
    packed, dense = PackedLinear(weight, spec), DenseLinear(weight, spec)
    assert torch.equal(packed(x), dense(x))
    assert packed.resident_bytes < dense.resident_bytes


def test_a_weight_of_several_parts_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    if native.load() is None:
        pytest.skip("the C++ library is not installed")
    monkeypatch.setattr(linear, "_PART_WEIGHTS", 64 * 80)
    scheme = WeightScheme(4, 16)
    weight, spec = random_weight(150, 80, scheme), LinearSpec(80, 150, torch.float32, "cpu", scheme)
    x = torch.randn(5, 80, generator=torch.Generator().manual_seed(1))
    packed = PackedLinear(weight, spec)
    assert packed.rows_per_part == 64
    assert torch.equal(packed(x), DenseLinear(weight, spec)(x))


def test_the_first_candidate_that_can_is_taken_and_the_others_say_why() -> None:
    choice = choose_linear(LinearSpec(64, 64, torch.float32, "cpu"))
    assert choice.implementation.name == "reference.dense"
    assert choice.refusals == (("cpu.packed", "the weight is dense"),)
    choice = choose_linear(LinearSpec(64, 64, torch.float16, "cpu", WeightScheme(3, 32)))
    reason = "dequantizes to float32 and bfloat16, not torch.float16"
    assert choice.refusals == (("cpu.packed", reason),)


def test_without_the_library_quantized_weights_run_dense(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native, "find", lambda: "there is no library")
    choice = choose_linear(LinearSpec(64, 64, torch.float32, "cpu", WeightScheme(4, 32)))
    assert choice.implementation.name == "reference.dense"
    assert choice.refusals == (("cpu.packed", "there is no library"),)


def test_no_kernel_for_a_device_is_an_error_with_every_reason() -> None:
    with pytest.raises(ConfigError, match="runs on the CPU, not on cuda"):
        choose_linear(LinearSpec(64, 64, torch.float32, "cuda"))


def test_a_view_does_not_keep_its_source_alive() -> None:
    source = torch.randn(100, 64)
    layer = DenseLinear(source[10:20], LinearSpec(64, 10, torch.float32, "cpu"))
    assert layer.weight.untyped_storage().nbytes() == 10 * 64 * 4
    assert torch.equal(layer.weight, source[10:20])
