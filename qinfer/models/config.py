"""A model's facts, read from a Hugging Face config.json. Torch-free.

The reader follows transformers where spellings changed over time (`rope_scaling` against
`rope_parameters`, `torch_dtype` against `dtype`) and refuses what the decoder cannot run.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from qinfer.errors import CheckpointError, UnsupportedModelError
from qinfer.models.families import FAMILIES, Family, MoEFacts, find_family

RopeType = Literal["default", "linear", "llama3", "yarn"]
DtypeName = Literal["float32", "bfloat16", "float16"]

_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding and how it is stretched.

    Args:
        theta: the base of the frequencies.
        type: `default`, `linear` (arXiv 2306.15595), `llama3`, or `yarn` (arXiv 2309.00071).
        factor: how much longer the context became.
        original_max_position: context of the pre-training (llama3, yarn).
        low_freq_factor: llama3: wavelengths above `original / low` are fully stretched.
        high_freq_factor: llama3: wavelengths below `original / high` are left alone.
        beta_fast: yarn: rotations above which a frequency is left alone.
        beta_slow: yarn: rotations below which it is fully stretched.
        attention_factor: yarn: multiplies cos and sin.
        truncate: yarn: the ramp's ends are rounded to whole dimensions.
    """

    theta: float
    type: RopeType = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """The facts of a mixture of experts.

    Args:
        num_experts: experts of a sparse layer.
        num_experts_per_token: how many of them a token goes through.
        intermediate_size: of one expert.
        norm_topk_prob: the chosen experts' weights are scaled to sum to 1.
        sparse_layers: per layer, whether it has experts or a dense MLP.
        names: how the checkpoint spells router and experts.
    """

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    norm_topk_prob: bool
    sparse_layers: tuple[bool, ...]
    names: MoEFacts


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The facts that the decoder is built from.

    Args:
        windows: per layer, how many tokens a query may see (itself included); None = all.
        qkv_bias: q, k and v carry a bias.
        output_bias: o carries a bias.
        intermediate_size: of a dense MLP; see `moe` for that of an expert.
        mlp_bias: gate, up and down of a dense MLP carry a bias.
        qk_norm: q and k are normalized per head before the rotation.
        dtype: in which the checkpoint was published.
        moe: the mixture of experts, if the family has one.
    """

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    dtype: DtypeName
    moe: MoEConfig | None = None

    def is_sparse(self, layer: int) -> bool:
        """Tell whether a layer has experts in the place of a dense MLP."""
        return self.moe is not None and self.moe.sparse_layers[layer]

    @staticmethod
    def from_dict(raw: Mapping[str, Any]) -> "ModelConfig":
        """Read the content of a config.json.

        Raises:
            UnsupportedModelError: the architecture or a variant of it is not supported.
            CheckpointError: a value is missing or makes no sense.
        """
        architectures = raw.get("architectures") or [None]
        family = find_family(raw.get("model_type"), architectures[0])
        _refuse_variants(raw, family)
        hidden_size = _positive(raw, "hidden_size")
        num_heads = _positive(raw, "num_attention_heads")
        num_layers = _positive(raw, "num_hidden_layers")
        head_dim = _positive(raw, "head_dim", default=hidden_size // num_heads)
        attention_bias = bool(raw.get("attention_bias", False))
        return _checked(
            ModelConfig(
                architecture=family.architecture,
                model_type=family.model_type,
                vocab_size=_positive(raw, "vocab_size"),
                hidden_size=hidden_size,
                num_layers=num_layers,
                num_heads=num_heads,
                num_kv_heads=_positive(raw, "num_key_value_heads", default=num_heads),
                head_dim=head_dim,
                intermediate_size=_positive(raw, "intermediate_size"),
                max_position=_positive(raw, "max_position_embeddings"),
                rms_norm_eps=_epsilon(raw),
                rope=_rope(raw),
                tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
                qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
                output_bias=attention_bias if family.output_bias is None else family.output_bias,
                mlp_bias=bool(raw.get("mlp_bias", False)),
                qk_norm=family.qk_norm,
                windows=_windows(raw, family, num_layers),
                dtype=_dtype(raw),
                moe=None if family.moe is None else _moe(raw, family.moe, num_layers),
            )
        )


def linear_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return `(in_features, out_features)` of every decoder linear by its module name, in order.

    The head and the routers of experts are not among them.
    """
    return {
        f"model.layers.{layer}.{name}": shape
        for layer in range(config.num_layers)
        for name, shape in block_linear_shapes(config, layer).items()
    }


