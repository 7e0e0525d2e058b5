"""Causal attention over one whole calibration sample."""

import torch
import torch.nn.functional as F  # noqa: N812 - the customary name

_QUERIES = 64  # whose scores are in memory at once


def causal_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None, *, dtype: torch.dtype
) -> torch.Tensor:
    """Attend from every token to those before it and itself.

    Args:
        q: float32 `[tokens, heads, dim]`, rotated.
        k: float32 `[tokens, kv_heads, dim]`, rotated.
        v: the same.
        window: how many tokens a query may see, itself included; None = all.
        dtype: in which values are mixed: float32, or bfloat16, which takes two thirds of the time
            and rounds probabilities, values and result as the linear that follows would round the
            result. Scores and softmax are float32: they grow with the inputs, and so would what
            rounding does to the probabilities.

    Returns:
        Float32 `[tokens, heads, dim]`.
    """
    if dtype == torch.bfloat16:
        return _in_blocks(q, k, v, window)
    tokens = len(q)
    mask = None
    if window is not None and window < tokens:
        seen = torch.ones(tokens, tokens, dtype=torch.bool).tril_().triu_(1 - window)
        mask = torch.zeros(tokens, tokens).masked_fill_(~seen, -torch.inf)
    query, key, value = (part.transpose(0, 1).unsqueeze(0) for part in (q, k, v))
    mixed = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )
    return mixed.squeeze(0).transpose(0, 1)


def _in_blocks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None
) -> torch.Tensor:
    """Attend block after block of queries, each to the keys that it may see."""
    (tokens, heads, dim), kv_heads = q.shape, k.shape[1]
    group = heads // kv_heads
    queries = (q * dim**-0.5).view(tokens, kv_heads, group, dim).permute(1, 0, 2, 3).contiguous()
    keys = k.transpose(0, 1).contiguous()  # [kv_heads, tokens, dim]
    values = v.bfloat16().transpose(0, 1).contiguous()
    out = torch.empty(tokens, kv_heads, group, dim)
    # Made once: the system is slow to give memory of this size again and again.
    room = torch.empty(2, heads * min(_QUERIES, tokens) * tokens)
    for start in range(0, tokens, _QUERIES):
        end = min(start + _QUERIES, tokens)
        first = 0 if window is None else max(0, start + 1 - window)
        shape = (kv_heads, (end - start) * group, end - first)
        scores, weights = (
            part[: heads * (end - start) * (end - first)].view(shape) for part in room
        )
        block = queries[:, start:end].reshape(kv_heads, -1, dim)
        torch.bmm(block, keys[:, first:end].transpose(1, 2), out=scores)
        by_query = scores.view(kv_heads, end - start, group, end - first)
        _hide(by_query, start - first, window)
        torch.softmax(scores, -1, out=weights)
        mixed = torch.bmm(weights.bfloat16(), values[:, first:end])
        out[start:end] = mixed.view(kv_heads, end - start, group, dim).transpose(0, 1)
    return out.view(tokens, heads, dim)


def _hide(scores: torch.Tensor, before: int, window: int | None) -> None:
    """Take away what a query may not see.

    Args:
        scores: `[kv_heads, queries, group, keys]`; changed in place.
        before: keys in front of the first query.
        window: see `causal_attention`.
    """
    count = scores.shape[1]
    hidden = torch.full((count, count), -torch.inf).triu_(1).unsqueeze(1)
    scores[..., before:].add_(hidden)
    if window is not None and before + count > window:
        query, key = torch.arange(before, before + count), torch.arange(before + count)
        gone = query[:, None] - key >= window
        scores.masked_fill_(gone.unsqueeze(1), -torch.inf)
