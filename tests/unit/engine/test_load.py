"""Putting an engine together: what it decides about the device and says when it falls back."""

import logging
from pathlib import Path

import pytest
import torch
from support.checkpoints import edit_json, write_tiny

from qinfer.engine import load
from qinfer.engine.config import EngineConfig
from qinfer.engine.load import Source, load_engine
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


def test_end_tokens_outside_the_vocabulary_are_reported_and_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_tiny(tmp_path / "model")
    edit_json(path / "generation_config.json", eos_token_id=[257, 5000, -1])
    with caplog.at_level(logging.WARNING):
        engine = load_engine(path, EngineConfig(), Source())
    assert engine.core.limits.eos_ids == {257}
    assert "[-1, 5000] are outside the vocabulary of 288" in caplog.text
