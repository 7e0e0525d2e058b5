"""What a checkpoint's quantization settings say about each module, whatever their spelling."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from qinfer.schemes import WeightScheme


@dataclass(frozen=True, slots=True)
class ModuleFormat:
    """How the weight of a module is stored.

    Args:
        layout: which tensors hold it, a key of `qinfer.formats.table.FORMATS`.
        scheme: width, group size and symmetry of the codes; None = codes that no kernel runs, so
            that they are dequantized when they are read.
        variant: of the layout, where it has several (`gptq` stores zero points minus one, `gptq_v2`
            as they are).
        name: what the codes are called where their scheme does not tell, such as `Q4_K`.
    """

    layout: str
    scheme: WeightScheme | None
    variant: str = ""
    name: str = ""

    def __str__(self) -> str:
        """Return a short label such as `int4 g64 sym`, `Q4_K (int4 g32 asym)` or `nf4`."""
        if self.scheme is None:
            return self.name
        return f"{self.name} ({self.scheme})" if self.name else str(self.scheme)

    @property
    def grid(self) -> WeightScheme:
        """The scheme, of codes that have one."""
        if self.scheme is None:
            raise ValueError(f"{self} has no scheme")
        return self.scheme


Rule = tuple[str, ModuleFormat | None]


@dataclass(frozen=True, slots=True)
class QuantizationSettings:
    """The settings of one checkpoint.

    Every method names modules in its own way (GPTQ's `dynamic`, targets and ignore of
    compressed-tensors, AWQ's `modules_to_not_convert`); its parser turns them into rules.

    Args:
        method: the `quant_method`.
        version: the format as the settings name it, such as `gptq_v2` or `pack-quantized`.
        rules: (regular expression, format) in order; the first that matches at the start of a
            module's name counts, None = not quantized.
        default: the format of modules that no rule matches.
        raw: the settings as found.
    """

    method: str
    version: str
    default: ModuleFormat | None
    rules: tuple[Rule, ...] = ()
    raw: Mapping[str, Any] = field(default_factory=dict)

    def module_format(self, module: str) -> ModuleFormat | None:
        """Return the format of a module by its full name; None = it is not quantized."""
        for pattern, found in self.rules:
            if re.match(pattern, module):
                return found
        return self.default

    def scheme_for(self, module: str) -> WeightScheme | None:
        """Return the scheme in which a module runs; None = as a dense weight."""
        found = self.module_format(module)
        return None if found is None else found.scheme

    @property
    def formats(self) -> tuple[ModuleFormat, ...]:
        """All formats that modules may have, the usual one first, each once."""
        named = [self.default, *(found for _, found in self.rules)]
        return tuple(dict.fromkeys(found for found in named if found is not None))

    @property
    def scheme(self) -> WeightScheme | None:
        """The usual scheme; None = no weight is quantized, or not to a grid."""
        return self.formats[0].scheme if self.formats else None
