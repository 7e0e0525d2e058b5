"""What a linear layer's inputs say about its output error, gathered while calibrating."""

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Protocol

import torch

from qinfer.errors import NonFiniteError, QuantizationError
from qinfer.kernels.cpu import gram

_PANEL = 128  # columns per product: only the upper triangle is summed


def sum_dtype() -> torch.dtype:
    """Return the type to which inputs are rounded before their products are summed in float32.

    bfloat16 where the C++ library is there and the CPU multiplies it twice as fast as float32. The
    linears, which are multiplied in bfloat16 there too, then see just what is summed.
    """
    return torch.bfloat16 if gram.available() else torch.float32


class InputStatistics:
    """Sums over calibration tokens of `x xᵀ`, in float32, in the order they are added.

    All linears that read the same input share one (q, k and v; gate and up). The sums are kept in
    panels of columns that are independent of each other: each may be updated by another thread,
    and as long as a panel gets its samples in order, from torch on one thread, the bits do not
    depend on which. `sum_dtype` says to what the inputs are rounded.

    Wide layers make these the largest tensors of a run, so `matrix` and `cross` hand them out
    instead of copying: each can be called once, when all samples are added.

    Args:
        in_features: length of an input vector.
        name: of the layers that read the input, for messages.
        paired: inputs may come with those of the unquantized model, and `Σ (x_full - x) xᵀ` is
            summed over them too (GPTAQ).
    """

    __slots__ = (
        "_cross",
        "_dtype",
        "_sum",
        "in_features",
        "name",
        "num_paired_tokens",
        "num_tokens",
        "paired",
    )

    def __init__(self, in_features: int, *, name: str, paired: bool = False) -> None:
        self.in_features = in_features
        self._dtype = sum_dtype()
        # [in, in], upper triangle; None = handed out
        self._sum: torch.Tensor | None = torch.zeros(in_features, in_features)
        self._cross = torch.zeros(in_features, in_features) if paired else None
        self.name = name
        self.num_tokens = 0
        self.num_paired_tokens = 0
        self.paired = paired

    @property
    def num_panels(self) -> int:
        """Parts that can be updated independently; the first ones are the longest."""
        return -(-self.in_features // _PANEL)

    def add(
        self,
        x: torch.Tensor,
        *,
        sample: int,
        full: torch.Tensor | None = None,
        executor: Executor | None = None,
    ) -> None:
        """Add the inputs of one sample; see `add_samples`."""
        fulls = None if full is None else [full]
        self.add_samples([x], first=sample, fulls=fulls, executor=executor)

    def add_samples(
        self,
        xs: Sequence[torch.Tensor],
        *,
        first: int,
        fulls: Sequence[torch.Tensor] | None = None,
        executor: Executor | None = None,
    ) -> None:
        """Add the inputs of samples, one after the other: how they are grouped changes no bit.

        Args:
            xs: `[tokens, in]` each, as the quantized model computes them.
            first: index of the first sample, for messages.
            fulls: `[tokens, in]` each, as the unquantized model computes the first of these
                samples; only if `paired`.
            executor: where the panels are updated; None = here.

        Raises:
            NonFiniteError: naming the layer and the sample, before anything is added.
        """
        if fulls and not self.paired:
            raise ValueError(
                f"{self.name}: inputs of the unquantized model are wanted only if paired"
            )
        fulls = fulls or ()
        sums, crosses = self._sum, self._cross
        if sums is None or (fulls and crosses is None):
            raise ValueError(f"{self.name}: samples are added before the sums are taken")
        run = map if executor is None else executor.map

        def operands(index: int) -> _Operands:
            difference = None
            sample = first + index
            check_finite(xs[index], name=f"the input of {self.name}", sample=sample)
            if index < len(fulls):
                difference = fulls[index].float() - xs[index]
                name = f"the unquantized input of {self.name}"
                check_finite(difference, name=name, sample=sample)
            return _operands(xs[index].float(), difference, self._dtype)

        samples = list(run(operands, range(len(xs))))

        def update(panel: int) -> None:
            columns = slice(panel * _PANEL, min((panel + 1) * _PANEL, self.in_features))
            for sample in samples:
                sample.add(sums, crosses, columns)

        for _ in run(update, range(self.num_panels)):
            pass  # waits, and raises what an update raised
        self.num_tokens += sum(x.shape[0] for x in xs)
        self.num_paired_tokens += sum(full.shape[0] for full in fulls)

    def matrix(self) -> torch.Tensor:
        """Hand out the Hessian `2/n Σ x xᵀ`, float32 `[in, in]` (arXiv 2210.17323, section 3.1).

        Exactly symmetric, in the memory of the sums.

        Raises:
            QuantizationError: no token was ever added.
            NonFiniteError: finite inputs are so large that their squares are not.
        """
        if self.num_tokens == 0:
            raise QuantizationError(f"{self.name}: no calibration token reached this layer")
        matrix, self._sum = self._checked(self._sum), None
        return _completed(matrix, self.num_tokens)

    def matrix_so_far(self) -> torch.Tensor:
        """Return what `matrix` would, in memory of its own; samples can still be added."""
        return _completed(self._checked(self._sum).clone(), self.num_tokens)

    def cross(self) -> torch.Tensor | None:
        """Hand out `2/n Σ (x_full - x) xᵀ` over the pairs, float32 `[in, in]`.

        None if there was no pair. Samples without a pair can still be added.

        Raises:
            NonFiniteError: finite inputs are so large that their products are not.
        """
        if self.num_paired_tokens == 0:
            return None
        cross, self._cross = self._checked(self._cross), None
        return cross.mul_(2.0 / self.num_paired_tokens)

    def _checked(self, sums: torch.Tensor | None) -> torch.Tensor:
        if sums is None:
            raise ValueError(f"{self.name}: the sums are taken once")
        if not all(bool(torch.isfinite(rows).all()) for rows in sums.split(_PANEL)):
            raise NonFiniteError(
                f"the inputs of {self.name} are too large: their squares exceed float32"
            )
        return sums


def _completed(matrix: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Return sums whose upper triangle is there as the Hessian, in the same memory."""
    for start in range(0, len(matrix), _PANEL):
        rows, end = matrix[start : start + _PANEL], start + _PANEL
        square = rows[:, start:end].triu()
        rows[:, start:end] = square + square.triu(1).T
        rows[:, start:].mul_(2.0 / num_tokens)
        matrix[end:, start:end] = rows[:, end:].T
    return matrix


class _Operands(Protocol):
    """One sample, ready to be added."""

    def add(self, sums: torch.Tensor, crosses: torch.Tensor | None, columns: slice) -> None:
        """Add the sample to the columns of one panel."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Float32:
    """The inputs, and what they lack of those of the unquantized model; `[tokens, in]`."""

    X: torch.Tensor
    difference: torch.Tensor | None

    def add(self, sums: torch.Tensor, crosses: torch.Tensor | None, columns: slice) -> None:
        X = self.X
        sums[columns, columns.start :].addmm_(X[:, columns].T, X[:, columns.start :])
        if crosses is not None and self.difference is not None:
            crosses[columns].addmm_(self.difference[:, columns].T, X)


@dataclass(frozen=True, slots=True, eq=False)
class _BFloat16:
    """The same, rounded and packed."""

    X: gram.PackedRows
    difference: gram.PackedRows | None

    def add(self, sums: torch.Tensor, crosses: torch.Tensor | None, columns: slice) -> None:
        rows = (columns.start, columns.stop)
        gram.add(sums, self.X, self.X, rows=rows, upper=True)
        if crosses is not None and self.difference is not None:
            gram.add(crosses, self.difference, self.X, rows=rows)


def _operands(X: torch.Tensor, difference: torch.Tensor | None, dtype: torch.dtype) -> _Operands:
    if dtype == torch.float32:
        return _Float32(X, difference)
    packed = None if difference is None else gram.pack(difference.contiguous())
    return _BFloat16(gram.pack(X.contiguous()), packed)


def check_finite(values: torch.Tensor, *, name: str, sample: int) -> None:
    """Refuse activations that are NaN or infinite.

    Raises:
        NonFiniteError: naming the place and the calibration sample.
    """
    if bool(torch.isfinite(values.sum())):  # one pass; a sum that overflows is looked at closer
        return
    if bool(torch.isfinite(values).all()):
        return
    row = int((~torch.isfinite(values)).reshape(values.shape[0], -1).any(1).nonzero()[0])
    raise NonFiniteError(
        f"{name} is not finite in calibration sample {sample}, token {row} (computed in float32): "
        "check the source model's weights, or leave this text out of the calibration"
    )
