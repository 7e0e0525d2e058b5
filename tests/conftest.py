"""Fixtures that every test package shares: tiny checkpoints and the one small real model."""

import os

# Before any import of the hub's client: tests never reach for the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from pathlib import Path

import pytest
import torch
from hypothesis import settings
from support.checkpoints import write_script, write_tiny

from qinfer.checkpoint.hub import DEMO_PACKAGE, demo_model, resolve_model
from qinfer.kernels import cpu

torch.set_num_threads(1)
# A busy machine makes no test fail.
settings.register_profile("house", deadline=None)
settings.load_profile("house")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a run test another build of the C++ library, as `make test-native` does."""
    parser.addoption("--native-library", type=Path, metavar="DIR", help="where to find it first")


def pytest_configure(config: pytest.Config) -> None:
    """Find the library there before any test module asks for it."""
    folder = config.getoption("--native-library")
    if folder is not None:
        cpu.__path__.insert(0, str(folder.resolve()))


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama checkpoint (see `support.checkpoints.TINY`). Do not write into it."""
    return write_tiny(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="session")
def script_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that answers any prompt ending in a byte outside `ABCDEFGHIJK` with that text."""
    path = tmp_path_factory.mktemp("script") / "model"
    write_script(path, "ABCDEFGHIJK")
    return path


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a bf16 directory, converted once into qinfer's cache."""
    model = demo_model()
    if isinstance(model, str):
        pytest.skip(f"the package {DEMO_PACKAGE} is not installed (make setup installs it)")
    return resolve_model(model)
