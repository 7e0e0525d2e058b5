"""Putting an engine together: what it decides about the device and says when it falls back."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import edit_json, write_tiny

from qinfer import quantize
from qinfer.engine import load
from qinfer.engine.config import EngineConfig
from qinfer.engine.load import Source, load_engine
from qinfer.engine.static import StaticScheduler
from qinfer.errors import ConfigError


def test_a_gpu_without_kernels_is_reported_and_not_used(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(load, "KERNEL_DEVICES", ("cpu",))
    with caplog.at_level(logging.WARNING):
        engine = load_engine(tiny_llama, EngineConfig(), Source())
    assert engine.config.device == "cpu"
    assert "kernels for ('cpu',) only" in caplog.text
    with pytest.raises(ConfigError, match="use device=cpu"):
        load_engine(tiny_llama, EngineConfig(device="cuda"), Source())


def test_final_settings_hold_no_auto(tiny_llama: Path) -> None:
    engine = load_engine(tiny_llama, EngineConfig(max_num_seqs=2), Source())
    config = engine.config
    assert (config.device, config.dtype, config.kv_cache_dtype) == ("cpu", "float32", "fp32")
    assert config.max_model_len == 128
    assert engine.pool.num_blocks == 2 * 128 // config.block_size
    assert engine.decoder.max_positions >= config.max_model_len


def test_k05_cached_blocks_belong_to_one_model_and_one_kv_scheme(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """K05: two engines whose caches hold different numbers never agree on a hash."""
    other = write_tiny(tmp_path / "other")
    engines = [
        load_engine(tiny_llama, EngineConfig(), Source()),
        load_engine(tiny_llama, EngineConfig(kv_cache_dtype="int8"), Source()),
        load_engine(tiny_llama, EngineConfig(activations="exact"), Source()),
        load_engine(other, EngineConfig(), Source()),
    ]
    assert len({engine.core.scheduler.blocks._root for engine in engines}) == 4


def test_settings_reach_the_scheduler_and_the_pool(tiny_llama: Path) -> None:
    config = EngineConfig(batching="static", num_blocks=7, max_queue=5, max_num_seqs=3)
    engine = load_engine(tiny_llama, config, Source())
    scheduler = engine.core.scheduler
    assert isinstance(scheduler, StaticScheduler)
    assert (scheduler.max_queue, scheduler.max_running) == (5, 3)
    assert engine.pool.num_blocks == scheduler.blocks.num_blocks == 7
    assert engine.config.max_model_len == 7 * 16


def test_end_tokens_outside_the_vocabulary_are_reported_and_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_tiny(tmp_path / "model")
    edit_json(path / "generation_config.json", eos_token_id=[257, 5000, -1])
    with caplog.at_level(logging.WARNING):
        engine = load_engine(path, EngineConfig(), Source())
    assert engine.core.limits.eos_ids == {257}
    assert "[-1, 5000] are outside the vocabulary of 288" in caplog.text


@pytest.mark.parametrize("asked", ["auto", "fp8_e4m3"])
def test_static_scales_of_a_foreign_checkpoint_are_reported_in_one_line(
    tiny_llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, asked: str
) -> None:
    """Of our own checkpoint, whose record says what to use, nothing is said."""
    path = tmp_path / "out"
    options: dict[str, Any] = {"group_size": 32, "num_samples": 2, "seq_len": 64}
    quantize(tiny_llama, path, format="compressed-tensors", kv_cache_dtype="fp8_e4m3", **options)
    config = EngineConfig(kv_cache_dtype=asked)
    with caplog.at_level(logging.WARNING):
        load_engine(path, config, Source())
        assert [line for line in caplog.messages if "static" in line] == []
        edit_json(path / "config.json", qinfer_kv_cache=None)
        load_engine(path, config, Source())
    (line,) = [line for line in caplog.messages if "static" in line]
    assert "static scales of the KV cache, which are not used" in line
    assert f"stored as {'fp32' if asked == 'auto' else asked} " in line
