"""The families that the one decoder runs, as rows of facts. Torch-free.

A family that differs only in these facts is a new row here; a new block structure is a new file
(`models.moe` for mixtures of experts).
Where a fact is None, the checkpoint's config decides.
"""

from dataclasses import dataclass
from typing import Literal

from qinfer.errors import UnsupportedModelError

WindowRule = Literal["none", "all_layers", "all_layers_if_used", "layer_types"]


@dataclass(frozen=True, slots=True)
class MoEFacts:
    """How a family spells its mixture of experts: names inside the block, and config keys.

    Args:
        module: holds the router and the experts.
        linears: an expert's gate, up and down, by their names inside the expert.
        size_key: config key of an expert's intermediate size.
        norm_topk_prob: the chosen experts' weights are scaled to sum to 1; None = as the config's
            `norm_topk_prob` says.
    """

    module: str
    linears: tuple[str, str, str]
    size_key: str
    norm_topk_prob: bool | None

    @property
    def router(self) -> str:
        """The linear that scores the experts; it is never quantized."""
        return f"{self.module}.gate"

    def expert(self, index: int) -> tuple[str, str, str]:
        """Return the names of one expert's gate, up and down."""
        gate, up, down = (f"{self.module}.experts.{index}.{name}" for name in self.linears)
        return gate, up, down


@dataclass(frozen=True, slots=True)
class Family:
    """What distinguishes one family of decoders from another.

    Args:
        model_type: as in config.json.
        architecture: the class name that transformers gives its causal language model.
        qkv_bias: q, k and v carry a bias; None = as `attention_bias` says.
        output_bias: o carries a bias; None = as `attention_bias` says.
        qk_norm: q and k are normalized per head before the rotation.
        windows: which layers see only a sliding window.
        moe: how its mixture of experts is spelled; None = it has none.
    """

    model_type: str
    architecture: str
    qkv_bias: bool | None
    output_bias: bool | None
    qk_norm: bool = False
    windows: WindowRule = "none"
    moe: MoEFacts | None = None


FAMILIES = (
    Family("llama", "LlamaForCausalLM", qkv_bias=None, output_bias=None),
    Family(
        "mistral", "MistralForCausalLM", qkv_bias=False, output_bias=False, windows="all_layers"
    ),
    Family("qwen2", "Qwen2ForCausalLM", qkv_bias=True, output_bias=False, windows="layer_types"),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        qkv_bias=None,
        output_bias=None,
        qk_norm=True,
        windows="layer_types",
    ),
    Family(
        "mixtral",
        "MixtralForCausalLM",
        qkv_bias=False,
        output_bias=False,
        windows="all_layers",
        moe=MoEFacts(
            "block_sparse_moe", ("w1", "w3", "w2"), "intermediate_size", norm_topk_prob=True
        ),
    ),
    Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        qkv_bias=None,
        output_bias=None,
        qk_norm=True,
        windows="all_layers_if_used",
        moe=MoEFacts(
            "mlp",
            ("gate_proj", "up_proj", "down_proj"),
            "moe_intermediate_size",
            norm_topk_prob=None,
        ),
    ),
)


def find_family(model_type: str | None, architecture: str | None) -> Family:
    """Return the facts of a model by its config's `model_type` and first architecture.

    Raises:
        UnsupportedModelError: there is no such row; the message lists those there are.
    """
    for family in FAMILIES:
        if family.model_type == model_type and architecture in {None, family.architecture}:
            return family
    known = ", ".join(f"{family.architecture} ({family.model_type})" for family in FAMILIES)
    raise UnsupportedModelError(
        f"architecture {architecture or 'unknown'} (model_type {model_type!r}) is not supported; "
        f"supported are {known}"
    )
