"""qinfer: quantized LLM inference with the proof of what it cost.

The public names are loaded on first use, so that `import qinfer` (and `qinfer --help`) never
imports torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qinfer.engine.beams import BeamParams
    from qinfer.engine.llm import LLM
    from qinfer.engine.params import SamplingParams
    from qinfer.quant.pipeline import quantize
    from qinfer.workflows.evaluation import evaluate

__version__ = "0.1.0"
__all__ = ["LLM", "BeamParams", "SamplingParams", "__version__", "evaluate", "quantize"]

_PUBLIC = {
    "BeamParams": "qinfer.engine.beams",
    "LLM": "qinfer.engine.llm",
    "SamplingParams": "qinfer.engine.params",
    "quantize": "qinfer.quant.pipeline",
    "evaluate": "qinfer.workflows.evaluation",
}


def __getattr__(name: str) -> object:
    """Import a public name from its home module on first use (PEP 562)."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'qinfer' has no attribute {name!r}")
    return vars(import_module(_PUBLIC[name]))[name]
