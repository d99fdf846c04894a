"""How a ShadowKV layer saves and restores its state apart from the blocks of values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hetero_kv.adapter.rotary_table import RotaryTable
from hetero_kv.engine.saved_part import RestoreTarget, SavedPart
from hetero_kv.families.shadowkv.outlier_chunks import Outliers
from hetero_kv.families.shadowkv.resident_chunks import ResidentChunks
from hetero_kv.families.shadowkv.statistics import LowRankStatistics

if TYPE_CHECKING:
    from hetero_kv.families.shadowkv.layer import LowRankLayer

_CPU = torch.device("cpu")


def saved(layer: LowRankLayer) -> SavedPart:
    """Returns the layer's saved part; see FamilyLayer."""
    counted, context, factors = layer.counted, layer.context, layer.factors
    part = SavedPart(
        numbers={
            "context": context.length,
            "hits": counted.hits,
            "choices": counted.choices,
            "factored": counted.factored,
            "recall": list(counted.recall),
            "read": list(layer.read),
        }
    )
    part.put(outside=counted.outside, energy=counted.energy, basis=factors.basis)
    if factors.rotary is not None:
        part.shared["rotary"] = factors.rotary
    if context.length:
        assert context.outliers is not None
        residents = context.outliers.residents
        part.put(coefficients=factors.coefficients.entries, landmarks=layer.landmarks.entries)
        part.put(outlier_ids=context.outliers.ids, cosines=context.outliers.cosines, slots=residents.ids)
        part.put(resident_keys=residents.all_keys, resident_values=residents.all_values)
    if len(layer.recent_keys):
        part.put(recent_keys=layer.recent_keys.entries, recent_values=layer.recent_values.entries)
    return part


def restore(
    layer: LowRankLayer, part: SavedPart, target: RestoreTarget
) -> tuple[int, Outliers | None, LowRankStatistics]:
    """Restore a layer; see FamilyLayer. Returns the Context's length, its outliers, and the counts."""
    length, chunk_size = layer.group.length, layer.chunk_size
    end = part.integer("context", 0, length // chunk_size * chunk_size)
    if end % chunk_size or end != layer.group.sequences[0].tables[layer.layout].length:
        raise part.wrong(f"context is {end}, which does not match its values")
    dim, device = target.keys.shape[3], target.keys.device
    layer.factors.rotary = target.shared(part, "rotary", lambda saved: RotaryTable.restored(saved, dim, device))
    layer.read = part.tally("read")
    layer.have_pool(target.values)
    rotary = layer.factors.rotary
    if rotary is not None and len(rotary) < length:
        raise part.wrong("the rotation of some tokens is missing")
    outliers = None
    if end:
        if rotary is None:
            raise part.wrong("the rotation of the Context is missing")
        _restore_factors(layer, part, target, end)
        outliers = _restored_outliers(part, target, end // chunk_size, chunk_size)
    if length - end:
        layer.recent_keys.append(part.like("recent_keys", target.keys, length - end))
        layer.recent_values.append(part.like("recent_values", target.values, length - end))
    return end, outliers, _restored_statistics(part, len(target.keys), device)


def _restore_factors(layer: LowRankLayer, part: SavedPart, target: RestoreTarget, end: int) -> None:
    rows, kv_heads, _, dim = target.keys.shape
    dtype, device = target.keys.dtype, target.keys.device
    layer.factors.basis = basis = part.tensor("basis", (rows, kv_heads, None, dim), dtype, device)
    if not 0 < basis.shape[2] <= kv_heads * dim:
        raise part.wrong(f"basis has rank {basis.shape[2]}")
    layer.factors.coefficients.append(part.tensor("coefficients", (rows, end, basis.shape[2]), dtype, device))
    layer.landmarks.append(part.tensor("landmarks", (rows, kv_heads, end // layer.chunk_size, dim), dtype, device))


def _restored_outliers(part: SavedPart, target: RestoreTarget, chunks: int, chunk_size: int) -> Outliers:
    rows, kv_heads, _, dim = target.keys.shape
    ids = part.indices("outlier_ids", (rows, kv_heads, None), torch.int64, chunks).to(target.keys.device)
    cosines = part.tensor("cosines", ids.shape, torch.float32, target.keys.device)
    slots = part.tensor("slots", (rows, kv_heads, None), torch.int64, _CPU)
    if slots.numel() and (int(slots.min()) < -1 or int(slots.max()) >= chunks):
        raise part.wrong("slots hold chunks that do not exist")
    # Outliers, slots, and a scratch chunk.
    total = ids.shape[2] + slots.shape[2] + 1
    keys = part.tensor("resident_keys", (rows, kv_heads, total, chunk_size, dim), target.keys.dtype, target.keys.device)
    shape = rows, kv_heads, total, chunk_size, target.values.shape[3]
    values = part.tensor("resident_values", shape, target.values.dtype, target.values.device)
    return Outliers(ids, cosines, ResidentChunks.restored(ids.shape[2], slots, keys, values))


def _restored_statistics(part: SavedPart, rows: int, device: torch.device) -> LowRankStatistics:
    choices = part.integer("choices")
    outside = energy = None
    if part.has("energy"):
        outside, energy = (part.tensor(name, (rows,), torch.float64, device) for name in ("outside", "energy"))
    counts = part.integer("hits", 0, choices), choices
    return LowRankStatistics(*counts, outside, energy, part.integer("factored"), part.tally("recall"))
