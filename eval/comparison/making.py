"""Makes the checkpoints: every tool in a process of its own, its time and memory taken."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from comparison import gguf_files
from comparison.rows import Row
from peers.environments import GPTQMODEL, LLAMA_CPP, LLMCOMPRESSOR, Environment, ensure

from qinfer.checkpoint.gguf import convert
from qinfer.models.tokenizer import load_tokenizer
from qinfer.quant.calibration import load_calibration
from qinfer.quant.condition_run import condition
from qinfer.quant.conditioner import RECORD_NAME

HERE = Path(__file__).parent


class MakingError(Exception):
    """A tool failed; the message says where its log is."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What all tools share.

    Args:
        source: the unquantized model's directory.
        gguf: the file that it comes from, for llama.cpp.
        calibration: text.
        num_samples: windows of it.
        seq_len: tokens of each.
        threads: of every tool.
        cache: folder of the environments.
        work: folder of what is made.
        install: make environments that are not there.
    """

    source: Path
    gguf: Path | None
    calibration: Path
    num_samples: int
    seq_len: int
    threads: int
    cache: Path
    work: Path
    install: bool


@dataclass(frozen=True, slots=True)
class Cost:
    """What a process took: `cpu_seconds` are those of all its threads."""

    wall_seconds: float
    cpu_seconds: float
    peak_rss_bytes: int
    load_average: float


def run(command: list[str], log: Path, variables: dict[str, str]) -> Cost:
    """Run a command to its end.

    Raises:
        MakingError: its status is not 0.
    """
    settings = [f"{name}={value}" for name, value in variables.items()]
    start = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["env", *settings, *command],
            stdout=output,
            stderr=output,
            cwd=log.parent,  # GPTQModel writes its logs where it is started
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)  # it was not waited for by its owner
    if status:
        tool, code = Path(command[0]).name, process.returncode
        raise MakingError(f"{tool} failed (exit code {code}); see {log.name} in the cache")
    return Cost(
        wall_seconds=time.monotonic() - start,
        cpu_seconds=usage.ru_utime + usage.ru_stime,
        peak_rss_bytes=usage.ru_maxrss * 1024,
        load_average=os.getloadavg()[0],
    )


def make(row: Row, setup: Setup, *, again: bool) -> tuple[Path, dict[str, Any]]:
    """Return a row's checkpoint, from another run if it is there, and what making it took.

    Raises:
        MakingError: the tool failed.
        UnavailableError: its environment cannot be made.
    """
    if row.tool == "as it is":
        return setup.source, {}
    out = setup.work / row.folder
    facts = out.with_name(f"{out.name}.made.json")
    wanted = {"tool": row.tool, "options": row.options, "calibration": calibration_sha256(setup)}
    if facts.exists() and out.exists() and not again:
        made: dict[str, Any] = json.loads(facts.read_text(encoding="utf-8"))
        if {name: made.get(name) for name in wanted} == wanted:
            return out, made
    shutil.rmtree(out, ignore_errors=True)
    print(f"making {row.name} ...", flush=True)
    made = wanted | {"threads": setup.threads} | TOOLS[row.tool](row, setup, out)
    facts.write_text(json.dumps(made, indent=1), encoding="utf-8")
    return out, made


def calibration_sha256(setup: Setup) -> str:
    """Return the hash of the calibration windows, which are kept in a file for the peers."""
    tokenizer = load_tokenizer(setup.source)
    samples = load_calibration(
        lambda text: tokenizer.encode(text, add_special_tokens=False),
        path=setup.calibration,
        num_samples=setup.num_samples,
        seq_len=setup.seq_len,
        max_position=1 << 30,
    )
    windows = [list(window) for window in samples.windows]
    _tokens(setup).write_text(json.dumps(windows), encoding="utf-8")
    return samples.sha256


def _tokens(setup: Setup) -> Path:
    return setup.work / f"{setup.source.name}-{setup.num_samples}x{setup.seq_len}.json"


def _qinfer(row: Row, setup: Setup, out: Path) -> dict[str, Any]:
    command = [
        str(Path(sys.executable).with_name("qinfer")),
        *["quantize", str(setup.source), "--out", str(out)],
        *["--calibration", str(setup.calibration)],
        *["--samples", str(setup.num_samples), "--seq-len", str(setup.seq_len)],
        *["--threads", str(setup.threads), *row.options],
    ]
    cost = run(command, _log(out), {"OMP_NUM_THREADS": str(setup.threads)})
    return asdict(cost) | {"versions": {"qinfer": version("qinfer"), "torch": version("torch")}}


def _gptqmodel(row: Row, setup: Setup, out: Path) -> dict[str, Any]:
    # Its own default is half of the cores, and below two its thread pool cannot be made.
    variables = {"GPTQMODEL_CPU_WORKERS": str(max(2, setup.threads))}
    return _peer(GPTQMODEL, "run_gptqmodel.py", row, setup, out, variables)


def _llmcompressor(row: Row, setup: Setup, out: Path) -> dict[str, Any]:
    return _peer(LLMCOMPRESSOR, "run_llmcompressor.py", row, setup, out, {})


def _peer(
    environment: Environment,
    script: str,
    row: Row,
    setup: Setup,
    out: Path,
    variables: dict[str, str],
) -> dict[str, Any]:
    python = ensure(environment, setup.cache, install=setup.install)
    command = [python, str(HERE / script), str(setup.source), str(_tokens(setup)), str(out)]
    common = {"OMP_NUM_THREADS": str(setup.threads), "HF_HUB_OFFLINE": "1"}
    cost = run([*command, json.dumps(row.options)], _log(out), common | variables)
    return asdict(cost) | {"versions": _versions(environment)}


def _llama_cpp(_: Row, setup: Setup, out: Path) -> dict[str, Any]:
    if setup.gguf is None:
        raise MakingError("the model has no GGUF file that llama.cpp could quantize")
    python = ensure(LLAMA_CPP, setup.cache, install=setup.install)
    plain = setup.work / "bf16.gguf"
    quantized = setup.work / "Q4_0.gguf"
    if not plain.exists():
        gguf_files.write_bf16(setup.gguf, plain)
    command = [python, str(HERE / "run_llama_cpp.py"), str(plain), str(quantized)]
    cost = run([*command, str(setup.threads)], _log(out), {})
    convert(quantized, out, keep_codes=True)
    return asdict(cost) | {"versions": _versions(LLAMA_CPP)}


def _condition(_: Row, setup: Setup, out: Path) -> dict[str, Any]:
    report = condition(setup.source, out, kv_cache_dtype="int8", calibration=setup.calibration)
    layers = json.loads((out / RECORD_NAME).read_text(encoding="utf-8"))["layers"]
    pairs = [
        (before, after)
        for layer in layers
        for before, after in zip(layer["error_before"], layer["error_after"], strict=True)
    ]
    return {
        "wall_seconds": report.seconds,
        "heads": len(pairs),
        "heads_better": sum(after < before for before, after in pairs),
        "heads_worse": sum(after > before for before, after in pairs),
    }


def _versions(environment: Environment) -> dict[str, str]:
    """Return the versions that the environment pins."""
    return dict(requirement.split("==") for requirement in environment.requirements)


def _log(out: Path) -> Path:
    return out.with_name(f"{out.name}.log")


TOOLS: dict[str, Callable[[Row, Setup, Path], dict[str, Any]]] = {
    "qinfer": _qinfer,
    "gptqmodel": _gptqmodel,
    "llmcompressor": _llmcompressor,
    "llama.cpp": _llama_cpp,
    "condition": _condition,
}
