"""From a checkpoint to the fastest decoder that this machine and model allow.

Tried in order: the C++ program (`models.native`), then the torch reference (`models.decoder`). A
fallback is reported, with its reason, when the model is loaded and with every kernel row.
"""

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from qinfer.checkpoint.reader import Checkpoint
from qinfer.errors import CheckpointError, ConfigError
from qinfer.formats.weight import QuantizedWeight
from qinfer.kernels.cpu import native, paged, tiled
from qinfer.kernels.cpu.arena import Arena, aligned, release_freed
from qinfer.kernels.spec import LinearSpec
from qinfer.models.causal_lm import CausalLM
from qinfer.models.config import (
    ModelConfig,
    block_linear_shapes,
    block_tensor_shapes,
    linear_shapes,
)
from qinfer.models.load import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    check_shape,
    check_tensors,
    linear_weight,
    load_decoder,
    report_dequantized,
    resolve_dtype,
)
from qinfer.models.native import NativeDecoder, NativeWeights
from qinfer.models.native_layer import NativeGroup, NativeLayer, Placing, Source, WeightRows
from qinfer.models.rope import RotaryTable
from qinfer.schemes import WeightScheme

_ARENA_BYTES = 64 << 20
_EMBEDDING_PIECE = 1 << 18  # elements that are read at a time
INT8_ROWS = WeightScheme(8, None)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How a model is loaded.

    Args:
        dtype: of activations and unquantized weights; `auto` = as the checkpoint says.
        device: where it runs.
        max_positions: how long a sequence may become; None = as long as the model allows.
        threads: CPU threads.
        activations: `int8` quantizes the inputs of quantized linears per token in groups of 32 and,
            where the CPU multiplies pairs of bfloat16, rounds those of bfloat16 linears to that;
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
    report_dequantized(checkpoint, config, resolve_dtype(options.dtype, config))
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
    missing = native.missing_reason()
    if missing is not None:
        return missing
    dtype = resolve_dtype(options.dtype, config)
    if dtype == torch.float16:
        return "the C++ kernels compute in float32, float16 was asked for"
    if config.moe is not None and any(config.moe.sparse_layers):
        return "the C++ program runs dense layers only, not mixtures of experts"
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
    """Tile the weights as they are read, so that little of the source is in memory at a time."""
    with _one_torch_thread(), ThreadPoolExecutor(options.threads) as team:
        placing = Placing(
            int8_activations=options.activations == "int8",
            allocate=_Room().take,
            team=team if options.threads > 1 else None,
        )
        weights = _weights(checkpoint, config, options, placing)
    release_freed()
    length = options.max_positions or config.max_position
    rotary = RotaryTable(config.rope, config.head_dim, length)
    return NativeDecoder(config, weights, rotary, threads=options.threads)


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """Keep torch to one thread: its many small operations gain nothing from more, and lose much.

    Where other programs keep the cores busy, every operation on two threads waits for its turn
    twice; a load was seen to take twenty times as long.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _weights(
    checkpoint: Checkpoint, config: ModelConfig, options: LoadOptions, placing: Placing
) -> NativeWeights:
    dtype = resolve_dtype(options.dtype, config)
    layers = []
    for layer in range(config.num_layers):
        layers.append(_layer(checkpoint, config, layer, dtype, placing))
        release_freed()  # or the holes that each layer leaves in the heap would add up
        if options.progress is not None:
            options.progress(layer + 1, config.num_layers)
    # A tied head in the model's own type is the embedding too.
    shared = config.tie_word_embeddings and not _rounds_head(checkpoint, options)
    embedding = None if shared else _embedding(checkpoint, config, dtype, placing)
    head = _head(checkpoint, config, options)
    return NativeWeights(
        dtype=dtype,
        embedding=embedding,
        layers=layers,
        norm=checkpoint.tensor(FINAL_NORM).float(),
        head=NativeGroup({HEAD: head}, {}, prefix="", placing=placing),
    )


def _layer(
    checkpoint: Checkpoint, config: ModelConfig, layer: int, dtype: torch.dtype, placing: Placing
) -> NativeLayer:
    prefix, shapes = f"model.layers.{layer}.", block_linear_shapes(config, layer)

    def linear(name: str) -> Source:
        inputs, outputs = shapes[name]
        return _linear(checkpoint, prefix + name, (outputs, inputs), dtype)

    vectors = {}
    for name, expected in block_tensor_shapes(config, layer).items():
        check_shape(checkpoint, prefix + name, expected)
        vectors[name] = checkpoint.tensor(prefix + name).to(dtype).float()
    return NativeLayer(config, layer, linear, vectors, placing=placing)


def _linear(
    checkpoint: Checkpoint, prefix: str, shape: tuple[int, int], dtype: torch.dtype
) -> Source:
    """Return a linear's weight: quantized as it is, dense to be read in `dtype` by its rows."""
    if checkpoint.is_quantized(prefix):
        weight = linear_weight(checkpoint, prefix, shape)
        if isinstance(weight, QuantizedWeight):
            return weight
        whole = weight.to(dtype)
        return WeightRows(shape, dtype, lambda begin, end: whole[begin:end])
    return _dense(checkpoint, f"{prefix}.weight", shape, dtype)


