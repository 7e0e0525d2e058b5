"""GPTQModel's process: quantizes a model with its own GPTQ or AWQ; runs in its environment.

python run_gptqmodel.py SOURCE TOKENS.json OUT OPTIONS.json

The options are fields of its `QuantizeConfig`; what they do not name is its default. With
`rounding` they are those of its `RTNConfig`: its way to AWQ's format on a machine without CUDA.
It calls such a file GPTQ; `settings` are put over those that it writes.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from gptqmodel import GPTQModel, QuantizeConfig
from gptqmodel.quantization.config import RTNConfig


def main(source: str, tokens: str, out: str, options: str) -> None:
    wanted = json.loads(options)
    rounding = wanted.pop("rounding", False)
    settings = wanted.pop("settings", {})
    config = RTNConfig(**wanted) if rounding else QuantizeConfig(**wanted)
    model = GPTQModel.load(source, config, device="cpu", dtype=torch.bfloat16)
    model.quantize(None if rounding else _samples(tokens), batch_size=1)
    model.save(out)
    if settings:
        _put_over(Path(out) / "config.json", settings, "quantization_config")
        _put_over(Path(out) / "quantize_config.json", settings)


def _put_over(path: Path, settings: dict[str, Any], key: str | None = None) -> None:
    data = json.loads(path.read_text(encoding="utf-8"))
    (data if key is None else data[key]).update(settings)
    path.write_text(json.dumps(data, indent=1), encoding="utf-8")


def _samples(tokens: str) -> list[dict[str, list[int]]]:
    windows = json.loads(Path(tokens).read_text(encoding="utf-8"))
    return [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in windows]


if __name__ == "__main__":
    main(*sys.argv[1:])
