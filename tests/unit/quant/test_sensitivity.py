"""Measured sensitivities: against gradients and divergences that transformers computes."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import load_oracle, write_tiny

from qinfer.checkpoint.reader import open_checkpoint
from qinfer.errors import NonFiniteError
from qinfer.quant import gptq, hessian, rtn, sensitivity
from qinfer.quant.config import QuantizeConfig
from qinfer.quant.job import prepare
from qinfer.quant.rows_store import RowsStore
from qinfer.quant.sensitivity import LinearSensitivity, SensitivityRun
from qinfer.quant.workers import Workers
from qinfer.schemes import WeightScheme

WINDOWS = torch.randint(0, 256, (24, 60), generator=torch.Generator().manual_seed(0)).tolist()


def measure(
    path: Path, *, threads: int = 2, room: int = 1 << 30, windows: Sequence[list[int]] = WINDOWS
) -> dict[str, LinearSensitivity]:
    """Return the sensitivities by the modules' full names."""
    job = prepare(open_checkpoint(path), QuantizeConfig(group_size=32))
    store = RowsStore(path, [len(window) for window in windows], room=room)
    with Workers(threads) as workers, closing(store):
        run = SensitivityRun(job, windows, workers, store, damp_percent=0.01, on_step=lambda: None)
        return {
            f"model.layers.{layer}.{name}": found
            for layer, linears in run.layers()
            for name, found in linears.items()
        }


def linears_of(model: Any) -> dict[str, torch.nn.Linear]:
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name.startswith("model.layers.")
    }


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_gradients_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    """The mean squares of the gradients of what the model says, drawn once for each token.

    Drawn tokens differ, so the sums agree as far as thousands of draws do.
    """
    path = write_tiny(tmp_path / "model", family)
    found = measure(path)
    model = load_oracle(path)
    outputs: dict[str, torch.Tensor] = {}

    def keep(name: str, output: torch.Tensor) -> None:
        output.retain_grad()
        outputs[name] = output

    for name, module in linears_of(model).items():
        module.register_forward_hook(lambda _, __, out, name=name: keep(name, out))
    squares = {name: torch.zeros(module.out_features) for name, module in linears_of(model).items()}
    torch.manual_seed(1)
    for window in WINDOWS:
        logprobs = model(torch.tensor([window])).logits[0].log_softmax(-1)
        drawn = torch.multinomial(logprobs.detach().exp(), 1)
        logprobs.gather(1, drawn).sum().backward()
        for name, output in outputs.items():
            assert output.grad is not None
            squares[name] += output.grad[0].square().sum(0) / (24 * 60)
    assert found.keys() == squares.keys()
    for name, expected in squares.items():
        assert float(found[name].gradients.sum()) == pytest.approx(float(expected.sum()), rel=0.25)


