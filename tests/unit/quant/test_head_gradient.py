"""The gradient of tokens drawn from a model's own distribution, block after block of its head."""

from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import load_oracle, write_tiny

from qinfer.checkpoint.reader import open_checkpoint
from qinfer.errors import NonFiniteError
from qinfer.quant import head_gradient
from qinfer.quant.activations import MemoryRows
from qinfer.quant.config import QuantizeConfig
from qinfer.quant.head_gradient import HeadGradient
from qinfer.quant.job import prepare
from qinfer.quant.rows_store import RowsStore
from qinfer.quant.workers import Workers

HIDDEN = 64


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six blocks of the 288 rows, the last one short; several pieces of tokens."""
    monkeypatch.setattr(head_gradient, "ROWS", 50)
    monkeypatch.setattr(head_gradient, "TOKENS", 16)


def gradients_of(
    path: Path, samples: list[torch.Tensor], *, threads: int = 1, room: int = 1 << 30
) -> list[torch.Tensor]:
    job = prepare(open_checkpoint(path), QuantizeConfig(group_size=32))
    lengths = tuple(len(sample) for sample in samples)
    store = RowsStore(path, lengths, room=room)
    with Workers(threads) as workers, closing(store):
        hidden, gradients = store.make("hidden", HIDDEN), store.make("gradients", HIDDEN)
        for index, sample in enumerate(samples):
            hidden.write(index, sample)
        HeadGradient(job, hidden, gradients, lengths, workers).run()
        return [gradients.read(index).clone() for index in range(len(samples))]


def of_every_token(path: Path, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what transformers and autograd say: log-probabilities `[tokens, vocab]`, and the
    gradient of each by the token's hidden states, `[tokens, vocab, hidden]`.
    """
    model = load_oracle(path)
    leaf = hidden.clone().requires_grad_()
    logprobs = model.lm_head(model.model.norm(leaf)).log_softmax(-1)
    columns = [
        torch.autograd.grad(logprobs[:, token].sum(), leaf, retain_graph=True)[0]
        for token in range(logprobs.shape[1])
    ]
    return logprobs.detach(), torch.stack(columns, dim=1)


def drawn(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return whose gradient every row is, `[tokens]`; it must be that of one token."""
    distances = (found[:, None] - expected).norm(dim=2) / expected.norm(dim=2)
    least = distances.topk(2, largest=False)
    assert float(least.values[:, 0].max()) < 1e-4
    assert float(least.values[:, 1].min()) > 1e-2
    return least.indices[:, 0]


@pytest.mark.parametrize("tied", [False, True])
def test_is_the_gradient_of_one_token_each(tmp_path: Path, tied: bool) -> None:
    path = write_tiny(tmp_path / "model", tie_word_embeddings=tied)
    generator = torch.Generator().manual_seed(1)
    samples = [torch.randn(length, HIDDEN, generator=generator) for length in (40, 1, 23)]
    tokens = torch.cat(
        [
            drawn(found, of_every_token(path, sample)[1])
            for sample, found in zip(samples, gradients_of(path, samples), strict=True)
        ]
    )
    assert len(set((tokens // 50).tolist())) == 6  # of every block


def test_tokens_are_drawn_from_the_models_distribution(tmp_path: Path) -> None:
    """Chi-square over 288 tokens: mean 287, standard deviation 24."""
    path = write_tiny(tmp_path / "model", vocab_size=288)
    hidden = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(2))
    logprobs, expected = of_every_token(path, hidden)
    count = 20_000
    (found,) = gradients_of(path, [hidden.expand(count, -1)])
    tokens = (found @ expected[0].T - expected[0].square().sum(1) / 2).argmax(1)  # the nearest
    assert float((found - expected[0, tokens]).norm(dim=1).max()) < 1e-3
    wanted = count * logprobs[0].double().exp()
    observed = torch.bincount(tokens, minlength=len(wanted)).double()
    assert float(((observed - wanted) ** 2 / wanted).sum()) < 287 + 5 * 24


def test_depends_neither_on_threads_nor_on_where_rows_lie(tiny_llama: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    samples = [torch.randn(length, HIDDEN, generator=generator) for length in (40, 17, 30)]
    expected = gradients_of(tiny_llama, samples)
    for threads, room in ((3, 1 << 30), (1, 0), (3, 0)):
        found = gradients_of(tiny_llama, samples, threads=threads, room=room)
        assert all(map(torch.equal, expected, found))


def test_samples_draw_apart(tiny_llama: Path) -> None:
    sample = torch.randn(64, HIDDEN, generator=torch.Generator().manual_seed(4))
    first, second = gradients_of(tiny_llama, [sample, sample])
    assert not torch.equal(first, second)


def test_what_is_not_finite_is_named(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "model")
    file = path / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"][70] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    samples = [torch.randn(5, HIDDEN)]
    with pytest.raises(NonFiniteError, match="what the head says is not finite in calibration"):
        gradients_of(path, samples)


def test_rows_given_are_left_as_they_were(tiny_llama: Path) -> None:
    job = prepare(open_checkpoint(tiny_llama), QuantizeConfig(group_size=32))
    hidden, gradients = MemoryRows((9,), HIDDEN), MemoryRows((9,), HIDDEN)
    hidden.write(0, torch.randn(9, HIDDEN))
    before = hidden.read(0).clone()
    with Workers(1) as workers:
        HeadGradient(job, hidden, gradients, (9,), workers).run()
    assert torch.equal(hidden.read(0), before)
