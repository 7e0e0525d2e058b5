import json
import re
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import edit_json, write_tiny
from support.gguf_files import write_gguf
from support.gptq_reader import dequantize_checkpoint
from support.other_formats import (
    awq_settings,
    awq_tensors,
    compressed_settings,
    int8_tensors,
    packed_tensors,
    put_weights,
)
from support.quantized import quantize_directory

from qinfer.checkpoint.convert import convert_format
from qinfer.checkpoint.reader import Checkpoint, open_checkpoint
from qinfer.checkpoint.transcode import _compare
from qinfer.checkpoint.writer import CheckpointWriter
from qinfer.errors import CheckpointError, ConfigError, QuantizationError
from qinfer.formats.weight import QuantizedWeight
from qinfer.schemes import WeightScheme

Q_PROJ = "model.layers.0.self_attn.q_proj"


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    """Dequantize every quantized linear of a tiny checkpoint."""
    checkpoint = open_checkpoint(path)
    names = {name.rpartition(".")[0] for name in checkpoint.names() if "_proj." in name}
    return {name: weight_of(checkpoint, name).dequantize() for name in names}


def weight_of(checkpoint: Checkpoint, name: str) -> QuantizedWeight:
    sizes = {"q_proj": (64, 64), "o_proj": (64, 64), "k_proj": (32, 64), "v_proj": (32, 64),
             "gate_proj": (128, 64), "up_proj": (128, 64), "down_proj": (64, 128)}  # fmt: skip
    out, in_ = sizes[name.rpartition(".")[2]]
    weight = checkpoint.weight(name, in_features=in_, out_features=out)
    assert isinstance(weight, QuantizedWeight)
    return weight


def make(path: Path, kind: str, scheme: WeightScheme, **options) -> dict[str, torch.Tensor]:
    """Write a tiny model in a format; returns its dequantized linears."""
    write_tiny(path)
    if kind in {"gptq", "gptq_v2"}:
        quantize_directory(path, scheme, version="gptq" if kind == "gptq" else "gptq_v2")
        return {k: torch.from_numpy(v) for k, v in dequantize_checkpoint(path).items()}
    to_tensors, settings = {
        "awq": (awq_tensors, awq_settings(scheme)),
        "packed": (packed_tensors, compressed_settings(scheme)),
        "int8": (int8_tensors, compressed_settings(scheme, "int-quantized")),
    }[kind]
    weights = put_weights(path, scheme, to_tensors, settings, **options)
    return {name: weight.dequantize() for name, weight in weights.items()}


@pytest.mark.parametrize(
    ("kind", "scheme"),
    [
        ("gptq", WeightScheme(4, 32)),
        ("gptq_v2", WeightScheme(3, 32)),
        ("packed", WeightScheme(2, 16)),
        ("packed", WeightScheme(8, None, symmetric=False)),
        ("packed", WeightScheme(3, 32, symmetric=False)),
        ("int8", WeightScheme(8, None)),
        ("awq", WeightScheme(4, 32, symmetric=False)),
    ],
)
@pytest.mark.parametrize(
    ("name", "version"), [("gptq", "gptq_v2"), ("gptq", None), ("compressed-tensors", None)]
)
def test_every_format_to_every_other(kind, scheme, name, version, tmp_path: Path) -> None:
    before = make(tmp_path / "a", kind, scheme)
    conversion = convert_format(tmp_path / "a", tmp_path / "b", name=name, version=version)
    after = weights_of(tmp_path / "b")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    report = json.loads((tmp_path / "b" / "convert_report.json").read_text())
    label = {"int8": "int-quantized"}.get(kind, "pack-quantized")
    if name == "gptq":
        label = version or ("gptq" if scheme.symmetric else "gptq_v2")
    assert report == conversion.to_dict()
    assert report["target_format"] == label
    assert (report["modules"], report["equal"], report["worst_difference"]) == (14, 14, 0.0)
    settings = json.loads((tmp_path / "b/config.json").read_text())["quantization_config"]
    assert settings["quant_method"] == name
    assert (tmp_path / "b/quantize_config.json").exists() == (name == "gptq")
    if name == "gptq":  # an independent reader agrees
        literal = dequantize_checkpoint(tmp_path / "b")
        assert all(torch.equal(before[key], torch.from_numpy(literal[key])) for key in before)


