"""The families that the one decoder runs, as rows of facts. Torch-free.

A family that differs only in these facts is a new row here; a new block structure is a new file.
Where a fact is None, the checkpoint's config decides.
"""

from dataclasses import dataclass
from typing import Literal

from qinfer.errors import UnsupportedModelError

WindowRule = Literal["none", "all_layers", "layer_types"]


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
    """

    model_type: str
    architecture: str
    qkv_bias: bool | None
    output_bias: bool | None
    qk_norm: bool = False
    windows: WindowRule = "none"


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
