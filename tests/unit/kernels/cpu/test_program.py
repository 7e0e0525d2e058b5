"""Programs and the thread team: order, arguments, threads that come and go, callers, forks."""

import ctypes
import subprocess
import sys
import threading

import pytest
import torch

from qinfer.errors import ConfigError, QinferError
from qinfer.kernels.cpu import native
from qinfer.kernels.cpu.faults import FaultsArgs, Notes, add_faults
from qinfer.kernels.cpu.program import (
    MAX_THREADS,
    ArgmaxArgs,
    EmbedArgs,
    GatherArgs,
    Int8Buffer,
    Int8Rows,
    Norm,
    NormArgs,
    OpArgs,
    OpKind,
    Program,
    QuantizeArgs,
    SiluMulArgs,
)
from qinfer.kernels.cpu.sampling import DrawArgs, SampleArgs

needs_library = pytest.mark.skipif(
    native.load() is None, reason="the C++ library was not built (no compiler at installation)"
)

OK, BAD_ARGUMENT = 0, 1


def count(value: int) -> torch.Tensor:
    return torch.tensor([value])


class Walk:
    """A program that goes through a table of successors, one op per step.

    Op `i` reads what op `i - 1` wrote, row by row from other columns' threads: it ends at the
    right row only if each op has finished everywhere before the next begins.
    """

    def __init__(self, steps: int, *, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(64, generator=generator)
        self.start = torch.randn(64, 200, generator=generator)
        buffers = [self.start.clone(), torch.zeros(64, 200)]
        self.program = Program()
        self.expected = self.start
        for step in range(steps):
            source, target = buffers[step % 2], buffers[(step + 1) % 2]
            self.program.gather(source, order, target, count(64))
            self.expected = self.expected[order]
        self.first, self.last = buffers[0], buffers[steps % 2]

    def run(self, threads: int) -> bool:
        """Run it once; True if the rows are where they should be."""
        self.first.copy_(self.start)
        self.program.run(threads)
        return torch.equal(self.last, self.expected)


@needs_library
@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_ops_run_in_order_on_any_number_of_threads(threads: int) -> None:
    walk = Walk(31)
    assert all(walk.run(threads) for _ in range(5))


@needs_library
def test_the_team_changes_its_size_again_and_again() -> None:
    walk = Walk(5)
    assert all(walk.run(threads) for threads in [1, 2, 3, 2, 1, 4, 2] * 10)


@needs_library
def test_programs_of_other_lengths_follow_at_once() -> None:
    """A thread that is late at the end of a program must not take ops of the next one for it."""
    walks = [Walk(steps) for steps in (1, 8, 2, 5)]
    assert all(walk.run(2) for _ in range(100) for walk in walks)


@needs_library
def test_callers_at_the_same_time_do_not_mix_their_programs() -> None:
    walks = [Walk(9, seed=seed) for seed in range(4)]
    right: list[bool] = []

    def call(number: int) -> None:
        right.extend(walks[number].run(1 + (number + turn) % 3) for turn in range(25))

    callers = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert right == [True] * 100


FORKS = """
import os, sys, torch
from qinfer.kernels.cpu.program import Program

x, out, rows = torch.randn(8, 300), torch.zeros(8, 300), torch.arange(8).flip(0)
program = Program()
program.gather(x, rows, out, torch.tensor([8]))
program.run(2)
for generation in range(2):  # a child, and a child of the child
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        program.run(2)  # the parent's own team is as it was
        sys.exit(os.waitstatus_to_exitcode(status))
    out.zero_()
    for threads in (2, 3):
        program.run(threads)
    if not torch.equal(out, x[rows]):
        os._exit(9)
os._exit(7)
"""


@needs_library
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork")
def test_the_child_of_a_fork_makes_its_own_team() -> None:
    """And both interpreters end, though their teams are never joined."""
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKS],
        timeout=60,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 7, ended.stderr


@needs_library
def test_a_program_keeps_alive_what_it_points_at() -> None:
    program, out = Program(), torch.zeros(4, 1 << 18)
    program.gather(torch.full((4, 1 << 18), 3.0), torch.arange(4), out, count(4))
    torch.full((4, 1 << 18), 5.0)  # would take the place of what was freed
    program.run(2)
    assert (out == 3.0).all()