def test_there_and_back_gives_the_same_tensors(tmp_path: Path) -> None:
    make(tmp_path / "a", "gptq", WeightScheme(4, 32))
    convert_format(tmp_path / "a", tmp_path / "b", name="compressed-tensors")
    convert_format(tmp_path / "b", tmp_path / "c", name="gptq", version="gptq")
    first, last = (load_file(tmp_path / part / "model.safetensors") for part in "ac")
    assert first.keys() == last.keys()
    assert all(torch.equal(first[key], last[key]) for key in first)
    assert (tmp_path / "c/tokenizer.json").is_file()


def test_mixed_schemes_and_skipped_modules_stay_what_they_are(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "a")
    dense = load_file(path / "model.safetensors")
    quantize_directory(path, WeightScheme(4, 32))
    eight = load_file(write_eight(tmp_path / "eight") / "model.safetensors")
    tensors = load_file(path / "model.safetensors")
    tensors |= {key: value for key, value in eight.items() if ".v_proj." in key}
    for key in [key for key in tensors if ".1.mlp.up_proj" in key]:
        del tensors[key]
    skipped = "model.layers.1.mlp.up_proj"
    tensors[f"{skipped}.weight"] = dense[f"{skipped}.weight"]
    save_file(tensors, path / "model.safetensors")
    dynamic = {r"-:.*1\.mlp\.up_proj": {}, r"+:.*v_proj": {"bits": 8, "group_size": -1}}
    settings = json.loads((path / "quantize_config.json").read_text()) | {"dynamic": dynamic}
    edit_json(path / "config.json", quantization_config=settings)
    edit_json(path / "quantize_config.json", dynamic=dynamic)

    convert_format(path, tmp_path / "b", name="compressed-tensors")
    written = json.loads((tmp_path / "b/config.json").read_text())["quantization_config"]
    groups = written["config_groups"]
    assert groups["group_0"]["targets"] == ["Linear"]
    assert groups["group_1"]["targets"] == [f"model.layers.{i}.self_attn.v_proj" for i in (0, 1)]
    assert groups["group_1"]["weights"]["num_bits"] == 8
    assert set(written["ignore"]) == {"lm_head", skipped}

    convert_format(tmp_path / "b", tmp_path / "c", name="gptq")
    written = json.loads((tmp_path / "c/config.json").read_text())["quantization_config"]
    left_out = [key for key in written["dynamic"] if key.startswith("-:")]
    assert [key for key in left_out if re.match(key.removeprefix("-:"), skipped)] == left_out
    assert len(left_out) == 1  # other engines build a quantized linear for what is not named
    assert written["lm_head"] is False
    for part in ("b", "c"):
        checkpoint = open_checkpoint(tmp_path / part)
        assert not checkpoint.is_quantized(skipped)
        assert not checkpoint.is_quantized("lm_head")
        assert checkpoint.quantization is not None
        v_proj = checkpoint.quantization.scheme_for("model.layers.1.self_attn.v_proj")
        assert v_proj == WeightScheme(8, None)
        first = weight_of(open_checkpoint(path), "model.layers.1.self_attn.v_proj")
        last = weight_of(checkpoint, "model.layers.1.self_attn.v_proj")
        assert torch.equal(first.dequantize(), last.dequantize())


def test_bfloat16_scales_that_float16_holds_move_both_ways(tmp_path: Path) -> None:
    before = make(tmp_path / "a", "packed", WeightScheme(4, 32), dtype=torch.bfloat16)
    convert_format(tmp_path / "a", tmp_path / "b", name="gptq")
    convert_format(tmp_path / "b", tmp_path / "c", name="compressed-tensors")
    scales = {part: load_file(tmp_path / part / "model.safetensors") for part in "abc"}
    assert scales["a"][f"{Q_PROJ}.weight_scale"].dtype == torch.bfloat16
    assert scales["b"][f"{Q_PROJ}.scales"].dtype == torch.float16
    assert scales["c"][f"{Q_PROJ}.weight_scale"].dtype == torch.float16
    for part in ("b", "c"):
        after = weights_of(tmp_path / part)
        assert all(torch.equal(before[key], after[key]) for key in before)


def bnb_directory(path: Path, settings: dict, parts: dict[str, torch.Tensor]) -> Path:
    """Write a tiny model whose first q_proj is bitsandbytes'."""
    write_tiny(path)
    tensors = load_file(path / "model.safetensors")
    tensors |= {f"{Q_PROJ}.{part}": tensor for part, tensor in parts.items()}
    save_file(tensors, path / "model.safetensors")
    edit_json(path / "config.json", quantization_config={"quant_method": "bitsandbytes"} | settings)
    return path


