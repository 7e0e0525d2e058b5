"""llm-compressor's process: quantizes a model with its GPTQ modifier; runs in its environment.

python run_llmcompressor.py SOURCE TOKENS.json OUT OPTIONS.json

The options are a group size, whether it is symmetric, and fields of `GPTQModifier`; what they do
not name is its default.
"""

import json
import sys
from pathlib import Path

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import GPTQModifier
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(source: str, tokens: str, out: str, options: str) -> None:
    windows = json.loads(Path(tokens).read_text(encoding="utf-8"))
    data = Dataset.from_dict(
        {"input_ids": windows, "attention_mask": [[1] * len(ids) for ids in windows]}
    )
    wanted = json.loads(options)
    weights = QuantizationArgs(
        num_bits=wanted.pop("bits"),
        type="int",
        symmetric=wanted.pop("symmetric"),
        strategy="group",
        group_size=wanted.pop("group_size"),
        **({"actorder": wanted.pop("actorder")} if "actorder" in wanted else {}),
    )
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(source)
    oneshot(
        model=model,
        dataset=data,
        recipe=GPTQModifier(
            config_groups={"group_0": QuantizationScheme(targets=["Linear"], weights=weights)},
            ignore=["lm_head"],
            **wanted,
        ),
        max_seq_length=max(len(ids) for ids in windows),
        num_calibration_samples=len(windows),
        shuffle_calibration_samples=False,
    )
    model.save_pretrained(out, save_compressed=True)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
