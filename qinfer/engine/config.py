"""The engine's settings: what a user may choose, and the size and device parsing behind it."""

import re
from dataclasses import dataclass

from qinfer.errors import ConfigError

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[f"{_letter}b"] = 1000**_power
    _UNITS[f"{_letter}ib"] = 1024**_power
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*$", re.IGNORECASE)

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine; vLLM's names where vLLM has them.

    Args:
        device: `auto` takes the GPU where there is one.
        dtype: type of activations and unquantized weights; `auto` = the checkpoint's.
        kv_cache_dtype: `auto` = the scheme recorded in the checkpoint, else `dtype`.
        max_model_len: tokens per sequence; None = what the model allows.
        max_num_batched_tokens: token budget of one step, over all requests.
        max_num_seqs: requests that run at once.
        memory: total bytes for weights, cache and activations, or text such as "8GiB"; None =
            what the device has free.
        threads: CPU threads; None = the cores available to the process.
        enable_prefix_caching: reuse the cache blocks of equal prefixes.
        seed: of requests that bring none; None = different each time.
        block_size: tokens per cache block.
    """

    device: str = "auto"
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    max_model_len: int | None = None
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 32
    memory: int | str | None = None
    threads: int | None = None
    enable_prefix_caching: bool = True
    seed: int | None = None
    block_size: int = 16

    def __post_init__(self) -> None:
        """Refuse values that can never work, before anything is loaded.

        Raises:
            ConfigError: naming the option.
        """
        if self.device not in DEVICES:
            raise ConfigError(f"device {self.device!r} is unknown; choose from {DEVICES}")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype {self.dtype!r} is unknown; choose from {DTYPES}")
        for name in ("max_model_len", "max_num_batched_tokens", "max_num_seqs", "threads"):
            _check_positive(name, vars_of(self)[name])
        if self.block_size not in {8, 16, 32, 64, 128}:
            raise ConfigError(f"block_size {self.block_size} must be 8, 16, 32, 64 or 128")


def vars_of(config: EngineConfig) -> dict[str, int | None]:
    """Return the integer fields of a configuration by name."""
    return {
        "max_model_len": config.max_model_len,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "max_num_seqs": config.max_num_seqs,
        "threads": config.threads,
    }


def parse_size(value: int | str) -> int:
    """Return bytes from a number or from text such as "8GiB", "500 MB" or "1024".

    Raises:
        ConfigError: the text is no size.
    """
    if isinstance(value, int):
        if value <= 0:
            raise ConfigError(f"size {value} must be positive")
        return value
    match = _SIZE.match(value)
    unit = match.group(2).lower() if match else ""
    if match is None or unit not in _UNITS or float(match.group(1)) <= 0:
        raise ConfigError(f"size {value!r} is not understood; write for example 8GiB or 500MB")
    return int(float(match.group(1)) * _UNITS[unit])


def _check_positive(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ConfigError(f"{name} is {value}; it must be at least 1")
