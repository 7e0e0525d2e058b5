"""Rounding in the formats of bitsandbytes, through its own functions: NF4 and LLM.int8().

No calibration: a weight in, the tensors that transformers' loader reads out. The library is an
optional dependency (`pip install 'qinfer[bnb]'`); reading such checkpoints needs it not.
"""

import logging
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any

import torch

from qinfer.errors import ConfigError, NonFiniteError, UnsupportedModelError
from qinfer.formats import bnb
from qinfer.formats.codebook import CodebookWeight
from qinfer.formats.weight import QuantizedWeight
from qinfer.quant.config import QuantizeConfig
from qinfer.schemes import WeightScheme

ALGORITHMS = ("bnb-nf4", "bnb-int8")
BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)  # of `quantize_4bit`
DEFAULT_BLOCK_SIZE = 64
_HEAD = "lm_head"  # neither library quantizes it
_NESTED_BLOCK = 256  # scales that share a scale
_STATE_BYTES = 163  # of the state's JSON; the digits of one number vary

Tensors = dict[str, torch.Tensor]


class BnbRounding:
    """What becomes of a weight under one of `ALGORITHMS`.

    Args:
        algorithm: `bnb-nf4` or `bnb-int8`.
        block_size: weights that share a scale, for NF4; `LLM.int8()` has one scale per row.

    Raises:
        ConfigError: the library is not installed, or it has no such block size.
    """

    def __init__(self, algorithm: str, *, block_size: int = DEFAULT_BLOCK_SIZE) -> None:
        if algorithm == "bnb-nf4" and block_size not in BLOCK_SIZES:
            raise ConfigError(
                f"bitsandbytes has no blocks of {block_size}; choose group_size from {BLOCK_SIZES}"
            )
        self._four_bit = algorithm == "bnb-nf4"
        self._block_size = block_size
        self._functional = _load_library()

    def quantize(self, weight: torch.Tensor, *, name: str) -> Tensors:
        """Round a weight.

        The scales of NF4 are themselves quantized (double quantization, section 3 of QLoRA, arXiv
        2305.14314): 4.13 bits per weight in blocks of 64 instead of 4.5.

        Args:
            weight: `[out, in]`, float16, bfloat16 or float32.
            name: the module's full name, for messages.

        Returns:
            The module's tensors, by the part of their names after the module's.

        Raises:
            NonFiniteError: a value is NaN or infinite (for INT8: in float16, which the library
                rounds from).
        """
        if not self._four_bit:
            weight = weight.half()
        if not torch.isfinite(weight).all():
            raise NonFiniteError(f"{name}.weight holds NaN, infinity or a value beyond its type")
        if self._four_bit:
            return self._nf4(weight)
        codes, largest, _ = self._functional.int8_vectorwise_quant(weight)
        codes[largest == 0] = 0  # a row of zeros was divided by zero
        order = torch.tensor(0, dtype=torch.uint8)
        return {"weight": codes, "SCB": largest, "weight_format": order}

    def dequantize(
        self, tensors: Tensors, *, in_features: int, out_features: int, name: str
    ) -> torch.Tensor:
        """Return what the tensors stand for, float32 `[out, in]`, read as a checkpoint's are."""
        read = bnb.read_four_bit if self._four_bit else bnb.read_int8
        weight: CodebookWeight | QuantizedWeight = read(
            tensors, in_features=in_features, out_features=out_features, name=name
        )
        return weight.dequantize()

    def error(self, weight: torch.Tensor, tensors: Tensors, *, name: str) -> float:
        """Return the squared error of the rounded weight as a share of the weight's square."""
        rows, columns = weight.shape
        rounded = self.dequantize(tensors, in_features=columns, out_features=rows, name=name)
        dense = weight.float()
        total = float(dense.square().sum(dtype=torch.float64))
        lost = float((dense - rounded).square().sum(dtype=torch.float64))
        return lost / total if total > 0 else 0.0

    def file_bytes(self, in_features: int, out_features: int) -> int:
        """Return the size of a module's tensors, but for some digits of the state."""
        if not self._four_bit:
            return in_features * out_features + 4 * out_features + 1
        blocks = -(-in_features * out_features // self._block_size)
        nested = 4 * (-(-blocks // _NESTED_BLOCK) + 256)
        return -(-in_features * out_features // 2) + blocks + nested + 4 * 16 + _STATE_BYTES

    def _nf4(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        packed, state = self._functional.quantize_4bit(
            weight.contiguous(),
            blocksize=self._block_size,
            compress_statistics=True,
            quant_type="nf4",
        )
        parts = {f"weight.{key}": part for key, part in state.as_dict(packed=True).items()}
        return {"weight": packed, **parts}


def plan_scheme(config: QuantizeConfig) -> WeightScheme | None:
    """Return the form that the options ask of bitsandbytes; None = the algorithm is none of its.

    Raises:
        ConfigError: an option that its formats have no room for.
    """
    if config.algorithm not in ALGORITHMS:
        return None
    four_bit = config.algorithm == "bnb-nf4"
    if config.asym or config.format != "gptq" or config.weights not in {"int4", "int8"}:
        raise ConfigError(
            f"algorithm {config.algorithm} decides width, symmetry and format itself; leave out "
            "asym, format and weights"
        )
    if four_bit and config.weights == "int8":
        raise ConfigError("algorithm bnb-nf4 has 4 bits, not int8; take bnb-int8, or leave weights")
    if any(not override.skip for override in config.parsed_overrides()):
        raise ConfigError(
            f"algorithm {config.algorithm} quantizes all modules alike; an override can only be "
            "REGEX=skip"
        )
    if not four_bit:
        if config.group_size not in {"auto", -1}:
            raise ConfigError(
                f"algorithm bnb-int8 has one scale per row, not groups of {config.group_size}"
            )
        return bnb.INT8_SCHEME
    size = DEFAULT_BLOCK_SIZE if config.group_size == "auto" else config.group_size
    if size not in BLOCK_SIZES:
        raise ConfigError(f"bitsandbytes has no blocks of {size}; group_size: one of {BLOCK_SIZES}")
    return WeightScheme(4, int(size), table="nf4")


def make_rounding(config: QuantizeConfig, modules: Iterable[str]) -> BnbRounding | None:
    """Return the rounding that the options ask for; None = not one of bitsandbytes.

    Args:
        config: the options.
        modules: names of all linears of the model.

    Raises:
        ConfigError: the library is not installed, or an option does not go with it.
        UnsupportedModelError: the model has experts, which transformers does not load quantized.
    """
    scheme = plan_scheme(config)
    if scheme is None:
        return None
    expert = next((name for name in modules if ".experts." in name), None)
    if expert is not None:
        raise UnsupportedModelError(
            f"{expert}: transformers loads no experts quantized by bitsandbytes; take gptq or rtn"
        )
    return BnbRounding(config.algorithm, block_size=scheme.group_size or DEFAULT_BLOCK_SIZE)


def settings(algorithm: str, dtype: str, skipped: Sequence[str]) -> dict[str, Any]:
    """Return the `quantization_config`, as transformers 5 writes it.

    Args:
        algorithm: one of `ALGORITHMS`.
        dtype: of the model, in which transformers computes.
        skipped: full names of linears that stay as they are, beside the head.
    """
    four_bit = algorithm == "bnb-nf4"
    return {
        "quant_method": "bitsandbytes",
        "_load_in_8bit": not four_bit,
        "_load_in_4bit": four_bit,
        "llm_int8_threshold": 6.0,
        "llm_int8_skip_modules": [_HEAD, *skipped],
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
        "bnb_4bit_quant_type": "nf4" if four_bit else "fp4",
        "bnb_4bit_use_double_quant": four_bit,
        "bnb_4bit_compute_dtype": dtype if four_bit else "float32",
        "bnb_4bit_quant_storage": "uint8",
        "load_in_4bit": four_bit,
        "load_in_8bit": not four_bit,
    }


def _load_library() -> Any:
    """Import `bitsandbytes.functional`, which is no dependency and slow to import."""
    logger = logging.getLogger("bitsandbytes")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns of missing kernels for layers that are not used here
    try:
        return import_module("bitsandbytes.functional")
    except ImportError as error:
        raise ConfigError(
            "the bnb algorithms round through the library bitsandbytes, which cannot be imported "
            f"({error}); install it: pip install 'qinfer[bnb]'"
        ) from error
    finally:
        logger.setLevel(level)
