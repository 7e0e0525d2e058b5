"""A conversation at the terminal: messages, commands that begin with a slash, and figures."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import click

from qinfer.cli import console
from qinfer.cli.live import stream
from qinfer.engine.llm import LLM
from qinfer.engine.params import SamplingParams
from qinfer.engine.request import Usage
from qinfer.errors import RequestError

HELP = (
    ("/set", "show the sampling parameters"),
    ("/set NAME VALUE", "change one, such as /set temperature 0.7; VALUE none = unset"),
    ("/system TEXT", "replace the system message and start anew"),
    ("/retry", "answer the last message again"),
    ("/undo", "take the last message and its answer back"),
    ("/stats", "speed and memory of the last answer and of the conversation"),
    ("/save FILE", "write the conversation as JSON"),
    ("/reset", "forget the conversation"),
    ("/exit", "end; so does the end of input"),
)
# Fields that are about one request of a program, not about a conversation.
_FIXED = frozenset({"n", "logprobs", "prompt_logprobs", "priority", "structured", "logit_bias"})

Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Figures:
    """What one answer took.

    Args:
        num_tokens: of the answer.
        ttft: seconds to its first token.
        seconds: to its last.
        usage: the engine's counts; None if it was stopped.
    """

    num_tokens: int
    ttft: float
    seconds: float
    usage: Usage | None

    def lines(self) -> list[str]:
        """Return them for reading."""
        rest = self.num_tokens - 1
        speed = rest / (self.seconds - self.ttft) if rest > 0 else 0.0
        lines = [f"answer: {self.num_tokens} tokens in {self.seconds:.2f} s"]
        if rest > 0:
            lines.append(f"first token after {self.ttft * 1e3:.0f} ms, then {speed:.1f} tokens/s")
        if self.usage is not None:
            lines.append(
                f"prompt: {self.usage.prompt_tokens} tokens, "
                f"{self.usage.cached_tokens} of them from the prefix cache"
            )
        return lines


@dataclass(slots=True)
class Conversation:
    """What was said so far, how answers are sampled, and the commands.

    Args:
        llm: answers.
        params: of the next answer.
        system: message that opens the conversation; None = none.
    """

    llm: LLM
    params: SamplingParams
    system: str | None = None
    messages: Messages = field(default_factory=list)
    figures: Figures | None = None

    def take(self, line: str) -> bool:
        """Carry out one line of input; False means the end. Errors cost only this line."""
        if not line.startswith("/"):
            if line:
                self._say(line)
            return True
        name, _, argument = line.partition(" ")
        if name == "/exit":
            return False
        command = self._commands().get(name)
        if command is None:
            console.remark("\n".join(f"{name:<18}{what}" for name, what in HELP))
        else:
            command(argument.strip())
        return True

    def _commands(self) -> Mapping[str, Callable[[str], None]]:
        return {
            "/set": self._set,
            "/system": self._restart,
            "/retry": self._retry,
            "/undo": self._undo,
            "/stats": self._show_stats,
            "/save": self._save,
            "/reset": self._reset,
        }

    def _say(self, text: str) -> None:
        """Send a message and print the answer as it comes; both are kept if that worked."""
        message = {"role": "user", "content": text}
        try:
            answer = self._answer([*self._opening(), *self.messages, message])
        except RequestError as error:
            console.warn(f"{error} (/reset starts anew)")
            return
        self.messages += [message, {"role": "assistant", "content": answer}]

    def _opening(self) -> Messages:
        return [] if self.system is None else [{"role": "system", "content": self.system}]

    def _answer(self, messages: Messages) -> str:
        prompt = self.llm.tokenizer.apply_chat_template(messages)
        pieces: list[str] = []
        num_tokens, usage = 0, None
        start = time.perf_counter()
        first = last = start
        for event in stream(self.llm.core, prompt, self.params):
            last = time.perf_counter()
            first = last if not num_tokens else first
            num_tokens += len(event.token_ids)
            usage = event.usage or usage
            pieces.append(event.text)
            click.echo(event.text, nl=False)
        click.echo()
        self.figures = Figures(num_tokens, first - start, last - start, usage)
        return "".join(pieces)

    def _set(self, argument: str) -> None:
        name, _, text = argument.partition(" ")
        if not name:
            console.remark("\n".join(f"{name} {value}" for name, value in self._settings().items()))
            return
        if name not in self._settings():
            console.warn(f"there is no {name}; /set alone shows what there is")
            return
        try:
            self.params = replace(self.params, **{name: _value(name, text.strip())})
        except RequestError as error:
            console.warn(str(error))
            return
        console.remark(f"{name} {self._settings()[name]}")

    def _settings(self) -> dict[str, str]:
        """Return the parameters by name as text; what is unset shows the engine's default."""
        filled = asdict(self.llm.core.limits.defaults.apply(self.params))
        return {
            name: "unset" if value is None else json.dumps(value)
            for name, value in filled.items()
            if name not in _FIXED
        }

    def _restart(self, argument: str) -> None:
        self.system = argument or None
        self._reset("")

    def _retry(self, _argument: str) -> None:
        if not self.messages:
            console.remark("there is no message yet")
            return
        text = self.messages[-2]["content"]
        kept, self.messages = self.messages, self.messages[:-2]
        self._say(text)
        self.messages = self.messages if len(self.messages) == len(kept) else kept

    def _undo(self, _argument: str) -> None:
        self.messages = self.messages[:-2]
        console.remark(f"{len(self.messages)} messages are left")

    def _show_stats(self, _argument: str) -> None:
        memory, stats = self.llm.memory(), self.llm.core.stats()
        lines = self.figures.lines() if self.figures else ["there was no answer yet"]
        context = self.llm.core.limits.max_model_len
        used = stats.num_blocks - stats.free_blocks
        weights, kv = console.megabytes(memory.weights_bytes), self.llm.config.kv_cache_dtype
        lines.append(f"conversation: {len(self.messages)} messages, context {context:,} tokens")
        lines.append(f"weights {weights}, {kv} KV {memory.kv_bytes_per_token:,} B per token")
        lines.append(f"cache: {used} of {stats.num_blocks} blocks in use")
        console.remark("\n".join(lines))

    def _save(self, argument: str) -> None:
        if not argument:
            console.warn("say where: /save FILE")
            return
        data = {"messages": [*self._opening(), *self.messages]}
        text = json.dumps(data, ensure_ascii=False, indent=2)
        try:
            Path(argument).write_text(f"{text}\n", encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            console.warn(f"cannot write {argument}: {error.strerror}")
            return
        console.remark(f"{len(data['messages'])} messages are in {argument}")

    def _reset(self, _argument: str) -> None:
        self.messages = []
        console.remark("the conversation is forgotten")


def _value(name: str, text: str) -> Any:
    """Return what a user wrote for a parameter: JSON where it is JSON, else text; none = unset."""
    if text.lower() in ("none", ""):
        return next(entry.default for entry in fields(SamplingParams) if entry.name == name)
    try:
        value: Any = json.loads(text)
    except ValueError:
        return text
    return tuple(value) if isinstance(value, list) else value
