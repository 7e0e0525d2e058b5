"""Blocks with experts, quantized: each expert on the tokens that it is given, no other."""

import json
import shutil
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the customary name
from safetensors.torch import load_file, save_file
from support.checkpoints import load_oracle, write_tiny
from support.steps import layout_of, run_chunked

from qinfer.checkpoint.reader import open_checkpoint
from qinfer.errors import ConfigError
from qinfer.formats.weight import QuantizedWeight
from qinfer.kvcache.pool import KVPool
from qinfer.models.config import ModelConfig, linear_shapes
from qinfer.models.load import load_decoder
from qinfer.quant import rtn
from qinfer.quant.calibration import load_calibration
from qinfer.quant.experts import under_seen
from qinfer.quant.gptaq import weight_shift
from qinfer.quant.hessian import InputStatistics
from qinfer.quant.pipeline import quantize
from qinfer.quant.report import ModuleRow
from qinfer.quant.solver import SolverOptions, solve_modules
from qinfer.quant.targets import Target
from qinfer.schemes import WeightScheme

SMALL: dict[str, Any] = {
    "num_samples": 8,
    "seq_len": 48,
    "group_size": 32,
    "scale_search": "hessian",
}
FEW: dict[str, Any] = {"num_samples": 1, "seq_len": 64, "group_size": 32}

Inputs = dict[str, list[torch.Tensor]]


def read_weights(path: Path) -> dict[str, object]:
    """Read every decoder linear of a checkpoint."""
    checkpoint = open_checkpoint(path)
    shapes = linear_shapes(ModelConfig.from_dict(checkpoint.config))
    return {
        name: checkpoint.weight(name, in_features=i, out_features=o)
        for name, (i, o) in shapes.items()
    }


def windows(num_samples: int, seq_len: int, **_: Any) -> list[list[int]]:
    calibration = load_calibration(
        lambda text: list(text.encode()),
        path=None,
        num_samples=num_samples,
        seq_len=seq_len,
        max_position=128,
    )
    return [list(window) for window in calibration.windows]


def write_dequantized(source: Path, quantized: Path, path: Path) -> Path:
    """Write `source` with the weights that `quantized` stands for."""
    shutil.copytree(source, path)
    tensors = load_file(path / "model.safetensors")
    for name, weight in read_weights(quantized).items():
        assert isinstance(weight, QuantizedWeight)
        tensors[f"{name}.weight"] = weight.dequantize()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def watch_linears(oracle: Any, inputs: Inputs) -> None:
    for name, module in oracle.named_modules():
        if type(module).__name__ == "Linear":
            module.register_forward_pre_hook(
                lambda _, args, name=name: inputs[name].append(args[0].flatten(0, 1))
            )


def watch_experts(
    oracle: Any, names: dict[int, list[tuple[str, str, str]]], inputs: Inputs
) -> None:
    """Note what the linears of every expert read, from what transformers hands to its experts."""
    for layer, experts in names.items():

        def note(module: Any, args: Any, experts: list[tuple[str, str, str]] = experts) -> None:
            x, chosen, _ = args
            for index, (gate, up, down) in enumerate(experts):
                rows = x[(chosen == index).any(-1)]
                inner = F.linear(rows, module.gate_up_proj[index])
                first, second = inner.chunk(2, -1)
                inputs[gate].append(rows)
                inputs[up].append(rows)
                inputs[down].append(F.silu(first) * second)

        oracle.model.layers[layer].mlp.experts.register_forward_pre_hook(note)


def share_routing(leader: Any, follower: Any, layers: Iterable[int]) -> None:
    """Let a model's experts get the tokens that the other's router chose for them last."""
    for layer in layers:
        first, second = (model.model.layers[layer].mlp for model in (leader, follower))
        chosen: list[torch.Tensor] = []

        def keep(_: Any, args: Any, chosen: list[torch.Tensor] = chosen) -> None:
            chosen[:] = args[1:]

        def replace(_: Any, args: Any, chosen: list[torch.Tensor] = chosen) -> Any:
            return (args[0], *chosen)

        first.experts.register_forward_pre_hook(keep)
        second.experts.register_forward_pre_hook(replace)


def expert_names(config: ModelConfig) -> dict[int, list[tuple[str, str, str]]]:
    """Return gate, up and down of every expert, by layer."""
    assert config.moe is not None
    names = {}
    for layer in (layer for layer in range(config.num_layers) if config.is_sparse(layer)):
        experts = [config.moe.names.expert(index) for index in range(config.moe.num_experts)]
        prefix = f"model.layers.{layer}."
        names[layer] = [(prefix + gate, prefix + up, prefix + down) for gate, up, down in experts]
    return names


