"""GPTQModel's process: quantizes a model with its own GPTQ; runs in its environment.

python run_gptqmodel.py SOURCE TOKENS.json OUT OPTIONS.json

The options are fields of its `QuantizeConfig`; what they do not name is its default.
"""

import json
import sys
from pathlib import Path

import torch
from gptqmodel import GPTQModel, QuantizeConfig


def main(source: str, tokens: str, out: str, options: str) -> None:
    windows = json.loads(Path(tokens).read_text(encoding="utf-8"))
    samples = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in windows]
    config = QuantizeConfig(**json.loads(options))
    model = GPTQModel.load(source, config, device="cpu", dtype=torch.bfloat16)
    model.quantize(samples, batch_size=1)
    model.save(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
