"""Attention on a GPU to chosen tokens in slots, and to the mean values that stand for all others.

The results are parts of a decoded token's attention, like those of `gpu_ops.resident_attention`, with which
`window_step.join_parts` merges them.
"""

from __future__ import annotations

from typing import Any, Generic, NamedTuple

import torch

from hetero_kv.gpu_ops.resident_attention import SPLITS
from hetero_kv.gpu_ops.row_memory import AnyMemory, Memory, by_row
from hetero_kv.gpu_ops.slot_formats import unpacked
from hetero_kv.gpu_ops.tiled_attention import tiled_attention

#: Parts that the chosen tokens and the mean values are divided into; with those of the window a power of two.
TOKEN_PARTS, REST_PARTS = SPLITS, 2 * SPLITS
PARTS = SPLITS + TOKEN_PARTS + REST_PARTS
#: Parts that tokens in DRAM are divided into, behind those in slots.
STORED_PARTS = SPLITS


class Parts(NamedTuple):
    """A token's attention in parts: window, chosen tokens in slots, then others.

    Attributes:
        out: [batch, kv_heads, parts, group, v_dim] float32.
        lse: [batch, kv_heads, parts, group] float32, the log-sum-exp of each part; -inf for a part without keys.
    """

    out: torch.Tensor
    lse: torch.Tensor


class KeyOffsets(NamedTuple, Generic[AnyMemory]):
    """What is added to keys that are stored as differences.

    Attributes:
        vectors: [batch, kv_heads, capacity, 1, k_dim] float16, which lie block by block, heads side by side.
        tokens: [batch, kv_heads, n] int32, the token in each listed slot; contiguous.
        block_size: tokens of a block.
    """

    vectors: AnyMemory
    tokens: torch.Tensor
    block_size: int


def attend_to_tokens(
    q: torch.Tensor, keys: Memory, values: Memory, slots: torch.Tensor, counts: torch.Tensor,
    scale: float, softcap: float | None, parts: Parts, offsets: KeyOffsets[Any] | None = None,
) -> None:  # fmt: skip
    """As `attend_to_tokens_in_torch`, which defines the result, by one Triton kernel."""
    from hetero_kv.gpu_ops.triton_kernels import token_attention

    with torch.cuda.device(q.device):
        token_attention.attend_to_tokens(q, keys, values, slots, counts, scale, softcap, parts, offsets)


def attend_to_tokens_in_torch(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, counts: torch.Tensor,
    scale: float, softcap: float | None, parts: Parts, offsets: KeyOffsets[torch.Tensor] | None = None,
) -> None:  # fmt: skip
    """Attend to listed slots.

    Args:
        q: [batch, kv_heads * group, 1, k_dim].
        keys, values: [batch, kv_heads, n, dim] in the queries' dtype, or [..., bytes] uint8 of groups
            (`gpu_ops.slot_formats`), which are unpacked to that dtype.
        slots: [batch, kv_heads, n] int32, the slots to attend to.
        counts: [batch, kv_heads] int32, how many of each list.
        scale, softcap: as in `gpu_ops.tiled_attention`.
        parts: receives `TOKEN_PARTS` parts behind those of the window.
        offsets: added to the keys before these are rounded to the queries' dtype; None for whole keys.
    """
    (batch, kv_heads, _, group, v_dim), k_dim = parts.out.shape, q.shape[3]
    queries = q.reshape(batch, kv_heads, group, k_dim).float()
    own = slice(SPLITS, SPLITS + TOKEN_PARTS)
    parts.out[:, :, own], parts.lse[:, :, own] = 0.0, float("-inf")
    all_keys, all_values = unpacked(keys, k_dim), unpacked(values, v_dim)
    for row in range(batch):
        for head in range(kv_heads):
            at = slots[row, head, : int(counts[row, head])].long()
            if len(at):
                own_keys, own_values = all_keys[row, head, at], all_values[row, head, at]
                if offsets is not None:
                    blocks = offsets.tokens[row, head, : len(at)].long() // offsets.block_size
                    own_keys = own_keys + offsets.vectors[row, head, blocks, 0].float()
                own_keys, own_values = (part.to(q.dtype).float()[None, None] for part in (own_keys, own_values))
                found = tiled_attention(queries[row, head][None, None], own_keys, own_values, scale, softcap)
                parts.out[row, head, SPLITS], parts.lse[row, head, SPLITS] = (each[0, 0] for each in found)


def attend_to_stored(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor, tokens: torch.Tensor,
    counts: torch.Tensor, scale: float, softcap: float | None, parts: Parts,
) -> None:  # fmt: skip
    """As `attend_to_stored_in_torch`, which defines the result, by one Triton kernel that reads DRAM over the bus."""
    from hetero_kv.gpu_ops.triton_kernels import token_attention

    with torch.cuda.device(q.device):
        token_attention.attend_to_stored(q, keys, values, table, tokens, counts, scale, softcap, parts)


