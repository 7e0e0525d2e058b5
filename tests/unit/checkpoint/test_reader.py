import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import edit_json, load_oracle, write_tiny
from support.gptq_reader import dequantize_checkpoint
from support.quantized import quantize_directory

from qinfer.checkpoint.reader import open_checkpoint
from qinfer.errors import CheckpointError
from qinfer.formats.weight import QuantizedWeight
from qinfer.schemes import KV_SCHEMES, WeightScheme

Q_PROJ = "model.layers.0.self_attn.q_proj"
UP_PROJ = "model.layers.1.mlp.up_proj"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "model")


@pytest.fixture
def quantized(tiny: Path) -> Path:
    quantize_directory(tiny, WeightScheme(4, 32))
    return tiny


def test_facts_and_tensors(tiny: Path) -> None:
    checkpoint = open_checkpoint(tiny)
    oracle = load_oracle(tiny).state_dict()
    assert checkpoint.names() == sorted(oracle)
    for name, expected in oracle.items():
        assert torch.equal(checkpoint.tensor(name), expected)
        assert checkpoint.shape(name) == tuple(expected.shape)
        assert checkpoint.dtype(name) == torch.float32
    assert checkpoint.total_bytes == sum(4 * tensor.numel() for tensor in oracle.values())
    assert checkpoint.config["model_type"] == "llama"
    assert checkpoint.generation_config["eos_token_id"] == [257, 260]
    assert checkpoint.quantization is None
    assert checkpoint.kv_scheme is None


def test_missing_generation_config_is_empty(tiny: Path) -> None:
    (tiny / "generation_config.json").unlink()
    assert open_checkpoint(tiny).generation_config == {}


def test_sharded_equals_single(tiny: Path, tmp_path: Path) -> None:
    sharded = open_checkpoint(write_tiny(tmp_path / "sharded", max_shard_size="100KB"))
    single = open_checkpoint(tiny)
    assert len({entry.file for entry in sharded.entries.values()}) > 2
    for name in single.names():
        assert torch.equal(sharded.tensor(name), single.tensor(name))


def test_weight_is_quantized_where_the_file_has_it_so(quantized: Path) -> None:
    """The engine's weight equals the one that an independent reader finds, bit for bit."""
    checkpoint = open_checkpoint(quantized)
    independent = dequantize_checkpoint(quantized)
    assert len(independent) == 14
    for name, expected in independent.items():
        out, in_ = expected.shape
        weight = checkpoint.weight(name, in_features=in_, out_features=out)
        assert isinstance(weight, QuantizedWeight)
        assert torch.equal(weight.dequantize(), torch.from_numpy(expected))
    head = checkpoint.weight("lm_head", in_features=64, out_features=288)
    assert isinstance(head, torch.Tensor)


def test_weight_of_another_shape(tiny: Path) -> None:
    with pytest.raises(CheckpointError, match=r"q_proj\.weight has shape \(64, 64\), expected"):
        open_checkpoint(tiny).weight(Q_PROJ, in_features=64, out_features=32)


def test_tensors_outlive_the_file(tiny: Path) -> None:
    tensor = open_checkpoint(tiny).tensor("lm_head.weight")
    before = tensor.clone()
    (tiny / "model.safetensors").write_bytes(b"")
    assert torch.equal(tensor, before)


# --- F01: where the settings live -----------------------------------------------------------------


def test_f01_settings_of_config_json_alone(quantized: Path) -> None:
    (quantized / "quantize_config.json").unlink()
    settings = open_checkpoint(quantized).quantization
    assert settings is not None
    assert settings.scheme == WeightScheme(4, 32)


def test_f01_settings_of_quantize_config_alone(quantized: Path) -> None:
    edit_json(quantized / "config.json", quantization_config=None)
    edit_json(quantized / "quantize_config.json", quant_method=None, format=None)
    settings = open_checkpoint(quantized).quantization
    assert settings is not None
    assert settings.scheme == WeightScheme(4, 32)


def test_f01_conflict_shows_both(quantized: Path) -> None:
    edit_json(quantized / "quantize_config.json", group_size=64)
    with pytest.raises(CheckpointError, match=r"contradict(.|\n)*config\.json.*32(.|\n)*64"):
        open_checkpoint(quantized)


