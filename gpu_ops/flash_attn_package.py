"""The package flash-attn (FlashAttention-2, https://github.com/Dao-AILab/flash-attention), if it is installed."""

from __future__ import annotations

import torch


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    causal: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention by `flash_attn_func`, for half precision, one head dim up to 256, on Ampere or later.

    Args:
        q: [batch, kv_heads * group, n, dim], with `causal` the last n of the keys' m positions.
        k, v: [batch, kv_heads, m, dim].
        window: number of keys that a query sees, itself included; None for all earlier keys.

    Returns (out [batch, kv_heads * group, n, dim], lse [batch, kv_heads * group, n] float32).
    """
    from flash_attn import flash_attn_func

    # Its tensors are [batch, tokens, heads, dim]; a causal mask ends at the last query and the last key.
    out, lse, *_ = flash_attn_func(
        *(t.transpose(1, 2) for t in (q, k, v)),
        softmax_scale=scale,
        causal=causal,
        window_size=(-1, -1) if window is None else (window - 1, 0),
        softcap=softcap or 0.0,
        return_attn_probs=True,
    )
    return out.transpose(1, 2), lse[..., : q.shape[2]]
