"""Beam search as transformers does it."""

from collections.abc import Collection, Sequence
from typing import Any

import torch

from qinfer.engine.beams import BeamParams


def search_with_transformers(
    model: Any, prompt: Sequence[int], params: BeamParams, end_ids: Collection[int]
) -> list[tuple[list[int], float]]:
    """Return the tokens and the score of each result, best first; an end token is the last."""
    result = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        num_beams=params.beam_width,
        num_return_sequences=params.num_return_sequences,
        max_new_tokens=params.max_tokens,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        eos_token_id=sorted(end_ids) or None,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    found = []
    for row, score in zip(result.sequences.tolist(), result.sequences_scores.tolist(), strict=True):
        tokens = row[len(prompt) :]
        ends = [at for at, token in enumerate(tokens) if token in end_ids]
        found.append((tokens[: ends[0] + 1] if ends else tokens, score))
    return found
