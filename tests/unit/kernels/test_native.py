"""The C++ library against QuantizedWeight.dequantize, to the bit, in every instruction set."""

import ctypes
import logging
from collections.abc import Iterator
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qinfer.errors import ConfigError
from qinfer.formats.weight import QuantizedWeight
from qinfer.kernels.cpu import native
from qinfer.schemes import WeightScheme

needs_library = pytest.mark.skipif(
    native.load() is None, reason="the C++ library was not built (no compiler at installation)"
)


@pytest.fixture
def fresh_load(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let a test call `load` as if for the first time, and leave no trace of it."""
    monkeypatch.delenv("QINFER_NATIVE", raising=False)
    native.find.cache_clear()
    yield
    native.find.cache_clear()


def make_weight(
    out_features: int,
    in_features: int,
    *,
    bits: int = 4,
    group_size: int | None = 64,
    asymmetric: bool = False,
    scattered: bool = False,
    offsets: bool = False,
    seed: int = 0,
) -> QuantizedWeight:
    """Return a random weight; about one scale in eight is zero, as for a dead group."""
    generator = torch.Generator().manual_seed(seed)
    scheme = WeightScheme(bits, group_size, symmetric=not asymmetric)
    groups = scheme.num_groups(in_features)
    half = 2 ** (bits - 1)
    scales = torch.rand(out_features, groups, generator=generator) * 0.1
    scales[torch.rand(scales.shape, generator=generator) < 0.125] = 0.0
    return QuantizedWeight(
        codes=torch.randint(
            -half, half, (out_features, in_features), generator=generator, dtype=torch.int8
        ),
        scales=scales.half(),
        scheme=scheme,
        zeros=torch.randint(
            -half, half, (out_features, groups), generator=generator, dtype=torch.int16
        )
        if asymmetric
        else None,
        group_index=torch.randint(0, groups, (in_features,), generator=generator, dtype=torch.int32)
        if scattered
        else None,
        offsets=torch.randn(out_features, groups, generator=generator) if offsets else None,
    )


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    integers = torch.int16 if expected.dtype == torch.bfloat16 else torch.int32
    assert actual.dtype == expected.dtype
    assert torch.equal(actual.view(integers), expected.view(integers))


@needs_library
@settings(max_examples=60, deadline=None)
@given(
    out_features=st.sampled_from([1, 3, 48]),
    in_features=st.sampled_from([1, 2, 7, 40, 64, 127, 576, 1031]),
    bits=st.sampled_from([2, 3, 4, 8]),
    group_size=st.sampled_from([None, 1, 5, 32, 64]),
    beside=st.sampled_from(["nothing", "zeros", "offsets"]),
    scattered=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**16),
)
def test_dequantize_equals_the_canonical_form(
    out_features: int,
    in_features: int,
    bits: int,
    group_size: int | None,
    beside: str,
    scattered: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    weight = make_weight(
        out_features,
        in_features,
        bits=bits,
        group_size=group_size,
        asymmetric=beside == "zeros",
        scattered=scattered,
        offsets=beside == "offsets",
        seed=seed,
    )
    actual = native.dequantize(native.pack(weight), dtype)
    assert_same_bits(actual, weight.dequantize(dtype))


@needs_library
@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_instruction_set_gives_the_same_bits(dtype: torch.dtype) -> None:
    for bits in native.HELD_BITS:
        for scattered, offsets in product((False, True), repeat=2):
            beside = {"offsets": offsets, "asymmetric": not offsets}
            weight = make_weight(17, 1000, bits=bits, scattered=scattered, **beside)
            actual = native.dequantize(native.pack(weight), dtype)
            assert_same_bits(actual, weight.dequantize(dtype))


@needs_library
def test_bfloat16_rounds_to_nearest_even_and_keeps_nan_and_infinity() -> None:
    # 1 + k / 512 lies on or halfway between bfloat16 neighbours; signs and extremes beside it.
    steps = 1 + torch.arange(-8, 24) / 512
    odd = torch.tensor([torch.inf, torch.nan, 3.0e38, 3.4028235e38, 1e-40, 0.0])
    scales = torch.cat([steps, -steps, odd])
    weight = QuantizedWeight(
        codes=torch.ones(1, scales.numel(), dtype=torch.int8),
        scales=scales[None],
        scheme=WeightScheme(8, 1),
    )
    actual = native.dequantize(native.pack(weight), torch.bfloat16)[0]
    expected = scales.to(torch.bfloat16)
    assert torch.equal(actual.isnan(), expected.isnan())
    assert_same_bits(actual[~expected.isnan()], expected[~expected.isnan()])


@needs_library
def test_rows_and_threads_change_nothing() -> None:
    weight = make_weight(2100, 1024, asymmetric=True)  # large enough for two threads
    packed = native.pack(weight)
    whole = native.dequantize(packed, threads=1)
    assert_same_bits(native.dequantize(packed, threads=3), whole)
    part = torch.full((5, 1024), torch.nan)
    assert native.dequantize(packed, rows=(7, 12), out=part) is part
    assert_same_bits(part, whole[7:12])
    assert native.dequantize(packed, rows=(3, 3)).shape == (0, 1024)


@needs_library
def test_dequantize_refuses_what_does_not_fit() -> None:
    packed = native.pack(make_weight(4, 64))
    with pytest.raises(ConfigError, match=r"rows 0:5 are outside 0:4"):
        native.dequantize(packed, rows=(0, 5))
    with pytest.raises(ConfigError, match="float16"):
        native.dequantize(packed, torch.float16)
    with pytest.raises(ConfigError, match="contiguous"):
        native.dequantize(packed, out=torch.empty(64, 4).T)


@needs_library
def test_the_library_checks_its_arguments() -> None:
    library = native.load()
    assert library is not None
    assert library.handle.qinfer_dequantize(None, 0, 1, 0, None, 1) == 1
    assert not library.use_isa("no such set")


def test_packing_is_two_codes_per_byte_low_nibble_first() -> None:
    weight = QuantizedWeight(
        codes=torch.tensor([[-8, 7, 0]], dtype=torch.int8),
        scales=torch.ones(1, 1),
        scheme=WeightScheme(4, None),
    )
    packed = native.pack(weight)
    assert packed.codes.tolist() == [[0xF0, 0x88]]
    assert (packed.in_features, packed.out_features) == (3, 1)
    assert packed.nbytes == 2 + 4


def test_narrow_codes_are_held_in_four_bits() -> None:
    """Zero points count from the middle of the range, offsets from the smallest code."""
    codes, scales = torch.tensor([[-2, 1, 0]], dtype=torch.int8), torch.ones(1, 1)
    scheme = WeightScheme(2, None)
    middle = native.pack(QuantizedWeight(codes, scales, scheme))
    assert middle.codes.tolist() == [[0x96, 0x88]]
    lowest = native.pack(QuantizedWeight(codes, scales, scheme, offsets=torch.zeros(1, 1)))
    assert lowest.codes.tolist() == [[0x30, 0x82]]
    assert lowest.nbytes == 2 + 4 + 4
    assert native.held_note(2) == native.held_note(3) == ", held in 4 bits"
    assert native.held_note(4) == native.held_note(8) == ""


def test_widths_without_a_kernel_are_refused_with_the_reason() -> None:
    assert native.unsupported_reason(5) == (
        "5-bit codes have no C++ kernel (there are 2, 3, 4 and 8 bits)"
    )
    assert all(native.unsupported_reason(bits) is None for bits in native.HELD_BITS)


def test_pack_refuses_tensors_that_would_be_read_out_of_bounds() -> None:
    weight = make_weight(4, 128, scattered=True)
    assert weight.group_index is not None
    index = weight.group_index
    for broken, message in (
        (QuantizedWeight(weight.codes, weight.scales, weight.scheme, None, index + 9), "outside"),
        (QuantizedWeight(weight.codes, weight.scales, weight.scheme, None, index[1:]), "shape"),
        (QuantizedWeight(weight.codes, weight.scales[:, :1], weight.scheme), "needs 2"),
        (QuantizedWeight(weight.codes, weight.scales[:3], weight.scheme), "scales has shape"),
    ):
        with pytest.raises(ConfigError, match=message):
            native.pack(broken)


@pytest.mark.usefixtures("fresh_load")
def test_switched_off_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QINFER_NATIVE", "0")
    assert native.load() is None
    with pytest.raises(ConfigError, match="switched off"):
        native.dequantize(native.pack(make_weight(4, 64)))


@pytest.mark.usefixtures("fresh_load")
def test_an_absent_library_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "LIBRARY_NAME", "libabsent.so")
    with caplog.at_level(logging.WARNING):
        assert native.load() is None
        assert native.load() is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "not built" in caplog.text


@needs_library
@pytest.mark.usefixtures("fresh_load")
def test_a_library_of_another_version_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "ABI_VERSION", 99)
    with caplog.at_level(logging.WARNING):
        assert native.load() is None
    assert "interface version" in caplog.text


@needs_library
@pytest.mark.usefixtures("fresh_load")
def test_a_library_that_does_not_load_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: str) -> ctypes.CDLL:
        raise OSError("wrong ELF class")

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    with caplog.at_level(logging.WARNING):
        assert native.load() is None
    assert "wrong ELF class" in caplog.text
