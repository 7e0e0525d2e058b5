"""From MODEL and the shared options to a ready engine, for the verbs that run one."""

from typing import Any

from qinfer.cli import console
from qinfer.cli.options import EngineOptions
from qinfer.engine.llm import LLM


def load_llm(model: str, options: EngineOptions, *, chat_template: str | None = None) -> LLM:
    """Load MODEL, with a progress bar that vanishes, and return the engine.

    Args:
        model: directory, hub id or `.gguf` file.
        options: what the shared options said.
        chat_template: Jinja source that replaces the model's.

    Raises:
        QinferError: it cannot be found, read or fitted into memory.
    """
    source: dict[str, Any] = {"revision": options.revision, "chat_template": chat_template}
    if not console.err.is_terminal:
        return LLM(model, **source, **options.config)
    with console.progress_bar(transient=True) as progress:
        task = progress.add_task("loading", total=None, note="")
        source["on_load"] = lambda done, total: progress.update(task, completed=done, total=total)
        return LLM(model, **source, **options.config)
