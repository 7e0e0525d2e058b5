"""The engine's settings: what a user may choose, and the size and device parsing behind it."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from qinfer.errors import ConfigError
from qinfer.models.config import ModelConfig
from qinfer.schemes import KVScheme, parse_kv_dtype

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[f"{_letter}b"] = 1000**_power
    _UNITS[f"{_letter}ib"] = 1024**_power
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*$", re.IGNORECASE)

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
ACTIVATIONS = ("int8", "exact")
LM_HEADS = ("auto", "int8", "model")
GGUF_WEIGHTS = ("codes", "dense")
BATCHINGS = ("continuous", "static")
NGRAM = "ngram"
MAX_SPECULATIVE_TOKENS = 16
BLOCK_SIZES = (4, 8, 16, 32, 64, 128)
_KV_OF_DTYPE = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine; vLLM's names where vLLM has them.

    Args:
        device: `auto` takes the GPU where there is one.
        dtype: type of activations and unquantized weights; `auto` = the checkpoint's.
        kv_cache_dtype: `auto` = the scheme recorded in the checkpoint, else `dtype`.
        max_model_len: tokens per sequence; None = what the model allows.
        max_num_batched_tokens: token budget of one step, over all requests.
        max_num_mixed_tokens: of them, those for prompts while other requests decode: a longer
            step would be a gap in their streams.
        max_num_seqs: requests that run at once.
        max_queue: requests that may wait beside the `max_num_seqs` that can run; more are refused
            (`OverloadedError`); None = any number.
        batching: `continuous`, or `static` as textbooks describe it, for comparison (without
            prefix cache).
        memory: total bytes for weights, cache and activations, or text such as "8GiB"; None =
            what the device has free.
        memory_fraction: the same as a part of the memory that the device, or the process's control
            group, has in total.
        num_blocks: cache blocks, exactly; instead of `memory` and `memory_fraction`.
        threads: CPU threads; None = the cores available to the process.
        enable_prefix_caching: reuse the cache blocks of equal prefixes.
        seed: of requests that bring none; None = different each time.
        block_size: tokens per cache block.
        activations: `int8` quantizes the inputs of quantized linears per token in groups of 32 and
            rounds those of bfloat16 linears to bfloat16, where the kernels can; `exact` leaves them
            as they are.
        lm_head: `int8` rounds the head to INT8 per row at load, where the kernels can; `model`
            keeps it; `auto` = `int8` for quantized checkpoints.
        gguf_weights: of a `.gguf` file: `codes` runs the linears on the file's own codes, in its
            size; `dense` dequantizes everything to bfloat16 first. Embedding and head are
            dequantized either way.
        speculative: `ngram` drafts tokens by looking them up in the text; anything else is the
            directory, hub id or `.gguf` file of a draft model with the same tokenizer, such as a
            lower-bit version of the model; None = no drafts.
        num_speculative_tokens: tokens of a draft at most; fewer where fewer pay.
    """

    device: str = "auto"
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    max_model_len: int | None = None
    max_num_batched_tokens: int = 512
    max_num_mixed_tokens: int = 128
    max_num_seqs: int = 32
    max_queue: int | None = None
    batching: str = "continuous"
    memory: int | str | None = None
    memory_fraction: float | None = None
    num_blocks: int | None = None
    threads: int | None = None
    enable_prefix_caching: bool = True
    seed: int | None = None
    block_size: int = 16
    activations: str = "int8"
    lm_head: str = "auto"
    gguf_weights: str = "codes"
    speculative: str | None = None
    num_speculative_tokens: int = 4

    def __post_init__(self) -> None:
        """Refuse values that can never work, before anything is loaded.

        Raises:
            ConfigError: naming the option.
        """
        _check_choice("device", self.device, DEVICES)
        _check_choice("dtype", self.dtype, DTYPES)
        _check_choice("activations", self.activations, ACTIVATIONS)
        _check_choice("lm_head", self.lm_head, LM_HEADS)
        _check_choice("gguf_weights", self.gguf_weights, GGUF_WEIGHTS)
        _check_positive("max_model_len", self.max_model_len)
        _check_positive("max_num_batched_tokens", self.max_num_batched_tokens)
        _check_positive("max_num_mixed_tokens", self.max_num_mixed_tokens)
        _check_positive("max_num_seqs", self.max_num_seqs)
        _check_positive("threads", self.threads)
        _check_choice("batching", self.batching, BATCHINGS)
        if self.max_queue is not None and self.max_queue < 0:
            raise ConfigError(f"max_queue is {self.max_queue}; it must be at least 0")
        self._check_memory()
        self._check_speculation()
        if self.kv_cache_dtype != "auto":
            parse_kv_dtype(self.kv_cache_dtype)
        if self.block_size not in BLOCK_SIZES:
            raise ConfigError(f"block_size {self.block_size} must be one of {BLOCK_SIZES}")

    def _check_speculation(self) -> None:
        """Refuse drafts that could never be computed."""
        count = self.num_speculative_tokens
        if not 1 <= count <= MAX_SPECULATIVE_TOKENS:
            raise ConfigError(
                f"num_speculative_tokens is {count}; it must be from 1 to {MAX_SPECULATIVE_TOKENS}"
            )
        if self.speculative == "":
            raise ConfigError("speculative is empty; give ngram, or a draft model")
        if self.speculative is not None and self.batching == "static":
            raise ConfigError(
                "speculative needs batching=continuous: a static batch computes one token per "
                "request and step"
            )

    def _check_memory(self) -> None:
        """Refuse sizes of the cache that are none, or that contradict each other."""
        if self.memory is not None:
            parse_size(self.memory)
        _check_positive("num_blocks", self.num_blocks)
        if self.memory_fraction is not None and not 0 < self.memory_fraction <= 1:
            raise ConfigError(
                f"memory_fraction is {self.memory_fraction}; it must be above 0 and at most 1"
            )
        sizes = {
            "memory": self.memory,
            "memory_fraction": self.memory_fraction,
            "num_blocks": self.num_blocks,
        }
        given = [name for name, value in sizes.items() if value is not None]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} size the cache in different ways; give one")


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


