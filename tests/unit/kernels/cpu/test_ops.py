"""The small ops against torch, in every instruction set; their bits know only their own row."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the customary name

from qinfer.errors import ConfigError
from qinfer.formats.weight import QuantizedWeight
from qinfer.kernels import reference
from qinfer.kernels.cpu import native, tiled, tiling
from qinfer.kernels.cpu.program import ACTIVATION_GROUP, Int8Buffer, Norm, Program, Watch
from qinfer.schemes import WeightScheme

pytestmark = pytest.mark.skipif(
    native.load() is None, reason="the C++ library was not built (no compiler at installation)"
)

SIZES = [1, 31, 36, 40, 100, 576, 1536]
ROWS = [1, 2, 5, 8, 33, 257]
EPS = 1e-5


def int8_weight(outputs: int, inputs: int) -> QuantizedWeight:
    codes = torch.zeros(outputs, inputs, dtype=torch.int8)
    return QuantizedWeight(codes, torch.ones(outputs, 1).half(), WeightScheme(8, None))


def count(value: int) -> torch.Tensor:
    return torch.tensor([value])


def activations(rows: int, size: int, *, seed: int = 0) -> torch.Tensor:
    """Return rows whose magnitudes differ widely, one value in eight zero, row 1 all zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, size, generator=generator)
    x *= 10 ** (6 * torch.rand(rows, 1, generator=generator) - 3)
    x[torch.rand(x.shape, generator=generator) < 0.125] = 0.0
    x[1:2] = 0.0
    return x


def permutation_of(size: int) -> torch.Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(1), dtype=torch.int32)