@needs_library
def test_a_program_grows_and_may_be_empty() -> None:
    program, out = Program(), torch.zeros(2, 3)
    program.run(2)
    assert len(program) == 0
    program.gather(torch.ones(2, 3), torch.arange(2), out, count(2))
    program.run(2)
    assert out.sum() == 6
    program.gather(torch.full((2, 3), 2.0), torch.arange(2), out, count(2))
    program.run(2)
    assert out.sum() == 12
    assert len(program) == 2


@needs_library
@pytest.mark.parametrize("threads", [0, -1, MAX_THREADS + 1])
def test_impossible_numbers_of_threads_are_refused(threads: int) -> None:
    with pytest.raises(ConfigError, match="threads"):
        Program().run(threads)


def test_without_the_library_a_program_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "find", lambda: "there is no library")
    with pytest.raises(ConfigError, match="there is no library"):
        Program().run(1)


@needs_library
def test_an_invalid_op_is_an_error_and_nothing_runs() -> None:
    program, out = Program(), torch.zeros(1, 4)
    program.gather(torch.ones(1, 4), torch.zeros(1, dtype=torch.long), out, count(1))
    program.add(OpKind.GATHER, GatherArgs(size=4))
    with pytest.raises(QinferError, match="status 1"):
        program.run(1)
    assert not out.any()


def good_args() -> dict[OpKind, tuple[ctypes.Structure, list[object]]]:
    """Return valid args of each kind for no tokens, with what they point at."""
    x, ids, none = torch.zeros(1, 64), torch.zeros(1, dtype=torch.long), count(0)
    int8, program = Int8Buffer(1, 32), Program()
    half = torch.zeros(1, 32)
    program.embed(torch.zeros(2, 64), ids, x, none)
    program.norm(half, Norm(torch.ones(32), 1e-5), none, int8=int8)
    program.silu_mul(x, none, int8=int8)
    program.quantize(half, none, int8)
    program.gather(x, ids, torch.zeros(1, 64), none)
    program.argmax(x, ids, none)
    notes = Notes(ids.clone(), none, ids.clone(), none, 3)
    add_faults(program, ids.clone(), ids, notes, ids.clone())
    draws, scratch = (DrawArgs * 1)(), torch.zeros(200)
    args = SampleArgs(
        draws=ctypes.addressof(draws),
        out=ids.data_ptr(),
        scratch=scratch.data_ptr(),
        size=64,
        workers=1,
        num_draws=none.data_ptr(),
    )
    program.add(OpKind.SAMPLE, args, draws, ids, scratch, none)
    return {kind: (args, program._kept) for kind, args in program._ops}


def call(kind: int, args: ctypes.Structure | None) -> int:
    library = native.load()
    assert library is not None
    op = OpArgs(kind, 0, None if args is None else ctypes.addressof(args))
    status: int = library.handle.qinfer_run(ctypes.byref(op), 1, 1)
    return status


@needs_library
@pytest.mark.parametrize("kind", sorted(good_args()) if native.load() is not None else [])
def test_every_field_that_must_be_there_is_checked(kind: OpKind) -> None:
    args, kept = good_args()[kind]
    assert kept
    assert call(kind, args) == OK
    names = [field[0] for field in args._fields_]
    optional = {"eps", "reserved", "permutation", "dtype", "bad_layers", "layer", "num_layers"}
    optional.add("tiled")
    if kind in {OpKind.NORM, OpKind.SILU_MUL}:
        optional.add("out")  # the quantized rows are there
    for name in names:
        value = getattr(args, name)
        setattr(args, name, 0)
        assert call(kind, args) == (OK if name in optional else BAD_ARGUMENT), name
        setattr(args, name, value)
    for name in {"size", "hidden", "workers"} & set(names):
        value = getattr(args, name)
        for impossible in (-1, -(2**63)):
            setattr(args, name, impossible)
            assert call(kind, args) == BAD_ARGUMENT
        setattr(args, name, value)


@needs_library
def test_the_quantized_rows_are_checked() -> None:
    program, int8, x = Program(), Int8Buffer(1, 40), torch.zeros(1, 40)
    program.quantize(x, count(0), int8)
    program.run(1)
    for columns in (0, 32, 65, -64):
        int8.args.columns = columns
        with pytest.raises(QinferError):
            program.run(1)
    int8.args.columns = 64
    int8.args.groups = None
    with pytest.raises(QinferError):
        program.run(1)


