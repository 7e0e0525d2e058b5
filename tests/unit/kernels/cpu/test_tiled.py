"""The C++ linear op on tiled weights: every instruction set, kind of weight and mode."""

import ctypes
from dataclasses import replace

import pytest
import torch

from qinfer.errors import ConfigError, QinferError
from qinfer.formats.weight import QuantizedWeight
from qinfer.kernels.cpu import native, tiled, tiling
from qinfer.kernels.cpu.program import Int8Buffer, OpKind, Program
from qinfer.kernels.spec import LinearSpec
from qinfer.schemes import WeightScheme

ROWS = (1, 2, 5, 8, 32, 33, 48, 257)
THREADS = (1, 2, 3, 1, 2, 2, 3, 3)  # of 32 and of 48 rows each thread takes an equal part

needs_library = pytest.mark.skipif(
    native.load() is None, reason="the C++ kernels are not built or are switched off"
)


def quantized(
    out_features, in_features, scheme, seed=0, *, scattered=False, offsets=False, wide=False
):
    """Return a random weight; `wide` gives it scales and offsets that are no float16."""
    generator = torch.Generator().manual_seed(seed)
    half, groups = 1 << (scheme.bits - 1), scheme.num_groups(in_features)
    codes = torch.randint(
        -half, half, (out_features, in_features), dtype=torch.int8, generator=generator
    )
    scales = torch.rand(out_features, groups, generator=generator) * 0.02
    zeros = index = added = None
    if offsets:
        added = (
            (torch.randn(out_features, groups, generator=generator) * 0.02 * half).half().float()
        )
    if wide:
        scales *= 1e-7
        added = None if added is None else added * 1e-7
    else:
        scales = scales.half()
    if not scheme.symmetric:
        zeros = torch.randint(-half, half + 1, (out_features, groups), generator=generator).short()
    if scattered:
        order = torch.randperm(in_features, generator=generator)
        index = (order // (scheme.group_size or in_features)).int()
    return QuantizedWeight(codes, scales, scheme, zeros, index, added)


def activations(rows, columns, *, seed=1):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def quantize_rows(x):
    """Return codes and scales `[rows, groups, 32]`, `[rows, groups]` by program.h, in float32."""
    x = torch.nn.functional.pad(x, (0, -x.shape[1] % 32)).unflatten(1, (-1, 32))
    scales = x.abs().amax(-1) / torch.tensor(127.0)
    codes = (x / scales.unsqueeze(-1)).round().clamp(-127, 127)
    return torch.where(scales.unsqueeze(-1) > 0, codes, 0.0), scales


def int8_reference(x, weight):
    """Integer sums over 32 columns, scaled by the activations' scale, then by the weight's."""
    order = torch.arange(weight.in_features)
    if weight.group_index is not None:
        order = weight.group_index.argsort(stable=True)
    codes, x_scales = quantize_rows(x[:, order])
    groups = weight.column_groups()[order]
    integers = weight.codes[:, order].double()
    if weight.zeros is not None:
        integers -= weight.zeros.double()[:, groups]
    if weight.offsets is not None:
        integers += 1 << (weight.scheme.bits - 1)
    padding = -weight.in_features % 32
    integers = torch.nn.functional.pad(integers, (0, padding)).unflatten(1, (-1, 32))
    step_groups = groups[::32]  # the group of each 32 columns
    sums = torch.einsum("tgk,ngk->tng", codes.double(), integers)  # exact
    scales = weight.scales.double()[:, step_groups]
    terms = sums * x_scales.double().unsqueeze(1) * scales
    if weight.offsets is not None:
        rows = codes.double().sum(-1) * x_scales.double()  # [tokens, steps of 32]
        terms += rows.unsqueeze(1) * weight.offsets.double()[:, step_groups]
    return terms.sum(-1).float()


def magnitudes(weight):
    """Return a weight whose values are the sums of what each value consists of, all positive."""
    half = 1 << (weight.scheme.bits - 1)
    codes = weight.codes.int()
    if weight.zeros is not None:
        codes = codes + half + (weight.zeros[:, weight.column_groups()].int() + half)
    offsets = None if weight.offsets is None else weight.offsets.abs()
    return replace(weight, codes=codes, zeros=None, offsets=offsets)


def assert_near(actual, expected, tolerance=1e-5):
    """Compare to the scale of each row, as sums of many terms may cancel."""
    size = expected.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    assert ((actual - expected).abs() / size).max() <= tolerance


SCHEMES = [
    WeightScheme(bits, group, symmetric)
    for bits in (4, 8)
    for group in (32, 64, 128, None)
    for symmetric in (True, False)
] + [WeightScheme(bits, 64, symmetric) for bits in (2, 3) for symmetric in (True, False)]
# How the scales come: exact as float16 or not, and beside them offsets or not.
STORES = {
    "narrow": {},
    "wide": {"wide": True},
    "offsets": {"offsets": True},
    "wide offsets": {"offsets": True, "wide": True},
}


def stored(schemes):
    """Return each scheme with each store that it can have: zero points exclude offsets."""
    return [
        (s, store) for s in schemes for store in STORES if s.symmetric or "offsets" not in store
    ]


SHAPES = ((48, 128), (50, 40), (7, 36), (16, 352))


@pytest.mark.parametrize(("scheme", "store"), stored(SCHEMES), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_codes_match_the_reference_for_any_number_of_rows(isa, scheme, store, shape):
    weight = quantized(shape[0], shape[1], scheme, **STORES[store])
    tiles = tiling.tile(weight)
    assert tiles.scales is not None
    assert tiles.scales.dtype == (torch.float32 if "wide" in store else torch.float16)
    x, bias = activations(max(ROWS), shape[1]), torch.linspace(-1, 1, shape[0])
    references: dict[tiled.Activations, torch.Tensor] = {
        "int8": int8_reference(x, weight),
        "exact": x @ weight.dequantize().T,
    }
    for mode, reference in references.items():
        whole = tiled.run_linear(tiles, x, activations=mode, bias=bias)
        assert_near(whole, reference + bias)
        for rows, threads in zip(ROWS, THREADS, strict=True):
            part = tiled.run_linear(tiles, x[:rows], activations=mode, bias=bias, threads=threads)
            assert torch.equal(part, whole[:rows]), (mode, rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dense_weights_match_the_reference_for_any_number_of_rows(isa, dtype, shape):
    weight = (activations(shape[0], shape[1], seed=2) * 0.1).to(dtype)
    tiles, x = tiling.tile(weight), activations(max(ROWS), shape[1])
    whole = tiled.run_linear(tiles, x, activations="exact")
    assert_near(whole, x @ weight.float().T)
    for rows, threads in zip(ROWS, THREADS, strict=True):
        part = tiled.run_linear(tiles, x[:rows], activations="exact", threads=threads)
        assert torch.equal(part, whole[:rows])


@pytest.mark.parametrize("mode", ["int8", "exact"])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("offsets", [False, True])
def test_rows_computed_from_the_middle_of_a_batch_keep_their_bits(isa, mode, bits, offsets):
    weight = quantized(80, 96, WeightScheme(bits, 32), offsets=offsets)
    x = activations(40, 96)
    tiles = tiling.tile(weight)
    whole = tiled.run_linear(tiles, x, activations=mode)
    for start, stop in ((3, 4), (5, 12), (9, 26), (31, 40)):
        assert torch.equal(
            tiled.run_linear(tiles, x[start:stop], activations=mode), whole[start:stop]
        )


@pytest.mark.parametrize("mode", ["int8", "exact"])
@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("offsets", [False, True])
def test_scattered_groups_are_put_in_order(isa, mode, bits, group, offsets):
    scheme = WeightScheme(bits, group, symmetric=offsets)
    weight = quantized(24, 192, scheme, scattered=True, offsets=offsets)
    tiles, x = tiling.tile(weight), activations(9, 192)
    assert tiles.permutation is not None
    out = tiled.run_linear(tiles, x, activations=mode)
    assert_near(out, int8_reference(x, weight) if mode == "int8" else x @ weight.dequantize().T)


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_extreme_codes_do_not_saturate(isa, bits, symmetric):
    """Also on AVX2, whose 8-bit products saturate in 16 bits when added in pairs."""
    half = 1 << (bits - 1)
    codes = torch.tensor([half - 1, -half], dtype=torch.int8).repeat_interleave(16)
    zeros = None if symmetric else torch.tensor([[-half], [half]]).short().repeat(16, 1)
    weight = QuantizedWeight(
        codes.unsqueeze(1).expand(-1, 64).contiguous(),
        torch.ones(32, 1).half(),
        WeightScheme(bits, None, symmetric),
        zeros,
    )
    x = torch.tensor([[127.0], [-127.0]]).expand(-1, 64).contiguous()
    out = tiled.run_linear(tiling.tile(weight), x, activations="int8")
    assert torch.equal(out, x @ weight.dequantize().T)


@pytest.mark.parametrize("mode", ["int8", "exact"])
@pytest.mark.parametrize(
    ("scheme", "store"),
    stored([WeightScheme(4, 32), WeightScheme(8, 32, symmetric=False)]),
    ids=str,
)
def test_zero_scales_and_dead_rows_give_zeros(isa, mode, scheme, store):
    weight = quantized(20, 64, scheme, **STORES[store])
    weight.scales[3] = 0
    weight.scales[5, 1] = 0
    if weight.offsets is not None:
        weight.offsets[3] = 0
    x = activations(6, 64)
    x[2] = 0
    x[4, 32:] = 0
    out = tiled.run_linear(tiling.tile(weight), x, activations=mode)
    assert_near(out, x @ weight.dequantize().T, 0.02 if mode == "int8" else 1e-5)
    assert not out[:, 3].any()
    assert not out[2].any()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind", ["symmetric", "zeros", "offsets"])
def test_extreme_scales_and_activations_stay_numbers(isa, bits, kind):
    """From the smallest to the largest float16 scale, and rows from 1e-30 to 1e30."""
    scheme = WeightScheme(bits, 32, symmetric=kind != "zeros")
    weight = quantized(48, 40, scheme, offsets=kind == "offsets")
    weight.scales[0], weight.scales[1], weight.scales[2, 0] = 2.0**-24, 65504.0, 2.0**-24
    x = activations(9, 40) * torch.logspace(-30, 30, 9)[:, None]
    x[3, 7] = 1e30  # one that leaves nothing of its mates
    out = tiled.run_linear(tiling.tile(weight), x, activations="int8")
    assert out.isfinite().all()
    expected = int8_reference(x, weight)
    # What zero points and offsets add may cancel most of a sum.
    size = expected.abs() if kind == "symmetric" else int8_reference(x.abs(), magnitudes(weight))
    assert ((out - expected).abs() / size.clamp(min=1e-37)).max() < 1e-3
    exact = tiled.run_linear(tiling.tile(weight), x, activations="exact")
    assert_near(exact, x @ weight.dequantize().T)


@pytest.mark.parametrize("mode", ["int8", "exact"])
@pytest.mark.parametrize("out_features", [48, 50])
def test_the_residual_may_be_the_output(isa, mode, out_features):
    weight, x = quantized(out_features, 96, WeightScheme(8, 32)), activations(11, 96)
    tiles, hidden = tiling.tile(weight), activations(11, out_features, seed=3)
    bias = activations(1, out_features, seed=4)[0]
    plain = tiled.run_linear(tiles, x, activations=mode)
    apart = tiled.run_linear(tiles, x, activations=mode, bias=bias, residual=hidden)
    assert torch.equal(apart, plain + bias + hidden)
    program, num_tokens, rows = Program(), torch.tensor([11]), x
    if mode == "int8":
        rows = Int8Buffer(11, 96)
        program.quantize(x, num_tokens, rows)
    tiled.add_linear(program, tiles, rows, hidden, num_tokens, bias=bias, residual=hidden)
    program.run(2)
    assert torch.equal(hidden, apart)


def test_only_the_rows_and_columns_of_the_output_are_written(isa):
    weight, x = quantized(50, 40, WeightScheme(4, 32)), activations(12, 40)
    wide = torch.full((12, 64), 7.0)
    program, num_tokens = Program(), torch.tensor([9])
    tiled.add_linear(program, tiling.tile(weight), x, wide[:, :50], num_tokens)
    program.run(2)
    assert (wide[:, 50:] == 7).all()
    assert (wide[9:] == 7).all()
    assert_near(wide[:9, :50], x[:9] @ weight.dequantize().T)
    num_tokens.zero_()
    wide.fill_(7)
    program.run(2)
    assert (wide == 7).all()


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("store", STORES)
def test_the_exact_mode_multiplies_the_dequantized_weight(isa, bits, store):
    """The dequantized values are those of QuantizedWeight.dequantize, to the bit."""
    scheme = WeightScheme(bits, 32, symmetric="offsets" in store)
    weight = quantized(33, 64, scheme, **STORES[store])
    out = tiled.run_linear(tiling.tile(weight), torch.eye(64), activations="exact")
    assert torch.equal(out, weight.dequantize().T)


@pytest.mark.parametrize("value", [1e-40, 3e37])
def test_wide_scales_may_be_tiny_or_huge(isa, value):
    weight = quantized(20, 64, WeightScheme(4, 32), wide=True)
    weight.scales[3] = value
    tiles, expected = tiling.tile(weight), weight.dequantize().T
    assert torch.equal(tiled.run_linear(tiles, torch.eye(64), activations="exact"), expected)
    out = tiled.run_linear(tiles, torch.eye(64), activations="int8")
    assert ((out - expected).abs() <= expected.abs() * 1e-5).all()


@pytest.mark.parametrize("mode", ["int8", "exact"])
@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_broken_scale_breaks_its_own_row_only(isa, mode, offsets, value):
    weight = quantized(20, 64, WeightScheme(4, 32), wide=True, offsets=offsets)
    clean = tiled.run_linear(tiling.tile(weight), activations(3, 64), activations=mode)
    (weight.scales if weight.offsets is None else weight.offsets)[3, 1] = value
    out = tiled.run_linear(tiling.tile(weight), activations(3, 64), activations=mode)
    assert not out[:, 3].isfinite().any()
    clean[:, 3] = out[:, 3] = 0
    assert torch.equal(out, clean)


@needs_library
def test_tiles_occupy_what_they_say():
    weight = tiling.tile(quantized(48, 128, WeightScheme(4, 64, symmetric=False)))
    assert weight.nbytes == 48 * 128 // 2 + 48 * 2 * 4
    three = tiling.tile(quantized(48, 128, WeightScheme(3, 64), offsets=True, wide=True))
    assert three.nbytes == 48 * 128 // 2 + 48 * 2 * 8
    assert weight.data.data_ptr() % 64 == 0
    assert tiling.tile(torch.zeros(17, 33, dtype=torch.bfloat16)).nbytes == 32 * 64 * 2


@needs_library
def test_what_cannot_be_tiled_is_refused_with_a_reason():
    wide = quantized(4, 64, WeightScheme(4, 32), wide=True)
    with pytest.raises(ConfigError, match="float16"):
        tiling.tile_rows((4, 64), wide.rows)
    both = quantized(4, 64, WeightScheme(4, 32, symmetric=False), offsets=True)
    with pytest.raises(ConfigError, match="not both"):
        tiling.tile(both)
    scattered = quantized(4, 64, WeightScheme(4, 32), scattered=True)
    assert scattered.group_index is not None
    scattered.group_index[scattered.group_index == 1] = 0
    with pytest.raises(ConfigError, match="does not give every group"):
        tiling.tile(scattered)
    with pytest.raises(ConfigError, match="multiples of 32 columns, not 16"):
        tiling.tile(quantized(4, 64, WeightScheme(8, 16)))


@needs_library
@pytest.mark.parametrize(
    ("scheme", "device", "reason"),
    [
        (WeightScheme(4, 64), "cpu", None),
        (WeightScheme(8, None), "cpu", None),
        (None, "cpu", None),
        (WeightScheme(4, 48), "cpu", "multiples of 32"),
        (WeightScheme(4, 16), "cpu", "multiples of 32"),
        (WeightScheme(2, 64), "cpu", None),
        (WeightScheme(3, None), "cpu", None),
        (WeightScheme(4, 64), "cuda", "cuda"),
    ],
)
def test_the_reason_names_what_does_not_fit(scheme, device, reason):
    told = tiled.unsupported_reason(LinearSpec(96, 16, torch.float32, device, scheme))
    if reason is None:
        assert told is None
    else:
        assert told is not None
        assert reason in told


@needs_library
def test_arguments_that_do_not_fit_are_refused():
    weight, num_tokens = tiling.tile(quantized(16, 64, WeightScheme(4, 32))), torch.tensor([2])
    x, out = torch.zeros(2, 64), torch.zeros(2, 16)
    with pytest.raises(ConfigError, match="out is"):
        tiled.linear_args(weight, x, torch.zeros(2, 17), num_tokens)
    with pytest.raises(ConfigError, match="x has 1 rows"):
        tiled.linear_args(weight, x[:1], out, num_tokens)
    with pytest.raises(ConfigError, match="x is"):
        tiled.linear_args(weight, Int8Buffer(2, 32), out, num_tokens)
    with pytest.raises(ConfigError, match="dense"):
        tiled.linear_args(tiling.tile(torch.zeros(16, 64)), Int8Buffer(2, 64), out, num_tokens)
    with pytest.raises(ConfigError, match="residual"):
        tiled.linear_args(weight, x, out, num_tokens, residual=torch.zeros(3, 16))


@needs_library
def test_the_library_refuses_a_broken_op():
    weight, num_tokens = tiling.tile(quantized(16, 64, WeightScheme(4, 32))), torch.tensor([0])
    out, int8 = torch.zeros(2, 16), Int8Buffer(2, 64)
    assert ctypes.sizeof(tiled.TiledWeightArgs) == 64
    assert ctypes.sizeof(tiled.LinearArgs) == 144

    def run(**changes):
        args = tiled.linear_args(weight, int8, out, num_tokens)
        for name, value in changes.items():
            owner = args.weight if name in dict(args.weight._fields_) else args
            setattr(owner, name, value)
        program = Program()
        program.add(OpKind.LINEAR, args)
        program.run(1)

    run()
    floats = torch.zeros(2, 64)
    exact = {"int8_rows": None, "float_rows": floats.data_ptr(), "float_columns": 64}
    run(**exact, float_stride=64)
    for changes in (
        {"data": None},
        {"scales": None},
        {"scale_dtype": 1},
        {"scale_dtype": 0, "scales": torch.zeros(9).data_ptr() + 2},
        {"zeros": out.data_ptr(), "offsets": out.data_ptr()},
        {"offsets": out.data_ptr() + 1},
        {"out": None},
        {"num_tokens": None},
        {"int8_rows": None},
        {"float_rows": floats.data_ptr()},
        {"kind": 2},
        {"kind": 4},
        {"kind": -1},
        {"group_size": 0},
        {"group_size": 48},
        {"in_features": 96},
        {"in_features": 33},
        {"out_features": 0},
        {"out_features": 17},
        {**exact, "float_stride": 63},
        {**exact, "float_columns": 65, "float_stride": 65},
    ):
        with pytest.raises(QinferError):
            run(**changes)


@needs_library
def test_repacking_refuses_nonsense():
    library = native.load()
    assert library is not None
    null, two = ctypes.c_void_p(None), ctypes.c_int64(2)
    room = torch.zeros(4096, dtype=torch.uint8)
    data = ctypes.c_void_p(room.data_ptr())
    codes, dense = library.handle.qinfer_tile_codes, library.handle.qinfer_tile_dense
    assert codes(null, two, two, null, 4, data) != 0
    assert codes(data, two, two, null, 4, null) != 0
    assert codes(data, two, two, null, 5, data) != 0
    assert codes(data, ctypes.c_int64(-1), two, null, 4, data) != 0
    assert dense(data, two, two, 0, data) != 0
    assert dense(null, two, two, 3, data) != 0
    assert dense(data, two, ctypes.c_int64(-2), 3, data) != 0
