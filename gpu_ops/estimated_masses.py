"""Estimates on a GPU how much attention blocks receive, from their mean keys and from coarse copies of their keys.

The numbers are those of `cpu_ops.mean_scores`, `cpu_ops.int4_key_scores` and `cpu_ops.estimated_masses`. Masses and
scores are logarithms; blocks that do not exist, and padding, have -inf.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from hetero_kv.gpu_ops.row_memory import Memory, by_row
from hetero_kv.gpu_ops.slot_formats import unpacked

#: As in `cpu_ops.key_codes`: tokens of a tile, channels of each token in a vector of codes, and the code of 0.
TOKENS, CHANNELS, ZERO = 16, 8, 8
#: The most tokens of a block, all of which one program scores.
LARGEST_BLOCK = 256


class BlockMasses(NamedTuple):
    """What is known of blocks; [batch, kv_heads, group, capacity] float32 each.

    Attributes:
        plain: scaled products of the query and the mean key, before soft-capping.
        weights: the log-sum-exp of a block's scores if all were equal to the mean's.
        likely: scores one standard deviation above the mean's.
        masses: the estimated log-sum-exp of a block's scores.
    """

    plain: torch.Tensor
    weights: torch.Tensor
    likely: torch.Tensor
    masses: torch.Tensor


def score_means(
    q: torch.Tensor, vectors: Memory, number: torch.Tensor, block_size: int, scale: float, softcap: float | None
) -> BlockMasses:
    """As `score_means_in_torch`, which defines the result, by one Triton kernel."""
    from hetero_kv.gpu_ops.triton_kernels import estimated_masses

    with torch.cuda.device(q.device):
        return estimated_masses.score_means(q, vectors, number, block_size, scale, softcap)


def score_means_in_torch(
    q: torch.Tensor, vectors: torch.Tensor, number: torch.Tensor, block_size: int, scale: float, softcap: float | None
) -> BlockMasses:
    """Score blocks by the mean of their keys and, optionally, the standard deviation of each channel.

    Args:
        q: [batch, kv_heads * group, 1, k_dim], contiguous in its last dimension.
        vectors: [batch, kv_heads, capacity, 1 or 2, k_dim], or [..., bytes] uint8 of groups (`gpu_ops.slot_formats`);
            a block's vectors are contiguous.
        number: [1] or [batch] int64, the blocks that there are.
        block_size: tokens of a block.
        scale, softcap: as in `gpu_ops.tiled_attention`.
    """
    batch, kv_heads, capacity, count, _ = vectors.shape
    queries = q.float().reshape(batch, kv_heads, -1, q.shape[3])
    numbers, log_n = unpacked(vectors, q.shape[3]), math.log(block_size)
    plain = queries @ numbers[:, :, :, 0].mT * scale
    deviations = torch.zeros_like(plain)
    if count == 2:
        deviations = (queries.square() @ numbers[:, :, :, 1].square().mT).sqrt() * scale
    means = capped(plain, softcap)
    deviations = capped(plain + deviations, softcap) - means
    most = math.sqrt(2 * log_n)
    spread = torch.where(deviations < most, log_n + 0.5 * deviations.square(), deviations * most)
    behind = torch.arange(capacity, device=q.device) >= by_row(number, 4)
    found = plain, means + log_n, means + deviations, means + spread
    return BlockMasses(*(each.masked_fill(behind, float("-inf")) for each in found))


def score_codes(
    q: torch.Tensor, codes: Memory, listed: torch.Tensor | None, number: torch.Tensor, block_size: int,
    known: BlockMasses, scale: float, softcap: float | None, token_scores: torch.Tensor | None,
) -> None:  # fmt: skip
    """As `score_codes_in_torch`, which defines the result, by one Triton kernel."""
    from hetero_kv.gpu_ops.triton_kernels import estimated_masses

    with torch.cuda.device(q.device):
        estimated_masses.score_codes(q, codes, listed, number, block_size, known, scale, softcap, token_scores)


def score_codes_in_torch(
    q: torch.Tensor, codes: torch.Tensor, listed: torch.Tensor | None, number: torch.Tensor, block_size: int,
    known: BlockMasses, scale: float, softcap: float | None, token_scores: torch.Tensor | None,
) -> None:  # fmt: skip
    """Replace the masses of blocks in `known` by those of their keys, of which there are coarse copies.

    Queries are quantized to int8, as on the CPU, so that both choose alike.

    Args:
        q, number, block_size, scale, softcap: as for `score_means_in_torch`.
        codes: [batch, kv_heads, capacity, bytes] uint8, in the format of `cpu_ops.key_codes`; a block's bytes are
            contiguous.
        listed: [batch, kv_heads, n] int32, the blocks that are scored; negative for padding. None for all.
        token_scores: [batch, kv_heads, group, n * block_size] float32, receives the scores of the listed blocks' keys;
            None without a list.
    """
    batch, kv_heads = codes.shape[:2]
    queries = q.float().reshape(batch, kv_heads, -1, q.shape[3])
    largest = queries.abs().amax(dim=3, keepdim=True)
    # A number divided by a tensor would be multiplied with rounded reciprocals.
    inverse = torch.full_like(largest, 127.0) / largest
    whole = (queries * torch.where(largest > 0, inverse, 0.0)).round()
    place, is_there = scored_places(listed, codes, number)
    at = place.clamp(min=0)
    numbers, scales = _decoded(
        codes.gather(2, at[..., None].expand(-1, -1, -1, codes.shape[3])), block_size, q.shape[3]
    )
    products = torch.einsum("bhgd,bhntd->bhgnt", whole, numbers) * scales[:, :, None]
    in_groups = at[:, :, None].expand(-1, -1, queries.shape[2], -1)
    plain = known.plain.gather(3, in_groups)[..., None]
    scores = capped(plain + products * (largest * (scale / 127.0))[..., None], softcap)
    put_scores(scores, place, is_there, known.masses, token_scores)


def scored_places(
    listed: torch.Tensor | None, array: torch.Tensor, number: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The blocks of an array [batch, kv_heads, capacity, ...] that are scored, [batch, kv_heads, n], and which exist.

    listed, number: as for `score_codes_in_torch`.
    """
    every = torch.arange(array.shape[2], device=array.device).expand(*array.shape[:2], -1)
    place = every if listed is None else listed.long()
    return place, (place < by_row(number, 3)) & (place >= 0)


