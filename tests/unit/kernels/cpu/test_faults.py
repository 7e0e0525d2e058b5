import pytest
import torch

from qinfer.kernels.cpu import native
from qinfer.kernels.cpu.faults import Notes, add_faults
from qinfer.kernels.cpu.program import Program

pytestmark = pytest.mark.skipif(
    native.load() is None, reason="the C++ library was not built (no compiler at installation)"
)


def test_faults_tell_the_first_and_are_forgotten() -> None:
    best, rows = torch.tensor([4, -1, -1, 7, -1]), torch.tensor([0, 2, 3, 5, 6])
    tokens, at_rows = torch.tensor([-1, 9, 1, -1, 9, -1, -1, 9]), torch.tensor([-1, 2, 2, 2, -1])
    out = torch.zeros(5, dtype=torch.long)
    for threads in (1, 3):
        notes = Notes(tokens.clone(), torch.tensor([7]), at_rows.clone(), torch.tensor([5]), 30)
        program = Program()
        add_faults(program, best, rows, notes, out)
        program.run(threads)
        assert out.tolist() == [-1, 1, 2, 2, 30]
        assert notes.tokens.tolist() == [-1] * 7 + [9]  # the step had seven tokens
        assert notes.rows.tolist() == [-1] * 5
