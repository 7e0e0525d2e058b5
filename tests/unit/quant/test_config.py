"""Options are refused when they are given, not when they are used."""

from pathlib import Path
from typing import Any

import pytest

from qinfer.errors import ConfigError
from qinfer.quant.config import Override, QuantizeConfig


def test_override_spellings() -> None:
    assert Override.parse("down_proj=bits:8") == Override("down_proj", bits=8)
    assert Override.parse(r"layers\.(0|1)\.=bits:8,group_size:32") == Override(
        r"layers\.(0|1)\.", bits=8, group_size=32
    )
    assert Override.parse("(?=.*q_proj)=group_size:-1") == Override("(?=.*q_proj)", group_size=-1)
    assert Override.parse("v_proj=skip") == Override("v_proj", skip=True)
    assert Override("q_proj").matches("model.layers.0.self_attn.q_proj")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bits:8", "REGEX=bits:8"),
        ("=bits:8", "REGEX=bits:8"),
        ("q_(=bits:8", "bad regular expression"),
        ("(?i)Q_PROJ=bits:8", "bad regular expression: global flags"),
        ("q=bits", "neither bits:N"),
        ("q=sym:1", "neither bits:N"),
    ],
)
def test_bad_overrides(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        QuantizeConfig(overrides=(text,))


@pytest.mark.parametrize(
    "options",
    [
        {"weights": "int5"},
        {"algorithm": "awq"},
        {"group_size": 0},
        {"group_size": "large"},
        {"damp_percent": -0.1},
        {"num_samples": 0},
        {"seq_len": 0},
        {"kv_cache_dtype": "int4"},
        {"on_misfit": "pad"},
    ],
)
def test_bad_values_name_the_option(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(reversed(options))):
        QuantizeConfig(**options)


def test_what_is_kept_names_no_path() -> None:
    config = QuantizeConfig(calibration=Path("/somewhere/text.txt"), overrides=("q=bits:8",))
    assert config.to_dict()["calibration"] == "text.txt"
    assert config.to_dict()["overrides"] == ["q=bits:8"]


def test_kv_schemes() -> None:
    assert str(QuantizeConfig().kv_scheme()) == "int8"
    assert str(QuantizeConfig(kv_cache_dtype="fp8").kv_scheme()) == "fp8_e4m3"
    assert QuantizeConfig(kv_cache_dtype="none").kv_scheme() is None
