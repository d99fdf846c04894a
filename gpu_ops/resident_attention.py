"""A decoded token's attention on a GPU to its window and to blocks in slots, of which the host need not know anything.

Where the token is, and where its recent window begins, are numbers on the device, so that one captured launch serves
every token.
"""

from __future__ import annotations

from typing import Any

import torch

from hetero_kv.gpu_ops.row_memory import Memory
from hetero_kv.gpu_ops.slot_formats import Slots, unpacked
from hetero_kv.gpu_ops.tiled_attention import tiled_attention
from hetero_kv.gpu_ops.window_step import SPLITS

#: What the host tells the device of a token, int64: its position, the first position of the recent window, and the
#: number of blocks before that window and after the attention sink.
NUMBERS = 3
CONTEXT = 2


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window: tuple[Memory, Memory],
    initial: int,
    ids: Memory,
    slots: Slots[Any],
    numbers: torch.Tensor,
    scale: float,
    softcap: float | None,
    sent: tuple[torch.Tensor, torch.Tensor],
    further: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `attend_in_torch`, which defines the result, by one Triton kernel."""
    from hetero_kv.gpu_ops.triton_kernels import resident_attention

    q, k, v = (part if part.stride(3) == 1 else part.contiguous() for part in (q, k, v))
    places = window, initial, ids, slots, numbers
    with torch.cuda.device(q.device):
        return resident_attention.attend(q, k, v, *places, scale, softcap, sent, SPLITS, further)


def attend_in_torch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window: tuple[torch.Tensor, torch.Tensor],
    initial: int,
    ids: torch.Tensor,
    slots: Slots[torch.Tensor],
    numbers: torch.Tensor,
    scale: float,
    softcap: float | None,
    sent: tuple[torch.Tensor, torch.Tensor],
    splits: int = SPLITS,
    further: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Put a token into its window, and attend to the window and to the occupied slots, in parts.

    Args:
        q: [batch, kv_heads * group, 1, k_dim].
        k, v: [batch, kv_heads, 1, dim], the token's key and value.
        window: keys and values [batch, kv_heads, capacity, dim], contiguous: `initial` places for the first tokens,
            and a ring of the others for the newest ones.
        ids: [batch, kv_heads, n] int64, the block in each slot; negative for none.
        slots: the blocks; packed ones are unpacked to the queries' dtype.
        numbers: [NUMBERS] or [batch, NUMBERS] int64 on the device.
        scale, softcap: as in `gpu_ops.tiled_attention`.
        sent: receives key and value, in their shapes, as float32; contiguous.
        splits: parts that the window is divided into; the slots are divided into as many, where there are any.
        further: parts behind these, which other kernels write.

    Returns each part's attention [batch, kv_heads, parts, group, v_dim] and its log-sum-exp [batch, kv_heads, parts,
    group], both float32; -inf for a part without keys.
    """
    batch, heads, _, k_dim = q.shape
    kv_heads, (keys, values) = k.shape[1], window
    for target, part in zip(sent, (k, v), strict=True):
        target.copy_(part)
    queries = q.reshape(batch, kv_heads, heads // kv_heads, k_dim).float()
    parts_in_all = splits * (2 if ids.shape[2] else 1) + further
    out = queries.new_zeros(batch, kv_heads, parts_in_all, queries.shape[2], v.shape[3])
    lse = torch.full(out.shape[:4], float("-inf"))
    for row, (past, local_start, _) in enumerate(numbers.expand(batch, NUMBERS).tolist()):
        at, ring = (
            [*range(min(initial, past + 1)), *range(max(local_start, initial), past + 1)],
            keys.shape[2] - initial,
        )
        at = [place if place < initial else initial + (place - initial) % ring for place in at]
        # The last one is the token's own.
        keys[row, :, at[-1]], values[row, :, at[-1]] = k[row, :, 0], v[row, :, 0]
        for place, own in enumerate(torch.tensor(at).split(-(-len(at) // splits))):
            of_keys, of_values = keys[row : row + 1, :, own], values[row : row + 1, :, own]
            attended = tiled_attention(queries[row : row + 1], of_keys, of_values, scale, softcap)
            out[row, :, place], lse[row, :, place] = (each[0] for each in attended)
    if ids.shape[2]:
        found = _attention_to_slots(queries, ids, slots, v.shape[3], scale, softcap, q.dtype)
        out[:, :, splits], lse[:, :, splits] = found
    return out, lse


def _attention_to_slots(
    queries: torch.Tensor, ids: torch.Tensor, slots: Slots[torch.Tensor], v_dim: int, scale: float,
    softcap: float | None, dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    keys, values = unpacked(slots.keys, queries.shape[3]), unpacked(slots.values, v_dim)
    if slots.offsets is not None:
        keys = keys + slots.offsets.float()
    keys, values = (part.to(dtype).float().flatten(2, 3) for part in (keys, values))
    scores = queries @ keys.mT * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    is_empty = (ids < 0).repeat_interleave(slots.keys.shape[3], dim=2)[:, :, None]
    scores = scores.masked_fill(is_empty, float("-inf"))
    lse = scores.logsumexp(dim=3)
    weights = (scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None]).exp()
    return weights @ values, lse
