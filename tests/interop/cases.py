"""Which checkpoints are loaded where: ours in other engines, theirs in qinfer."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from peers.environments import GPTQMODEL, LLMCOMPRESSOR, TRANSFORMERS, VLLM, Environment

HERE = Path(__file__).parent
MAKERS = HERE.parents[1] / "eval" / "comparison"
PROCESSES = HERE / "processes"


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine that loads checkpoints.

    Args:
        name: for the table.
        environment: where it is installed.
        script: in `processes/`; writes logits.
        dtype: that it computes in.
        limit: mean KL divergence from qinfer, in nats, that its arithmetic explains.
        variables: `NAME=value` for its process.
        margin: a checkpoint that is read right is nearer to itself elsewhere than to its source, by
            this factor at least.
    """

    name: str
    environment: Environment
    script: str
    dtype: str
    limit: float
    variables: tuple[str, ...] = ()
    margin: float = 10


@dataclass(frozen=True, slots=True)
class Ours:
    """A checkpoint that qinfer writes.

    Args:
        name: for the table.
        options: of `quantize`.
        peers: who loads it.
        refused: by an engine's name, part of its reason why it cannot run this: no failure of ours.
    """

    name: str
    options: Mapping[str, Any]
    peers: tuple[Peer, ...]
    refused: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Theirs:
    """A checkpoint that another tool writes.

    Args:
        name: for the table.
        environment: where the tool is installed.
        script: makes it.
        options: for the script.
        peer: who says what is right, after loading it too.
    """

    name: str
    environment: Environment
    script: Path
    options: Mapping[str, Any]
    peer: Peer


# Its torch kernels take no float32.
_GPTQMODEL = Peer("GPTQModel", GPTQMODEL, "load_gptqmodel.py", "float16", 1e-4)
_TRANSFORMERS = Peer("transformers", TRANSFORMERS, "load_transformers.py", "float32", 1e-5)
# Where a format quantizes the inputs of linears as well, each engine does so in its own way.
_WEIGHTS_ALONE = replace(_TRANSFORMERS, dtype="float32, weights alone")
_VLLM = Peer(
    "vLLM (CPU)",
    VLLM,
    "load_vllm.py",
    "bfloat16",  # its INT4 kernels for CPUs take nothing else
    5e-3,
    (
        "VLLM_ENABLE_V1_MULTIPROCESSING=0",
        "VLLM_CPU_KVCACHE_SPACE=1",  # GB
        "VLLM_CPU_OMP_THREADS_BIND=nobind",
        "VLLM_NO_USAGE_STATS=1",
    ),
)
# The inputs of linears quantized per token against exact ones: as much as INT8 weights change.
_TRANSFORMERS_W8A8 = replace(_TRANSFORMERS, limit=0.02, margin=0.5)
_VLLM_W8A8 = replace(_VLLM, limit=0.02, margin=0.5)

_CT = {"format": "compressed-tensors"}
_INT8 = {"weights": "int8", "group_size": -1}
_G64 = {"group_size": 64}
_G128 = {"group_size": 128}
_W8A8 = _CT | _INT8 | {"input_activations": "int8"}
_MIXED = _G64 | {"overrides": ("down_proj=bits:8",)}
_MIXED_GROUPS = _G64 | {"overrides": ("down_proj=group_size:32",)}
_NO_W8A16 = {_VLLM.name: "Failed to find a kernel that can implement the WNA16 linear layer"}
# transformers expects the zero points unpacked, which compressed-tensors itself does not write.
_NO_PACKED_ZEROS = {_TRANSFORMERS.name: "`ignore_mismatched_sizes`"}
_NO_INT8 = {_VLLM.name: "Only types = [ScalarType.uint4b8] are supported"}

