"""A decoded token on a GPU whose blocks are in DRAM: the GPU's work before the copy to the CPU, and after the answer.

Before, one launch appends the token to the window, writes float32 inputs of the CPU to one buffer for a single copy,
and attends to the window, in parts. After, another launch merges these parts with the CPU's attention. A token costs
mostly host time there, which goes into launches.
"""

from __future__ import annotations

import torch

from hetero_kv.gpu_ops.kernel_choice import runs_triton
from hetero_kv.gpu_ops.tiled_attention import tiled_attention

#: Parts of a window, attended to in parallel.
SPLITS = 16
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_LARGEST_HEAD = 256

#: A window's occupied slots as two runs: first slot and number of one, first slot and number of the other.
Runs = tuple[int, int, int, int]


def supports(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether Triton's kernels support a token's query, key and value [batch, heads, 1, dim]."""
    dtype = q.dtype
    is_alike = dtype is k.dtype and dtype is v.dtype and dtype in _DTYPES
    return is_alike and max(q.shape[3], v.shape[3]) <= _LARGEST_HEAD and runs_triton(q)


def take_token(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slot: int,
    runs: Runs,
    scale: float,
    softcap: float | None,
    sent: tuple[torch.Tensor, ...],
) -> torch.Tensor:
    """As `take_token_in_torch`, which defines the result, by one Triton kernel."""
    from hetero_kv.gpu_ops.triton_kernels import window_step

    q, k, v = (part if part.stride(3) == 1 else part.contiguous() for part in (q, k, v))
    with torch.cuda.device(q.device):
        return window_step.take_token(q, k, v, keys, values, slot, runs, scale, softcap, sent, SPLITS)


def take_token_in_torch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slot: int,
    runs: Runs,
    scale: float,
    softcap: float | None,
    sent: tuple[torch.Tensor, ...],
    splits: int = SPLITS,
) -> torch.Tensor:
    """Append a token to a window, write the CPU's inputs, and attend to the window.

    Args:
        q: [batch, kv_heads * group, 1, k_dim].
        k, v: [batch, kv_heads, 1, dim], the token's key and value.
        keys, values: [batch, kv_heads, capacity, dim], the window's, contiguous; the token is written to `slot`.
        runs: the slots that are attended to, including `slot`.
        scale, softcap: as in `gpu_ops.tiled_attention`.
        sent: receives query, key and value, in their shapes, and the log-sum-exp of each part,
            [batch, kv_heads, splits, group], -inf for a part without keys; float32, contiguous.
        splits: number of consecutive parts that the runs are divided into.

    Returns the attention of each part, [batch, kv_heads, splits, group, v_dim] float32.
    """
    batch, heads, _, k_dim = q.shape
    kv_heads, (first, first_count, second, second_count) = k.shape[1], runs
    keys[:, :, slot], values[:, :, slot] = k.squeeze(2), v.squeeze(2)
    for target, part in zip(sent, (q, k, v), strict=False):
        target.copy_(part)
    slots = [*range(first, first + first_count), *range(second, second + second_count)]
    folded = q.reshape(batch, kv_heads, heads // kv_heads, k_dim)
    out = q.new_zeros((batch, kv_heads, splits, folded.shape[2], v.shape[3]), dtype=torch.float32)
    sent[3].fill_(float("-inf"))
    share = -(-len(slots) // splits)
    for split in range(splits):
        if own := slots[split * share : (split + 1) * share]:
            attended = tiled_attention(folded.float(), keys[:, :, own], values[:, :, own], scale, softcap)
            out[:, :, split], sent[3][:, :, split] = attended
    return out


def join_parts(
    parts: torch.Tensor,
    lse_of_parts: torch.Tensor,
    other: torch.Tensor | None,
    other_lse: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """As `join_parts_in_torch`, which defines the result, by one Triton kernel."""
    from hetero_kv.gpu_ops.triton_kernels import window_step

    with torch.cuda.device(parts.device):
        window_step.join_parts(parts, lse_of_parts, other, other_lse, out, lse)


def join_parts_in_torch(
    parts: torch.Tensor,
    lse_of_parts: torch.Tensor,
    other: torch.Tensor | None,
    other_lse: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Merge, exactly, the attention to a window's parts, at least one of which has a key, with that to other blocks.

    Args:
        parts, lse_of_parts: from `take_token_in_torch`.
        other: [batch, kv_heads * group, 1, v_dim] float32, attention elsewhere, or None; other_lse: its log-sum-exp.
        out: receives the result, in the shape of `other` and the model's dtype; lse: its log-sum-exp, float32.
    """
    batch, kv_heads, _, group, dim = parts.shape
    logarithms, attended = lse_of_parts, parts
    if other is not None and other_lse is not None:
        logarithms = torch.cat([logarithms, other_lse.view(batch, kv_heads, 1, group)], dim=2)
        attended = torch.cat([attended, other.view(batch, kv_heads, 1, group, dim)], dim=2)
    total = logarithms.logsumexp(dim=2, keepdim=True)
    out.copy_((attended * (logarithms - total).exp()[..., None]).sum(dim=2).view(out.shape))
    lse.copy_(total.view(lse.shape))