def test_f01_notes_and_missing_keys_are_no_conflict(quantized: Path) -> None:
    edit_json(quantized / "quantize_config.json", damp_percent=0.5, sym=None, meta=None)
    assert open_checkpoint(quantized).quantization is not None


def test_f01_quantized_weights_without_settings(quantized: Path) -> None:
    (quantized / "quantize_config.json").unlink()
    edit_json(quantized / "config.json", quantization_config=None)
    with pytest.raises(CheckpointError, match="quantized weights without settings"):
        open_checkpoint(quantized)


def test_f01_settings_without_quantized_weights(tiny: Path) -> None:
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    edit_json(tiny / "config.json", quantization_config=settings)
    with pytest.raises(CheckpointError, match="holds no quantized tensor"):
        open_checkpoint(tiny)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 8}, "qweight has shape .* 4 bits would fit, the settings say bits = 8"),
        ({"group_size": 64}, "scales has shape .* group_size 32 would fit"),
    ],
)
def test_f02_edited_settings(quantized: Path, change: dict, message: str) -> None:
    """F02: the message gives tensor, shapes and the likely cause."""
    settings = json.loads((quantized / "quantize_config.json").read_text()) | change
    edit_json(quantized / "config.json", quantization_config=settings)
    edit_json(quantized / "quantize_config.json", **change)
    checkpoint = open_checkpoint(quantized)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.weight(Q_PROJ, in_features=64, out_features=64)


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_missing_sym_is_inferred_from_the_zero_points(tiny: Path, version) -> None:
    quantize_directory(tiny, WeightScheme(4, 32), version=version)
    for file, key in (("config.json", "quantization_config"), ("quantize_config.json", None)):
        data = json.loads((tiny / file).read_text())
        (data[key] if key else data).pop("sym")
        (tiny / file).write_text(json.dumps(data))
    settings = open_checkpoint(tiny).quantization
    assert settings is not None
    assert settings.scheme == WeightScheme(4, 32)

    tensors = load_file(tiny / "model.safetensors")
    for name in tensors:
        if name.endswith("qzeros"):
            tensors[name][0, 0] = 0x12345678
    save_file(tensors, tiny / "model.safetensors")
    settings = open_checkpoint(tiny).quantization
    assert settings is not None
    assert settings.scheme == WeightScheme(4, 32, symmetric=False)


def test_integers_under_the_name_of_a_plain_weight_are_not_read_as_one(quantized: Path) -> None:
    """A weight of whole numbers without the tensors that give them meaning is an error."""
    tensors = load_file(quantized / "model.safetensors")
    for part in ("qweight", "qzeros", "scales", "g_idx"):
        del tensors[f"{Q_PROJ}.{part}"]
    tensors[f"{Q_PROJ}.weight"] = torch.ones(64, 64, dtype=torch.int8)
    save_file(tensors, quantized / "model.safetensors")
    checkpoint = open_checkpoint(quantized)
    assert checkpoint.is_quantized(Q_PROJ)
    with pytest.raises(CheckpointError, match=r"no tensor .*q_proj\.qweight"):
        checkpoint.weight(Q_PROJ, in_features=64, out_features=64)


def test_integers_in_an_unquantized_checkpoint_are_refused(tiny: Path) -> None:
    tensors = load_file(tiny / "model.safetensors")
    tensors[f"{Q_PROJ}.weight"] = torch.ones(64, 64, dtype=torch.int8)
    save_file(tensors, tiny / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"q_proj\.weight is torch\.int8, but no settings"):
        open_checkpoint(tiny).weight(Q_PROJ, in_features=64, out_features=64)


def test_excluded_layer_that_is_quantized(quantized: Path) -> None:
    settings = json.loads((quantized / "quantize_config.json").read_text())
    edit_json(quantized / "config.json", quantization_config=settings | {"dynamic": {"-:.*q_": {}}})
    edit_json(quantized / "quantize_config.json", dynamic={"-:.*q_": {}})
    with pytest.raises(CheckpointError, match="settings exclude this layer"):
        open_checkpoint(quantized).weight(Q_PROJ, in_features=64, out_features=64)


# --- L02: names -----------------------------------------------------------------------------------


def expected_names(path: Path) -> list[str]:
    checkpoint = open_checkpoint(path)
    quantized = {name.rpartition(".")[0] for name in checkpoint.names() if "_proj." in name}
    others = [name for name in checkpoint.names() if "_proj." not in name]
    return others + [name for prefix in quantized for name in checkpoint.weight_names(prefix)]


