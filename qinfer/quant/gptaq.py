"""What GPTAQ adds to weights, so that they make up for what quantizing did before them.

Li et al., arXiv 2504.02692, equation 5: a weight is to give the outputs of the unquantized model,
`‖Ŵ X - W X_full‖²`. Where they correct column by column, here the weight without rounding that
does it best is found first, and then rounded: that minimizes the objective as a whole.
"""

from pathlib import Path

import torch

from qinfer.quant import gptq
from qinfer.quant.activations import FileRows
from qinfer.quant.hessian import InputStatistics

# Tokens per input from which the regression is worth more than the noise it adds: SmolLM2-135M (up
# to 1,536 inputs, INT4 g64) has a mean KLD of 0.103 with 43 tokens per input, 0.122 with 11, 0.160
# with 5 and 0.214 with 3; it is 0.163 without (eval/solver.md).
TOKENS_PER_INPUT = 8
WIDE_INPUTS = 4096  # inputs from which what solving takes decides how much memory a run needs


def enough_pairs(num_tokens: int, in_features: int) -> bool:
    """Tell whether so many tokens say what to add to a weight with so many inputs."""
    return num_tokens >= TOKENS_PER_INPUT * in_features


def weight_shift(stats: InputStatistics, damp_percent: float) -> torch.Tensor | None:
    """Return D with which `W + W D` is the best weight on the pairs of inputs added so far.

    `‖Ŵ X - W X_full‖² + λ‖Ŵ - W‖²` is least at `Ŵ = W + W (X_full - X) Xᵀ (X Xᵀ + λ)⁻¹`. All sums
    must be of the same samples: a product of sums over some and an inverse of sums over others is
    no regression, and its errors grow from block to block until nothing is left of the model.

    Factored in float32: what is damped need not be known better.

    Args:
        stats: of the input, paired, with the pairs added and nothing else.
        damp_percent: λ as a share of the mean diagonal; more where that does not suffice.

    Returns:
        Float32 `[in, in]`; None if there is no pair, or no damping helps.

    Raises:
        NonFiniteError: finite inputs are so large that their products are not.
    """
    cross = stats.cross()
    if cross is None:
        return None
    with gptq.single_thread():
        for step in gptq.damping_steps(damp_percent):
            matrix = stats.matrix_so_far()
            if not bool((matrix.diagonal() != 0).any()):
                return None
            with gptq.damped(matrix, step):
                lower = matrix.T  # the same matrix, by columns as LAPACK wants it
                info = torch.empty((), dtype=torch.int32)
                torch.linalg.cholesky_ex(lower, out=(lower, info))
                if int(info) != 0:
                    continue
                # D L Lᵀ = cross
                torch.linalg.solve_triangular(lower.T, cross, upper=True, left=False, out=cross)
                torch.linalg.solve_triangular(lower, cross, upper=False, left=False, out=cross)
            return cross if bool(torch.isfinite(cross.sum())) else None
    return None


class KeptShift:
    """Keeps the shift of an input while its Hessian is factored: one of a wide input in a file.

    That is when a run takes the most memory.

    Args:
        shift: of the input; None = there is none.
        folder: of the file, which has no name there.

    Raises:
        CheckpointError: it cannot be written; the disk may be full.
    """

    def __init__(self, shift: torch.Tensor | None, folder: Path) -> None:
        self._shift = shift
        self._file: FileRows | None = None
        if shift is not None and len(shift) >= WIDE_INPUTS:
            path, size = folder / "shift.rows", len(shift)
            self._file = FileRows(path, [size], size, unnamed=True)
            self._file.write(0, shift)
            self._shift = None

    def take(self) -> torch.Tensor | None:
        """Return what was kept, which is forgotten."""
        shift, self._shift = self._shift, None
        if self._file is not None:
            shift = self._file.read(0)
            self._file.close()
            self._file = None
        return shift
