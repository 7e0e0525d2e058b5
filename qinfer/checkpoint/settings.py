"""The settings that a checkpoint records about itself: quantized weights and the KV cache."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from qinfer.checkpoint.files import list_names, read_json
from qinfer.errors import CheckpointError
from qinfer.formats.table import FORMATS, QuantizationSettings, parse_settings
from qinfer.schemes import KV_SCHEMES, KVScheme

KV_KEY = "qinfer_kv_cache"
_KV_FORMAT_VERSION = 1
# AutoGPTQ and vLLM read the first, GPTQModel the second too.
_SIDE_FILES = ("quantize_config.json", "quant_config.json")


def read_quantization(
    path: Path, config: Mapping[str, Any], names: Iterable[str]
) -> QuantizationSettings | None:
    """Return the quantization settings of a checkpoint; None if its weights are plain.

    `quantization_config` of config.json comes first, then quantize_config.json (files of 2023
    have only that). Both may be there if they say the same.

    Raises:
        CheckpointError: the two contradict each other, or there are quantized tensors without
            settings or settings without quantized tensors.
    """
    settings = _agreed_settings(path, _settings_found(path, config))
    marks = tuple(f".{part}" for fmt in FORMATS.values() for part in fmt.marks)
    quantized = [name for name in names if name.endswith(marks)]
    if settings is None and quantized:
        raise CheckpointError(
            f"{path} holds quantized weights without settings: neither config.json has a "
            f"quantization_config nor is there a {_SIDE_FILES[0]}; quantized are, "
            f"among {len(quantized)}:{list_names(quantized, 3)}"
        )
    if settings is not None and settings.formats and not quantized:
        raise CheckpointError(
            f"the settings of {path} say that its weights are quantized ({settings.method}), but "
            "it holds no quantized tensor"
        )
    return settings


def kv_config(scheme: KVScheme, conditioning: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return what config.json records under `qinfer_kv_cache`.

    Args:
        scheme: recommended for serving.
        conditioning: the summary of what was folded into q and k for it. It says what the weights
            are like and changes nothing in how they are read, so records without it stay readable.
    """
    record: dict[str, Any] = {
        "format_version": _KV_FORMAT_VERSION,
        "dtype": scheme.dtype,
        "granularity": scheme.granularity,
    }
    return record if conditioning is None else record | {"conditioning": dict(conditioning)}


def read_kv_scheme(config: Mapping[str, Any]) -> KVScheme | None:
    """Return the KV-cache scheme that config.json recommends; None if it says nothing.

    Raises:
        CheckpointError: the entry is damaged, or of a newer qinfer.
    """
    raw = config.get(KV_KEY)
    if raw is None:
        return None
    version = raw.get("format_version") if isinstance(raw, Mapping) else None
    if version != _KV_FORMAT_VERSION:
        raise CheckpointError(
            f"config.json: {KV_KEY}.format_version is {version!r}; this qinfer reads "
            f"{_KV_FORMAT_VERSION}"
        )
    scheme = KV_SCHEMES.get(str(raw.get("dtype")))
    if scheme is None or raw.get("granularity") != scheme.granularity:
        raise CheckpointError(
            f"config.json: {KV_KEY} asks for dtype {raw.get('dtype')!r} with granularity "
            f"{raw.get('granularity')!r}, which this qinfer does not know"
        )
    return scheme


def _settings_found(path: Path, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    own = config.get("quantization_config")
    if own is not None:
        if not isinstance(own, dict):
            raise CheckpointError(f"{path / 'config.json'}: quantization_config is no object")
        found["config.json"] = own
    for file in _SIDE_FILES:
        if (path / file).is_file():
            found[file] = read_json(path / file)
            break
    return found


def _agreed_settings(
    path: Path, found: Mapping[str, dict[str, Any]]
) -> QuantizationSettings | None:
    """Return what the files say together: a key that one lacks is taken from the other."""
    raws = list(found.values())
    if not raws:
        return None
    settings = parse_settings(raws[-1] | raws[0])
    other = parse_settings(raws[0] | raws[-1])
    # What decides how tensors are read must agree; spelling and notes need not.
    if replace(settings, raw={}) != replace(other, raw={}):
        both = "".join(f"\n  {file}: {json.dumps(raw)}" for file, raw in found.items())
        raise CheckpointError(
            f"the quantization settings of {path} contradict each other; remove or correct "
            f"one:{both}"
        )
    return settings
