"""Conditions one decoder block after another, and keeps what it found out.

Owns the way from a block's weights and inputs to folded weights and a row of the record. The
mathematics is in `quant.conditioning`; who runs the blocks and writes the result is elsewhere.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the customary name

from qinfer.errors import ConfigError, UnsupportedModelError
from qinfer.formats.kv_scales import kv_scale_tensors
from qinfer.kernels import reference
from qinfer.models.config import ModelConfig
from qinfer.models.layers import Weight
from qinfer.models.load import TORCH_DTYPES
from qinfer.models.rope import RotaryTable
from qinfer.quant import conditioning
from qinfer.quant.conditioning import CHOICES, AttentionSample
from qinfer.quant.gptq import single_thread
from qinfer.schemes import KVScheme, WeightScheme

FORMAT_VERSION = 1
RECORD_NAME = "kv_conditioning.json"
SEARCH_WINDOWS = 2  # more find the same: SmolLM2 KLD 0.00051, 0.00049, 0.00048 from 1, 2, 4
SEARCH_TOKENS = 512  # of each window
_Q, _K, _V = "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"
# Families by what stands in the way; those that the decoder runs have none of it.
_SHIFTED_NORMS = ("gemma3", "gemma4", "qwen3_next", "qwen3_5")
_INTERLEAVED = {"gptj", "codegen", "cohere", "cohere2", "glm", "glm4", "helium", "ernie4_5"}
_NO_ROTARY = {"gpt2", "opt", "bloom", "mpt", "gpt_bigcode"}
_NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")


@dataclass(frozen=True, slots=True)
class LayerConditioning:
    """What was found for one layer; errors are sums of squares over the tokens searched.

    Args:
        exponents: per kv head (one row where all share it), log2 of the factor of every rotary
            pair: keys are divided by it, queries multiplied.
        choices: (alpha, beta) that was chosen, per row of `exponents`.
        error_before: of the attention output with quantized keys, per kv head, all its queries.
        error_after: the same with the factors.
        energy: squares of the exact attention output, per kv head.
        num_clamped: pairs whose factor was held back by the range of a number format.
        k_amax: largest absolute key after conditioning.
        v_amax: largest absolute value.
    """

    exponents: tuple[tuple[int, ...], ...]
    choices: tuple[tuple[float, float], ...]
    error_before: tuple[float, ...]
    error_after: tuple[float, ...]
    energy: tuple[float, ...]
    num_clamped: int
    k_amax: float
    v_amax: float

    @property
    def relative_before(self) -> float:
        """Error of the layer relative to its outputs, without factors."""
        return sum(self.error_before) / (sum(self.energy) or 1.0)

    @property
    def relative_after(self) -> float:
        """Error of the layer relative to its outputs, with the factors."""
        return sum(self.error_after) / (sum(self.energy) or 1.0)

    def factors(self) -> torch.Tensor:
        """Return the exponents as int64 `[heads, pairs]`, as `conditioning.fold` takes them."""
        return torch.tensor(self.exponents, dtype=torch.int64)

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON."""
        return asdict(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> "LayerConditioning":
        """Read what `to_dict` gave."""
        rows = {name: tuple(data[name]) for name in ("error_before", "error_after", "energy")}
        nested = {name: tuple(map(tuple, data[name])) for name in ("exponents", "choices")}
        return LayerConditioning(**{**data, **rows, **nested})


@dataclass(frozen=True, slots=True)
class ConditioningRecord:
    """What conditioning did to a model; stays with the checkpoint.

    Args:
        kv: the KV type that it was searched for.
        num_windows: calibration windows searched.
        num_tokens: tokens in them.
        layers: in order.
        static_scales: the largest keys and values became static scales in the checkpoint.
    """

    kv: str
    num_windows: int
    num_tokens: int
    layers: tuple[LayerConditioning, ...]
    static_scales: bool = False

    def choice_counts(self) -> dict[str, int]:
        """Return how often each (alpha, beta) was chosen, by its label."""
        chosen = [choice for layer in self.layers for choice in layer.choices]
        return {choice_label(choice): chosen.count(choice) for choice in CHOICES}

    def summary(self) -> dict[str, Any]:
        """Return the few lines that go into config.json."""
        return {
            "kv": self.kv,
            "num_tokens": self.num_tokens,
            "choices": self.choice_counts(),
            "error_before": [_short(layer.relative_before) for layer in self.layers],
            "error_after": [_short(layer.relative_after) for layer in self.layers],
        }

    def to_dict(self) -> dict[str, Any]:
        """Return everything, the content of `kv_conditioning.json`."""
        return {
            "format_version": FORMAT_VERSION,
            "kind": "kv_conditioning",
            "kv": self.kv,
            "num_windows": self.num_windows,
            "num_tokens": self.num_tokens,
            "choices": self.choice_counts(),
            "layers": [layer.to_dict() for layer in self.layers],
        }


@dataclass(frozen=True, slots=True, eq=False)
class ConditionedBlock:
    """A block's changed weights, by their names inside it, and the row of the record."""

    weights: dict[str, torch.Tensor]
    row: LayerConditioning


class Conditioner:
    """Searches factors for the layers of one model.

    Args:
        config: the model's facts.
        scheme: how keys will be stored.
        static_scales: add the scales of FP8 caches of other engines, one for K and one for V of a
            layer, to the weights of its block.
    """

    def __init__(
        self, config: ModelConfig, scheme: KVScheme, *, static_scales: bool = False
    ) -> None:
        self._config = config
        self._scheme = scheme
        self._static_scales = static_scales
        self._rotary = RotaryTable(
            config.rope, config.head_dim, min(SEARCH_TOKENS, config.max_position)
        )

    def condition(
        self,
        layer: int,
        weights: Mapping[str, Weight],
        hidden: Sequence[torch.Tensor],
        schemes: Mapping[str, WeightScheme | None] | None = None,
    ) -> ConditionedBlock:
        """Search a layer's factors and fold them into its dense weights.

        Args:
            layer: its index.
            weights: by names inside the block, linears without a suffix.
            hidden: the block's input for every calibration window, float32 `[tokens, hidden]`,
                each from position 0; `SEARCH_WINDOWS` of them are used, evenly spread.
            schemes: how the linears will be quantized, by the same names; their scales limit the
                factors.

        Raises:
            QuantizationError: a factor cannot be folded (never, within the limits).
        """
        scaled = scaled_tensors(weights, qk_norm=self._config.qk_norm)
        row = self.search(layer, weights, hidden, scaled, schemes or {})
        changed = conditioning.fold(scaled, row.factors())
        if self._static_scales:
            dtype = TORCH_DTYPES[self._config.dtype]
            scales = kv_scale_tensors(layer, row.k_amax, row.v_amax, dtype)
            prefix = f"model.layers.{layer}."
            changed |= {name.removeprefix(prefix): scale for name, scale in scales.items()}
        return ConditionedBlock(changed, row)

    def search(
        self,
        layer: int,
        weights: Mapping[str, Weight],
        hidden: Sequence[torch.Tensor],
        scaled: Mapping[str, torch.Tensor],
        schemes: Mapping[str, WeightScheme | None],
    ) -> LayerConditioning:
        """Search a layer's factors.

        Args:
            layer: its index.
            weights: see `condition`; they may be quantized.
            hidden: see `condition`.
            scaled: the tensors that the factors will be folded into; they limit them.
            schemes: see `condition`; empty where nothing will be quantized.
        """
        shared = self._config.qk_norm
        with single_thread(), torch.inference_mode():
            samples = [self._sample(weights, window) for window in search_windows(hidden)]
            sizes = conditioning.pair_sizes(samples, shared=shared)
            limits = _intersect(
                conditioning.exponent_limits(scaled, *sizes.keys.shape),
                conditioning.scale_limits(scaled, schemes, *sizes.keys.shape),
                conditioning.activation_limits(samples, shared=shared),
            )
            candidates = conditioning.candidate_exponents(sizes, limits)
            errors = [
                conditioning.attention_errors(
                    sample, candidates, self._scheme, self._config.windows[layer]
                )
                for sample in samples
            ]
            squared = torch.stack([error.squared for error in errors]).sum(0)  # [choices, heads]
            energy = torch.stack([error.energy for error in errors]).sum(0)
            summed = squared.sum(1, keepdim=True) if shared else squared
            best = conditioning.choose(summed)  # [kv heads or 1]
            exponents = candidates[best, torch.arange(len(best))]
            after = squared[best.expand(squared.shape[1]), torch.arange(squared.shape[1])]
            free = conditioning.no_limits(*sizes.keys.shape)
            unclamped = conditioning.candidate_exponents(sizes, free)
            wished = unclamped[best, torch.arange(len(best))]
            factors = conditioning.powers_of_two(exponents).repeat(1, 2)
            return LayerConditioning(
                exponents=tuple(tuple(row) for row in exponents.tolist()),
                choices=tuple(CHOICES[index] for index in best),
                error_before=tuple(squared[0].tolist()),
                error_after=tuple(after.tolist()),
                energy=tuple(energy.tolist()),
                num_clamped=int((wished != exponents).sum()),
                k_amax=max(float((sample.k / factors).abs().max()) for sample in samples),
                v_amax=max(float(sample.v.abs().max()) for sample in samples),
            )

    def record(
        self, rows: Sequence[LayerConditioning], window_lengths: Sequence[int]
    ) -> ConditioningRecord:
        """Return the record of all layers.

        Args:
            rows: of every layer, in order.
            window_lengths: tokens of every calibration window.
        """
        lengths = [min(n, SEARCH_TOKENS) for n in search_windows(window_lengths)]
        return ConditioningRecord(
            kv=self._scheme.dtype,
            num_windows=len(lengths),
            num_tokens=sum(lengths),
            layers=tuple(rows),
            static_scales=self._static_scales,
        )

    def _sample(self, weights: Mapping[str, Weight], hidden: torch.Tensor) -> AttentionSample:
        """Return what attention reads in one window, as the decoder block computes it."""
        config = self._config
        hidden = hidden[:SEARCH_TOKENS]
        norm = _plain(weights["input_layernorm.weight"]).float()
        x = reference.rms_norm(hidden, norm, config.rms_norm_eps)

        def project(name: str) -> torch.Tensor:
            bias = weights.get(f"{name}.bias")
            y = F.linear(x, _plain(weights[name]).float())
            y = y if bias is None else y + _plain(bias).float()
            heads: torch.Tensor = y.unflatten(-1, (-1, config.head_dim))
            return heads

        q, k, v = project(_Q), project(_K), project(_V)
        if config.qk_norm:
            q, k = (
                reference.rms_norm(part, _plain(weights[name]).float(), config.rms_norm_eps)
                for part, name in zip((q, k), _NORMS, strict=True)
            )
        cos, sin = self._rotary.at(torch.arange(len(x)))
        return AttentionSample(reference.rotate(q, cos, sin), reference.rotate(k, cos, sin), v)


@dataclass(frozen=True, slots=True, eq=False)
class ConditioningPlan:
    """Whether `quantize` conditions a model.

    Args:
        conditioner: does it; None = the keys stay as they are.
        notice: why they stay although conditioning was not turned off; for the report.
    """

    conditioner: Conditioner | None = None
    notice: str | None = None


def plan_conditioning(
    policy: str,
    *,
    source_config: Mapping[str, Any],
    config: ModelConfig,
    scheme: KVScheme | None,
    calibrated: bool,
    static_scales: bool = False,
) -> ConditioningPlan:
    """Decide by the `condition_kv` of `QuantizeConfig`.

    Args:
        policy: `auto` = where it is of use and can be done, `on` = refuse if it cannot, `off`.
        source_config: config.json as found.
        config: the model's facts.
        scheme: the KV scheme that will be recorded; None = none.
        calibrated: whether there are calibration windows.
        static_scales: see `Conditioner`.

    Raises:
        ConfigError: `on`, without a quantized KV scheme or without calibration.
        UnsupportedModelError: `on`, for an architecture that allows no factors.
    """
    if policy == "off":
        return ConditioningPlan()
    if scheme is None or not scheme.quantized:
        if policy == "on":
            raise ConfigError(
                f"condition_kv on is of use only where a quantized KV scheme is recorded; "
                f"kv_cache_dtype is {scheme or 'none'}"
            )
        return ConditioningPlan()
    if not calibrated:
        if policy == "on":
            raise ConfigError("condition_kv on needs an algorithm that is calibrated")
        return ConditioningPlan(
            notice="keys were not conditioned: the algorithm is not calibrated; qinfer condition "
            "does it afterwards"
        )
    reason = why_not(source_config)
    if reason is None:
        return ConditioningPlan(Conditioner(config, scheme, static_scales=static_scales))
    if policy == "on":
        raise UnsupportedModelError(f"condition_kv on: the model cannot be conditioned: {reason}")
    return ConditioningPlan(notice=f"keys were not conditioned: {reason}")


def choice_label(choice: tuple[float, float]) -> str:
    """Return a short name: alpha, and beta behind a slash where there is one."""
    alpha, beta = choice
    return f"{alpha:g}/{beta:g}" if beta else f"{alpha:g}"


def search_windows(windows: Sequence[Any]) -> list[Any]:
    """Return the windows that are searched: at most `SEARCH_WINDOWS`, evenly spread."""
    count = min(len(windows), SEARCH_WINDOWS)
    return [windows[index * len(windows) // count] for index in range(count)]


def scaled_tensors(weights: Mapping[str, Weight], *, qk_norm: bool) -> dict[str, torch.Tensor]:
    """Return the tensors of a dense block that factors are folded into."""
    return {name: _plain(weights[name]) for name in scaled_names(weights, qk_norm=qk_norm)}


def scaled_names(weights: Mapping[str, Weight], *, qk_norm: bool) -> tuple[str, ...]:
    """Return which weights of a block carry the factors.

    Norms of q and k undo what a projection before them multiplies, so there it is their weights.
    """
    if qk_norm:
        return _NORMS
    return tuple(name for name in (_Q, _K, f"{_Q}.bias", f"{_K}.bias") if name in weights)


def why_not(config: Mapping[str, Any]) -> str | None:
    """Return why a model cannot be conditioned; None = it can, as far as its config.json tells."""
    kind = str(config.get("model_type"))
    rope: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if config.get("kv_lora_rank"):
        return "it caches a compressed latent (MLA), not keys per head"
    if kind.startswith(_SHIFTED_NORMS):
        return "its norms of q and k multiply by 1 + w, into which no power of two folds exactly"
    if kind in _INTERLEAVED or config.get("rope_interleaved"):
        return "its rotary pairs are interleaved (2i, 2i + 1)"
    if kind in _NO_ROTARY or config.get("position_embedding_type") in {"alibi", "absolute"}:
        return "its positions are not rotary"
    for key in ("partial_rotary_factor", "rotary_pct"):
        share = rope.get(key) or config.get(key) or 1.0
        if share != 1.0:
            return f"only a part of each head is rotated ({key} {share})"
    return None


def _plain(weight: Weight) -> torch.Tensor:
    return weight if isinstance(weight, torch.Tensor) else weight.dequantize()


def _intersect(*limits: conditioning.Limits) -> conditioning.Limits:
    lows, highs = zip(*limits, strict=True)
    return torch.stack(lows).amax(0), torch.stack(highs).amin(0)


def _short(value: float) -> float:
    """Return a figure with four significant digits."""
    return float(f"{value:.4g}")
