"""What a user may choose about quantizing, validated before anything is read."""

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qinfer.errors import ConfigError
from qinfer.quant.gptq import DEFAULT_DAMP_PERCENT
from qinfer.schemes import KVScheme, parse_kv_dtype

WEIGHTS = {"int2": 2, "int3": 3, "int4": 4, "int8": 8}
ALGORITHMS = ("gptq", "rtn", "bnb-nf4", "bnb-int8")
SCALE_SEARCHES = ("absmax", "mse", "hessian")
FORMATS = ("gptq", "compressed-tensors")
INPUT_ACTIVATIONS = ("none", "int8")
CONDITIONING = ("auto", "on", "off")
KV_CACHE_DTYPES = ("int8", "fp8_e4m3", "fp8", "none")
MISFIT_POLICIES = ("error", "skip")
AUTO_GROUP_SIZES = (128, 64, 32)

_SETTING = re.compile(r"^(bits|group_size):(-?\d+)$")


@dataclass(frozen=True, slots=True)
class Override:
    """What is different for the modules whose name a regular expression finds.

    Args:
        pattern: searched anywhere in the module's name; anchor it with `^` and `$`.
        bits: width of a code; None = as for the others.
        group_size: -1 = one group per row; None = as for the others.
        skip: leave the modules unquantized.
    """

    pattern: str
    bits: int | None = None
    group_size: int | None = None
    skip: bool = False

    @staticmethod
    def parse(text: str) -> "Override":
        """Read `REGEX=bits:8,group_size:32` or `REGEX=skip`.

        Raises:
            ConfigError: quoting the text, saying what is wrong.
        """
        pattern, separator, settings = text.rpartition("=")
        if not separator or not pattern:
            raise ConfigError(f"override {text!r}: write REGEX=bits:8,group_size:32 or REGEX=skip")
        try:
            re.compile(f"(?:{pattern})")  # as it stands in the checkpoint's settings
        except re.error as error:
            raise ConfigError(f"override {text!r}: bad regular expression: {error}") from error
        if settings == "skip":
            return Override(pattern, skip=True)
        values: dict[str, int] = {}
        for setting in settings.split(","):
            match = _SETTING.match(setting.strip())
            if match is None:
                raise ConfigError(
                    f"override {text!r}: {setting!r} is neither bits:N, group_size:N nor skip"
                )
            values[match[1]] = int(match[2])
        return Override(pattern, values.get("bits"), values.get("group_size"))

    def matches(self, name: str) -> bool:
        """Tell whether a module is meant."""
        return re.search(self.pattern, name) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeConfig:
    """How to quantize a model.

    Args:
        weights: `int2`, `int3`, `int4` or `int8`.
        algorithm: `gptq` (calibrated), `rtn` (round to nearest, needs no text), or `bnb-nf4` and
            `bnb-int8` (rounding in the formats of bitsandbytes, through its library).
        group_size: inputs that share a scale; -1 = all; `auto` = the largest of 128, 64 and 32
            that divides the inputs of every module that is quantized.
        asym: store zero points (GPTQ v2) instead of a symmetric grid (GPTQ v1).
        act_order: GPTQ takes columns by descending Hessian diagonal, with static groups: the file
            looks the same and runs as fast. Nothing to `rtn`.
        damp_percent: share of the mean Hessian diagonal that GPTQ adds to the diagonal.
        scale_search: how a group's scale is chosen: `absmax` covers its range, `mse` has the least
            squared error of the weights, `hessian` that of the outputs. Nothing to `rtn`.
        gptaq: aim at the outputs of the unquantized model, so that each linear makes up for what
            was lost before it (GPTAQ, arXiv 2504.02692). Nothing to `rtn`.
        gptaq_samples: calibration windows, the first ones, that run through that model too.
        target_bits: mean bits per weight of the linears, scales and zero points included; bits and
            group sizes are then chosen module by module. None = as `weights` and `group_size` say.
        target_size: the same as bytes of all tensors of the checkpoint.
        overrides: `REGEX=bits:8,group_size:32` or `REGEX=skip`; the first that matches counts.
        on_misfit: `error` refuses a model with shapes that the format cannot carry, `skip` leaves
            those modules unquantized and reports what that costs.
        format: of the checkpoint: `gptq` or `compressed-tensors`.
        input_activations: `int8` records that the inputs of linears are quantized per token too
            (W8A8, only `compressed-tensors` with `int8` weights per channel).
        condition_kv: fold factors into q and k that keep outliers out of the cache; `auto` = where
            the recorded KV scheme is quantized and the algorithm is calibrated.
        calibration: what to calibrate on (see `quant.calibration`); None = the text in the package.
        num_samples: calibration windows.
        seq_len: tokens per window; capped at the model's context.
        kv_cache_dtype: the KV scheme recorded for serving, or `none`.
        strict: a module that GPTQ could not solve is an error, not a fallback to rounding.
    """

    weights: str = "int4"
    algorithm: str = "gptq"
    group_size: int | str = "auto"
    asym: bool = False
    act_order: bool = True
    damp_percent: float = DEFAULT_DAMP_PERCENT
    scale_search: str = "hessian"
    gptaq: bool = True
    gptaq_samples: int = 32
    target_bits: float | None = None
    target_size: int | None = None
    overrides: tuple[str, ...] = ()
    on_misfit: str = "error"
    format: str = "gptq"
    input_activations: str = "none"
    condition_kv: str = "auto"
    calibration: str | Path | None = None
    num_samples: int = 128
    seq_len: int = 512
    kv_cache_dtype: str = "int8"
    strict: bool = False

    def __post_init__(self) -> None:
        """Refuse values that can never work.

        Raises:
            ConfigError: naming the option.
        """
        _check_choice("weights", self.weights, WEIGHTS)
        _check_choice("algorithm", self.algorithm, ALGORITHMS)
        _check_choice("scale_search", self.scale_search, SCALE_SEARCHES)
        _check_choice("on_misfit", self.on_misfit, MISFIT_POLICIES)
        _check_choice("format", self.format, FORMATS)
        _check_choice("input_activations", self.input_activations, INPUT_ACTIVATIONS)
        _check_choice("condition_kv", self.condition_kv, CONDITIONING)
        _check_choice("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        if self.group_size != "auto" and not _is_group_size(self.group_size):
            raise ConfigError(f"group_size {self.group_size!r}: give auto, -1 or a positive number")
        if not 0 <= self.damp_percent <= 1:
            raise ConfigError(f"damp_percent {self.damp_percent} is not between 0 and 1")
        counts = {
            "num_samples": self.num_samples,
            "seq_len": self.seq_len,
            "gptaq_samples": self.gptaq_samples,
        }
        for name, value in counts.items():
            if value < 1:
                raise ConfigError(f"{name} {value} must be positive")
        self._check_combinations()
        self.parsed_overrides()

    def _check_combinations(self) -> None:
        """Refuse options that contradict each other."""
        if self.target_bits is not None and self.target_size is not None:
            raise ConfigError("target_bits and target_size both say how large; give one of them")
        if self.target_bits is not None and not 2 <= self.target_bits <= 16:
            raise ConfigError(f"target_bits {self.target_bits} is not between 2 and 16")
        if self.target_size is not None and self.target_size < 1:
            raise ConfigError(f"target_size {self.target_size} must be positive (bytes)")
        if self.algorithm != "gptq" and (self.allocated or self.condition_kv == "on"):
            raise ConfigError(
                f"target_bits, target_size and condition_kv=on need calibration, which "
                f"algorithm {self.algorithm!r} has none of; use gptq"
            )
        w8a8 = self.format == "compressed-tensors" and self.bits == 8 and self.group_size == -1
        if self.input_activations == "int8" and not w8a8:
            raise ConfigError(
                "input_activations int8 needs format compressed-tensors, weights int8 and "
                "group_size -1 (W8A8)"
            )

    @property
    def allocated(self) -> bool:
        """Whether bits and group sizes are chosen module by module."""
        return self.target_bits is not None or self.target_size is not None

    @property
    def calibrated(self) -> bool:
        """Whether calibration text is run through the model."""
        return self.algorithm == "gptq"

    @property
    def bits(self) -> int:
        """Width of a code where no override says otherwise."""
        return WEIGHTS[self.weights]

    def parsed_overrides(self) -> tuple[Override, ...]:
        """Return the overrides in the order in which they count."""
        return tuple(Override.parse(text) for text in self.overrides)

    def kv_scheme(self) -> KVScheme | None:
        """Return the KV scheme to record; None = record none."""
        return None if self.kv_cache_dtype == "none" else parse_kv_dtype(self.kv_cache_dtype)

    def to_dict(self) -> dict[str, Any]:
        """Return the options as they stay with the checkpoint: no paths of this machine."""
        options = asdict(self)
        options["overrides"] = list(self.overrides)
        if self.calibration is not None:
            text = str(self.calibration)
            options["calibration"] = text if text.startswith("hf:") else Path(text).name
        return options


def _check_choice(name: str, value: str, known: "dict[str, int] | tuple[str, ...]") -> None:
    if value not in known:
        raise ConfigError(f"{name} {value!r} is unknown; choose from {', '.join(known)}")


def _is_group_size(value: int | str) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and (value == -1 or value > 0)
