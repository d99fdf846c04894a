"""Decode on a GPU: chosen, resident and missing chunks are determined there; the host never waits (section 4.2).

Lists of missing chunks have the length of the choice, so no size is read back. A kernel reads the missing values from
page-locked DRAM over the bus, on a side stream, while attention to Recent and key reconstruction run.
"""

from __future__ import annotations

import torch

from hetero_kv.adapter.bridge import AttentionCall
from hetero_kv.engine.step import Step
from hetero_kv.families.shadowkv.layer import LowRankLayer
from hetero_kv.families.shadowkv.resident_chunks import ResidentChunks
from hetero_kv.gpu_ops.block_choice import best_blocks, block_scores
from hetero_kv.gpu_ops.kernel_choice import runs_triton
from hetero_kv.gpu_ops.rebuild import rebuild_into
from hetero_kv.gpu_ops.resident_slots import fetch, placed
from hetero_kv.gpu_ops.side_stream import joined, on_side_stream


def supports(layer: LowRankLayer, keys: torch.Tensor) -> bool:
    """Whether the kernels can load chunks for this layer: a GPU that Triton supports, and mapped values."""
    return runs_triton(keys) and layer.values_are_mapped()


def chosen(layer: LowRankLayer, call: AttentionCall, count: int) -> torch.Tensor:
    """As `landmarks.chosen_chunks`, of a layer with a Context, by two Triton kernels."""
    assert layer.context.outliers is not None
    outliers, vectors = layer.context.outliers.ids, layer.landmarks.entries[:, :, :, None]
    if not count:
        return outliers[:, :, :0]
    scores = block_scores(call.q, vectors, layer.chunks, False, call.scale, call.softcap, outliers)
    return best_blocks(scores, layer.chunks, count, largest=True, softmax=True)


class ChunkLoading:
    """Loads chosen chunks into the slots: starts to fetch values when constructed, rebuilds keys in `finished`.

    Use it within `joined_on_error`. This object and the step keep alive what the side stream reads.

    Args:
        chosen: the chunks to load, [batch, kv_heads, n] int64, distinct within a head.
    """

    def __init__(self, layer: LowRankLayer, step: Step, chosen: torch.Tensor) -> None:
        assert layer.context.outliers is not None
        self._layer, self._residents = layer, layer.context.outliers.residents
        device, count = chosen.device, chosen.shape[2]
        residents = self._residents
        residents.provide(count, device)
        if not count:
            return
        missed = layer.missed.row(chosen.shape[0] * chosen.shape[1], device)
        residents.ids, self._misses, self._into = placed(residents.ids, chosen, missed)
        table = step.table_on(device, layer.layout)
        raw = None if layer.value_storage.is_plain else _raw_values(layer, self._misses)
        with on_side_stream(device):
            _fetch_values(layer, residents, table, self._misses, self._into, raw)

    def finished(self) -> ResidentChunks:
        """Returns the resident chunks, valid for work queued from now on."""
        residents, factors = self._residents, self._layer.factors
        if residents.ids.shape[2]:
            assert factors.basis is not None
            assert factors.rotary is not None
            rotary = factors.rotary
            key_inputs = factors.coefficients.entries, factors.basis, rotary.cos, rotary.sin, rotary.rotation.layout
            rebuild_into(*key_inputs, self._misses, self._into, residents.key_slots)
            joined(residents.value_slots)
        return residents


def _raw_values(layer: LowRankLayer, misses: torch.Tensor) -> torch.Tensor:
    """A buffer for missing chunks in their storage format, one after the other."""
    assert layer.pool is not None
    stored = layer.pool.values
    return torch.empty(*misses.shape, *stored.shape[2:], dtype=stored.dtype, device=misses.device)


def _fetch_values(
    layer: LowRankLayer, residents: ResidentChunks, table: torch.Tensor, misses: torch.Tensor, into: torch.Tensor,
    raw: torch.Tensor | None,
) -> None:  # fmt: skip
    """Read missing values from DRAM into their slots, through `raw` if they are quantized."""
    assert layer.pool is not None
    stored, slots = layer.pool.values, residents.value_slots
    if raw is None:
        fetch(stored, table, misses, into, slots)
        return
    raw.record_stream(torch.cuda.current_stream(raw.device))
    fetch(stored, table, misses, into, raw)
    is_new = torch.zeros_like(misses, dtype=torch.bool)
    # Entries that are no misses go to one extra slot, which is cut off.
    is_new = torch.nn.functional.pad(is_new, (0, 1)).scatter_(2, into.masked_fill(into < 0, misses.shape[2]), True)
    decoded = layer.value_storage.decode(raw).to(slots.dtype)
    slots.copy_(torch.where(is_new[..., :-1, None, None], decoded, slots))
