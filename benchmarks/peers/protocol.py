"""What the orchestrator and the engines' processes say to each other, and the loop that answers.

One JSON object a line. The orchestrator sends `{"do": ..., ...}`, the process answers with
`{"ok": ...}` or `{"error": reason}`:

    prepare   make the engine's model file, once; the process is thrown away afterwards
    load      load it; answers with the versions of what runs
    run       do a work with prompts from a seed; answers with the seconds that the timed part took

This module runs in every engine's environment, so it needs nothing but the standard library.
"""

import json
import os
import random
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

Settings = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Work:
    """What is timed: the prompt's tokens when `steps` is 0, else the decode steps after it.

    Args:
        name: for tables.
        batch: sequences.
        cached: tokens of the sequence that are in the cache before the clock starts; prefill only.
        prompt: tokens of each prompt, beyond the cached ones.
        steps: tokens of each sequence that are decoded on the clock; 0 = prefill is timed.
        only: the name of the engines that it is for; empty = all.
    """

    name: str
    batch: int
    cached: int
    prompt: int
    steps: int
    only: str = ""

    @property
    def tokens(self) -> int:
        """Tokens that are counted for a rate."""
        return self.batch * (self.steps or self.prompt)

    def to_dict(self) -> dict[str, Any]:
        """Return the work for a message or a record."""
        return asdict(self)


class Engine(Protocol):
    """A loaded model. Both methods return the seconds of the timed part."""

    versions: dict[str, str]

    def prefill(self, cached: list[int], prompt: list[int]) -> float:
        """Bring `cached` into the cache; then, timed, compute `prompt` and its first token."""

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        """Compute the prompts and their first tokens; then, timed, `steps` tokens for each."""


def random_prompts(seed: int, count: int, length: int, vocab_size: int) -> list[list[int]]:
    """Return prompts of random tokens; the first 1 % of the ids (special tokens) is left out."""
    draw = random.Random(seed)
    ids = range(vocab_size // 100, vocab_size)
    return [draw.choices(ids, k=length) for _ in range(count)]


def serve(prepare: Callable[[Settings], None], load: Callable[[Settings], Engine]) -> None:
    """Answer the orchestrator until it closes the pipe; the answers' one is the first argument."""
    answers = os.fdopen(int(sys.argv[1]), "w", buffering=1)
    engine: Engine | None = None
    settings: Settings = {}
    for line in sys.stdin:
        message = json.loads(line)
        try:
            if message["do"] == "prepare":
                prepare(message["settings"])
                answer: dict[str, Any] = {"ok": True}
            elif message["do"] == "load":
                settings = message["settings"]
                engine = load(settings)
                answer = {"ok": engine.versions}
            else:
                answer = {"ok": _run(engine, settings["vocab_size"], message)}
        except Exception as error:  # noqa: BLE001  the process's edge: the reason is reported
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")


def _run(engine: Engine | None, vocab_size: int, message: dict[str, Any]) -> float:
    if engine is None:
        raise ValueError("run before load")
    work = Work(**message["work"])
    length = work.cached + work.prompt
    prompts = random_prompts(message["seed"], work.batch, length, vocab_size)
    if work.steps:
        return engine.decode(prompts, work.steps)
    return engine.prefill(prompts[0][: work.cached], prompts[0][work.cached :])
