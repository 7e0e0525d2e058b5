"""What is compared: the rows, how each comes about, and the figures to reach."""

from dataclasses import dataclass, field
from typing import Any

# Exact arithmetic everywhere but in the weights, so that the weights alone are compared.
EXACT = {"dtype": "float32", "activations": "exact", "lm_head": "model", "kv_cache_dtype": "fp32"}
# The same with an INT8 cache: bfloat16 arithmetic alone costs a fifth of what such a cache costs.
INT8_KV = EXACT | {"kv_cache_dtype": "int8"}

SMOLLM2 = "SmolLM2-135M"
OUTLIERS = "SmolLM2-135M with planted key outliers"
QWEN = "Qwen2.5-Coder-0.5B"
RANDOM_1B = "random weights, 1.1 B"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the tables.

    Args:
        name: for the tables and `--only`.
        tool: who makes the checkpoint: a key of `making.TOOLS`.
        options: for the tool; of qinfer, its command line.
        model: the unquantized model.
        engine: how qinfer runs the checkpoint to measure it; None = it is only made.
        tokens: measured on so many at most.
    """

    name: str
    tool: str
    options: Any = None
    model: str = SMOLLM2
    engine: dict[str, str] | None = field(default_factory=lambda: dict(EXACT))
    tokens: int = 1 << 30

    @property
    def folder(self) -> str:
        """Name of the checkpoint's folder."""
        return "".join(c if c.isalnum() or c in ".-" else "-" for c in self.name)


def _qinfer(name: str, *options: str, **rest: Any) -> Row:
    return Row(f"qinfer {name}", "qinfer", list(options), **rest)


def _gptqmodel(name: str, **options: Any) -> Row:
    wanted = {"bits": 4, "group_size": 64, "sym": True} | options
    return Row(f"GPTQModel {name}", "gptqmodel", wanted)


def _llmcompressor(name: str) -> Row:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64}
    wanted = {"weights": weights | {"symmetric": True}}
    return Row(f"llm-compressor {name}", "llmcompressor", wanted)


_G64 = ("--group-size", "64")
_G32 = ("--group-size", "32")
# Memory does not grow from block to block, so that one of them shows the peak.
_ONE_BLOCK = (
    "--memory",
    "1.2GB",
    "--condition-kv",
    "off",
    "--override",
    r"layers\.([1-9]|1\d|2\d)\.=skip",
)

ROWS = (
    _qinfer("INT4 g64, rounded", *_G64, "--algorithm", "rtn"),
    _qinfer("INT4 g64", *_G64),
    _gptqmodel("INT4 g64"),
    _llmcompressor("INT4 g64"),
    Row("llama.cpp Q4_0", "llama.cpp"),
    _qinfer("INT4 g32", *_G32),
    _qinfer("4.5 bits allocated", "--target-bits", "4.5"),
    Row("INT8 KV", "as it is", engine=INT8_KV),
    Row("INT8 KV, conditioned", "condition", engine=INT8_KV),
    Row("INT8 KV, outliers", "as it is", model=OUTLIERS, engine=INT8_KV),
    Row("INT8 KV, outliers, conditioned", "condition", model=OUTLIERS, engine=INT8_KV),
    Row("INT8 KV, Qwen2.5", "as it is", model=QWEN, engine=INT8_KV, tokens=4096),
    Row("INT8 KV, Qwen2.5, conditioned", "condition", model=QWEN, engine=INT8_KV, tokens=4096),
    _qinfer("INT4 g64, 1.1 B, one block", *_G64, *_ONE_BLOCK, model=RANDOM_1B, engine=None),
)


@dataclass(frozen=True, slots=True)
class Target:
    """A figure to reach.

    Args:
        at: what it is about.
        ours: row.
        figure: path of the figure in the row's record.
        reach: at most so much, of the smallest figure of `against` if there are any.
        against: rows.
    """

    at: str
    ours: str
    figure: tuple[str, ...]
    reach: float
    against: tuple[str, ...] = ()


KLD = ("measured", "kld_mean")
WALL = ("made", "wall_seconds")
CPU = ("made", "cpu_seconds")
RSS = ("made", "peak_rss_bytes")
_PEERS = ("GPTQModel INT4 g64", "llm-compressor INT4 g64")

TARGETS = (
    Target("INT4 g64 symmetric", "qinfer INT4 g64", KLD, 0.85, _PEERS),
    Target("INT4 g64", "qinfer INT4 g64", KLD, 0.7, ("llama.cpp Q4_0",)),
    Target("4.5 bits", "qinfer 4.5 bits allocated", KLD, 0.85, ("qinfer INT4 g32",)),
    Target("INT8 KV, planted outliers", "INT8 KV, outliers, conditioned", KLD, 0.0006),
    Target("INT8 KV", "INT8 KV, conditioned", KLD, 0.0006),
    Target("INT8 KV, heads made worse", "INT8 KV, conditioned", ("made", "heads_worse"), 0),
    Target("INT8 KV, Qwen2.5 (aim)", "INT8 KV, Qwen2.5, conditioned", KLD, 0.0006),
    # Half of what llm-compressor takes alone on two such cores; the peers' wall times in the record
    # were taken beside other programs.
    Target("time, wall s", "qinfer INT4 g64", WALL, 158),
    Target("time, CPU", "qinfer INT4 g64", CPU, 0.5, _PEERS),
    Target("peak memory, 1.1 B", "qinfer INT4 g64, 1.1 B, one block", RSS, 1.2e9),
)