def put_scores(
    scores: torch.Tensor, place: torch.Tensor, is_there: torch.Tensor, masses: torch.Tensor,
    token_scores: torch.Tensor | None,
) -> None:  # fmt: skip
    """Write scores of keys [batch, kv_heads, group, n, block_size] to `token_scores`, and their masses to `masses`.

    place, is_there: from `scored_places`. token_scores: as for `score_codes_in_torch`.
    """
    scores = scores.masked_fill(~is_there[:, :, None, :, None], float("-inf"))
    if token_scores is None:
        masses.copy_(scores.logsumexp(dim=4))
        return
    token_scores.copy_(scores.flatten(3))
    # Padding is behind all blocks, so that it replaces none.
    behind = torch.where(is_there, place, masses.shape[3])[:, :, None].expand(-1, -1, scores.shape[2], -1)
    padded = torch.nn.functional.pad(masses, (0, 1))
    masses.copy_(padded.scatter(3, behind, scores.logsumexp(dim=4))[..., :-1])


def log_totals(likely: torch.Tensor, masses: torch.Tensor, outside: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """As `log_totals_in_torch`, which defines the result, by one Triton kernel."""
    from hetero_kv.gpu_ops.triton_kernels import estimated_masses

    with torch.cuda.device(masses.device):
        return estimated_masses.log_totals(likely, masses, outside, number)


def log_totals_in_torch(
    likely: torch.Tensor, masses: torch.Tensor, outside: torch.Tensor, number: torch.Tensor
) -> torch.Tensor:
    """Log-sum-exps over all blocks.

    Args:
        likely, masses: [batch, kv_heads, group, capacity] float32.
        outside: [batch, kv_heads, parts, group] float32, the log-sum-exp of parts that are always attended to.
        number: [1] or [batch] int64, the blocks that there are.

    Returns [3, batch, kv_heads, group] float32: that of `likely`, of the masses and `outside`, and of `outside`.
    """
    around = outside.logsumexp(dim=2)
    behind = torch.arange(masses.shape[3], device=masses.device) >= by_row(number, 4)
    best, every = (each.masked_fill(behind, float("-inf")).logsumexp(dim=3) for each in (likely, masses))
    return torch.stack([best, torch.logaddexp(every, around), around])


def mean_shares(scores: torch.Tensor, masses: torch.Tensor, totals: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `mean_shares_in_torch`, which defines the result, by one Triton kernel."""
    from hetero_kv.gpu_ops.triton_kernels import estimated_masses

    with torch.cuda.device(masses.device):
        return estimated_masses.mean_shares(scores, masses, totals)


def mean_shares_in_torch(
    scores: torch.Tensor, masses: torch.Tensor, totals: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A kv head's shares, the means over its group: of scores among the blocks, and of masses in all of the attention.

    Args:
        scores, masses: [batch, kv_heads, group, n] float32.
        totals: from `log_totals`.

    Returns both as [batch, kv_heads, n] float32.
    """
    best, every = totals[0][..., None], totals[1][..., None]
    return (scores - best).exp().mean(dim=2), (masses - every).exp().mean(dim=2)


def capped(scores: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """Soft-capped scores; None for scores as they are."""
    return softcap * torch.tanh(scores / softcap) if softcap else scores


def _decoded(codes: torch.Tensor, block_size: int, k_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers [..., block_size, k_dim] and scales [..., block_size] of coarse copies [..., bytes], as float32."""
    steps = -(-k_dim // CHANNELS)
    size = block_size * steps * (CHANNELS // 2)
    packed = codes[..., :size].unflatten(-1, (block_size // TOKENS, steps, TOKENS, CHANNELS // 2))
    both = torch.stack([packed & 15, packed >> 4], dim=-2).float() - ZERO
    numbers = both.flatten(-2).transpose(-3, -2).flatten(-2).flatten(-3, -2)
    scales = codes[..., size:].contiguous().view(torch.float16).float()
    return numbers[..., :k_dim], scales
