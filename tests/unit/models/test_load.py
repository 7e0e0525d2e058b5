"""Loading: what is missing is named, and memory stays that of the weights."""

import json
import logging
from pathlib import Path

import pytest
import safetensors.torch
import torch
from support.checkpoints import write_tiny
from support.steps import layout_of, run_chunked

from qinfer.checkpoint.reader import open_checkpoint
from qinfer.errors import CheckpointError, ConfigError
from qinfer.kvcache.pool import KVPool
from qinfer.models.load import load_decoder


def edit(path: Path, changes: dict[str, torch.Tensor | None]) -> None:
    """Rewrite the single shard of a checkpoint; None removes a tensor."""
    file = path / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})


def test_l02_missing_tensors_are_named_and_counted(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "model")
    name = "model.layers.1.mlp.up_proj.weight"
    edit(path, {name: None, "model.norm.weight": None})
    with pytest.raises(CheckpointError, match=r"2 of 21 tensors .* are missing") as caught:
        load_decoder(open_checkpoint(path))
    assert name in str(caught.value)


def test_l02_more_than_ten_missing_tensors_are_counted(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "model")
    names = [name for name in open_checkpoint(path).names() if ".layers.1." in name]
    weights = safetensors.torch.load_file(path / "model.safetensors")
    edit(path, dict.fromkeys(names))
    edit(path, {f"model.other.{name}": weights[name] for name in names})
    with pytest.raises(CheckpointError, match=r"9 of 21 tensors"):
        load_decoder(open_checkpoint(path))
    edit(path, dict.fromkeys(name for name in weights if ".layers.0." in name))
    with pytest.raises(CheckpointError, match=r"18 of 21 tensors") as caught:
        load_decoder(open_checkpoint(path))
    assert "and 8 more" in str(caught.value)


def test_l02_unexpected_tensors_cost_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_tiny(tmp_path / "model")
    extra = {f"model.extra.{index}": torch.ones(1) for index in range(12)}
    edit(path, {**extra, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    with caplog.at_level(logging.WARNING):
        load_decoder(open_checkpoint(path))
    (record,) = [record for record in caplog.records if "does not use" in record.getMessage()]
    assert "holds 12 tensors" in record.getMessage()


def test_wrong_shapes_name_tensor_and_both_shapes(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "model")
    edit(path, {"model.embed_tokens.weight": torch.ones(287, 64)})
    with pytest.raises(CheckpointError, match=r"embed_tokens.*\(287, 64\).*\(288, 64\)"):
        load_decoder(open_checkpoint(path))
    other = write_tiny(tmp_path / "other")
    edit(other, {"model.layers.0.mlp.up_proj.weight": torch.ones(128, 63)})
    with pytest.raises(CheckpointError, match=r"up_proj.*\(128, 63\)"):
        load_decoder(open_checkpoint(other))


def test_g18_tied_models_ignore_a_copy_of_the_head_and_untied_ones_need_it(
    tmp_path: Path,
) -> None:
    tied = write_tiny(tmp_path / "tied", tie_word_embeddings=True)
    decoder = load_decoder(open_checkpoint(tied))
    ids = [1, 2, 3]
    pool = KVPool(layout_of(decoder.config), 1)
    before = run_chunked(decoder, ids, [3], pool, [0])
    edit(tied, {"lm_head.weight": torch.zeros(288, 64)})
    decoder = load_decoder(open_checkpoint(tied))
    assert torch.equal(run_chunked(decoder, ids, [3], pool, [0]), before)
    config = json.loads((tied / "config.json").read_text())
    config["tie_word_embeddings"] = False
    edit(tied, {"lm_head.weight": None})
    (tied / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        load_decoder(open_checkpoint(tied))


def test_m03_resident_bytes_count_tied_weights_once(smollm2: Path) -> None:
    decoder = load_decoder(open_checkpoint(smollm2))
    assert decoder.dtype == torch.bfloat16
    assert decoder.memory_bytes == 2 * 134_515_008


def test_unknown_dtype_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(ConfigError, match="float8"):
        load_decoder(open_checkpoint(tiny_llama), dtype="float8")


def test_progress_counts_blocks(tiny_llama: Path) -> None:
    seen: list[tuple[int, int]] = []
    load_decoder(open_checkpoint(tiny_llama), progress=lambda done, of: seen.append((done, of)))
    assert seen == [(1, 2), (2, 2)]
