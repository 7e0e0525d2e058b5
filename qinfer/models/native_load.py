"""From a checkpoint to the fastest decoder that this machine and model allow.

Tried in order: the C++ program (`models.native`), then the torch reference (`models.decoder`). A
fallback is reported, with its reason, when the model is loaded and with every kernel row.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from qinfer.checkpoint.reader import Checkpoint
from qinfer.errors import ConfigError
from qinfer.formats.weight import QuantizedWeight
from qinfer.kernels.cpu import native, paged, tiled
from qinfer.kernels.cpu.arena import Arena, aligned
from qinfer.kernels.spec import LinearSpec
from qinfer.models.causal_lm import CausalLM
from qinfer.models.config import ModelConfig, linear_shapes
from qinfer.models.layers import Weight
from qinfer.models.load import (
    FINAL_NORM,
    HEAD,
    block_weights,
    check_tensors,
    load_decoder,
    read_embedding,
    resolve_dtype,
)
from qinfer.models.native import NativeDecoder, NativeWeights
from qinfer.models.native_layer import NativeGroup, NativeLayer
from qinfer.models.rope import RotaryTable
from qinfer.schemes import WeightScheme

_ARENA_BYTES = 64 << 20
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How a model is loaded.

    Args:
        dtype: of activations and unquantized weights; `auto` = as the checkpoint says.
        device: where it runs.
        max_positions: how long a sequence may become; None = as long as the model allows.
        threads: CPU threads.
        activations: `int8` quantizes the inputs of quantized linears per token in groups of 32;
            `exact` keeps them in float32.
        lm_head: `int8` quantizes the head per row at load; `model` keeps it; `auto` = `int8` where
            the checkpoint's linears are quantized.
        progress: called with the layers loaded and their number after each.
    """

    dtype: str = "auto"
    device: str = "cpu"
    max_positions: int | None = None
    threads: int = 1
    activations: str = "int8"
    lm_head: str = "auto"
    progress: Callable[[int, int], None] | None = None


def load_model(checkpoint: Checkpoint, options: LoadOptions) -> CausalLM:
    """Load a checkpoint's model, native if possible.

    Raises:
        CheckpointError: tensors are missing, damaged or of the wrong shape.
        UnsupportedModelError: the architecture is not supported.
    """
    config = ModelConfig.from_dict(checkpoint.config)
    check_tensors(checkpoint, config)
    reason = _native_refusal(checkpoint, config, options)
    if reason is None:
        try:
            return _load_native(checkpoint, config, options)
        except ConfigError as error:  # a weight that only shows when it is read
            reason = str(error)
    _log.warning("running on the torch reference, which is slow: %s", reason)
    return load_decoder(
        checkpoint,
        dtype=options.dtype,
        device=options.device,
        max_positions=options.max_positions,
        progress=options.progress,
    )


def _native_refusal(
    checkpoint: Checkpoint, config: ModelConfig, options: LoadOptions
) -> str | None:
    """Return why the C++ program cannot run a model, or None if it can."""
    if options.device != "cpu":
        return f"the C++ kernels run on the CPU, not on {options.device}"
    if native.load() is None:
        return "the C++ library is not installed"
    dtype = resolve_dtype(options.dtype, config)
    if dtype == torch.float16:
        return "the C++ kernels compute in float32, float16 was asked for"
    reason = paged.unsupported_reason(config.num_heads, config.num_kv_heads, config.head_dim)
    if reason is not None:
        return reason
    settings = checkpoint.quantization
    for name, (inputs, outputs) in linear_shapes(config).items():
        scheme = None if settings is None else settings.scheme_for(name)
        spec = LinearSpec(inputs, outputs, dtype, options.device, scheme)
        reason = tiled.unsupported_reason(spec)
        if reason is not None:
            return f"{name}: {reason}"
    return None


def _load_native(
    checkpoint: Checkpoint, config: ModelConfig, options: LoadOptions
) -> NativeDecoder:
    """Tile the weights block by block; a block's source is let go before the next is read."""
    dtype = resolve_dtype(options.dtype, config)
    room = _Room()
    int8 = options.activations == "int8"
    layers = []
    for layer in range(config.num_layers):
        weights = {
            name: weight.to(dtype) if isinstance(weight, torch.Tensor) else weight
            for name, weight in block_weights(checkpoint, config, layer).items()
        }
        layers.append(
            NativeLayer(config, layer, weights, int8_activations=int8, allocate=room.take)
        )
        if options.progress is not None:
            options.progress(layer + 1, config.num_layers)
    embedding = read_embedding(checkpoint, config).to(dtype)
    head = _head(checkpoint, config, embedding, options)
    tiled_weights = NativeWeights(
        embedding=embedding,
        layers=layers,
        norm=checkpoint.tensor(FINAL_NORM).float(),
        head=NativeGroup({HEAD: head}, {}, prefix="", int8_activations=int8, allocate=room.take),
    )
    length = options.max_positions or config.max_position
    rotary = RotaryTable(config.rope, config.head_dim, length)
    return NativeDecoder(config, tiled_weights, rotary, threads=options.threads)


def _head(
    checkpoint: Checkpoint, config: ModelConfig, embedding: torch.Tensor, options: LoadOptions
) -> Weight:
    """Return the head: as the checkpoint has it, or rounded to INT8 per row."""
    weight: Weight = embedding
    if not config.tie_word_embeddings:
        weight = checkpoint.weight(
            HEAD, in_features=config.hidden_size, out_features=config.vocab_size
        )
    if isinstance(weight, QuantizedWeight):
        return weight
    to_int8 = options.lm_head == "int8" or (
        options.lm_head == "auto" and checkpoint.quantization is not None
    )
    return int8_rows(weight) if to_int8 else weight.to(embedding.dtype)


def int8_rows(weight: torch.Tensor) -> QuantizedWeight:
    """Round a weight `[out, in]` to INT8 with one symmetric float16 scale per row."""
    dense = weight.float()
    smallest = torch.finfo(torch.float16).smallest_normal
    scales = (dense.abs().amax(-1, keepdim=True) / 127).clamp(min=smallest).half()
    codes = (dense / scales.float()).round().clamp(-127, 127).to(torch.int8)
    return QuantizedWeight(codes, scales, WeightScheme(8, None))


class _Room:
    """Memory for tiles, in arenas that are made as they are needed."""

    def __init__(self) -> None:
        self._arena: Arena | None = None

    def take(self, num_bytes: int) -> torch.Tensor:
        """Return `num_bytes` zeroed bytes, aligned to 64."""
        if self._arena is None or self._arena.free_bytes < aligned(num_bytes):
            self._arena = Arena(max(_ARENA_BYTES, aligned(num_bytes)))
        return self._arena.take((num_bytes,), torch.uint8)