OURS = (
    Ours("GPTQ v1, INT4 g64", _G64, (_GPTQMODEL, _VLLM)),
    Ours("GPTQ v1, INT4 g128", _G128, (_GPTQMODEL, _VLLM)),
    Ours("GPTQ v1, INT8 per channel", _INT8, (_GPTQMODEL, _VLLM), _NO_INT8),
    Ours("GPTQ v1, INT3 g64", _G64 | {"weights": "int3"}, (_GPTQMODEL,)),
    Ours("GPTQ v1, INT2 g64", _G64 | {"weights": "int2"}, (_GPTQMODEL,)),
    Ours("GPTQ v1, INT4 g64 and INT8", _MIXED, (_GPTQMODEL, _VLLM), _NO_INT8),
    Ours("GPTQ v1, INT4 g64 and g32", _MIXED_GROUPS, (_GPTQMODEL, _VLLM)),
    Ours("GPTQ v2, INT4 g64 asymmetric", _G64 | {"asym": True}, (_GPTQMODEL,)),
    Ours("pack-quantized, INT4 g64", _CT | _G64, (_TRANSFORMERS, _VLLM)),
    Ours("pack-quantized, INT4 g128", _CT | _G128, (_TRANSFORMERS, _VLLM)),
    Ours(
        "pack-quantized, INT4 g64 asymmetric",
        _CT | _G64 | {"asym": True},
        (_TRANSFORMERS, _VLLM),
        _NO_PACKED_ZEROS,
    ),
    Ours("pack-quantized, INT8 per channel", _CT | _INT8, (_TRANSFORMERS, _VLLM), _NO_W8A16),
    Ours("int-quantized, W8A8", _W8A8, (_WEIGHTS_ALONE, _TRANSFORMERS_W8A8, _VLLM_W8A8)),
)

_WEIGHTS = {"type": "int", "symmetric": True}
_W4 = _WEIGHTS | {"num_bits": 4, "strategy": "group", "group_size": 64}
# Its AWQ itself needs CUDA, the format does not.
_AWQ_SETTINGS = {"quant_method": "awq", "method": "awq", "version": "gemm", "zero_point": True}
_AWQ = {"sym": False, "format": "gemm", "rounding": True, "settings": _AWQ_SETTINGS}
_TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
_FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


def _gptqmodel(name: str, **options: Any) -> Theirs:
    wanted = {"bits": 4, "group_size": 64, "sym": True} | options
    script = MAKERS / "run_gptqmodel.py"
    return Theirs(f"GPTQModel: {name}", GPTQMODEL, script, wanted, _GPTQMODEL)


def _llmcompressor(
    name: str, weights: Mapping[str, Any], peer: Peer = _TRANSFORMERS, **options: Any
) -> Theirs:
    script = MAKERS / "run_llmcompressor.py"
    wanted = {"weights": dict(weights)} | options
    return Theirs(f"llm-compressor: {name}", LLMCOMPRESSOR, script, wanted, peer)


def _bitsandbytes(name: str, **options: Any) -> Theirs:
    script = PROCESSES / "make_bitsandbytes.py"
    # Its NF4 is dequantized to the type of the source, bfloat16.
    peer = replace(_WEIGHTS_ALONE, limit=5e-4)
    return Theirs(f"bitsandbytes: {name}", TRANSFORMERS, script, options, peer)


THEIRS = (
    _gptqmodel("GPTQ v1, INT4 g64"),
    _gptqmodel("GPTQ v1, INT4 g64, desc_act", desc_act=True),
    _gptqmodel("GPTQ v2, INT4 g64 asymmetric", sym=False, format="gptq_v2"),
    _gptqmodel("GPTQ v1, INT4 g64 asymmetric", sym=False),
    _gptqmodel("GPTQ v1, INT8 g64", bits=8),
    _gptqmodel("AWQ GEMM, INT4 g64", **_AWQ),
    _llmcompressor("pack-quantized, INT4 g64", _W4),
    _llmcompressor("pack-quantized, INT4 g64 asymmetric", _W4 | {"symmetric": False}, _VLLM),
    _llmcompressor("pack-quantized, INT4 g64, actorder group", _W4 | {"actorder": "group"}),
    _llmcompressor("pack-quantized, INT4 g64, FP8 KV scales", _W4, kv_cache_scheme=_FP8),
    _llmcompressor(
        "int-quantized, W8A8",
        _WEIGHTS | {"num_bits": 8, "strategy": "channel"},
        _WEIGHTS_ALONE,
        input_activations=_TOKEN,
    ),
    _bitsandbytes("NF4", load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    _bitsandbytes("INT8", load_in_8bit=True),
)
