"""Dense attention that also returns the log-sum-exp, on any device, from the best kernel that can.

Torch's flash kernels are used where they apply; score soft-capping, which none of them knows, goes through
`tiled_attention`, which is plain torch and defines the result. Prompts in bfloat16 on a CPU that multiplies it go
through `cpu_ops.prompt_attention`.
"""

from __future__ import annotations

import torch

from cpu_ops import prompt_attention
from cpu_ops.prompt_attention import attend_prompt, attends_in_bfloat16
from cpu_ops.threads import at_most
from gpu_ops.merge import merge_attention

_TILE = 256
_KEY_TILE = 4096
# Queries from which on a kernel that lays out all keys anew is worth it.
_LEAST_QUERIES = 32
# Looked up once: a decoded token calls it in every layer.
_CPU_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def tiled_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    softcap: float | None = None,
    mask: torch.Tensor | None = None,
    causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in float32, a tile of queries and a tile of keys at a time.

    Args:
        q: [batch, heads, n, k_dim].
        k: [batch, heads, m, k_dim].
        v: [batch, heads, m, v_dim].
        scale: factor of the scores before softcap and softmax.
        softcap: c > 0 turns a score s into c·tanh(s/c) (Gemma 2).
        mask: [n, m] bool, True where a query sees a key; every query sees at least one.
        causal: query i sees keys 0..i (n equals m).

    Returns (out [batch, heads, n, v_dim] in q's dtype, lse [batch, heads, n] float32).
    """
    out = q.new_empty(*q.shape[:3], v.shape[-1])
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    for start in range(0, q.shape[2], _TILE):
        rows = slice(start, min(start + _TILE, q.shape[2]))
        out[:, :, rows], lse[:, :, rows] = _tile_of_queries(q[:, :, rows], k, v, rows, scale, softcap, mask, causal)
    return out, lse


def _tile_of_queries(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: slice,
    scale: float,
    softcap: float | None,
    mask: torch.Tensor | None,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`tiled_attention` for the queries at `rows`, over a tile of keys at a time."""
    scaled = q.float() * scale
    out = torch.zeros(*q.shape[:3], v.shape[-1], device=q.device)
    lse = torch.full(q.shape[:3], float("-inf"), device=q.device)
    length = rows.stop if causal else k.shape[2]
    for start in range(0, length, _KEY_TILE):
        columns = slice(start, min(start + _KEY_TILE, length))
        scores = scaled @ k[:, :, columns].float().transpose(-1, -2)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if causal:
            positions = torch.arange(columns.start, columns.stop, device=q.device)
            queries = torch.arange(rows.start, rows.stop, device=q.device)
            scores.masked_fill_(positions[None, :] > queries[:, None], float("-inf"))
        if mask is not None:
            scores.masked_fill_(~mask[rows, columns], float("-inf"))
        part_lse = torch.logsumexp(scores, dim=-1)
        base = part_lse.masked_fill(torch.isneginf(part_lse), 0.0)
        part = torch.exp(scores - base[..., None]) @ v[:, :, columns].float()
        out, lse = merge_attention(out, lse, part, part_lse)
    return out.to(q.dtype), lse


def attention_with_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    softcap: float | None = None,
    mask: torch.Tensor | None = None,
    causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `tiled_attention`, from torch's flash kernel where it applies."""
    if softcap:
        return tiled_attention(q, k, v, scale, softcap, mask, causal)
    # Flash kernels want equal head dims, on CUDA multiples of 8.
    v_dim, dim = v.shape[-1], -(-max(q.shape[-1], v.shape[-1]) // 8) * 8
    if not q.shape[-1] == v_dim == dim:
        q, k, v = (_padded(t, dim) for t in (q, k, v))
    aten = torch.ops.aten
    if q.device.type == "cpu":
        bias = None
        if mask is not None:
            bias = torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, float("-inf"))
        out, lse = _CPU_FLASH(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    elif mask is None and dim <= 256 and _has_cuda_flash(q):
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    else:
        out, lse = tiled_attention(q, k, v, scale, None, mask, causal)
    return out if v_dim == dim else out[..., :v_dim], lse[..., : q.shape[2]]


def _has_cuda_flash(q: torch.Tensor) -> bool:
    """Whether torch's CUDA flash kernel takes this tensor: half precision, on Ampere or later."""
    is_half = q.dtype in (torch.float16, torch.bfloat16)
    return q.device.type == "cuda" and is_half and torch.cuda.get_device_capability(q.device) >= (8, 0)


def chunk_attention(
    q: torch.Tensor,
    past_k: torch.Tensor,
    past_v: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact causal attention of a chunk: to its past without a mask, to itself with one, merged by log-sum-exp.

    Args:
        q: [batch, kv_heads * group, n, k_dim].
        past_k, past_v: [batch, kv_heads, past, dim], the keys and values before the chunk; past may be 0.
        k, v: [batch, kv_heads, n, dim], the chunk's own.
        scale, softcap: as in `tiled_attention`.

    Returns (out [batch, kv_heads * group, n, v_dim], lse [batch, kv_heads * group, n] float32).
    """
    batch, heads, n, _ = q.shape
    kv_heads, past = past_k.shape[1], past_k.shape[2]
    group = heads // kv_heads
    if _is_natively_bfloat16(q, v):
        return _natively(q, past_k, past_v, k, v, scale, softcap)
    out, lse = attention_with_lse(q, _repeated(k, group), _repeated(v, group), scale, softcap, causal=True)
    if past == 0:
        return out, lse
    # Without a mask the group's queries are just more queries of the kv head: the past is not repeated.
    folded = q.reshape(batch, kv_heads, group * n, q.shape[-1])
    past_out, past_lse = attention_with_lse(folded, past_k, past_v, scale, softcap)
    return merge_attention(out, lse, past_out.reshape(batch, heads, n, -1), past_lse.reshape(batch, heads, n))


def sliding_window_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int, scale: float, softcap: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention in which a query sees the last `window` keys, itself included.

    Args:
        q: [batch, kv_heads * group, n, k_dim], the last n of the m positions.
        k, v: [batch, kv_heads, m, dim].

    Returns (out [batch, kv_heads * group, n, v_dim], lse [batch, kv_heads * group, n] float32).
    """
    batch, heads, n, k_dim = q.shape
    kv_heads, m = k.shape[1], k.shape[2]
    group = heads // kv_heads
    if n == 1:
        seen = slice(max(0, m - window), m)
        folded = q.reshape(batch, kv_heads, group, k_dim)
        out, lse = attention_with_lse(folded, k[:, :, seen], v[:, :, seen], scale, softcap)
        return out.reshape(batch, heads, 1, -1), lse.reshape(batch, heads, 1)
    if _is_natively_bfloat16(q, v):
        past = slice(max(0, m - n - window + 1), m - n)
        return _natively(q, k[:, :, past], v[:, :, past], k[:, :, m - n :], v[:, :, m - n :], scale, softcap, window)
    tile = max(_TILE, min(window, 1024))
    outs, lses = [], []
    for start in range(0, n, tile):
        end = min(start + tile, n)
        first = max(0, m - n + start - window + 1)
        rows = torch.arange(m - n + start, m - n + end, device=q.device)[:, None]
        columns = torch.arange(first, m - n + end, device=q.device)[None, :]
        mask = (columns <= rows) & (columns > rows - window)
        keys, values = (_repeated(t[:, :, first : m - n + end], group) for t in (k, v))
        out, lse = attention_with_lse(q[:, :, start:end], keys, values, scale, softcap, mask)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def compile_for_prompts(dtype: torch.dtype, device: torch.device, k_dim: int, v_dim: int, softcapped: bool) -> None:
    """Compile what `chunk_attention` needs of a model on a CPU, before the first prompt waits for it."""
    if dtype is torch.bfloat16 and device.type == "cpu" and attends_in_bfloat16(k_dim, v_dim):
        prompt_attention.compile_for(k_dim, v_dim, softcapped)


def _is_natively_bfloat16(q: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether the CPU's kernel for prompts takes these queries and values."""
    return (
        q.dtype is torch.bfloat16
        and q.device.type == "cpu"
        and q.shape[2] >= _LEAST_QUERIES
        and attends_in_bfloat16(q.shape[3], v.shape[3])
    )


def _natively(
    q: torch.Tensor, past_k: torch.Tensor, past_v: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float,
    softcap: float | None, window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """`chunk_attention` by the CPU's kernel, of the last `window` keys where that is given."""
    threads = at_most(torch.get_num_threads())
    queries, past_keys, past_values, keys, values = (
        each.detach().view(torch.uint16).numpy() for each in (q, past_k, past_v, k, v)
    )
    out, lse = attend_prompt(queries, past_keys, past_values, keys, values, scale, softcap or 0.0, window, threads)
    return torch.from_numpy(out).view(torch.bfloat16).transpose(1, 2), torch.from_numpy(lse)


def _repeated(t: torch.Tensor, group: int) -> torch.Tensor:
    """[batch, kv_heads, n, dim] -> [batch, kv_heads * group, n, dim], every kv head `group` times."""
    return t if group == 1 else t.repeat_interleave(group, dim=1)


def _padded(t: torch.Tensor, dim: int) -> torch.Tensor:
    """`t` with zero channels up to `dim`: scores and outputs stay the same, and flash kernels want equal dims."""
    return t if t.shape[-1] == dim else torch.nn.functional.pad(t, (0, dim - t.shape[-1]))
