"""Log-probabilities under the model's own distribution: before temperature, penalties and masks."""

import torch

from qinfer.engine.request import TokenLogprob


def top_logprobs(logits: torch.Tensor, token_id: int, count: int) -> TokenLogprob:
    """Return a token's log-probability under `logits` `[vocab]`, and the `count` most likely.

    Among equal ones the lower id comes first.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    top: tuple[tuple[int, float], ...] = ()
    if count > 0:
        count = min(count, logprobs.shape[0])
        lowest = torch.topk(logprobs, count).values[-1]
        ids = (logprobs >= lowest).nonzero().flatten()
        values, order = torch.sort(logprobs[ids], descending=True, stable=True)
        top = tuple(zip(ids[order[:count]].tolist(), values[:count].tolist(), strict=True))
    return TokenLogprob(token_id, float(logprobs[token_id]), top)
