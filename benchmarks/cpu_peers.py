"""qinfer beside other engines on the CPU: alternately, in one run, on the same model.

    python benchmarks/cpu_peers.py --quick            # is everything there? the numbers are noise
    python benchmarks/cpu_peers.py --rounds 5         # the real run; README.md tells the method
    python benchmarks/cpu_peers.py --model random-1.1b --rounds 5

Every engine is a process of its own that is stopped while another one is measured. Peers live in
virtual environments that this script makes in --cache; one that cannot be installed or run is
reported as absent, with the reason. The record is written after every round, so that an
interrupted run keeps what it has.
"""

import argparse
import random
import signal
import sys
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import records
from peers import random_model, report
from peers.engines import QINFER, Setup, Spec, all_specs
from peers.environments import UnavailableError, ensure
from peers.machine import describe_machine, describe_qinfer
from peers.process import EngineError, EngineProcess, Sample
from peers.protocol import Work

from qinfer.checkpoint.hub import demo_model, resolve_model
from qinfer.checkpoint.reader import open_checkpoint
from qinfer.models.config import ModelConfig

HERE = Path(__file__).parent
MAX_LEN = 2048
LONG_MAX_LEN = 4352
PREPARE_SECONDS = 3600

PREFILL = Work("prefill 512, batch 1", 1, 0, 512, 0)
DECODE = Work("decode, batch 1, context 128", 1, 0, 128, 64)
DECODE_1024 = Work("decode, batch 1, context 1024", 1, 0, 1024, 64)
WORKS = (
    PREFILL,
    DECODE,
    DECODE_1024,
    Work("decode, batch 8, context 128", 8, 0, 128, 32),
    Work("decode, batch 32, context 128", 32, 0, 128, 32),
    Work("prefill 512 at depth 1024", 1, 1024, 512, 0),
)
# For INT8 KV against fp16 KV only, with --long.
LONG_WORK = Work("decode, batch 8, context 4096", 8, 0, 4096, 32, only="qinfer")

RANDOM_1B = "random-1.1b"
# Larger, so every work takes 8 times as long: what the small model does not tell already.
RANDOM_1B_WORKS = (
    PREFILL,
    DECODE,
    DECODE_1024,
    Work("decode, batch 16, context 128", 16, 0, 128, 32),
)
RANDOM_1B_ENGINES = (
    "qinfer int4 g64, KV int8",
    "qinfer int8",
    "llama.cpp Q4_0, KV f16",
    "llama.cpp Q8_0, KV f16",
    "OpenVINO",
    "vLLM",
)


@dataclass(slots=True)
class Entrant:
    """An engine that was loaded, and its measurements: `samples[work][round]`."""

    spec: Spec
    process: EngineProcess
    versions: dict[str, str]
    samples: dict[str, dict[int, Sample]]
    failures: dict[str, str]
    idle_load: float | None = None
    peak_rss: int = 0


@dataclass(frozen=True, slots=True)
class Subject:
    """The model that all engines run.

    Args:
        name: for the record.
        source: its directory.
        gguf: the same as a GGUF file, if there is one.
        label: in the names of the record's files; empty for the demo model.
        works: what is measured if the command line does not say.
        engines: parts of the names of those that run if it does not say; empty = all.
    """

    name: str
    source: Path
    gguf: Path | None
    label: str = ""
    works: tuple[Work, ...] = WORKS
    engines: tuple[str, ...] = ()


def subject(args: argparse.Namespace) -> Subject:
    """Return the model, made first if it is the random one."""
    if args.model == RANDOM_1B:
        source = args.cache / RANDOM_1B
        gguf = source.with_name(f"{RANDOM_1B}.gguf")
        random_model.make(random_model.LLAMA_1B, source, gguf)
        name = "random weights, 1.1 B Llama shape"
        return Subject(name, source, gguf, RANDOM_1B, RANDOM_1B_WORKS, RANDOM_1B_ENGINES)
    model = args.model or demo_model()
    gguf = Path(model) if str(model).endswith(".gguf") else None
    label = Path(model).stem if args.model else ""
    return Subject(args.model or report.DEMO, resolve_model(model), gguf, label)


def specs(args: argparse.Namespace, model: Subject) -> list[Spec]:
    """Return the engines of this run."""
    setup = Setup(
        source=model.source,
        gguf=model.gguf,
        cache=args.cache,
        threads=args.threads,
        max_len=LONG_MAX_LEN if args.long else MAX_LEN,
        memory=args.memory,
        algorithm=args.algorithm,
    )
    wanted = args.engines or model.engines or [""]
    return [spec for spec in all_specs(setup) if any(part in spec.name for part in wanted)]


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
    if spec.made_by_qinfer:
        maker = EngineProcess(sys.executable, QINFER, args.threads, log)
    else:
        maker = EngineProcess(python, spec.script, args.threads, log, spec.variables)
    try:
        maker.ask(PREPARE_SECONDS, do="prepare", settings=settings)
    finally:
        maker.kill()
    process = EngineProcess(python, spec.script, args.threads, log, spec.variables)
    try:
        versions = process.ask(do="load", settings=settings)
    except BaseException:
        process.kill()
        raise
    return Entrant(spec, process, versions, {}, {})


def start_all(args: argparse.Namespace, model: Subject, entrants: list[Entrant]) -> dict[str, str]:
    """Load the engines into `entrants`, and return the reasons of those that are absent."""
    vocab_size = ModelConfig.from_dict(open_checkpoint(model.source).config).vocab_size
    absent: dict[str, str] = {}
    failed: dict[str, str] = {}  # environment -> reason: not tried again for its next engine
    for spec in specs(args, model):
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
    return absent


