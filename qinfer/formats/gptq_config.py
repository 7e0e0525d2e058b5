"""GPTQ's settings: every spelling that is found in the wild to one form, and one form to write.

Keys and defaults: AutoGPTQ 0.7 (`quantize_config.json`), GPTQModel 7 (`dynamic`, `meta`, two
spellings of the format), transformers 5 (`GPTQConfig`), vLLM (`gptq`).
"""

import re
from collections.abc import Mapping
from typing import Any, Literal

from qinfer import __version__
from qinfer.errors import CheckpointError, ConfigError
from qinfer.formats.settings import ModuleFormat, QuantizationSettings, Rule
from qinfer.schemes import WEIGHT_BITS, WeightScheme

Version = Literal["gptq", "gptq_v2"]
VERSIONS: tuple[Version, ...] = ("gptq", "gptq_v2")
_SYNONYMS = {
    "w_bit": "bits",
    "q_group_size": "group_size",
    "wbits": "bits",
    "groupsize": "group_size",
}
_REFUSED = {
    "marlin": "its weights are repacked for one GPU kernel",
    "gptq_p": "its bit-plane layout is read by GPTQModel alone",
}


def preferred_version(scheme: WeightScheme) -> Version:
    """Return the variant to write: v1 where it is exact and read by all, else v2.

    v1 stores `zero - 1`, which cannot hold the zero points that asymmetric groups may have.
    """
    return "gptq" if scheme.symmetric else "gptq_v2"


