"""Causal attention over one whole calibration sample, in float32."""

import torch
import torch.nn.functional as F  # noqa: N812 - the customary name


def causal_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None
) -> torch.Tensor:
    """Attend from every token to those before it and itself.

    Args:
        q: `[tokens, heads, dim]`, rotated.
        k: `[tokens, kv_heads, dim]`, rotated.
        v: the same.
        window: how many tokens a query may see, itself included; None = all.

    Returns:
        `[tokens, heads, dim]`.
    """
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
