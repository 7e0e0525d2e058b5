"""The gradient of what a model says, by the hidden states behind its last block.

For every token of the text a next token is drawn from the model's own distribution; the gradient of
its log-probability by the head's input is `(onehot - p) W`. The head goes through memory twice, in
blocks of its rows, and no token's whole distribution is ever there: the first time the size of
every block's share is found, then the block is drawn; the second time the token within it is
drawn and the products are summed.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812 - the customary name

from qinfer.models.load import EMBEDDING, FINAL_NORM, HEAD
from qinfer.quant.activations import Rows
from qinfer.quant.hessian import check_finite
from qinfer.quant.job import Job
from qinfer.quant.workers import Workers

# Constants, whatever memory there is: they decide what is drawn and how sums are rounded.
ROWS = 1 << 12  # of the head at a time
TOKENS = 1 << 9  # at a time


@dataclass(slots=True, eq=False)
class _Draws:
    """What is known of one sample's next tokens.

    Args:
        shares: log of every block's share, not normalized, `[tokens, blocks]`.
        generator: its random numbers, used by one block after the other.
        total: log of the sum of the shares, `[tokens, 1]`.
        block: of the token drawn, `[tokens]`.
    """

    shares: torch.Tensor
    generator: torch.Generator
    total: torch.Tensor = field(default_factory=lambda: torch.empty(0, 1))
    block: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))


class HeadGradient:
    """The final norm and the head, as far as one pass over some samples needs them.

    Args:
        job: the source and its facts.
        hidden: the last block's output.
        gradients: where the gradients by it go.
        lengths: tokens of every sample.
        workers: threads, each with one sample at a time.
    """

    def __init__(
        self, job: Job, hidden: Rows, gradients: Rows, lengths: tuple[int, ...], workers: Workers
    ) -> None:
        self._source, self._eps = job.source, job.model.rms_norm_eps
        self._norm = job.source.tensor(FINAL_NORM).float()
        self._name = EMBEDDING if job.model.tie_word_embeddings else f"{HEAD}.weight"
        self._hidden, self._gradients = hidden, gradients
        self._workers = workers
        blocks = -(-job.source.shape(self._name)[0] // ROWS)
        self._draws = [
            _Draws(torch.empty(length, blocks), torch.Generator().manual_seed(sample))
            for sample, length in enumerate(lengths)
        ]

    def run(self) -> None:
        """Write the gradients of the summed log-probabilities of the tokens drawn.

        Raises:
            NonFiniteError: logits or gradients are not finite; names the sample.
        """
        samples = range(len(self._draws))
        for block, weight in self._blocks():
            self._workers.map(partial(self._weigh, block=block, weight=weight), samples)
        self._workers.map(self._draw_blocks, samples)
        for block, weight in self._blocks():
            self._workers.map(partial(self._add, block=block, weight=weight), samples)
        self._workers.map(self._through_norm, samples)

    def _blocks(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the head's blocks, float32 `[rows, hidden]`."""
        count = self._source.shape(self._name)[0]
        for block, start in enumerate(range(0, count, ROWS)):
            yield block, self._source.rows(self._name, start, min(start + ROWS, count)).float()

    def _weigh(self, sample: int, *, block: int, weight: torch.Tensor) -> None:
        """Note the log of a block's share of every token's distribution, not yet normalized."""
        x = self._normed(self._hidden.read(sample))
        parts = [(part @ weight.T).logsumexp(1) for part in x.split(TOKENS)]
        self._draws[sample].shares[:, block] = torch.cat(parts)

    def _draw_blocks(self, sample: int) -> None:
        draw = self._draws[sample]
        draw.total = draw.shares.logsumexp(1, keepdim=True)
        check_finite(draw.total, name="the logarithm of what the head says", sample=sample)
        chances = (draw.shares - draw.total).exp_()
        draw.block = chances.multinomial(1, generator=draw.generator).squeeze(1)

    def _add(self, sample: int, *, block: int, weight: torch.Tensor) -> None:
        """Add a block's part of `(onehot - p) W`."""
        draw = self._draws[sample]
        x = self._normed(self._hidden.read(sample))
        before = self._gradients.read(sample) if block else torch.zeros_like(x)
        after = torch.empty_like(x)
        for start in range(0, len(x), TOKENS):
            part = slice(start, start + TOKENS)
            logits = x[part] @ weight.T
            here = (draw.block[part] == block).nonzero().squeeze(1)
            tokens = _drawn(logits[here], draw.generator)
            signs = logits.sub_(draw.total[part]).exp_().neg_()
            signs[here, tokens] += 1
            torch.addmm(before[part], signs, weight, out=after[part])
        self._gradients.write(sample, after)

    def _through_norm(self, sample: int) -> None:
        leaf = self._hidden.read(sample).detach().requires_grad_()
        with torch.enable_grad():
            x = self._normed(leaf)
        (gradient,) = torch.autograd.grad(x, leaf, self._gradients.read(sample))
        check_finite(gradient, name="the gradient of the last block's output", sample=sample)
        self._gradients.write(sample, gradient)

    def _normed(self, hidden: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = F.rms_norm(hidden, self._norm.shape, self._norm, self._eps)
        return normed


def _drawn(logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return for each row `[tokens, block]` an index drawn from its distribution, `[tokens]`."""
    if not len(logits):
        return torch.empty(0, dtype=torch.int64)
    return logits.softmax(1).multinomial(1, generator=generator).squeeze(1)