def from_options(options: Mapping[str, Any], *, others: Iterable[str] = ()) -> EngineConfig:
    """Return the settings that `options` name; the mapping is not changed.

    Args:
        options: fields of `EngineConfig` by name.
        others: what the caller knows beside these, for the message about an unknown one.

    Raises:
        ConfigError: an unknown option, or a value that can never work.
    """
    known = [field.name for field in fields(EngineConfig)]
    unknown = [name for name in options if name not in known]
    if unknown:
        names = ", ".join([*known, *others])
        raise ConfigError(f"unknown option {', '.join(unknown)}; there are {names}")
    return EngineConfig(**options)


def resolve(
    config: EngineConfig,
    model: ModelConfig,
    *,
    recorded_kv: KVScheme | None,
    has_cuda: bool,
    num_cores: int,
) -> EngineConfig:
    """Return the settings with every `auto` decided, and what depends on model and machine.

    Args:
        config: what the user chose.
        model: the model's facts.
        recorded_kv: the cache scheme that the checkpoint asks for.
        has_cuda: a GPU can be used.
        num_cores: CPU cores that the process may use.

    Raises:
        ConfigError: the combination cannot work; the message says what to change.
    """
    if config.device == "cuda" and not has_cuda:
        raise ConfigError(
            "device cuda was asked for, but there is no GPU that this version can use; "
            "use device=cpu"
        )
    device = config.device
    if device == "auto":
        device = "cuda" if has_cuda else "cpu"
    dtype = model.dtype if config.dtype == "auto" else config.dtype
    kv = config.kv_cache_dtype
    if kv == "auto":
        kv = recorded_kv.dtype if recorded_kv is not None else _KV_OF_DTYPE[dtype]
    max_model_len = config.max_model_len or model.max_position
    if max_model_len > model.max_position:
        raise ConfigError(
            f"max_model_len {max_model_len} is beyond the {model.max_position} positions of the "
            f"model (max_position_embeddings); use at most {model.max_position}"
        )
    return replace(
        config,
        device=device,
        dtype=dtype,
        kv_cache_dtype=parse_kv_dtype(kv).dtype,
        max_model_len=max_model_len,
        threads=config.threads or num_cores,
        enable_prefix_caching=config.enable_prefix_caching and config.batching != "static",
    )


def _check_choice(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{name} {value!r} is unknown; choose from {', '.join(known)}")


def _check_positive(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ConfigError(f"{name} is {value}; it must be at least 1")