def rewrite(path: Path, change) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def test_l02_one_missing_scales_tensor(quantized: Path) -> None:
    """L02: never guessed, never random: an error that names it."""
    expected = expected_names(quantized)
    rewrite(quantized, lambda tensors: tensors.pop(f"{Q_PROJ}.scales"))
    checkpoint = open_checkpoint(quantized)
    with pytest.raises(CheckpointError, match=r"1 of \d+ tensors(.|\n)*q_proj\.scales"):
        checkpoint.check_names(expected)
    with pytest.raises(CheckpointError, match=r"q_proj\.scales"):
        checkpoint.weight(Q_PROJ, in_features=64, out_features=64)


def test_l02_missing_qweight_is_reported_as_such(quantized: Path) -> None:
    rewrite(quantized, lambda tensors: tensors.pop(f"{Q_PROJ}.qweight"))
    assert f"{Q_PROJ}.qweight" in open_checkpoint(quantized).weight_names(Q_PROJ)


def test_l02_many_missing_lists_ten_and_the_count(tiny: Path) -> None:
    expected = open_checkpoint(tiny).names()

    def rename(tensors) -> None:
        for name in [name for name in tensors if "layers.0" in name or "layers.1.mlp" in name]:
            tensors[f"other.{name}"] = tensors.pop(name)

    rewrite(tiny, rename)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tiny).check_names(expected)
    assert "12 of 21 tensors" in str(caught.value)
    assert str(caught.value).count("model.layers") == 10
    assert "and 2 more" in str(caught.value)


def test_l02_unexpected_tensors_are_one_line(tiny: Path, caplog) -> None:
    expected = open_checkpoint(tiny).names()
    rewrite(tiny, lambda tensors: tensors.update(a=torch.ones(1), b=torch.ones(1)))
    with caplog.at_level(logging.WARNING):
        assert open_checkpoint(tiny).check_names(expected) == ["a", "b"]
    assert len(caplog.records) == 1
    assert "2 tensors that the model does not use" in caplog.text


# --- L03: pickles and remote code -----------------------------------------------------------------


class Bomb:
    """A pickle that touches a file when it is loaded as code."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return (Path.touch, (self.target,))


def test_l03_safetensors_come_first_and_the_pickle_is_not_opened(tiny: Path) -> None:
    """L03: a directory with both."""
    target = tiny / "touched"
    torch.save(Bomb(target), tiny / "pytorch_model.bin")
    checkpoint = open_checkpoint(tiny, allow_pickle=True)
    checkpoint.tensor("lm_head.weight")
    assert not target.exists()


def test_l03_pickles_alone_are_refused_without_the_flag(tiny: Path) -> None:
    """L03: and with the flag they are read as plain tensors."""
    tensors = load_file(tiny / "model.safetensors")
    (tiny / "model.safetensors").unlink()
    torch.save(tensors, tiny / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="--allow-pickle"):
        open_checkpoint(tiny)
    checkpoint = open_checkpoint(tiny, allow_pickle=True)
    assert checkpoint.names() == sorted(tensors)
    assert torch.equal(checkpoint.tensor("lm_head.weight"), tensors["lm_head.weight"])


@pytest.mark.parametrize("legacy", [False, True])
def test_l03_code_in_a_pickle_never_runs(tiny: Path, *, legacy: bool) -> None:
    """L03: even when pickles are allowed."""
    (tiny / "model.safetensors").unlink()
    target = tiny / "touched"
    torch.save(
        {"w": Bomb(target)}, tiny / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy
    )
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin cannot be read as plain"):
        open_checkpoint(tiny, allow_pickle=True)
    assert not target.exists()


def test_l03_sharded_pickles(tiny: Path) -> None:
    tensors = load_file(tiny / "model.safetensors")
    (tiny / "model.safetensors").unlink()
    weight_map = {}
    for index, name in enumerate(tensors):
        file = f"pytorch_model-{index % 2}.bin"
        weight_map[name] = file
    for file in set(weight_map.values()):
        part = {name: tensors[name] for name in tensors if weight_map[name] == file}
        torch.save(part, tiny / file)
    index_file = tiny / "pytorch_model.bin.index.json"
    index_file.write_text(json.dumps({"weight_map": weight_map}))
    checkpoint = open_checkpoint(tiny, allow_pickle=True)
    assert all(torch.equal(checkpoint.tensor(name), tensors[name]) for name in tensors)


def test_l03_not_a_dictionary_of_tensors(tiny: Path) -> None:
    (tiny / "model.safetensors").unlink()
    torch.save({"epoch": 3}, tiny / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="dictionary of tensors"):
        open_checkpoint(tiny, allow_pickle=True)


def test_l03_remote_code_is_stated_and_not_run(tiny: Path, caplog) -> None:
    """L03: `auto_map` names code in the directory."""
    edit_json(tiny / "config.json", auto_map={"AutoModelForCausalLM": "evil.Model"})
    (tiny / "evil.py").write_text("raise SystemExit('ran')")
    with caplog.at_level(logging.WARNING):
        open_checkpoint(tiny)
    assert "which qinfer never runs" in caplog.text


# --- L04: memory ----------------------------------------------------------------------------------

_MEASURE = """
import re, sys
from pathlib import Path
from qinfer.checkpoint.reader import open_checkpoint
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
before = peak()
checkpoint = open_checkpoint(Path(sys.argv[1]))
kept = [checkpoint.tensor(name) for name in checkpoint.names()]
after = peak()
assert {str(t.dtype) for t in kept} == {"torch.bfloat16"}
print((after - before) // 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_l04_reading_costs_the_weights_once(smollm2: Path) -> None:
    """L04: 269 MB of bf16 stay bf16 and raise the peak by less than 400 MB."""
    run = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(smollm2)], capture_output=True, text=True, check=True
    )
    assert 250 < int(run.stdout) < 400


