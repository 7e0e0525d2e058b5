"""llm-compressor's process: quantizes a model with its modifiers; runs in its environment.

python run_llmcompressor.py SOURCE TOKENS.json OUT OPTIONS.json

The options are the arguments of `weights` and, if wanted, of `input_activations` and
`kv_cache_scheme` in the words of compressed-tensors; what they do not name is its default. With
weights of fewer than 8 bits the modifier is GPTQ, with 8 bits it is rounding.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(source: str, tokens: str, out: str, options: str) -> None:
    windows = json.loads(Path(tokens).read_text(encoding="utf-8"))
    data = Dataset.from_dict(
        {"input_ids": windows, "attention_mask": [[1] * len(ids) for ids in windows]}
    )
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    oneshot(
        model=model,
        dataset=data,
        recipe=_recipe(json.loads(options)),
        max_seq_length=max(len(ids) for ids in windows),
        num_calibration_samples=len(windows),
        shuffle_calibration_samples=False,
    )
    model.save_pretrained(out, save_compressed=True)
    AutoTokenizer.from_pretrained(source).save_pretrained(out)


def _recipe(options: dict[str, Any]) -> Any:
    modifier = GPTQModifier if options["weights"]["num_bits"] < 8 else QuantizationModifier
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(**options["weights"]),
        input_activations=_optional(options.get("input_activations")),
    )
    rest = {}
    if "kv_cache_scheme" in options:
        rest["kv_cache_scheme"] = QuantizationArgs(**options["kv_cache_scheme"])
    return modifier(config_groups={"group_0": scheme}, ignore=["lm_head"], **rest)


def _optional(fields: dict[str, Any] | None) -> QuantizationArgs | None:
    return None if fields is None else QuantizationArgs(**fields)


if __name__ == "__main__":
    main(*sys.argv[1:])