def test_int8_of_bitsandbytes_moves_over_where_float32_scales_do(tmp_path: Path) -> None:
    codes = torch.randint(-127, 128, (64, 64), dtype=torch.int8)
    parts = {"weight": codes, "SCB": torch.rand(64) + 0.1}
    source = bnb_directory(tmp_path / "a", {"load_in_8bit": True}, parts)
    assert convert_format(source, tmp_path / "b", name="compressed-tensors").equal == 1
    before, after = (weight_of(open_checkpoint(tmp_path / part), Q_PROJ) for part in "ab")
    assert torch.equal(before.dequantize(), after.dequantize())
    with pytest.raises(QuantizationError, match="float32 scales are not exact in float16"):
        convert_format(source, tmp_path / "c", name="gptq")


def test_places_in_a_table_of_values_are_refused(tmp_path: Path) -> None:
    parts = {
        "weight": torch.zeros(2048, 1, dtype=torch.uint8),
        "weight.absmax": torch.ones(64),
        "weight.quant_map": torch.linspace(-1, 1, 16),
    }
    settings = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    source = bnb_directory(tmp_path / "a", settings, parts)
    with pytest.raises(QuantizationError, match=r"stored as nf4, codes that are places in a table"):
        convert_format(source, tmp_path / "b", name="compressed-tensors")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_tied_head_is_ignored_by_name(tmp_path: Path) -> None:
    """It has no tensor, but other engines build a linear for it."""
    path = write_tiny(tmp_path / "a", tie_word_embeddings=True)
    quantize_directory(path, WeightScheme(4, 32))
    assert not open_checkpoint(path).has("lm_head.weight")
    convert_format(path, tmp_path / "b", name="compressed-tensors")
    written = json.loads((tmp_path / "b/config.json").read_text())["quantization_config"]
    assert written["ignore"] == ["lm_head"]


def write_eight(path: Path) -> Path:
    quantize_directory(write_tiny(path), WeightScheme(8, None))
    return path


def test_scattered_groups_stay_gptq(tmp_path: Path) -> None:
    """g_idx: kept between the variants of GPTQ, refused by compressed-tensors."""
    make(tmp_path / "a", "gptq", WeightScheme(4, 32))
    file = tmp_path / "a/model.safetensors"
    tensors = load_file(file)
    tensors[f"{Q_PROJ}.g_idx"] = tensors[f"{Q_PROJ}.g_idx"].flip(0)
    save_file(tensors, file)
    convert_format(tmp_path / "a", tmp_path / "b", name="gptq", version="gptq_v2")
    assert json.loads((tmp_path / "b/quantize_config.json").read_text())["desc_act"] is True
    first, last = (weight_of(open_checkpoint(tmp_path / part), Q_PROJ) for part in "ab")
    assert last.group_index is not None
    assert torch.equal(first.dequantize(), last.dequantize())
    with pytest.raises(QuantizationError, match=rf"1 of 14 modules(.|\n)*{Q_PROJ}: its groups are"):
        convert_format(tmp_path / "a", tmp_path / "c", name="compressed-tensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.parametrize(
    ("scheme", "dtype", "version", "message"),
    [
        (WeightScheme(4, 32), torch.bfloat16, None, "bfloat16 scales are not exact in float16"),
        (WeightScheme(3, 32, symmetric=False), torch.float16, "gptq", "written in two ways"),
        (WeightScheme(4, 128), torch.float16, None, "not a multiple of group size 128"),
    ],
)
def test_what_gptq_cannot_carry_is_refused_before_anything_is_written(
    scheme, dtype, version, message, tmp_path: Path
) -> None:
    make(tmp_path / "a", "packed", scheme, dtype=dtype)
    if dtype == torch.bfloat16:  # the random scales use few bits; these are too small for float16
        file = tmp_path / "a/model.safetensors"
        tensors = load_file(file)
        save_file({k: t * 2**-20 if "scale" in k else t for k, t in tensors.items()}, file)
    with pytest.raises(QuantizationError, match=rf"nothing was written(.|\n)*{message}"):
        convert_format(tmp_path / "a", tmp_path / "b", name="gptq", version=version)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


