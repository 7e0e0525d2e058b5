"""GPTQModel's process: its CPU kernels in a model of transformers, plain forward calls and argmax.

The kernel is GPTQModel's own choice for this processor.
"""

from collections import Counter
from importlib.metadata import version

import torch
from gptqmodel import GPTQModel
from gptqmodel.nn_modules.qlinear import BaseQuantLinear
from protocol import Settings, serve
from run_transformers import Forward


class GptqModel(Forward):
    """A GPTQ checkpoint that GPTQModel loads."""

    def __init__(self, settings: Settings) -> None:
        torch.set_num_threads(settings["threads"])
        wrapper = GPTQModel.load(settings["model"], device="cpu", dtype=torch.bfloat16)
        super().__init__(wrapper.model.eval())
        kernels = Counter(
            type(module).__name__
            for module in wrapper.model.modules()
            if isinstance(module, BaseQuantLinear)
        )
        self.versions = {name: version(name) for name in ("gptqmodel", "transformers", "torch")}
        self.versions["kernels"] = ", ".join(sorted(kernels))


def prepare(settings: Settings) -> None:
    """Nothing to make: a directory is loaded that is there."""


if __name__ == "__main__":
    serve(prepare, GptqModel)
