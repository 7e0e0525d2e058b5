"""Log-probabilities of a checkpoint that vLLM's CPU build loads; runs in its environment.

python load_vllm.py CHECKPOINT TOKENS.json OUT.safetensors DTYPE

The rows are those of all positions but the last, as vLLM gives them with the prompt.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.inputs import TokensPrompt


def main(checkpoint: str, tokens: str, out: str, dtype: str) -> None:
    sequences = json.loads(Path(tokens).read_text(encoding="utf-8"))
    try:
        save_file(_predict(checkpoint, sequences, dtype), out)
    finally:
        cleanup_dist_env_and_memory()  # another engine may follow in this process


def _predict(checkpoint: str, sequences: list[list[int]], dtype: str) -> dict[str, torch.Tensor]:
    longest = max(len(ids) for ids in sequences)
    llm = LLM(
        checkpoint,
        dtype=dtype,
        max_model_len=longest + 1,
        max_num_batched_tokens=max(256, longest + 1),
        max_num_seqs=1,
        enable_prefix_caching=False,
        enforce_eager=True,
        max_logprobs=-1,
        skip_tokenizer_init=True,
    )
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=-1, detokenize=False)
    prompts = [TokensPrompt(prompt_token_ids=ids) for ids in sequences]
    result = {}
    for index, output in enumerate(llm.generate(prompts, params, use_tqdm=False)):
        # The first token has no prediction; every other position has all tokens.
        rows = [
            [position[token].logprob for token in range(len(position))]
            for position in output.prompt_logprobs[1:]
        ]
        result[str(index)] = torch.tensor(rows, dtype=torch.float32)
    return result


if __name__ == "__main__":
    main(*sys.argv[1:])
