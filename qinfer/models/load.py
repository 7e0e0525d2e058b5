"""From a checkpoint to a decoder: which tensors there must be, and one block after the other.

Weights are taken from the file block by block, so that the peak is the decoder and one block.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping

import torch

from qinfer.checkpoint.reader import Checkpoint
from qinfer.errors import CheckpointError, ConfigError
from qinfer.formats.codebook import CodebookWeight
from qinfer.kernels.linear import own
from qinfer.models.config import (
    ModelConfig,
    block_linear_shapes,
    block_tensor_shapes,
    linear_shapes,
)
from qinfer.models.decoder import Decoder, DecoderBlock
from qinfer.models.layers import Linear, RMSNorm, Weight
from qinfer.models.rope import RotaryTable

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head"
TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_log = logging.getLogger(__name__)


def load_decoder(
    checkpoint: Checkpoint,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    max_positions: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Decoder:
    """Load a checkpoint's decoder.

    Args:
        checkpoint: an opened model directory.
        dtype: of activations and unquantized weights; `auto` = as the checkpoint says.
        device: where it runs.
        max_positions: how long a sequence may become; None = as long as the model allows.
        progress: called with the blocks loaded and their number after each.

    Raises:
        CheckpointError: tensors are missing, damaged or of the wrong shape.
        UnsupportedModelError: the architecture is not supported.
    """
    config = ModelConfig.from_dict(checkpoint.config)
    check_tensors(checkpoint, config)
    torch_dtype = resolve_dtype(dtype, config)
    blocks = []
    for layer in range(config.num_layers):
        weights = block_weights(checkpoint, config, layer)
        blocks.append(build_block(config, layer, weights, dtype=torch_dtype, device=device))
        if progress is not None:
            progress(layer + 1, config.num_layers)
    embedding = own(read_embedding(checkpoint, config).to(device, torch_dtype))
    norm = RMSNorm(own(checkpoint.tensor(FINAL_NORM)), config.rms_norm_eps, torch_dtype)
    return Decoder(
        config,
        embedding=embedding,
        blocks=blocks,
        norm=norm,
        head=_head(checkpoint, config, embedding, torch_dtype, device),
        rotary=RotaryTable(config.rope, config.head_dim, max_positions or config.max_position),
    )


def build_block(
    config: ModelConfig,
    layer: int,
    weights: Mapping[str, Weight],
    *,
    dtype: torch.dtype,
    device: str,
    fuse: bool = True,
) -> DecoderBlock:
    """Build one decoder block from `block_weights`; unfused, no weight is copied."""
    return DecoderBlock(config, layer, weights, dtype=dtype, device=device, fuse=fuse)


def block_weights(checkpoint: Checkpoint, config: ModelConfig, layer: int) -> dict[str, Weight]:
    """Read the tensors of one decoder block, by their names inside the block.

    Linears come under their module name without a suffix, dense or quantized.

    Raises:
        CheckpointError: a tensor is missing, damaged or of the wrong shape.
    """
    prefix = f"model.layers.{layer}."
    weights: dict[str, Weight] = {}
    for name, (inputs, outputs) in block_linear_shapes(config, layer).items():
        weights[name] = linear_weight(checkpoint, prefix + name, (outputs, inputs))
    for name, shape in block_tensor_shapes(config, layer).items():
        check_shape(checkpoint, prefix + name, shape)
        weights[name] = own(checkpoint.tensor(prefix + name))
    return weights


def linear_weight(checkpoint: Checkpoint, name: str, shape: tuple[int, int]) -> Weight:
    """Read the weight `[out, in]` of a linear: as codes that a kernel runs, or dense.

    Raises:
        CheckpointError: a tensor is missing, damaged or of the wrong shape.
    """
    weight = checkpoint.weight(name, in_features=shape[1], out_features=shape[0])
    return weight.dequantize() if isinstance(weight, CodebookWeight) else weight


def loaded_bytes(checkpoint: Checkpoint, config: ModelConfig, dtype: str) -> int:
    """Return the bytes of a checkpoint, with the codes that no kernel runs as dense weights.

    Raises:
        ConfigError: `dtype` is unknown.
    """
    shapes = linear_shapes(config) | {HEAD: (config.hidden_size, config.vocab_size)}
    element_bytes = resolve_dtype(dtype, config).itemsize
    total = checkpoint.total_bytes
    for name in _codes_without_kernel(checkpoint, config):
        inputs, outputs = shapes[name]
        parts = (checkpoint.entries.get(part) for part in checkpoint.weight_names(name))
        total -= sum(part.num_bytes for part in parts if part is not None)
        total += inputs * outputs * element_bytes
    return total


def report_dequantized(checkpoint: Checkpoint, config: ModelConfig, dtype: torch.dtype) -> None:
    """Warn once of the linears whose codes no kernel runs: they are loaded as dense weights."""
    kinds = Counter(_codes_without_kernel(checkpoint, config).values())
    if kinds:
        found = ", ".join(f"{kind} ({count})" for kind, count in sorted(kinds.items()))
        _log.warning(
            "%d of %d linears are stored as codes that no kernel runs: %s; they are dequantized to "
            "%s, at its size and speed",
            kinds.total(), len(_needed(config)[1]), found, str(dtype).removeprefix("torch."),
        )  # fmt: skip


def _codes_without_kernel(checkpoint: Checkpoint, config: ModelConfig) -> dict[str, str]:
    """Return the kind of code by linear."""
    settings = checkpoint.quantization
    if settings is None or all(found.scheme is not None for found in settings.formats):
        return {}
    kinds = {}
    for name in _needed(config)[1]:
        stored = settings.module_format(name)
        if stored is not None and stored.scheme is None and checkpoint.is_quantized(name):
            kinds[name] = str(stored)
    return kinds


def check_tensors(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Compare the names in the checkpoint with those that the model needs.

    Raises:
        CheckpointError: names are missing; lists up to ten and the count.
    """
    plain, linears = _needed(config)
    expected = plain + [name for linear in linears for name in checkpoint.weight_names(linear)]
    harmless = [name for name in checkpoint.names() if _harmless(name, config)]
    checkpoint.check_names(expected + harmless)


