"""The attention that each key receives from the queries of a chunk, per query head, from the log-sum-exp."""

from __future__ import annotations

import torch

from hetero_kv.gpu_ops.kernel_choice import runs_triton

# Scores per tile: a tile of queries times a tile of keys, per head. On a CPU they fit into its caches. On a GPU, where
# a launch costs as much as many scores, the tile grows with the chunk, as the chunk's activations do.
_QUERIES = 128
_KEYS = 512
_QUERIES_ON_GPU = 1024
_KEYS_PER_QUERY_ON_GPU = 256
# Dtypes that Triton's kernel supports.
_TYPES = (torch.float32, torch.float16, torch.bfloat16)
_LARGEST_HEAD = 256


def column_sums(
    q: torch.Tensor,
    lse: torch.Tensor,
    keys: torch.Tensor,
    scale: float,
    softcap: float | None = None,
    weights: torch.Tensor | None = None,
    squared: bool = False,
    group_max: bool = False,
    past: int | None = None,
) -> torch.Tensor:
    """The column sums of a chunk's rows of the attention matrix, computed in tiles.

    On CUDA this is one launch of a Triton kernel, if Triton runs and the head dim is at most 256.

    A row's log-sum-exp is final once its query has seen all its keys. So sums over the chunks of a prompt add up to the
    exact sums over the whole matrix.

    Args:
        q: [batch, kv_heads * group, n, k_dim], queries at the last n positions of the keys; queries before the first
            key see none.
        lse: [batch, kv_heads * group, n] float32, of each query over all keys that it sees.
        keys: [batch, kv_heads, length, k_dim]; query i sees the first past + i + 1 of them.
        scale: factor of the scores.
        softcap: c > 0 turns a score s into c·tanh(s/c).
        weights: [n], a factor for each query's row; None for 1.
        squared: sum squared probabilities.
        group_max: sum, for each query, the maximum over the heads of a group.
        past: number of keys before the first query's position, negative if the first key follows it; None for
            length - n. With it the keys may be any part of those that `lse` covers.

    Returns [batch, kv_heads, group or 1 with group_max, length] float32.
    """
    past = keys.shape[2] - q.shape[2] if past is None else past
    if q.dtype in _TYPES and keys.dtype in _TYPES and q.shape[3] <= _LARGEST_HEAD and runs_triton(q):
        from hetero_kv.gpu_ops.triton_kernels import column_sums as kernel

        with torch.cuda.device(q.device):
            return kernel.column_sums(q, lse, keys, scale, softcap, weights, squared, group_max, past)
    return column_sums_in_torch(q, lse, keys, scale, softcap, weights, squared, group_max, past)


def column_sums_in_torch(
    q: torch.Tensor,
    lse: torch.Tensor,
    keys: torch.Tensor,
    scale: float,
    softcap: float | None,
    weights: torch.Tensor | None,
    squared: bool,
    group_max: bool,
    past: int,
) -> torch.Tensor:
    """The definition of `column_sums`, on any device."""
    batch, heads, n, k_dim = q.shape
    kv_heads, length = keys.shape[1], keys.shape[2]
    group = heads // kv_heads
    sums = torch.zeros(batch, kv_heads, 1 if group_max else group, length, dtype=torch.float32, device=q.device)
    height, width = _tile(n, q.device)
    for start in range(0, n, height):
        rows = slice(start, min(start + height, n))
        count = rows.stop - rows.start
        folded = q[:, :, rows].reshape(batch * kv_heads, group * count, k_dim).float() * scale
        normaliser = lse[:, :, rows].reshape(batch * kv_heads, group * count, 1).float()
        places = torch.arange(past + rows.start, past + rows.stop, device=q.device)[:, None]
        seen_keys = min(past + rows.stop, length)
        for first in range(0, seen_keys, width):
            columns = slice(first, min(first + width, seen_keys))
            scores = _scores(folded, keys[:, :, columns].flatten(0, 1).float(), normaliser, softcap)
            by_row = scores.view(batch, kv_heads, group, count, -1)
            if group_max:
                # Before the exponential, which is monotonic: only one per group is computed.
                by_row = by_row.amax(dim=2, keepdim=True)
            probabilities = by_row.exp_()
            if columns.stop > past + rows.start + 1:
                seen = torch.arange(columns.start, columns.stop, device=q.device)[None, :] <= places
                probabilities.masked_fill_(~seen, 0.0)
            if squared:
                probabilities.square_()
            summed = probabilities.sum(dim=3) if weights is None else weights[rows].float() @ probabilities
            sums[..., columns] += summed
    return sums


def working_bytes(n: int, length: int, batch: int, heads: int, kv_heads: int, k_dim: int) -> int:
    """Upper bound of the GPU memory that `column_sums` of `n` queries over `length` keys allocates, bytes."""
    height, width = _tile(n, torch.device("cuda"))
    width = min(width, length)
    # Scores, while those of the previous tile still exist, and the mask over them; keys and queries as float32; the
    # sums of all keys and of a tile.
    tiles = 1 if height >= n and width >= length else 2
    scores = height * width * (4 * heads * tiles + 2)
    vectors = 4 * k_dim * (kv_heads * width + 2 * heads * height)
    return batch * (scores + vectors + 4 * heads * (length + 2 * width))


def _tile(n: int, device: torch.device) -> tuple[int, int]:
    """Queries and keys of a tile, for `n` queries. Few queries have few scores: a decoded token's are one tile."""
    if device.type == "cpu":
        return _QUERIES, max(_KEYS, _QUERIES * _KEYS // n)
    height = min(n, _QUERIES_ON_GPU)
    return height, max(_QUERIES * _KEYS, _KEYS_PER_QUERY_ON_GPU * n) // height


def _scores(q: torch.Tensor, keys: torch.Tensor, lse: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """Scores minus `lse` [heads, n, 1], of scaled queries [heads, n, dim] and keys [heads, m, dim]."""
    if not softcap:
        return torch.baddbmm(lse, q, keys.transpose(1, 2), beta=-1)
    return (softcap * torch.tanh(torch.bmm(q, keys.transpose(1, 2)) / softcap)).sub_(lse)