def _dense(
    checkpoint: Checkpoint, name: str, shape: tuple[int, int], dtype: torch.dtype
) -> WeightRows:
    return WeightRows(shape, dtype, _reader(checkpoint, name, shape, dtype))


def _reader(
    checkpoint: Checkpoint, name: str, shape: tuple[int, int], dtype: torch.dtype
) -> Callable[[int, int], torch.Tensor]:
    """Return what reads rows of a dense weight."""
    check_shape(checkpoint, name, shape)
    if checkpoint.is_pickled:
        whole = checkpoint.tensor(name).to(dtype)
        return lambda begin, end: whole[begin:end]
    return lambda begin, end: checkpoint.rows(name, begin, end).to(dtype)


def _embedding(
    checkpoint: Checkpoint, config: ModelConfig, dtype: torch.dtype, placing: Placing
) -> torch.Tensor:
    shape = (config.vocab_size, config.hidden_size)
    read = _reader(checkpoint, EMBEDDING, shape, dtype)
    room = placing.allocate(shape[0] * shape[1] * dtype.itemsize).view(dtype).view(shape)
    step = max(1, _EMBEDDING_PIECE // shape[1])
    for begin in range(0, shape[0], step):
        end = min(begin + step, shape[0])
        room[begin:end] = read(begin, end)
    return room


def _head(checkpoint: Checkpoint, config: ModelConfig, options: LoadOptions) -> Source:
    """Return the head: as the checkpoint has it, or rounded to INT8 per row."""
    shape, dtype = (config.vocab_size, config.hidden_size), resolve_dtype(options.dtype, config)
    tied = config.tie_word_embeddings
    if not tied and checkpoint.is_quantized(HEAD):
        return _linear(checkpoint, HEAD, shape, dtype)
    read = _reader(checkpoint, EMBEDDING if tied else f"{HEAD}.weight", shape, dtype)
    if not _rounds_head(checkpoint, options):
        return WeightRows(shape, dtype, read)
    return WeightRows(shape, INT8_ROWS, lambda begin, end: int8_rows(read(begin, end)))


def _rounds_head(checkpoint: Checkpoint, options: LoadOptions) -> bool:
    if options.lm_head == "auto":
        return checkpoint.quantization is not None
    return options.lm_head == "int8"


def int8_rows(weight: torch.Tensor) -> QuantizedWeight:
    """Round a weight `[out, in]` to INT8 with one symmetric float16 scale per row.

    Raises:
        CheckpointError: a value is NaN or infinite, or too large for a float16 scale.
    """
    amax = weight.abs().amax(-1, keepdim=True).float()
    smallest = torch.finfo(torch.float16).smallest_normal
    scales = (amax / 127).clamp(min=smallest).half()
    if not scales.isfinite().all():
        raise CheckpointError(
            f"{HEAD} holds NaN, infinity or values beyond 65504 * 127; the file is damaged"
        )
    codes = (weight.float() / scales.float()).round_().clamp_(-127, 127).to(torch.int8)
    return QuantizedWeight(codes, scales, INT8_ROWS)


class _Room:
    """Memory for tiles, in arenas that are made as they are needed."""

    def __init__(self) -> None:
        self._arena: Arena | None = None

    def take(self, num_bytes: int) -> torch.Tensor:
        """Return `num_bytes` zeroed bytes, aligned to 64."""
        if self._arena is None or self._arena.free_bytes < aligned(num_bytes):
            self._arena = Arena(max(_ARENA_BYTES, aligned(num_bytes)))
        return self._arena.take((num_bytes,), torch.uint8)
