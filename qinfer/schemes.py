"""How numbers are stored: the weight and KV-cache schemes, as validated, torch-free data."""

from dataclasses import dataclass
from typing import Literal, get_args

from qinfer.errors import ConfigError

KVDtype = Literal["fp32", "fp16", "bf16", "fp8_e4m3", "int8"]
ScaleGranularity = Literal["none", "token_head"]

WEIGHT_BITS = (2, 3, 4, 8)
KV_DTYPE_ALIASES = {"fp8": "fp8_e4m3", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_ELEMENT_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8_e4m3": 1, "int8": 1}
_SCALE_BYTES = 2  # one bf16 scale per (token, kv head), for K and for V


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """How a linear layer's weight is quantized.

    Args:
        bits: width of a code, one of `WEIGHT_BITS`.
        group_size: input features that share a scale; None = all of them (one group per row).
        symmetric: the zero point is fixed at `2**(bits - 1)` and not stored.
        act_order: columns were quantized in the order of descending Hessian diagonal. Groups are
            static (assigned before the reordering), so this changes no layout.
        table: name of the table of values that codes are places in (`nf4`); None = codes are
            multiples of the scale. No kernel runs codes of a table.
    """

    bits: int
    group_size: int | None
    symmetric: bool = True
    act_order: bool = False
    table: str | None = None

    def __post_init__(self) -> None:
        """Refuse widths and group sizes that no format carries."""
        if self.bits not in WEIGHT_BITS:
            raise ConfigError(f"weight bits {self.bits} not supported; choose from {WEIGHT_BITS}")
        if self.group_size is not None and self.group_size < 1:
            raise ConfigError(f"group size {self.group_size} must be positive (None = per channel)")

    def num_groups(self, in_features: int) -> int:
        """Return the number of scale groups along an input of `in_features`."""
        return 1 if self.group_size is None else -(-in_features // self.group_size)

    def __str__(self) -> str:
        """Return a short label such as `int4 g64 sym`."""
        group = "channel" if self.group_size is None else f"g{self.group_size}"
        if self.table is not None:
            return f"{self.table} {group}"
        return f"int{self.bits} {group} {'sym' if self.symmetric else 'asym'}"


@dataclass(frozen=True, slots=True)
class KVScheme:
    """How keys and values are stored in the cache.

    Args:
        dtype: the element type.
        granularity: `token_head` stores one bf16 scale per token and kv head, K and V apart.
    """

    dtype: KVDtype
    granularity: ScaleGranularity

    @property
    def element_bytes(self) -> int:
        """Bytes of one stored element, scales not counted."""
        return _ELEMENT_BYTES[self.dtype]

    @property
    def scale_bytes(self) -> int:
        """Bytes of scale per token and kv head, for one of K or V."""
        return _SCALE_BYTES if self.granularity == "token_head" else 0

    @property
    def quantized(self) -> bool:
        """Whether elements are codes that need a scale."""
        return self.granularity != "none"

    def __str__(self) -> str:
        """Return the option's spelling, such as `int8`."""
        return self.dtype


KV_SCHEMES: dict[str, KVScheme] = {
    name: KVScheme(name, "token_head" if name in {"int8", "fp8_e4m3"} else "none")
    for name in get_args(KVDtype)
}


def parse_kv_dtype(name: str) -> KVScheme:
    """Return the scheme behind a `--kv-cache-dtype` spelling other than `auto`.

    Raises:
        ConfigError: the name is unknown; the message lists what there is.
    """
    scheme = KV_SCHEMES.get(KV_DTYPE_ALIASES.get(name, name))
    if scheme is None:
        known = ", ".join([*KV_SCHEMES, *KV_DTYPE_ALIASES])
        raise ConfigError(f"kv_cache_dtype {name!r} is unknown; choose from auto, {known}")
    return scheme