def config(
    scheme: WeightScheme,
    *,
    version: Version,
    overrides: Mapping[str, WeightScheme | None] | None = None,
    desc_act: bool = False,
    quantized_head: bool = False,
    meta: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the `quantization_config` object, also to be written as quantize_config.json.

    Args:
        scheme: the default scheme.
        version: what `qzeros` holds.
        overrides: regex at the start of a module's name -> its scheme; None = left unquantized.
            Order counts: the first match wins.
        desc_act: whether g_idx is other than `k // group_size`; static-group act-order is not.
        quantized_head: whether `lm_head` is quantized too.
        meta: how the weights were made (damping, true-sequential, …), for information only.

    Raises:
        ConfigError: an override differs in symmetry from a default that is written as v1.
    """
    dynamic: dict[str, dict[str, Any]] = {}
    for pattern, override in (overrides or {}).items():
        if override is None:
            dynamic[f"-:{pattern}"] = {}
            continue
        if version == "gptq" and not override.symmetric:
            raise ConfigError(f"override {pattern!r} is asymmetric, which needs version gptq_v2")
        dynamic[f"+:{pattern}"] = {
            "bits": override.bits,
            "group_size": override.group_size or -1,
            "sym": override.symmetric,
        }
    result: dict[str, Any] = {
        "quant_method": "gptq",
        "bits": scheme.bits,
        "group_size": scheme.group_size or -1,
        "desc_act": desc_act,
        "sym": scheme.symmetric,
        "lm_head": quantized_head,
        "checkpoint_format": version,
        "format": version,
        "pack_dtype": "int32",
        "meta": {
            "quantizer": [f"qinfer:{__version__}"],
            "static_groups": scheme.act_order,
            **(meta or {}),
        },
    }
    if dynamic:
        result["dynamic"] = dynamic
    return result


def parse_config(raw: Mapping[str, Any]) -> QuantizationSettings:
    """Read GPTQ settings in any known spelling.

    A missing `sym` is taken as true and a missing `desc_act` as false; the reader of the tensors
    finds out what holds (see `qinfer.formats.gptq.detect_symmetric`).

    Raises:
        CheckpointError: a key is missing, of the wrong kind, or asks for a layout that is not read.
    """
    data = {_SYNONYMS.get(key, key): value for key, value in raw.items()}
    version = _version(data)
    scheme = _scheme(data, "quantization_config")
    default = ModuleFormat("gptq", scheme, version)
    dynamic = [
        (pattern, None if own is None else ModuleFormat("gptq", own, version))
        for pattern, own in _dynamic(data.get("dynamic"), scheme)
    ]
    head: Rule = (r"lm_head$", default if data.get("lm_head") is True else None)
    modules = _modules(data.get("modules_in_block_to_quantize"))
    return QuantizationSettings(
        method="gptq",
        version=version,
        default=default,
        rules=(*dynamic, head, *_only(modules, default)),
        raw=dict(raw),
    )


def _only(modules: frozenset[str] | None, default: ModuleFormat) -> tuple[Rule, ...]:
    """Return the rules for a list of the modules (last parts of names) that are quantized."""
    if modules is None:
        return ()
    ends = "|".join(re.escape(name) for name in sorted(modules))
    return ((rf".*\.(?:{ends})$", default), ("", None))


def _version(data: Mapping[str, Any]) -> str:
    version = str(data.get("format") or data.get("checkpoint_format") or "gptq")
    if data.get("is_marlin_format") is True or data.get("quant_method") == "marlin":
        version = "marlin"
    if version in _REFUSED:
        raise CheckpointError(
            f"quantization_config.format is {version!r}, which qinfer does not read: "
            f"{_REFUSED[version]}; get the checkpoint in format gptq or gptq_v2"
        )
    if version not in VERSIONS:
        raise CheckpointError(
            f"quantization_config.format is {version!r}; qinfer reads {' and '.join(VERSIONS)}"
        )
    if data.get("pack_dtype", "int32") != "int32":
        raise CheckpointError(
            f"quantization_config.pack_dtype is {data['pack_dtype']!r}; qinfer reads int32"
        )
    return version


def _scheme(data: Mapping[str, Any], where: str) -> WeightScheme:
    bits = _integer(data, "bits", where)
    group_size = _integer(data, "group_size", where)
    if bits not in WEIGHT_BITS:
        raise CheckpointError(f"{where}.bits is {bits}; qinfer reads {WEIGHT_BITS}")
    if group_size == 0 or group_size < -1:
        raise CheckpointError(f"{where}.group_size is {group_size}; it must be positive or -1")
    meta = data.get("meta")
    static = isinstance(meta, Mapping) and meta.get("static_groups") is True
    return WeightScheme(
        bits=bits,
        group_size=None if group_size == -1 else group_size,
        symmetric=_flag(data, "sym", where, default=True),
        act_order=_flag(data, "desc_act", where, default=False) or static,
    )


def _integer(data: Mapping[str, Any], key: str, where: str) -> int:
    value = data.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        found = "missing" if value is None else f"{value!r}"
        raise CheckpointError(f"{where}.{key} is {found}; it must be an integer")
    return value


def _flag(data: Mapping[str, Any], key: str, where: str, *, default: bool) -> bool:
    value = data.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise CheckpointError(f"{where}.{key} is {value!r}; it must be true or false")
    return value


def _dynamic(raw: object, default: WeightScheme) -> tuple[tuple[str, WeightScheme | None], ...]:
    """Read GPTQModel's `{"-:regex": {}, "+:regex": {"bits": 8, …}}`; `+:` may be left out."""
    if not raw:
        return ()
    if not isinstance(raw, Mapping):
        raise CheckpointError(f"quantization_config.dynamic is {raw!r}; it must be an object")
    rules: list[tuple[str, WeightScheme | None]] = []
    for key, changes in raw.items():
        pattern = key.removeprefix("+:").removeprefix("-:")
        where = f"quantization_config.dynamic[{key!r}]"
        try:
            re.compile(pattern)
        except re.error as error:
            raise CheckpointError(f"{where} is no regular expression: {error}") from error
        if key.startswith("-:"):
            rules.append((pattern, None))
            continue
        if not isinstance(changes, Mapping):
            raise CheckpointError(f"{where} is {changes!r}; it must be an object")
        base = {
            "bits": default.bits,
            "group_size": default.group_size or -1,
            "sym": default.symmetric,
            "desc_act": default.act_order,
        }
        rules.append((pattern, _scheme(base | dict(changes), where)))
    return tuple(rules)


def _modules(raw: object) -> frozenset[str] | None:
    """Read transformers' list (of lists) of module names inside a block."""
    if not raw:
        return None
    if not isinstance(raw, list):
        raise CheckpointError(
            f"quantization_config.modules_in_block_to_quantize is {raw!r}; it must be a list"
        )
    names: set[str] = set()
    for item in raw:
        names.update(item if isinstance(item, list) else [item])
    if not all(isinstance(name, str) for name in names):
        raise CheckpointError(
            f"quantization_config.modules_in_block_to_quantize is {raw!r}; it must hold names"
        )
    return frozenset(names)
