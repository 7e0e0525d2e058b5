"""Logits of a checkpoint that transformers loads, whatever library its format needs.

python load_transformers.py CHECKPOINT TOKENS.json OUT.safetensors "DTYPE[, weights alone]"

`weights alone`: the inputs of linears are not quantized, whatever the format would have it.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel


@torch.inference_mode()
def main(checkpoint: str, tokens: str, out: str, arithmetic: str) -> None:
    sequences = json.loads(Path(tokens).read_text(encoding="utf-8"))
    dtype, _, weights_alone = arithmetic.partition(", ")
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=vars(torch)[dtype], attn_implementation="eager"
    ).eval()
    if weights_alone:
        model = _without_quantized_inputs(model).to(vars(torch)[dtype])
    logits = {
        str(i): model(torch.tensor([ids])).logits[0].float() for i, ids in enumerate(sequences)
    }
    save_file({name: rows.contiguous() for name, rows in logits.items()}, out)


def _without_quantized_inputs(model: PreTrainedModel) -> PreTrainedModel:
    if model.config.quantization_config.quant_method == "bitsandbytes":
        return model.dequantize()
    for module in model.modules():
        scheme = vars(module).get("quantization_scheme")  # compressed-tensors puts it there
        if scheme is not None:
            scheme.input_activations = None
    return model


if __name__ == "__main__":
    main(*sys.argv[1:])
