"""`quantize` on tiny checkpoints: what it computes, what it writes, what it refuses."""

import json
import shutil
from collections import Counter
from collections.abc import Mapping
from ctypes import CDLL
from ctypes.util import find_library
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import edit_json, load_oracle, write_tiny

from qinfer.checkpoint.reader import open_checkpoint
from qinfer.errors import (
    CheckpointError,
    ConfigError,
    NonFiniteError,
    QuantizationError,
    UnsupportedModelError,
)
from qinfer.formats.weight import QuantizedWeight
from qinfer.models.config import ModelConfig, linear_shapes
from qinfer.quant import block_run, blockwise, gptaq, gptq, hessian, rtn
from qinfer.quant import dense as dense_block
from qinfer.quant.calibration import load_calibration
from qinfer.quant.pipeline import quantize
from qinfer.quant.report import QuantProgress, QuantReport
from qinfer.quant.solver import SolverOptions
from qinfer.quant.stages import Stream

Inputs = dict[str, list[torch.Tensor]]
SMALL: dict[str, Any] = {"num_samples": 6, "seq_len": 48, "group_size": 32, "condition_kv": "off"}


def read_weights(path: Path) -> dict[str, Any]:
    """Read every decoder linear of a checkpoint."""
    checkpoint = open_checkpoint(path)
    shapes = linear_shapes(ModelConfig.from_dict(checkpoint.config))
    return {
        name: checkpoint.weight(name, in_features=i, out_features=o)
        for name, (i, o) in shapes.items()
    }


def dense(weight: Any) -> torch.Tensor:
    return weight.dequantize() if isinstance(weight, QuantizedWeight) else weight.float()


def windows() -> list[list[int]]:
    """Return the calibration windows of `SMALL` (the tiny tokenizer's ids are bytes)."""
    calibration = load_calibration(
        lambda text: list(text.encode()), path=None, num_samples=6, seq_len=48, max_position=128
    )
    return [list(window) for window in calibration.windows]


def same_files(one: Path, other: Path) -> bool:
    """Tell whether two directories hold the same bytes."""
    contents = [
        {path.name: path.read_bytes() for path in folder.iterdir()} for folder in (one, other)
    ]
    return contents[0] == contents[1]


def edit_tensor(path: Path, name: str, value: torch.Tensor) -> None:
    file = path / "model.safetensors"
    save_file(load_file(file) | {name: value}, file, metadata={"format": "pt"})


def copy_of(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target


@pytest.fixture(scope="module")
def quantized(
    tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, QuantReport]:
    out = tmp_path_factory.mktemp("quantized") / "out"
    return out, quantize(tiny_llama, out, **SMALL)


@pytest.mark.parametrize(("family", "act_order"), [("llama", True), ("qwen3", False)])
def test_every_module_is_solved_on_what_came_before_it_g15(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, act_order: bool
) -> None:
    """The oracle: transformers with all quantized weights, its inputs of every linear.

    What reaches a linear depends on the linears before it only, so these inputs are those of a
    truly sequential calibration, for q_proj of the first layer as for down_proj of the last.
    With plain GPTQ: the last bits of the inputs decide ties that descent would carry on to others.
    """
    plain = SolverOptions(scale_search="absmax", passes=0)
    monkeypatch.setattr(block_run, "solver_options", lambda _: plain)
    # What counts here is what reaches a linear, not how its products are rounded.
    monkeypatch.setattr(blockwise, "linear_dtype", lambda: torch.float32)
    monkeypatch.setattr(hessian, "sum_dtype", lambda: torch.float32)
    source = write_tiny(tmp_path / "source", family)
    quantize(source, tmp_path / "out", **SMALL, act_order=act_order, gptaq=False)
    written, original = read_weights(tmp_path / "out"), read_weights(source)
    inputs = inputs_of_linears(source, {name: dense(weight) for name, weight in written.items()})
    for name, weight in written.items():
        assert isinstance(weight, QuantizedWeight)
        x = torch.cat(inputs[name])
        expected = gptq.solve(dense(original[name]), 2 / len(x) * x.T @ x, weight.scheme)
        same = (expected.weight.codes == weight.codes).float().mean()
        assert float(same) > 0.99, name


@pytest.mark.parametrize("paired", [2, 6])
def test_gptaq_aims_at_the_outputs_of_the_unquantized_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, paired: int
) -> None:
    """The oracle: transformers with and without quantized weights, and the least-squares weight.

    The weight is that of the first `paired` samples; it is rounded for the inputs of all.
    """
    plain = SolverOptions(scale_search="absmax", passes=0)
    monkeypatch.setattr(block_run, "solver_options", lambda _: plain)
    monkeypatch.setattr(blockwise, "linear_dtype", lambda: torch.float32)
    monkeypatch.setattr(hessian, "sum_dtype", lambda: torch.float32)
    monkeypatch.setattr(gptaq, "TOKENS_PER_INPUT", 0)
    source = write_tiny(tmp_path / "source")
    quantize(source, tmp_path / "out", **SMALL, gptaq_samples=paired)
    written, original = read_weights(tmp_path / "out"), read_weights(source)
    inputs = inputs_of_linears(source, {name: dense(weight) for name, weight in written.items()})
    fulls = inputs_of_linears(source, {name: dense(original[name]) for name in written})
    moved = 0
    for name, weight in written.items():
        assert isinstance(weight, QuantizedWeight)
        x = torch.cat(inputs[name]).double()
        first, full = torch.cat(inputs[name][:paired]), torch.cat(fulls[name][:paired])
        H, W = 2 / len(x) * x.T @ x, dense(original[name])
        cross = (full - first).double().T @ first.double()
        square = first.double().T @ first.double()
        damped = square + 0.01 * square.diagonal().mean() * torch.eye(len(H))
        wanted = (W + W.double() @ cross @ torch.linalg.inv(damped)).float()
        # Scales are fitted to what is rounded, which is not the weight of the file any more.
        expected = gptq.solve(wanted, H.float(), weight.scheme).weight
        assert float((expected.codes == weight.codes).float().mean()) > 0.98, name
        plainly = gptq.solve(W, H.float(), weight.scheme).weight
        moved += int((plainly.codes != weight.codes).sum())
    assert moved > 500