@dataclass(slots=True)
class Clock:
    """The time that a run may still take.

    Args:
        deadline: by `time.monotonic`; infinite if there is none.
        longest_round: the seconds of the longest round so far.
    """

    deadline: float
    longest_round: float = 0.0

    def has_room_for_a_round(self) -> bool:
        """Whether a round as long as the longest would end in time."""
        return time.monotonic() + self.longest_round <= self.deadline

    def is_over(self) -> bool:
        """Whether the time is used up."""
        return time.monotonic() > self.deadline


def run_round(
    entrants: list[Entrant], works: list[Work], number: int, seed: int, clock: Clock
) -> None:
    """Let every engine do every work once, engine after engine on each work; round 0 is warm-up.

    The order of the engines is drawn anew for each work, so that none always follows another. A
    work that has begun is done by all of them, or its samples would have no partners.
    """
    draw = random.Random(seed * 1000 + number)
    start = time.monotonic()
    for work in works:
        if clock.is_over():
            return
        prompt_seed = draw.randrange(1 << 30)
        for entrant in draw.sample(entrants, len(entrants)):
            if work.name not in entrant.failures and entrant.spec.name.startswith(work.only):
                run_work(entrant, work, number, prompt_seed)
    clock.longest_round = max(clock.longest_round, time.monotonic() - start)


def run_work(entrant: Entrant, work: Work, number: int, seed: int) -> None:
    """Let one engine do one work, and keep the sample or the reason that there is none."""
    try:
        sample = entrant.process.measure(work.to_dict(), seed)
    except EngineError as error:
        entrant.failures[work.name] = str(error)
        print(f"failed: {entrant.spec.name}: {work.name}: {error}", flush=True)
        return
    if number:
        entrant.samples.setdefault(work.name, {})[number] = sample
    rate = work.tokens / sample.seconds
    print(
        f"round {number}  {work.name:32s} {entrant.spec.name:34s} {rate:8.1f} tok/s"
        f"  others {100 * sample.others:3.0f} %",
        flush=True,
    )


def record(
    args: argparse.Namespace, model: Subject, entrants: list[Entrant], works: list[Work]
) -> dict[str, Any]:
    """Return all that was measured, and what is needed to judge it."""
    counts = [len(samples) for entrant in entrants for samples in entrant.samples.values()]
    return {
        "format_version": 1,
        "threads": args.threads,
        "rounds": max(counts, default=0),
        "quick": args.quick,
        "algorithm": args.algorithm,
        "model": model.name,
        "works": [work.to_dict() for work in works],
        "engines": [record_engine(entrant, works) for entrant in entrants],
    }


def record_engine(entrant: Entrant, works: list[Work]) -> dict[str, Any]:
    """Return one engine's part of the record."""
    hidden = ("model", "source", "gguf")  # paths of this machine
    settings = {name: value for name, value in entrant.spec.settings.items() if name not in hidden}
    return {
        "name": entrant.spec.name,
        "bits": entrant.spec.bits,
        "settings": settings,
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


def chosen_works(args: argparse.Namespace, model: Subject) -> list[Work]:
    """Return the works of this run."""
    works = [*model.works, LONG_WORK] if args.long else list(model.works)
    if args.works:
        works = [work for work in works if any(part in work.name for part in args.works)]
    if args.quick:
        works = [replace(work, steps=min(work.steps, 4)) for work in works]
    return works


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, writing the record after every round, and return the last one."""
    clock = Clock(time.monotonic() + 60 * args.max_minutes)
    facts = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "qinfer": describe_qinfer(HERE.parent),  # before the run: the checkout may move on
    }
    model = subject(args)
    works = chosen_works(args, model)
    parts = [str(facts["date"])[:10], "cpu-peers", model.label, "quick" if args.quick else ""]
    files = records.free_files(args.out, "-".join(filter(None, parts)), replace=args.quick)
    entrants: list[Entrant] = []
    try:
        absent = start_all(args, model, entrants)

        def write(*, complete: bool) -> dict[str, Any]:
            for entrant in entrants:
                if entrant.process.is_alive:
                    entrant.peak_rss = entrant.process.peak_rss()
            rest = {"absent": absent, "complete": complete}
            result = facts | record(args, model, entrants, works) | rest
            records.write(files, result, report.markdown(result))
            return result

        for number in range(1 if args.quick else 0, args.rounds + 1):
            if not clock.has_room_for_a_round():
                print(f"--max-minutes: ends before round {number}", flush=True)
                break
            run_round(entrants, works, number, args.seed, clock)
            if number:
                write(complete=False)
        for entrant in entrants:
            if entrant.process.is_alive:
                entrant.idle_load = entrant.process.idle_load()
        return write(complete=True)
    finally:
        for entrant in entrants:
            entrant.process.kill()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cache = Path.home() / ".cache" / "qinfer-peers"
    parser.add_argument(
        "--model", help=f"directory, .gguf file or {RANDOM_1B} (default: the demo model)"
    )
    parser.add_argument("--cache", type=Path, default=cache, help="environments and models")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the record")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5, help="measured; one more warms up")
    parser.add_argument(
        "--max-minutes",
        type=float,
        default=float("inf"),
        help="no round is begun that would not end in time, loading included",
    )
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
    # Ended from outside, it must still end the engines: a stopped process ends by itself never.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    print(report.markdown(run(args)))


if __name__ == "__main__":
    main()
