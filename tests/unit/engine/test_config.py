import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from support.checkpoints import TINY

from qinfer.engine.config import EngineConfig, from_options, parse_size, resolve
from qinfer.errors import ConfigError
from qinfer.models.config import ModelConfig
from qinfer.schemes import KV_SCHEMES

MODEL = ModelConfig.from_dict(
    {**TINY, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16"}
)


def settle(config: EngineConfig, **more) -> EngineConfig:
    facts = {"recorded_kv": None, "has_cuda": False, "num_cores": 2} | more
    return resolve(config, MODEL, **facts)


def test_auto_is_decided_once_and_the_original_stays() -> None:
    """K07: settings are never written into."""
    config = EngineConfig()
    final = settle(config)
    assert (final.device, final.dtype, final.kv_cache_dtype) == ("cpu", "bfloat16", "bf16")
    assert (final.max_model_len, final.threads) == (128, 2)
    assert config == EngineConfig()
    assert settle(config, has_cuda=True).device == "cuda"
    assert settle(EngineConfig(device="cpu"), has_cuda=True).device == "cpu"


def test_kv_auto_is_the_recorded_scheme_then_the_dtype() -> None:
    assert settle(EngineConfig(), recorded_kv=KV_SCHEMES["int8"]).kv_cache_dtype == "int8"
    given = EngineConfig(kv_cache_dtype="fp8")
    assert settle(given, recorded_kv=KV_SCHEMES["int8"]).kv_cache_dtype == "fp8_e4m3"
    assert settle(EngineConfig(dtype="float32")).kv_cache_dtype == "fp32"


def test_context_beyond_the_rope_table_is_refused() -> None:
    """E14: never admit more than the positions cover."""
    with pytest.raises(ConfigError, match="max_model_len 256 is beyond the 128 positions"):
        settle(EngineConfig(max_model_len=256))
    assert settle(EngineConfig(max_model_len=64)).max_model_len == 64


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("device", "tpu"),
        ("dtype", "int3"),
        ("kv_cache_dtype", "int5"),
        ("memory", "much"),
        ("memory", 0),
        ("max_model_len", 0),
        ("max_num_batched_tokens", 0),
        ("max_num_seqs", -1),
        ("threads", 0),
        ("block_size", 7),
        ("batching", "dynamic"),
        ("max_queue", -1),
        ("memory_fraction", 0.0),
        ("memory_fraction", 1.5),
        ("num_blocks", 0),
        ("gguf_weights", "bf16"),
        ("speculative", ""),
        ("num_speculative_tokens", 0),
        ("num_speculative_tokens", 17),
    ],
)
def test_impossible_values_end_before_anything_is_loaded(option: str, value: Any) -> None:
    """K12: one line that names the option and what there is."""
    with pytest.raises(ConfigError) as error:
        EngineConfig(**{option: value})
    assert "\n" not in str(error.value)
    assert option in str(error.value) or option == "memory"


def test_static_batches_are_not_drafted_for() -> None:
    """K12."""
    with pytest.raises(ConfigError, match="batching=continuous"):
        EngineConfig(speculative="ngram", batching="static")


def test_a_missing_gpu_is_said_at_once() -> None:
    """K12."""
    with pytest.raises(ConfigError, match="use device=cpu"):
        settle(EngineConfig(device="cuda"))


def test_unknown_options_are_refused_and_the_mapping_is_left_alone() -> None:
    """K07: an options dictionary is read, never changed."""
    options = {"max_num_seqs": 3, "threads": 1}
    assert from_options(options).max_num_seqs == 3
    assert options == {"max_num_seqs": 3, "threads": 1}
    with pytest.raises(ConfigError, match=r"unknown option max_seqs; there are device, dtype"):
        from_options({"max_seqs": 3})
    with pytest.raises(ConfigError, match=r"there are device, .*, revision, token$"):
        from_options({"max_seqs": 3}, others=["revision", "token"])


@pytest.mark.parametrize(
    "sizes",
    [{"memory": 1, "memory_fraction": 0.5}, {"memory": "1GiB", "num_blocks": 4}],
)
def test_sizes_of_the_cache_that_contradict_each_other_are_refused(sizes: dict[str, Any]) -> None:
    """K12."""
    with pytest.raises(ConfigError, match=" and ".join(sizes)):
        EngineConfig(**sizes)


def test_static_batching_goes_without_prefix_cache() -> None:
    assert not settle(EngineConfig(batching="static")).enable_prefix_caching
    assert settle(EngineConfig()).enable_prefix_caching


@pytest.mark.parametrize(
    ("text", "expected"),
    [(7, 7), ("8GiB", 8 << 30), ("500 MB", 500_000_000), ("1.5kib", 1536), ("1024", 1024)],
)
def test_sizes(text: int | str, expected: int) -> None:
    assert parse_size(text) == expected


def test_configuration_is_frozen() -> None:
    with pytest.raises(AttributeError):
        EngineConfig().device = "cpu"  # type: ignore[misc]
    assert replace(EngineConfig(), seed=1).seed == 1


def test_bookkeeping_does_not_import_torch() -> None:
    modules = ("admission", "blocks", "config", "memory", "metrics", "output", "request")
    imports = "; ".join(
        f"import qinfer.engine.{name}" for name in (*modules, "scheduler", "static")
    )
    code = f"{imports}; import sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
