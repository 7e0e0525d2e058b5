import json
from pathlib import Path

import pytest
import torch
from support.checkpoints import edit_json, write_tiny
from support.gguf_files import write_gguf
from support.other_formats import awq_settings, awq_tensors, put_weights
from support.quantized import quantize_directory

from qinfer.checkpoint.convert import convert_model
from qinfer.checkpoint.reader import open_checkpoint
from qinfer.errors import CheckpointError
from qinfer.schemes import WeightScheme


def test_directories_are_copied_as_they_are(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "source", "qwen2", dtype=torch.float16)
    seen: list[tuple[int, int]] = []
    convert_model(
        source, tmp_path / "out", max_shard_bytes=50_000,
        on_progress=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    before, after = open_checkpoint(source), open_checkpoint(tmp_path / "out")
    assert before.config == after.config
    assert before.names() == after.names()
    assert all(torch.equal(before.tensor(name), after.tensor(name)) for name in before.names())
    assert seen == [(i, len(before.names())) for i in range(1, len(before.names()) + 1)]
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1


@pytest.mark.parametrize("kind", ["gptq", "awq"])
def test_settings_of_a_side_file_go_along(kind: str, tmp_path: Path) -> None:
    """Of old files that have them nowhere else, and without a `quant_method`."""
    source = write_tiny(tmp_path / "source")
    if kind == "gptq":
        quantize_directory(source, WeightScheme(4, 32))
        (source / "quantize_config.json").write_text('{"bits": 4, "group_size": 32}')
    else:
        scheme = WeightScheme(4, 32, symmetric=False)
        put_weights(source, scheme, awq_tensors, awq_settings(scheme))
        settings = awq_settings(scheme)
        del settings["quant_method"]
        (source / "quant_config.json").write_text(json.dumps(settings))
    edit_json(source / "config.json", quantization_config=None)
    convert_model(source, tmp_path / "out")
    before, after = open_checkpoint(source), open_checkpoint(tmp_path / "out")
    assert before.quantization is not None
    assert before.quantization.method == kind
    assert after.quantization is not None
    assert after.quantization.rules == before.quantization.rules
    assert after.quantization.default == before.quantization.default
    assert after.config["quantization_config"]["quant_method"] == kind


def test_gguf_progress_counts_tensors(tiny_llama: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    convert_model(
        write_gguf(tiny_llama, tmp_path / "m.gguf", "llama"), tmp_path / "out",
        on_progress=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    assert seen[-1] == (21, 21)


def test_nothing_is_left_when_a_tensor_cannot_be_read(tmp_path: Path, monkeypatch) -> None:
    source = write_tiny(tmp_path / "source")

    def vanish(done: int, total: int) -> None:
        (source / "model.safetensors").unlink(missing_ok=True)

    with pytest.raises(CheckpointError, match=r"tensor .* cannot be read"):
        convert_model(source, tmp_path / "out", on_progress=vanish)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]
