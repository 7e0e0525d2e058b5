"""What a checkpoint's quantization settings say about each module, whatever their spelling."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from qinfer.schemes import WeightScheme


@dataclass(frozen=True, slots=True)
class QuantizationSettings:
    """The settings of one checkpoint.

    Args:
        method: the `quant_method`, a key of `qinfer.formats.table.FORMATS`.
        scheme: how a module is quantized unless an override says otherwise.
        version: variant of the layout (`gptq` stores zero points minus one, `gptq_v2` as is).
        dynamic: (regex, scheme) in order; the first that matches at the start of a module's name
            wins, None = not quantized.
        quantized_head: whether `lm_head` is quantized too.
        modules: last parts of the names that are quantized (`self_attn.q_proj`); None = all.
        raw: the settings as found.
    """

    method: str
    scheme: WeightScheme
    version: str
    dynamic: tuple[tuple[str, WeightScheme | None], ...] = ()
    quantized_head: bool = False
    modules: frozenset[str] | None = None
    raw: Mapping[str, Any] = field(default_factory=dict)

    def scheme_for(self, module: str) -> WeightScheme | None:
        """Return the scheme of a module by its full name; None = it is not quantized."""
        for pattern, scheme in self.dynamic:
            if re.match(pattern, module):
                return scheme
        if module == "lm_head":
            return self.scheme if self.quantized_head else None
        if self.modules is not None and not any(module.endswith(f".{m}") for m in self.modules):
            return None
        return self.scheme