def quantize_reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes, scales and sums by the formula of program.h."""
    rows, size = x.shape
    padded = F.pad(x, (0, -size % ACTIVATION_GROUP)).view(rows, -1, ACTIVATION_GROUP)
    amax = padded.abs().amax(-1)
    scales = torch.where(amax.isfinite(), amax / torch.full_like(amax, 127), torch.nan)
    divisor = scales.unsqueeze(-1)
    codes = torch.where(divisor > 0, padded / divisor, 0.0).round().clamp(-127, 127)
    return codes.to(torch.int8).view(rows, -1), scales, scales * codes.sum(-1)


def assert_quantized(actual: Int8Buffer, x: torch.Tensor) -> None:
    codes, scales, sums = quantize_reference(x)
    torch.testing.assert_close(actual.scales, scales, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(actual.codes, codes)
    torch.testing.assert_close(actual.sums, sums, rtol=0, atol=0, equal_nan=True)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def norm(x: torch.Tensor, weight: torch.Tensor, *, threads: int = 1) -> torch.Tensor:
    out, program = torch.empty_like(x), Program()
    program.norm(x, Norm(weight, EPS), count(x.shape[0]), out=out)
    program.run(threads)
    return out


def silu_mul(x: torch.Tensor, *, threads: int = 1) -> torch.Tensor:
    out, program = torch.empty(x.shape[0], x.shape[1] // 2), Program()
    program.silu_mul(x, count(x.shape[0]), out=out)
    program.run(threads)
    return out


def quantized(
    x: torch.Tensor, *, permutation: torch.Tensor | None = None, threads: int = 1
) -> Int8Buffer:
    int8, program = Int8Buffer(*x.shape), Program()
    program.quantize(x, count(x.shape[0]), int8, permutation=permutation)
    program.run(threads)
    return int8


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("size", SIZES)
def test_quantize_follows_the_formula_to_the_bit(isa: str, size: int, rows: int) -> None:
    x = activations(rows, size)
    assert_quantized(quantized(x), x)
    order = permutation_of(size)
    assert_quantized(quantized(x, permutation=order, threads=2), x[:, order.long()])


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("size", SIZES)
def test_norm(isa: str, size: int, rows: int) -> None:
    x, weight, order = activations(rows, size), torch.rand(size) + 0.5, permutation_of(size)
    plain = norm(x, weight)
    torch.testing.assert_close(plain, reference.rms_norm(x, weight, EPS))
    out, int8, program = torch.empty_like(x), Int8Buffer(rows, size), Program()
    program.norm(x, Norm(weight, EPS), count(rows), out=out, int8=int8, permutation=order)
    program.run(2)
    assert same_bits(out, plain)
    assert_quantized(int8, plain[:, order.long()])


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("size", SIZES)
def test_silu_mul(isa: str, size: int, rows: int) -> None:
    x, order = activations(rows, 2 * size), permutation_of(size)
    plain = silu_mul(x)
    expected = (F.silu(x[:, :size].double()) * x[:, size:].double()).float()
    torch.testing.assert_close(plain, expected, rtol=1e-6, atol=1e-30)
    out, int8, program = torch.empty_like(plain), Int8Buffer(rows, size), Program()
    program.silu_mul(x, count(rows), out=out, int8=int8, permutation=order)
    program.run(2)
    assert same_bits(out, plain)
    assert_quantized(int8, plain[:, order.long()])


def test_embeddings_are_read_from_dense_tiles_only() -> None:
    codes, ids = tiling.tile(int8_weight(16, 32)), torch.zeros(2, dtype=torch.long)
    with pytest.raises(ConfigError, match="not from W8"):
        tiled.add_embed(Program(), codes, ids, torch.empty(2, 32), count(2))
    table = tiling.tile(torch.zeros(16, 32))
    with pytest.raises(ConfigError, match="token_ids"):
        tiled.add_embed(Program(), table, ids[:1], torch.empty(2, 32), count(2))
    with pytest.raises(ConfigError, match="out"):
        tiled.add_embed(Program(), table, ids, torch.empty(2, 64)[:, :32], count(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_embed(isa: str, size: int, dtype: torch.dtype) -> None:
    table, ids = torch.randn(50, size).to(dtype), torch.randint(0, 50, (257,))
    rows, out, tiles = count(257), torch.empty(257, size), tiling.tile(table)
    plain, tiled_table = Program(), Program()
    plain.embed(table, ids, out, rows)
    tiled.add_embed(tiled_table, tiles, ids, out, rows)
    for program in (plain, tiled_table):
        for number in ROWS:
            rows.fill_(number)
            out.fill_(7.0)
            program.run(1 + number % 2)
            assert same_bits(out[:number], table[ids[:number]].float())
            assert (out[number:] == 7.0).all()


@pytest.mark.parametrize("rows", ROWS)
def test_gather(isa: str, rows: int) -> None:
    x, wanted, out = torch.randn(33, 100), torch.randint(0, 33, (rows,)), torch.empty(rows, 100)
    program = Program()
    program.gather(x, wanted, out, count(rows))
    program.run(2)
    assert same_bits(out, x[wanted])


def test_argmax_takes_the_lowest_of_equals_and_tells_what_is_not_finite(isa: str) -> None:
    x = torch.randn(8, 1300)
    x[1] = -1.0
    x[2, [700, 90, 1299]] = 9.0
    x[3, 1299] = -torch.inf
    x[4, 5], x[4, 1200] = torch.nan, 50.0
    x[5, 1290] = -torch.nan  # its sign bit puts it below all numbers
    x[6] = -0.0
    x[6, 77] = 0.0  # equal to what stands before
    x[7, 3] = torch.inf
    out, program = torch.empty(8, dtype=torch.long), Program()
    program.argmax(x, out, count(8))
    program.run(2)
    assert out.tolist() == [int(x[0].argmax()), 0, 90, -1, -1, -1, 0, -1]
    one = torch.tensor([[3.0]])
    out, program = torch.empty(1, dtype=torch.long), Program()
    program.argmax(one, out, count(1))
    program.run(1)
    assert out.tolist() == [0]


OPS: dict[str, Callable[[torch.Tensor, int], list[torch.Tensor]]] = {
    "norm": lambda x, threads: [norm(x, torch.linspace(0.5, 2, x.shape[1]), threads=threads)],
    "silu_mul": lambda x, threads: [silu_mul(x, threads=threads)],
    "quantize": lambda x, threads: [
        (int8 := quantized(x, threads=threads)).codes.int(),
        int8.scales,
        int8.sums,
    ],
}


@pytest.mark.parametrize("size", [36, 100, 576, 1536])
@pytest.mark.parametrize("op", sorted(OPS))
def test_a_rows_bits_depend_on_nothing_else(isa: str, op: str, size: int) -> None:
    """Neither on the other rows, nor on its place, nor on the number of threads."""
    x = activations(49, size)
    whole = OPS[op](x, 1)
    for num_rows, threads in ((49, 2), (49, 3), (32, 2), (33, 2), (48, 3)):
        some = OPS[op](x[:num_rows].clone(), threads)
        assert all(same_bits(a, b[:num_rows]) for a, b in zip(some, whole, strict=True))
    for row in (0, 1, 17, 32):
        for threads in (1, 2, 3):
            alone = OPS[op](x[row : row + 1].clone(), threads)
            assert all(same_bits(a, b[row : row + 1]) for a, b in zip(alone, whole, strict=True))


@pytest.mark.parametrize("op", sorted(OPS))
def test_instruction_sets_agree_to_the_bit(isas: Iterator[str], op: str) -> None:
    x = activations(5, 1000)
    results = [OPS[op](x, 1) for _ in isas]
    for result in results[1:]:
        assert all(map(same_bits, result, results[0]))


def test_only_the_rows_of_this_step_are_written(isa: str) -> None:
    x, num_tokens = torch.randn(6, 40), count(0)
    int8, out, program = Int8Buffer(6, 40), torch.full((6, 40), 7.0), Program()
    program.norm(x, Norm(torch.ones(40), EPS), num_tokens, out=out, int8=int8)
    for tokens in (0, 2, 5):  # the same program, another size
        num_tokens.fill_(tokens)
        program.run(2)
        assert (out[tokens:] == 7.0).all()
        assert not int8.scales[tokens:].any()
        assert (out[:tokens] != 7.0).all()
        assert int8.scales[:tokens].all()


def test_half_codes_round_to_even(isa: str) -> None:
    x = torch.zeros(1, 32)
    x[0, :9] = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -127.0, 126.5])
    assert quantized(x).codes[0, :9].tolist() == [127, 0, 2, 2, 0, -2, -2, -127, 126]


def test_extreme_values_quantize_by_the_formula(isa: str) -> None:
    largest, smallest = torch.finfo(torch.float32).max, 2.0**-149
    x = torch.zeros(7, 32)
    x[0, :3] = torch.tensor([largest, -largest, largest / 4])
    x[1, :3] = torch.tensor([smallest, -smallest, 0.0])  # amax / 127 is 0
    x[2, :3] = smallest * torch.tensor([100.0, -189.0, 1.0])  # the scale has lost its digits
    x[3, :2] = torch.tensor([2.0**-126, -(2.0**-130)])
    x[4] = -0.0
    x[5] = 1e-30
    x[6, 31] = -1e30
    int8 = quantized(x)
    assert_quantized(int8, x)
    assert int8.codes[0, :3].tolist() == [127, -127, 32]
    assert int8.codes.abs().max() <= 127
    assert int8.scales[[1, 4]].tolist() == [[0.0], [0.0]]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_poisons_its_own_row_only(isa: str, bad: float) -> None:
    x = torch.randn(3, 100)
    clean = quantized(x)
    x[1, 70] = bad
    int8 = quantized(x)
    assert int8.scales[1].isnan().tolist() == [False, False, True, False]
    assert not int8.codes[1, 64:96].any()
    assert int8.sums[1].isnan().tolist() == [False, False, True, False]
    for row in (0, 2):
        assert same_bits(int8.scales[row], clean.scales[row])
        assert torch.equal(int8.codes[row], clean.codes[row])
    for broken in (norm(x, torch.ones(100)), silu_mul(x)):
        assert not broken[1].isfinite().all()
        assert broken[[0, 2]].isfinite().all()


def test_silu_of_extreme_values(isa: str) -> None:
    gate = torch.tensor(
        [0.0, -0.0, 1e-30, 20.0, 87.5, 89.0, 1e30, -20.0, -86.0, -88.5, -1e4, -1e30]
    )
    actual = silu_mul(torch.cat([gate, torch.ones_like(gate)]).view(1, -1))[0]
    torch.testing.assert_close(actual, F.silu(gate.double()).float(), rtol=1e-6, atol=1e-35)


def test_exponential_is_close_over_its_whole_range(isa: str) -> None:
    gate = torch.linspace(-87, 87, 200_000)
    actual = silu_mul(torch.cat([gate, torch.ones_like(gate)]).view(1, -1))[0]
    expected = F.silu(gate.double())
    assert ((actual - expected) / expected).abs().nan_to_num().max() < 4e-7


def test_norm_of_extreme_rows(isa: str) -> None:
    x = torch.stack([torch.full((64,), 1e18), torch.full((64,), 1e-20), torch.zeros(64)])
    torch.testing.assert_close(
        norm(x, torch.ones(64)), reference.rms_norm(x, torch.ones(64), EPS), rtol=1e-6, atol=0
    )


def test_a_caller_that_flushes_denormals_changes_no_bit(isa: str) -> None:
    x = torch.full((2, 128), 2.0**-127)
    expected = quantized(x, threads=2)
    if not torch.set_flush_denormal(True):
        pytest.skip("this machine cannot flush denormals")
    try:
        actual = quantized(x, threads=2)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(actual.codes, expected.codes)
    assert expected.codes.all()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_norms_note_the_first_layer_that_was_not_finite(isa: str, threads: int) -> None:
    x, noted, program = torch.randn(5, 32), torch.full((5,), -1), Program()
    x[1, 3], x[3, 30], x[4, 0] = torch.nan, torch.inf, -torch.inf
    noted[4] = 2  # an earlier layer was
    program.norm(x, Norm(torch.ones(32), EPS, Watch(noted, 7)), count(5), out=torch.empty_like(x))
    program.run(threads)
    assert noted.tolist() == [-1, 7, -1, 7, 2]
