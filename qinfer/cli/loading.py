"""From MODEL and the shared options to a ready engine, for the verbs that run one."""

from qinfer.checkpoint.hub import resolve_model
from qinfer.cli.options import EngineOptions
from qinfer.engine.llm import LLM


def load_llm(model: str, options: EngineOptions) -> LLM:
    """Find MODEL (directory, hub id or `.gguf` file), load it, and return the engine.

    Raises:
        QinferError: it cannot be found, read or fitted into memory.
    """
    return LLM(resolve_model(model, revision=options.revision), **options.config)