def block_linear_shapes(config: ModelConfig, layer: int) -> dict[str, tuple[int, int]]:
    """Return `(in_features, out_features)` of a block's linears by their names inside it."""
    query = config.num_heads * config.head_dim
    key = config.num_kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes = {
        "self_attn.q_proj": (hidden, query),
        "self_attn.k_proj": (hidden, key),
        "self_attn.v_proj": (hidden, key),
        "self_attn.o_proj": (query, hidden),
    }
    mlps = [("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")]
    if config.moe is not None and config.is_sparse(layer):
        inner = config.moe.intermediate_size
        mlps = [config.moe.names.expert(index) for index in range(config.moe.num_experts)]
    for gate, up, down in mlps:
        shapes |= {gate: (hidden, inner), up: (hidden, inner), down: (inner, hidden)}
    return shapes


def block_tensor_shapes(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a block's plain tensors: what it must hold beside its linears."""
    hidden = (config.hidden_size,)
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": hidden,
        "post_attention_layernorm.weight": hidden,
    }
    if config.qk_norm:
        head = (config.head_dim,)
        shapes |= {"self_attn.q_norm.weight": head, "self_attn.k_norm.weight": head}
    if config.moe is not None and config.is_sparse(layer):
        router = (config.moe.num_experts, config.hidden_size)
        shapes[f"{config.moe.names.router}.weight"] = router
    biased = {
        "self_attn.q_proj": config.qkv_bias,
        "self_attn.k_proj": config.qkv_bias,
        "self_attn.v_proj": config.qkv_bias,
        "self_attn.o_proj": config.output_bias,
        "mlp.gate_proj": config.mlp_bias,
        "mlp.up_proj": config.mlp_bias,
        "mlp.down_proj": config.mlp_bias,
    }
    for name, (_, outputs) in block_linear_shapes(config, layer).items():
        if biased.get(name, False):
            shapes[f"{name}.bias"] = (outputs,)
    return shapes


def _positive(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"config.json: {key} is {value!r}; a positive integer is needed")
    return value


def _epsilon(raw: Mapping[str, Any]) -> float:
    value = raw.get("rms_norm_eps")
    if value is None:
        return 1e-6
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise CheckpointError(f"config.json: rms_norm_eps is {value!r}; a number is needed")
    return float(value)


def _refuse_variants(raw: Mapping[str, Any], family: Family) -> None:
    activation = raw.get("hidden_act", "silu")
    if activation not in {"silu", "swish"}:
        raise UnsupportedModelError(f"config.json: hidden_act {activation!r}; only silu is run")
    if family.moe is None and (raw.get("num_experts") or raw.get("num_local_experts")):
        sparse = ", ".join(row.model_type for row in FAMILIES if row.moe is not None)
        raise UnsupportedModelError(
            f"config.json: mixture-of-experts blocks in a model of type {family.model_type}; "
            f"they are run for {sparse}"
        )


