"""The Hessian of a linear layer's squared output error, gathered while calibrating."""

import torch

from qinfer.errors import NonFiniteError, QuantizationError

_PANEL = 128  # columns per product: only the upper triangle is summed


class Hessian:
    """The sum of `x xᵀ` over calibration tokens, in float32, in the order they are added.

    All linears that read the same input share one (q, k and v; gate and up).

    Args:
        in_features: length of an input vector.
        name: of the layers that read the input, for messages.
    """

    __slots__ = ("_sum", "name", "num_tokens")

    def __init__(self, in_features: int, *, name: str) -> None:
        self._sum = torch.zeros(in_features, in_features)  # [in, in], upper triangle
        self.name = name
        self.num_tokens = 0

    def add(self, x: torch.Tensor, *, sample: int) -> None:
        """Add the inputs of one sample, `[tokens, in]`.

        Raises:
            NonFiniteError: naming the layer and the sample, before anything is added.
        """
        check_finite(x, name=f"the input of {self.name}", sample=sample)
        X = x.float()
        for start in range(0, X.shape[1], _PANEL):
            left = X[:, start : start + _PANEL]
            self._sum[start : start + _PANEL, start:].addmm_(left.T, X[:, start:])
        self.num_tokens += X.shape[0]

    def matrix(self) -> torch.Tensor:
        """Return `2/n Σ x xᵀ`, float32 `[in, in]` (arXiv 2210.17323, section 3.1).

        Raises:
            QuantizationError: no token was ever added.
            NonFiniteError: finite inputs are so large that their squares are not.
        """
        if self.num_tokens == 0:
            raise QuantizationError(f"{self.name}: no calibration token reached this layer")
        upper = self._sum.triu()
        if not bool(torch.isfinite(upper).all()):
            raise NonFiniteError(
                f"the inputs of {self.name} are too large: their squares exceed float32"
            )
        return (upper + upper.triu(1).T) * (2.0 / self.num_tokens)


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