def test_a_zero_point_of_zero_is_refused_by_v1_and_kept_by_v2(tmp_path: Path) -> None:
    make(tmp_path / "a", "awq", WeightScheme(4, 32, symmetric=False))
    file = tmp_path / "a/model.safetensors"
    tensors = load_file(file)
    tensors[f"{Q_PROJ}.qzeros"][0, 0] = 0
    save_file(tensors, file)
    with pytest.raises(QuantizationError, match="a zero point is 0"):
        convert_format(tmp_path / "a", tmp_path / "b", name="gptq", version="gptq")
    convert_format(tmp_path / "a", tmp_path / "b", name="gptq")
    zeros = weight_of(open_checkpoint(tmp_path / "b"), Q_PROJ).zeros
    assert zeros is not None
    assert zeros[:8, 0].tolist() == [-8] * 8


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
@pytest.mark.parametrize("name", ["gptq", "compressed-tensors"])
def test_codes_of_gguf_blocks_move_over(kind: str, name: str, tiny_llama: Path, tmp_path) -> None:
    quant = gguf.GGMLQuantizationType[kind]
    file = write_gguf(tiny_llama, tmp_path / "m.gguf", "llama", quant=quant)
    conversion = convert_format(file, tmp_path / "b", name=name)
    assert conversion.source_format == "gguf"
    assert conversion.equal == conversion.modules == 14
    after = weights_of(tmp_path / "b")
    library = {t.name: t for t in gguf.GGUFReader(file).tensors}
    for mine, theirs in (("mlp.up_proj", "ffn_up"), ("self_attn.v_proj", "attn_v")):
        tensor = library[f"blk.1.{theirs}.weight"]
        expected = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        assert torch.equal(after[f"model.layers.1.{mine}"], expected)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "m.gguf"]


def test_offsets_of_gguf_blocks_are_refused(tiny_llama: Path, tmp_path: Path) -> None:
    quant = gguf.GGMLQuantizationType.Q4_1
    file = write_gguf(tiny_llama, tmp_path / "m.gguf", "llama", quant=quant)
    with pytest.raises(QuantizationError, match=r"14 of 14 modules(.|\n)*real offsets"):
        convert_format(file, tmp_path / "b", name="gptq")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_static_scales_of_the_cache_stay_where_the_settings_have_room(tmp_path: Path) -> None:
    write_tiny(tmp_path / "a")
    scheme = WeightScheme(4, 32)
    names = [f"model.layers.{i}.self_attn.{p}_scale" for i in (0, 1) for p in "kv"]
    kv_scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    settings = compressed_settings(scheme) | {"kv_cache_scheme": kv_scheme}
    put_weights(
        tmp_path / "a", scheme, packed_tensors, settings,
        extra={name: torch.tensor([0.5]) for name in names},
    )  # fmt: skip
    convert_format(tmp_path / "a", tmp_path / "b", name="compressed-tensors")
    kept = json.loads((tmp_path / "b/config.json").read_text())["quantization_config"]
    assert kept["kv_cache_scheme"] == kv_scheme
    assert all(open_checkpoint(tmp_path / "b").has(name) for name in names)
    conversion = convert_format(tmp_path / "a", tmp_path / "c", name="gptq")
    assert conversion.left_out == tuple(sorted(names))
    assert not any(open_checkpoint(tmp_path / "c").has(name) for name in names)


def test_a_model_that_is_not_quantized_and_an_output_that_exists(tmp_path: Path) -> None:
    write_tiny(tmp_path / "a")
    with pytest.raises(ConfigError, match="no quantized weights"):
        convert_format(tmp_path / "a", tmp_path / "b", name="gptq")
    make(tmp_path / "q", "gptq", WeightScheme(4, 32))
    with pytest.raises(ConfigError, match="exists already"):
        convert_format(tmp_path / "q", tmp_path / "a", name="gptq")
    with pytest.raises(ConfigError, match="none of format compressed-tensors"):
        convert_format(tmp_path / "q", tmp_path / "b", name="compressed-tensors", version="gptq")


