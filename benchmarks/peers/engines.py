"""The engines of the comparison: how each is set, what it is called."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers.environments import GPTQMODEL, LLAMA_CPP, OPENVINO, VLLM, Environment

QINFER = "run_qinfer.py"


@dataclass(frozen=True, slots=True)
class Spec:
    """An engine with its settings.

    Args:
        name: for tables; its first word is the engine's.
        bits: of the weights, so that like is compared with like.
        script: its process.
        settings: for the script.
        environment: None = the one that runs this script.
        variables: `NAME=value` for its process.
        made_by_qinfer: its model is qinfer's; it loads what qinfer quantized.
    """

    name: str
    bits: int
    script: str
    settings: dict[str, Any]
    environment: Environment | None = None
    variables: tuple[str, ...] = ()
    made_by_qinfer: bool = False


@dataclass(frozen=True, slots=True)
class Setup:
    """What all engines share.

    Args:
        source: the model's directory.
        gguf: the same as a GGUF file, if there is one.
        cache: folder of environments and models.
        threads: of every engine.
        max_len: tokens of a sequence at most.
        memory: of each qinfer engine.
        algorithm: how qinfer quantizes.
    """

    source: Path
    gguf: Path | None
    cache: Path
    threads: int
    max_len: int
    memory: str
    algorithm: str

    @property
    def models(self) -> Path:
        """Folder of the engines' models."""
        return self.cache / f"models-{self.source.name}"

    @property
    def common(self) -> dict[str, Any]:
        """Settings of every engine."""
        return {"threads": self.threads, "max_len": self.max_len, "source": str(self.source)}

    def quantized(self, bits: int, group_size: int) -> dict[str, Any]:
        """Return the settings of a checkpoint that qinfer quantizes, in GPTQ format."""
        options: dict[str, Any] = {"weights": f"int{bits}", "algorithm": self.algorithm}
        if self.algorithm == "gptq":
            options["act_order"] = False  # so that every reader of the format takes it
        options["group_size"] = group_size
        model = self.models / f"qinfer-int{bits}-{self.algorithm}"
        return self.common | {"model": str(model), "quantize": options}


def all_specs(setup: Setup) -> list[Spec]:
    """Return all engines, in the order of the tables."""
    unquantized = setup.common | {"model": str(setup.source), "quantize": {}}
    eager = unquantized | {"dtype": "bfloat16", "attention": "eager"}
    int4 = setup.quantized(4, 64)
    return [
        _qinfer(setup, "int4 g64, KV int8", 4, int4 | {"kv": "int8"}),
        _qinfer(setup, "int4 g64, KV fp16", 4, int4 | {"kv": "fp16"}),
        _qinfer(setup, "int8, KV int8", 8, setup.quantized(8, -1) | {"kv": "int8"}),
        _qinfer(setup, "bf16, KV bf16", 16, unquantized | {"kv": "bf16"}),
        # llama.cpp has a quantized V cache with flash attention only.
        _llama(setup, "Q4_0", 4, "f16", flash=False),
        _llama(setup, "Q4_0", 4, "f16", flash=True),
        _llama(setup, "Q4_0", 4, "q8_0", flash=True),
        _llama(setup, "Q8_0", 8, "f16", flash=True),
        _llama(setup, "Q8_0", 8, "q8_0", flash=True),
        _openvino(setup, 4),
        _openvino(setup, 8),
        Spec(
            "vLLM GPTQ int4 g64, KV bf16",
            4,
            "run_vllm.py",
            int4,
            VLLM,
            _vllm_variables(setup),
            made_by_qinfer=True,
        ),
        Spec(
            "GPTQModel GPTQ int4 g64, KV bf16",
            4,
            "run_gptqmodel.py",
            int4,
            GPTQMODEL,
            made_by_qinfer=True,
        ),
        Spec("transformers bf16 eager", 16, "run_transformers.py", eager),
    ]


def _qinfer(setup: Setup, name: str, bits: int, settings: dict[str, Any]) -> Spec:
    return Spec(f"qinfer {name}", bits, QINFER, settings | {"memory": setup.memory})


def _llama(setup: Setup, weights: str, bits: int, kv: str, *, flash: bool) -> Spec:
    settings = setup.common | {
        "model": str(setup.models / f"{weights}.gguf"),
        "weights": weights,
        "kv": kv,
        "flash": flash,
        "gguf": None if setup.gguf is None else str(setup.gguf),
    }
    name = f"llama.cpp {weights}, KV {kv}{', flash' if flash else ''}"
    return Spec(name, bits, "run_llama_cpp.py", settings, LLAMA_CPP)


def _openvino(setup: Setup, bits: int) -> Spec:
    model = setup.models / f"openvino-int{bits}"
    settings = setup.common | {"model": str(model), "bits": bits}
    return Spec(f"OpenVINO int{bits}, KV u8", bits, "run_openvino.py", settings, OPENVINO)


def _vllm_variables(setup: Setup) -> tuple[str, ...]:
    return (
        "VLLM_ENABLE_V1_MULTIPROCESSING=0",  # no worker that would run on while it is stopped
        "VLLM_CPU_KVCACHE_SPACE=2",  # GB
        "VLLM_CPU_OMP_THREADS_BIND=nobind",  # OMP_NUM_THREADS decides, as for the others
        f"VLLM_CACHE_ROOT={setup.cache / 'vllm-cache'}",
        "VLLM_NO_USAGE_STATS=1",
    )
