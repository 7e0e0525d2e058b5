"""Logits of a checkpoint that GPTQModel loads; runs in its environment.

python load_gptqmodel.py CHECKPOINT TOKENS.json OUT.safetensors DTYPE
"""

import json
import sys
from pathlib import Path

import torch
from gptqmodel import BACKEND, GPTQModel
from safetensors.torch import save_file


@torch.inference_mode()
def main(checkpoint: str, tokens: str, out: str, dtype: str) -> None:
    sequences = json.loads(Path(tokens).read_text(encoding="utf-8"))
    # Its torch kernel: the only one that takes every width and dtype on a CPU.
    wrapper = GPTQModel.load(
        checkpoint, device="cpu", dtype=vars(torch)[dtype], backend=BACKEND.TORCH
    )
    model = wrapper.model.eval()
    logits = {
        str(i): model(torch.tensor([ids])).logits[0].float() for i, ids in enumerate(sequences)
    }
    save_file({name: rows.contiguous() for name, rows in logits.items()}, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