@pytest.mark.parametrize("damage", ["weight", "other"])
def test_a_result_that_differs_is_not_kept(damage: str, tmp_path: Path, monkeypatch) -> None:
    """The proof can fail: one code, or one value of another tensor, changed while writing."""
    make(tmp_path / "a", "gptq", WeightScheme(4, 32))
    add = CheckpointWriter.add
    target = f"{Q_PROJ}.weight_packed" if damage == "weight" else "model.norm.weight"

    def spoil(self, name: str, tensor: torch.Tensor) -> None:
        if name == target:
            tensor = tensor.clone()
            tensor.view(torch.int32).flatten()[0] ^= 1
        add(self, name, tensor)

    monkeypatch.setattr(CheckpointWriter, "add", spoil)
    count = (1, 0) if damage == "weight" else (0, 1)
    with pytest.raises(QuantizationError, match="{} of 14 modules and {} other".format(*count)):
        convert_format(tmp_path / "a", tmp_path / "b", name="compressed-tensors")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_damaged_source_leaves_nothing(tmp_path: Path) -> None:
    make(tmp_path / "a", "gptq", WeightScheme(4, 32))
    tensors = load_file(tmp_path / "a/model.safetensors")
    tensors[f"{Q_PROJ}.scales"] = tensors[f"{Q_PROJ}.scales"][:1].contiguous()
    save_file(tensors, tmp_path / "a/model.safetensors")
    with pytest.raises(CheckpointError, match=r"q_proj\.scales has shape"):
        convert_format(tmp_path / "a", tmp_path / "b", name="compressed-tensors")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize(
    ("shape", "message"),
    [([64, 64, 1], r"weight_shape tells of shape \(64, 64, 1\)"),
     ([2**40, 2**40], r"weight_packed has shape \(64, 8\)"),
     ([-64, 64], r"weight_shape tells of shape \(-64, 64\)")],
)  # fmt: skip
def test_a_damaged_shape_is_refused(shape: list[int], message: str, tmp_path: Path) -> None:
    make(tmp_path / "a", "packed", WeightScheme(4, 32))
    tensors = load_file(tmp_path / "a/model.safetensors")
    tensors[f"{Q_PROJ}.weight_shape"] = torch.tensor(shape)
    save_file(tensors, tmp_path / "a/model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        convert_format(tmp_path / "a", tmp_path / "b", name="gptq")


def test_scales_of_static_inputs_are_left_out_by_name(tmp_path: Path) -> None:
    make(tmp_path / "a", "int8", WeightScheme(8, None))
    tensors = load_file(tmp_path / "a/model.safetensors")
    extra = {f"{Q_PROJ}.input_scale": torch.ones(1), f"{Q_PROJ}.input_zero_point": torch.zeros(1)}
    save_file(tensors | extra, tmp_path / "a/model.safetensors")
    conversion = convert_format(tmp_path / "a", tmp_path / "b", name="compressed-tensors")
    assert conversion.left_out == tuple(extra)


def test_a_cache_scheme_that_cannot_be_read_is_not_passed_on(tmp_path: Path) -> None:
    scheme = WeightScheme(4, 32)
    settings = compressed_settings(scheme) | {"kv_cache_scheme": "fp8"}
    put_weights(write_tiny(tmp_path / "a"), scheme, packed_tensors, settings)
    with pytest.raises(CheckpointError, match="kv_cache_scheme is 'fp8'"):
        convert_format(tmp_path / "a", tmp_path / "b", name="compressed-tensors")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_an_output_that_cannot_be_made(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    quant = gguf.GGMLQuantizationType.Q8_0
    source = write_gguf(tiny_llama, tmp_path / "m.gguf", "llama", quant=quant)
    with pytest.raises(CheckpointError, match=r"file cannot be written: File exists"):
        convert_format(source, tmp_path / "file" / "out", name="gptq")


def test_progress_tells_the_three_passes(tmp_path: Path) -> None:
    make(tmp_path / "a", "gptq", WeightScheme(4, 32))
    seen: list[tuple[str, int, int]] = []
    convert_format(
        tmp_path / "a", tmp_path / "b", name="gptq", on_progress=lambda *step: seen.append(step)
    )
    assert seen == [(stage, i, 14) for stage in ("check", "write", "prove") for i in range(1, 15)]


def test_bits_are_compared_not_values() -> None:
    weight = QuantizedWeight(
        torch.zeros(2, 4, dtype=torch.int8), torch.ones(2, 1).half(), WeightScheme(4, None)
    )
    negative = replace(weight, scales=-weight.scales)  # -0.0
    assert _compare(weight, weight) == (0.0, True)
    assert _compare(weight, negative)[1] is False
