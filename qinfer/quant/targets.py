"""Which modules are quantized and how: settled, checked and priced before any weight is read."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from qinfer.errors import ConfigError
from qinfer.formats.output import GPTQOutput, OutputFormat, output_format
from qinfer.quant import bnb
from qinfer.quant.config import AUTO_GROUP_SIZES, Override, QuantizeConfig
from qinfer.schemes import WeightScheme

_GPTQ = GPTQOutput("gptq")
_EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True, slots=True)
class Target:
    """One linear of the decoder and what becomes of it.

    Args:
        name: module name, such as `model.layers.0.self_attn.q_proj`.
        in_features: columns of its weight.
        out_features: rows of its weight.
        scheme: how it is quantized; None = it stays as it is.
        reason: why it stays as it is.
        form: the format that it is written in.
    """

    name: str
    in_features: int
    out_features: int
    scheme: WeightScheme | None
    reason: str | None = None
    form: OutputFormat = _GPTQ

    def dense_bytes(self, element_bytes: int) -> int:
        """Return the size of the weight as it was."""
        return self.in_features * self.out_features * element_bytes

    def file_bytes(self, element_bytes: int) -> int:
        """Return the size of the weight's tensors in the checkpoint that is written."""
        if self.scheme is None:
            return self.dense_bytes(element_bytes)
        return self.form.num_bytes(self.in_features, self.out_features, self.scheme)


@dataclass(frozen=True, slots=True)
class Plan:
    """What becomes of every linear, and the scheme of those that no override touches."""

    scheme: WeightScheme
    targets: tuple[Target, ...]
    overrides: tuple[tuple[Override, WeightScheme | None], ...]
    form: OutputFormat = _GPTQ

    @property
    def misfits(self) -> tuple[Target, ...]:
        """Modules left as they are because the format cannot carry them."""
        wanted = {None, OVERRIDDEN, ALLOCATED}
        return tuple(target for target in self.targets if target.reason not in wanted)

    def file_overrides(self) -> dict[str, WeightScheme | None]:
        """Return the overrides as a checkpoint's settings hold them.

        There a pattern is matched at the start of a module's name and the first that matches
        counts, so the modules that do not fit come first, by name.
        """
        rules: dict[str, WeightScheme | None] = {
            f"{re.escape(target.name)}$": None for target in self.misfits
        }
        for item, scheme in self.overrides:
            rules[f".*(?:{item.pattern})"] = scheme
        return rules

    def skip_cost_bytes(self, element_bytes: int) -> int:
        """Return how much larger the misfits make the checkpoint."""
        return sum(
            target.dense_bytes(element_bytes)
            - replace(target, scheme=self.scheme).file_bytes(element_bytes)
            for target in self.misfits
        )


OVERRIDDEN = "left as it is by an override"
ALLOCATED = "left as it is by the choice for the size asked for"


def make_plan(shapes: Mapping[str, tuple[int, int]], config: QuantizeConfig) -> Plan:
    """Decide for every linear, before calibration.

    Args:
        shapes: module name to `(in_features, out_features)`, in the model's order.
        config: what was asked for.

    Raises:
        ConfigError: an override matches nothing or only some experts of a layer, nothing is left
            to quantize, or (under `on_misfit=error`) shapes do not fit; the message lists every
            one of them.
    """
    overrides = config.parsed_overrides()
    chosen = {name: _override_of(name, overrides) for name in shapes}
    unused = [item.pattern for item in overrides if item not in chosen.values()]
    if unused:
        raise ConfigError(
            f"override {unused[0]!r} matches no module, or none that an earlier override left; "
            f"a module's name is like {next(iter(shapes))}"
        )
    library_scheme = bnb.plan_scheme(config)
    scheme = library_scheme or WeightScheme(
        bits=config.bits,
        group_size=_group_size(shapes, chosen, config),
        symmetric=not config.asym,
        act_order=config.act_order and config.algorithm == "gptq",
    )
    schemes = {item: _apply(item, scheme) for item in overrides}
    form = output_format(
        config.format, symmetric=not config.asym, input_activations=config.input_activations
    )
    targets = []
    for name, (in_features, out_features) in shapes.items():
        item = chosen[name]
        own = scheme if item is None else schemes[item]
        reason: str | None = OVERRIDDEN
        if own is not None:
            fits_all = library_scheme is not None
            problem = None if fits_all else form.misfit(in_features, out_features, own)
            reason = None if problem is None else f"{own}: {problem}"
        kept = own if reason is None else None
        targets.append(Target(name, in_features, out_features, kept, reason, form))
    _check_experts(targets)
    plan = Plan(scheme, tuple(targets), tuple(schemes.items()), form)
    if plan.misfits and config.on_misfit == "error":
        raise ConfigError(_misfit_message(plan.misfits, shapes))
    if all(target.scheme is None for target in targets):
        raise ConfigError("nothing to quantize: every module is left as it is\n" + _lines(targets))
    return plan


def _check_experts(targets: Sequence[Target]) -> None:
    """Refuse another format for one expert than for its siblings: engines run them as one."""
    firsts: dict[str, Target] = {}
    for target in targets:
        siblings, found = _EXPERT.subn(".experts.*.", target.name)
        first = firsts.setdefault(siblings, target)
        if found and first.scheme != target.scheme:
            raise ConfigError(
                f"{first.name} would be {first.scheme or 'unquantized'}, but {target.name} "
                f"{target.scheme or 'unquantized'}; all experts of a layer run as one, so write "
                "an override that matches each of them, such as 'experts=bits:8'"
            )


def _override_of(name: str, overrides: Sequence[Override]) -> Override | None:
    return next((item for item in overrides if item.matches(name)), None)


def _group_size(
    shapes: Mapping[str, tuple[int, int]],
    chosen: Mapping[str, Override | None],
    config: QuantizeConfig,
) -> int | None:
    if isinstance(config.group_size, int):
        return None if config.group_size == -1 else config.group_size
    widths = {
        shapes[name][0]
        for name, item in chosen.items()
        if item is None or (item.group_size is None and not item.skip)
    }
    fitting = [size for size in AUTO_GROUP_SIZES if all(width % size == 0 for width in widths)]
    # Where nothing divides all widths, the smallest misfits the fewest.
    return fitting[0] if fitting else AUTO_GROUP_SIZES[-1]


def _apply(item: Override, scheme: WeightScheme) -> WeightScheme | None:
    if item.skip:
        return None
    group_size = scheme.group_size
    if item.group_size is not None:
        group_size = None if item.group_size == -1 else item.group_size
    return WeightScheme(
        bits=item.bits or scheme.bits,
        group_size=group_size,
        symmetric=scheme.symmetric,
        act_order=scheme.act_order,
    )


def _misfit_message(misfits: Sequence[Target], shapes: Mapping[str, tuple[int, int]]) -> str:
    return (
        f"{len(misfits)} of {len(shapes)} modules do not fit the format:\n{_lines(misfits)}\n"
        "choose another --group-size (-1 fits any width), leave them out with "
        "--override 'REGEX=skip', or leave all of them unquantized with --on-misfit skip"
    )


def _lines(targets: Sequence[Target]) -> str:
    return "\n".join(
        f"  {target.name}: in_features {target.in_features}, out_features {target.out_features}: "
        f"{target.reason}"
        for target in targets
    )
