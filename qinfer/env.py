"""Environment variables: the only module that reads them.

`QINFER_CACHE` is the folder for converted models (default `~/.cache/qinfer`);
`QINFER_NATIVE=0` runs without the C++ kernels, as on a machine that has no compiler;
`QINFER_API_KEYS` holds the keys that `qinfer serve` asks for, separated by commas.
The model hub's own variables (`HF_TOKEN`, `HF_HUB_OFFLINE`, …) are read by huggingface_hub.
"""

import os
from pathlib import Path

from qinfer.errors import ConfigError


def cache_dir() -> Path:
    """Return the folder for derived files that can be made again; it may not exist yet."""
    value = os.environ.get("QINFER_CACHE")
    return Path(value).expanduser() if value else Path.home() / ".cache" / "qinfer"


def calm_openmp() -> None:
    """Let torch's idle threads sleep instead of spin, unless the user decided otherwise.

    To be called before torch is imported. Spinning threads slow down whoever shares the cores:
    on two busy cores scoring with two threads took four times as long as without spinning.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def native_enabled() -> bool:
    """Tell whether the C++ kernels may be used.

    Raises:
        ConfigError: `QINFER_NATIVE` is neither 0 nor 1.
    """
    value = os.environ.get("QINFER_NATIVE", "1")
    if value not in {"0", "1"}:
        raise ConfigError(f"QINFER_NATIVE is {value!r}; it must be 0 or 1")
    return value == "1"


def api_keys() -> str | None:
    """Return the server's API keys, separated by commas; None if there are none.

    They have no option, since every user of a machine can see the options of every process.
    """
    return os.environ.get("QINFER_API_KEYS") or None