def test_gptaq_is_left_out_where_tokens_are_too_few_and_that_is_said(
    tiny_llama: Path, quantized: tuple[Path, QuantReport], tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    quantize(tiny_llama, tmp_path / "off", **SMALL, gptaq=False)
    assert not caplog.text
    weights = (tmp_path / "off" / "model.safetensors").read_bytes()
    assert weights == (quantized[0] / "model.safetensors").read_bytes()
    quantize(tiny_llama, tmp_path / "on", **SMALL)
    assert (
        "GPTAQ (--gptaq) is left out for linears of 64, 128 inputs: the 288 tokens" in caplog.text
    )


def inputs_of_linears(source: Path, weights: Mapping[str, torch.Tensor]) -> Inputs:
    """Return what reaches every linear of transformers' model with other weights, by sample."""
    oracle = load_oracle(source)
    inputs: Inputs = {name: [] for name in weights}
    for name, weight in weights.items():
        module = oracle.get_submodule(name)
        module.weight.data = weight
        module.register_forward_pre_hook(
            lambda _, args, name=name: inputs[name].append(args[0].flatten(0, 1))
        )
    with torch.no_grad():
        for window in windows():
            oracle(torch.tensor([window]))
    return inputs


def test_beats_rounding_on_the_calibration_tokens_g14(
    tiny_llama: Path, quantized: tuple[Path, QuantReport], tmp_path: Path
) -> None:
    quantize(tiny_llama, tmp_path / "rtn", algorithm="rtn", group_size=32)
    losses = []
    truth = load_oracle(tiny_llama)
    for path in (quantized[0], tmp_path / "rtn"):
        model = load_oracle(tiny_llama)
        for name, weight in read_weights(path).items():
            model.get_submodule(name).weight.data = dense(weight)
        with torch.no_grad():
            losses.append(
                sum(
                    float((model(ids).logits - truth(ids).logits).square().sum())
                    for ids in torch.tensor(windows()).unsqueeze(1)
                )
            )
    assert losses[0] < 0.7 * losses[1]


def test_each_linear_runs_once_per_sample(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Counter[str] = Counter()
    original = dense_block.linear

    def counted(stream: Stream, name: str, x: torch.Tensor) -> torch.Tensor:
        calls[name] += 1
        return original(stream, name, x)

    monkeypatch.setattr(dense_block, "linear", counted)
    monkeypatch.setattr(gptaq, "TOKENS_PER_INPUT", 0)
    quantize(tiny_llama, tmp_path / "out", **SMALL, gptaq_samples=2)
    # Behind the last block nobody looks, so its down_proj need not run.
    assert calls.pop("mlp.down_proj") == 6 + 2
    assert set(calls.values()) == {(6 + 2) * 2}
    assert len(calls) == 6


def test_report_and_progress_g02_g14(
    tiny_llama: Path, tmp_path: Path, quantized: tuple[Path, QuantReport]
) -> None:
    out, report = quantized
    assert [row.num_tokens for row in report.rows] == [6 * 48] * 14
    assert all(row.error is not None and 0 < row.error < 0.02 for row in report.rows)
    assert {row.damp_percent for row in report.rows} == {gptq.DEFAULT_DAMP_PERCENT}
    assert report.peak_rss_bytes > 0
    kept = json.loads((out / "quantize_report.json").read_text())
    assert kept == json.loads(json.dumps(report.to_dict()))
    assert kept["fallback_modules"] == {"count": 0, "modules": []}
    assert kept["calibration"]["num_tokens"] == 6 * 48
    assert "seconds" not in json.dumps(kept)
    steps: list[QuantProgress] = []
    quantize(tiny_llama, tmp_path / "out", **SMALL, on_progress=steps.append)
    last = {step.stage: step for step in steps}
    assert {name: (step.done, step.total) for name, step in last.items()} == {
        "calibrate": (48, 48),
        "quantize": (14, 14),
    }
    assert "layers.1.mlp.down_proj error 0.0" in last["quantize"].note


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_equal_inputs_give_equal_bytes_whatever_the_threads(
    tiny_llama: Path, quantized: tuple[Path, QuantReport], tmp_path: Path, threads: int
) -> None:
    before = torch.get_num_threads()
    quantize(tiny_llama, tmp_path / "again", **SMALL, threads=threads)
    assert torch.get_num_threads() == before
    assert same_files(quantized[0], tmp_path / "again")


def test_companions_settings_and_kv_record_f04(
    tiny_llama: Path, quantized: tuple[Path, QuantReport], tmp_path: Path
) -> None:
    out, _ = quantized
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (out / name).read_bytes() == (tiny_llama / name).read_bytes()
    config = json.loads((out / "config.json").read_text())
    source = json.loads((tiny_llama / "config.json").read_text())
    settings = json.loads((out / "quantize_config.json").read_text())
    assert config.pop("quantization_config") == settings
    assert config.pop("qinfer_kv_cache") == {
        "format_version": 1,
        "dtype": "int8",
        "granularity": "token_head",
    }
    assert config == source
    assert str(open_checkpoint(out).kv_scheme) == "int8"
    assert (settings["bits"], settings["format"], settings["desc_act"]) == (4, "gptq", False)
    quantize(tiny_llama, tmp_path / "none", algorithm="rtn", kv_cache_dtype="none")
    assert open_checkpoint(tmp_path / "none").kv_scheme is None


@pytest.mark.parametrize(
    "options",
    [
        {"weights": "int8", "group_size": -1},
        {"weights": "int4", "group_size": -1},
        {"asym": True},
        {"act_order": False, "asym": True, "weights": "int8"},
    ],
)
def test_reload_equals_what_was_solved_g12_g13(
    tiny_llama: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    report = quantize(tiny_llama, tmp_path / "out", **(SMALL | options))
    settings = json.loads((tmp_path / "out" / "quantize_config.json").read_text())
    assert settings["desc_act"] is False
    assert settings["format"] == ("gptq_v2" if options.get("asym") else "gptq")
    original = read_weights(tiny_llama)
    for row in report.rows:
        weight = read_weights(tmp_path / "out")[row.name]
        assert isinstance(weight, QuantizedWeight)
        assert weight.group_index is None
        assert (weight.zeros is not None) == bool(options.get("asym"))
        W = dense(original[row.name])
        step = weight.scales.float().amax(1, keepdim=True)
        # Half of the range: outliers may be clipped, and columns make up for each other.
        assert bool(((weight.dequantize() - W).abs() < 2 ** (weight.scheme.bits - 1) * step).all())


def test_rounding_is_exactly_rounding(tiny_llama: Path, tmp_path: Path) -> None:
    report = quantize(tiny_llama, tmp_path / "out", algorithm="rtn", group_size=32)
    original = read_weights(tiny_llama)
    for name, weight in read_weights(tmp_path / "out").items():
        assert isinstance(weight, QuantizedWeight)
        expected = rtn.quantize(dense(original[name]), weight.scheme)
        assert torch.equal(weight.codes, expected.codes)
        assert torch.equal(weight.scales, expected.scales)
    assert report.calibration is None
    assert report.to_dict()["error_of"] == "weights"


def test_tied_embedding_is_kept_once_g18(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "source", tie_word_embeddings=True, dtype=torch.bfloat16)
    embedding = load_file(source / "model.safetensors")["model.embed_tokens.weight"]
    edit_tensor(source, "lm_head.weight", embedding.clone())
    report = quantize(source, tmp_path / "out", **SMALL)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert "lm_head.weight" not in tensors
    assert torch.equal(tensors["model.embed_tokens.weight"], embedding)
    assert tensors["model.norm.weight"].dtype == torch.bfloat16
    assert sum(tensor.nbytes for tensor in tensors.values()) == report.sizes.output_bytes
    assert quantize(source, dry_run=True, **SMALL).sizes == report.sizes


def test_mixed_settings_in_one_fused_group_g19(tiny_llama: Path, tmp_path: Path) -> None:
    overrides = ("q_proj=bits:8", r"layers\.1\.self_attn\.(k|v)_proj=skip")
    report = quantize(tiny_llama, tmp_path / "out", **SMALL, overrides=overrides)
    written, original = read_weights(tmp_path / "out"), read_weights(tiny_llama)
    bits = {
        name: weight.scheme.bits if isinstance(weight, QuantizedWeight) else None
        for name, weight in written.items()
    }
    assert {bits[f"model.layers.{i}.self_attn.q_proj"] for i in (0, 1)} == {8}
    assert bits["model.layers.0.self_attn.k_proj"] == 4
    for name in ("k_proj", "v_proj"):
        full = f"model.layers.1.self_attn.{name}"
        assert bits[full] is None
        assert torch.equal(dense(written[full]), dense(original[full]))
    assert [row.name[-6:] for row in report.skipped_modules] == ["k_proj", "v_proj"]


def test_blocks_behind_the_last_module_are_not_run(tiny_llama: Path, tmp_path: Path) -> None:
    steps: list[QuantProgress] = []
    overrides = (r"layers\.1\.=skip",)
    quantize(tiny_llama, tmp_path / "out", **SMALL, overrides=overrides, on_progress=steps.append)
    assert sum(step.stage == "calibrate" for step in steps) == 6 * 4
    assert all(step.total == 6 * 4 for step in steps if step.stage == "calibrate")
    assert len(read_weights(tmp_path / "out")) == 14


def test_misfits_before_calibration_or_skipped_g10(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "source", intermediate_size=80)
    absent = tmp_path / "absent.txt"  # never read: the plan comes first
    with pytest.raises(ConfigError, match=r"2 of 14 modules.*\n.*down_proj: in_features 80"):
        quantize(source, tmp_path / "out", group_size=32, calibration=absent)
    report = quantize(source, tmp_path / "out", **SMALL, on_misfit="skip")
    assert [row.name[-9:] for row in report.skipped_modules] == ["down_proj"] * 2
    assert report.sizes.skip_cost_bytes > 0
    settings = open_checkpoint(tmp_path / "out").quantization
    assert settings is not None
    assert settings.scheme_for("model.layers.1.mlp.down_proj") is None
    read_weights(tmp_path / "out")


def test_fallbacks_are_listed_and_strict_refuses_them_g02(tiny_llama: Path, tmp_path: Path) -> None:
    source = copy_of(tiny_llama, tmp_path / "source")
    edit_tensor(source, "model.layers.1.self_attn.v_proj.weight", torch.zeros(32, 64))
    report = quantize(source, tmp_path / "out", **SMALL)
    assert [row.name for row in report.fallback_modules] == ["model.layers.1.self_attn.o_proj"]
    kept = json.loads((tmp_path / "out" / "quantize_report.json").read_text())
    assert kept["fallback_modules"] == {
        "count": 1,
        "modules": [
            {
                "name": "model.layers.1.self_attn.o_proj",
                "reason": "all calibration inputs are zero",
            }
        ],
    }
    v_proj = read_weights(tmp_path / "out")["model.layers.1.self_attn.v_proj"]
    assert not dense(v_proj).any()
    with pytest.raises(QuantizationError, match=r"1 of 14 modules fell back.*\n.*o_proj: all"):
        quantize(source, tmp_path / "strict", **SMALL, strict=True)
    assert [path.name for path in tmp_path.glob("strict*")] == ["strict.partial"]
    finished = quantize(source, tmp_path / "strict", **SMALL)
    assert finished.resumed_at == 2  # nothing was left to do
    assert same_files(tmp_path / "strict", tmp_path / "out")


def test_non_finite_activations_leave_finished_blocks_behind_g05(
    tiny_llama: Path, tmp_path: Path
) -> None:
    source = copy_of(tiny_llama, tmp_path / "source")
    embedding = load_file(source / "model.safetensors")["model.embed_tokens.weight"]
    third = windows()[3][5]
    first = next(i for i, window in enumerate(windows()) if third in window)
    embedding[third] = float("inf")
    edit_tensor(source, "model.embed_tokens.weight", embedding)
    with pytest.raises(NonFiniteError, match=rf"model\.embed_tokens.*sample {first}, token"):
        quantize(source, tmp_path / "out", **SMALL)
    assert not list(tmp_path.glob("out*"))  # no block was finished
    source = copy_of(tiny_llama, tmp_path / "other")
    norm = "model.layers.1.post_attention_layernorm.weight"
    edit_tensor(source, norm, torch.full((64,), 1e17))
    edit_tensor(source, "model.layers.1.mlp.up_proj.weight", torch.full((128, 64), 1e5))
    with pytest.raises(NonFiniteError, match=r"layers\.1\.mlp\.down_proj.*sample 0, token"):
        quantize(source, tmp_path / "out", **SMALL)
    assert [path.name for path in tmp_path.glob("out*")] == ["out.partial"]


def test_scale_overflow_names_the_module_g07(tiny_llama: Path, tmp_path: Path) -> None:
    source = copy_of(tiny_llama, tmp_path / "source")
    edit_tensor(source, "model.layers.0.mlp.up_proj.weight", torch.full((128, 64), 1e7))
    with pytest.raises(QuantizationError, match=r"layers\.0\.mlp\.up_proj.*exceeds float16"):
        quantize(source, tmp_path / "out", algorithm="rtn", group_size=32)
    assert not list(tmp_path.glob("out*"))


def test_quantized_models_are_refused_g22(
    quantized: tuple[Path, QuantReport], tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match="quantized already"):
        quantize(quantized[0], tmp_path / "out")


def test_existing_output_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match="exists already"):
        quantize(tmp_path / "no such model", tmp_path / "out")
    with pytest.raises(ConfigError, match="output directory is needed"):
        quantize(tmp_path / "no such model")


def test_unknown_options_and_architectures(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="group"):
        quantize(tiny_llama, tmp_path / "out", group=32)
    source = copy_of(tiny_llama, tmp_path / "source")
    edit_json(source / "config.json", architectures=["OtherForCausalLM"], model_type="other")
    with pytest.raises(UnsupportedModelError):
        quantize(source, tmp_path / "out")


def test_dry_run_writes_nothing(tiny_llama: Path, tmp_path: Path) -> None:
    report = quantize(tiny_llama, tmp_path / "out", dry_run=True, **SMALL)
    assert report.out is None
    assert {row.scheme for row in report.rows} == {"int4 g32 sym"}
    assert {row.error for row in report.rows} == {None}
    assert list(tmp_path.iterdir()) == []


def test_memory_does_not_grow_from_block_to_block_g21(tmp_path: Path) -> None:
    statm = Path("/proc/self/statm")
    if not statm.exists() or find_library("c") is None:
        pytest.skip("resident memory is read from /proc")
    libc = CDLL(find_library("c"))
    source = write_tiny(
        tmp_path / "deep",
        hidden_size=256,
        head_dim=64,
        intermediate_size=1024,
        num_hidden_layers=10,
        dtype=torch.bfloat16,
    )
    seen: list[int] = []

    def watch(step: QuantProgress) -> None:
        if "down_proj" in step.note:
            libc.malloc_trim(0)  # what the allocator keeps for later is no growth
            seen.append(int(statm.read_text().split()[1]) * 4096)

    quantize(source, tmp_path / "out", num_samples=4, seq_len=64, on_progress=watch)
    assert len(seen) == 10
    block_bytes = 4 * (3 * 256 * 1024 + 256 * 256 * 2 + 256 * 128 * 2)  # float32
    # Only the finished tensors of the shard add up: an eighth of a float32 block each.
    assert (seen[-1] - seen[1]) / 8 < block_bytes / 4
