"""What loading costs: the weights, one block of the source, and nothing else."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from support.checkpoints import write_tiny
from support.quantized import quantize_directory

from qinfer.kernels.cpu import native
from qinfer.quant.pipeline import quantize
from qinfer.schemes import WeightScheme

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or native.load() is None,
    reason="reads the peak from /proc, of the C++ program",
)

MIB = 1 << 20
HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, VOCAB = 512, 1536, 12, 8, 4, 16384
BLOCK_WEIGHTS = HIDDEN * (2 * HIDDEN + 2 * HIDDEN * KV_HEADS // HEADS + 3 * INNER)
# The last huge page of the arena, and what the allocators of C and Python round up.
ROUNDING = 8 * MIB

# A first load of a tiny model makes resident what belongs to the program and not to a model.
MEASURE = """
import sys
from pathlib import Path
from qinfer.checkpoint.reader import open_checkpoint
from qinfer.models.native_load import LoadOptions, load_model

def resident(kind):
    status = Path("/proc/self/status").read_text()
    return int(status.split(kind + ":")[1].split()[0]) << 10

options = LoadOptions(threads=2, max_positions=64)
load_model(open_checkpoint(Path(sys.argv[1])), options)
checkpoint = open_checkpoint(Path(sys.argv[2]))
Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
before = resident("VmRSS")
model = load_model(checkpoint, options)
print(resident("VmHWM") - before, resident("VmRSS") - before, model.memory_bytes)
"""


def write_model(path: Path) -> Path:
    """Write a random bf16 Llama of 92 MB with a tied head, much beside an interpreter."""
    generator = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> torch.Tensor:
        return (torch.rand(shape, generator=generator) - 0.5).to(torch.bfloat16)

    kv_size = HIDDEN * KV_HEADS // HEADS
    shapes = {
        "self_attn.q_proj.weight": (HIDDEN, HIDDEN),
        "self_attn.k_proj.weight": (kv_size, HIDDEN),
        "self_attn.v_proj.weight": (kv_size, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        "mlp.gate_proj.weight": (INNER, HIDDEN),
        "mlp.up_proj.weight": (INNER, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, INNER),
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
    }
    tensors = {
        f"model.layers.{layer}.{name}": weight(*shape)
        for layer in range(LAYERS)
        for name, shape in shapes.items()
    }
    tensors |= {
        "model.embed_tokens.weight": weight(VOCAB, HIDDEN),
        "model.norm.weight": weight(HIDDEN),
    }
    path.mkdir()
    safetensors.torch.save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "dtype": "bfloat16",
        "tie_word_embeddings": True,
    }
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("dense") / "model")


@pytest.fixture(scope="module")
def warm_up(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_tiny(tmp_path_factory.mktemp("tiny") / "int4")
    quantize_directory(path, WeightScheme(4, 32))
    return path


def measure(warm_up: Path, model: Path) -> tuple[int, int, int]:
    """Return peak and final growth of the resident memory, and the weights' bytes, of a load."""
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(warm_up), str(model)],
        capture_output=True,
        text=True,
        check=False,
    )
    if "PermissionError" in run.stderr:
        pytest.skip("this system does not let a process reset its peak")
    assert run.returncode == 0, run.stderr
    peak, kept, weights = (int(word) for word in run.stdout.split())
    return peak, kept, weights


def test_l04_loading_costs_the_weights_and_one_block(warm_up: Path, dense: Path) -> None:
    peak, kept, weights = measure(warm_up, dense)
    assert weights > 90e6
    assert kept < weights + ROUNDING
    assert peak < weights + 2 * BLOCK_WEIGHTS + ROUNDING


def test_l04_int4_weights_cost_one_block_of_codes(
    warm_up: Path, dense: Path, tmp_path: Path
) -> None:
    """The codes as they are read, and those that wait for the other thread to repack them."""
    path = tmp_path / "int4"
    quantize(dense, path, algorithm="rtn", weights="int4", group_size=64, kv_cache_dtype="none")
    peak, kept, weights = measure(warm_up, path)
    assert 40e6 < weights < 50e6  # the embedding in bf16 and the head in INT8 are more than half
    assert kept < weights + ROUNDING
    assert peak < weights + 2 * BLOCK_WEIGHTS + ROUNDING