def solved_alone(
    weight: torch.Tensor, x: torch.Tensor, scheme: WeightScheme, full: torch.Tensor | None = None
) -> QuantizedWeight:
    """Return what the solver, tested elsewhere, makes of a weight whose inputs are `x`, and `full`
    in the unquantized model.
    """
    stats = InputStatistics(x.shape[1], name="alone", paired=full is not None)
    stats.add(x, sample=0, full=full)
    target = Target("alone", x.shape[1], len(weight), scheme)
    options = SolverOptions(scale_search=SMALL["scale_search"])
    shift = weight_shift(stats, options.damp_percent)
    ((_, solved),) = solve_modules(
        stats, {"alone": weight}, {"alone": target}, options, shift=lambda: shift
    )
    return solved.weight


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_every_module_is_solved_on_what_came_before_it_g15(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oracle: transformers with all quantized weights, and what its experts are handed."""
    # As the oracle multiplies, on every machine.
    monkeypatch.setattr("qinfer.quant.blockwise.linear_dtype", lambda: torch.float32, raising=False)
    source = write_tiny(tmp_path / "source", family)
    report = quantize(source, tmp_path / "out", **SMALL, threads=1, gptaq=False)
    oracle = load_oracle(write_dequantized(source, tmp_path / "out", tmp_path / "dense"))
    written, original = read_weights(tmp_path / "out"), read_weights(source)
    config = ModelConfig.from_dict(json.loads((source / "config.json").read_text()))
    inputs: Inputs = defaultdict(list)
    watch_linears(oracle, inputs)
    watch_experts(oracle, expert_names(config), inputs)
    with torch.no_grad():
        logits = [oracle(torch.tensor([window])).logits[0] for window in windows(**SMALL)]
    rows = {row.name: row for row in report.rows}
    for name, weight in written.items():
        assert isinstance(weight, QuantizedWeight)
        x, before = torch.cat(inputs[name]), original[name]
        assert isinstance(before, torch.Tensor)
        assert rows[name].num_tokens == len(x), name
        expected = solved_alone(before, x, weight.scheme)
        same = (expected.codes == weight.codes).float().mean()
        assert float(same) > 0.98, name
    decoder = load_decoder(open_checkpoint(tmp_path / "out"), dtype="float32")
    pool = KVPool(layout_of(decoder.config), 3)
    ours = run_chunked(decoder, windows(**SMALL)[-1], [48], pool, range(3))
    assert (ours - logits[-1]).abs().max() < 1e-4


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_gptaq_aims_at_the_unquantized_outputs_of_the_same_tokens(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oracle: two models of transformers, and the quantized one decides the routing of both."""
    monkeypatch.setattr("qinfer.quant.blockwise.linear_dtype", lambda: torch.float32, raising=False)
    source = write_tiny(tmp_path / "source", family)
    monkeypatch.setattr("qinfer.quant.gptaq.TOKENS_PER_INPUT", 0)
    options = SMALL | {"condition_kv": "off", "threads": 1}
    quantize(source, tmp_path / "out", **options)
    quantized = load_oracle(write_dequantized(source, tmp_path / "out", tmp_path / "dense"))
    exact = load_oracle(source)
    names = expert_names(ModelConfig.from_dict(json.loads((source / "config.json").read_text())))
    share_routing(quantized, exact, names)
    inputs: Inputs = defaultdict(list)
    fulls: Inputs = defaultdict(list)
    for oracle, seen in ((quantized, inputs), (exact, fulls)):
        watch_linears(oracle, seen)
        watch_experts(oracle, names, seen)
    with torch.no_grad():
        for window in windows(**SMALL):
            quantized(torch.tensor([window]))
            exact(torch.tensor([window]))
    original = read_weights(source)
    plain = 0
    for name, weight in read_weights(tmp_path / "out").items():
        assert isinstance(weight, QuantizedWeight)
        before, x = original[name], torch.cat(inputs[name])
        assert isinstance(before, torch.Tensor)
        expected = solved_alone(before, x, weight.scheme, torch.cat(fulls[name]))
        assert float((expected.codes == weight.codes).float().mean()) > 0.97, name
        alone = solved_alone(before, x, weight.scheme)
        plain += float((alone.codes == weight.codes).float().mean()) < 0.97
    assert plain > 20  # so it is not GPTQ that was compared


def test_the_router_and_norms_stay_as_they_are(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "source", "mixtral")
    quantize(source, tmp_path / "out", **SMALL)
    before, after = (open_checkpoint(path) for path in (source, tmp_path / "out"))
    kept = [name for name in before.names() if after.has(name)]
    assert "model.layers.1.block_sparse_moe.gate.weight" in kept
    assert len(kept) == 2 * 3 + 3  # norms and router of each layer; embedding, final norm, head
    assert all(torch.equal(before.tensor(name), after.tensor(name)) for name in kept)


def test_an_expert_without_a_token_is_rounded_and_listed(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "source", "mixtral", num_local_experts=24, num_experts_per_tok=1)
    report = quantize(source, tmp_path / "out", **FEW)
    written, original = read_weights(tmp_path / "out"), read_weights(source)
    unseen = [row for row in report.rows if row.num_tokens == 0]
    assert unseen
    for row in unseen:
        assert row.fallback == "no calibration token went through this expert"
        weight, before = written[row.name], original[row.name]
        assert isinstance(weight, QuantizedWeight)
        assert isinstance(before, torch.Tensor)
        assert torch.equal(weight.codes, rtn.quantize(before, weight.scheme, name="x").codes)
    listed = report.to_dict()["under_seen_experts"]
    tokens = {item["name"]: item["num_tokens"] for item in listed["experts"]}
    assert listed["of"] == 48
    assert listed["count"] == len(tokens)
    for layer in range(2):
        names = [f"model.layers.{layer}.block_sparse_moe.experts.{index}" for index in range(24)]
        seen = {row.name: row.num_tokens for row in report.rows}
        assert sum(seen[f"{name}.w1"] for name in names) == 64
        assert all(tokens[name] == seen[f"{name}.w1"] for name in names if seen[f"{name}.w1"] < 64)


def test_the_number_of_threads_changes_no_byte(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "source", "qwen3_moe")
    for threads in (1, 3):
        quantize(source, tmp_path / f"out{threads}", **SMALL, threads=threads)
    one, three = (tmp_path / f"out{threads}" for threads in (1, 3))
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in three.iterdir())
    assert all((one / name).read_bytes() == (three / name).read_bytes() for name in names)


