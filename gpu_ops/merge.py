"""Exact merging of attention over disjoint sets of keys."""

from __future__ import annotations

import torch

from hetero_kv.gpu_ops.kernel_choice import runs_triton


def merge_attention(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of two disjoint sets of keys, from the attention over each.

    Args:
        out_a, out_b: [..., v_dim], softmax-weighted values over each set.
        lse_a, lse_b: [...], log-sum-exp of the scores over each set; -inf for an empty set.

    Returns (out, lse) over the union, `out` in the dtype of `out_a`, `lse` in float32.
    """
    if out_a.dim() == 4 and runs_triton(out_a):
        from hetero_kv.gpu_ops.triton_kernels import merge

        with torch.cuda.device(out_a.device):
            return merge.merge_attention(out_a, lse_a, out_b, lse_b)
    return merge_attention_in_torch(out_a, lse_a, out_b, lse_b)


def merge_attention_in_torch(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition of `merge_attention`, on any device."""
    lse_a, lse_b = lse_a.float(), lse_b.float()
    lse = torch.logaddexp(lse_a, lse_b)
    # If both sets are empty every weight is 0, not exp(nan).
    base = torch.where(torch.isneginf(lse), torch.zeros_like(lse), lse)
    weight_a = torch.exp(lse_a - base).unsqueeze(-1)
    weight_b = torch.exp(lse_b - base).unsqueeze(-1)
    # Weighted parts are summed in float32, whatever their dtype.
    return (out_a * weight_a + out_b * weight_b).to(out_a.dtype), lse


def apply_sink(out: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Add a learned sink to the softmax (gpt-oss): a key with score `sink` and a value of zero.

    Args:
        out: [batch, heads, tokens, v_dim].
        lse: [batch, heads, tokens] float32.
        sink: [heads].

    Returns (out, lse) with the sink among the keys, in the same shapes.
    """
    sink, lse = sink.float().view(1, -1, 1), lse.float()
    return out * torch.sigmoid(lse - sink).unsqueeze(-1).to(out.dtype), torch.logaddexp(lse, sink)