def loop_over_experts(
    module: Any, outputs: dict[str, torch.Tensor], names: list[tuple[str, str, str]]
) -> Any:
    """Return a forward for the experts of transformers that keeps what their linears give."""

    def forward(x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(x)
        for index, (gate, up, down) in enumerate(names):
            rows, place = (chosen == index).nonzero(as_tuple=True)
            inputs = x[rows]
            first, second = module.gate_up_proj[index].chunk(2)
            g, u = inputs @ first.T, inputs @ second.T
            y = (torch.nn.functional.silu(g) * u) @ module.down_proj[index].T
            for name, output in ((gate, g), (up, u), (down, y)):
                output.retain_grad()
                outputs[name] = output
            total = total.index_add(0, rows, y * weights[rows, place, None])
        return total

    return forward


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_gradients_of_experts_are_those_of_a_plain_loop(tmp_path: Path, family: str) -> None:
    """As above, over all tokens of the text, whoever of them reached an expert."""
    path = write_tiny(tmp_path / "model", family)
    found = measure(path)
    config = prepare(open_checkpoint(path), QuantizeConfig(group_size=32)).model
    assert config.moe is not None
    model = load_oracle(path)
    outputs: dict[str, torch.Tensor] = {}
    squares: dict[str, torch.Tensor] = {}
    for layer in (layer for layer in range(2) if config.is_sparse(layer)):
        experts = [config.moe.names.expert(index) for index in range(config.moe.num_experts)]
        names = [tuple(f"model.layers.{layer}.{n}" for n in expert) for expert in experts]
        module = model.model.layers[layer].mlp.experts
        module.forward = loop_over_experts(module, outputs, names)  # type: ignore[arg-type] # three names each
        for name in (name for three in names for name in three):
            squares[name] = torch.zeros(len(found[name].gradients))
    torch.manual_seed(1)
    for window in WINDOWS:
        logprobs = model(torch.tensor([window])).logits[0].log_softmax(-1)
        drawn = torch.multinomial(logprobs.detach().exp(), 1)
        logprobs.gather(1, drawn).sum().backward()
        for name, output in outputs.items():
            if output.grad is not None:
                squares[name] += output.grad.square().sum(0) / (24 * 60)
    assert len(squares) == 3 * len(names) * (2 if family == "mixtral" else 1)
    for name, expected in squares.items():
        assert float(found[name].gradients.sum()) == pytest.approx(float(expected.sum()), rel=0.3)


def test_predicts_the_divergence_that_solving_one_module_costs(tmp_path: Path) -> None:
    """Within a factor of two. Of v_proj, whose errors attention averages over tokens, what the
    tokens' errors have in common counts more than the sum of their squares says.
    """
    path = write_tiny(tmp_path / "model", "llama")
    found = measure(path)
    truth, model = load_oracle(path), load_oracle(path)
    windows = torch.tensor(WINDOWS)
    scheme = WeightScheme(4, 32)
    with torch.no_grad():
        base = truth(windows).logits.log_softmax(-1)
    ratios = {}
    for name, module in linears_of(model).items():
        inputs: list[torch.Tensor] = []
        hook = module.register_forward_pre_hook(
            lambda _, args, inputs=inputs: inputs.append(args[0].flatten(0, 1))
        )
        with torch.no_grad():
            model(windows)
        hook.remove()
        x = torch.cat(inputs)
        dense = module.weight.data.clone()
        module.weight.data = gptq.solve(dense, 2 / len(x) * x.T @ x, scheme).weight.dequantize()
        with torch.no_grad():
            quantized = model(windows).logits.log_softmax(-1)
        module.weight.data = dense
        actual = float((base.exp() * (base - quantized)).sum(-1).mean())
        ratios[name] = found[name].drift(dense, scheme, name=name) / actual
    for name, ratio in ratios.items():
        assert (0.2 if name.endswith("v_proj") else 0.5) < ratio < 2, (name, ratio)


def test_columns_are_what_is_left_of_an_error_when_later_columns_make_up_for_it(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The textbook: `[H_F⁻¹]_ii`, with F the columns that are not rounded yet."""
    # What counts here is the formula, not how its products are rounded.
    monkeypatch.setattr(hessian, "sum_dtype", lambda: torch.float32)
    found = measure(tiny_llama)
    name = "model.layers.0.self_attn.q_proj"
    model = load_oracle(tiny_llama)
    inputs: list[torch.Tensor] = []
    model.get_submodule(name).register_forward_pre_hook(
        lambda _, args: inputs.append(args[0].flatten(0, 1))
    )
    with torch.no_grad():
        model(torch.tensor(WINDOWS))
    x = torch.cat(inputs).double()
    H = x.T @ x / len(x)
    diagonal = H.diagonal().clone()
    H.diagonal().add_(0.01 * float(diagonal.mean()))
    left = torch.argsort(diagonal, descending=True).tolist()
    expected = torch.empty(len(H), dtype=torch.float64)
    while left:
        expected[left[0]] = 1 / torch.linalg.inv(H[left][:, left])[0, 0]
        left = left[1:]
    assert torch.allclose(found[name].columns.double(), expected, rtol=1e-3)


def test_does_not_depend_on_threads(tiny_llama: Path) -> None:
    one, three = measure(tiny_llama, threads=1), measure(tiny_llama, threads=3)
    for name, found in one.items():
        assert torch.equal(found.gradients, three[name].gradients), name
        assert torch.equal(found.columns, three[name].columns), name


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_does_not_depend_on_where_rows_lie(tmp_path: Path, family: str) -> None:
    """All in memory, some, or none: to the bit, with windows of different lengths."""
    path = write_tiny(tmp_path / "model", family)
    windows = [window[: 60 - 7 * index] for index, window in enumerate(WINDOWS[:6])]
    expected = measure(path, windows=windows)
    before = sorted(path.iterdir())
    for room in (0, 100_000, 200_000):
        found = measure(path, windows=windows, room=room)
        assert found.keys() == expected.keys()
        for name, linear in found.items():
            assert torch.equal(linear.gradients, expected[name].gradients), name
            assert torch.equal(linear.columns, expected[name].columns), name
    assert sorted(path.iterdir()) == before


def test_drift_is_summed_over_pieces_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the formula says it for the whole weight at once."""
    weight, scheme = torch.randn(50, 64), WeightScheme(4, 32)
    known = LinearSensitivity(torch.rand(50), torch.rand(64))
    error = weight - rtn.quantize(weight, scheme).dequantize()
    expected = 0.5 * float(
        (error.double().square() * known.columns).sum(1) @ known.gradients.double()
    )
    for rows in (1, 7, 50, 100):
        monkeypatch.setattr(sensitivity, "PIECE", rows * 64)
        assert known.drift(weight, scheme, name="w") == pytest.approx(expected, rel=1e-5)


def test_what_is_not_finite_is_named(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "model", "llama")
    file = path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.down_proj.weight"].fill_(torch.inf)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(NonFiniteError, match=r"the output of model\.layers\.1"):
        measure(path)
