"""`qinfer convert` and `qinfer inspect` as a user types them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from support import bnb_files
from support.checkpoints import edit_json, load_oracle, write_tiny
from support.gguf_files import write_gguf
from support.gptq_reader import dequantize_checkpoint
from support.other_formats import compressed_settings, packed_tensors, put_weights
from support.quantized import quantize_directory

from qinfer import LLM, SamplingParams
from qinfer.checkpoint.reader import open_checkpoint
from qinfer.cli.main import cli
from qinfer.errors import (
    CheckpointError,
    ConfigError,
    QuantizationError,
    UnsupportedModelError,
)
from qinfer.schemes import WeightScheme


def run(*arguments: object) -> str:
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def inspect(path: Path, *options: str) -> dict:
    return json.loads(run("inspect", path, "--json", *options))


def test_convert_gguf_makes_a_directory_that_transformers_loads(
    tiny_llama: Path, tmp_path: Path
) -> None:
    file = write_gguf(tiny_llama, tmp_path / "m.gguf", "llama")
    assert run("convert", file, "-o", tmp_path / "out") == f"{tmp_path / 'out'}\n"
    logits = load_oracle(tmp_path / "out")(torch.arange(20)[None]).logits
    expected = load_oracle(tiny_llama, torch.bfloat16).float()(torch.arange(20)[None]).logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)


def test_convert_pickles_only_when_allowed(tmp_path: Path) -> None:
    """L03: the way out that the refusal names."""
    source = write_tiny(tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    torch.save(tensors, source / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"convert .* -o OUT --allow-pickle"):
        run("convert", source, "-o", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    run("convert", source, "-o", tmp_path / "out", "--allow-pickle")
    written = open_checkpoint(tmp_path / "out")
    assert all(torch.equal(written.tensor(name), tensors[name]) for name in tensors)
    assert (tmp_path / "out/tokenizer.json").is_file()


def test_convert_keeps_quantized_weights(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "source")
    quantize_directory(source, WeightScheme(4, 32))
    run("convert", source, "-o", tmp_path / "out")
    before, after = (dequantize_checkpoint(path) for path in (source, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all((before[name] == after[name]).all() for name in before)


def test_convert_to_another_format_prints_and_keeps_its_proof(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "source")
    quantize_directory(source, WeightScheme(4, 32))
    shown = run("convert", source, "-o", tmp_path / "ct", "--format", "compressed-tensors")
    assert shown == (
        "gptq to pack-quantized: 14 of 14 modules equal bit for bit, worst difference 0; 7 other "
        f"tensors unchanged\n{tmp_path / 'ct'}\n"
    )
    report = json.loads((tmp_path / "ct/convert_report.json").read_text())
    assert (report["kind"], report["equal"], report["left_out"]) == ("conversion", 14, [])
    assert inspect(tmp_path / "ct")["quantization"] == {
        "method": "compressed-tensors", "format": "pack-quantized",
        "modules": {"int4 g32 sym": 14}, "dense_linears": 0,
    }  # fmt: skip
    assert not (tmp_path / "ct/quantize_config.json").exists()
    arguments = ["-o", tmp_path / "v2", "--format", "gptq", "--gptq-version", "v2"]
    assert run("convert", tmp_path / "ct", *arguments).startswith("pack-quantized to gptq_v2: 14")
    run("convert", tmp_path / "ct", "-o", tmp_path / "copy")
    assert not (tmp_path / "copy/quantize_config.json").exists()
    assert inspect(tmp_path / "copy")["quantization"] == inspect(tmp_path / "ct")["quantization"]


def test_the_engine_answers_alike_from_either_format(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "source")
    quantize_directory(source, WeightScheme(4, 32))
    run("convert", source, "-o", tmp_path / "ct", "--format", "compressed-tensors")
    prompts = [{"prompt_token_ids": list(range(start, start + 12))} for start in (3, 90)]
    answers = []
    for path in (source, tmp_path / "ct"):
        llm = LLM(path, max_model_len=64)
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=8, logprobs=3))
        answers.append([(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs])
    assert answers[0] == answers[1]


def test_convert_says_why_a_format_cannot_carry_a_weight(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "source")
    quantize_directory(source, WeightScheme(4, 32))
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.g_idx"
    tensors[name] = tensors[name].flip(0)
    save_file(tensors, source / "model.safetensors")
    command = ["convert", str(source), "-o", str(tmp_path / "out"), "--format"]
    result = subprocess.run(
        [sys.executable, "-c", "from qinfer.cli.main import main; main()", *command,
         "compressed-tensors"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == QuantizationError.exit_code == 4
    assert "1 of 14 modules cannot be written" in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]
    with pytest.raises(ConfigError, match="--gptq-version is about --format gptq"):
        run("convert", source, "-o", tmp_path / "out", "--gptq-version", "v2")


def test_convert_refuses_an_existing_output_at_once(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    for source in (tiny_llama, tmp_path / "nothing.gguf"):
        with pytest.raises(ConfigError, match="exists already"):
            run("convert", source, "-o", tmp_path / "out")


def test_an_error_is_one_line_and_an_exit_code(tmp_path: Path) -> None:
    """Truncated shard: the file is named, the exit code is the class's, no traceback."""
    source = write_tiny(tmp_path / "source")
    file = source / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    result = subprocess.run(
        [sys.executable, "-c", "from qinfer.cli.main import main; main()",
         "convert", str(source), "-o", str(tmp_path / "out")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == CheckpointError.exit_code
    assert result.stderr.lstrip().startswith(f"error: {file} is truncated")
    assert "Traceback" not in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_inspect_a_plain_model(tiny_llama: Path) -> None:
    report = inspect(tiny_llama)
    parameters = sum(p.numel() for p in load_oracle(tiny_llama).parameters())
    assert (report["kind"], report["format_version"]) == ("inspection", 1)
    assert report["architecture"] == "LlamaForCausalLM"
    assert report["supported"] is True
    assert report["parameters"] == parameters
    assert report["bytes"] == 4 * parameters
    assert sum(part["parameters"] for part in report["parts"].values()) == parameters
    assert list(report["parts"]) == ["embedding", "attention", "mlp", "norm", "head"]
    assert report["dtypes"] == {"float32": 4 * parameters}
    assert report["quantization"] is None
    assert report["kv_cache"] is None
    assert report["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 4
    assert report["tokenizer"]["chat_template"] is True
    assert report["eos_token_ids"] == [257, 260]
    assert report["files"]["model.safetensors"] > 4 * parameters


def test_inspect_a_quantized_model(tmp_path: Path, tiny_llama: Path) -> None:
    path = write_tiny(tmp_path / "model")
    quantize_directory(path, WeightScheme(4, 32))
    entry = {"format_version": 1, "dtype": "int8", "granularity": "token_head"}
    edit_json(path / "config.json", qinfer_kv_cache=entry)
    report = inspect(path)
    assert report["parameters"] == inspect(tiny_llama)["parameters"]
    assert report["quantization"] == {
        "method": "gptq", "format": "gptq", "modules": {"int4 g32 sym": 14}, "dense_linears": 0,
    }  # fmt: skip
    # 4 bits, a float16 scale and a 4-bit zero point per 32 weights, 32 bits of g_idx per input.
    mlp = report["parts"]["mlp"]
    inputs = 2 * (64 + 64 + 128)
    assert mlp["bytes"] == mlp["parameters"] * (4 + 16 / 32 + 4 / 32) / 8 + 4 * inputs
    assert report["kv_cache"] == {"dtype": "int8", "granularity": "token_head"}
    assert report["kv_bytes_per_token"] == 2 * 2 * 2 * (16 + 2)
    table = run("inspect", path)
    for text in ("gptq: 14 x int4 g32 sym", "int8 recorded, 144 bytes per token", "size by part"):
        assert text in table


def test_inspect_tells_of_static_scales_of_the_cache(tmp_path: Path, caplog) -> None:
    """They are known by name, so that loading does not complain, and used by other engines."""
    path = write_tiny(tmp_path / "model")
    scheme = WeightScheme(4, 32)
    names = [f"model.layers.{i}.self_attn.{p}_scale" for i in (0, 1) for p in "kv"]
    kv_scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    put_weights(
        path, scheme, packed_tensors, compressed_settings(scheme) | {"kv_cache_scheme": kv_scheme},
        extra={name: torch.tensor([0.5]) for name in names},
    )  # fmt: skip
    assert inspect(path)["static_kv_scales"] == "fp8 per tensor"
    assert "scales for fp8 per tensor, for other engines" in " ".join(run("inspect", path).split())
    assert LLM(path, max_model_len=32).generate("ab", SamplingParams(max_tokens=2))
    assert "does not use" not in caplog.text


def test_inspect_tells_why_a_model_cannot_run(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "model")
    edit_json(path / "config.json", architectures=["MambaForCausalLM"], model_type="mamba")
    (path / "tokenizer.json").unlink()
    report = inspect(path)
    assert report["supported"] is False
    assert "llama" in report["refusal"]
    assert "tokenizer.json" in report["tokenizer"]["error"]
    assert "not runnable" in run("inspect", path)


def test_inspect_tells_the_types_of_a_gguf_file(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("QINFER_CACHE", str(tmp_path / "cache"))
    wide: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    source = write_tiny(tmp_path / "source", **wide)
    kinds = {"self_attn": Kind.Q4_K, "down_proj": Kind.Q6_K, "_proj": Kind.Q8_0}
    report = inspect(write_gguf(source, tmp_path / "m.gguf", "llama", by_name=kinds))
    assert report["parameters"] == inspect(source)["parameters"]
    assert report["quantization"] == {
        "method": "gguf",
        "format": "gguf",
        "modules": {"Q4_K (int4 g32 asym)": 8, "Q6_K": 2, "Q8_0 (int8 g32 sym)": 4},
        "dense_linears": 0,
    }
    assert report["parts"]["attention"]["bits_per_weight"] == 4.5
    assert report["parts"]["mlp"]["bits_per_weight"] == round((2 * 8.5 + 6.5625) / 3, 3)


def test_inspect_tells_a_model_of_bitsandbytes(tmp_path: Path, tiny_llama: Path) -> None:
    path = write_tiny(tmp_path / "model")
    bnb_files.quantize_directory(path, load_in_4bit=True, bnb_4bit_quant_type="nf4")
    report = inspect(path)
    assert report["parameters"] == inspect(tiny_llama)["parameters"]
    assert report["quantization"] == {
        "method": "bitsandbytes", "format": "nf4", "modules": {"nf4": 14}, "dense_linears": 0,
    }  # fmt: skip


def test_inspect_reads_a_gguf_file(tiny_llama: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("QINFER_CACHE", str(tmp_path / "cache"))
    file = write_gguf(tiny_llama, tmp_path / "m.gguf", "llama")
    assert inspect(file)["dtypes"].keys() == {"bfloat16"}
    other = write_gguf(
        tiny_llama, tmp_path / "other.gguf", "llama", extra={"general.architecture": "rwkv"}
    )
    with pytest.raises(UnsupportedModelError, match="'rwkv'"):
        run("inspect", other)


def test_inspect_looks_into_pickles_when_allowed(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    torch.save(tensors, path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickles only"):
        inspect(path)
    assert inspect(path, "--allow-pickle")["dtypes"].keys() == {"float32"}


def test_inspect_tells_how_many_experts_there_are(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "model", "qwen3_moe")
    assert inspect(path)["facts"]["experts"] == {
        "num_experts": 6,
        "num_experts_per_token": 3,
        "intermediate_size": 96,
        "norm_topk_prob": True,
        "sparse_layers": 1,
    }
    assert "6 of 96 in 1 layers, 3 per token" in run("inspect", path)
    assert inspect(write_tiny(tmp_path / "dense"))["facts"]["experts"] is None


def test_what_utf8_cannot_spell_is_kept_and_shown(tmp_path: Path) -> None:
    """Half a surrogate pair in config.json, and a folder whose name is no UTF-8."""
    source = write_tiny(tmp_path / "source").rename(tmp_path / os.fsdecode(b"source-\xff"))
    edit_json(source / "config.json", comment="\ud800 here")
    for command in (
        ["convert", str(source), "-o", str(tmp_path / "out")],
        ["inspect", str(source)],
    ):
        result = subprocess.run(
            [sys.executable, "-c", "from qinfer.cli.main import main; main()", *command],
            capture_output=True, text=True, check=False,
            env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"},
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
    assert r"source-\udcff" in result.stdout.replace("\n", "")
    written = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert written["comment"] == "\ud800 here"
