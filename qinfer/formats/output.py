"""What can be written: one object per `--format`, which knows tensors, sizes, settings and files.

A format is asked in this order: `misfit` before anything is computed, `refusal` for a weight that
there is, `to_tensors` for its tensors, and `settings` when all modules are known.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from qinfer.errors import ConfigError, QuantizationError
from qinfer.formats import compressed, compressed_config, gptq, gptq_config
from qinfer.formats.packing import num_words
from qinfer.formats.weight import QuantizedWeight
from qinfer.schemes import WeightScheme

FORMATS = ("gptq", "compressed-tensors")
HEAD = "lm_head"
_WORD_BYTES = 4
_SCALE_BYTES = 2  # float16 and bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFacts:
    """What the settings of a written checkpoint say.

    Args:
        scheme: the usual scheme.
        modules: scheme of every linear by its full name; None = it stays as it is.
        ignored: linears that are not among `modules` and stay as they are.
        patterns: regular expressions at the start of module names that say the same as `modules`
            where a format has room for them (GPTQ's `dynamic`), in order; None = name every module.
        desc_act: whether groups are scattered over the inputs.
        meta: how the weights were made, for information.
        kv_scheme: `kv_cache_scheme`, where static scales are written.
    """

    scheme: WeightScheme
    modules: Mapping[str, WeightScheme | None]
    ignored: tuple[str, ...] = (HEAD,)
    patterns: Mapping[str, WeightScheme | None] | None = None
    desc_act: bool = False
    meta: Mapping[str, Any] = field(default_factory=dict)
    kv_scheme: Mapping[str, Any] | None = None


class OutputFormat(Protocol):
    """A format that is written."""

    @property
    def name(self) -> str:
        """Its name as `--format`."""

    @property
    def label(self) -> str:
        """The variant of it, as `qinfer inspect` says it."""

    @property
    def side_files(self) -> tuple[str, ...]:
        """Files that hold the settings beside config.json."""

    @property
    def carries_kv_scheme(self) -> bool:
        """Whether the settings have room for static scales of the KV cache."""

    def misfit(self, in_features: int, out_features: int, scheme: WeightScheme) -> str | None:
        """Return why a linear of this shape cannot be written in this scheme; None = it can."""

    def refusal(self, weight: QuantizedWeight) -> str | None:
        """Return why a weight cannot be written without loss; None = it can."""

    def to_tensors(
        self, weight: QuantizedWeight, scale_dtype: torch.dtype | None = None
    ) -> dict[str, torch.Tensor]:
        """Return the tensors of a weight by the last part of their names.

        Args:
            weight: the weight.
            scale_dtype: type of the scales in the file; None = the one that they have, or that the
                format asks for.

        Raises:
            QuantizationError: see `refusal`; or a scale is not a number in `scale_dtype`.
        """

    def num_bytes(self, in_features: int, out_features: int, scheme: WeightScheme) -> int:
        """Return the size of a linear's tensors, with scales of two bytes."""

    def settings(self, facts: OutputFacts) -> dict[str, Any]:
        """Return the `quantization_config` object."""


@dataclass(frozen=True, slots=True)
class GPTQOutput:
    """GPTQ's tensors; `version` says what `qzeros` holds."""

    version: gptq.Version
    name: str = "gptq"
    side_files: tuple[str, ...] = ("quantize_config.json",)
    carries_kv_scheme: bool = False

    @property
    def label(self) -> str:
        """The variant."""
        return self.version

    def misfit(self, in_features: int, out_features: int, scheme: WeightScheme) -> str | None:
        """See `OutputFormat`."""
        return gptq.misfit(in_features, out_features, scheme)

    def refusal(self, weight: QuantizedWeight) -> str | None:
        """See `OutputFormat`."""
        if weight.offsets is not None:
            return "its groups have real offsets (GGUF Q4_1, Q4_K), for which there is no tensor"
        stored = weight.scales.to(torch.float16)
        if not torch.equal(stored.double(), weight.scales.double()):
            kind = str(weight.scales.dtype).removeprefix("torch.")
            return f"its {kind} scales are not exact in float16, the type that gptq stores"
        if self.version == "gptq" and weight.zeros is not None:
            if weight.scheme.bits == 3:
                return "asymmetric 3-bit gptq (v1) is written in two ways; write gptq_v2"
            if int(weight.zeros.min()) <= -(1 << (weight.scheme.bits - 1)):
                return "a zero point is 0, which gptq (v1) cannot store; write gptq_v2"
        return self.misfit(weight.in_features, weight.out_features, weight.scheme)

    def to_tensors(
        self, weight: QuantizedWeight, scale_dtype: torch.dtype | None = None
    ) -> dict[str, torch.Tensor]:
        """See `OutputFormat`; scales are float16 whatever is asked for."""
        if scale_dtype not in {None, torch.float16}:
            raise QuantizationError(f"gptq stores scales in float16, not {scale_dtype}")
        return gptq.to_tensors(weight, version=self.version)

    def num_bytes(self, in_features: int, out_features: int, scheme: WeightScheme) -> int:
        """See `OutputFormat`."""
        groups = scheme.num_groups(in_features)
        words = num_words(in_features, scheme.bits) * out_features
        words += groups * num_words(out_features, scheme.bits)
        index = in_features  # g_idx
        return _WORD_BYTES * (words + index) + _SCALE_BYTES * groups * out_features

    def settings(self, facts: OutputFacts) -> dict[str, Any]:
        """See `OutputFormat`; modules that differ are named in `dynamic`."""
        overrides = facts.patterns
        if overrides is None:
            others = _by_scheme(facts, default=facts.scheme)
            overrides = {_any_of(names): scheme for scheme, names in others.items()}
        return gptq_config.config(
            facts.scheme,
            version=self.version,
            overrides=overrides,
            desc_act=facts.desc_act,
            quantized_head=facts.modules.get(HEAD) is not None,
            meta=facts.meta,
        )


@dataclass(frozen=True, slots=True)
class CompressedOutput:
    """compressed-tensors; `layout` is pack-quantized, or int-quantized for W8A8."""

    layout: str = compressed.PACKED
    name: str = "compressed-tensors"
    side_files: tuple[str, ...] = ()
    carries_kv_scheme: bool = True

    @property
    def label(self) -> str:
        """The layout."""
        return self.layout

    def misfit(self, in_features: int, out_features: int, scheme: WeightScheme) -> str | None:
        """See `OutputFormat`."""
        del out_features  # rows are padded one by one
        problem = compressed.int8_misfit(scheme) if self.layout == compressed.INT8 else None
        return problem or compressed.misfit(in_features, scheme)

    def refusal(self, weight: QuantizedWeight) -> str | None:
        """See `OutputFormat`."""
        return compressed.refusal(weight) or self.misfit(
            weight.in_features, weight.out_features, weight.scheme
        )

    def to_tensors(
        self, weight: QuantizedWeight, scale_dtype: torch.dtype | None = None
    ) -> dict[str, torch.Tensor]:
        """See `OutputFormat`."""
        scales = weight.scales if scale_dtype is None else weight.scales.to(scale_dtype)
        if not torch.isfinite(scales).all():
            raise QuantizationError(f"a scale is not finite in {scales.dtype}")
        cast = replace(weight, scales=scales)
        if self.layout == compressed.INT8:
            return compressed.to_int8(cast)
        return compressed.to_packed(cast)

    def num_bytes(self, in_features: int, out_features: int, scheme: WeightScheme) -> int:
        """See `OutputFormat`."""
        groups = scheme.num_groups(in_features)
        scales = _SCALE_BYTES * groups * out_features
        if self.layout == compressed.INT8:
            return in_features * out_features + scales
        words = num_words(in_features, scheme.bits) * out_features
        if not scheme.symmetric:
            words += groups * num_words(out_features, scheme.bits)
        shape = 16  # weight_shape, two int64
        return _WORD_BYTES * words + scales + shape

    def settings(self, facts: OutputFacts) -> dict[str, Any]:
        """See `OutputFormat`; modules that differ from the usual scheme are targets by name."""
        others = _by_scheme(facts, default=facts.scheme)
        groups: dict[WeightScheme, list[str]] = {facts.scheme: ["Linear"]}
        groups |= {scheme: names for scheme, names in others.items() if scheme is not None}
        dense = others.get(None, [])
        return compressed_config.config(
            groups,
            ignore=dict.fromkeys([*dense, *(n for n in facts.ignored if n not in facts.modules)]),
            layout=self.layout,
            kv_scheme=facts.kv_scheme,
        )


def output_format(
    name: str,
    *,
    symmetric: bool,
    version: str | None = None,
    input_activations: str = "none",
) -> OutputFormat:
    """Return the format behind `--format`.

    Args:
        name: one of `FORMATS`.
        symmetric: whether all weights are, which decides GPTQ's variant unless `version` does.
        version: `gptq` (v1) or `gptq_v2`; only for GPTQ.
        input_activations: `int8` for W8A8; only for compressed-tensors.

    Raises:
        ConfigError: the name is unknown, or an option is not the format's.
    """
    if name not in FORMATS:
        raise ConfigError(f"format {name!r} is unknown; choose from {', '.join(FORMATS)}")
    if name == "gptq":
        if input_activations != "none":
            raise ConfigError("gptq has no settings for quantized inputs (W8A8)")
        chosen: gptq.Version = "gptq" if symmetric else "gptq_v2"
        for known in gptq_config.VERSIONS:
            chosen = known if version == known else chosen
        return GPTQOutput(chosen)
    if version is not None:
        raise ConfigError(f"a GPTQ version ({version}) is none of format {name}")
    return CompressedOutput(compressed.INT8 if input_activations == "int8" else compressed.PACKED)


def _by_scheme(
    facts: OutputFacts, *, default: WeightScheme
) -> dict[WeightScheme | None, list[str]]:
    """Return the modules that differ from the default, by scheme."""
    groups: dict[WeightScheme | None, list[str]] = {}
    for name, scheme in facts.modules.items():
        # How columns were ordered while solving is one fact of the whole checkpoint.
        same = None if scheme is None else replace(scheme, act_order=default.act_order)
        if same != default:
            groups.setdefault(same, []).append(name)
    return groups


def _any_of(names: Iterable[str]) -> str:
    """Return a regular expression for exactly these names."""
    escaped = [name.replace(".", r"\.") for name in names]
    return f"(?:{'|'.join(escaped)})$"