def _moe(raw: Mapping[str, Any], facts: MoEFacts, num_layers: int) -> MoEConfig:
    # transformers 5 writes num_local_experts for every family, older ones num_experts for Qwen3.
    key = "num_experts" if raw.get("num_experts") is not None else "num_local_experts"
    num_experts = _positive(raw, key)
    per_token = _positive(raw, "num_experts_per_tok")
    if per_token > num_experts:
        raise CheckpointError(
            f"config.json: num_experts_per_tok {per_token} is more than the {num_experts} experts"
        )
    normalized = facts.norm_topk_prob
    return MoEConfig(
        num_experts=num_experts,
        num_experts_per_token=per_token,
        intermediate_size=_positive(raw, facts.size_key),
        norm_topk_prob=bool(raw.get("norm_topk_prob")) if normalized is None else normalized,
        sparse_layers=_sparse_layers(raw, num_layers),
        names=facts,
    )


def _sparse_layers(raw: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    step = _positive(raw, "decoder_sparse_step", default=1)
    dense = raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise CheckpointError(
            f"config.json: mlp_only_layers is {dense!r:.80}; a list of layer numbers is needed"
        )
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers))


def _checked(config: ModelConfig) -> ModelConfig:
    if config.num_heads % config.num_kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads {config.num_heads} is no multiple of "
            f"num_key_value_heads {config.num_kv_heads}"
        )
    if config.head_dim % 2:
        raise UnsupportedModelError(f"config.json: head_dim {config.head_dim} is odd")
    return config


def _rope(raw: Mapping[str, Any]) -> RopeConfig:
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(raw.get(name) or {}, Mapping):
            raise CheckpointError(f"config.json: {name} is {raw[name]!r:.80}; an object is needed")
    scaling: Mapping[str, Any] = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(scaling.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in {"default", "linear", "llama3", "yarn"}:
        raise UnsupportedModelError(
            f"config.json: rope type {kind!r}; supported are default, linear, llama3, yarn"
        )
    partial = scaling.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise UnsupportedModelError(f"config.json: partial_rotary_factor {partial} is not 1")
    if kind == "default":
        return RopeConfig(theta)
    original = scaling.get("original_max_position_embeddings") or raw["max_position_embeddings"]
    factor = scaling.get("factor") or raw["max_position_embeddings"] / original
    return RopeConfig(
        theta=theta,
        type=cast("RopeType", kind),
        factor=float(factor),
        original_max_position=int(original),
        low_freq_factor=float(scaling.get("low_freq_factor") or 1.0),
        high_freq_factor=float(scaling.get("high_freq_factor") or 4.0),
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
        attention_factor=_attention_factor(scaling, float(factor)) if kind == "yarn" else 1.0,
        truncate=bool(scaling.get("truncate", True)),
    )


def _attention_factor(scaling: Mapping[str, Any], factor: float) -> float:
    """Return YaRN's factor of cos and sin (arXiv 2309.00071, section 3.4)."""
    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)
    mscale, mscale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and mscale_all:
        return _mscale(factor, float(mscale)) / _mscale(factor, float(mscale_all))
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _windows(raw: Mapping[str, Any], family: Family, num_layers: int) -> tuple[int | None, ...]:
    window = raw.get("sliding_window")
    if family.windows == "none" or window is None:
        return (None,) * num_layers
    used = family.windows == "all_layers" or raw.get("use_sliding_window", False)
    if not used:
        return (None,) * num_layers
    if family.windows in {"all_layers", "all_layers_if_used"}:
        return (int(window),) * num_layers
    kinds = raw.get("layer_types")
    if kinds is None:
        full = int(raw.get("max_window_layers", num_layers))
        kinds = ["full_attention"] * full + ["sliding_attention"] * (num_layers - full)
    if len(kinds) < num_layers:
        raise CheckpointError(f"config.json: layer_types has {len(kinds)} of {num_layers} layers")
    return tuple(
        int(window) if kind == "sliding_attention" else None for kind in kinds[:num_layers]
    )


def _dtype(raw: Mapping[str, Any]) -> DtypeName:
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in _DTYPES:
        raise UnsupportedModelError(f"config.json: dtype {name!r}; supported are {_DTYPES}")
    return cast("DtypeName", name)
