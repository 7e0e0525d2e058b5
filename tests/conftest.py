"""Fixtures that every test package shares: tiny checkpoints and the one small real model."""

import os

# Before any import of the hub's client: tests never reach for the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from pathlib import Path

import pytest
import torch
from support.checkpoints import write_script, write_tiny

torch.set_num_threads(1)


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