def attend_to_stored_in_torch(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor, tokens: torch.Tensor,
    counts: torch.Tensor, scale: float, softcap: float | None, parts: Parts,
) -> None:  # fmt: skip
    """Attend to listed tokens where they are stored, for which there are no slots.

    Args:
        keys: [blocks, kv_heads, block_size, k_dim], contiguous; page-locked in DRAM; converted to the queries' dtype.
        values: likewise, or [..., bytes] uint8 of groups.
        table: [batch, blocks of a sequence] int32, ids of the Context's blocks.
        tokens: [batch, kv_heads, n] int32, numbers in the Context.
        q, counts, scale, softcap: as for `attend_to_tokens_in_torch`.
        parts: receives `STORED_PARTS` parts behind those of the slots.
    """
    v_dim, size = parts.out.shape[4], keys.shape[2]
    own = slice(SPLITS + TOKEN_PARTS, SPLITS + TOKEN_PARTS + STORED_PARTS)
    parts.out[:, :, own], parts.lse[:, :, own] = 0.0, float("-inf")
    queries = q.reshape(*parts.out.shape[:2], -1, q.shape[3]).float()
    for row in range(len(queries)):
        for head in range(queries.shape[1]):
            listed = tokens[row, head, : int(counts[row, head])].long()
            if len(listed):
                place = table[row, listed // size].long(), head, listed % size
                found = keys[place], unpacked(values[place], v_dim)
                own_keys, own_values = (each.to(q.dtype).float()[None, None] for each in found)
                attended = tiled_attention(queries[row, head][None, None], own_keys, own_values, scale, softcap)
                parts.out[row, head, own.start], parts.lse[row, head, own.start] = (each[0, 0] for each in attended)


def attend_to_rest(
    weights: torch.Tensor, masses: torch.Tensor, value_means: Memory, number: torch.Tensor, parts: Parts
) -> torch.Tensor:
    """As `attend_to_rest_in_torch`, which defines the result, by one Triton kernel."""
    from hetero_kv.gpu_ops.triton_kernels import token_attention

    with torch.cuda.device(weights.device):
        return token_attention.attend_to_rest(weights, masses, value_means, number, parts)


def attend_to_rest_in_torch(
    weights: torch.Tensor, masses: torch.Tensor, value_means: torch.Tensor, number: torch.Tensor, parts: Parts
) -> torch.Tensor:
    """Let the mean values of blocks count for the tokens that are not attended to, as `cpu_ops.residual_attention`.

    Args:
        weights, masses: [batch, kv_heads, group, capacity] float32 (`estimated_masses.BlockMasses`), of these tokens.
        value_means: [batch, kv_heads, capacity, v_dim], or [..., bytes] uint8 of groups (`gpu_ops.slot_formats`).
        number: [1] or [batch] int64, the blocks that there are.
        parts: receives `REST_PARTS` parts, the last ones.

    Returns the log-sum-exp of the masses, [batch, kv_heads, REST_PARTS, group] float32, in parts.
    """
    behind = torch.arange(weights.shape[3], device=weights.device) >= by_row(number, 4)
    weights, masses = (each.masked_fill(behind, float("-inf")) for each in (weights, masses))
    lse = weights.logsumexp(dim=3)
    shares = (weights - lse.masked_fill(lse == float("-inf"), 0.0)[..., None]).exp()
    first = parts.out.shape[2] - REST_PARTS
    parts.out[:, :, first:], parts.lse[:, :, first:] = 0.0, float("-inf")
    parts.out[:, :, first] = shares @ unpacked(value_means, parts.out.shape[4])
    parts.lse[:, :, first] = lse
    found = torch.full_like(parts.lse[:, :, first:], float("-inf"))
    found[:, :, 0] = masses.logsumexp(dim=3)
    return found


def sum_masses(lse: torch.Tensor, rest: torch.Tensor, shares: torch.Tensor) -> None:
    """As `sum_masses_in_torch`, which defines the result, by one Triton kernel."""
    from hetero_kv.gpu_ops.triton_kernels import token_attention

    with torch.cuda.device(lse.device):
        token_attention.sum_masses(lse, rest, shares)


def sum_masses_in_torch(lse: torch.Tensor, rest: torch.Tensor, shares: torch.Tensor) -> None:
    """The share of the attention that window and chosen tokens have by estimate, a mean over each group.

    Args:
        lse: of `Parts`, in which as many of the last ones as `rest` has do not count.
        rest: [batch, kv_heads, parts, group], the log-sum-exp of what is estimated; as from `attend_to_rest_in_torch`.
        shares: [batch * kv_heads] float32, written.
    """
    attended = lse[:, :, : -rest.shape[2]].logsumexp(dim=2)
    every = torch.logaddexp(attended, rest.logsumexp(dim=2))
    shares.copy_((attended - every).exp().mean(dim=2).flatten())
