"""Which rows of a step broke down, and where: what the norms of a program noted, in one place."""

import ctypes
from dataclasses import dataclass

import torch

from qinfer.kernels.cpu.program import OpKind, Program, pointer


class FaultsArgs(ctypes.Structure):
    """`qinfer_faults`."""

    _fields_ = (
        ("best", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("token_notes", ctypes.c_void_p),
        ("row_notes", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("num_layers", ctypes.c_int64),
        ("num_rows", ctypes.c_void_p),
        ("num_tokens", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Notes:
    """Where the norms of a program note what is not finite, and what stands for the part after.

    Args:
        tokens: int64 `[max_tokens]`, the layers noted of tokens.
        num_tokens: int64 `[1]`.
        rows: int64 `[max_rows]`, the layers noted of wanted rows.
        num_rows: int64 `[1]`.
        num_layers: what stands for the final norm and the head.
    """

    tokens: torch.Tensor
    num_tokens: torch.Tensor
    rows: torch.Tensor
    num_rows: torch.Tensor
    num_layers: int


def add_faults(
    program: Program, best: torch.Tensor, rows: torch.Tensor, notes: Notes, out: torch.Tensor
) -> None:
    """Append where each wanted row broke down first, or -1; the notes are -1 afterwards.

    Args:
        program: behind the norms and the argmax.
        best: int64 `[max_rows]`, what `argmax` gives.
        rows: int64 `[max_rows]`, the token of each row; the caller checks that there are such.
        notes: what the norms note.
        out: int64 `[max_rows]`.
    """
    shape = (rows.numel(),)
    args = FaultsArgs(
        best=pointer("best", best, torch.int64, shape),
        rows=pointer("rows", rows, torch.int64, shape),
        token_notes=pointer("tokens", notes.tokens, torch.int64, notes.tokens.shape),
        row_notes=pointer("rows", notes.rows, torch.int64, shape),
        out=pointer("out", out, torch.int64, shape),
        num_layers=notes.num_layers,
        num_rows=pointer("num_rows", notes.num_rows, torch.int64, (1,)),
        num_tokens=pointer("num_tokens", notes.num_tokens, torch.int64, (1,)),
    )
    program.add(OpKind.FAULTS, args, best, rows, notes, out)
