"""Attention to clusters by their means; `gpu_ops.cluster_attention` defines the result."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hetero_kv.gpu_ops.cluster_attention import CLUSTER_PARTS
from hetero_kv.gpu_ops.row_memory import Memory
from hetero_kv.gpu_ops.token_attention import Parts
from hetero_kv.gpu_ops.triton_kernels.products import precision_of_singles
from hetero_kv.gpu_ops.triton_kernels.row_memory import alignment, pointer, row_of

# Bytes of a tile of values.
_TILE_BYTES = 8 << 10


@triton.jit
def _attend_clusters(
    scores, sums, sizes, listed, counts, lse, out, rest, clusters, width, kv_heads,
    sums0, sums1, sums2, sizes0, sizes1, sizes2,
    GROUP: tl.constexpr, V_DIM: tl.constexpr, EACH: tl.constexpr, FIRST: tl.constexpr, SPLITS: tl.constexpr,
    PARTS: tl.constexpr, PRECISION: tl.constexpr, ALIGNMENT: tl.constexpr,
    BLOCK_GROUP: tl.constexpr, CLUSTERS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    split, each = tl.program_id(0), tl.program_id(1).to(tl.int64)
    v_at, member = tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_GROUP)
    is_v, is_member = v_at < V_DIM, member < GROUP
    row, head = each // kv_heads, each % kv_heads
    sums = row_of(sums, row, sums0, tl.float32, ALIGNMENT) + head * sums1
    sizes = row_of(sizes, row, sizes0, tl.float32, ALIGNMENT) + head * sizes1
    total = tl.load(counts + each)
    share = tl.cdiv(tl.cdiv(total, SPLITS), CLUSTERS) * CLUSTERS
    attended = tl.zeros([BLOCK_GROUP, BLOCK_V], tl.float32)
    largest = tl.full([BLOCK_GROUP], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_GROUP], tl.float32)
    stop = tl.minimum((split + 1) * share, total)
    for start in range(split * share, stop, CLUSTERS):
        place = start + tl.arange(0, CLUSTERS)
        is_listed = place < stop
        cluster = tl.load(listed + each * width + place, mask=is_listed, other=0)
        at = (each * GROUP + member)[:, None] * clusters + cluster[None, :]
        score = tl.load(scores + at, mask=is_member[:, None] & is_listed[None, :], other=float("-inf"))
        highest = tl.maximum(largest, tl.max(score, 1))
        # Of empty clusters alone this is exp(-inf - 0), not exp(nan).
        base = tl.where(highest == float("-inf"), 0.0, highest)
        shrunk, factors = tl.exp(largest - base), tl.exp(score - base[:, None])
        weight = weight * shrunk + tl.sum(factors, 1)
        block, within = (cluster // EACH).to(tl.int64), cluster % EACH
        size = tl.load(sizes + block * sizes2 + within, mask=is_listed, other=1.0)
        at = sums + (block * sums2 + within * V_DIM)[:, None] + v_at[None, :]
        tile = tl.load(at, mask=is_listed[:, None] & is_v[None, :], other=0.0) / tl.maximum(size, 1.0)[:, None]
        attended = tl.dot(factors, tile, attended * shrunk[:, None], input_precision=PRECISION)
        largest = highest
    is_some = weight > 0
    divisor = tl.where(is_some, weight, 1.0)
    logarithm = tl.where(is_some, largest + tl.log(divisor), float("-inf"))
    written = (each * PARTS + FIRST + split) * GROUP + member
    tl.store(lse + written, logarithm, mask=is_member)
    tl.store(rest + (each * SPLITS + split) * GROUP + member, logarithm, mask=is_member)
    tl.store(
        out + written[:, None] * V_DIM + v_at[None, :],
        attended / divisor[:, None],
        mask=is_member[:, None] & is_v[None, :],
    )


def attend_to_clusters(
    scores: torch.Tensor, sums: Memory, sizes: Memory, listed: torch.Tensor, counts: torch.Tensor, parts: Parts
) -> torch.Tensor:
    """As `gpu_ops.cluster_attention.attend_to_clusters_in_torch`."""
    (batch, kv_heads, whole, group, v_dim), each = parts.out.shape, sizes.shape[3]
    rest = torch.empty(batch, kv_heads, CLUSTER_PARTS, group, dtype=torch.float32, device=scores.device)
    block_v = max(16, triton.next_power_of_2(v_dim))
    _attend_clusters[(CLUSTER_PARTS, batch * kv_heads)](
        scores, pointer(sums), pointer(sizes), listed, counts, parts.lse, parts.out, rest, scores.shape[3],
        listed.shape[2], kv_heads, *sums.stride()[:3], *sizes.stride()[:3],
        GROUP=group, V_DIM=v_dim, EACH=each, FIRST=whole - CLUSTER_PARTS, SPLITS=CLUSTER_PARTS, PARTS=whole,
        PRECISION=precision_of_singles(scores), ALIGNMENT=alignment(sums, sizes),
        BLOCK_GROUP=max(16, triton.next_power_of_2(group)),
        CLUSTERS=max(16, min(64, _TILE_BYTES // (4 * block_v))), BLOCK_V=block_v, num_stages=2,
    )  # fmt: skip
    return rest
