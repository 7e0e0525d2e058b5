import os
from pathlib import Path

import pytest

from qinfer import env
from qinfer.errors import ConfigError


def test_cache_dir_follows_its_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("QINFER_CACHE", str(tmp_path))
    assert env.cache_dir() == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("QINFER_CACHE", "~/models")
    assert env.cache_dir() == tmp_path / "home" / "models"
    for unset in ("", None):
        if unset is None:
            monkeypatch.delenv("QINFER_CACHE")
        else:
            monkeypatch.setenv("QINFER_CACHE", unset)
        assert env.cache_dir() == tmp_path / "home" / ".cache" / "qinfer"


@pytest.mark.parametrize(("value", "expected"), [(None, True), ("1", True), ("0", False)])
def test_native_kernels_can_be_switched_off(
    monkeypatch: pytest.MonkeyPatch, value: str | None, expected: bool
) -> None:
    monkeypatch.delenv("QINFER_NATIVE", raising=False)
    if value is not None:
        monkeypatch.setenv("QINFER_NATIVE", value)
    assert env.native_enabled() is expected


def test_a_switch_that_is_neither_0_nor_1_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QINFER_NATIVE", "no")
    with pytest.raises(ConfigError, match="QINFER_NATIVE is 'no'"):
        env.native_enabled()


def test_calm_openmp_respects_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    env.calm_openmp()
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    env.calm_openmp()
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"