def resolve_dtype(name: str, config: ModelConfig) -> torch.dtype:
    """Return the torch dtype behind an option's spelling; `auto` = the checkpoint's.

    Raises:
        ConfigError: the name is unknown.
    """
    chosen = config.dtype if name == "auto" else name
    if chosen not in TORCH_DTYPES:
        raise ConfigError(f"dtype {name!r} is unknown; choose from auto, {', '.join(TORCH_DTYPES)}")
    return TORCH_DTYPES[chosen]


def read_embedding(checkpoint: Checkpoint, config: ModelConfig) -> torch.Tensor:
    """Read the embedding `[vocab, hidden]`, in the type of the file.

    Raises:
        CheckpointError: it is missing, damaged or of the wrong shape.
    """
    check_shape(checkpoint, EMBEDDING, (config.vocab_size, config.hidden_size))
    return checkpoint.tensor(EMBEDDING)


def check_shape(checkpoint: Checkpoint, name: str, expected: tuple[int, ...]) -> None:
    """Compare a tensor's shape with what config.json calls for.

    Raises:
        CheckpointError: there is no such tensor, or it has another shape.
    """
    found = checkpoint.shape(name)
    if found != expected:
        raise CheckpointError(
            f"{checkpoint.path}: {name} has shape {found}, expected {expected} from config.json"
        )


def _head(
    checkpoint: Checkpoint,
    config: ModelConfig,
    embedding: torch.Tensor,
    dtype: torch.dtype,
    device: str,
) -> Linear:
    if config.tie_word_embeddings:
        return Linear(embedding, None, dtype=dtype, device=device)
    weight = linear_weight(checkpoint, HEAD, (config.vocab_size, config.hidden_size))
    return Linear(weight, None, dtype=dtype, device=device)


def _needed(config: ModelConfig) -> tuple[list[str], list[str]]:
    """Return the names of plain tensors and of linears that the model needs."""
    plain = [EMBEDDING, FINAL_NORM]
    for layer in range(config.num_layers):
        plain += [f"model.layers.{layer}.{name}" for name in block_tensor_shapes(config, layer)]
    linears = list(linear_shapes(config))
    if not config.tie_word_embeddings:
        linears.append(HEAD)
    return plain, linears


def _harmless(name: str, config: ModelConfig) -> bool:
    """Tell names that old or tied checkpoints carry beside what is needed."""
    tied_copy = config.tie_word_embeddings and name.startswith(f"{HEAD}.")
    return tied_copy or name.endswith(".rotary_emb.inv_freq")
