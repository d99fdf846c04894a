"""Saves and restores the state that a retrieval layer has besides its blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from hetero_kv.engine.saved_part import SavedPart
from hetero_kv.families.retrieval.pending_queries import NO_PENDING_QUERIES, PendingQueries
from hetero_kv.families.retrieval.state import SELECTED_AT, SELECTIONS, RetrievalState

if TYPE_CHECKING:
    from hetero_kv.families.retrieval.layer import RetrievalLayer

_TALLIES = ("recall", "share", "blocks")
_CPU = torch.device("cpu")


def saved(layer: RetrievalLayer) -> SavedPart:
    """See FamilyLayer."""
    state, part = layer.state, SavedPart()
    part.numbers = {name: list(getattr(state, name)) for name in _TALLIES} | {
        "read": list(layer.read),
        "preselected_end": state.preselected_end,
        "open_start": state.open_start,
        "scale": layer.scale,
        "softcap": layer.softcap,
    }
    candidates = None if state.candidates is None else torch.from_numpy(state.candidates)
    part.put(candidates=candidates, accumulated=state.accumulated)
    if layer.pending.count:
        queries, lse = layer.pending.stacked()
        part.put(queries=torch.from_numpy(queries), lse=torch.from_numpy(lse))
    if layer.window is not None:
        keys, values = layer.window_in_use
        part.put(window_keys=keys, window_values=values)
    return part


def restored_state(layer: RetrievalLayer, part: SavedPart, rows: int, kv_heads: int) -> RetrievalState:
    """The saved state. Raises DamagedContextError if it refers to blocks or tokens that do not exist."""
    length, layout = layer.group.length, layer.layout
    context = layout.context_blocks(length)
    end = part.integer("preselected_end", 0, context)
    open_start = part.integer("open_start", 0, max(length, layout.sink_blocks * layout.block_size))
    candidates = accumulated = None
    if part.has("candidates"):
        found = part.indices("candidates", (rows, None, None), torch.int32, end).numpy()
        if found.shape[1] not in (1, kv_heads) or not _ascends(found):
            raise part.wrong("candidates are not valid block choices")
        candidates = np.ascontiguousarray(found)
    if part.has("accumulated"):
        accumulated = part.tensor("accumulated", (rows, kv_heads, None), torch.float32, _CPU)
        if accumulated.shape[2] > max(0, length - open_start):
            raise part.wrong("accumulated has more tokens than there are in unfinalized blocks")
    recall, share, blocks = (part.tally(name) for name in _TALLIES)
    return RetrievalState(None, candidates, end, open_start, accumulated, recall, share, blocks)


def restored_pending_queries(part: SavedPart, rows: int, kv_heads: int, k_dim: int, most: int) -> PendingQueries:
    """The saved pending queries, at most `most`. Raises DamagedContextError for more, or for wrong shapes."""
    if not part.has("queries"):
        return NO_PENDING_QUERIES
    queries = part.tensor("queries", (rows, None, None, k_dim), torch.float32, _CPU)
    heads, count = queries.shape[1:3]
    lse = part.tensor("lse", (rows, heads, count), torch.float32, _CPU)
    if heads % kv_heads or not 0 < count <= most:
        raise part.wrong(f"queries are {count} of {heads} heads")
    pending = NO_PENDING_QUERIES
    for at in range(count):
        pending = pending.grown(queries[:, :, at].contiguous().numpy(), lse[:, :, at].contiguous().numpy())
    return pending


def restored_resident_blocks(layer: RetrievalLayer, part: SavedPart, rows: int, kv_heads: int) -> torch.Tensor:
    """The saved blocks in slots, [rows, kv_heads, slots] int64; negative for none.

    Raises DamagedContextError unless each is a block of the Context, and in one slot.
    """
    ids = part.tensor("resident_blocks", (rows, kv_heads, None), torch.int64, _CPU)
    ordered = ids.sort(dim=2).values
    is_twice = (ordered.diff(dim=2) == 0) & (ordered[:, :, 1:] >= 0)
    if bool(is_twice.any()) or bool((ids >= layer.layout.context_blocks(layer.group.length)).any()):
        raise part.wrong("blocks in slots are not distinct blocks of the Context")
    return ids


def require_sound_selections(layer: RetrievalLayer, part: SavedPart) -> None:
    """Raise DamagedContextError unless the selections shared by layers of this layout are blocks of the Context."""
    shared, layout, rows = layer.group.shared, layer.layout, len(layer.group.sequences)
    selections, selected_at = shared.get(SELECTIONS, {}), shared.get(SELECTED_AT, {})
    if selections.keys() != selected_at.keys():
        raise part.wrong("the step at which blocks were selected is missing")
    for key, positions in selections.items():
        if tuple(key[1:4]) != (layout.block_size, layout.sink_blocks, layout.local_len):
            continue
        when, seen = selected_at[key], layout.context_blocks(layer.group.length)
        is_sound = (
            positions.dtype == np.int32
            and positions.ndim == 3
            and len(positions) == rows
            and when.shape == (rows, 2)
            and when.dtype == np.int64
            and np.all((when >= 0) & (when[:, :1] <= seen))
            # Lists of different lengths are filled up with numbers below 0.
            and np.all((positions >= -1) & (positions < when[:, :1, None]))
        )
        if not is_sound:
            raise part.wrong("selected blocks are not in the Context")


def _ascends(positions: np.ndarray) -> bool:
    return bool(np.all(np.diff(positions, axis=2) > 0))
