"""Logits of a checkpoint that transformers loads, whatever library its format needs.

python load_transformers.py CHECKPOINT TOKENS.json OUT.safetensors DTYPE
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM


@torch.inference_mode()
def main(checkpoint: str, tokens: str, out: str, dtype: str) -> None:
    sequences = json.loads(Path(tokens).read_text(encoding="utf-8"))
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=vars(torch)[dtype], attn_implementation="eager"
    ).eval()
    logits = {
        str(i): model(torch.tensor([ids])).logits[0].float() for i, ids in enumerate(sequences)
    }
    save_file({name: rows.contiguous() for name, rows in logits.items()}, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
