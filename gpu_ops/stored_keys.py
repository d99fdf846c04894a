"""Scores on a GPU of packed keys as they are stored, of which there are no coarse copies because they take as few bits.

The numbers are those of `cpu_ops.block_rerank`; they take the place of those of `gpu_ops.estimated_masses.score_codes`.
"""

from __future__ import annotations

import torch

from hetero_kv.gpu_ops.estimated_masses import BlockMasses, capped, put_scores, scored_places
from hetero_kv.gpu_ops.row_memory import Memory
from hetero_kv.gpu_ops.slot_formats import unpacked


def score_stored_keys(
    q: torch.Tensor, keys: Memory, offsets: Memory | None, listed: torch.Tensor | None, number: torch.Tensor,
    known: BlockMasses, scale: float, softcap: float | None, token_scores: torch.Tensor | None,
) -> None:  # fmt: skip
    """As `score_stored_keys_in_torch`, which defines the result, by one Triton kernel."""
    from hetero_kv.gpu_ops.triton_kernels import stored_keys

    with torch.cuda.device(q.device):
        stored_keys.score_stored_keys(q, keys, offsets, listed, number, known, scale, softcap, token_scores)


def score_stored_keys_in_torch(
    q: torch.Tensor, keys: torch.Tensor, offsets: torch.Tensor | None, listed: torch.Tensor | None,
    number: torch.Tensor, known: BlockMasses, scale: float, softcap: float | None, token_scores: torch.Tensor | None,
) -> None:  # fmt: skip
    """Replace the masses of blocks in `known` by those of their keys.

    Args:
        q: [batch, kv_heads * group, 1, k_dim], contiguous in its last dimension.
        keys: [batch, kv_heads, capacity, block_size, bytes] uint8 of groups (`gpu_ops.slot_formats`); a block's bytes
            are contiguous.
        offsets: [batch, kv_heads, capacity, 1, k_dim] float16, added to the keys of each block; a vector is contiguous.
            None for whole keys.
        listed, number, scale, softcap, token_scores: as for `gpu_ops.estimated_masses.score_codes_in_torch`.
    """
    batch, kv_heads = keys.shape[:2]
    queries = q.float().reshape(batch, kv_heads, -1, q.shape[3])
    place, is_there = scored_places(listed, keys, number)
    at = place.clamp(min=0)[..., None, None]
    numbers = unpacked(keys.gather(2, at.expand(-1, -1, -1, *keys.shape[3:])), q.shape[3])
    scores = torch.einsum("bhgd,bhntd->bhgnt", queries, numbers)
    if offsets is not None:
        added = offsets.gather(2, at.expand(-1, -1, -1, *offsets.shape[3:])).squeeze(3).float()
        scores = scores + torch.einsum("bhgd,bhnd->bhgn", queries, added)[..., None]
    put_scores(capped(scores * scale, softcap), place, is_there, known.masses, token_scores)