def test_rounding_needs_no_calibration(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "source", "qwen3_moe")
    report = quantize(source, tmp_path / "out", algorithm="rtn", group_size=32)
    assert report.under_seen_experts == {}
    assert all(
        isinstance(weight, QuantizedWeight) for weight in read_weights(tmp_path / "out").values()
    )


@pytest.mark.parametrize("override", [r"experts\.1\.w2=bits:8", r"layers.1.*experts\.3=skip"])
def test_an_expert_cannot_differ_from_its_siblings(tmp_path: Path, override: str) -> None:
    source = write_tiny(tmp_path / "source", "mixtral")
    with pytest.raises(ConfigError, match=r"experts\.0\.w\d would be int4 .* an override that"):
        quantize(source, dry_run=True, group_size=32, overrides=(override,))


def test_all_experts_of_a_layer_can_be_overridden(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "source", "mixtral")
    report = quantize(
        source,
        dry_run=True,
        group_size=32,
        overrides=(r"layers\.1\..*w2=bits:8", "layers.0.*experts=skip"),
    )
    schemes = {row.name.removeprefix("model.layers."): row.scheme for row in report.rows}
    assert schemes["1.block_sparse_moe.experts.3.w2"] == "int8 g32 sym"
    assert schemes["1.block_sparse_moe.experts.3.w1"] == "int4 g32 sym"
    assert schemes["0.block_sparse_moe.experts.2.w2"] is None


def row(name: str, num_tokens: int, scheme: str | None = "int4 g32 sym") -> ModuleRow:
    return ModuleRow(name, 64, 32, scheme, num_tokens=num_tokens)


def test_under_seen_counts_experts_not_linears() -> None:
    rows = [
        row("model.layers.0.self_attn.q_proj", 5),
        row("model.layers.0.mlp.experts.0.gate_proj", 63),
        row("model.layers.0.mlp.experts.0.up_proj", 63),
        row("model.layers.0.mlp.experts.0.down_proj", 63),
        row("model.layers.0.mlp.experts.1.gate_proj", 64),
        row("model.layers.0.mlp.experts.2.gate_proj", 0, None),
    ]
    assert under_seen(rows) == {
        "count": 1,
        "of": 2,
        "limit": "fewer calibration tokens than inputs",
        "experts": [{"name": "model.layers.0.mlp.experts.0", "num_tokens": 63, "inputs": 64}],
    }
