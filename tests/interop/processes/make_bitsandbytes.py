"""A checkpoint in a bitsandbytes format, written by transformers; runs in its environment.

python make_bitsandbytes.py SOURCE TOKENS.json OUT OPTIONS.json

The options are fields of `BitsAndBytesConfig`.
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig


def main(source: str, _: str, out: str, options: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        source,
        dtype=torch.bfloat16,
        device_map="cpu",
        quantization_config=BitsAndBytesConfig(**json.loads(options)),
    )
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(source).save_pretrained(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
