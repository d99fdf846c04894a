"""Dense attention with its log-sum-exp, on any device, from the best kernel available.

`tiled_attention` is plain torch and defines the result. A CPU uses torch's flash kernel, or
`cpu_ops.prompt_attention` for prompts where that is faster. A GPU uses the kernel that
`gpu_ops.attention_backend` chooses.
"""

from __future__ import annotations

import torch

from hetero_kv.cpu_ops import prompt_attention
from hetero_kv.cpu_ops.prompt_attention import attend_prompt, attends_in_bfloat16, attends_in_float32
from hetero_kv.cpu_ops.threads import at_most
from hetero_kv.gpu_ops import flash_attn_package
from hetero_kv.gpu_ops.attention_backend import AttentionKernel, kernel_for
from hetero_kv.gpu_ops.flash import flash_attention
from hetero_kv.gpu_ops.merge import apply_sink, merge_attention
from hetero_kv.gpu_ops.tiled_attention import QUERY_TILE, tiled_attention

# Least number of queries for the CPU's prompt kernel, which copies all keys to a new layout.
_LEAST_QUERIES = {torch.bfloat16: 32, torch.float32: 128}
# As what that kernel's arrays are viewed, by the model's dtype.
_VIEWS = {torch.bfloat16: torch.uint16, torch.float32: torch.float32}
# Looked up once, because every decoded token calls it in every layer.
_CPU_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def attention_with_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    softcap: float | None = None,
    mask: torch.Tensor | None = None,
    causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `tiled_attention`, by a flash kernel where one applies."""
    if q.is_cuda:
        return _on_gpu(q, k, v, scale, softcap, mask, causal)
    if softcap or q.device.type != "cpu":
        return tiled_attention(q, k, v, scale, softcap, mask, causal)
    v_dim = v.shape[-1]
    q, k, v = _of_one_dim(q, k, v)
    bias = None
    if mask is not None:
        bias = torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, float("-inf"))
    out, lse = _CPU_FLASH(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    return out if v_dim == v.shape[-1] else out[..., :v_dim], lse


def folded_heads(q: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Queries [batch, kv_heads * group, n, dim] as [batch, kv_heads, group * n, dim].

    Without a mask the query heads of a group are more queries of their kv head, and keys need not be repeated.
    """
    batch, heads, n, dim = q.shape
    return q.reshape(batch, kv_heads, heads // kv_heads * n, dim)


def unfolded_heads(q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The results of attention by `folded_heads` of q as out [batch, kv_heads * group, n, v_dim] and lse."""
    return out.reshape(*q.shape[:3], out.shape[-1]), lse.reshape(q.shape[:3])


def _on_gpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, softcap: float | None, mask: torch.Tensor | None,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """`attention_with_lse` on CUDA."""
    kernel = kernel_for(q, k, v, is_plain=not softcap) if mask is None else AttentionKernel.TILES
    if kernel is AttentionKernel.TILES:
        return tiled_attention(q, k, v, scale, softcap, mask, causal)
    if kernel is AttentionKernel.TRITON:
        all_of_them, none = (k, v), (k[:, :, :0], v[:, :, :0])
        past, own = (none, all_of_them) if causal else (all_of_them, none)
        return flash_attention(q, *past, *own, scale, softcap)
    v_dim = v.shape[-1]
    q, k, v = _of_one_dim(q, k, v)
    if kernel is AttentionKernel.FLASH_ATTN:
        out, lse = flash_attn_package.attention(q, k, v, scale, softcap, causal=causal)
    else:
        aten = torch.ops.aten
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    return out if v_dim == v.shape[-1] else out[..., :v_dim], lse[..., : q.shape[2]]


def chunk_attention(
    q: torch.Tensor,
    past_k: torch.Tensor,
    past_v: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    softcap: float | None = None,
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact causal attention of a chunk: to its past without a mask, to itself with one, merged by log-sum-exp.

    Triton's kernel computes both in one pass, including the sink.

    Args:
        q: [batch, kv_heads * group, n, k_dim].
        past_k, past_v: [batch, kv_heads, past, dim], keys and values before the chunk; past may be 0.
        k, v: [batch, kv_heads, n, dim], the chunk's own.
        scale, softcap: as in `tiled_attention`.
        sink: [kv_heads * group], scores of learned sinks (`gpu_ops.merge.apply_sink`).

    Returns (out [batch, kv_heads * group, n, v_dim], lse [batch, kv_heads * group, n] float32).
    """
    kv_heads, past = past_k.shape[1], past_k.shape[2]
    group = q.shape[1] // kv_heads
    if _takes_prompt_kernel(q, v):
        return _with_sink(*_by_prompt_kernel(q, past_k, past_v, k, v, scale, softcap), sink)
    if q.is_cuda and kernel_for(q, k, v, is_plain=not softcap) is AttentionKernel.TRITON:
        return flash_attention(q, past_k, past_v, k, v, scale, softcap, sink=sink)
    out, lse = attention_with_lse(q, _repeated(k, group), _repeated(v, group), scale, softcap, causal=True)
    if past == 0:
        return _with_sink(out, lse, sink)
    to_past = attention_with_lse(folded_heads(q, kv_heads), past_k, past_v, scale, softcap)
    return _with_sink(*merge_attention(out, lse, *unfolded_heads(q, *to_past)), sink)


def sliding_window_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window: int,
    scale: float,
    softcap: float | None = None,
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention in which a query sees the last `window` keys, itself included.

    Args:
        q: [batch, kv_heads * group, n, k_dim], the last n of the m positions.
        k, v: [batch, kv_heads, m, dim].
        sink: as in `chunk_attention`.

    Returns (out [batch, kv_heads * group, n, v_dim], lse [batch, kv_heads * group, n] float32).
    """
    batch, heads, n, k_dim = q.shape
    kv_heads, m = k.shape[1], k.shape[2]
    group = heads // kv_heads
    if n == 1:
        seen = slice(max(0, m - window), m)
        folded = q.reshape(batch, kv_heads, group, k_dim)
        out, lse = attention_with_lse(folded, k[:, :, seen], v[:, :, seen], scale, softcap)
        return _with_sink(out.reshape(batch, heads, 1, -1), lse.reshape(batch, heads, 1), sink)
    past = slice(max(0, m - n - window + 1), m - n)
    parts = k[:, :, past], v[:, :, past], k[:, :, m - n :], v[:, :, m - n :]
    if _takes_prompt_kernel(q, v):
        return _with_sink(*_by_prompt_kernel(q, *parts, scale, softcap, window), sink)
    if q.is_cuda:
        hides = m > window
        kernel = kernel_for(q, k, v, is_plain=not (softcap or hides))
        if kernel is AttentionKernel.TRITON:
            return flash_attention(q, *parts, scale, softcap, window if hides else None, sink)
        if not hides:
            return chunk_attention(q, *parts, scale, softcap, sink)
        if kernel is AttentionKernel.FLASH_ATTN:
            padded = _of_one_dim(q, k[:, :, past.start :], v[:, :, past.start :])
            out, lse = flash_attn_package.attention(*padded, scale, softcap, window)
            return _with_sink(out[..., : v.shape[-1]], lse, sink)
    return _with_sink(*_masked_by_tiles(q, k, v, window, scale, softcap), sink)


def _masked_by_tiles(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int, scale: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`sliding_window_attention` without sinks, in tiles of queries, each with a mask."""
    n, m, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    tile = max(QUERY_TILE, min(window, 1024))
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
    """Compile the CPU kernels that `chunk_attention` needs for a model, before the first prompt needs them."""
    if device.type == "cpu" and _is_fast(dtype, k_dim, v_dim):
        prompt_attention.compile_for("float32" if dtype is torch.float32 else "uint16", k_dim, v_dim, softcapped)


def _is_fast(dtype: torch.dtype, k_dim: int, v_dim: int) -> bool:
    """Whether the CPU's prompt kernel is the fastest choice for numbers of this dtype."""
    if dtype is torch.float32:
        return attends_in_float32()
    return dtype is torch.bfloat16 and attends_in_bfloat16(k_dim, v_dim)


def _takes_prompt_kernel(q: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether the CPU's prompt kernel is the fastest choice for these queries and values."""
    on_cpu = q.device.type == "cpu" and _is_fast(q.dtype, q.shape[3], v.shape[3])
    return on_cpu and q.shape[2] >= _LEAST_QUERIES[q.dtype]


def _by_prompt_kernel(
    q: torch.Tensor, past_k: torch.Tensor, past_v: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float,
    softcap: float | None, window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """`chunk_attention` by the CPU's kernel, limited to the last `window` keys if that is set."""
    threads = at_most(torch.get_num_threads())
    queries, past_keys, past_values, keys, values = (
        each.detach().view(_VIEWS[q.dtype]).numpy() for each in (q, past_k, past_v, k, v)
    )
    out, lse = attend_prompt(queries, past_keys, past_values, keys, values, scale, softcap or 0.0, window, threads)
    return torch.from_numpy(out).view(q.dtype).transpose(1, 2), torch.from_numpy(lse)


def _repeated(t: torch.Tensor, group: int) -> torch.Tensor:
    """[batch, kv_heads, n, dim] -> [batch, kv_heads * group, n, dim], each kv head `group` times."""
    return t if group == 1 else t.repeat_interleave(group, dim=1)


def _with_sink(out: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    return (out, lse) if sink is None else apply_sink(out, lse, sink)


def _of_one_dim(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pad queries, keys and values with zero channels to one head dim; scores and outputs do not change.

    Flash kernels require equal dims, on CUDA multiples of 8.
    """
    dim = -(-max(q.shape[-1], v.shape[-1]) // 8) * 8
    if q.shape[-1] == v.shape[-1] == dim:
        return q, k, v
    q, k, v = (torch.nn.functional.pad(t, (0, dim - t.shape[-1])) for t in (q, k, v))
    return q, k, v
