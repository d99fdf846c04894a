"""Attention of a prompt chunk to chosen keys, and the scores that keys are chosen by, for torch tensors."""

from __future__ import annotations

import numpy as np
import torch

from hetero_kv.cpu_ops import block_means as block_means_of
from hetero_kv.cpu_ops import key_runs, matched_blocks, run_attention, vertical_slash_scores
from hetero_kv.cpu_ops.run_attention import attend_runs, runs_in_bfloat16
from hetero_kv.cpu_ops.threads import at_most
from hetero_kv.gpu_ops.merge import apply_sink


def chosen_attention(
    q: torch.Tensor, past_k: torch.Tensor, past_v: torch.Tensor, k: torch.Tensor, v: torch.Tensor, runs: np.ndarray,
    starts: np.ndarray, scale: float, softcap: float | None = None, sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Causal attention of a chunk to the tokens in `runs`, on the CPU; in bfloat16 if the CPU multiplies it.

    Args:
        q: [batch, heads, n, k_dim].
        past_k, past_v, k, v: as for `attention.chunk_attention`.
        runs, starts: as for `cpu_ops.run_attention.attend_runs`.
        scale, softcap, sink: as for `attention.chunk_attention`.

    Returns (out [batch, heads, n, v_dim] in q's dtype, lse [batch, heads, n] float32).
    """
    in_bits = q.dtype is torch.bfloat16 and runs_in_bfloat16(q.shape[3], v.shape[3])
    queries, past_keys, past_values, keys, values = _numbers(in_bits, q, past_k, past_v, k, v)
    threads = at_most(torch.get_num_threads())
    out, lse = attend_runs(queries, past_keys, past_values, keys, values, runs, starts, scale, softcap or 0.0, threads)
    result = torch.from_numpy(out)
    result = result.view(torch.bfloat16) if in_bits else result.to(q.dtype)
    attended = result.transpose(1, 2), torch.from_numpy(lse)
    return attended if sink is None else apply_sink(*attended, sink)


def compile_for_chosen(dtype: torch.dtype, k_dim: int, v_dim: int, softcapped: bool) -> None:
    """Compile the kernels that `chosen_attention` needs for a model, before the first prompt needs them."""
    in_bits = dtype is torch.bfloat16 and runs_in_bfloat16(k_dim, v_dim)
    run_attention.compile_for(in_bits, k_dim, v_dim, softcapped)
    in_bits = dtype is torch.bfloat16 and runs_in_bfloat16(k_dim, k_dim)
    vertical_slash_scores.compile_for(in_bits, k_dim, softcapped)
    matched_blocks.compile_for(in_bits, k_dim, softcapped)
    block_means_of.compile_for(dtype is torch.bfloat16, k_dim)
    key_runs.compile_kernels()


def attention_by_line(
    q: torch.Tensor, past_k: torch.Tensor, k: torch.Tensor, scale: float, softcap: float | None
) -> tuple[np.ndarray, np.ndarray]:
    """The attention that tokens, and distances, receive from the last queries of heads, summed over these queries.

    Args:
        q: [heads, queries, k_dim], the last queries of the chunk, of heads that share keys.
        past_k, k: [past, k_dim] and [n, k_dim].

    Returns two [heads, past + n] float32: by token, and by the distance of the key from the query.
    """
    in_bits = q.dtype is torch.bfloat16 and runs_in_bfloat16(q.shape[2], q.shape[2])
    queries, past_keys, keys = _numbers(in_bits, q, past_k, k)
    return vertical_slash_scores.vertical_slash_scores(
        queries, past_keys, keys, scale, softcap or 0.0, at_most(torch.get_num_threads())
    )


def best_matched_blocks(
    q: torch.Tensor, past_k: torch.Tensor, k: torch.Tensor, runs: np.ndarray, starts: np.ndarray, count: int,
    scale: float, softcap: float | None,
) -> np.ndarray:  # fmt: skip
    """The blocks of keys that each block of queries matches best, apart from what `runs` already contain.

    Every sixteenth query is scored. A block's match is its largest share of the attention of any of these queries.

    Args:
        q: [heads, n, k_dim], all queries of the chunk, of heads that share keys.
        past_k, k: [past, k_dim] and [n, k_dim].
        runs, starts: what the heads' blocks of queries attend to already, as for `cpu_ops.run_attention.attend_runs`.
        count: largest number of blocks.
        scale, softcap: as for `attention.chunk_attention`.

    Returns [heads, query blocks, count] int32, ascending, with -1 in front if there are fewer.
    """
    in_bits = q.dtype is torch.bfloat16 and runs_in_bfloat16(q.shape[2], q.shape[2])
    queries, past_keys, keys = _numbers(in_bits, q, past_k, k)
    threads = at_most(torch.get_num_threads())
    matched = matched_blocks.matched_blocks(queries, past_keys, keys, runs, starts, scale, softcap or 0.0, threads)
    return matched_blocks.best_blocks(matched, count, threads)


def _numbers(in_bits: bool, *tensors: torch.Tensor) -> list[np.ndarray]:
    """Tensors as kernel arrays: bits of bfloat16, or float32."""
    return [(each.detach().view(torch.uint16) if in_bits else each.detach().float()).numpy() for each in tensors]


def block_means(past: torch.Tensor, new: torch.Tensor, block: int) -> torch.Tensor:
    """Means of blocks of tokens of [..., past, dim] and [..., n, dim] concatenated: [..., blocks, dim] float32.

    The last block may be shorter. On the CPU, for up to two leading dimensions; from bfloat16 or else float32 numbers.
    """
    in_bits = new.dtype is torch.bfloat16
    leading = (None,) * (4 - new.dim())
    before, own = _numbers(in_bits, past[leading], new[leading])
    means = block_means_of.block_means(before, own, block, at_most(torch.get_num_threads()))
    return torch.from_numpy(means).view(*new.shape[:-2], *means.shape[2:])