@needs_library
def test_calls_that_make_no_sense_are_refused() -> None:
    library = native.load()
    assert library is not None
    run = library.handle.qinfer_run
    args, _ = good_args()[OpKind.ARGMAX]
    op = OpArgs(OpKind.ARGMAX, 0, ctypes.addressof(args))
    assert run(None, 1, 1) == BAD_ARGUMENT
    assert run(None, 0, 1) == OK
    assert run(ctypes.byref(op), -1, 1) == BAD_ARGUMENT
    for threads in (0, -5, MAX_THREADS + 1, 2**31 - 1):
        assert run(ctypes.byref(op), 1, threads) == BAD_ARGUMENT
    for kind in (-(2**31), -1, 0, max(OpKind) + 1, 2**31 - 1):
        assert call(kind, args) == BAD_ARGUMENT
    for kind in OpKind:
        assert call(kind, None) == BAD_ARGUMENT


def test_structs_have_the_sizes_of_the_header() -> None:
    """The static_asserts of csrc/library.cpp name the same numbers."""
    structs = (
        OpArgs,
        Int8Rows,
        EmbedArgs,
        NormArgs,
        SiluMulArgs,
        QuantizeArgs,
        GatherArgs,
        ArgmaxArgs,
        DrawArgs,
        SampleArgs,
        FaultsArgs,
    )
    assert [ctypes.sizeof(s) for s in structs] == [16, 16, 48, 80, 48, 40, 40, 32, 72, 48, 64]


@needs_library
def test_a_buffer_pads_its_columns() -> None:
    int8, program = Int8Buffer(3, 40), Program()
    assert int8.shape == (3, 64)
    assert int8.scales.shape == int8.sums.shape == (3, 2)
    assert int8.nbytes == 2 * 8 * (32 + 4 + 4 + 4)
    program.quantize(torch.full((3, 40), -0.5), count(3), int8)
    program.run(1)
    sums = torch.tensor([-127.0 * 32, -127.0 * 8]) * int8.scales
    assert torch.equal(int8.sums, sums)
    torch.testing.assert_close(int8.dequantize()[:, :40], torch.full((3, 40), -0.5))
    assert not int8.dequantize()[:, 40:].any()


def test_tensors_that_do_not_fit_are_refused_by_name() -> None:
    program, x, n = Program(), torch.zeros(4, 64), count(4)
    with pytest.raises(ConfigError, match=r"x is .*float64"):
        program.argmax(x.double(), torch.zeros(4, dtype=torch.long), n)
    with pytest.raises(ConfigError, match="contiguous"):
        program.argmax(x.t(), torch.zeros(64, dtype=torch.long), n)
    with pytest.raises(ConfigError, match="num_tokens"):
        program.norm(x, Norm(torch.ones(64), 1e-5), n.int(), out=x)
    with pytest.raises(ConfigError, match="weight"):
        program.norm(x, Norm(torch.ones(63), 1e-5), n, out=x)
    with pytest.raises(ConfigError, match="out is"):
        program.norm(x, Norm(torch.ones(64), 1e-5), n, out=torch.zeros(3, 64))
    with pytest.raises(ConfigError, match="int8 is"):
        program.norm(x, Norm(torch.ones(64), 1e-5), n, int8=Int8Buffer(4, 96))
    with pytest.raises(ConfigError, match="compute nothing"):
        program.silu_mul(x, n)
    with pytest.raises(ConfigError, match="even number"):
        program.silu_mul(torch.zeros(4, 63), n, out=x)
    with pytest.raises(ConfigError, match="permutation"):
        program.quantize(x, n, Int8Buffer(4, 64), permutation=torch.arange(63, dtype=torch.int32))
    with pytest.raises(ConfigError, match="every column once"):
        program.quantize(x, n, Int8Buffer(4, 64), permutation=torch.zeros(64, dtype=torch.int32))
    with pytest.raises(ConfigError, match="float16"):
        program.embed(x.half(), torch.zeros(4, dtype=torch.long), x, n)
    with pytest.raises(ConfigError, match=r"\[rows, columns\]"):
        program.quantize(torch.zeros(4), n, Int8Buffer(4, 64))
    assert len(program) == 0