def test_rows_are_those_of_the_whole_tensor(tiny: Path) -> None:
    checkpoint = open_checkpoint(tiny)
    for name in checkpoint.names():
        whole = checkpoint.tensor(name)
        assert torch.equal(checkpoint.rows(name, 0, whole.shape[0]), whole)
        assert torch.equal(checkpoint.rows(name, 5, 17), whole[5:17])
        assert checkpoint.rows(name, 3, 3).shape == (0, *whole.shape[1:])


def test_a_file_that_shrinks_after_it_was_opened(tiny: Path) -> None:
    checkpoint = open_checkpoint(tiny)
    file = tiny / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=r"tensor .* became shorter"):
        [checkpoint.tensor(name) for name in checkpoint.names()]


# --- the recorded KV scheme -----------------------------------------------------------------------


def test_kv_scheme_is_read(tiny: Path) -> None:
    entry = {"format_version": 1, "dtype": "int8", "granularity": "token_head"}
    edit_json(tiny / "config.json", qinfer_kv_cache=entry)
    assert open_checkpoint(tiny).kv_scheme == KV_SCHEMES["int8"]


@pytest.mark.parametrize(
    "entry",
    [
        {"format_version": 2, "dtype": "int8", "granularity": "token_head"},
        {"format_version": 1, "dtype": "int3", "granularity": "token_head"},
        {"format_version": 1, "dtype": "int8", "granularity": "tensor"},
        {"format_version": 1, "dtype": ["int8"], "granularity": "token_head"},
        "int8",
    ],
)
def test_kv_scheme_that_is_not_known(tiny: Path, entry) -> None:
    edit_json(tiny / "config.json", qinfer_kv_cache=entry)
    with pytest.raises(CheckpointError, match="qinfer_kv_cache"):
        open_checkpoint(tiny)


# --- directories that are none --------------------------------------------------------------------


def test_what_is_no_checkpoint(tmp_path: Path, tiny: Path) -> None:
    with pytest.raises(CheckpointError, match="is no directory"):
        open_checkpoint(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        open_checkpoint(tmp_path)
    (tiny / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="holds no weights"):
        open_checkpoint(tiny)
    (tiny / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json is damaged"):
        open_checkpoint(tiny)
    (tiny / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="must hold a JSON object"):
        open_checkpoint(tiny)


def test_unknown_tensor(tiny: Path) -> None:
    with pytest.raises(CheckpointError, match="has no tensor nothing"):
        open_checkpoint(tiny).tensor("nothing")
    assert not open_checkpoint(tiny).has("nothing")


def test_layer_override(tiny: Path) -> None:
    assert open_checkpoint(tiny).weight_names(UP_PROJ) == [f"{UP_PROJ}.weight"]
