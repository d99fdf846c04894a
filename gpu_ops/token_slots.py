"""Single tokens that a decode step attends to, in slots on a GPU: missing ones are found and fetched without the host.

Unlike `gpu_ops.resident_slots`, a list's length is a number on the device, and a list has thousands of tokens. A table
says which slot a token was in last, so that none is searched for. Tokens that are not chosen stay in their slots until
others need these, the oldest first.
"""

from __future__ import annotations

from typing import Any, Generic, NamedTuple

import torch

from hetero_kv.gpu_ops.row_memory import AnyMemory, Memory

NONE = -1


class TokenSlots(NamedTuple, Generic[AnyMemory]):
    """Which token is in which slot; contiguous.

    Attributes:
        ids: [batch, kv_heads, n] int32, the token in each slot; -1 for none.
        slot_of: [batch, kv_heads, capacity] int32, the slot that each token was in last, which another one may have by
            now.
        following: [batch, kv_heads] int32, the slot from which on free ones are looked for.
    """

    ids: AnyMemory
    slot_of: AnyMemory
    following: AnyMemory

    @classmethod
    def empty(
        cls, batch: int, kv_heads: int, count: int, capacity: int, device: torch.device
    ) -> TokenSlots[torch.Tensor]:
        """`count` empty slots per kv head, for tokens of sequences of up to `capacity` tokens."""

        def whole(*shape: int) -> torch.Tensor:
            return torch.zeros(batch, kv_heads, *shape, dtype=torch.int32, device=device)

        return TokenSlots(whole(count).fill_(NONE), whole(capacity), whole())


def place_tokens(
    slots: TokenSlots[Any], chosen: torch.Tensor, counts: torch.Tensor, missed: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `place_tokens_in_torch`, which defines the result, by one Triton kernel."""
    from hetero_kv.gpu_ops.triton_kernels import token_slots

    with torch.cuda.device(chosen.device):
        return token_slots.place(slots, chosen, counts, missed)


def place_tokens_in_torch(
    slots: TokenSlots[torch.Tensor], chosen: torch.Tensor, counts: torch.Tensor, missed: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Assign slots to chosen tokens that are in none; `slots` is updated.

    Args:
        chosen: [batch, kv_heads, n] int32, distinct tokens; as many as there are slots, or fewer.
        counts: [batch, kv_heads] int32, tokens of each list; others are padding.
        missed: [batch * kv_heads] int32, receives the number of tokens that were in no slot.

    Returns, each [batch, kv_heads, n] int32: the slot of each chosen token; the missing tokens, in the order of
    `chosen`; and their slots. Behind the last one the numbers are undefined.
    """
    at, misses, into = (torch.full_like(chosen, NONE) for _ in range(3))
    size = slots.ids.shape[2]
    for row in range(chosen.shape[0]):
        for head in range(chosen.shape[1]):
            own, ids = chosen[row, head, : int(counts[row, head])].long(), slots.ids[row, head]
            slot = slots.slot_of[row, head, own].long()
            is_hit = ids[slot] == own
            stays = torch.zeros(size, dtype=torch.bool)
            stays[slot[is_hit]] = True
            # From the slot behind the newest one on, and then from the first.
            order = (torch.arange(size) + int(slots.following[row, head])) % size
            lacking = own[~is_hit]
            new = order[~stays[order]][: len(lacking)]
            slot[~is_hit] = new
            ids[new], slots.slot_of[row, head, lacking] = lacking.int(), new.int()
            at[row, head, : len(own)] = slot.int()
            misses[row, head, : len(new)], into[row, head, : len(new)] = lacking.int(), new.int()
            missed[row * chosen.shape[1] + head] = len(new)
            if len(new):
                slots.following[row, head] = (new[-1] + 1) % size
    return at, misses, into


def fetch_tokens(
    stored: torch.Tensor, table: torch.Tensor, misses: torch.Tensor, into: torch.Tensor, missed: torch.Tensor,
    out: Memory,
) -> None:  # fmt: skip
    """As `fetch_tokens_in_torch`, which defines the result, by one Triton kernel that reads `stored` over the bus."""
    from hetero_kv.gpu_ops.triton_kernels import token_slots

    with torch.cuda.device(table.device):
        token_slots.fetch(stored, table, misses, into, missed, out)


def fetch_tokens_in_torch(
    stored: torch.Tensor, table: torch.Tensor, misses: torch.Tensor, into: torch.Tensor, missed: torch.Tensor,
    out: torch.Tensor,
) -> None:  # fmt: skip
    """Write the stored vectors of missing tokens into their slots, converted to the slots' dtype.

    Args:
        stored: [blocks, kv_heads, block_size, dim], contiguous; page-locked in DRAM.
        table: [batch, blocks of a sequence] int32, ids of the Context's blocks.
        misses, into, missed: from `place_tokens_in_torch`.
        out: [batch, kv_heads, slots, dim], contiguous.
    """
    size, (batch, kv_heads) = stored.shape[2], misses.shape[:2]
    for row in range(batch):
        for head in range(kv_heads):
            count = int(missed[row * kv_heads + head])
            tokens, slots = (each[row, head, :count].long() for each in (misses, into))
            blocks = table[row, tokens // size].long()
            out[row, head, slots] = stored[blocks, head, tokens % size].to(out.dtype)
